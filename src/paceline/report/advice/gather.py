"""Gathers the figures that advice rests on from the analysis of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.breakdown import PHASES, Breakdown
from paceline.report.advice.facts import (
    Facts,
    Scope,
    StragglerScope,
    UnevenEvaluation,
    working_s,
)
from paceline.report.compare import undisturbed_steps
from paceline.trace.analysis.communication import size_classes_bytes
from paceline.trace.analysis.host import HostTime
from paceline.trace.format.events import (
    BUFFER_BYTES,
    EVALUATION_SPAN,
    LOADER_STAGES,
    LOADER_WORKERS,
    MAIN,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.machine import Machine
    from paceline.report.out_of_core import Spilling
    from paceline.report.pipeline import Bubble
    from paceline.trace.analysis import Analysis
    from paceline.trace.analysis.blame import Straggler
    from paceline.trace.analysis.communication import Traffic
    from paceline.trace.analysis.phases import RankPhases
    from paceline.trace.format.files import RankTrace

_EVALUATION, _WAITING = PHASES.index("evaluation"), PHASES.index("waiting")
_EVALUATES = 0.5  # of the evaluations of the rank that makes most, to be one that evaluates
_EACH_STEP = 0.9  # broadcasts per step from which they are repeated in each


def gather_facts(
    analysis: Analysis,
    *,
    config: dict[str, Any],
    machine: Machine | None,
    bubble: Bubble | None = None,
    spilling: Spilling | None = None,
) -> Facts:
    """Return what the rules of `advice` read.

    Args:
        analysis: of the run.
        config: the run's ``config.json``.
        machine: that it ran on.
        bubble: why the ranks of a model in stages idled.
        spilling: what a memory budget took.
    """
    ranks, steps = analysis.phases, analysis.steps
    traces = analysis.trace.ranks
    if not steps:
        return Facts(steps=0, step=Breakdown())
    step = _mean_step(ranks, np.ones(steps, dtype=bool))
    by_node = Counter(trace.status.boot_id for trace in traces)
    threads = config.get("threads")
    threads = threads if isinstance(threads, int) else None
    evaluations = [_evaluations(trace) for trace in traces]
    return Facts(
        steps=steps,
        step=step,
        undisturbed=_undisturbed(ranks, analysis.stragglers),
        stragglers=tuple(_straggler(analysis, late) for late in analysis.stragglers),
        uneven_evaluation=uneven_evaluation(ranks, evaluations, steps),
        usual_waiting_s=float(
            np.median(np.mean([rank.seconds[:steps, _WAITING] for rank in ranks], axis=0))
        ),
        host_work=mean_times([rank.host for rank in ranks]),
        evaluations=max(evaluations),
        checkpoints=max(_count(trace, Kind.CHECKPOINT, steps) for trace in traces),
        loader_workers=loader_workers(traces),
        loader_queued=(analysis.loader.queued or 0.0) if analysis.loader is not None else 0.0,
        loader_stages_s=_loader_stages_s(traces),
        ranks=max(by_node.values()),
        threads=threads,
        cores=_cores(machine),
        cpu_s=max(by_node.values()) * _mean(rank.running_s[:steps] for rank in ranks),
        no_core_s=_no_core_s(analysis, step, threads),
        missing_ranks=bool(analysis.trace.missing_ranks),
        pipeline=analysis.pipeline,
        bubble=bubble,
        spilling=spilling,
        rebalanced=_is_rebalanced(config),
        **_communication(analysis),
    )


def _is_rebalanced(config: dict[str, Any]) -> bool:
    values = config.get("values")
    if not isinstance(values, dict):
        return False
    given = (values.get(name) for name in ("rebalance", "shares"))
    return any(isinstance(setting, dict) and setting.get("value") for setting in given)


def mean_times(by_rank: Sequence[Sequence[HostTime]]) -> tuple[HostTime, ...]:
    """Return the named work of all ranks, the longest first: the mean of seconds over ranks.

    Work that was timed and work that was sampled keep apart, whatever their names.
    """
    found: dict[tuple[str, bool], list[HostTime]] = defaultdict(list)
    for times in by_rank:
        for time in times:
            found[time.name, time.samples > 0].append(time)
    means = [
        HostTime(
            name=name,
            measured_s=sum(time.measured_s for time in times) / len(by_rank),
            samples=sum(time.samples for time in times),
            near=any(time.near for time in times),
        )
        for (name, _), times in found.items()
    ]
    return tuple(sorted(means, key=lambda time: -time.measured_s))


def _undisturbed(ranks: Sequence[RankPhases], stragglers: Sequence[Straggler]) -> Scope | None:
    """Return the steps in which no rank's data is late: what else is, workers would not cure."""
    stragglers = [late for late in stragglers if late.cause == "data"]
    chosen = undisturbed_steps(ranks, stragglers)
    if not chosen.any():
        return None
    words = "in the other steps" if stragglers else ""
    return Scope(steps=int(chosen.sum()), words=words, rank=None, step=_mean_step(ranks, chosen))


def _straggler(analysis: Analysis, late: Straggler) -> StragglerScope:
    ranks = analysis.phases
    chosen = np.zeros(analysis.steps, dtype=bool)
    chosen[late.first_step : late.last_step + 1] = True
    index = next(i for i, rank in enumerate(ranks) if rank.rank == late.rank)
    others = [rank for rank in ranks if rank.rank != late.rank]
    scope = Scope(
        steps=int(chosen.sum()),
        words=_steps_words(late.first_step, late.last_step),
        rank=late.rank,
        step=_mean_step([ranks[index]], chosen),
        others=_mean_step(others, chosen) if others else None,
    )
    mean_late_s = float(analysis.skew_s[index, chosen].mean())
    reaches_end = late.last_step >= analysis.steps - max(10, analysis.steps // 10)
    return StragglerScope(
        scope=scope,
        cause=late.cause,
        late_s=mean_late_s,
        place=late.place,
        is_lasting=reaches_end and late.shape in ("persistent", "drifting"),
        ranks=analysis.trace.world_size,
    )


def _steps_words(first: int, last: int) -> str:
    return f"in step {first}" if first == last else f"in steps {first} to {last}"


def _evaluations(trace: RankTrace) -> int:
    """Return how many evaluations a rank made."""
    spans = trace.events_of(Kind.EVALUATION)
    if EVALUATION_SPAN not in trace.names:
        return 0
    return int((spans["name"] == trace.names.index(EVALUATION_SPAN)).sum())


def uneven_evaluation(
    ranks: Sequence[RankPhases], evaluations: Sequence[int], steps: int
) -> UnevenEvaluation | None:
    """Return which ranks evaluate while the others wait for them; None if none does.

    In each step the others wait for the evaluation no longer than it exceeds their own.

    Args:
        ranks: phases of each rank.
        evaluations: that each of them made; one that evaluates, too, is not waiting for others to.
        steps: that all ranks completed.
    """
    evaluation_s = np.array([rank.seconds[:steps, _EVALUATION] for rank in ranks])
    counts = np.array(evaluations)
    evaluates = counts > _EVALUATES * counts.max(initial=0)
    if not evaluates.any() or evaluates.all():
        return None
    waiting_s = np.array([rank.seconds[:steps, _WAITING] for rank in ranks])[~evaluates]
    excess_s = evaluation_s[evaluates].max(axis=0) - evaluation_s[~evaluates]
    waited_s = float(np.minimum(waiting_s, np.maximum(0.0, excess_s)).mean())
    return UnevenEvaluation(
        ranks=tuple(rank.rank for rank, own in zip(ranks, evaluates, strict=True) if own),
        others=int((~evaluates).sum()),
        waiting_s=waited_s,
    )


def _no_core_s(analysis: Analysis, step: Breakdown, threads: int | None) -> float:
    """Return the seconds of a step in which a rank's main thread was runnable without a core.

    Older traces have only the sum over threads. Threads that lack a core at the same time delay the
    step once: by their time without a core over their number, if they wait together; and what the
    rank computes takes no less than it ran. 0 where the number of threads is not known.
    """
    ranks, steps = analysis.phases, analysis.steps
    counters = analysis.counters
    if all(rank.known for rank in counters):
        return _mean(rank.not_running_s for rank in counters)
    if threads is None:
        return 0.0
    ran_s = _mean(rank.running_s[:steps] for rank in ranks)
    no_core_s = _mean(rank.not_running_s[:steps] for rank in ranks)
    return max(0.0, min(no_core_s / threads, working_s(step) - ran_s / threads))


def _mean_step(ranks: Sequence[RankPhases], chosen: np.ndarray) -> Breakdown:
    """Return a step's seconds by phase, the mean over the chosen steps and over ranks."""
    means = np.mean([rank.seconds[: len(chosen)][chosen].mean(axis=0) for rank in ranks], axis=0)
    return Breakdown(**dict(zip(PHASES, means.tolist(), strict=True)))


def _mean(by_rank: Any) -> float:
    return float(np.mean([np.mean(values) for values in by_rank]))


def _in_loop(trace: RankTrace, kind: Kind, steps: int) -> np.ndarray:
    events = trace.events_of(kind)
    recorded = trace.events_of(Kind.STEP)
    first_ns = int(recorded["begin_ns"].min()) if len(recorded) else 0
    in_loop = (events["begin_ns"] >= first_ns) & (events["step"] < steps)
    return np.asarray(events[in_loop & (events["location"] == MAIN)])


def _count(trace: RankTrace, kind: Kind, steps: int) -> int:
    return len(_in_loop(trace, kind, steps))


def loader_workers(traces: Sequence[RankTrace]) -> int | None:
    """Return how many workers each loader has; None if loaders differ, or a rank does not say."""
    found: set[int] = set()
    for trace in traces:
        if LOADER_WORKERS not in trace.names:
            return None
        counters = trace.events_of(Kind.COUNTER)
        named = counters["name"] == trace.names.index(LOADER_WORKERS)
        found |= set(counters["amount"][named].tolist())
    return found.pop() if len(found) == 1 else None


def _loader_stages_s(traces: Sequence[RankTrace]) -> dict[str, float]:
    """Return the seconds that a rank's loader spent by stage, the mean over ranks."""
    spent_s: dict[str, float] = {}
    for stage, name in LOADER_STAGES.items():
        total = sum(_counted(trace, name) for trace in traces)
        if total:
            spent_s[stage] = total / 1e9 / len(traces)
    return spent_s


def _counted(trace: RankTrace, name: str) -> int:
    """Return the sum of a counter in the whole trace."""
    if name not in trace.names:
        return 0
    counters = trace.events_of(Kind.COUNTER)
    return int(counters["amount"][counters["name"] == trace.names.index(name)].sum())


def _cores(machine: Machine | None) -> int:
    devices = machine.devices if machine is not None else ()
    return next((device.cores for device in devices if device.kind == "cpu"), 0)


def _buffer_classes(analysis: Analysis) -> set[int]:
    """Return the size classes of broadcasts that are known to be of DDP's buffers."""
    classes: set[int] = set()
    for trace in analysis.trace.ranks:
        if BUFFER_BYTES in trace.names:
            counters = trace.events_of(Kind.COUNTER)
            own = counters[counters["name"] == trace.names.index(BUFFER_BYTES)]
            classes |= set(size_classes_bytes(np.unique(own["amount"])).tolist())
    return classes


def _communication(analysis: Analysis) -> dict[str, float]:
    """Return how the transfers of a run divide among all-reduces and repeated broadcasts."""
    total_s = sum(line.count * line.transfer_s for line in analysis.traffic)
    reduces = [line for line in analysis.traffic if line.operation == "all_reduce"]
    classes = _buffer_classes(analysis)
    broadcasts = [
        line
        for line in analysis.traffic
        if line.operation == "broadcast"
        and line.count >= _EACH_STEP * analysis.steps
        and line.size_class_bytes in classes
    ]

    def share(lines: Sequence[Traffic]) -> float:
        taken_s = sum(line.count * line.transfer_s for line in lines)
        return taken_s / total_s if total_s > 0 else 0.0

    return {
        "reduced_bytes": sum(line.bytes for line in reduces) / analysis.steps,
        "reduced_share": share(reduces),
        "broadcast_share": share(broadcasts),
    }
