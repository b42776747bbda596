"""Gathers all that a report shows, once, from a run's folder: numbers without drawing.

The terminal, the HTML page and ``--json`` render the same `Report`, so they cannot disagree. What a
run that ended badly did not leave is None or empty, and is shown as missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.breakdown import Breakdown
from paceline.core.errors import NotFound
from paceline.core.estimate import Estimate
from paceline.core.machine import Machine
from paceline.launch.budget import CpuBudget, budget_words, memory_contention
from paceline.perf.communication import MODELLED, collective_s
from paceline.report.advice.gather import gather_facts, loader_workers
from paceline.report.advice.rules import Advice, advise
from paceline.report.balance import balance_words
from paceline.report.child_memory import child_memory_words
from paceline.report.comparable import difference
from paceline.report.compare import Comparison, compare
from paceline.report.data_nodes import DataUse, data_use, data_words
from paceline.report.delays import cut_words, shift_words
from paceline.report.files import file_words
from paceline.report.loader import loader_words
from paceline.report.out_of_core import (
    PlannedStep,
    Spilling,
    planned_step,
    spilling,
    spilling_words,
)
from paceline.report.pipeline import Bubble, bubble_of, pipeline_words
from paceline.report.remedies import NO_ANSWER, RemedyAnswer, advised_forecast, ask_remedies
from paceline.report.tuning import tune_words
from paceline.report.unfinished import unfinished_words
from paceline.report.words import (
    STEP_RULES,
    disk_words,
    failure_words,
    gap_words,
    nan_words,
    sync_place,
    verdict,
)
from paceline.runs.child_memory import read_child_memory
from paceline.runs.folder import BUDGET_NAME, RunFolder, RunState
from paceline.runs.result import RunResult
from paceline.runs.tuning import TUNE_NAME, TuneResult
from paceline.trace.analysis import analyse
from paceline.trace.analysis.blame import Straggler
from paceline.trace.analysis.communication import Traffic
from paceline.trace.analysis.files import FileUse
from paceline.trace.analysis.host import HostTime
from paceline.trace.analysis.loader import LoaderCeiling
from paceline.trace.analysis.nans import NanValue
from paceline.trace.analysis.nodes import NodeActivity
from paceline.trace.analysis.phases import RankPhases, step_time_s
from paceline.trace.analysis.pipeline import PipelineUse
from paceline.trace.analysis.sampled import StepSamples
from paceline.trace.analysis.shifts import Shift
from paceline.trace.efficiency import (
    PhaseStrips,
    RunEfficiency,
    measure_efficiency,
    phase_strips,
)
from paceline.trace.format.events import RECV, SEND, SYNCHRONISING
from paceline.trace.merge import Trace, load_run
from paceline.trace.merge.steps import StepRule

if TYPE_CHECKING:
    from paceline.core.plan import CollectivesChoice
    from paceline.report.advice.facts import Facts
    from paceline.report.remedies import RemedyQuestion
    from paceline.trace.analysis import Analysis

FILES_MAX = 50  # files in JSON: trace stats has them all


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """Everything that is known of a run.

    Attributes:
        run: its folder.
        state: whether it has ended, and how if not by itself.
        cautions: what must be known before the verdict: how the run ended if not by itself, and
            what the traces lack.
        verdict: which rank was late, when and why, and how the run ended.
        advice: what would make the run faster, the largest saving first.
        loader_stages_s: seconds that the workers of the store's loader spent by stage, the mean
            over ranks; empty without such a loader.
        host_work: the script's own named work, the longest first, as the mean over ranks.
        trace: its events on one clock.
        rank_phases: seconds by step and phase of each rank that left a trace.
        skew_s: skew, shape (ranks, steps).
        stragglers: who was late, the costliest first.
        shifts: changes of all ranks within the run.
        traffic: its collectives.
        comparison: the undisturbed step beside its prediction.
        result: None when the run did not come to write one.
        machine: that it ran on.
        estimate: the prediction, if there was one.
        versions: of what took part.
        config: values with their origins, the script and its arguments.
        nan: the first value that was not a number when the script read it, if there was one.
        pipeline: how the ranks of a model in stages spent their batches; None without stages.
        bubble: why they idled.
        spilling: what a memory budget took; None without one, and where all fits.
        data: what the nodes that served its packs did; None without such nodes.
        files: what the run did with each file, the longest time first; empty if not recorded.
        sampled: what some steps show: layers, operators, memory by what holds it.
        nodes: what each node did second by second.
        budget: which cores of rank 0's node were for what; None where Paceline started no ranks.
        planned_step: of the rank with the memory budget's figures, if it left its plan.
        efficiency: what the ranks waited for, and what would make steps shorter; None where it was
            not asked for, of one rank, and where no steps were recorded by all ranks.
        strips: what each rank did when; None where it was not asked for, or without steps.
        tuned: what was found of a setting of which two values were tried; None without.
        remedies: what remedies against imbalance would bring, and what the run's settings brought.
        loader: what limits the loader, and what that costs; None if no loader was seen.
    """

    run: Path
    state: RunState
    cautions: tuple[str, ...]
    verdict: str
    advice: tuple[Advice, ...]
    loader_stages_s: Mapping[str, float]
    host_work: tuple[HostTime, ...]
    trace: Trace
    rank_phases: tuple[RankPhases, ...]
    skew_s: np.ndarray
    stragglers: tuple[Straggler, ...]
    shifts: tuple[Shift, ...]
    traffic: tuple[Traffic, ...]
    comparison: Comparison
    result: RunResult | None
    machine: Machine | None
    estimate: Estimate | None
    versions: dict[str, Any]
    config: dict[str, Any]
    nan: NanValue | None = None
    pipeline: PipelineUse | None = None
    bubble: Bubble | None = None
    spilling: Spilling | None = None
    planned_step: PlannedStep | None = None
    data: DataUse | None = None
    efficiency: RunEfficiency | None = None
    strips: PhaseStrips | None = None
    files: tuple[FileUse, ...] = ()
    tuned: TuneResult | None = None
    remedies: RemedyAnswer = NO_ANSWER
    loader: LoaderCeiling | None = None
    sampled: StepSamples = field(default_factory=StepSamples)
    nodes: tuple[NodeActivity, ...] = ()
    budget: CpuBudget | None = None

    @property
    def words(self) -> str:
        """The verdict with the cautions before it."""
        return " ".join([*self.cautions, self.verdict])

    @property
    def world_size(self) -> int:
        """Ranks that the run had."""
        return self.trace.world_size

    @property
    def steps(self) -> int:
        """Steps that every rank completed."""
        return min((rank.steps for rank in self.rank_phases), default=0)

    @property
    def step_time_s(self) -> float:
        """Median over steps of the slowest rank's step time."""
        return step_time_s(self.rank_phases)

    @property
    def total(self) -> Breakdown:
        """Seconds of the whole loop by phase, the mean over ranks."""
        return mean_of(self.rank_phases)

    @property
    def collectives(self) -> CollectivesChoice:
        """Whose collectives the run used in place of the script's; ``torch`` for none."""
        return "paceline" if self.config.get("collectives") == "paceline" else "torch"

    @property
    def collective_paths(self) -> dict[str, int]:
        """Number of collectives by path; an empty path: of a backend that does not say it."""
        counts: Counter[str] = Counter()
        for line in self.traffic:
            if line.operation not in (SEND, RECV):  # traces name the paths of collectives alone
                counts[line.path] += line.count
        return dict(counts)

    @property
    def cores_words(self) -> tuple[str, ...]:
        """What the cores of the node were for, and what its ranks reach of its memory bandwidth."""
        budget = budget_words(self.budget) if self.budget else ""
        contention = memory_contention(self.machine) if self.world_size > 1 else None
        return (
            *((f"cores: {budget}",) if budget else ()),
            *((f"memory bandwidth: {contention.words}",) if contention else ()),
        )

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that left no trace."""
        return self.trace.missing_ranks

    @property
    def dropped_count(self) -> int:
        """Events that were not recorded or written."""
        return sum(rank.status.dropped_count for rank in self.trace.ranks)

    @property
    def peak_memory_bytes(self) -> int:
        """The largest rank's peak resident memory."""
        return max(rank.status.peak_memory_bytes for rank in self.trace.ranks)


def gather(run: Path, *, in_detail: bool = False, question: RemedyQuestion | None = None) -> Report:
    """Return the report of the run in folder `run`, or of the demo's run in the demo's folder.

    Args:
        run: the folder.
        in_detail: whether to find `Report.efficiency` and `Report.strips` too, which takes twice as
            long as the rest, and a forecast of remedies.
        question: what to say of remedies; None: nothing, or with `in_detail` the usual forecast.

    Raises:
        NotFound: there is no run, or it recorded nothing, or too little for the question.
        UsageError: the question is about fewer ranks than the run had.
        CorruptTrace: a trace is damaged; the rank is named.
        CorruptData: another of the run's files cannot be understood.
    """
    folder = RunFolder.open(run)
    run = folder.path
    result, state = folder.read_result(), folder.state()
    failure = result.failure if result else None
    trace = _traces(run, result)
    analysis = analyse(trace)
    stragglers, traffic = analysis.stragglers, analysis.traffic
    steps, skew_s = analysis.steps, analysis.skew_s
    config = folder.read_config()
    planned = folder.read_plan()
    estimate = planned.estimate if planned else None
    comparison = compare(
        analysis.phases,
        stragglers,
        estimate.breakdown if estimate else None,
        estimate.step_time_s if estimate else None,
        not_compared=difference(
            estimate,
            trace,
            traffic,
            steps=steps,
            config=config,
            machine=folder.read_object("machine.json"),
        )
        if estimate
        else "",
    )
    pipeline = analysis.pipeline
    bubble = bubble_of(pipeline) if pipeline else None
    was_ended = state in (RunState.STOPPED, RunState.LAUNCHER_KILLED)
    words = verdict(
        stragglers,
        world_size=trace.world_size,
        steps=steps,
        total=mean_of(analysis.phases),
        failure=failure,
        place=_place(traffic, steps),
        most_late_rank=_most_late_rank(trace, skew_s),
        missing=trace.missing_ranks,
        pipeline=pipeline_words(pipeline, bubble),
        was_ended=was_ended,
    )
    gaps = gap_words(
        analysis.untimed_count, analysis.matches.mismatch_count, analysis.trace.violations
    )
    cut = cut_words(trace.ranks, steps, failed=failure is not None)
    rule = STEP_RULES[StepRule(analysis.step_rule)]
    # A run may do much after its last step and come to its end; a failure has its own sentence.
    hung = unfinished_words(trace.ranks, step_time_s(analysis.phases)) if was_ended else ""
    spilled = spilling(result, None)
    step = planned_step(folder, spilled.rank) if spilled else None
    spilled = spilling(result, step)
    workers = loader_workers(trace.ranks)
    is_idle = not (steps or failure or was_ended)
    loads = analysis.loader is not None and analysis.loader.workers > 0
    data = data_use(folder, mean_of(analysis.phases), trace.world_size, workers)
    tuned = folder.read_record(TuneResult, TUNE_NAME)
    sentences = [
        *(hung, nan_words(analysis.nan), words, file_words(trace, stragglers)),
        loader_words(analysis.loader),
        shift_words(analysis.shifts),
        *(spilling_words(spilled), disk_words(result), data_words(data)),
        child_memory_words(read_child_memory(run), is_idle=is_idle, loads=loads),
        *(balance_words(result.balance if result else None), *gaps, rule),
        tune_words(tuned),
    ]
    machine = folder.read_record(Machine, "machine.json")
    ended_badly = failure is not None or (result is not None and result.exit_code != 0)
    facts = gather_facts(analysis, config=config, machine=machine, bubble=bubble, spilling=spilled)
    return Report(
        run=run,
        state=state,
        cautions=tuple(filter(None, (folder.state_words(), cut))),
        verdict=" ".join(filter(None, sentences)),
        # The time of a run that ended badly is no measure of what the script takes.
        advice=() if ended_badly else advise(facts),
        loader_stages_s=facts.loader_stages_s,
        host_work=facts.host_work,
        trace=trace,
        rank_phases=analysis.phases,
        skew_s=skew_s,
        stragglers=stragglers,
        shifts=analysis.shifts,
        traffic=traffic,
        comparison=comparison,
        result=result,
        machine=machine,
        estimate=estimate,
        versions=folder.read_versions(),
        config=config,
        nan=analysis.nan,
        pipeline=pipeline,
        bubble=bubble,
        spilling=spilled,
        planned_step=step,
        budget=folder.read_record(CpuBudget, BUDGET_NAME),
        data=data,
        efficiency=_efficiency(analysis) if in_detail else None,
        strips=phase_strips(analysis) if in_detail else None,
        remedies=_remedies(analysis, facts, config, question, in_detail=in_detail),
        tuned=tuned,
        files=analysis.files,
        loader=analysis.loader,
        sampled=analysis.sampled,
        nodes=analysis.nodes,
    )


def _remedies(
    analysis: Analysis,
    facts: Facts,
    config: dict[str, Any],
    question: RemedyQuestion | None,
    *,
    in_detail: bool,
) -> RemedyAnswer:
    if question is not None:
        return ask_remedies(analysis, facts, config, question)
    return RemedyAnswer(advised_forecast(analysis, facts)) if in_detail else NO_ANSWER


def _efficiency(analysis: Analysis) -> RunEfficiency | None:
    if len(analysis.phases) < 2:
        return None
    try:
        return measure_efficiency(analysis)
    except NotFound:  # no step, or lost ones: the page has other figures
        return None


def _traces(run: Path, result: RunResult | None) -> Trace:
    try:
        return load_run(run)
    except NotFound as problem:
        if result is None or result.failure is None:
            raise
        raise NotFound(
            "the run recorded no traces",
            where=str(run),
            why=failure_words(result.failure),
            fix="Its message is in the output of paceline run",
        ) from problem


def _place(traffic: tuple[Traffic, ...], steps: int) -> str:
    """Return where ranks notice that one is late, in words; empty if no collective joins them."""
    if all(line.ranks < 2 for line in traffic):
        return ""
    syncs = [
        line
        for line in traffic
        if line.operation in SYNCHRONISING and 2 * line.count >= max(1, steps)
    ]
    return sync_place(
        frozenset(line.operation for line in syncs),
        sum(line.count for line in syncs) / max(1, steps),
    )


def _most_late_rank(trace: Trace, skew_s: np.ndarray) -> int | None:
    """Return the rank with at least two thirds of all skew, if there is one."""
    by_rank = skew_s.sum(axis=1)
    worst = int(by_rank.argmax())
    if by_rank.sum() <= 0 or by_rank[worst] < 2 / 3 * by_rank.sum():
        return None
    return trace.ranks[worst].rank


def mean_of(rank_phases: tuple[RankPhases, ...]) -> Breakdown:
    """Return the seconds of all steps by phase, the mean over ranks."""
    return Breakdown.mean([rank.breakdown() for rank in rank_phases])


def modelled_s(
    traffic: Traffic, machine: Machine | None, collectives: CollectivesChoice = "torch"
) -> float | None:
    """Return what one of these collectives costs on the machine, as `perf` predicts it.

    None for an operation whose cost the machine does not hold.

    Args:
        traffic: the run's collectives of one kind.
        machine: that the run was on; None if that is not known.
        collectives: whose cost counts.
    """
    if machine is None or traffic.ranks < 2 or traffic.operation not in MODELLED:
        return None
    # The path says whose cost counts, also where the script itself asks for the backend. A group of
    # the backend gives gloo such calls between hosts only; the trace does not say how many hosts.
    hosts = 1 if traffic.path in ("", "shared memory") else 2
    backend: CollectivesChoice = {"": collectives, "gloo": "torch"}.get(traffic.path, "paceline")
    cost = machine.collective(traffic.operation, traffic.ranks, collectives=backend, hosts=hosts)
    if cost is None:
        return None
    return collective_s(cost, traffic.typical_bytes, traffic.ranks)


def to_json(report: Report) -> dict[str, Any]:
    """Return the report as ``paceline report --json`` prints it."""
    result = report.result
    return {
        "version": 1,
        "kind": "report",
        "run": str(report.run),
        "verdict": report.verdict,
        "state": str(report.state),
        "exit_code": result.exit_code if result else None,
        "failure": _plain(result.failure) if result else None,
        "world_size": report.world_size,
        "steps": report.steps,
        "step_time_s": report.step_time_s,
        "cautions": list(report.cautions),
        "advice": [_plain(advice) for advice in report.advice],
        "loader_stages_s": dict(report.loader_stages_s),
        "loader": _plain(report.loader),
        "host_work": [_plain(work) for work in report.host_work],
        "step_rule": report.trace.step_rule,
        "nan": _plain(report.nan),
        "pipeline": _plain(report.pipeline),
        "bubble": _plain(report.bubble),
        "spilling": _plain(report.spilling),
        "balance": _plain(result.balance) if result else None,
        "budget": _plain(report.budget),
        "data": _plain(report.data),
        "efficiency": _plain(report.efficiency),
        "tuned": _plain(report.tuned),
        "remedies": _plain(report.remedies.forecast),
        "remedy_outcome": _plain(report.remedies.outcome),
        "files": [_plain(use) for use in report.files[:FILES_MAX]],
        "sampled": _plain(report.sampled),
        "nodes": [_plain(node) for node in report.nodes],
        "stragglers": [_plain(straggler) for straggler in report.stragglers],
        "shifts": [_plain(shift) for shift in report.shifts],
        "ranks": [
            {
                "rank": spent.rank,
                "steps": spent.steps,
                "loop_wall_s": spent.loop_wall_s,
                "peak_memory_bytes": rank.status.peak_memory_bytes,
                "dropped_count": rank.status.dropped_count,
                "clock_offset_ns": report.trace.clocks[i].offset_ns,
                "clock_drift": report.trace.clocks[i].drift,
                "clock_error_ns": report.trace.clocks[i].error_ns,
                "clock_changes": len(report.trace.clocks[i].later),
                "phases": dict(spent.breakdown().items()),
                "host": [_plain(time) for time in spent.host],
            }
            for i, (rank, spent) in enumerate(
                zip(report.trace.ranks, report.rank_phases, strict=True)
            )
        ],
        "collectives": [
            {
                **_plain(line),
                "bandwidth_bytes_per_s": line.bandwidth_bytes_per_s,
                "modelled_s": modelled_s(line, report.machine, report.collectives),
            }
            for line in report.traffic
        ],
        "collective_paths": report.collective_paths,
        "phases": [_plain(phase) for phase in report.comparison.phases],
        "undisturbed_steps": report.comparison.undisturbed_steps,
        "not_compared": report.comparison.not_compared,
        "step_time_error": report.comparison.step_time_error,
    }


def _plain(record: Any) -> Any:
    if record is None:
        return None
    data = record.to_json()
    del data["version"]
    return data
