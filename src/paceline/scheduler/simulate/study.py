"""A comparison of policies on one workload: run, as JSON, as a report, as a log of decisions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import UsageError
from paceline.report.queue.model import HeldDevices, PolicyRun, QueueReport
from paceline.report.units import format_share, plural
from paceline.scheduler.cluster import Cluster
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.simulate.compare import Run, fit_queue, simulate
from paceline.scheduler.simulate.metrics import alone_times_s
from paceline.scheduler.simulate.scenario import Scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.scheduler.decide import Decision, Policy
    from paceline.scheduler.simulate.engine import QueueOutcome, Simulation, Span

_SHOWN_REFUSALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Policies that played one workload.

    Attributes:
        trace: name of the workload.
        queue: jobs that were played, and their true rates.
        cluster: all nodes.
        scenario: what was wrong and what failed.
        refused: why jobs can never run on the cluster, by name.
        runs: one for each policy.
    """

    trace: str
    queue: Queue
    cluster: Cluster
    scenario: Scenario
    refused: dict[str, str]
    runs: tuple[Run, ...]


def run_study(  # what is compared, and how
    trace: str,
    queue: Queue,
    cluster: Cluster,
    policies: Sequence[Policy],
    scenario: Scenario,
    *,
    log: bool = True,
    on_progress: Callable[[int], Callable[[Simulation], None]] | None = None,
) -> Study:
    """Play a workload against policies, one after the other.

    Args:
        trace: name of the workload.
        queue: jobs and their true rates.
        cluster: all nodes.
        policies: new ones, each with a name of its own.
        scenario: what is wrong and what fails.
        log: keep decisions, and when jobs held devices.
        on_progress: returns, for a policy by its number, what to call after each instant.

    Raises:
        UsageError: no job can run on the cluster, or a policy leaves jobs waiting for ever.
    """
    fitting, refused = fit_queue(queue, cluster)
    if not fitting.jobs:
        name, reason = next(iter(refused.items()))
        raise UsageError(
            "no job of the trace can run on the cluster",
            where=f"job '{name}'",
            why=reason,
            fix="Name a larger cluster, or one with the device types of the trace",
        )
    runs = tuple(
        simulate(
            fitting,
            cluster,
            policy,
            scenario,
            log=log,
            on_progress=on_progress(index) if on_progress else None,
        )
        for index, policy in enumerate(policies)
    )
    return Study(
        trace=trace,
        queue=fitting,
        cluster=cluster,
        scenario=scenario,
        refused=refused,
        runs=runs,
    )


def to_json(study: Study) -> dict[str, Any]:
    """Return what ``paceline queue simulate --json`` prints."""
    return {
        "version": 1,
        "kind": "queue-simulation",
        "trace": study.trace,
        "jobs": len(study.queue.jobs),
        "cluster": {
            "nodes": len(study.cluster.nodes),
            "devices": study.cluster.device_counts(),
        },
        "seed": study.scenario.seed,
        "scenario": dataclasses.asdict(study.scenario),
        "notes": list(study.queue.notes),
        "refused": [{"name": name, "reason": why} for name, why in study.refused.items()],
        "policies": [run.metrics.to_json() for run in study.runs],
    }


def decision_lines(study: Study) -> Iterator[str]:
    """Yield every decision as a line of JSON, policy by policy."""
    for run in study.runs:
        for decision in run.outcome.decisions:
            yield json.dumps(_decision(run.metrics.policy, decision)) + "\n"


def to_report(study: Study) -> QueueReport:
    """Return what terminal and page show."""
    return QueueReport(
        title=f"{Path(study.trace).name}: scheduling policies",
        summary=_summary(study),
        cautions=_cautions(study),
        nodes=tuple((node.name, node.devices) for node in study.cluster.nodes),
        runs=tuple(_policy_run(run, study) for run in study.runs),
    )


def _decision(policy: str, decision: Decision) -> dict[str, Any]:
    return {
        "policy": policy,
        "at_s": decision.at_s,
        "inputs": decision.inputs,
        "action": type(decision.action).__name__.lower(),
        **{key: value for key, value in decision.action.to_json().items() if key != "version"},
    }


def _summary(study: Study) -> str:
    counts = study.cluster.device_counts()
    devices = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    nodes = plural(len(study.cluster.nodes), "node")
    words = [f"{plural(len(study.queue.jobs), 'job')} on {devices} in {nodes}"]
    scenario = study.scenario
    if isinstance(scenario.durations, float):
        words.append(f"durations wrong by up to {scenario.durations:g}x")
    elif scenario.durations == "known":
        words.append("durations known exactly")
    else:
        words.append(f"durations {scenario.durations}")
    if scenario.rate_error:
        words.append(f"rates wrong by up to {format_share(scenario.rate_error)}")
    words.append(_restarts(study))
    if scenario.node_mtbf_s:
        words.append(f"a node fails every {scenario.node_mtbf_s / 3600:g} h")
    else:
        words.append("no node fails")
    if scenario.rate_error or scenario.node_mtbf_s or isinstance(scenario.durations, float):
        words.append(f"seed {scenario.seed}")
    return "; ".join(words)


def _restarts(study: Study) -> str:
    costs_s = {job.restart_s for job in study.queue.jobs}
    if study.scenario.restart_s is not None:
        costs_s = {study.scenario.restart_s}
    least_s, most_s = min(costs_s, default=0.0), max(costs_s, default=0.0)
    if most_s <= 0:
        return "restarts are free"
    span = f"{most_s:g} s" if least_s == most_s else f"{least_s:g} to {most_s:g} s"
    return f"a restart costs {span}"


def _cautions(study: Study) -> tuple[str, ...]:
    shown = list(study.refused.items())[:_SHOWN_REFUSALS]
    cautions = [f"job {name} can never run: {reason}" for name, reason in shown]
    more = len(study.refused) - len(shown)
    if more:
        cautions.append(f"and {plural(more, 'more job')} that can never run")
    return (*cautions, *study.queue.notes)


def _policy_run(run: Run, study: Study) -> PolicyRun:
    outcome = run.outcome
    ended = [job for job in outcome.jobs.values() if job.ended_s is not None]
    submitted_s = np.array([job.job.submitted_s for job in ended])
    ended_s = np.array([job.ended_s for job in ended], float)
    return PolicyRun(
        figures=run.metrics,
        ended_s=ended_s,
        jct_s=ended_s - submitted_s,
        alone_s=alone_times_s([job.job for job in ended], study.cluster, study.queue.rates),
        held=tuple(_held(outcome)),
    )


def _held(outcome: QueueOutcome) -> Iterator[HeldDevices]:
    first = np.cumsum([0, *(node.devices for node in outcome.cluster.nodes)]).tolist()
    for span in outcome.spans:
        yield HeldDevices(span.name, span.begin_s, span.end_s, tuple(_pieces(span, first)))


def _pieces(span: Span, first: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield neighbouring devices of a span, numbered through all nodes."""
    for index, bits in span.parts:
        at = 0
        while bits >> at:
            at += ((bits >> at) & -(bits >> at)).bit_length() - 1  # to the next device held
            count = (~(bits >> at) & ((bits >> at) + 1)).bit_length() - 1
            yield first[index] + at, count
            at += count
