"""The executor of schedules: reductions by dtype, bounded scratch memory, and what goes wrong."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.schedule_cases import inputs

from paceline.collectives import arrays
from paceline.collectives.executor import ScheduleExecutor
from paceline.collectives.transports.threads import ThreadGroup
from paceline.core.errors import DeadlineExceeded, InvalidSchedule, UsageError
from paceline.schedules import (
    binomial,
    chain,
    groups_of,
    halving_doubling,
    recursive_doubling,
    ring,
    torus,
    two_level_sharded,
)

TIMEOUT_S = 60
COUNT = 1001
REFERENCE = {
    "sum": lambda values: values.sum(0),
    "average": lambda values: np.trunc(values.sum(0) / len(values)),
    "min": lambda values: values.min(0),
    "max": lambda values: values.max(0),
    "product": lambda values: values.prod(0),
}
NUMPY = ("float32", "float64", "float16", "int8", "uint8", "int32", "int64")
TORCH = ("float32", "bfloat16", "float16", "int8", "int64")


def run(schedule, buffers, op="sum", **options):
    """Run the schedule in place on one buffer per rank."""

    def work(transport):
        executor = ScheduleExecutor(schedule, transport, **options)
        executor.run(buffers[transport.rank], op, timeout_s=TIMEOUT_S)

    ThreadGroup(schedule.ranks).run(work)
    return buffers


def small_inputs(ranks):
    """Return values whose sums and products fit into each dtype exactly."""
    return [1 + np.abs(values) % 2 for values in inputs(ranks, COUNT)]


@pytest.mark.parametrize("op", REFERENCE)
@pytest.mark.parametrize("dtype", NUMPY)
def test_every_reduction_of_arrays(op, dtype):
    buffers = [values.astype(dtype) for values in small_inputs(4)]
    wanted = np.stack(buffers).astype("float64")
    wanted = REFERENCE[op](wanted) if dtype[0] != "f" or op != "average" else wanted.mean(0)
    for buffer in run(halving_doubling("all_reduce", 4), buffers, op):
        assert buffer.dtype == dtype
        assert np.array_equal(buffer, wanted.astype(dtype))


@pytest.mark.parametrize("op", REFERENCE)
@pytest.mark.parametrize("dtype", TORCH)
def test_every_reduction_of_tensors(op, dtype):
    kind = getattr(torch, dtype)
    buffers = [torch.from_numpy(values).to(kind) for values in small_inputs(4)]
    wanted = torch.stack(buffers).double().numpy()
    wanted = (
        REFERENCE[op](wanted) if not kind.is_floating_point or op != "average" else wanted.mean(0)
    )
    for buffer in run(ring("all_reduce", 4), buffers, op):
        assert buffer.dtype == kind
        assert torch.equal(buffer, torch.from_numpy(wanted).to(kind))


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_averages_of_integers_round_towards_zero(make):
    for buffer in run(ring("all_reduce", 2), [make([-3, 3, -4]), make([0, 0, 0])], "average"):
        assert buffer.tolist() == [-1, 1, -2]


def test_an_average_divides_where_the_result_is():
    buffers = run(binomial("reduce", 3, root=2), [np.full(4, 3.0) for _ in range(3)], "average")
    assert buffers[2].tolist() == [3.0] * 4
    assert buffers[0].tolist() == [3.0] * 4  # as it was sent
    buffers = run(ring("reduce_scatter", 2), [np.full(4, 3.0), np.full(4, 5.0)], "average")
    assert buffers[0][:2].tolist() + buffers[1][2:].tolist() == [4.0] * 4
    buffers = run(chain("broadcast", 2, chunks=2), [np.full(4, 3.0), np.zeros(4)], "average")
    assert buffers[1].tolist() == [3.0] * 4


@pytest.mark.parametrize(
    "schedule",
    [
        ring("all_reduce", 5),
        halving_doubling("all_reduce", 6),
        recursive_doubling(7),
        two_level_sharded(groups_of(6, 2)),
        torus(groups_of(6, 3)),
    ],
    ids=lambda schedule: schedule.algorithm,
)
def test_all_ranks_get_the_same_bits_every_time(schedule):
    generator = np.random.default_rng(1)
    values = [generator.normal(size=COUNT).astype("float32") for _ in range(schedule.ranks)]
    first = run(schedule, [value.copy() for value in values])
    second = run(schedule, [value.copy() for value in values], scratch_bytes=512)
    assert len({buffer.tobytes() for buffer in first + second}) == 1


def test_scratch_memory_is_bounded_whatever_the_message(monkeypatch):
    taken = []
    scratch = arrays.NumpyArrays.scratch

    def count(self, like, elements):
        taken.append(elements * like.itemsize)
        return scratch(self, like, elements)

    monkeypatch.setattr(arrays.NumpyArrays, "scratch", count)
    for schedule in (
        ring("all_reduce", 4),
        binomial("reduce", 4, chunks=3),
        torus(groups_of(4, 2)),
    ):
        buffers = [np.ones(100_003) for _ in range(4)]
        run(schedule, buffers, scratch_bytes=1000)
        assert (buffers[0] == 4).all()
    assert max(taken) <= 1000
    run(ring("all_reduce", 2), [np.ones(10) for _ in range(2)])
    assert taken[-1] <= 40  # no more than the message needs


def test_shapes_are_kept_and_autograd_sees_nothing():
    buffers = [torch.ones(3, 5, requires_grad=True) for _ in range(2)]
    run(ring("all_reduce", 2), buffers)
    assert buffers[0].shape == (3, 5)
    assert (buffers[0] == 2).all()
    assert buffers[0].grad_fn is None


def test_a_peer_that_does_not_come_is_named_with_the_step():
    def work(transport):
        executor = ScheduleExecutor(chain("broadcast", 3, chunks=2), transport)
        if transport.rank == 1:  # it is never there
            return ""
        with pytest.raises(DeadlineExceeded) as caught:
            executor.run(np.ones(8), timeout_s=0.05)
        with pytest.raises(UsageError, match="an earlier run failed") as again:
            executor.run(np.ones(8), timeout_s=0.05)
        assert again.value.why == caught.value.what
        return str(caught.value)

    messages = ThreadGroup(3).run(work)
    # The seconds are what the step had left of the deadline: less than that on a busy machine.
    assert re.match(
        r"rank 1 did not receive within 0\.0\d+ s \(rank 0, step 0 of chain broadcast\)",
        messages[0],
    )
    assert "rank 1 did not send" in messages[2]
    assert "(rank 2, step 1 of chain broadcast)" in messages[2]


def test_what_cannot_run_is_refused():
    transport = _lonely()
    with pytest.raises(UsageError, match="for 3 ranks, the group has 1"):
        ScheduleExecutor(ring("all_reduce", 3), transport)
    executor = ScheduleExecutor(ring("all_reduce", 1), transport)
    with pytest.raises(UsageError, match="unknown reduction 'xor'"):
        executor.run(np.ones(3), "xor", timeout_s=1)
    with pytest.raises(UsageError, match="not contiguous"):
        executor.run(np.ones((4, 4)).T[1:], timeout_s=1)
    with pytest.raises(UsageError, match="not contiguous"):
        executor.run(torch.ones(4, 4).T[1:], timeout_s=1)
    with pytest.raises(UsageError, match="cannot communicate a list"):
        executor.run([1.0], timeout_s=1)
    with pytest.raises(UsageError, match="8 bytes of scratch memory are too few"):
        ScheduleExecutor(ring("all_reduce", 1), transport, scratch_bytes=8)


def test_a_wrong_schedule_does_not_run():
    schedule = ring("all_reduce", 2)
    wrong = type(schedule)(
        operation="all_reduce",
        algorithm="ring",
        ranks=2,
        chunks=2,
        transfers=schedule.transfers[:-1],
    )

    def work(transport):
        with pytest.raises(InvalidSchedule, match="at the end rank"):
            ScheduleExecutor(wrong, transport)

    ThreadGroup(2).run(work)


def test_torch_and_mpi_are_loaded_only_where_they_are_needed():
    program = (
        "import sys, paceline.schedules, paceline.collectives.transports.threads\n"
        "import paceline.collectives.executor\n"
        "print({'torch', 'mpi4py'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "set()\n"


def _lonely():
    return ThreadGroup(1).run(lambda transport: transport)[0]
