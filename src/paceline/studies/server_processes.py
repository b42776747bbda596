"""Servers of a store as processes on loopback, for campaigns that kill them."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.core.clock import SystemClock
from paceline.core.errors import DeadlineExceeded, RankLost
from paceline.store.read.pack import open_packed
from paceline.store.serve.links import tcp_connector

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.serve.card import NodeCard

_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST_PORT = 10_000
_POLL_S = 0.02
_ASK_S = 5.0


@dataclass(kw_only=True)
class ServerProcesses:
    """Nodes on loopback, each a process with a folder for its shards.

    Args:
        pack: that they serve.
        folder: below which each node has its local storage, and its log.
        nodes: how many; the addresses are chosen at once, so that all know each other.
        replicas: copies of each shard.
        arguments: more of them for ``paceline store serve``.
        deadline_s: for what `wait_until` waits for.
    """

    pack: Path
    folder: Path
    nodes: int
    replicas: int
    arguments: tuple[str, ...] = ()
    deadline_s: float = 60.0
    names: list[str] = field(init=False)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.names = [f"127.0.0.1:{port}" for port in free_ports(self.nodes)]
        with open_packed(self.pack, index_only=True) as pack:
            self._connect = tcp_connector(pack.identity, "")
            self.shard_count = pack.shard_count
            self.shard_bytes = int(pack.index.shard_lengths.sum())

    def __enter__(self) -> Self:
        for number in range(self.nodes):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self.processes):
            self.kill(number)

    def local(self, number: int) -> Path:
        """Return the local storage of a node."""
        return self.folder / f"local-{number}"

    def add(self) -> int:
        """Return the number of one more node, whose address the others do not know."""
        (port,) = free_ports(1)
        self.names.append(f"127.0.0.1:{port}")
        return len(self.names) - 1

    def start(self, number: int, peers: list[str] | None = None) -> None:
        """Start a node; by default with the addresses of all others."""
        others = [name for name in self.names if name != self.names[number]]
        command = [sys.executable, "-m", "paceline", "store", "serve", str(self.pack)]
        command += ["--listen", self.names[number], "--local", str(self.local(number))]
        command += ["--peers", ",".join(others if peers is None else peers)]
        command += ["--replicas", str(self.replicas), *self.arguments]
        with (self.folder / f"log-{number}").open("ab") as log:
            self.processes[number] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self, number: int, *, and_wipe: bool = False) -> None:
        """End a node by SIGKILL; delete its local storage, too, if it is to come back empty."""
        process = self.processes.pop(number)
        process.kill()
        process.wait()
        if and_wipe:
            shutil.rmtree(self.local(number))

    def card(self, number: int) -> NodeCard | None:
        """Return what a node says of itself; None: it does not answer."""
        link = self._connect(self.names[number])
        try:
            return link.card(_ASK_S)
        except RankLost:
            return None
        finally:
            link.close()

    def cards(self) -> list[NodeCard]:
        """Return the cards of the nodes that run and answer."""
        cards = [self.card(number) for number in self.processes]
        return [card for card in cards if card is not None]

    def is_whole(self) -> bool:
        """Return whether all nodes answer, and each shard has as many copies as it should."""
        cards = self.cards()
        if len(cards) < len(self.processes):
            return False
        copies = [0] * self.shard_count
        for card in cards:
            for shard in card.held:
                copies[shard] += 1
        return set(copies) <= {min(self.replicas, len(cards))}

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until something is so.

        Raises:
            DeadlineExceeded: it never was.
        """
        clock, never = SystemClock(), threading.Event()
        end_s = clock.now_s() + self.deadline_s
        while not is_so():
            if clock.now_s() > end_s:
                raise DeadlineExceeded(
                    f"waited {self.deadline_s:g} s in vain until {what}",
                    where=str(self.folder),
                    why="; ".join(self._describe(number) for number in range(len(self.names))),
                    fix="Look at what the nodes said",
                )
            clock.wait(never, _POLL_S)

    def _describe(self, number: int) -> str:
        """Return how a node is, and what it said last."""
        process, card = self.processes.get(number), self.card(number)
        state = "is not started" if process is None else "does not answer"
        if process is not None and process.poll() is not None:
            state = f"ended with status {process.returncode}"
        if card is not None:
            state = f"holds {len(card.held)} shards and waits for {card.load.waiting_shards}"
        log = self.folder / f"log-{number}"
        said = log.read_text(errors="replace").splitlines()[-1:] if log.exists() else []
        return " ".join([self.names[number], state, *said])


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that were free a moment ago, all different.

    None of those from which the kernel takes the ports of outgoing connections: one of these could
    take the port of a node that was killed before the node is started again.
    """
    first_taken = int(_PORT_RANGE.read_text().split()[0])
    candidates = random.SystemRandom().sample(range(_FIRST_PORT, first_taken), 50 * count)
    ports: list[int] = []
    for port in candidates:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
        if len(ports) == count:
            break
    return ports
