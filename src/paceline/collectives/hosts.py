"""Which ranks share memory: found by mapping each other's segments, not by environment variables.

Each rank publishes the address of its segment: boot id, user, process, descriptor, a random nonce.
A rank that finds another's boot id and user equal to its own opens the segment through
``/proc/PID/fd/N`` and compares the nonce. Equal boot ids alone prove nothing: the containers of a
node may have PID namespaces of their own, and then a process id names another process.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

from paceline.core.errors import DeadlineExceeded, PacelineError, UsageError, first_line
from paceline.core.processes import boot_id
from paceline.native import HostSegment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_LOG = logging.getLogger(__name__)


class KeyValueStore(Protocol):
    """The part of ``torch.distributed.Store`` by which ranks find each other."""

    def set(self, key: str, value: bytes, /) -> object:
        """Publish a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for it."""

    def wait(self, keys: Sequence[str], timeout: timedelta, /) -> object:
        """Return when all keys are set; raise when the time is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAddress:
    """Where peers find the segment of a rank."""

    boot_id: str
    user: int
    process: int
    descriptor: int
    nonce: str  # hexadecimal

    @staticmethod
    def of(segment: HostSegment) -> SegmentAddress:
        """Return the address of this process's segment, whose descriptor is open."""
        return SegmentAddress(
            boot_id=boot_id(),
            user=os.getuid(),
            process=os.getpid(),
            descriptor=segment.descriptor,
            nonce=segment.nonce.hex(),
        )

    @staticmethod
    def from_bytes(data: bytes) -> SegmentAddress:
        """Return the address that `to_bytes` wrote."""
        return SegmentAddress(**json.loads(data))

    def to_bytes(self) -> bytes:
        """Return the address as JSON."""
        return json.dumps(asdict(self)).encode()

    def open(self) -> HostSegment:
        """Map the segment.

        Raises:
            OSError: it cannot be opened from this process.
            ValueError: another process has that id, or that descriptor is another file.
        """
        if (self.boot_id, self.user) != (boot_id(), os.getuid()):
            raise ValueError("another host or user")
        path = f"/proc/{self.process}/fd/{self.descriptor}"
        return HostSegment.open(path, bytes.fromhex(self.nonce))


def exchange(
    store: KeyValueStore, topic: str, rank: int, ranks: int, value: bytes, timeout_s: float
) -> list[bytes]:
    """Return the values that all ranks give for a topic, by rank.

    Args:
        store: that all ranks share.
        topic: a name that was not used in this store before.
        rank: of this process.
        ranks: of the group.
        value: of this rank.
        timeout_s: the longest wait for other ranks.

    Raises:
        DeadlineExceeded: a rank gave nothing; the error names it.
    """
    store.set(f"{topic}/{rank}", value)
    keys = {peer: f"{topic}/{peer}" for peer in range(ranks)}
    what = "ranks did not come to the forming of a group"
    _wait_for_ranks(store, keys, rank, what, timeout_s)
    return [store.get(key) for key in keys.values()]


def release_first_rank(
    store: KeyValueStore, topic: str, rank: int, ranks: int, timeout_s: float
) -> None:
    """Let rank 0 go on when all others have come this far; they go on at once.

    The store may live in the process of rank 0, which may end behind its first collective.

    Args:
        store: that all ranks share.
        topic: a name that was not used in this store before.
        rank: of this process.
        ranks: of the group.
        timeout_s: the longest wait for other ranks.

    Raises:
        DeadlineExceeded: a rank did not come; the error names it.
    """
    if rank > 0:
        store.set(f"{topic}/{rank}", b"")
        return
    keys = {peer: f"{topic}/{peer}" for peer in range(1, ranks)}
    if keys:
        _wait_for_ranks(store, keys, rank, "ranks did not read the addresses", timeout_s)


def from_first_rank(
    store: KeyValueStore, topic: str, rank: int, decide: Callable[[], str], timeout_s: float
) -> str:
    """Return what rank 0 decides; where that raises, all ranks raise.

    Args:
        store: that all ranks share.
        topic: a name that was not used in this store before.
        rank: of this process.
        decide: called on rank 0 alone.
        timeout_s: the longest wait for rank 0.

    Raises:
        PacelineError: what `decide` raises; on other ranks a UsageError with its text.
        DeadlineExceeded: rank 0 did not come.
    """
    key = f"{topic}/decided"
    if rank == 0:
        try:
            text = decide()
        except PacelineError as problem:
            store.set(key, json.dumps({"problem": str(problem)}).encode())
            raise
        store.set(key, json.dumps({"text": text}).encode())
        return text
    _wait_for_ranks(store, {0: key}, rank, f"rank 0 did not say its {topic}", timeout_s)
    decided = json.loads(store.get(key))
    if "problem" in decided:
        raise UsageError(
            f"rank 0 failed: {decided['problem']}",
            where=f"{topic}, rank {rank}",
            fix="Correct it where rank 0 runs",
        )
    return str(decided["text"])


def _wait_for_ranks(
    store: KeyValueStore, keys: Mapping[int, str], rank: int, what: str, timeout_s: float
) -> None:
    """Wait until ranks have set their keys; an error begins with `what` and names the others."""
    try:
        store.wait(list(keys.values()), timedelta(seconds=timeout_s))
    except PacelineError:
        raise
    except Exception as problem:  # torch raises RuntimeErrors of its own
        others = [peer for peer in keys if peer != rank]
        late = [peer for peer in others if not _is_set(store, keys[peer])]
        names = f"rank {', '.join(map(str, late or others))}"  # none: they have come since
        raise DeadlineExceeded(
            f"{what} within {timeout_s:g} s",
            where=f"rank {rank} waited for {names}",
            why=first_line(problem),
            fix=f"Look at the output of {names}",
        ) from problem


def _is_set(store: KeyValueStore, key: str) -> bool:
    try:
        store.wait([key], timedelta(milliseconds=20))  # to ask: busy machines answer late
    except Exception:  # noqa: BLE001  # whatever the store raises for "not set"
        return False
    return True


def find_hosts(
    store: KeyValueStore, rank: int, ranks: int, timeout_s: float, *, name: str = "hosts"
) -> list[list[int]]:
    """Return the ranks of each host, ascending, hosts by their first rank; equal on all ranks.

    Ranks are of one host here if each can map the other's memory. Ranks of two containers on a node
    that cannot are of two hosts.

    Args:
        store: that all ranks share, for example torch's.
        rank: of this process.
        ranks: of the group.
        timeout_s: the longest wait for other ranks.
        name: of the search; each name can be used once per store.

    Raises:
        DeadlineExceeded: a rank did not take part; the error names it.
    """
    probe = HostSegment.create(rank, ranks, ring_bytes=4096, packet_bytes=4096)
    addresses = exchange(
        store,
        f"paceline/{name}/address",
        rank,
        ranks,
        SegmentAddress.of(probe).to_bytes(),
        timeout_s,
    )
    reachable = [peer for peer in range(ranks) if peer == rank or _can_open(addresses[peer])]
    lists = exchange(
        store, f"paceline/{name}/reachable", rank, ranks, json.dumps(reachable).encode(), timeout_s
    )
    probe.close_descriptor()
    hosts = group_by_reach([json.loads(data) for data in lists])
    if rank == 0 and len(hosts) > 1:
        text = apart([SegmentAddress.from_bytes(address) for address in addresses], hosts)
        _warn_once(text)
    return hosts


def apart(addresses: Sequence[SegmentAddress], hosts: Sequence[Sequence[int]]) -> str:
    """Return why ranks of one machine count as different hosts; empty if no machine has such ranks.

    Args:
        addresses: of all ranks.
        hosts: the ranks that share memory, as `group_by_reach` returns them.
    """
    firsts: dict[str, int] = {}  # of each machine, the first rank
    for ranks in hosts:
        own = addresses[ranks[0]]
        first = firsts.setdefault(own.boot_id, ranks[0])
        if first == ranks[0]:
            continue
        users = (addresses[first].user, own.user)
        why = (
            f"they run as users {users[0]} and {users[1]}"
            if users[0] != users[1]
            else "one cannot open the other's memory through /proc, as in containers without a "
            "common PID namespace"
        )
        return (
            f"ranks {first} and {ranks[0]} of a group run on one machine but share no memory, as "
            f"{why}: they count as two hosts, between which TCP carries the data"
        )
    return ""


@functools.cache  # a job makes many groups
def _warn_once(text: str) -> None:
    if text:
        _LOG.warning("%s", text)


def _can_open(address: bytes) -> bool:
    with suppress(OSError, ValueError):
        SegmentAddress.from_bytes(address).open()
        return True
    return False


def group_by_reach(reachable: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return groups of ranks that all reach each other, from the ranks that each rank reaches.

    A rank joins the first group all of whose ranks it reaches and is reached by.
    """
    sets = [set(peers) for peers in reachable]
    hosts: list[list[int]] = []
    for rank, own in enumerate(sets):
        for host in hosts:
            if all(peer in own and rank in sets[peer] for peer in host):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return hosts
