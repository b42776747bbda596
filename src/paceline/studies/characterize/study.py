"""A whole characterization: what is asked for as cells, their runs, and the profile of these."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.affinity import allowed_cores, core_binding
from paceline.core.config import environment
from paceline.core.errors import NotFound, UsageError
from paceline.core.files import commit_text
from paceline.core.plan import CollectivesChoice, EngineChoice
from paceline.core.record import nearest
from paceline.core.scaling_profile import PROFILE_NAME, ScalingProfile
from paceline.launch.program import Program, ProgramKind
from paceline.probe.machine_file import known_machine
from paceline.studies.characterize import digits
from paceline.studies.characterize.axes import (
    BATCH,
    CHECKPOINTING,
    PRECISION,
    Cell,
    check_placeholders,
    make_cells,
    placeholders,
)
from paceline.studies.characterize.curves import SweepFacts, make_profile
from paceline.studies.characterize.log import SweepLog
from paceline.studies.characterize.plans import CellPlans
from paceline.studies.characterize.sweep import Subject, SweepLimits, run_sweep

if TYPE_CHECKING:
    from paceline.core.clock import Clock
    from paceline.studies.characterize.sweep import SweepProgress

SWEEP_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepOptions:
    """What to characterize.

    Attributes:
        axes: values by the axis's name, the baseline's first; those of the built-in models that are
            not given have their baseline's value.
        ranks: numbers of them; empty: 1, 2, 4, ... up to the cores.
        cross: combine all values.
        program: to run; None: the built-in models.
        args: of the program, with the axes' names in braces.
        epochs: of each run.
        threads: of each rank; None: the cores over the most ranks.
        engine: that reduces gradients where a script calls `paceline.training.prepare`.
        collectives: of all runs.
        is_global_batch: whether the axis batch counts the samples of all ranks.
        target: ``FILE.py:FUNCTION`` of the program's training step; empty: nothing is predicted.
        machine_path: of the prediction; None: this host's probe.
        device_type: for the scheduler.
    """

    axes: Mapping[str, tuple[str, ...]]
    ranks: tuple[int, ...] = ()
    cross: bool = False
    program: Program | None = None
    args: tuple[str, ...] = ()
    epochs: int = 3
    threads: int | None = None
    engine: EngineChoice = "ddp"
    collectives: CollectivesChoice = "torch"
    is_global_batch: bool = False
    target: str = ""
    machine_path: Path | None = None
    device_type: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStudy:
    """A characterization that is checked, before anything is written.

    Attributes:
        options: that were given.
        axes: of the sweep, with the built-in models' baseline.
        cells: to run.
        threads: of each rank.
        notes: what the user should know before it runs.
    """

    options: SweepOptions
    axes: Mapping[str, tuple[str, ...]]
    cells: tuple[Cell, ...]
    threads: int
    notes: tuple[str, ...] = ()

    def run(
        self, folder: Path, limits: SweepLimits, clock: Clock, progress: SweepProgress
    ) -> ScalingProfile:
        """Run what the folder does not have yet; write and return the profile of what it has then.

        The profile is also written when the sweep is interrupted, of what had ended by then.

        Args:
            folder: of the sweep.
            limits: of the sweep.
            clock: for budget and waits.
            progress: gets what happens.

        Raises:
            PacelineError: as `run_sweep` and `SweepLog`.
        """
        machine = known_machine(self.options.machine_path)
        device = machine.devices[0].name if machine.devices else ""
        with SweepLog(folder, self._common(machine.name, device)) as log:
            subject, facts = self._subject(folder, machine, limits.repeats)
            try:
                run_sweep(subject, self.cells, limits, log, clock, progress)
            finally:
                if any(log.ended(cell) for cell in self.cells):
                    profile = make_profile(facts, self.cells, log)
                    commit_text(folder / PROFILE_NAME, profile.to_text())
        return profile

    def _subject(self, folder: Path, machine: Any, repeats: int) -> tuple[Subject, SweepFacts]:
        options = self.options
        program, args = options.program, options.args
        target, samples, sample_bytes = options.target, 0, 0.0
        predicted = {axis: values[0] for axis, values in self.axes.items()}
        if program is None:
            data = digits.make_digits(folder)
            program = Program(ProgramKind.SCRIPT, str(digits.SCRIPT))
            args = tuple(digits.arguments(data))
            target = f"{digits.SCRIPT}:{{model}}_step"
            predicted = dict(digits.BASELINE)
            samples, sample_bytes = data.samples, data.sample_bytes
        plans = CellPlans(
            threads=self.threads,
            engine=options.engine,
            collectives=options.collectives,
            predicted=predicted,
            recomputes=_recomputes(options),
            target=target,
            machine_path=options.machine_path,
        )
        subject = Subject(
            program=program,
            args=args,
            epochs=options.epochs,
            is_global_batch=options.is_global_batch,
            plans=plans,
            machine=machine,
        )
        facts = SweepFacts(
            program=options.program.stem if options.program else "digits",
            machine=machine.name,
            device=_device_words(machine.devices[0].name if machine.devices else "", self.threads),
            device_type=options.device_type,
            axes=self.axes,
            epochs=options.epochs,
            repeats=repeats,
            samples=samples,
            sample_bytes=sample_bytes,
        )
        return subject, facts

    def _common(self, machine: str, device: str) -> dict[str, Any]:
        """Return what all runs of a sweep have in common, and those of its continuation."""
        options = self.options
        program = options.program
        return {
            "version": SWEEP_VERSION,
            "kind": "sweep",
            "program": program.name if program else "built-in",
            "program_digest": _digest_of(program),
            "args": list(options.args),
            "epochs": options.epochs,
            "threads": self.threads,
            "engine": options.engine,
            "collectives": options.collectives,
            "is_global_batch": options.is_global_batch,
            "machine": machine,
            "device": device,
        }


def make_study(options: SweepOptions) -> SweepStudy:
    """Check what is asked for, and return the study.

    Raises:
        UsageError: an axis is unknown, does not reach the program, or has a value that it cannot
            have.
    """
    cores = len(allowed_cores())
    ranks = options.ranks or tuple(1 << k for k in range(cores.bit_length()))
    threads = options.threads or core_binding(allowed_cores(), 0, max(ranks), environment()).threads
    notes = []
    if max(ranks) * threads > cores:
        notes.append(
            f"{max(ranks)} ranks of {threads} threads share {cores} cores: they wait for each "
            "other, and do not scale as on a node with a core for each thread"
        )
    if options.program is None:
        axes = _builtin_axes(options.axes)
        base = "digits"
    else:
        axes = dict(options.axes)
        base = options.program.stem
        check_placeholders(options.args, axes, planned=frozenset({PRECISION, CHECKPOINTING}))
        if _recomputes(options) and not {*axes[CHECKPOINTING]} <= {"off", "on"}:
            raise UsageError(
                f"checkpointing is {', '.join(axes[CHECKPOINTING])}",
                where="paceline characterize --checkpointing",
                fix="Give off and on, or put {checkpointing} among the script's arguments",
            )
    for value in axes.get(BATCH, ()):
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(
                f"a batch of {value!r} samples cannot be",
                where="paceline characterize --batch",
                fix="Give whole numbers of at least 1",
            )
    cells = make_cells(base, axes, ranks, cross=options.cross)
    return SweepStudy(options=options, axes=axes, cells=cells, threads=threads, notes=tuple(notes))


def _recomputes(options: SweepOptions) -> bool:
    """Return whether the plan says what is computed again, as the script's arguments do not."""
    is_said = CHECKPOINTING in placeholders(options.args)
    return options.program is not None and CHECKPOINTING in options.axes and not is_said


def _builtin_axes(given: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the axes of the built-in models: those given, else the default study's."""
    for name, values in given.items():
        known = digits.CHOICES.get(name)
        if name not in digits.BASELINE:
            raise UsageError(
                f"the built-in models have no axis {name}",
                where=f"paceline characterize --vary {name}",
                fix=f"{nearest(name, digits.BASELINE)} Or give a script of your own",
            )
        unknown = [value for value in values if known and value not in known]
        if unknown:
            raise UsageError(
                f"{name.replace('_', ' ')} cannot be {unknown[0]!r}",
                where="paceline characterize",
                fix=nearest(unknown[0], known or ()),
            )
    if not given:
        return dict(digits.DEFAULT_AXES)
    return {name: given.get(name, (value,)) for name, value in digits.BASELINE.items()}


def _device_words(device: str, threads: int) -> str:
    cores = "1 core" if threads == 1 else f"{threads} cores"
    return f"{cores} of {device}" if device else cores


def _digest_of(program: Program | None) -> str:
    """Return the digest of a script, so that a changed one is not taken for the same."""
    if program is None or program.kind is not ProgramKind.SCRIPT:
        return ""
    try:
        return hashlib.sha256(Path(program.name).read_bytes()).hexdigest()
    except OSError as problem:
        raise NotFound(
            "cannot read SCRIPT", where=program.name, why=problem.strerror or "", fix="Name a file"
        ) from problem
