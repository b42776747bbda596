"""Checks a run before anything is written or started, and claims its folder."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.collectives.options import CollectivesConfig
from paceline.core.affinity import allowed_cores
from paceline.core.allocator import AllocatorSetting, allocator_setting
from paceline.core.config import Resolved, environment, resolve
from paceline.core.errors import Missing, UsageError
from paceline.core.interfaces import GLOO_INTERFACE, gloo_problem
from paceline.core.plan_file import PlanFile
from paceline.launch.budget.budget import CpuBudget
from paceline.launch.budget.choice import NodeCores, budget_words, node_budget
from paceline.launch.folder import claim, default_folder, refuse_taken, set_aside
from paceline.launch.mpi import ProgramMpi, mpi_of_command
from paceline.launch.nodes import node_warnings, task_of_node
from paceline.launch.options import RunConfig
from paceline.launch.planned import check_plan, plan_warnings
from paceline.launch.program import Program, ProgramKind
from paceline.launch.ranks import RankIds
from paceline.launch.recordable import find_obstacle, script_line
from paceline.launch.shares import parse_shares
from paceline.launch.task_placement import TaskPlacement, check_world, detect
from paceline.launch.tuning.settings import parse_tune
from paceline.store.posix.mounts import PackMount, parse_mounts
from paceline.store.serve.run_data import RunData, parse_data
from paceline.store.serve.run_output import RunOutput, parse_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.core.clock import Clock
    from paceline.core.plan import CollectivesChoice


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """A run that is ready to start: everything checked, nothing written yet.

    Attributes:
        program: what each rank runs.
        args: the program's arguments.
        run_folder: the folder that the run writes.
        ranks: number of ranks in the run, on all nodes.
        resolved: the configuration with the provenance of its values.
        task: this launcher's place among several tasks; None if it starts all ranks.
        warnings: lines to print before the start.
        cores: of this node, which the budget of the ranks divides.
        budget: of this node; None where Slurm or mpirun has started a task for each rank: then the
            tasks divide their cores when all are there.
        collectives_settings: the configuration of the backend ``paceline``, as rank 0 will find it.
        plan: the plan that the run follows; None without one.
        machine: the machine file that the user named, for the ranks' collectives; None without.
        is_default_name: the user gave no --out; if the name is taken, Paceline takes another.
        mpi: the MPI of the program, whose calls are recorded; None if it uses none.
        mounts: packs that the ranks see as folders.
        data: packs that servers on the nodes serve to them.
        outputs: folders that they write to by way of local storage.
        rebalance: whether ranks get shares of a batch by their speed.
        weights: of the shares with which that begins; empty: equal ones.
    """

    program: Program
    args: tuple[str, ...]
    run_folder: Path
    ranks: int
    resolved: Resolved[RunConfig]
    task: TaskPlacement | None
    warnings: tuple[str, ...]
    collectives_settings: Resolved[CollectivesConfig]
    cores: NodeCores
    budget: CpuBudget | None = None
    plan: PlanFile | None = None
    machine: Path | None = None
    mounts: tuple[PackMount, ...] = ()
    data: tuple[RunData, ...] = ()
    outputs: tuple[RunOutput, ...] = ()
    rebalance: bool = False
    weights: tuple[float, ...] = ()
    is_default_name: bool = False
    mpi: ProgramMpi | None = None

    @property
    def started(self) -> Program:
        """What each rank starts: of a script that uses MPI its own Python, with MPI's recorder."""
        if self.mpi is None or self.program.kind is ProgramKind.EXECUTABLE:
            return self.program
        return Program(ProgramKind.EXECUTABLE, self.program.command[0])

    @property
    def started_args(self) -> tuple[str, ...]:
        """The arguments of `started`."""
        if self.started is self.program:
            return self.args
        return (*self.program.command[1:], *self.args)

    @property
    def records_io(self) -> bool:
        """Whether calls for files are recorded; of MPI programs by default."""
        config, provenance = self.resolved.config, self.resolved.provenance
        by_default = self.mpi is not None and provenance["record_io"] == "default"
        return config.record and (config.record_io or by_default)

    @property
    def task_number(self) -> int:
        """This launcher's number among those of the run; 0 if it starts all ranks."""
        return self.task.task_number if self.task else 0

    @property
    def allocator(self) -> AllocatorSetting:
        """What the ranks' memory allocator becomes."""
        chosen = self.plan.plan.allocator if self.plan else self.resolved.config.allocator
        return allocator_setting(chosen, environment())

    @property
    def collectives(self) -> CollectivesChoice:
        """The backend that replaces gloo, or torch's own."""
        return self.plan.plan.collectives if self.plan else self.resolved.config.collectives

    @property
    def values(self) -> dict[str, Any]:
        """Each setting with its provenance, which is ``plan`` where the plan gives the value."""
        values = self.resolved.to_json()
        if self.plan is None:
            return values
        plan = self.plan.plan
        planned = {
            "ranks": plan.ranks_per_node,
            "allocator": plan.allocator,
            "collectives": plan.collectives,
        }
        for name, value in planned.items():
            if values[name]["provenance"] == "default":
                values[name] = {"value": value, "provenance": "plan"}
        return values

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know of the settings in effect, a line each."""
        said = [self.allocator.note]
        if self.budget:
            said.append(f"budget {budget_words(self.budget)}")
        environ = environment()
        if environ.get(GLOO_INTERFACE) and (problem := gloo_problem(environ)):
            said.append(f"gloo will fail: {problem}")
        if self.collectives == "torch":
            return tuple(said)
        return (
            *said,
            "collectives paceline (in place of gloo, and where the script names no backend)",
        )

    @property
    def local_ranks(self) -> tuple[RankIds, ...]:
        """The ranks that this launcher starts."""
        task = self.task
        count = task.node_ranks if task else self.ranks  # on this node
        if task is None or task.source == "nodes":
            first, numbers = self.task_number * count, range(count)
        else:  # a task is one of the node's ranks
            first, numbers = (
                self.task_number - task.local_task_number,
                range(task.local_task_number, task.local_task_number + 1),
            )
        return tuple(
            RankIds(
                rank=first + local_rank,
                world_size=self.ranks,
                local_rank=local_rank,
                local_world_size=count,
            )
            for local_rank in numbers
        )


def prepare(
    program: Program,
    args: Sequence[str],
    resolved: Resolved[RunConfig],
    run: Path | None,
    clock: Clock,
    *,
    plan: PlanFile | None = None,
    machine: Path | None = None,
    mpi: bool = False,
) -> PreparedJob:
    """Check a run before anything is written or started.

    Args:
        program: what each rank runs.
        args: the program's arguments.
        resolved: the configuration with the provenance of its values.
        run: the folder to write; None chooses one under ``paceline-runs``.
        clock: gives the time for the name of that folder.
        plan: gives ranks, threads, bucket sizes, allocator and collectives; None leaves them to
            `resolved`.
        machine: the machine file that the user named.
        mpi: the program uses MPI, and is started by a task of Slurm or mpirun; without it only
            executables are looked at.

    Raises:
        DestinationExists: the folder is there and not empty.
        UsageError: Slurm or mpirun has another number of tasks, something contradicts the plan,
            an executable is given a memory budget, shares or a setting to tune, such a setting
            cannot be tuned, shares are not those of the ranks, or the MPI of a program is not
            known.
        Missing: torch is not installed, or the library that records MPI.
        ConfigError: a setting of the backend ``paceline`` is not valid.
    """
    collectives_settings = resolve(CollectivesConfig)  # before the ranks find the same mistake
    is_python = program.kind is not ProgramKind.EXECUTABLE and not mpi
    if is_python and importlib.util.find_spec("torch") is None:
        raise Missing("torch is not installed", fix="pip install 'paceline[torch]'")
    config = resolved.config
    if config.tune:
        parse_tune(config.tune)
    if not is_python:
        _refuse_python_settings(config, program.name)
    node_ranks = plan.plan.ranks_per_node if plan else config.ranks or 1
    task = task_of_node(config, detect(environment()), node_ranks, [program.name, *args])
    if task is not None:
        check_world(task, config.ranks)
    ranks = task.ranks if task else config.ranks or 1
    warnings = _warnings(ranks, task)
    found = _mpi_of(program, args, task, required=mpi) if config.record else None
    if plan is not None:
        check_plan(plan.plan, resolved, task, environment())
        if task is not None:
            check_world(task, plan.plan.mesh.world_size)
        ranks = plan.plan.mesh.world_size
        warnings = (*_warnings(ranks, task), *plan_warnings(plan.plan, program.kind))
    warnings = (*node_warnings(config), *warnings)
    is_default_name = run is None and task is None
    run = _run_folder(run, task, program.stem, clock, again=config.again)
    mounts = parse_mounts(config.mounts)
    data = parse_data(config.data, mounts)
    points = [mount.point for mount in mounts] + [pack.point for pack in data if pack.point]
    if found is not None:
        found.variables(run, environment())  # that its recorder is there
    elif not is_python and config.record:
        warnings = (*warnings, _executable_warning(program, args, run))
    cores = NodeCores.read()
    budget = None
    if task is None or task.source == "nodes":
        budget = node_budget(
            config.budget,
            cores,
            ranks=task.node_ranks if task else ranks,
            environ=environment(),
            plan=plan.plan if plan else None,
            task=task,
        )
        if budget.fix:
            warnings = (*warnings, f"{budget.why}. Ask for more: {budget.fix}")
    return PreparedJob(
        program=program,
        args=tuple(args),
        run_folder=run,
        ranks=ranks,
        resolved=resolved,
        task=task,
        warnings=warnings,
        cores=cores,
        budget=budget,
        plan=plan,
        mpi=found,
        mounts=mounts,
        data=data,
        outputs=parse_outputs(config.outputs, points),
        rebalance=config.rebalance or bool(config.shares),
        weights=parse_shares(config.shares, ranks),
        machine=machine.resolve() if machine else None,
        is_default_name=is_default_name,
        collectives_settings=collectives_settings,
    )


def _run_folder(
    run: Path | None, task: TaskPlacement | None, stem: str, clock: Clock, *, again: bool
) -> Path:
    """Return the folder that a run writes; one that is taken is refused, unless it is set aside."""
    if run is None and again:
        raise UsageError("--again needs the folder of the run", fix="Give --out RUN, too")
    run = default_folder(stem, task, clock) if run is None else run
    if not again:
        refuse_taken(run, task.task_number if task else 0)
    return run


def _refuse_python_settings(config: RunConfig, program: str) -> None:
    """Refuse settings that work inside the process that trains, which is not ours."""
    settings = (
        (
            config.memory_budget_bytes is not None,
            "a memory budget needs a Python script or module",
            "it is kept inside the process that trains",
            "Start the Python script itself, or give memory_budget to prepare in it",
        ),
        (
            config.rebalance or bool(config.shares),
            "rebalancing needs a Python script or module",
            "it changes batches and weighs gradients inside the process that trains",
            "Start the Python script itself with paceline run --rebalance",
        ),
        (
            bool(config.tune),
            "--tune needs a Python script or module",
            "settings are switched inside the process that trains",
            "Start the Python script itself",
        ),
    )
    for is_set, what, why, fix in settings:
        if is_set:
            raise UsageError(what, where=program, why=why, fix=fix)


def claim_folder(job: PreparedJob) -> PreparedJob:
    """Make the run's folder, and return the job with it; see `folder.claim`."""
    if job.task_number != 0:  # rank 0's launcher makes it for all
        return job
    if job.resolved.config.again:
        set_aside(job.run_folder)
    run_folder = claim(job.run_folder, is_default_name=job.is_default_name)
    return dataclasses.replace(job, run_folder=run_folder)


def _mpi_of(
    program: Program, args: Sequence[str], task: TaskPlacement | None, *, required: bool
) -> ProgramMpi | None:
    """Return the MPI of a program of which each task is a rank; None if it uses none that is seen.

    Ranks that Paceline starts itself cannot be those of an MPI: `paceline run --mpi` has its mpirun
    start them.
    """
    if task is None or task.source == "nodes":
        return None
    if program.kind is not ProgramKind.EXECUTABLE and not required:
        return None  # most Python scripts under mpirun train with torch, whose collector is there
    return mpi_of_command([*program.command, *args], required=required)


def _warnings(ranks: int, task: TaskPlacement | None) -> tuple[str, ...]:
    node_ranks = task.node_ranks if task else ranks
    cores = os.cpu_count() or 1 if task else len(allowed_cores())
    if node_ranks <= cores:
        return ()
    return (
        f"{node_ranks} ranks share {cores} cores: they will wait for each other, and times are not "
        "those of a node with a core for each rank",
    )


def _executable_warning(program: Program, args: Sequence[str], run: Path) -> str:
    if obstacle := find_obstacle([program.name, *args]):
        return (
            f"{obstacle.what}: its ranks are not recorded, as {obstacle.why}. Put this line into "
            f"the script, before its loop, and start it without paceline run: {script_line(run)}"
        )
    return (
        f"{program.name} is not a Python script: it runs with each rank's environment variables, "
        "and a Python process that it starts is recorded once it trains"
    )
