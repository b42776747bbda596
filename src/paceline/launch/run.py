"""Runs a script on its ranks and turns what they leave into a result.

On one node the ranks are started by torch's elastic agent; inside a Slurm step or under mpirun
each task is already a rank and only has to meet the others. Either way the ranks write traces, and
when all have ended (well, by an exception, or killed) the traces become `result.json`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.affinity import allowed_cores, share
from paceline.core.config import Resolved, environment
from paceline.core.errors import (
    DeadlineExceeded,
    Interrupted,
    Missing,
    NotFound,
    PacelineError,
    UsageError,
    storage_errors,
)
from paceline.core.files import commit_text
from paceline.core.plan_file import PlanFile
from paceline.core.processes import (
    Exit,
    Stopped,
    become_reaper,
    descendants,
    end_descendants,
    ended_on_signal,
)
from paceline.core.record import Record
from paceline.launch.allocation import Allocation, check_world, detect
from paceline.launch.failures import exit_code, first_failure, raise_failure
from paceline.launch.meeting import await_result, refuse_taken
from paceline.launch.planned import check_plan, plan_warnings
from paceline.launch.task import start_task
from paceline.runs.planned import PLAN_NAME
from paceline.runs.result import Failure, PhaseTime, RankResult, RunResult, load_result
from paceline.runs.versions import versions
from paceline.trace.analysis import Analysis, analyse
from paceline.trace.files import read_status, trace_name
from paceline.trace.merge import load_run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.core.clock import Clock
    from paceline.core.machine import Machine
    from paceline.trace.header import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(Record):
    """How to run a script.

    Changes results: `ranks`, since the script divides its data by them.
    Changes speed: `record`, `bind`.

    Attributes:
        ranks: on this node; None is one, or what the allocation says.
        record: whether to record traces.
        bind: whether each rank gets cores of its own.
    """

    ranks: int | None = None
    record: bool = True
    bind: bool = True

    def __post_init__(self) -> None:
        if self.ranks is not None and self.ranks < 1:
            raise UsageError(f"{self.ranks} ranks were asked for", fix="Give at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is ready to start: everything checked, nothing written yet."""

    script: Path
    args: tuple[str, ...]
    run: Path
    ranks: int
    resolved: Resolved[RunConfig]
    allocation: Allocation | None
    warnings: tuple[str, ...]
    plan: PlanFile | None = None


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
        args: its arguments.
        resolved: the configuration with origins.
        run: the folder to write; None chooses one under ``paceline-runs``.
        clock: for the name of that folder.
        plan: to follow: ranks, threads and bucket sizes.

    Raises:
        NotFound: there is no such script.
        DestinationExists: the folder is there and not empty.
        UsageError: the allocation has another world size, or something contradicts the plan.
        Missing: torch is not installed.
    """
    if not script.is_file():
        what = "a folder is no script" if script.is_dir() else "no such script"
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
    if run is None:
        run = _default_run(script, allocation, clock)
    refuse_taken(run, allocation.rank if allocation else 0)
    return Job(
        script=script,
        args=tuple(args),
        run=run,
        ranks=ranks,
        resolved=resolved,
        allocation=allocation,
        warnings=warnings,
        plan=plan,
    )


def execute(
    job: Job,
    *,
    machine: Machine,
    clock: Clock,
    on_status: Callable[[list[Status]], None] | None = None,
) -> RunResult:
    """Run the job to its end, write the run's folder, and return its result.

    Args:
        job: from `prepare`.
        machine: to keep with the run, as far as it is known.
        clock: for waits.
        on_status: called about four times a second with the ranks' live status.

    Raises:
        ScriptFailed: a rank raised; the message begins with its traceback.
        RankLost: a rank was killed.
        Interrupted: a signal stopped the run; traces are kept.
        StorageError: the folder cannot be written.
    """
    rank = job.allocation.rank if job.allocation else 0
    if rank == 0:
        _write_start(job, machine)
    before = frozenset(descendants(os.getpid()))
    become_reaper()
    watch = _Watcher(job, clock, on_status)
    # Removed when all have ended: a rank that is killed leaves its workers' sockets behind.
    with tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True) as folder:
        try:
            with watch, ended_on_signal(clock):
                exits = _start(job, Path(folder), clock)
        except Stopped as stop:
            exits = (stop.to_exit(clock.wall_s()),)
        finally:
            end_descendants(clock, before)
    if rank != 0:
        return _follow(job, exits, clock)
    interrupted = any(one.rank < 0 for one in exits)
    failure = None if interrupted else first_failure(job.run, exits)
    result = summarize(job.run, job.ranks, exit_code(exits, failure), failure)
    commit_text(job.run / "result.json", result.to_text())
    raise_failure(job.run, job.script, exits, failure)
    return result


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
        failure=failure,
    )


def trace_warnings(run: Path) -> tuple[str, ...]:
    """Return what is missing in the traces of folder `run`, a line per rank that lost events."""
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
        )
        for rank, phases in zip(analysis.trace.ranks, analysis.phases, strict=True)
    )


def _default_run(script: Path, allocation: Allocation | None, clock: Clock) -> Path:
    folder = Path("paceline-runs")
    if allocation is not None:
        if not allocation.name:
            raise UsageError(
                "the tasks need one folder to write to",
                why=f"{allocation.source} gives them no common name",
                fix="Name it with --out",
            )
        return folder / f"{script.stem}-{allocation.name}"
    stamp = _stamp(clock)
    run = folder / f"{script.stem}-{stamp}"
    count = 1
    while run.exists():
        count += 1
        run = folder / f"{script.stem}-{stamp}-{count}"
    return run


def _stamp(clock: Clock) -> str:
    return datetime.fromtimestamp(clock.wall_s(), UTC).strftime("%Y%m%d-%H%M%S")


def _warnings(ranks: int, allocation: Allocation | None) -> tuple[str, ...]:
    here = allocation.local_world_size if allocation else ranks
    cores = os.cpu_count() or 1 if allocation else len(allowed_cores())
    if here <= cores:
        return ()
    return (
        f"{here} ranks share {cores} cores: they will wait for each other, and times are not "
        "those of a node with a core for each rank",
    )


def _threads(job: Job) -> int | None:
    """Return the compute threads of each rank; None where torch or the allocation chooses them."""
    if job.plan is not None:
        return job.plan.plan.threads
    environ = environment()
    if "OMP_NUM_THREADS" not in environ and (job.allocation or not job.resolved.config.bind):
        return None
    return share(allowed_cores(), 0, job.ranks, environ).threads


def _write_start(job: Job, machine: Machine) -> None:
    fix = "Name another place: --out RUN"
    with storage_errors("cannot make the run's folder", where=job.run, fix=fix):
        (job.run / "trace").mkdir(parents=True, exist_ok=True)
    config = job.resolved.to_json()
    config["script"] = str(job.script)
    config["args"] = list(job.args)
    config["world_size"] = job.ranks
    config["threads"] = _threads(job)
    commit_text(job.run / "config.json", json.dumps(config, indent=1) + "\n")
    commit_text(job.run / "versions.json", json.dumps(versions(), indent=1) + "\n")
    commit_text(job.run / "machine.json", machine.to_text())
    if job.plan is not None:
        commit_text(job.run / PLAN_NAME, job.plan.to_text())


def _start(job: Job, temporary: Path, clock: Clock) -> tuple[Exit, ...]:
    # Tasks of an allocation learn in their meeting which cores are whose.
    bind = job.resolved.config.bind and job.allocation is None
    cores = ",".join(map(str, allowed_cores())) if bind else ""
    record = "on" if job.resolved.config.record else "off"
    command = [sys.executable, "-m", "paceline.launch.worker", "--run", str(job.run)]
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
        "--",  # or argparse would take the first one of the script's for its own
        str(job.script),
        *job.args,
    ]
    if job.allocation is None:
        # By name: torch is loaded only now, after the first line is out.
        elastic = importlib.import_module("paceline.launch.elastic")
        exits: tuple[Exit, ...] = elastic.start(command, job.ranks, temporary)
        return exits
    return start_task(job.allocation, command, job.run, clock, bind=job.resolved.config.bind)


def _plan_options(plan: PlanFile | None) -> list[str]:
    """Return what a rank's worker takes from the plan."""
    if plan is None:
        return []
    buckets = (plan.plan.bucket_bytes, plan.plan.first_bucket_bytes)
    return ["--threads", str(plan.plan.threads), "--buckets", *map(str, buckets)]


def _follow(job: Job, exits: tuple[Exit, ...], clock: Clock) -> RunResult:
    """Return what a task other than rank 0 knows; rank 0 writes the result of all."""
    if exits and await_result(job.run, clock):
        told = load_result(job.run)
        if told.exit_code == Interrupted.exit_code:
            exits = (Exit(rank=-1, code=told.exit_code, signal=exits[0].signal or "a signal"),)
        raise_failure(job.run, job.script, exits, told.failure)
    elif exits:
        rank_0_lost = exits[0].fate == "stopped"
        failure = None if rank_0_lost else first_failure(job.run, exits)
        raise_failure(job.run, job.script, exits, failure)
        raise DeadlineExceeded(
            "rank 0 did not tell how the run ended",
            where=str(job.run),
            why="the run was stopped, and no result.json appeared",
            fix="See rank 0's output",
        )
    return RunResult(exit_code=0, world_size=job.ranks, step_time_s=0.0, loop_wall_s=0.0, ranks=())


class _Watcher:
    """Reads the ranks' live status while they run, for whoever shows it."""

    def __init__(
        self, job: Job, clock: Clock, on_status: Callable[[list[Status]], None] | None
    ) -> None:
        self.paths = [job.run / "trace" / trace_name(rank) for rank in range(job.ranks)]
        self.clock = clock
        self.on_status = on_status
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="paceline-watch", daemon=True)

    def __enter__(self) -> None:
        if self.on_status:
            self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.done.set()
        if self.on_status:
            self.thread.join()

    def _watch(self) -> None:
        assert self.on_status is not None
        while not self.clock.wait(self.done, 0.25):
            self.on_status(self._status())
        self.on_status(self._status())

    def _status(self) -> list[Status]:
        found = []
        for path in self.paths:
            try:
                found.append(read_status(path))
            except (PacelineError, OSError):  # not there yet
                continue
        return found
