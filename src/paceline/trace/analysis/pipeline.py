"""Finds how the ranks of a pipeline spent their batches: when they computed, and when they idled.

A rank records each action of its stages, and its waits for values of other stages in them. A batch
lasts from the first action of the first stage to the last action of any rank of the pipeline; a
rank computes in it, or idles::

    rank 0   F0 F1 -- B0 F2 B1 .. F3 B2 -- B3         - warm-up and drain, . between
    rank 1   -- F0 B0 F1 B1 F2 B2 .. F3 B3 --

    warm-up   until the rank's first backward pass has what it needs
    drain     after the rank's last forward pass
    between   the rest: other ranks take longer for a microbatch than this one
    exposed   the value that the rank waited for was on its way, wherever in the batch

All but the last are waiting for a value that was not sent yet. What a value takes on its way can be
seen where its receiver waited already when it was sent; values of that size take as long while the
receiver computes, which hides them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import RECV, WITHOUT_GRADIENTS, Kind
from paceline.trace.merge.keys import row_ids
from paceline.trace.merge.matches import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.phases import RankPhases
    from paceline.trace.merge import Trace

FORWARD = "forward"  # name of an action; those of all others begin with "backward"
_NEVER = np.iinfo(np.int64).max
_PARTS = ("warm_up", "between", "drain", "exposed")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownAction(Record):
    """An action of the batch that stands for all, with times from the begin of the batch.

    Attributes:
        kind: ``forward``, ``backward``, ``backward_input`` or ``backward_weight``.
        stage: of the model.
        microbatch: of the batch.
        begin_s: when the rank had what the action needs.
        end_s: when it ended.
    """

    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRank(Record):
    """What a rank did in a batch; seconds are means over batches.

    Attributes:
        rank: the global rank.
        stages: that it computes.
        busy_s: computing, with what lies between its actions.
        warm_up_s: idle until its first backward pass had what it needs.
        between_s: idle between its first backward and its last forward pass.
        drain_s: idle after its last forward pass.
        exposed_s: idle while the value that it needed was on its way.
        shown: its actions in the batch of median length; empty for ranks of other replicas.
    """

    rank: int
    stages: tuple[int, ...]
    busy_s: float
    warm_up_s: float
    between_s: float
    drain_s: float
    exposed_s: float
    shown: tuple[ShownAction, ...] = ()

    @property
    def idle_s(self) -> float:
        """Seconds in which it did not compute."""
        return self.warm_up_s + self.between_s + self.drain_s + self.exposed_s


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTime(Record):
    """What a stage computes for a microbatch: seconds without waiting, means over microbatches.

    Attributes:
        stage: of the model.
        ranks: that compute it, one of each replica.
        forward_s: of the forward pass.
        backward_s: of the backward pass, both parts of it.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTransfers(Record):
    """The values that stages sent each other in a batch, over all ranks; means over batches.

    Attributes:
        hidden_bytes: that were on their way while their receiver computed.
        exposed_bytes: that were on their way while their receiver waited.
        hidden_s: seconds of the former; of values of a size for which a receiver ever waited.
        exposed_s: seconds of the latter.
    """

    hidden_bytes: int
    exposed_bytes: int
    hidden_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineUse(Record):
    """How the ranks of a model in stages spent their batches.

    Attributes:
        batches: that the figures are of: all but the first of the most common form.
        microbatches: of such a batch.
        batch_s: seconds of a batch, the mean.
        step_s: seconds of the steps that these batches are part of, over the batches.
        ranks: of all replicas.
        stages: of the model.
        transfers: between the stages.
    """

    batches: int
    microbatches: int
    batch_s: float
    step_s: float
    ranks: tuple[PipelineRank, ...]
    stages: tuple[StageTime, ...]
    transfers: StageTransfers

    @property
    def idle_share(self) -> float:
        """Idle time of all ranks over their time in batches, 0 to 1."""
        return self._idle_s / self.batch_s

    @property
    def step_share(self) -> float:
        """Idle time of all ranks over their time in steps, 0 to 1."""
        return self._idle_s / max(self.step_s, self.batch_s)

    @property
    def _idle_s(self) -> float:
        return sum(rank.idle_s for rank in self.ranks) / len(self.ranks)


def pipeline_use(
    trace: Trace, waits: Sequence[np.ndarray], phases: Sequence[RankPhases]
) -> PipelineUse | None:
    """Return how ranks spent the batches of a model in stages; None where nothing is known of it.

    Args:
        trace: of a run.
        waits: one array of `WAIT_INTERVAL` per rank, from `wait_intervals`.
        phases: of each rank.
    """
    ranks = [_RankActions(trace, i, waits[i]) for i in range(len(trace.ranks))]
    pipelines = _pipelines(ranks)
    if not pipelines:
        return None
    first = pipelines[0]
    chosen = _common_batches([rank for pipeline in pipelines for rank in pipeline])
    if not len(chosen):
        return None
    windows = [_window(pipeline, chosen) for pipeline in pipelines]
    lasted = windows[0][1] - windows[0][0]
    shown = int(np.argsort(lasted, kind="stable")[len(lasted) // 2])
    described = [
        rank.described(chosen, *window, shown if pipeline is first else None)
        for pipeline, window in zip(pipelines, windows, strict=True)
        for rank in pipeline
    ]
    members = [rank for pipeline in pipelines for rank in pipeline]
    step_s = np.mean([rank.step_s(chosen, phases[rank.index]) for rank in members])
    return PipelineUse(
        batches=len(chosen),
        microbatches=len(np.unique(members[0].actions_of(chosen)["amount"])),
        batch_s=float(np.mean([(end - begin).mean() for begin, end in windows])) / 1e9,
        step_s=float(step_s),
        ranks=tuple(sorted(described, key=lambda rank: rank.rank)),
        stages=_stages(members, chosen),
        transfers=_transfers(trace, members, chosen),
    )


class _RankActions:
    """The actions of one rank in training, on the run's clock, with the waits in them."""

    def __init__(self, trace: Trace, index: int, waits: np.ndarray) -> None:
        self.index, self.trace = index, trace.ranks[index]
        events = self.trace.events_of(Kind.STAGE)
        self.events = events = events[(events["flags"] & WITHOUT_GRADIENTS) == 0]
        clock = trace.clocks[index]
        self.begin_ns = np.asarray(clock.to_run_ns(events["begin_ns"]), dtype=np.int64)
        self.end_ns = np.asarray(clock.to_run_ns(events["end_ns"]), dtype=np.int64)
        self.batch = events["sequence"].astype(np.int64)
        names = np.array([name == FORWARD for name in self.trace.names])
        self.is_forward = names[events["name"]] if len(events) else np.zeros(0, dtype=bool)
        recv = [name == RECV for name in self.trace.names]
        received = np.array(recv)[self.trace.events_of(Kind.WAIT)["name"]] if len(waits) else waits
        action = np.searchsorted(self.begin_ns, waits["begin_ns"], side="right") - 1
        within = action >= 0
        within[within] = waits["begin_ns"][within] < self.end_ns[action[within]]
        self.waits, self.action = waits[within], action[within]
        self.received = received[within] if len(waits) else np.zeros(0, dtype=bool)
        self.ready_ns = self.begin_ns.copy()  # when an action had what it needs
        np.maximum.at(self.ready_ns, self.action, self.waits["end_ns"])
        waited = np.bincount(
            self.action,
            weights=(self.waits["end_ns"] - self.waits["begin_ns"]).astype(np.float64),
            minlength=len(events),
        )
        self.busy_ns = (self.end_ns - self.begin_ns) - waited

    @property
    def rank(self) -> int:
        return self.trace.rank

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(np.unique(self.events["tag"]).tolist())

    def actions_of(self, batches: np.ndarray) -> np.ndarray:
        return np.asarray(self.events[np.isin(self.batch, batches)])

    def bounds(self, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when its first action of each batch began, and its last one ended."""
        place, within = _places(self.batch, batches)
        begin, end = np.full(len(batches), _NEVER), np.zeros(len(batches), dtype=np.int64)
        np.minimum.at(begin, place, self.begin_ns[within])
        np.maximum.at(end, place, self.end_ns[within])
        return begin, end

    def described(
        self, batches: np.ndarray, begin: np.ndarray, end: np.ndarray, shown: int | None
    ) -> PipelineRank:
        """Return what it did in the batches, which begin and end as given.

        Args:
            batches: numbers.
            begin: of each batch, on the run's clock.
            end: of each batch.
            shown: place of the batch of which actions are returned; None: of none.
        """
        place, within = _places(self.batch, batches)
        backward, forward = ~self.is_forward[within], self.is_forward[within]
        first_backward = np.full(len(batches), _NEVER)
        last_forward = np.zeros(len(batches), dtype=np.int64)
        np.minimum.at(first_backward, place[backward], self.ready_ns[within][backward])
        np.maximum.at(last_forward, place[forward], self.end_ns[within][forward])
        own_begin, own_end = self.bounds(batches)
        waits_at, chosen = _places(self.batch[self.action], batches)
        waits = self.waits[chosen]
        from_ns = np.maximum(waits["begin_ns"], begin[waits_at])
        ready_ns = np.maximum(waits["ready_ns"], from_ns)
        exposed_ns = np.maximum(0, waits["end_ns"] - ready_ns).sum()
        pieces = [
            (np.arange(len(batches)), begin, own_begin),
            (waits_at, from_ns, ready_ns),
            (np.arange(len(batches)), own_end, end),
        ]
        at, since, until = (np.concatenate(column) for column in zip(*pieces, strict=True))
        idle_ns = np.maximum(0, until - since)
        is_warm_up = since < first_backward[at]
        is_drain = ~is_warm_up & (since >= last_forward[at])
        total = 1e9 * len(batches)
        return PipelineRank(
            rank=self.rank,
            stages=self.stages,
            busy_s=float(((end - begin).sum() - idle_ns.sum() - exposed_ns) / total),
            warm_up_s=float(idle_ns[is_warm_up].sum() / total),
            between_s=float(idle_ns[~is_warm_up & ~is_drain].sum() / total),
            drain_s=float(idle_ns[is_drain].sum() / total),
            exposed_s=float(exposed_ns / total),
            shown=() if shown is None else self._shown(int(batches[shown]), int(begin[shown])),
        )

    def _shown(self, batch: int, begin_ns: int) -> tuple[ShownAction, ...]:
        return tuple(
            ShownAction(
                kind=self.trace.names[self.events["name"][row]],
                stage=int(self.events["tag"][row]),
                microbatch=int(self.events["amount"][row]),
                begin_s=int(self.ready_ns[row] - begin_ns) / 1e9,
                end_s=int(self.end_ns[row] - begin_ns) / 1e9,
            )
            for row in np.flatnonzero(self.batch == batch).tolist()
        )

    def step_s(self, batches: np.ndarray, phases: RankPhases) -> float:
        """Return the seconds of the steps that have these batches, over the batches."""
        steps = np.unique(self.actions_of(batches)["step"])
        return float(phases.train_s[steps[steps < phases.steps]].sum()) / len(batches)


def _places(numbers: np.ndarray, batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the place in `batches` of those numbers that are there, and which these are."""
    within = np.isin(numbers, batches)
    return np.searchsorted(batches, numbers[within]), within


def _pipelines(ranks: Sequence[_RankActions]) -> list[list[_RankActions]]:
    """Return the ranks of each replica that has all stages; none without several stages.

    The replicas of a stage are on ranks of rising numbers, in the order of the replicas.
    """
    holders: dict[int, list[_RankActions]] = {}
    for rank in ranks:
        for stage in rank.stages:
            holders.setdefault(stage, []).append(rank)
    if sum(bool(rank.stages) for rank in ranks) < 2 or len(holders) < 2:
        return []
    replicas = min(map(len, holders.values()))
    if any(len(found) != replicas for found in holders.values()):
        return []  # a rank left no trace
    return [
        list({id(held[replica]): held[replica] for _, held in sorted(holders.items())}.values())
        for replica in range(replicas)
    ]


def _common_batches(ranks: Sequence[_RankActions]) -> np.ndarray:
    """Return the batches that all ranks took, without the first, of the most common form.

    The first one also sends what tensors look like, and waits for what is made once.
    """
    common: np.ndarray | None = None
    for rank in ranks:  # of each rank alone: one that was killed has only a part of its last batch
        batches, counts = np.unique(rank.batch[rank.batch > 1], return_counts=True)
        if not len(batches):
            return batches
        values, times = np.unique(counts, return_counts=True)
        usual = batches[counts == values[::-1][times[::-1].argmax()]]  # of equally many the whole
        common = usual if common is None else np.intersect1d(common, usual)
    assert common is not None
    return common


def _window(pipeline: Sequence[_RankActions], batches: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when each batch began at the first stage, and ended on all ranks."""
    begin, _ = pipeline[0].bounds(batches)
    return begin, np.max([rank.bounds(batches)[1] for rank in pipeline], axis=0)


def _stages(ranks: Sequence[_RankActions], batches: np.ndarray) -> tuple[StageTime, ...]:
    found = []
    for stage in sorted({stage for rank in ranks for stage in rank.stages}):
        spent = {True: 0.0, False: 0.0}
        count = 0
        holders = [rank for rank in ranks if stage in rank.stages]
        for rank in holders:
            mine = np.isin(rank.batch, batches) & (rank.events["tag"] == stage)
            for is_forward in (True, False):
                spent[is_forward] += rank.busy_ns[mine & (rank.is_forward == is_forward)].sum()
            count += int((mine & rank.is_forward).sum())
        found.append(
            StageTime(
                stage=stage,
                ranks=tuple(sorted(rank.rank for rank in holders)),
                forward_s=float(spent[True] / count / 1e9),
                backward_s=float(spent[False] / count / 1e9),
            )
        )
    return tuple(found)


def _transfers(trace: Trace, ranks: Sequence[_RankActions], batches: np.ndarray) -> StageTransfers:
    rows = []
    for rank in ranks:
        mine = np.isin(rank.batch[rank.action], batches) & rank.received
        mine &= rank.waits["message"] != NONE
        waits = rank.waits[mine]
        messages = trace.matches.messages[waits["message"]]
        rows.append(
            np.column_stack(
                [
                    messages["trace"],
                    messages["peer"],
                    messages["amount"],
                    waits["end_ns"] - waits["ready_ns"],
                    waits["ready_ns"] > waits["begin_ns"],
                ]
            )
        )
    found = np.concatenate(rows).astype(np.int64)
    if not len(found):
        return StageTransfers(hidden_bytes=0, exposed_bytes=0, hidden_s=0.0, exposed_s=0.0)
    *_, amount, exposed, is_whole = found.T
    typical = np.zeros(len(found))
    classes = row_ids(*(found[:, column] for column in range(3)))
    for number in np.unique(classes).tolist():
        same = classes == number
        seen = exposed[same & (is_whole > 0)]
        typical[same] = np.median(seen) if len(seen) else 0.0
    hidden = np.maximum(0.0, typical - exposed)
    unknown = exposed <= 0  # of a size that nobody waited for from its begin: hidden or not
    shares = np.where(typical > 0, hidden / np.maximum(typical, 1.0), unknown)
    count = len(batches)
    return StageTransfers(
        hidden_bytes=round(float((shares * amount).sum()) / count),
        exposed_bytes=round(float(((1 - shares) * amount).sum()) / count),
        hidden_s=float(hidden.sum()) / 1e9 / count,
        exposed_s=float(exposed.sum()) / 1e9 / count,
    )
