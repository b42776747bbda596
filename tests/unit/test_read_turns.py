"""Turns of readers: how many at a time, who gets them back, and that nobody waits for ever."""

import contextlib
import threading

import pytest

from paceline.core.handshake import NONCE_BYTES, PROOF_BYTES, REFUSED
from paceline.store.feed.node import turns
from paceline.store.feed.node.turns import Turns, TurnServer, TurnTuner

DEADLINE_S = 30


def rate_after(tuner, rate_of, windows):
    """Feed a tuner with what a storage gives that moves `rate_of(turns)` bytes a second."""
    now_s = 0.0
    tuner.begin(now_s)
    seen = []
    for _ in range(windows):
        now_s += 1000 / rate_of(tuner.turns)
        tuner.record(1000, now_s)
        seen.append(tuner.turns)
    return seen


@pytest.mark.parametrize("best", [1, 2, 4, 8, 16])
def test_the_number_that_moves_most_is_found_and_used_most(best):
    tuner = TurnTuner(16)
    rates = {n: 1000 / (1 + abs(n.bit_length() - best.bit_length())) for n in (1, 2, 4, 8, 16)}
    seen = rate_after(tuner, rates.__getitem__, 16 * 4 * 60)
    last = seen[len(seen) // 2 :]
    assert max(set(last), key=last.count) == best
    assert last.count(best) >= len(last) * 0.45  # every other period tries a neighbour


def test_all_read_at_once_where_that_is_best_or_the_same():
    tuner = TurnTuner(4)
    seen = rate_after(tuner, lambda n: 100.0 * n, 4 * 4 * 40)
    assert seen[-1] in (4, 2)
    assert seen.count(4) > len(seen) * 0.45
    alone = TurnTuner(1)
    assert set(rate_after(alone, lambda n: 1.0, 40)) == {1}


@pytest.fixture
def server():
    servers = []

    def start(count, most=8):
        tuner = TurnTuner(most)
        tuner.start_at(count)
        servers.append(TurnServer(tuner))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Overlap:
    """Counts who reads at a time."""

    def __init__(self):
        self.lock = threading.Lock()
        self.now = self.most = self.total = 0

    @contextlib.contextmanager
    def count(self):
        with self.lock:
            self.now += 1
            self.total += 1
            self.most = max(self.most, self.now)
        yield
        with self.lock:
            self.now -= 1


@pytest.mark.parametrize("count", [1, 2, 3])
def test_no_more_read_at_a_time_than_there_are_turns(server, count):
    address = server(count).address("127.0.0.1")
    overlap = Overlap()

    def read():
        mine = Turns(address)
        for _ in range(20):
            with mine.turn(100), overlap.count():
                pass
        assert mine.missed == 0
        mine.close()

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert overlap.total == 120
    assert 1 <= overlap.most <= count


def test_the_turn_of_a_reader_that_is_gone_is_free_again(server):
    address = server(1).address("127.0.0.1")
    first, second = Turns(address), Turns(address)
    with contextlib.ExitStack() as held:
        held.enter_context(first.turn(1))
        first.close()  # as if its process had been killed
        with second.turn(1):
            assert second.missed == 0
    second.close()


def test_without_a_turn_a_reader_reads_all_the_same(server, monkeypatch):
    monkeypatch.setattr(turns, "PATIENCE_S", 0.1)
    address = server(1).address("127.0.0.1")
    first, second = Turns(address), Turns(address)
    with first.turn(1), second.turn(1):
        assert (first.missed, second.missed) == (0, 1)
    first.close()
    nobody = Turns("token@127.0.0.1:1")
    with nobody.turn(1):
        assert nobody.missed == 1


def test_strangers_are_hung_up_on(server):
    import socket

    address = server(1).address("127.0.0.1")
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(NONCE_BYTES + PROOF_BYTES))
        stranger.settimeout(DEADLINE_S)
        answer = b""
        while chunk := stranger.recv(100):
            answer += chunk
        assert len(answer) == NONCE_BYTES + PROOF_BYTES
        assert answer.endswith(REFUSED)
    mine = Turns(address)
    with mine.turn(1):
        assert mine.missed == 0
    mine.close()
