"""Wait states by rank, call and phase, and which rank and phase caused them: delay costs.

A rank that waits says where the time was lost, not why. The rank that came last, the *delayer*, is
compared with the rank that waited: since both were last synchronised, in which phases did the
delayer spend longer? The wait is charged to these phases, in proportion. If the delayer waited
longer as well, that share of the wait was only passed on: it is charged to the rank that made the
delayer wait, as indirect cost. Every second of waiting is charged once, so the costs add up to the
waiting.

Source: D. Boehme, M. Geimer, F. Wolf and L. Arnold, Identifying the root causes of wait states in
large-scale parallel applications (2010), sections 3 and 4. There each pair of calls is compared
since its last common synchronisation; here since each rank's last synchronising collective, or
since its step began if that collective is older than the step before.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record
from paceline.trace.efficiency.dependencies import WaitState, binding
from paceline.trace.efficiency.graph import rows_by
from paceline.trace.efficiency.timeline import phase_timeline
from paceline.trace.format.events import RECV, SEND, Kind
from paceline.trace.merge.keys import row_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.trace.efficiency.graph import DependencyGraph
    from paceline.trace.efficiency.replay import Levels
    from paceline.trace.efficiency.window import StepWindow

_WAITING, _TRANSFER = PHASES.index("waiting"), PHASES.index("transfer")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallWaits(Record):
    """The waiting of all ranks in one call, by its state and phase.

    Attributes:
        state: as Scalasca names it: wait at NxN, late broadcast, early reduce, late sender or late
            receiver.
        operation: for example ``all_reduce``; ``recv`` or ``send`` of messages.
        group: name of the process group.
        phase: of the step in which ranks called it, by a field of `Breakdown`.
        count: number of waits, one for each rank that waited.
        seconds: of all ranks together.
        longest_s: the longest of these waits.
    """

    state: str
    operation: str
    group: str
    phase: str
    count: int
    seconds: float
    longest_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWaits(Record):
    """One rank's waiting, and the waiting that it caused.

    Attributes:
        rank: the global rank.
        waited_s: by state, seconds.
        caused_s: waiting of all ranks that is charged to this rank, seconds.
    """

    rank: int
    waited_s: dict[str, float]
    caused_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DelayCost(Record):
    """The waiting that one rank caused, because it spent longer in one phase than those who waited.

    Attributes:
        rank: the global rank.
        phase: a field of `Breakdown`.
        direct_s: waiting for this rank, seconds, over all ranks that waited for it.
        indirect_s: waiting for other ranks that had waited for this one.
    """

    rank: int
    phase: str
    direct_s: float
    indirect_s: float

    @property
    def seconds(self) -> float:
        """Direct and indirect cost together."""
        return self.direct_s + self.indirect_s


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitStates(Record):
    """All waiting of the ranks in some steps of a run.

    Attributes:
        seconds: of all ranks together.
        calls: by state, operation, group and phase, the costliest first.
        ranks: of each rank that left a trace.
        delays: by rank and phase that caused it, the costliest first; they add up to `seconds`.
    """

    seconds: float
    calls: tuple[CallWaits, ...]
    ranks: tuple[RankWaits, ...]
    delays: tuple[DelayCost, ...]


class WaitSum:
    """Adds up the waiting of a run, window by window, from the last one to the first."""

    def __init__(self, ranks: np.ndarray) -> None:
        """Begin with nothing.

        Args:
            ranks: the global rank of each trace, shape (traces,).
        """
        self._ranks = ranks
        self._seconds = 0.0
        self._costs = np.zeros((2, len(ranks), len(PHASES)))  # direct, indirect
        self._by_state = np.zeros((len(ranks), len(WaitState)))
        self._calls: dict[_CallKey, CallWaits] = {}
        self._passed_on: _PassedOn | None = None

    def add(self, window: StepWindow, graph: DependencyGraph, levels: Levels) -> None:
        """Add the waiting of a window, the one before those that were added."""
        found = _Delays(window, graph, levels, self._passed_on)
        self._seconds += float(found.waits_s.sum())
        self._costs += found.costs()
        self._passed_on = found.passed_on
        np.add.at(self._by_state, (found.rows["trace"], found.rows["state"]), found.waits_s)
        for key, call in _calls(window, found):
            known = self._calls.get(key)
            self._calls[key] = call if known is None else _joined(known, call)

    def result(self) -> WaitStates:
        """Return the waiting of all windows."""
        direct_s, indirect_s = self._costs
        caused_s = self._costs.sum(axis=(0, 2))
        costs = [
            DelayCost(
                rank=int(self._ranks[i]),
                phase=PHASES[phase],
                direct_s=float(direct_s[i, phase]),
                indirect_s=float(indirect_s[i, phase]),
            )
            for i, phase in np.argwhere(direct_s + indirect_s > 0).tolist()
        ]
        by_state = self._by_state
        return WaitStates(
            seconds=self._seconds,
            calls=tuple(sorted(self._calls.values(), key=lambda call: -call.seconds)),
            ranks=tuple(
                RankWaits(
                    rank=int(rank),
                    waited_s={s.label: float(by_state[i, s]) for s in WaitState if by_state[i, s]},
                    caused_s=float(caused_s[i]),
                )
                for i, rank in enumerate(self._ranks.tolist())
            ),
            delays=tuple(sorted(costs, key=lambda cost: -cost.seconds)),
        )


_CallKey = tuple[str, str, str, str]  # state, operation, group, phase


def _joined(a: CallWaits, b: CallWaits) -> CallWaits:
    return dataclasses.replace(
        a,
        count=a.count + b.count,
        seconds=a.seconds + b.seconds,
        longest_s=max(a.longest_s, b.longest_s),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _PassedOn:
    """What the waits of later windows pass on to earlier ones, by second of waiting.

    Attributes:
        to_waits: of each trace, to the waits before the later window; the last of them last.
        reached: by trace, what reaches every wait of the open interval, shape (traces,).
        since: where that interval begins, in waits from the later window's begin, at most 0;
            `_CLOSED` if none is open.
        before: by trace, what reaches every wait of the interval before, shape (traces,).
    """

    to_waits: list[np.ndarray]
    reached: np.ndarray
    since: np.ndarray
    before: np.ndarray


_CLOSED = 1


class _Delays:
    """Charges each wait of a window to the rank and phases that caused it.

    Attributes:
        rows: the last dependency of each wait that lasted, an array of `DEPENDENCY`.
        waits_s: how long each lasted, seconds, shape (waits,).
        phases: in which phase each was, shape (waits,).
        passed_on: what they pass on to waits of earlier windows, once `costs` are known.
    """

    def __init__(
        self,
        window: StepWindow,
        graph: DependencyGraph,
        levels: Levels,
        passed_on: _PassedOn | None,
    ) -> None:
        self.window = window
        self.traces = len(window.trace.ranks)
        self.passed_on = passed_on
        rows = binding(graph.dependencies)
        nodes = graph.node_of(rows["trace"], rows["wait"])
        starts = graph.wait_starts
        waits = np.concatenate(window.waits)
        flat = starts[rows["trace"]] + rows["wait"]
        lasts = (waits["ready_ns"][flat] > waits["begin_ns"][flat]) & (graph.wait_steps[flat] >= 0)
        self.all_waits_ns = np.zeros(len(waits), dtype=np.int64)  # 0 without a row
        lasting = waits[flat[lasts]]
        self.all_waits_ns[flat[lasts]] = lasting["ready_ns"] - lasting["begin_ns"]
        lasts &= nodes >= 0
        self.rows, self.flat, self.starts = rows[lasts], flat[lasts], starts
        self.begins_ns = waits["begin_ns"][self.flat]
        self.waits_s = self.all_waits_ns[self.flat] / 1e9
        self.level = levels.level[nodes[lasts]]
        periods = graph.periods_of(nodes[lasts], self.rows["trace"].astype(np.int64))
        # What the delayer did in a later step counts at the end of this one.
        self.entered_ns = np.minimum(
            self.rows["entered_ns"], graph.step_ends_ns[self.rows["late"], periods]
        )
        self.core = [
            np.array(
                [
                    int(start) + int(np.searchsorted(own["begin_ns"], bound_ns))
                    for start, own, bound_ns in zip(
                        starts[:-1], window.waits, graph.recorded_ns[bounds], strict=True
                    )
                ],
                dtype=np.int64,
            )
            for bounds in (graph.begins[:-1], graph.ends)
        ]
        self.phases = np.zeros(len(self.rows), dtype=np.int64)
        # By phase, since the ranks were last synchronised: the delayer's time, less the other's.
        self.longer_ns = np.zeros((len(self.rows), len(PHASES)), dtype=np.float32)
        # The delayer's waits in that time: rows of all waits.
        self.first_passed = np.zeros(len(self.rows), dtype=np.int64)
        self.last_passed = np.zeros(len(self.rows), dtype=np.int64)
        self.own_first = np.zeros(len(self.rows), dtype=np.int64)
        self._compare()

    def _compare(self) -> None:
        """Fill in, rank by rank, what each rank did as one that waits, and as a delayer."""
        waiting = rows_by(self.rows["trace"], self.traces)
        delaying = rows_by(self.rows["late"], self.traces)
        for trace_index in range(self.traces):
            own, late = waiting[trace_index], delaying[trace_index]
            if not (len(own) or len(late)):
                continue
            timeline = phase_timeline(self.window, trace_index)
            syncs = _Syncs(self.window, trace_index)
            since_ns, first = syncs.before(self.begins_ns[own])
            self.longer_ns[own] -= timeline.between_ns(since_ns, self.begins_ns[own])
            self.own_first[own] = first + self.starts[trace_index]
            outer = phase_timeline(self.window, trace_index, with_waits=False)
            self.phases[own] = outer.at(self.begins_ns[own])
            entered_ns = self.entered_ns[late]
            since_ns, first = syncs.before(entered_ns)
            self.longer_ns[late] += timeline.between_ns(since_ns, entered_ns)
            self.first_passed[late] = first + self.starts[trace_index]
            over = np.searchsorted(syncs.ends_ns, entered_ns, side="right")
            self.last_passed[late] = np.maximum(over, first) + self.starts[trace_index]

    def costs(self) -> np.ndarray:
        """Return direct and indirect costs, seconds, shape (2, traces, phases)."""
        longer_ns = np.maximum(self.longer_ns, 0.0)
        passed_ns = longer_ns[:, _WAITING].astype(np.float64)
        longer_ns[:, _WAITING] = 0.0
        # A delayer that did nothing longer left the last collective later.
        nothing = longer_ns.sum(axis=1) == 0.0
        longer_ns[nothing, _TRANSFER] = 1.0
        total_ns = longer_ns.sum(axis=1, dtype=np.float64)
        sums_ns = np.concatenate([[0], np.cumsum(self.all_waits_ns)])
        passed_sum_ns = (sums_ns[self.last_passed] - sums_ns[self.first_passed]).astype(np.float64)
        passed_ns[passed_sum_ns == 0] = 0.0
        own_ns = np.where(nothing & (passed_ns > 0), 0.0, total_ns)
        passed = passed_ns / (own_ns + passed_ns)
        all_s = self._propagated(passed, passed_sum_ns)
        shares = longer_ns / total_ns[:, None] * (1 - passed)[:, None]
        charged = np.zeros((2, self.traces, len(PHASES)))
        for late, own in enumerate(rows_by(self.rows["late"], self.traces)):
            charged[0, late] = self.waits_s[own] @ shares[own]
            charged[1, late] = (all_s - self.waits_s)[own] @ shares[own]
        return charged

    def _propagated(self, passed: np.ndarray, passed_sum_ns: np.ndarray) -> np.ndarray:
        """Return the cost of each wait: its own seconds, and what later waits passed on to it.

        Waits are taken from the last level to the first: who passes a wait on waits later. What is
        passed on goes to all waits of the delayer since its sync, in proportion to their length;
        `passed_on` holds it at the last of them until the delayer's waits are reached, backwards.
        """
        all_s: np.ndarray = self.waits_s.copy()
        core_start, core_stop = self.core
        passed_on = np.zeros(len(self.all_waits_ns))  # by second of waiting
        reached = np.zeros(self.traces)  # the sum of that for the waits before, of each rank
        before = np.zeros(self.traces)  # the same for the interval before that
        since = self.starts[1:].copy()  # the first wait of the interval that is summed
        until = self.starts[1:].copy()  # the wait down to which it is summed
        if (later := self.passed_on) is not None:
            for trace_index, values in enumerate(later.to_waits):
                stop = core_stop[trace_index]
                kept = values[len(values) - min(len(values), stop - self.starts[trace_index]) :]
                passed_on[stop - len(kept) : stop] = kept
            reached, before = later.reached.copy(), later.before.copy()
            since = core_stop + np.minimum(later.since, 0)
            until = core_stop.copy()
        order = np.argsort(-self.level, kind="stable")
        bounds = np.flatnonzero(np.diff(self.level[order])) + 1
        for rows in np.split(order, bounds):
            traces, flat = self.rows["trace"][rows], self.flat[rows]
            fresh = since[traces] != self.own_first[rows]
            reached[traces[fresh]] = before[traces[fresh]]
            before[traces[fresh]] = 0.0
            until[traces] = np.where(fresh, np.minimum(until[traces], since[traces]), until[traces])
            reached[traces] += _sums(passed_on, flat, until[traces])
            since[traces], until[traces] = self.own_first[rows], flat
            all_s[rows] += self.waits_s[rows] * reached[traces]
            chosen = rows[passed[rows] > 0]
            per_s = all_s[chosen] * passed[chosen] / (passed_sum_ns[chosen] / 1e9)
            np.add.at(passed_on, self.last_passed[chosen] - 1, per_s)
        # What is left of the window's own interval, or belongs to the one before it.
        is_open = since <= core_start
        left = _sums(passed_on, core_start, np.where(is_open, until, np.minimum(until, since)))
        self.passed_on = _PassedOn(
            [
                passed_on[first:stop].copy()
                for first, stop in zip(self.starts[:-1].tolist(), core_start.tolist(), strict=True)
            ],
            np.where(is_open, reached + left, 0.0),
            np.where(is_open, since - core_start, _CLOSED),
            np.where(is_open, 0.0, before + left),
        )
        return all_s


def _sums(values: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return the sum of values[first:stop] of each pair."""
    counts = np.maximum(0, stop - first)
    owner = np.repeat(np.arange(len(first)), counts)
    at = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts) + first[owner]
    return np.asarray(np.bincount(owner, values[at], minlength=len(first)))


class _Syncs:
    """When a rank was last synchronised before a time: its waits' ends, and its steps' begins."""

    def __init__(self, window: StepWindow, trace_index: int) -> None:
        waits = window.waits[trace_index]
        rank, clock = window.trace.ranks[trace_index], window.trace.clocks[trace_index]
        self.begins_ns = waits["begin_ns"]
        self.ends_ns = np.maximum.accumulate(waits["end_ns"])
        self.steps_ns = np.sort(clock.to_run_ns(rank.events_of(Kind.STEP)["begin_ns"]))
        numbers = np.where(waits["synchronises"], np.arange(len(waits)), -1)
        self.last = np.concatenate([[-1], np.maximum.accumulate(numbers)]).astype(np.int64)

    def before(self, times_ns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return when the rank was last synchronised before each time, and its first wait since."""
        over = np.searchsorted(self.ends_ns, times_ns, side="right")
        last = self.last[over]
        at = np.searchsorted(self.steps_ns, times_ns, side="right") - 1
        step_ns = self.steps_ns[np.maximum(at, 0)] if len(self.steps_ns) else times_ns
        oldest_ns = self.steps_ns[np.maximum(at - 1, 0)] if len(self.steps_ns) else times_ns
        step_ns = np.minimum(step_ns, times_ns)
        sync_ns = self.ends_ns[np.maximum(last, 0)] if len(self.ends_ns) else step_ns
        recent = (last >= 0) & (sync_ns >= oldest_ns)
        of_step = np.searchsorted(self.begins_ns, step_ns, side="left")
        return np.where(recent, sync_ns, step_ns), np.where(recent, last + 1, of_step)


def _calls(window: StepWindow, found: _Delays) -> Iterator[tuple[_CallKey, CallWaits]]:
    rows = found.rows
    if not len(rows):
        return
    names = (*window.matches.operations, SEND, RECV)
    columns = (rows["state"], rows["operation"], rows["group"], found.phases)
    ids = row_ids(*(column.astype(np.int64) for column in columns))
    count = int(ids.max()) + 1
    sums, counts = np.bincount(ids, found.waits_s), np.bincount(ids)
    longest = np.zeros(count)
    np.maximum.at(longest, ids, found.waits_s)
    _, first = np.unique(ids, return_index=True)
    for number, row in enumerate(first.tolist()):
        state, operation = WaitState(int(rows["state"][row])).label, names[rows["operation"][row]]
        group = window.matches.groups[rows["group"][row]].name
        phase = PHASES[found.phases[row]]
        yield (
            (state, operation, group, phase),
            CallWaits(
                state=state,
                operation=operation,
                group=group,
                phase=phase,
                count=int(counts[number]),
                seconds=float(sums[number]),
                longest_s=float(longest[number]),
            ),
        )
