"""Runs every schedule over real processes, then lets rank 1 end in the middle of one.

    run_schedules.py torch STORE RANK RANKS HOW     HOW: finish, kill or stop
    mpiexec -n RANKS run_schedules.py mpi - - - HOW     HOW: finish or differ

Prints one line of JSON: how many runs were right, and the error of the last run.
"""

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
from support.schedule_cases import expected, inputs, schedules

from paceline.collectives.executor import ScheduleExecutor
from paceline.core.errors import RankLost, UsageError
from paceline.schedules import chain, ring

SIZES = (0, 1, 1013)
LARGE = 2_000_003
TIMEOUT_S = 60
SHORT_TIMEOUT_S = 2


def transport_of(kind, store, rank, ranks):
    if kind == "mpi":
        from paceline.collectives.transports.mpi import MpiTransport

        return MpiTransport()
    import torch.distributed as dist

    from paceline.collectives.transports.torch_p2p import TorchTransport

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks)
    )
    return TorchTransport()


def make_buffer(kind, values):
    """Return arrays and tensors by turns: each transport takes both."""
    if len(values) % 2 == 0:
        return values.copy()
    import torch

    return torch.from_numpy(values.copy())


def run_all(kind, transport):
    right = 0
    for schedule in schedules(transport.ranks):
        executor = ScheduleExecutor(schedule, transport, scratch_bytes=2048)
        for size in SIZES:
            values = inputs(transport.ranks, size)
            buffer = make_buffer(kind, values[transport.rank])
            executor.run(buffer, timeout_s=TIMEOUT_S)
            place, wanted = expected(schedule, values, transport.rank)
            assert np.array_equal(np.asarray(buffer)[place], wanted), (schedule.algorithm, size)
            right += 1
    run_large(transport)
    return right


def run_large(transport):
    """All-reduce 16 MB, of which each message goes in several segments."""
    buffer = np.full(LARGE, transport.rank + 1.0)
    executor = ScheduleExecutor(
        ring("all_reduce", transport.ranks), transport, scratch_bytes=1 << 20
    )
    executor.run(buffer, timeout_s=TIMEOUT_S)
    assert (buffer == transport.ranks * (transport.ranks + 1) / 2).all()


def run_with_sizes_that_differ(transport):
    """Return the error of a rank that gets more than it expects."""
    executor = ScheduleExecutor(chain("broadcast", transport.ranks, chunks=1), transport)
    try:
        executor.run(np.ones(200 if transport.rank == 0 else 100), timeout_s=SHORT_TIMEOUT_S)
    except UsageError as problem:
        return str(problem)
    return ""


def run_until_lost(transport, how):
    """Return the error that a rank gets when rank 1 ends between two chunks of a broadcast."""
    executor = ScheduleExecutor(chain("broadcast", transport.ranks, chunks=4), transport)
    buffer = np.ones(1 << 22)
    executor.run(buffer, timeout_s=TIMEOUT_S)
    if transport.rank == 1:
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[how])
    try:
        for _ in range(100):
            executor.run(buffer, timeout_s=SHORT_TIMEOUT_S)
    except RankLost as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def main():
    kind, store, rank, ranks, how = sys.argv[1:]
    transport = transport_of(kind, store, rank, ranks)
    right = run_all(kind, transport)
    if how in ("kill", "stop"):
        error = run_until_lost(transport, how)
    else:
        error = run_with_sizes_that_differ(transport) if how == "differ" else ""
    print(json.dumps({"rank": transport.rank, "right": right, "error": error}), flush=True)
    if how in ("kill", "stop"):
        os._exit(0)  # the group is broken: no orderly end


if __name__ == "__main__":
    main()
