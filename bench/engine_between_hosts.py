"""How much communication between hosts does a training step hide? Part of `step_time.py --engine`.

Two emulated hosts (network namespaces) with links of 1 Gbit/s train the residual CNN of
step_time.py (11 M parameters, batch 4) with a rank each, a core per rank, in these forms:

    none        DistributedDataParallel with a hook that communicates nothing
    ddp         DistributedDataParallel on gloo
    allreduce   Paceline's engine, which overlaps; sharded likewise
    blocking    sharded, with nothing overlapped
    SC-B ...    S-Caffe's three designs, as in step_time.py

Blocks of steps of the forms take turns, each counted with its slower rank. Then every form trains
some steps under Paceline's recorder, a run each, and what was hidden follows from its trace. On the
run's clock, for each rank and step::

    on the wire    from when the last rank has entered a collective until all have its result; the
                   union over collectives: G of those issued in the backward pass (gradients), P of
                   those issued between it and the next forward pass (parameters)
    computing      B = the backward pass, F = the forward pass and the loss that follow P, each
                   without the intervals in which the main thread waits for a collective
    hideable       min(G, B) + min(P, F)
    hidden         (G while computing B) + (P while computing F)

So all of both passes counts as what could hide something, also the backward pass before the first
gradient and the last layer's forward pass, which no schedule can use. `hidden / hideable` is the
ratio of the sums over ranks and steps. Time that gloo's threads take from the core of the rank
makes B and F longer than they are in a step that communicates nothing, which stands beside them.

    python bench/engine_between_hosts.py --json [--quick]       needs root and iproute2
"""

from __future__ import annotations

import itertools
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
import numpy as np
from harness import Report, await_ranks, options, tell

from paceline.core.allocator import KEEP

RATE_BITS_PER_S = 1e9
HOSTS, WARM, STEPS = 2, 3, 3
RECORDED = 8  # steps, of which all but the last count: it ends with the next one's forward pass
BAR = 0.8
DEADLINE_S = 600
# A process-id namespace for each: ranks of two hosts must not see each other's memory.
OWN_PIDS = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
FORMS = {  # mode, overlap of gradients, of parameters; None: DistributedDataParallel
    "none": None,
    "ddp": None,
    "allreduce": ("allreduce", True, True),
    "sharded": ("sharded", True, True),
    "blocking": ("sharded", False, False),
    "SC-B": ("root", False, False),
    "SC-OB": ("root", False, True),
    "SC-OBR": ("root", True, True),
}

QUICK_FORMS = ("none", "ddp", "allreduce", "sharded")


def main():
    given = options(__doc__, "--rank", "--only")
    if given.rank:
        rank, folder, rounds, *forms = given.rank
        return train(int(rank), Path(folder), int(rounds), forms)
    report = Report("engine_between_hosts", given.json)
    between_hosts(report, given.quick, given.only or ())
    return report.print()


def between_hosts(report, quick, only=()):
    """Add rows of each form and the bar to a report; nothing where hosts cannot be emulated."""
    forms = only or (QUICK_FORMS if quick else tuple(FORMS))
    if why := emulated_hosts.available():
        tell(f"between hosts: not measured: {why}")
        return
    network = emulated_hosts.network(HOSTS, RATE_BITS_PER_S)
    with network, tempfile.TemporaryDirectory() as folder:
        found = run_ranks(Path(folder), 1 if quick else 9, forms)
        traces = {form: hidden_of(Path(folder) / "runs" / form) for form in forms}
    for form, values in found.items():
        trace = traces[form]
        none_s = found["none"]["step_s"] if "none" in found else 0.0
        report.row(
            where=f"{HOSTS} hosts",
            model="cnn",
            form=form,
            step_ms=values["step_s"] * 1e3,
            steps_ms=[seconds * 1e3 for seconds in values["seconds"]],
            megabytes=values["bytes"] / 1e6,
            **{f"{name}_ms": seconds * 1e3 for name, seconds in trace.items()},
            hidden_share=share(trace),
            against_none=values["step_s"] / none_s if none_s else None,
        )
    if "sharded" in forms:
        name = "cnn, 2 hosts: sharded, hidden / hideable"
        report.bar(name, share(traces["sharded"]), BAR, at_least=True)


def share(trace):
    """Return the part of hideable communication that was hidden; None where there is none."""
    return trace["hidden"] / trace["hideable"] if trace["hideable"] else None


# --- the trace -----------------------------------------------------------------------------------


def hidden_of(run):
    """Return seconds per step of a recorded run, the mean over ranks and steps.

    A step is a backward pass and the forward pass after it: parameters return in between.
    """
    from paceline.trace.format.events import Kind
    from paceline.trace.merge.load import load_run

    trace = load_run(run)
    found = []
    for number, (rank, clock) in enumerate(zip(trace.ranks, trace.clocks, strict=True)):
        calls = trace.matches.calls[trace.matches.calls_of(number)]
        instances = trace.matches.instances[calls["instance"]]
        wire = np.stack([instances["last_ns"], instances["complete_ns"]], 1)
        waits, forwards, backwards = (
            np.stack([clock.to_run_ns(events["begin_ns"]), clock.to_run_ns(events["end_ns"])], 1)
            for events in map(rank.events_of, (Kind.WAIT, Kind.FORWARD, Kind.BACKWARD))
        )
        for own, following in itertools.pairwise(backwards):
            entered, (begin, end) = calls["enter_ns"], own
            gradients = union(wire[(entered >= begin) & (entered < end)])
            parameters = union(wire[(entered >= end) & (entered < following[0])])
            passes = (forwards[:, 0] >= end) & (forwards[:, 0] < following[0])
            backward, forward = without(own[None], waits), without(forwards[passes], waits)
            found.append(
                {
                    "gradients": length(gradients),
                    "parameters": length(parameters),
                    "backward": length(backward),
                    "forward": length(forward),
                    "hideable": min(length(gradients), length(backward))
                    + min(length(parameters), length(forward)),
                    "hidden": length(common(gradients, backward))
                    + length(common(parameters, forward)),
                }
            )
    return {name: statistics.mean(step[name] for step in found) / 1e9 for name in found[0]}


def union(intervals):
    """Return disjoint intervals, in order, that cover the same; shape [intervals, 2]."""
    merged = []
    for begin, end in sorted(intervals.tolist()):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        elif end > begin:
            merged.append([begin, end])
    return np.array(merged, dtype=np.int64).reshape(-1, 2)


def common(first, second):
    """Return what two sets of disjoint intervals have in common."""
    pairs = [
        (max(a, c), min(b, d))
        for a, b in first.tolist()
        for c, d in second.tolist()
        if max(a, c) < min(b, d)
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def without(intervals, holes):
    """Return the intervals without what the holes cover."""
    rest = []
    for begin, end in union(intervals).tolist():
        for first, last in common(union(holes), np.array([[begin, end]])).tolist():
            rest.append((begin, first))
            begin = last
        rest.append((begin, end))
    return union(np.array(rest, dtype=np.int64).reshape(-1, 2))


def length(intervals):
    return int((intervals[:, 1] - intervals[:, 0]).sum())


# --- the ranks -----------------------------------------------------------------------------------


def run_ranks(folder, rounds, forms):
    """Train on all emulated hosts; return of each form what rank 0 measured."""
    environ = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    started = []
    for rank in range(HOSTS):
        command = [sys.executable, __file__, "--rank", str(rank), str(folder), str(rounds), *forms]
        started.append(
            subprocess.Popen([*emulated_hosts.inside(rank), *OWN_PIDS, *command], env=environ)
        )
    await_ranks(started, DEADLINE_S)
    return json.loads((folder / "found.json").read_text())


def train(rank, folder, rounds, forms):
    """Train all forms as one rank, timed and then recorded; rank 0 writes what was measured."""
    import torch
    import torch.distributed as dist

    from paceline.launch import attach

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), HOSTS),
        rank=rank,
        world_size=HOSTS,
        timeout=timedelta(seconds=120),
    )
    steps = {form: steps_of(form, rank) for form in forms}
    for run in steps.values():
        run(WARM)
    found = {form: {"seconds": [], "bytes": 0.0} for form in forms}
    for number in range(rounds):
        for form, run in steps.items():
            dist.barrier()
            before, begin = emulated_hosts.sent_bytes(), time.perf_counter()
            run(STEPS)
            took = (time.perf_counter() - begin) / STEPS
            dist.barrier()
            sent = (emulated_hosts.sent_bytes() - before) / STEPS
            measured = torch.tensor([took, sent], dtype=torch.float64)
            dist.all_reduce(measured, dist.ReduceOp.MAX)
            found[form]["seconds"].append(float(measured[0]))
            found[form]["bytes"] = float(measured[1])
        if rank == 0:
            tell(f"between hosts: round {number + 1} of {rounds}")
    for form, run in steps.items():
        dist.barrier()
        (folder / "runs" / form / "trace").mkdir(parents=True, exist_ok=True)
        attach.start(folder / "runs" / form, rank, HOSTS)
        run(RECORDED if rounds > 1 else RECORDED // 2)
        attach.close()
    dist.barrier()
    if rank == 0:
        for values in found.values():
            values["step_s"] = statistics.median(values["seconds"])
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def steps_of(form, rank):
    """Return what trains some steps of a model in a form."""
    import step_time
    import torch
    import torch.distributed as dist

    make, given, loss_of = step_time.workload("cnn", rank)
    if FORMS[form] is None:
        model = step_time.wrapped(make(), dist.group.WORLD, form == "none")
        optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    else:
        model, optimizer = step_time.in_engine(make(), *FORMS[form])

    def run(count):
        for _ in range(count):
            model.zero_grad()
            loss_of(model(given)).backward()
            optimizer.step()
        if hasattr(model, "await_parameters"):
            model.await_parameters()

    return run


if __name__ == "__main__":
    sys.exit(main())
