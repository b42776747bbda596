"""Threads that work ahead: results in order, bounds kept, errors in their place, clean ends."""

import gc
import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from paceline.core.errors import DeadlineExceeded, UsageError
from paceline.store.feed.workers import Bounds, OrderedThreads

DEADLINE_S = 60


@dataclass
class Piece:
    number: int
    size_bytes: int = 1


def start(tasks, make=lambda task: task, *, threads=3, ahead=4, size=10**9, timeout_s=DEADLINE_S):
    bounds = Bounds(ahead=ahead, bytes_ahead=size, timeout_s=timeout_s)
    return OrderedThreads(iter(tasks), make, threads=threads, bounds=bounds, name="test-worker")


def drain(work):
    found = []
    while True:
        try:
            found.append(work.next())
        except StopIteration:
            return found


def alive():
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-worker")]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    for thread in alive():
        thread.join(DEADLINE_S)
    assert alive() == []


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 8))
@settings(max_examples=examples(30), deadline=None)
def test_results_come_in_the_order_of_tasks(count, threads, ahead):
    pieces = [Piece(number) for number in range(count)]
    work = start(pieces, threads=threads, ahead=ahead)
    assert [result.number for result in drain(work)] == list(range(count))
    with pytest.raises(StopIteration):
        work.next()


def test_a_slow_first_task_does_not_let_others_past():
    release = threading.Event()
    later = threading.Semaphore(0)

    def make(piece):
        if piece.number == 0:
            assert release.wait(DEADLINE_S)
        else:
            later.release()
        return piece

    work = start([Piece(number) for number in range(6)], make, threads=2, ahead=4)
    for _ in range(3):  # the other thread makes what there is room for
        assert later.acquire(timeout=DEADLINE_S)
    release.set()
    assert [result.number for result in drain(work)] == list(range(6))


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(1, 5), st.integers(1, 150))
@settings(max_examples=examples(30), deadline=None)
def test_what_is_ahead_is_bounded_in_number_and_bytes(sizes, ahead, size):
    lock, out, most = threading.Lock(), [0, 0], [0, 0]

    def tasks():
        yield from (Piece(number, one) for number, one in enumerate(sizes))

    def make(piece):
        with lock:
            out[0] += 1
            out[1] += piece.size_bytes
            if out[0] > 1:  # alone, any size is let through
                most[:] = max(most[0], out[0]), max(most[1], out[1])
        return piece

    work = start(tasks(), make, ahead=ahead, size=size)
    for _ in sizes:
        # Delivered pieces leave the count only here, after `next`: the bound is one piece wider.
        piece = work.next()
        with lock:
            out[0] -= 1
            out[1] -= piece.size_bytes
    assert drain(work) == []
    assert most[0] <= ahead + 1
    assert most[1] <= size + max(sizes, default=0)


def test_an_error_comes_where_its_result_would_have_come():
    def make(piece):
        if piece.number == 3:
            raise KeyError("three")
        return piece

    work = start([Piece(number) for number in range(10)], make)
    assert [work.next().number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        work.next()
    with pytest.raises(UsageError, match="closed"):  # not the end, as if all had been delivered
        work.next()


def test_an_error_of_the_tasks_themselves_is_delivered():
    def tasks():
        yield Piece(0)
        raise ValueError("no more")

    work = start(tasks())
    assert work.next().number == 0
    with pytest.raises(ValueError, match="no more"):
        work.next()


def test_a_deadline_names_the_thread_that_it_waited_for():
    release = threading.Event()
    bounds = Bounds(ahead=2, bytes_ahead=100, timeout_s=0.05)
    work = OrderedThreads(
        iter([Piece(0)]),
        lambda piece: release.wait(DEADLINE_S) and piece,
        threads=1,
        bounds=bounds,
        name="test-worker",
        describe=lambda worker: f"{worker} is at 'cats/1.jpg'",
    )
    with pytest.raises(DeadlineExceeded, match=r"test-worker-0 did not .*cats/1\.jpg") as caught:
        work.next()
    assert caught.value.fix
    release.set()
    assert work.next().number == 0  # it came after all


def test_a_deadline_is_kept_where_a_task_hangs_before_anybody_makes_it():
    release, drawing = threading.Event(), threading.Event()

    def tasks():
        drawing.set()
        release.wait(DEADLINE_S)
        yield Piece(0)

    work = start(tasks(), threads=1, timeout_s=0.05)
    assert drawing.wait(DEADLINE_S)
    with pytest.raises(DeadlineExceeded, match="the thread that prepares the next batch"):
        work.next()
    release.set()
    work.close(DEADLINE_S)


def test_closing_ends_threads_that_wait_for_room():
    work = start([Piece(number) for number in range(100)], ahead=2)
    assert work.next().number == 0
    work.close(DEADLINE_S)
    assert alive() == []
    with pytest.raises(UsageError, match="closed"):
        work.next()


def test_results_are_let_go_once_they_are_delivered():
    class Heavy(Piece):
        count = 0

        def __init__(self, number):
            super().__init__(number)
            Heavy.count += 1

        def __del__(self):
            Heavy.count -= 1

    work = start((Piece(number) for number in range(20)), lambda piece: Heavy(piece.number))
    for _ in range(20):
        work.next()
    work.close(DEADLINE_S)
    gc.collect()
    assert Heavy.count == 0


def test_a_program_that_ends_early_does_not_hang():
    program = """
import threading
from paceline.store.feed.workers import Bounds, OrderedThreads
class Piece: size_bytes = 1
def tasks():
    while True: yield Piece()
bounds = Bounds(ahead=2, bytes_ahead=10, timeout_s=60)
work = OrderedThreads(tasks(), lambda p: p, threads=3, bounds=bounds, name="w")
work.next()
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
