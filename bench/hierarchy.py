"""All-reduce between hosts of a slow network: two levels against one, and float32 against bfloat16.

Hosts are emulated on this machine: each is a network namespace with a link of 1 Gbit/s (a token
bucket in both directions; see `emulated_hosts`), and a process-id namespace, so that its ranks
share memory with each other and with no rank of another host. Two hosts, then four, with two ranks
each. Needs root and iproute2.

    flat       gloo, which knows no hosts
    two-level  shared memory inside a host, gloo between the ranks that hold the same shard
    bfloat16   the same, with half the bytes of a float32 tensor on the wire
    chosen     what the backend does by itself with a table that `paceline probe --collectives`
               measured just before, on the same ranks

All forms take turns in one job, several calls at a turn (the ranks leave the barrier before it at
different times, which must not count with every call). A turn counts with its slowest rank, a row
is the median over rounds. `wire_ratio` is the time over that of the least bytes that a host must
send, 2 n (H-1)/H for n bytes on H hosts, at the link's nominal rate.

    sudo python bench/hierarchy.py --json [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import emulated_hosts
from harness import Report, options, tell

MIB = 1024 * 1024
HOST_RANKS = 2
RATE_BITS_PER_S = 1e9
SIZES = [16 * 1024, 64 * 1024, 256 * 1024, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
FORMS = ("flat", "two-level", "bfloat16", "chosen")
# Form -> settings of the backend; see paceline.collectives.options.
SETTINGS = {
    "two-level": {"FLAT_BELOW_BYTES": "0"},
    "bfloat16": {"FLAT_BELOW_BYTES": "0", "WIRE": "bfloat16"},
    "chosen": {"MACHINE": "machine.json"},  # in the job's folder
}
GAINS = {2: (1.4, 2.5), 4: (1.1, 2.0)}  # hosts -> least gain over flat: two-level, bfloat16


def main():
    given = options(__doc__, "--host", "--rank")
    if given.host:
        return run_host(*given.host)
    if given.rank:
        return run_rank(*given.rank)
    report = Report("hierarchy", given.json)
    if why := emulated_hosts.available():
        sys.exit(why)
    for hosts in (2, 4):
        with emulated_hosts.network(hosts, RATE_BITS_PER_S):
            times = run_job(hosts, given.quick)
        judge(report, hosts, times)
    return report.print()


def judge(report, hosts, times):
    """Write the rows and bars of one number of hosts; `times` are seconds by size and form."""
    two_level_gain, bfloat16_gain = GAINS[hosts]
    for size, forms in times.items():
        wire_s = 2 * size * (hosts - 1) / hosts * 8 / RATE_BITS_PER_S
        medians = {form: statistics.median(forms[form]) for form in FORMS}
        for form in FORMS:
            report.row(
                hosts=hosts,
                ranks=hosts * HOST_RANKS,
                size_bytes=size,
                form=form,
                time_ms=medians[form] * 1e3,
                fastest_ms=min(forms[form]) * 1e3,
                slowest_ms=max(forms[form]) * 1e3,
                gain_over_flat=medians["flat"] / medians[form],
                wire_ratio=medians[form] / wire_s,
            )
        name = f"{hosts} hosts, {size // 1024} KiB"
        best = min(medians["flat"], medians["two-level"])
        report.bar(
            f"{name}: chosen / the better of flat and two-level", medians["chosen"] / best, 1.1
        )
        if size >= 4 * MIB:
            flat = medians["flat"]
            report.bar(f"{name}: two-level / wire bound", medians["two-level"] / wire_s, 1.15)
            report.bar(
                *(f"{name}: flat / two-level", flat / medians["two-level"], two_level_gain),
                at_least=True,
            )
            report.bar(
                *(f"{name}: flat / bfloat16", flat / medians["bfloat16"], bfloat16_gain),
                at_least=True,
            )


# --- the job -------------------------------------------------------------------------------------


def run_job(hosts, quick):
    """Run all ranks; return the seconds of each call, {size: {form: [seconds]}}."""
    with tempfile.TemporaryDirectory() as folder:
        mode = ["quick" if quick else "full"]
        run_hosts(hosts, folder, "probe", *mode)
        run_hosts(hosts, folder, "times", *mode)
        out = Path(folder) / "times.json"
        return {int(size): forms for size, forms in json.loads(out.read_text()).items()}


def run_hosts(hosts, folder, *own):
    """Run something on all ranks of all emulated hosts, in a folder."""
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, str(Path(__file__).resolve()), "--host"]
    started = [
        subprocess.Popen(
            [*emulated_hosts.inside(host), *command, str(host), str(hosts), *own], cwd=folder
        )
        for host in range(hosts)
    ]
    codes = [process.wait(timeout=1200) for process in started]
    if any(codes):
        sys.exit(f"{own[0]}: hosts ended with {codes}")


def run_host(host, hosts, what, mode):
    """Start the ranks of an emulated host, and wait for them."""
    if what == "probe":
        options = ["--quick"] * (mode == "quick") + ["--out", SETTINGS["chosen"]["MACHINE"]]
        command = [sys.executable, "-m", "paceline", "probe", "--collectives", *options]
    else:
        command = [sys.executable, __file__, "--rank"]
    started = []
    for rank in range(int(host) * HOST_RANKS, (int(host) + 1) * HOST_RANKS):
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "eth0",
            "RANK": str(rank),
            "WORLD_SIZE": str(int(hosts) * HOST_RANKS),
            "MASTER_ADDR": emulated_hosts.address_of(0),
            "MASTER_PORT": "29556",
        }
        own = [] if what == "probe" else [str(rank), hosts, mode]
        # The probe's table on stdout is not the benchmark's report.
        started.append(subprocess.Popen([*command, *own], env=environ, stdout=sys.stderr))
    return max(process.wait() for process in started)


def run_rank(rank, hosts, mode):
    """Time all forms at all sizes as one rank; rank 0 writes the times."""
    import torch
    import torch.distributed as dist

    rank, ranks = int(rank), int(hosts) * HOST_RANKS
    torch.set_num_threads(1)
    limit = timedelta(seconds=300)
    address = emulated_hosts.address_of(0)
    store = dist.TCPStore(address, 29555, ranks, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    groups = {"flat": dist.group.WORLD}
    for form, settings in SETTINGS.items():
        variables = {f"PACELINE_COLLECTIVES__{name}": value for name, value in settings.items()}
        os.environ.update(variables)
        groups[form] = dist.new_group(backend="paceline")
        for name in variables:
            del os.environ[name]
    quick = mode == "quick"
    sizes = SIZES[:6] if quick else SIZES
    times = {}
    for size in sizes:
        rounds = (5 if size <= 4 * MIB else 3) if quick else 9
        times[size] = measure(groups, size, rounds)
        if rank == 0:
            tell(f"{hosts} hosts, {size} bytes")
    if rank == 0:
        Path("times.json").write_text(json.dumps(times))
    dist.destroy_process_group()
    return 0


def measure(groups, size, rounds):
    """Return the seconds of an all-reduce by form, the slowest rank's; checks the sums."""
    import torch
    import torch.distributed as dist

    ranks = dist.get_world_size()
    tensor = torch.empty(size // 4)
    calls = 20 if size <= MIB else 3  # sums of ones stay powers of two: exact in bfloat16, too
    times = {form: [] for form in groups}
    for turn in range(rounds + 1):
        for form, group in groups.items():
            tensor.fill_(1.0)
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor, group=group)
            took = torch.tensor([(time.perf_counter() - begin) / calls])
            if not bool((tensor == float(ranks) ** calls).all()):
                raise AssertionError(f"{form}: a wrong sum")
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:  # the first warms up
                times[form].append(took.item())
    return times


if __name__ == "__main__":
    sys.exit(main())
