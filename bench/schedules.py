"""Which algorithm reduces fastest: predicted to 160 ranks, and measured on emulated hosts.

Predicted, on the links of a typical GPU cluster (not measured): reduce by binomial tree, chain,
chain-binomial and chain-chain (S-Caffe's hierarchical reduce) for 16 to 160 ranks; all-reduce by
ring, two-level and torus.

Measured, as root: four hosts with two ranks each, network namespaces with links of 1 Gbit/s. The
schedules and gloo's own reduce take turns in one job; Open MPI's reduce, and chain-chain over the
same MPI, in a job of their own, before and after. A call counts with its slowest rank. Beside each
time stands what the cost model predicts from a ping-pong over the same links. Eight ranks share the
cores of this machine, so that short messages take longer than on eight machines.

    sudo OPENMPI_MPIRUN=build/openmpi/bin/mpirun python bench/schedules.py --json [--quick]

`scripts/campaign mpi` installs that Open MPI; without it, gloo is the only peer.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import emulated_hosts
import numpy as np
from harness import Report, await_ranks, options, tell

from paceline.collectives.executor import ScheduleExecutor
from paceline.core.machine import Link, Quantity
from paceline.schedules import (
    Topology,
    binomial,
    chain,
    chain_binomial,
    chain_chain,
    groups_of,
    ring,
    schedule_s,
    torus,
    two_level_leader,
    two_level_sharded,
)

MIB = 1024 * 1024
HOSTS, HOST_RANKS, RATE_BITS_PER_S = 4, 2, 1e9
RANKS = HOSTS * HOST_RANKS
SIZES = (64 * 1024, MIB, 4 * MIB, 16 * MIB)
CHUNKS = (1, 4, 16, 64, 256)
TIMEOUT_S = 60
DEADLINE_S = 300


def main():
    if len(sys.argv) > 1 and sys.argv[1] in ("--gloo-rank", "--mpi-rank"):
        return run_rank(*sys.argv[1:])
    chosen = options(__doc__)
    report = Report("schedules", chosen.json)
    predict_reduce(report)
    predict_all_reduce(report)
    why = emulated_hosts.available()
    if why:
        tell(f"not measured: {why}")
        report.bar("chain-chain / binomial, 16 MiB on 4 x 2 ranks, time", None, 1.0, reason=why)
    else:
        measure(report, 3 if chosen.quick else 9)
    return report.print()


# --- predicted -----------------------------------------------------------------------------------


def link(level, latency_s, bandwidth_bytes_per_s, sharing="node"):
    return Link(
        level=level,
        latency_s=Quantity(value=latency_s, source="datasheet"),
        bandwidth_bytes_per_s=Quantity(value=bandwidth_bytes_per_s, source="datasheet"),
        sharing=sharing,
    )


def typical(ranks):
    """Return hosts of 8 GPUs on a network of 56 Gbit/s, as S-Caffe's cluster had them."""
    return Topology(
        hosts=groups_of(ranks, 8),
        inside=link("shared-memory", 8e-6, 10e9, "pair"),
        across=link("network", 3e-6, 6e9),
        reduction_s_per_byte=3 / 200e9,
    )


def predict_reduce(report):
    sizes = 2.0 ** np.arange(10, 29, 2)
    for ranks in (16, 32, 64, 160):
        best = best_times(ranks, typical(ranks), sizes)
        for i, size in enumerate(sizes):
            times = {name: float(seconds[i]) for name, seconds in best.items()}
            report.row(
                what="reduce, predicted",
                ranks=ranks,
                bytes=size,
                fastest=min(times, key=times.get),
                **{f"{name}_s": seconds for name, seconds in times.items()},
            )
    ratio = float(best["chain-chain"][-1] / best["binomial"][-1])
    report.bar("chain-chain / binomial, 256 MiB on 160 ranks, predicted time", ratio, 0.5)


def best_times(ranks, topology, sizes):
    """Return seconds by algorithm, with the best number of chunks for each size."""
    groups = topology.hosts
    options = {
        "binomial": [binomial("reduce", ranks)],
        "chain": [chain("reduce", ranks, chunks=c) for c in CHUNKS],
        "chain-binomial": [chain_binomial("reduce", groups, chunks=c) for c in CHUNKS],
        "chain-chain": [chain_chain("reduce", groups, chunks=c) for c in CHUNKS],
    }
    return {
        name: np.min([schedule_s(s, topology, sizes) for s in schedules], axis=0)
        for name, schedules in options.items()
    }


def predict_all_reduce(report):
    """On the cluster above, and on a torus whose dimensions have equal links of their own."""
    sizes = 2.0 ** np.arange(10, 29, 3)
    equal = link("torus", 3e-6, 6e9, "pair")
    for ranks, row in ((64, 8), (160, 8), (144, 12)):
        hosts = groups_of(ranks, row)
        schedules = (ring("all_reduce", ranks), two_level_sharded(hosts), torus(hosts))
        for name, topology in (
            ("cluster", typical(ranks)),
            ("torus", Topology(hosts=hosts, inside=equal, across=equal)),
        ):
            times = [schedule_s(schedule, topology, sizes) for schedule in schedules]
            for i, size in enumerate(sizes):
                report.row(
                    what="all-reduce, predicted",
                    links=name,
                    ranks=ranks,
                    bytes=size,
                    ring_s=float(times[0][i]),
                    sharded_s=float(times[1][i]),
                    torus_s=float(times[2][i]),
                )
    ratio = float(times[2][-1] / times[1][-1])
    report.bar("torus / two-level sharded, 256 MiB on 12 x 12 equal links, predicted", ratio, 1.0)


# --- measured ------------------------------------------------------------------------------------


def measure(report, rounds):
    mpirun = os.environ.get("OPENMPI_MPIRUN", "")
    jobs = [run_mpi, run_gloo, run_mpi] if mpirun else [run_gloo]
    times, predicted = {}, {}
    with emulated_hosts.network(HOSTS, RATE_BITS_PER_S), tempfile.TemporaryDirectory() as folder:
        for number, job in enumerate(jobs):
            result = job(Path(folder) / f"result-{number}.json", rounds)
            predicted |= result["predicted"]
            for name, by_size in result["seconds"].items():
                for size, seconds in by_size.items():
                    times.setdefault(name, {}).setdefault(int(size), []).extend(seconds)
    medians = {
        (name, size): statistics.median(seconds)
        for name, by_size in times.items()
        for size, seconds in by_size.items()
    }
    for (name, size), seconds in medians.items():
        model = predicted.get(name, {}).get(str(size))
        extra = {"predicted_s": model, "predicted_ratio": model / seconds} if model else {}
        report.row(what=f"{name}, 4 x 2 ranks", bytes=size, seconds=seconds, **extra)
    judge(report, medians, predicted)


def judge(report, medians, predicted):
    def fastest(name, size):
        return min(seconds for (n, s), seconds in medians.items() if s == size and name in n)

    large = SIZES[-1]
    for peer in ("reduce, binomial", "reduce, gloo's own", "reduce, Open MPI's own"):
        if (peer, large) in medians:
            ratio = fastest("chain-chain", large) / medians[peer, large]
            name = peer.removeprefix("reduce, ")
            report.bar(f"chain-chain / {name}, 16 MiB on 4 x 2 ranks, time", ratio, 1.0)
    ratios = [
        predicted[name][str(size)] / medians[name, size]
        for name in predicted
        for size in SIZES
        if size >= 4 * MIB
    ]
    error = statistics.median(abs(ratio - 1) for ratio in ratios)
    report.bar("predicted against measured from 4 MiB on, median error", error, 0.2)


def run_gloo(out, rounds):
    """Run a job of all ranks under gloo; return its result."""
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    own = [sys.executable, __file__, "--gloo-rank", str(out), str(rounds)]
    started = [
        subprocess.Popen([*emulated_hosts.inside(rank // HOST_RANKS), *own, str(rank)], env=environ)
        for rank in range(RANKS)
    ]
    await_ranks(started, DEADLINE_S)
    return json.loads(out.read_text())


def run_mpi(out, rounds):
    """Run a job of all ranks under Open MPI; return its result."""
    mpirun = Path(os.environ["OPENMPI_MPIRUN"]).absolute()
    prefix = mpirun.parent.parent
    agent = out.with_suffix(".sh")
    # Runs a command on the host with an address, for the launcher; its other words are options.
    agent.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$((${1##*.} - 1))\nshift\n"
        f"exec ip netns exec {emulated_hosts.PREFIX}n$host unshare -u "
        f'bash -c "hostname {emulated_hosts.PREFIX}n$host; $*"\n'
    )
    agent.chmod(0o755)
    places = ",".join(f"{emulated_hosts.address_of(h)}:{HOST_RANKS}" for h in range(HOSTS))
    settings = {"btl": "self,sm,tcp", "pml": "ob1", "btl_tcp_if_include": "eth0"}
    settings["mpi_yield_when_idle"] = "true"  # more ranks than cores
    command = [*emulated_hosts.inside(0), str(mpirun), "--prefix", str(prefix), "--host", places]
    command += ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", "eth0"]
    command += [word for name, value in settings.items() for word in ("--mca", name, value)]
    environ = {"MPI4PY_MPIABI": "openmpi", "OMP_NUM_THREADS": "1"}
    environ["MPI4PY_LIBMPI"] = str(prefix / "lib" / "libmpi.so")
    for name in environ:
        command += ["-x", name]
    for name in ("OMPI", "PRTE"):
        environ[f"{name}_ALLOW_RUN_AS_ROOT"] = environ[f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    command += [
        "--bind-to",
        "none",
        "-n",
        str(RANKS),
        sys.executable,
        str(Path(__file__).absolute()),
    ]
    command += ["--mpi-rank", str(out), str(rounds), "-"]
    done = subprocess.run(
        command,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.returncode:
        sys.exit(f"mpirun ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(out.read_text())


# --- one rank ------------------------------------------------------------------------------------


def run_rank(kind, out, rounds, rank):
    """Time each form for each size; rank 0 writes {"seconds": {form: {size: [s]}}, "predicted"}."""
    job = GlooJob(out, int(rank)) if kind == "--gloo-rank" else MpiJob()
    topology = measured_topology(job)
    groups = groups_of(RANKS, HOST_RANKS)
    schedules = [binomial("reduce", RANKS), chain("reduce", RANKS, chunks=16)]
    for make in (chain_binomial, chain_chain):
        schedules += [make("reduce", groups, chunks=chunks) for chunks in (4, 16)]
    schedules += [ring("all_reduce", RANKS), two_level_sharded(groups), two_level_leader(groups)]
    schedules += [torus(groups)]
    if kind == "--mpi-rank":
        schedules = [s for s in schedules if s.algorithm.startswith("chain-chain")]
    forms = {f"reduce, {job.name}'s own": job.reduce}
    predicted = {}
    for schedule in schedules:
        name = form_name(schedule, "" if kind == "--gloo-rank" else " over Open MPI")
        executor = ScheduleExecutor(schedule, job.transport)
        forms[name] = lambda buffer, run=executor.run: run(buffer, timeout_s=TIMEOUT_S)
        times = schedule_s(schedule, topology, SIZES)
        predicted[name] = dict(zip(map(str, SIZES), map(float, times), strict=True))
    seconds = {name: {} for name in forms}
    for size in SIZES:
        buffer = np.ones(size // 4, np.float32)
        for number in range(int(rounds) + 1):
            for name, call in forms.items():
                buffer.fill(1)
                job.barrier()
                begin = time.perf_counter()
                call(buffer)
                taken = time.perf_counter() - begin
                if number:  # the first one warms up
                    seconds[name].setdefault(size, []).append(taken)
    slowest = job.slowest(seconds)
    if job.transport.rank == 0:
        Path(out).write_text(json.dumps({"seconds": slowest, "predicted": predicted}))
    job.barrier()
    return 0


def form_name(schedule, where):
    operation = schedule.operation.replace("_", "-")
    chunks = f" {schedule.chunks} chunks" if schedule.algorithm.startswith("chain") else ""
    return f"{operation}, {schedule.algorithm}{chunks}{where}"


def measured_topology(job):
    """Return the links as a ping-pong between rank 0 and a rank of each level finds them."""
    figures = []
    for peer in (1, HOST_RANKS):
        short_s, long_s = ping_pong_s(job, peer, 1), ping_pong_s(job, peer, 4 * MIB)
        figures += [short_s, 4 * MIB / (long_s - short_s)]
    figures = job.from_rank_0(figures)
    return Topology(
        hosts=groups_of(RANKS, HOST_RANKS),
        inside=link("inside", *figures[:2]),
        across=link("across", *figures[2:]),
        reduction_s_per_byte=1e-10,
    )


def ping_pong_s(job, peer, size, rounds=5):
    """Return the median seconds of a message of `size` bytes between rank 0 and `peer`."""
    data, halves = np.ones(size, np.uint8), []
    for _ in range(rounds):
        job.barrier()
        begin = time.perf_counter()
        if job.transport.rank == 0:
            job.transport.exchange([(peer, data)], [], TIMEOUT_S)
            job.transport.exchange([], [(peer, data)], TIMEOUT_S)
        elif job.transport.rank == peer:
            job.transport.exchange([], [(0, data)], TIMEOUT_S)
            job.transport.exchange([(0, data)], [], TIMEOUT_S)
        halves.append((time.perf_counter() - begin) / 2)
    return statistics.median(halves)


class GlooJob:
    """What a rank needs of gloo."""

    name = "gloo"

    def __init__(self, out, rank):
        import torch
        import torch.distributed as dist

        from paceline.collectives.transports.torch_p2p import TorchTransport

        self.torch, self.dist = torch, dist
        store = f"file://{Path(out).with_suffix('.store')}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
        self.transport = TorchTransport()
        self.barrier = dist.barrier

    def reduce(self, buffer):
        self.dist.reduce(self.torch.from_numpy(buffer), 0)

    def from_rank_0(self, figures):
        values = self.torch.tensor(figures, dtype=self.torch.float64)
        self.dist.broadcast(values, 0)
        return values.tolist()

    def slowest(self, seconds):
        gathered = [None] * RANKS
        self.dist.all_gather_object(gathered, seconds)
        return worst(gathered)


class MpiJob:
    """What a rank needs of MPI."""

    name = "Open MPI"

    def __init__(self):
        # By name: a test imports what this script imports, and importing this starts MPI.
        module = importlib.import_module("paceline.collectives.transports.mpi")
        self.world = module.MPI.COMM_WORLD
        self.in_place = module.MPI.IN_PLACE
        self.transport = module.MpiTransport()
        self.barrier = self.world.Barrier

    def reduce(self, buffer):
        if self.transport.rank == 0:
            self.world.Reduce(self.in_place, buffer)
        else:
            self.world.Reduce(buffer, None)

    def from_rank_0(self, figures):
        return self.world.bcast(figures)

    def slowest(self, seconds):
        return worst(self.world.allgather(seconds))


def worst(ranks):
    """Return the longest time of each call over the ranks."""
    return {
        name: {
            size: np.max([rank[name][size] for rank in ranks], axis=0).tolist() for size in by_size
        }
        for name, by_size in ranks[0].items()
    }


if __name__ == "__main__":
    sys.exit(main())
