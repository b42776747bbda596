"""Requests for bytes of shards in shared memory: between threads, processes, and after a death."""

import os
import signal
import threading

import numpy as np
import pytest

from paceline.native import RangeRequests

GOOD, NOBODY, HERE, LOST, LATE = range(1, 6)
SERVING, ENDED = 1, 2
SLOTS, SLOT_BYTES = 4, 1 << 16
CONTENT = np.random.default_rng(1).integers(0, 255, 1_000_000, dtype=np.uint8)


@pytest.fixture
def requests():
    made = RangeRequests.create(10, SLOTS, SLOT_BYTES, "node7")
    made.set_state(SERVING)
    yield made
    made.set_state(ENDED)


def path_of(requests):
    return f"/proc/{os.getpid()}/fd/{requests.descriptor}".encode()


def serve(requests, count, outcome=GOOD):
    """Answer `count` requests in a thread, which is returned."""

    def work():
        for _ in range(count):
            slot, _, offset, length, _ = requests.take(30.0)
            requests.room(slot, length)[:] = CONTENT[offset : offset + length]
            requests.finish(slot, outcome)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_range_arrives_in_as_many_pieces_as_it_takes(requests):
    size = 10 * SLOT_BYTES + 17
    thread = serve(requests, 11)
    out = np.zeros(size, np.uint8)
    assert RangeRequests.open(path_of(requests)).fetch(3, 1000, out, 0, 30.0) == GOOD
    thread.join()
    assert (out == CONTENT[1000 : 1000 + size]).all()


def test_many_threads_share_few_slots(requests):
    thread = serve(requests, 400)
    wrong = []

    def read(seed):
        random = np.random.default_rng(seed)
        out = np.zeros(5000, np.uint8)
        for begin in random.integers(0, 900_000, 50).tolist():
            outcome = requests.fetch(0, begin, out, 0, 30.0)
            if outcome != GOOD or (out != CONTENT[begin : begin + 5000]).any():
                wrong.append((outcome, begin))

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("outcome", [NOBODY, HERE])
def test_a_program_hears_what_became_of_its_request(requests, outcome):
    thread = serve(requests, 1, outcome)
    assert requests.fetch(0, 0, np.zeros(10, np.uint8), 0, 30.0) == outcome
    thread.join()
    assert [requests.is_held(shard) for shard in range(2)] == [False, False]
    requests.set_held(1, is_held=True)
    assert [requests.is_held(shard) for shard in range(2)] == [False, True]


def test_nobody_waits_for_a_server_that_has_ended_or_for_ever(requests):
    out = np.zeros(10, np.uint8)
    assert requests.fetch(0, 0, out, 0, 0.05) == LATE
    waiting = threading.Thread(target=lambda: outcomes.append(requests.fetch(0, 0, out, 0, 60.0)))
    outcomes = []
    waiting.start()
    assert requests.take(30.0) is not None  # under way when the server ends
    requests.set_state(ENDED)
    waiting.join(60)
    assert outcomes == [LOST]
    assert requests.fetch(0, 0, out, 0, 60.0) == LOST
    assert requests.take(60.0) is None
    assert not requests.await_serving(60.0)


def test_what_a_killed_program_held_is_free_again(requests):
    children = []
    for _ in range(SLOTS):
        child = os.fork()
        if child == 0:
            requests.fetch(0, 0, np.zeros(10, np.uint8), 0, 600.0)
            os._exit(1)
        children.append(child)
    taken = [requests.take(30.0) for _ in range(SLOTS)]
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert requests.reap() == 0  # these are being answered
    for slot, *_ in taken:
        requests.finish(slot, GOOD)
    assert requests.reap() == SLOTS
    thread = serve(requests, 1)
    assert requests.fetch(0, 0, np.zeros(10, np.uint8), 0, 30.0) == GOOD
    thread.join()


def test_other_memory_is_refused(tmp_path):
    other = tmp_path / "other"
    for content in (b"", b"x" * 100, b"x" * 100_000):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="no memory of requests"):
            RangeRequests.open(os.fsencode(other))
    with pytest.raises(FileNotFoundError):
        RangeRequests.open(b"/nonexistent")
