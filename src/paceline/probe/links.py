"""Latency and bandwidth between two processes of this node, by ping-pong. Standard library only.

One process is the caller, the other its worker, this file run with ``-m``. Both loops are in
Python, which adds about a microsecond to the latency of shared memory: what a framework in Python
sees.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import time
from typing import TYPE_CHECKING

from paceline.core.errors import DeadlineExceeded
from paceline.core.machine import Link
from paceline.core.worker_process import WorkerCall, WorkerProcess, serve
from paceline.probe.figures import ROUNDS, probed, typical_by_round
from paceline.probe.protocol import LinkAnswer, LinkRequest

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_BYTES = 8 << 20
FLAG_BYTES = 4096
SPINS_PER_LOOK = 10_000


def measure_links(*, rounds: int, deadline_s: float) -> tuple[Link, ...]:
    """Return the links ``shared-memory`` and ``loopback``, the faster one first.

    Raises:
        DeadlineExceeded: the second process did not answer in time.
    """
    descriptor = os.memfd_create("paceline-probe")
    os.ftruncate(descriptor, FLAG_BYTES + 2 * BLOCK_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(deadline_s)
    request = LinkRequest(
        descriptor=descriptor,
        port=listener.getsockname()[1],
        rounds=rounds,
        deadline_s=deadline_s + 1,  # the caller gives up first, and says so
    )
    work = WorkerCall(
        module="paceline.probe.links",
        request=request,
        answer=LinkAnswer,
        name="the second process of the links",
        pass_fds=(descriptor,),
    )
    try:
        with WorkerProcess(work) as worker:
            worker.send(deadline_s)
            with listener, listener.accept()[0] as connection:
                result = _exchange(descriptor, connection, rounds, deadline_s, leads=True)
        return tuple(sorted(result, key=lambda link: link.latency_s.value))
    except TimeoutError as problem:
        raise DeadlineExceeded(
            "no answer between two processes",
            where="probe of links",
            why=f"{deadline_s} s passed",
            fix="Probe when nothing else runs here",
        ) from problem
    finally:
        listener.close()
        os.close(descriptor)


def follow(request: LinkRequest) -> LinkAnswer:
    """Answer the turns of the process that asks: the worker's part."""
    address = ("127.0.0.1", request.port)
    with socket.create_connection(address, timeout=request.deadline_s) as to_leader:
        _exchange(request.descriptor, to_leader, request.rounds, request.deadline_s, leads=False)
    return LinkAnswer()


def _exchange(
    descriptor: int, connection: socket.socket, rounds: int, deadline_s: float, *, leads: bool
) -> list[Link]:
    connection.settimeout(deadline_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    block = memoryview(bytearray(BLOCK_BYTES))
    result = []
    with (
        mmap.mmap(descriptor, FLAG_BYTES + 2 * BLOCK_BYTES) as shared,
        contextlib.closing(_Memory(shared, deadline_s, leads=leads)) as memory,
    ):
        ping = _socket_turn(connection, memoryview(bytearray(1)), leads=leads)
        carry = _socket_turn(connection, block, leads=leads)
        result.append(_measure("loopback", ping, carry, rounds))
        result.append(_measure("shared-memory", memory.turn, lambda: memory.turn(block), rounds))
    return result


def _measure(level: str, ping: Callable[[], None], carry: Callable[[], None], rounds: int) -> Link:
    latencies_s = [turn_s / 2 for turn_s in _time_turns(ping, rounds)]
    blocks_s = [turn_s / 2 for turn_s in _time_turns(carry, max(ROUNDS, rounds // 100))]
    return Link(
        level=level,
        latency_s=probed(latencies_s),
        bandwidth_bytes_per_s=probed(BLOCK_BYTES / block_s for block_s in blocks_s),
    )


def _time_turns(turn: Callable[[], None], count: int) -> list[float]:
    turn()
    samples = []
    for _ in range(count):
        begin = time.perf_counter()
        turn()
        samples.append(time.perf_counter() - begin)
    return typical_by_round(samples)


def _socket_turn(connection: socket.socket, data: memoryview, *, leads: bool) -> Callable[[], None]:
    def receive() -> None:
        got = 0
        while got < len(data):
            count = connection.recv_into(data[got:])
            if not count:
                raise TimeoutError("the other process has gone")
            got += count

    def turn() -> None:
        if leads:
            connection.sendall(data)
            receive()
        else:
            receive()
            connection.sendall(data)

    return turn


class _Memory:
    """Two flags that count turns and a block in each direction, in memory that both map."""

    def __init__(self, shared: mmap.mmap, deadline_s: float, *, leads: bool) -> None:
        self._view = memoryview(shared)
        self._flags = self._view[:FLAG_BYTES].cast("Q")
        # On cache lines of their own.
        self._own, self._peers = (0, 64) if leads else (64, 0)
        out, into = (0, BLOCK_BYTES) if leads else (BLOCK_BYTES, 0)
        self._out = self._view[FLAG_BYTES + out : FLAG_BYTES + out + BLOCK_BYTES]
        self._into = self._view[FLAG_BYTES + into : FLAG_BYTES + into + BLOCK_BYTES]
        self._leads = leads
        self._deadline_s = deadline_s
        self._count = 0

    def turn(self, block: memoryview | None = None) -> None:
        """Send and receive `block`, or only the flag."""
        self._count += 1
        if self._leads:
            self._send(block)
        self._wait()
        if block is not None:
            block[:] = self._into
        if not self._leads:
            self._send(block)

    def _send(self, block: memoryview | None) -> None:
        if block is not None:
            self._out[:] = block
        self._flags[self._own] = self._count

    def _wait(self) -> None:
        end = time.monotonic() + self._deadline_s
        while self._flags[self._peers] < self._count:
            for _ in range(SPINS_PER_LOOK):
                if self._flags[self._peers] >= self._count:
                    return
            if time.monotonic() > end:
                raise TimeoutError("the other process does not answer")

    def close(self) -> None:
        """Give the views back, so that the mapping can be closed."""
        for view in (self._out, self._into, self._flags, self._view):
            view.release()


if __name__ == "__main__":
    serve(LinkRequest, follow)
