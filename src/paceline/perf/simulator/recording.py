"""Writes a simulation as the traces of a run, one file per rank, as a recorder would have.

Then `trace`, `why` and `report` read a prediction as they read a measurement. A pass of a pipeline
is a STAGE, without one a FORWARD or BACKWARD; in it lie the waits for messages and collectives, as
they do in a recorded run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.perf.simulator.program import OperationKind
from paceline.perf.simulator.simulation import StepSimulation
from paceline.trace.format.events import (
    COMMUNICATION,
    MAIN_NOT_RUNNING,
    MAIN_RUNNING,
    NOT_RUNNING,
    RECV,
    RUNNING,
    SEND,
    Kind,
)
from paceline.trace.format.writer import EventFields, TraceWriter

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.perf.simulator.replay import Happening
    from paceline.schedules.pipeline import PipelineAction

_START_NS = 10**9  # a clock that has run for a second: 0 means unknown to some tools


def write_run(simulation: StepSimulation, run: Path) -> Path:
    """Write the trace of each rank below a run's folder; return the folder of traces.

    Args:
        simulation: by rank, recorded.
        run: folder of the run, made where it is missing.

    Raises:
        UsageError: the simulation is by class, or nothing was recorded.
        StorageError: a file cannot be written.
    """
    if len(simulation.actors.ranks) != simulation.world_size or not simulation.happenings[0]:
        raise UsageError(
            "a simulation by class, or without records, is no trace of all ranks",
            where="write_run",
            fix="Simulate with by='rank' and records=True",
        )
    folder = run / "trace"
    folder.mkdir(parents=True, exist_ok=True)
    for actor, rank in enumerate(simulation.actors.ranks):
        happenings = simulation.happenings[actor]
        most = 4 * len(happenings) + 5 * simulation.ends_s.shape[1]
        with TraceWriter(folder, rank, simulation.world_size, most) as writer:
            _RankEvents(simulation, actor, writer).write(happenings)
    return folder


@dataclass(slots=True)
class _RankEvents:
    """The events of one rank."""

    simulation: StepSimulation
    actor: int
    writer: TraceWriter
    _counts: dict[str, int] = field(default_factory=dict)  # of collectives, by group
    _computed_s: float = 0.0  # in the current step

    def write(self, happenings: list[Happening]) -> None:
        step, begin_s, at = 0, 0.0, 0
        ends_s = self.simulation.ends_s[self.actor].tolist()
        while at < len(happenings):
            if happenings[at].step != step:
                self._write_step(begin_s, ends_s[step], step)
                begin_s, step = ends_s[step], happenings[at].step
            at = self._write_pass(happenings, at)
        self._write_step(begin_s, ends_s[step], step)

    def _write_step(self, begin_s: float, end_s: float, step: int) -> None:
        """Write the step that ends; a simulated thread is on a core while it computes."""
        counters = {RUNNING: self._computed_s, MAIN_RUNNING: self._computed_s,
                    NOT_RUNNING: 0.0, MAIN_NOT_RUNNING: 0.0}  # fmt: skip
        for name, seconds in counters.items():
            fields = EventFields(amount=round(seconds * 1e9))
            self._record(Kind.COUNTER, name, step, (end_s, end_s), fields)
        self._computed_s = 0.0
        self._record(Kind.STEP, "step", step, (begin_s, end_s))

    def _write_pass(self, happenings: list[Happening], at: int) -> int:
        """Write a pass with all that lies in it, or what is none; return what comes next."""
        begin_s = happenings[at].begin_s
        if happenings[at].operation.kind == OperationKind.RECEIVE:
            self._write_message(happenings[at])
            at += 1
        happening = happenings[at]
        action = happening.operation.action
        if happening.operation.kind in (OperationKind.LOAD, OperationKind.FETCH):
            self._write_input(happening)
            return at + 1
        if happening.operation.kind == OperationKind.COMPUTE:
            self._computed_s += happening.end_s - happening.begin_s
        if happening.operation.kind == OperationKind.SEND:
            self._write_message(happening)
            return at + 1
        if action is None:
            return self._write_end_of_step(happening, at)
        end_s = happening.end_s
        while (at := at + 1) < len(happenings):
            inner = happenings[at]
            if inner.operation.kind not in (OperationKind.LAYERS, OperationKind.REPLICAS):
                break
            if inner.operation.action is None and self._is_pipeline:
                break  # a pipeline's gradients are reduced after its last pass
            self._write_collective(inner)
            end_s = inner.end_s
        self._write_action(action, (begin_s, end_s), happening.step)
        return at

    def _write_input(self, happening: Happening) -> None:
        """Write the loading of a batch, in which the rank computes if it does that itself."""
        if happening.operation.kind == OperationKind.LOAD:
            self._computed_s += happening.end_s - happening.begin_s
        self._record(Kind.INPUT, "input", happening.step, (happening.begin_s, happening.end_s))

    @property
    def _is_pipeline(self) -> bool:
        return self.simulation.plan.mesh.pipeline > 1

    def _write_end_of_step(self, happening: Happening, at: int) -> int:
        if happening.operation.kind == OperationKind.REPLICAS:
            self._write_collective(happening)
        else:
            span = happening.begin_s, happening.end_s
            self._record(Kind.OPTIMIZER, "optimizer", happening.step, span)
        return at + 1

    def _write_action(self, action: PipelineAction, span: tuple[float, float], step: int) -> None:
        if self._is_pipeline:
            place = EventFields(amount=action.microbatch, sequence=step + 1, tag=action.stage)
            self._record(Kind.STAGE, action.kind, step, span, place)
            return
        kind = Kind.FORWARD if action.kind == "forward" else Kind.BACKWARD
        self._record(kind, action.kind, step, span)

    def _write_message(self, happening: Happening) -> None:
        operation, action = happening.operation, happening.operation.action
        assert action is not None
        actors, step, end_s = self.simulation.actors, happening.step, happening.end_s
        number = action.stage * self.simulation.plan.microbatch_count + action.microbatch
        place = EventFields(
            group="pipeline",
            sequence=step + 1,
            peer=actors.ranks[actors.peers[self.actor][operation.peer]],
            tag=2 * number + (action.kind != "forward"),
        )
        lane = place._replace(location=COMMUNICATION)
        if operation.kind == OperationKind.SEND:
            self._record(Kind.SEND, SEND, step, (end_s, end_s), lane)
            return
        self._record(Kind.WAIT, RECV, step, (happening.begin_s, end_s), place)
        begin_s = min(happening.begin_s, happening.ready_s)
        self._record(Kind.RECV, RECV, step, (begin_s, end_s), lane)

    def _write_collective(self, happening: Happening) -> None:
        actors = self.simulation.actors
        if happening.operation.kind == OperationKind.LAYERS:
            group = f"layers {actors.layers[self.actor]}"
        else:
            group = f"replicas {actors.replicas[self.actor]}"
        self._counts[group] = sequence = self._counts.get(group, 0) + 1
        span = happening.begin_s, happening.end_s
        place = EventFields(group=group, sequence=sequence)
        lane = place._replace(location=COMMUNICATION)
        self._record(Kind.COLLECTIVE, "all_reduce", happening.step, span, lane)
        self._record(Kind.WAIT, "all_reduce", happening.step, span, place)

    def _record(
        self,
        kind: Kind,
        name: str,
        step: int,
        span: tuple[float, float],
        fields: EventFields | None = None,
    ) -> None:
        """Write an event; `span` is its begin and end in seconds."""
        begin_ns, end_ns = (_START_NS + round(seconds * 1e9) for seconds in span)
        self.writer.write(kind, name, step, (begin_ns, end_ns), fields or EventFields())
