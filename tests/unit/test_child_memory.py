"""The memory of loader workers: what is kept of its samples, and what is said of it."""

import dataclasses
import mmap
import os

import pytest

from paceline.launch.child_memory import ChildBytes, ChildMemoryLog, memory_of
from paceline.report.child_memory import child_memory_words
from paceline.runs.child_memory import ChildMemory

MB = 1 << 20
GROWN = ChildMemory(
    rank=1,
    processes=2,
    seconds=60.0,
    private_bytes=100 * MB,
    last_private_bytes=500 * MB,
    steady=0.4,
    copied_bytes=380 * MB,
)


def said(found, *, is_idle=False, loads=True):
    return child_memory_words(found, is_idle=is_idle, loads=loads)


def changed(**values):
    return dataclasses.replace(GROWN, **values)


def noted(samples, rank=1):
    """Return what is kept of (second, {process: private, in MB}) samples; all share 1,000 MB."""
    log = ChildMemoryLog(rank)
    for at_s, private in samples:
        memory = {n: (size * MB, (1000 - size) * MB, size * MB) for n, size in private.items()}
        log.note({n: ChildBytes(*sizes) for n, sizes in memory.items()}, at_s)
    return log.result()


def test_growth_is_from_the_end_of_the_start_up_to_the_end():
    samples = [(0, {7: 1, 8: 1}), (0.5, {7: 50, 8: 50}), (4, {7: 60, 8: 60}), (10, {7: 80, 8: 70})]
    found = noted([*samples, (16, {7: 90, 8: 90})])
    assert (found.processes, found.seconds) == (2, 12)
    assert (found.private_bytes, found.last_private_bytes) == (120 * MB, 180 * MB)
    assert found.copied_bytes == (180 - 2) * MB  # what they copied as they started up, too
    assert found.steady == pytest.approx(30 / 60)


def test_the_workers_of_each_epoch_are_a_group_of_their_own():
    first = [(at, {7: 100 + 10 * at}) for at in range(20)]
    second = [(at, {9: 100 + 2 * at}) for at in range(20, 40)]
    assert noted(first + second).growth_bytes == 10 * 18 * MB
    assert noted([(at, {n: 100}) for n, at in enumerate(range(20))]) is None  # each once
    assert noted([(0, {}), (5, {})]) is None


def test_copied_pages_are_said_to_be_copied():
    assert said([GROWN]) == (
        "The memory of rank 1's 2 processes (its loader's workers) grows: by 400 MiB in 60.0 s, to "
        "500 MiB. Pages that they share with the rank become their own as they touch them "
        "(copy-on-write): to read a Python object writes its count of references. Samples in "
        "arrays (NumPy, torch, Arrow) in place of lists and dicts stay shared."
    )
    own = said([changed(copied_bytes=0), changed(rank=0), GROWN])
    assert "copy-on-write" not in own
    assert own.endswith("to 500 MiB, and so does that of 2 other ranks.")


def test_what_was_copied_at_the_start_is_said_although_nothing_grows():
    at_once = changed(steady=0.0, private_bytes=480 * MB)
    assert said([at_once, changed(rank=0, steady=0.0)]).startswith(
        "Rank 1's 2 processes (its loader's workers) have copied 380 MiB of the rank's memory, to "
        "500 MiB of their own, and so have those of 1 other rank. Pages that they share"
    )


def test_processes_are_called_workers_only_where_a_loader_has_some():
    assert said([GROWN], loads=False).startswith("The memory of rank 1's 2 processes grows: by")
    soon = changed(seconds=12.0, copied_bytes=0)
    assert said([soon], loads=False) == ""  # imports of a process that was spawned
    assert "(its loader's workers) grows" in said([soon])


def test_processes_of_a_rank_without_steps_may_be_what_trains():
    assert said([changed(seconds=3.0)], is_idle=True) == (
        "What the processes that rank 1 started did is not recorded: a rank has one trace. If they "
        "train, start them as ranks (paceline run -n)."
    )
    assert said([], is_idle=True) == ""


def test_pages_that_the_parent_writes_are_not_copied_by_a_child():
    log = ChildMemoryLog(0)
    for at_s in range(10):
        private = 100 * MB * at_s
        log.note({7: ChildBytes(private, 1000 * MB - private, 3 * MB)}, at_s)
    assert log.result().copied_bytes == 0


@pytest.mark.parametrize(
    "values",
    [
        {"last_private_bytes": 150 * MB},
        {"private_bytes": 4000 * MB, "last_private_bytes": 4400 * MB},
        {"steady": 0.05},  # a cache that is full
        {"last_private_bytes": 1 * MB, "steady": 0.0},
    ],
)
def test_little_growth_and_caches_are_not_said(values):
    assert said([changed(copied_bytes=20 * MB, **values)]) == ""


def test_private_memory_of_a_forked_process_is_what_it_has_written():
    size = 64 * MB
    shared = bytearray(os.urandom(1)) * size
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        for _ in range(2):
            os.write(ready[1], b".")
            os.read(go[0], 1)
            for page in range(0, size, mmap.PAGESIZE):
                shared[page] = 1
        os._exit(0)
    os.read(ready[0], 1)
    before = memory_of(child)
    os.write(go[1], b".")
    os.read(ready[0], 1)
    after = memory_of(child)
    os.write(go[1], b".")
    os.waitpid(child, 0)
    assert after[0] - before[0] == pytest.approx(size, rel=0.1)
    assert before[1] - after[1] == pytest.approx(size, rel=0.1)
    assert after[2] - before[2] == pytest.approx(size, rel=0.1)
    assert memory_of(child) is None
    for descriptor in (*ready, *go):
        os.close(descriptor)
