"""Runs a script on its ranks and turns their traces into a result.

On one node the ranks are started by torch's elastic agent; inside a Slurm step or under mpirun
each task is already a rank and finds the others in a rendezvous. Either way the ranks write traces,
and when all have ended (well, by an exception, or killed) the traces become `result.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores, core_binding
from paceline.core.config import Resolved, environment
from paceline.core.errors import (
    DeadlineExceeded,
    Interrupted,
    Missing,
    NotFound,
    PacelineError,
)
from paceline.core.files import commit_text
from paceline.core.plan_file import PlanFile
from paceline.core.processes import (
    StopRequested,
    become_reaper,
    descendants,
    end_descendants,
    ended_on_signal,
)
from paceline.launch.allocation import Allocation, check_world, detect
from paceline.launch.allocator import AllocatorSetting, allocator_setting
from paceline.launch.exits import ExitOutcome, RankExit, interrupted_exit, interruption
from paceline.launch.failures import exit_code, first_failure, raise_failure
from paceline.launch.folder import claim, default_folder, refuse_taken
from paceline.launch.options import RunConfig
from paceline.launch.planned import check_plan, plan_warnings
from paceline.launch.rendezvous.job import TaskRendezvous
from paceline.launch.rendezvous.messages import JobEnd
from paceline.launch.task import run_task
from paceline.launch.watcher import StatusWatcher
from paceline.runs.folder import CONFIG_VERSION, PLAN_NAME
from paceline.runs.result import Failure, PhaseTime, RankResult, RunResult
from paceline.runs.versions import versions
from paceline.trace.analysis import Analysis, analyse
from paceline.trace.format.files import read_status
from paceline.trace.merge import load_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.clock import Clock
    from paceline.core.machine import Machine
    from paceline.trace.format.header import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is ready to start: everything checked, nothing written yet.

    Attributes:
        script: the user's program.
        args: the script's arguments.
        run_folder: the folder that the run writes.
        ranks: number of ranks in the run, on all nodes.
        resolved: the configuration with the provenance of its values.
        allocation: this task's place under Slurm or mpirun; None outside of both.
        warnings: lines to print before the start.
        plan: the plan that the run follows; None without one.
        is_default_name: the user gave no --out; if the name is taken, Paceline takes another.
    """

    script: Path
    args: tuple[str, ...]
    run_folder: Path
    ranks: int
    resolved: Resolved[RunConfig]
    allocation: Allocation | None
    warnings: tuple[str, ...]
    plan: PlanFile | None = None
    is_default_name: bool = False

    @property
    def rank(self) -> int:
        """This task's rank; 0 for the launcher of all ranks of a node."""
        return self.allocation.rank if self.allocation else 0

    @property
    def allocator(self) -> AllocatorSetting:
        """What the ranks' memory allocator becomes."""
        return allocator_setting(self.resolved.config.allocator, environment())


def prepare(
    script: Path,
    args: Sequence[str],
    resolved: Resolved[RunConfig],
    run: Path | None,
    clock: Clock,
    *,
    plan: PlanFile | None = None,
) -> Job:
    """Check a run before anything is written or started.

    Args:
        script: the user's program.
        args: the script's arguments.
        resolved: the configuration with the provenance of its values.
        run: the folder to write; None chooses one under ``paceline-runs``.
        clock: gives the time for the name of that folder.
        plan: gives ranks, threads and bucket sizes; None leaves them to `resolved`.

    Raises:
        NotFound: there is no such script.
        DestinationExists: the folder is there and not empty.
        UsageError: the allocation has another world size, or something contradicts the plan.
        Missing: torch is not installed.
    """
    if not script.is_file():
        what = "SCRIPT is a directory" if script.is_dir() else "no such script"
        raise NotFound(what, where=str(script), fix="Give the path of a Python file")
    if importlib.util.find_spec("torch") is None:
        raise Missing("torch is not installed", fix="pip install 'paceline[torch]'")
    config = resolved.config
    allocation = detect(environment())
    if allocation is not None:
        check_world(allocation, config.ranks)
    ranks = allocation.world_size if allocation else config.ranks or 1
    warnings = _warnings(ranks, allocation)
    if plan is not None:
        check_plan(plan.plan, resolved, allocation, environment())
        if allocation is not None:
            check_world(allocation, plan.plan.mesh.world_size)
        ranks = plan.plan.mesh.world_size
        warnings = (*_warnings(ranks, allocation), *plan_warnings(plan.plan))
    is_default_name = run is None and allocation is None
    if run is None:
        run = default_folder(script, allocation, clock)
    refuse_taken(run, allocation.rank if allocation else 0)
    return Job(
        script=script,
        args=tuple(args),
        run_folder=run,
        ranks=ranks,
        resolved=resolved,
        allocation=allocation,
        warnings=warnings,
        plan=plan,
        is_default_name=is_default_name,
    )


def claim_folder(job: Job) -> Job:
    """Make the run's folder, and return the job with it; see `folder.claim`."""
    if job.rank != 0:  # rank 0 makes it for all
        return job
    run_folder = claim(job.run_folder, is_default_name=job.is_default_name)
    return dataclasses.replace(job, run_folder=run_folder)


def execute(
    job: Job,
    *,
    machine: Machine,
    clock: Clock,
    on_status: Callable[[list[Status]], None] | None = None,
) -> RunResult:
    """Run the job to its end, write the run's folder, and return its result.

    Args:
        job: the job that `claim_folder` returned.
        machine: the Machine that is written into the run's folder, as far as it is known.
        clock: the clock for waits and for the times of exits.
        on_status: called about four times a second with the ranks' live status.

    Returns:
        The run's result. On a task other than rank 0: a result without measurements, if its rank
        ended well.

    Raises:
        ScriptFailed: a rank raised; the message begins with its traceback.
        RankLost: a rank was killed.
        Interrupted: a signal stopped the run; traces are kept.
        StorageError: the folder cannot be written.
    """
    if job.rank == 0:
        _write_start(job, machine)
    with contextlib.ExitStack() as stack:
        rendezvous = stack.enter_context(_rendezvous(job, clock)) if job.allocation else None
        exits = _run_ranks(job, rendezvous, clock, on_status)
        if rendezvous is not None and job.rank != 0:
            return _follow(job, exits, rendezvous)
        interrupted = interruption(exits)
        failure = None if interrupted else first_failure(job.run_folder, exits)
        result = summarize(job.run_folder, job.ranks, exit_code(exits, failure), failure)
        failure = result.failure
        commit_text(job.run_folder / "result.json", result.to_text())
        if rendezvous is not None:
            signal_name = interrupted.signal if interrupted else ""
            end = JobEnd(exit_code=result.exit_code, signal=signal_name, failure=failure)
            rendezvous.announce(end)
    raise_failure(job.run_folder, job.script, exits, failure)
    return result


def _rendezvous(job: Job, clock: Clock) -> TaskRendezvous:
    assert job.allocation is not None
    return TaskRendezvous(
        job.run_folder,
        job.allocation,
        host=socket.gethostname(),
        cores=allowed_cores(),
        deadlines=job.resolved.config.deadlines,
        clock=clock,
    )


def _run_ranks(
    job: Job,
    rendezvous: TaskRendezvous | None,
    clock: Clock,
    on_status: Callable[[list[Status]], None] | None,
) -> tuple[RankExit, ...]:
    """Run this launcher's ranks; return the exits of those that did not end well."""
    before = frozenset(descendants(os.getpid()))
    become_reaper()
    watch = StatusWatcher(job.run_folder, job.ranks, clock, on_status)
    # Removed when all ranks have ended: a killed rank does not remove its loader workers' sockets.
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        try:
            with watch, job.allocator.applied(), ended_on_signal(clock):
                return _start(job, rendezvous, Path(folder), clock)
        except StopRequested as stop:
            return (interrupted_exit(None, stop, clock.wall_s()),)
        finally:
            end_descendants(clock, before)


def summarize(run: Path, ranks: int, exit_code: int, failure: Failure | None = None) -> RunResult:
    """Return the result that the traces in folder `run` give; empty when nothing was recorded."""
    try:
        trace = load_run(run)
    except NotFound:
        return RunResult(
            exit_code=exit_code,
            world_size=ranks,
            step_time_s=0.0,
            loop_wall_s=0.0,
            ranks=(),
            failure=failure,
        )
    analysis = analyse(trace)
    return RunResult(
        exit_code=exit_code,
        world_size=ranks,
        step_time_s=analysis.step_time_s,
        loop_wall_s=max(rank.loop_wall_s for rank in analysis.phases),
        ranks=_rank_results(analysis),
        straggler=analysis.stragglers[0] if analysis.stragglers else None,
        stragglers=analysis.stragglers,
        shifts=analysis.shifts,
        failure=_in_loop_steps(analysis, failure),
        step_rule=analysis.step_rule,
        nan=analysis.nan,
    )


def _in_loop_steps(analysis: Analysis, failure: Failure | None) -> Failure | None:
    """Return the failure with its step in steps of the loop: the trace's header counts marks."""
    for rank in analysis.trace.ranks:
        if failure is not None and rank.rank == failure.rank:
            step = max(0, failure.step - rank.marks_within_steps)
            return dataclasses.replace(failure, step=step)
    return failure


def trace_warnings(run: Path) -> tuple[str, ...]:
    """Return one line for each rank whose trace in folder `run` lost events."""
    lines = []
    for path in sorted((run / "trace").glob("rank-*.trace")):
        try:
            status = read_status(path)
        except PacelineError:  # damaged, or hardly begun: its reader says so
            continue
        if status.error or status.dropped_count:
            why = os.strerror(status.error) if status.error else "events came too fast"
            lines.append(
                f"the trace of rank {status.rank} lacks {status.dropped_count} events: {why}"
            )
    return tuple(lines)


def _rank_results(analysis: Analysis) -> tuple[RankResult, ...]:
    return tuple(
        RankResult(
            rank=phases.rank,
            steps=phases.steps,
            loop_wall_s=phases.loop_wall_s,
            peak_memory_bytes=rank.status.peak_memory_bytes,
            phases=tuple(
                PhaseTime(name=name, measured_s=seconds)
                for name, seconds in phases.breakdown().items()
            ),
            dropped_count=rank.status.dropped_count,
            host=phases.host,
        )
        for rank, phases in zip(analysis.trace.ranks, analysis.phases, strict=True)
    )


def _warnings(ranks: int, allocation: Allocation | None) -> tuple[str, ...]:
    node_ranks = allocation.local_world_size if allocation else ranks
    cores = os.cpu_count() or 1 if allocation else len(allowed_cores())
    if node_ranks <= cores:
        return ()
    return (
        f"{node_ranks} ranks share {cores} cores: they will wait for each other, and times are not "
        "those of a node with a core for each rank",
    )


def _threads(job: Job) -> int | None:
    """Return the compute threads of each rank; None where torch or the allocation chooses them."""
    if job.plan is not None:
        return job.plan.plan.threads
    environ = environment()
    if "OMP_NUM_THREADS" not in environ and (job.allocation or not job.resolved.config.bind):
        return None
    return core_binding(allowed_cores(), 0, job.ranks, environ).threads


def _write_start(job: Job, machine: Machine) -> None:
    config = {
        "version": CONFIG_VERSION,
        "values": job.resolved.to_json(),
        "script": str(job.script),
        "args": list(job.args),
        "world_size": job.ranks,
        "threads": _threads(job),
        "allocator": job.allocator.to_json(),
    }
    commit_text(job.run_folder / "config.json", json.dumps(config, indent=1) + "\n")
    commit_text(job.run_folder / "versions.json", json.dumps(versions(), indent=1) + "\n")
    commit_text(job.run_folder / "machine.json", machine.to_text())
    if job.plan is not None:
        commit_text(job.run_folder / PLAN_NAME, job.plan.to_text())


def _start(
    job: Job, rendezvous: TaskRendezvous | None, temporary: Path, clock: Clock
) -> tuple[RankExit, ...]:
    # Under Slurm or mpirun each task learns its share of the cores in the rendezvous.
    bind = job.resolved.config.bind and job.allocation is None
    cores = ",".join(map(str, allowed_cores())) if bind else ""
    record = "on" if job.resolved.config.record else "off"
    command = [sys.executable, "-m", "paceline.launch.worker", "--run", str(job.run_folder)]
    command += [
        "--launcher",
        str(os.getpid()),
        "--temporary",
        str(temporary),
        "--cores",
        cores,
        "--record",
        record,
        *_plan_options(job.plan),
        # without this "--", argparse would consume the first "--" among the script's own arguments
        "--",
        str(job.script),
        *job.args,
    ]
    if job.allocation is None or rendezvous is None:
        # importlib, because this module imports torch: it must load only now, after the CLI has
        # printed "paceline run: world size ..."
        elastic = importlib.import_module("paceline.launch.elastic")
        exits: tuple[RankExit, ...] = elastic.start(command, job.ranks, temporary)
        return exits
    return run_task(job.allocation, command, rendezvous, clock, bind=job.resolved.config.bind)


def _plan_options(plan: PlanFile | None) -> list[str]:
    """Return the worker's command-line options that carry the plan's values."""
    if plan is None:
        return []
    buckets = (plan.plan.bucket_bytes, plan.plan.first_bucket_bytes)
    return ["--threads", str(plan.plan.threads), "--buckets", *map(str, buckets)]


def _follow(job: Job, exits: tuple[RankExit, ...], rendezvous: TaskRendezvous) -> RunResult:
    """Return the result, or raise the error, of a task other than rank 0."""
    end = rendezvous.await_end()
    if not exits:
        return RunResult(
            exit_code=0, world_size=job.ranks, step_time_s=0.0, loop_wall_s=0.0, ranks=()
        )
    if end is not None:
        if end.exit_code == Interrupted.exit_code:
            name = end.signal or exits[0].signal
            stop = StopRequested(name)
            exits = (interrupted_exit(None, stop, exits[0].at_s),)
        raise_failure(job.run_folder, job.script, exits, end.failure)
    else:
        # this rank did not fail: its task stopped it
        stopped_by_task = exits[0].outcome is ExitOutcome.STOPPED
        failure = None if stopped_by_task else first_failure(job.run_folder, exits)
        raise_failure(job.run_folder, job.script, exits, failure)
    raise DeadlineExceeded(
        "rank 0 did not report how the run ended",
        where=str(job.run_folder),
        why="the run was stopped, and rank 0's task stopped answering",
        fix="See rank 0's output",
    )
