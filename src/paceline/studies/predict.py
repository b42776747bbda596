"""Predicts a user's model on a probed machine: captures in a process with torch, estimates here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.core.errors import UsageError
from paceline.core.estimate import PlanCandidate
from paceline.core.measured_step import ComputeChoice
from paceline.core.plan import Mesh, PipelineChoice, Plan, StrategyChoice
from paceline.core.plan_file import PlanFile
from paceline.core.workload_file import read_workload
from paceline.perf import choose_buckets, divide, estimate
from paceline.perf.out_of_core import fit, fit_stages
from paceline.probe.machine_file import load_machine
from paceline.studies.calibrate import calibrate_by_run
from paceline.studies.measured_estimate import estimate_here
from paceline.training.capture_process import (
    BatchDivision,
    StageDivision,
    capture_splits,
    split_target,
)

if TYPE_CHECKING:
    from paceline.core.allocator import AllocatorChoice
    from paceline.core.estimate import Estimate
    from paceline.core.machine import Machine
    from paceline.core.plan import CollectivesChoice, EngineChoice
    from paceline.core.workload import Workload
    from paceline.training.capture_process import CapturedStep

_AUTO_MICROBATCHES = (1, 2, 4)  # per stage; more make operators small before they fill the bubble


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOptions:
    """How ranks share the model and the batch, and what the price of compute rests on.

    Attributes:
        strategy: ``data``: each rank has the whole model; ``model``: each has a stage of it;
            ``hybrid``: stages times replicas; ``auto``: what is predicted to be fastest of these.
            None: ``data``, or ``hybrid`` where `partitions` are given.
        partitions: number of stages.
        microbatches: of a replica's batch; None: 4 for each stage, with ``auto`` 1, 2 or 4.
        schedule: order in which the stages compute.
        batch: samples of a step on all replicas together; None: each replica has the batch of the
            user's function, with ``auto`` each rank.
        fit_bytes: memory budget of each rank; None: none.
        buckets: bytes of gradients that are reduced in one collective; ``auto``: what is predicted
            to be fastest; None: torch's default.
        compute: ``measured`` runs a few steps here and times their operators; ``rates`` takes the
            machine's rates of operator classes; ``auto`` measures where the machine is this host,
            the ranks have the whole model and the function's batch, and the step runs.
        loader_workers: processes of a rank that prepare batches beside the step.
        runs: folders of runs that followed a plan of the model, by which the machine is corrected.
    """

    strategy: StrategyChoice | None = None
    partitions: int | None = None
    microbatches: int | None = None
    schedule: PipelineChoice = "1f1b"
    batch: int | None = None
    fit_bytes: int | None = None
    buckets: int | Literal["auto"] | None = None
    compute: ComputeChoice = "auto"
    loader_workers: int = 0
    runs: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if self.fit_bytes is not None and self.fit_bytes < 1:
            raise UsageError(
                f"a memory budget must be at least 1 byte, got {self.fit_bytes}",
                where="paceline plan --fit",
                fix="Give the bytes of each rank's process, as 8GiB",
            )
        is_divided = self.resolved in ("model", "hybrid") or self.partitions not in (None, 1)
        if is_divided and self.buckets is not None:
            raise UsageError(
                "the buckets of a model in stages have sizes of their own",
                where=f"paceline plan --buckets {self.buckets}",
                fix="Leave --buckets out, or plan for data-parallel ranks",
            )
        if isinstance(self.buckets, int) and self.buckets < 1:
            raise UsageError(
                f"buckets of {self.buckets} bytes hold no gradient",
                where="paceline plan --buckets",
                fix="Give a size, as 8MiB, or auto",
            )
        if self.resolved != "data" or self.partitions not in (None, 1):
            return
        schedule = None if self.schedule == "1f1b" else self.schedule
        for name, value in (("microbatches", self.microbatches), ("schedule", schedule)):
            if value is not None:
                raise UsageError(
                    f"{name} has no effect on a model that is not divided",
                    where=f"paceline plan --{name} {value}",
                    fix="Give --partitions or a --strategy that divides layers, or leave it out",
                )

    @property
    def resolved(self) -> StrategyChoice:
        """The strategy, where none is given."""
        return self.strategy or ("data" if self.partitions is None else "hybrid")


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankShape:
    """A mesh and the microbatches of its pipeline; 0 where there is one stage."""

    mesh: Mesh
    microbatches: int

    @property
    def split(self) -> BatchDivision:
        return BatchDivision(self.mesh.data, self.microbatches)


def predict(
    target: str,
    *,
    ranks: int,
    threads: int | None = None,
    machine_path: Path | None = None,
    allocator: AllocatorChoice = "keep",
    collectives: CollectivesChoice = "torch",
    engine: EngineChoice = "ddp",
    strategy: StrategyOptions | None = None,
) -> PlanFile:
    """Return the plan of a model on one node, with its estimate and the model's Workload.

    Args:
        target: ``FILE.py:FUNCTION``; the function returns what a training step needs. Or a JSON
            file with a Workload, or a plan file with one: torch is not needed for these.
        ranks: that train.
        threads: of each; by default an equal share of the machine's cores.
        machine_path: a Machine as JSON; by default what ``paceline probe`` wrote on this host.
        allocator: of the ranks, as ``paceline run`` will set it.
        collectives: of the ranks, likewise.
        engine: that reduces their gradients, as `paceline.training.prepare` will choose it.
        strategy: how they share model and batch; None: data-parallel.

    Raises:
        MemoryExceeded: no memory plan holds the budget.
        NotFound: there is no such file, or no machine was probed.
        UsageError: the model cannot be captured or divided, or the plan not predicted.
        PacelineError: the capture failed, see `capture_splits`.
    """
    if not target.endswith(".json") and ":" not in target:
        split_target(target)  # refuses it, before a machine is asked for
    machine = load_machine(machine_path)
    options = strategy or StrategyOptions()
    for run in options.runs:
        machine, _ = calibrate_by_run(machine, run)
    cores = machine.devices[0].cores if machine.devices else 1
    plan = Plan(
        mesh=Mesh(data=ranks),
        threads=threads or max(1, cores // ranks),
        allocator=allocator,
        collectives=collectives,
        engine=engine,
        loader_workers=options.loader_workers,
    )
    if isinstance(options.buckets, int):
        plan = replace(plan, bucket_bytes=options.buckets)
    chooses = options.buckets == "auto"
    if target.endswith(".json"):
        _check_stored(target, options)
        workload = read_workload(Path(target))
        plan = choose_buckets(machine, workload, plan) if chooses else plan
        predicted = estimate(machine, workload, plan)
        return PlanFile(plan=plan, estimate=predicted, workload=workload)
    if options.resolved == "data" and options.batch is None and options.partitions in (None, 1):
        captured = capture_splits(
            target,
            (),
            memory=options.fit_bytes is not None,
            may_run=options.compute == "measured",
        )
        workload = captured.workload
        plan = choose_buckets(machine, workload, plan) if chooses else plan
        predicted = estimate_here(machine, workload, plan, target, options.compute)
        if options.fit_bytes is not None and captured.events is not None:
            found = fit(machine, workload, plan, captured.events, options.fit_bytes)
            predicted = replace(predicted, memory_fit=found)
        return PlanFile(plan=plan, estimate=predicted, workload=workload)
    if options.compute == "measured":
        raise UsageError(
            "a step is measured with the whole model and the function's batch",
            where=f"paceline plan --compute measured --strategy {options.resolved}",
            fix="Leave out --batch, --strategy and --partitions, or plan with --compute rates",
        )
    if options.fit_bytes is not None:
        _check_fit(options, engine)
    shapes = _shapes(options, ranks)
    is_auto = options.resolved == "auto"
    captured = capture_splits(
        target,
        [shape.split for shape in shapes],
        batch=options.batch or 0,
        copies=ranks if is_auto else shapes[0].mesh.data,
    )
    plan = replace(plan, schedule=options.schedule)
    file = _fastest(machine, plan, shapes, captured, compare=is_auto, chooses=chooses)
    if options.fit_bytes is None:
        return file
    return _fitted(machine, target, file, captured.batch, options.fit_bytes)


def _check_stored(target: str, options: StrategyOptions) -> None:
    """Raise an error for what a stored Workload does not say.

    Raises:
        UsageError: the model itself is needed.
    """
    asks = {
        "--compute measured": options.compute == "measured",
        "--batch": options.batch is not None,
        "--fit": options.fit_bytes is not None,
        "--partitions": options.resolved != "data" or options.partitions not in (None, 1),
    }
    needed = [option for option, is_asked in asks.items() if is_asked]
    if needed:
        raise UsageError(
            f"{needed[0]} needs the model itself",
            where=target,
            why="a stored workload is one step of one rank",
            fix="Give FILE.py:FUNCTION, or leave it out",
        )


def _check_fit(options: StrategyOptions, engine: EngineChoice) -> None:
    """Raise an error for what cannot be planned within a memory budget.

    Raises:
        UsageError: it cannot.
    """
    is_undivided = options.resolved == "data" or options.partitions == 1
    if options.resolved == "auto" or is_undivided:
        raise UsageError(
            "a memory budget is planned for ranks that have the whole model and the function's "
            "batch, or for given stages",
            where=f"paceline plan --fit --strategy {options.resolved}",
            fix="Leave out --batch, or give --partitions N of 2 or more without --strategy auto",
        )
    if engine == "fsdp2":
        raise UsageError(
            "a rank that has parts of its parameters cannot spill them",
            where="paceline plan --fit --engine fsdp2",
            fix="Leave one of both out",
        )


def _fitted(machine: Machine, target: str, file: PlanFile, batch: int, fit_bytes: int) -> PlanFile:
    """Return the plan of a model in stages with what goes where within a memory budget."""
    plan, workload = file.plan, file.workload
    assert workload is not None
    division = StageDivision(
        layers=plan.layers,
        batch=-(-batch // plan.mesh.data),
        microbatches=plan.microbatch_count,
        schedule=plan.schedule,
    )
    captured = capture_splits(target, (), stages=division)
    predicted = fit_stages(machine, workload, _estimate(file), captured.stage_events, fit_bytes)
    return replace(file, estimate=predicted)


def _shapes(options: StrategyOptions, ranks: int) -> list[_RankShape]:
    """Return the meshes and microbatches to predict.

    Raises:
        UsageError: the ranks cannot be divided like this.
    """
    strategy, partitions = options.resolved, options.partitions
    if strategy == "auto":
        found = [_RankShape(mesh=Mesh(data=ranks), microbatches=0)]
        stages = [count for count in range(2, ranks + 1) if ranks % count == 0]
        for count in stages if partitions is None else [partitions]:
            each = [options.microbatches] if options.microbatches else _several(count)
            found += [_divided(ranks, count, microbatches) for microbatches in each]
        return found
    if strategy == "data":
        partitions = partitions or 1
    elif strategy == "model":
        partitions = partitions or ranks
    elif partitions is None:
        raise UsageError(
            "the strategy hybrid needs a number of partitions",
            where="paceline plan",
            fix="Give --partitions N, the stages that the model's layers are divided into",
        )
    expected = {"data": 1, "model": ranks}.get(strategy, partitions)
    if partitions != expected:
        raise UsageError(
            f"the strategy {strategy} divides {ranks} ranks by {expected}, not by {partitions}",
            where="paceline plan",
            fix="Leave --partitions out, or use the strategy hybrid",
        )
    default = Plan(mesh=Mesh(pipeline=partitions)).microbatch_count
    return [_divided(ranks, partitions, options.microbatches or default)]


def _several(stages: int) -> list[int]:
    return [stages * each for each in _AUTO_MICROBATCHES]


def _divided(ranks: int, partitions: int, microbatches: int) -> _RankShape:
    if ranks % partitions:
        raise UsageError(
            f"{ranks} ranks cannot be divided into {partitions} partitions",
            where="paceline plan",
            fix="Give a number of partitions that divides the number of ranks",
        )
    mesh = Mesh(data=ranks // partitions, pipeline=partitions)
    return _RankShape(mesh=mesh, microbatches=microbatches if partitions > 1 else 0)


def _fastest(
    machine: Machine,
    plan: Plan,
    shapes: list[_RankShape],
    captured: CapturedStep,
    *,
    compare: bool,
    chooses: bool,
) -> PlanFile:
    """Return the plan with the shortest step, of those that fit into memory if any do.

    Args:
        machine: on which ranks train.
        plan: what all plans have in common.
        shapes: to predict.
        captured: a workload for each shape.
        compare: whether to keep the others as candidates.
        chooses: whether the sizes of buckets are chosen.
    """
    files: list[PlanFile] = []
    for shape, workload in zip(shapes, captured.splits, strict=True):
        if compare and shape.mesh.pipeline > len(workload.layers):
            continue
        file = _predicted(machine, plan, shape, workload, captured, chooses=chooses)
        if all(file.plan != other.plan for other in files):
            files.append(file)
    files.sort(key=lambda file: (not _estimate(file).fits, _estimate(file).step_time_s))
    if not compare:
        return files[0]
    candidates = tuple(_candidate(_estimate(file), captured.batch) for file in files)
    chosen = files[0]
    return replace(chosen, estimate=replace(_estimate(chosen), candidates=candidates))


def _predicted(
    machine: Machine,
    plan: Plan,
    shape: _RankShape,
    workload: Workload,
    captured: CapturedStep,
    *,
    chooses: bool,
) -> PlanFile:
    count, size = shape.split.sizes(captured.batch)
    if shape.mesh.pipeline > 1:
        planned = replace(plan, mesh=shape.mesh, microbatches=count)
        planned = divide(machine, workload, planned)
    else:
        planned = replace(plan, mesh=shape.mesh, schedule="1f1b")
        planned = choose_buckets(machine, workload, planned) if chooses else planned
    predicted = estimate(machine, workload, planned)
    notes = _batch_notes(shape, captured, count, size)
    predicted = replace(predicted, warnings=(*predicted.warnings, *notes))
    return PlanFile(plan=planned, estimate=predicted, workload=workload)


def _batch_notes(shape: _RankShape, captured: CapturedStep, count: int, size: int) -> list[str]:
    """Return what the script has to do so that its run is the one that was predicted."""
    own, given = -(-captured.batch // shape.mesh.data), captured.workload.batch
    notes = []
    if own != given:
        who = "each replica" if shape.mesh.pipeline > 1 else "each rank"
        notes.append(
            f"predicted for batches of {own} samples on {who}, {captured.batch} on all together; "
            f"the function's batch has {given}"
        )
    if count * size != own and shape.mesh.pipeline > 1:
        notes.append(
            f"{own} samples are no multiple of {count} microbatches: all are predicted as long as "
            f"the largest, of {size}"
        )
    return notes


def _estimate(file: PlanFile) -> Estimate:
    assert file.estimate is not None
    return file.estimate


def _candidate(predicted: Estimate, batch: int) -> PlanCandidate:
    plan = predicted.plan
    stages = [stage.memory_bytes for stage in predicted.stages]
    return PlanCandidate(
        mesh=plan.mesh,
        microbatches=plan.microbatch_count,
        batch=batch,
        step_time_s=predicted.step_time_s,
        memory_bytes=max(stages, default=sum(predicted.memory_bytes.values())),
        fits=predicted.fits,
        limit=predicted.limit,
    )
