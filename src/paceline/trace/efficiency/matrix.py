"""The communication matrix: bytes and messages by pair of ranks, and volume by level of links.

Messages count as they were sent. A collective is no message: its bytes are laid on pairs by the
algorithm of `ALGORITHMS`, which is the usual one and need not be what the backend did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.core.record import Record
from paceline.trace.merge.matches import NONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.trace.efficiency.window import StepWindow
    from paceline.trace.format.files import RankTrace
    from paceline.trace.merge.matches import Matches

_RING, _FROM_ROOT, _TO_ROOT, _PAIRS = "ring", "root to each rank", "each rank to root", "pairwise"
ALGORITHMS = {
    "all_reduce": _RING,
    "all_gather": _RING,
    "reduce_scatter": _RING,
    "broadcast": _FROM_ROOT,
    "scatter": _FROM_ROOT,
    "reduce": _TO_ROOT,
    "gather": _TO_ROOT,
    "all_to_all": _PAIRS,
}
NODE, NETWORK, UNKNOWN = "node", "network", "unknown"
MOST_PAIRS = 4096  # that a result lists; sums are of all


class PairTraffic(NamedTuple):
    """What one rank sent to another; bytes and messages of collectives are apart."""

    source: int
    target: int
    messages: int
    message_bytes: int
    collective_messages: int
    collective_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelVolume(Record):
    """What went over one level of links.

    Attributes:
        level: ``node``: between ranks of one node; ``network``: between nodes; ``unknown``: a rank
            of the pair left no trace.
        messages: number of messages, those of collectives included.
        message_bytes: of messages between two ranks.
        collective_bytes: of collectives, by their algorithms.
    """

    level: str
    messages: int
    message_bytes: int
    collective_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationMatrix(Record):
    """Who sent how much to whom in a run.

    Attributes:
        pairs: pairs of ranks with traffic, at most `MOST_PAIRS`, those with most bytes first.
        pair_count: number of pairs with traffic.
        levels: volume by level of links, of all pairs.
        algorithms: how the bytes of each collective operation were laid on pairs.
        not_laid_bytes: by operation, input bytes of all ranks of collectives without an algorithm.
    """

    pairs: tuple[PairTraffic, ...]
    pair_count: int
    levels: tuple[LevelVolume, ...]
    algorithms: dict[str, str]
    not_laid_bytes: dict[str, int]


class MatrixSum:
    """Adds up the traffic of a run, window by window, in any order.

    Collectives on which ranks do not agree are left out.
    """

    def __init__(self, ranks: Sequence[RankTrace]) -> None:
        """Begin with nothing, between `ranks` and those that left no trace."""
        self._ranks = ranks
        self._world_size = ranks[0].status.world_size
        self._keys = np.zeros(0, dtype=np.int64)
        self._table = np.zeros((0, 4))  # messages, their bytes; the same of collectives
        self._used: set[str] = set()
        self._not_laid: dict[str, int] = {}

    def add(self, window: StepWindow) -> None:
        """Add the messages and collectives of a window's steps."""
        matches = window.matches
        calls = _calls_inside(window)
        sent = _summed(*_messages(window), self._world_size)
        moved = _summed(*_joined(_collectives(matches, calls)), self._world_size)
        keys = np.union1d(self._keys, np.union1d(sent[0], moved[0]))
        table = np.zeros((len(keys), 4))
        table[np.searchsorted(keys, self._keys)] = self._table
        for column, (own, counts, amounts) in ((0, sent), (2, moved)):
            at = np.searchsorted(keys, own)
            table[at, column] += counts
            table[at, column + 1] += amounts
        self._keys, self._table = keys, table
        operations = matches.calls["operation"][window.inside(matches.calls["step"])]
        self._used |= {matches.operations[i] for i in np.unique(operations).tolist()}
        for name, amount in _not_laid(matches, calls).items():
            self._not_laid[name] = self._not_laid.get(name, 0) + amount

    def result(self) -> CommunicationMatrix:
        """Return the communication matrix of all windows."""
        table = self._table
        sources, targets = self._keys // self._world_size, self._keys % self._world_size
        order = np.argsort(-(table[:, 1] + table[:, 3]), kind="stable")[:MOST_PAIRS]
        rows = np.rint(table[order]).astype(np.int64).tolist()
        ends = zip(sources[order].tolist(), targets[order].tolist(), strict=True)
        return CommunicationMatrix(
            pairs=tuple(PairTraffic(*pair, *row) for pair, row in zip(ends, rows, strict=True)),
            pair_count=len(self._keys),
            levels=_levels(self._ranks, sources, targets, table),
            algorithms={name: how for name, how in ALGORITHMS.items() if name in self._used},
            not_laid_bytes=dict(sorted(self._not_laid.items())),
        )


_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # source, target, messages, bytes


def _calls_inside(window: StepWindow) -> np.ndarray:
    """Return the calls of the collectives that began in a window's steps, by instance."""
    matches = window.matches
    first = matches.calls["step"][matches.by_instance[matches.instance_starts[:-1]]]
    chosen = window.inside(first) & matches.instances["agrees"]
    calls = matches.calls[matches.by_instance]
    return np.asarray(calls[chosen[calls["instance"]]])


def _messages(window: StepWindow) -> _Pairs:
    """Return each message once: as sent, or as received where the sender's side is not known."""
    matches = window.matches
    messages = matches.messages[window.inside(matches.messages["step"])]
    once = (messages["sends"] | (messages["partner"] == NONE)) & (messages["peer"] >= 0)
    messages = messages[once]
    own, peers = matches.ranks[messages["trace"]], messages["peer"].astype(np.int64)
    sources = np.where(messages["sends"], own, peers)
    targets = np.where(messages["sends"], peers, own)
    return sources, targets, np.ones(len(messages)), messages["amount"].astype(np.float64)


def _collectives(matches: Matches, calls: np.ndarray) -> Iterator[_Pairs]:
    """Yield what collectives, given by their calls, sent by their algorithms."""
    ranks = matches.ranks[calls["trace"]].astype(np.int64)
    count = matches.instances["ranks"][calls["instance"]].astype(np.float64)
    following = _following(calls["instance"])
    how = np.array([ALGORITHMS.get(name, "") for name in matches.operations], dtype=object)
    how = how[calls["operation"]] if len(calls) else how[:0]
    steps = np.where(matches.are(["all_reduce"])[calls["operation"]], 2.0, 1.0)
    share = steps * np.where(matches.are(["all_gather"])[calls["operation"]], count, 1.0) / count
    ring = (how == _RING) & (count > 1)
    hops = count - 1
    yield (
        ranks[ring],
        ranks[following][ring],
        (steps * hops)[ring],
        (share * hops * calls["amount"])[ring],
    )
    peers = calls["peer"].astype(np.int64)
    away = (peers >= 0) & (peers != ranks)
    gives, takes = (how == _TO_ROOT) & away, (how == _FROM_ROOT) & away
    yield ranks[gives], peers[gives], np.ones(gives.sum()), calls["amount"][gives] * 1.0
    largest = matches.instances["largest"][calls["instance"]]
    parts = np.where(matches.are(["scatter"])[calls["operation"]], count, 1.0)
    yield peers[takes], ranks[takes], np.ones(takes.sum()), (largest / parts)[takes]
    yield from _pairwise(matches, calls[how == _PAIRS])


def _pairwise(matches: Matches, calls: np.ndarray) -> Iterator[_Pairs]:
    """Yield what each group's all-to-alls sent: an equal part from each rank to each other one."""
    for group in np.unique(calls["group"]).tolist():
        own = calls[calls["group"] == group]
        count = len(matches.ranks)
        amounts = np.bincount(own["trace"], own["amount"], minlength=count)
        counts = np.bincount(own["trace"], minlength=count)
        members = np.flatnonzero(counts)
        sources, targets = (axis.ravel() for axis in np.meshgrid(members, members, indexing="ij"))
        apart = sources != targets
        sources, targets = sources[apart], targets[apart]
        yield (
            matches.ranks[sources],
            matches.ranks[targets],
            counts[sources] * 1.0,
            amounts[sources] / len(members),
        )


def _following(instances: np.ndarray) -> np.ndarray:
    """Return for each call the row of the next rank of its instance, after the last the first."""
    rows = np.arange(len(instances))
    last = np.ones(len(instances), dtype=bool)
    last[:-1] = instances[1:] != instances[:-1]
    first = np.concatenate([[True], last[:-1]]) if len(last) else last
    starts = rows[first]
    found = rows + 1
    found[last] = starts
    return found


def _joined(parts: Iterator[_Pairs]) -> _Pairs:
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return columns[0], columns[1], columns[2], columns[3]


def _summed(
    sources: np.ndarray, targets: np.ndarray, counts: np.ndarray, amounts: np.ndarray, ranks: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs as numbers, source times `ranks` plus target, with their sums."""
    keys, place = np.unique(sources.astype(np.int64) * ranks + targets, return_inverse=True)
    return keys, np.bincount(place, counts), np.bincount(place, amounts)


def _levels(
    ranks: Sequence[RankTrace], sources: np.ndarray, targets: np.ndarray, table: np.ndarray
) -> tuple[LevelVolume, ...]:
    nodes = np.full(ranks[0].status.world_size, -1)
    names: dict[str, int] = {}
    for rank in ranks:
        name = rank.status.boot_id or f"rank {rank.rank}"
        nodes[rank.rank] = names.setdefault(name, len(names))
    a, b = nodes[sources], nodes[targets]
    level = np.select([(a < 0) | (b < 0), a == b], [UNKNOWN, NODE], NETWORK)
    found = []
    for name in (NODE, NETWORK, UNKNOWN):
        own = table[level == name]
        if len(own):
            sums = own.sum(axis=0)
            found.append(
                LevelVolume(
                    level=name,
                    messages=round(float(sums[0] + sums[2])),
                    message_bytes=round(float(sums[1])),
                    collective_bytes=round(float(sums[3])),
                )
            )
    return tuple(found)


def _not_laid(matches: Matches, calls: np.ndarray) -> dict[str, int]:
    sums = np.bincount(calls["operation"], calls["amount"], minlength=len(matches.operations))
    return {
        name: int(sums[i])
        for i, name in enumerate(matches.operations)
        if name not in ALGORITHMS and sums[i] > 0
    }
