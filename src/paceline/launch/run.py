"""Runs a program on its ranks and turns their traces into a result.

On one node this launcher starts all ranks. Inside a Slurm step or under mpirun each task starts
one rank, and with ``--nnodes`` each node's launcher starts those of its node; these find each other
in a rendezvous. Either way the ranks write traces, and when all have ended (well, by an exception,
or killed) the traces become `result.json`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.collectives import registration
from paceline.core.affinity import allowed_cores, core_list, parse_core_list, threads_of_environment
from paceline.core.config import environment, resolve
from paceline.core.errors import DeadlineExceeded, Interrupted
from paceline.core.files import commit_text
from paceline.core.plan import PLAN_VARIABLE
from paceline.core.processes import (
    StopRequested,
    become_reaper,
    descendants,
    end_descendants,
    ended_on_signal,
    outlive_preemption,
)
from paceline.launch.budget.budget import threads_variables
from paceline.launch.budget.choice import node_budget
from paceline.launch.child_memory import ChildMemoryWatcher
from paceline.launch.exits import ExitOutcome, explaining_exits, interrupted_exit, interruption
from paceline.launch.failures import exit_code, first_failure, hang_failure, raise_failure
from paceline.launch.file_calls import file_call_variables
from paceline.launch.folder import write_start
from paceline.launch.guard import STOP_SIGNAL
from paceline.launch.hangs.watch import HangWatcher
from paceline.launch.output import TaggedOutput
from paceline.launch.program import ProgramKind
from paceline.launch.ranks import SIGNAL_DELAY_S, LocalRanks, free_port
from paceline.launch.rendezvous.job import TaskRendezvous
from paceline.launch.rendezvous.messages import DataOffer, JobEnd, StartInfo
from paceline.launch.servers.data import DataServers
from paceline.launch.servers.outputs import OutputServers
from paceline.launch.summary import summarize
from paceline.launch.task import run_task
from paceline.launch.task_placement import mpirun_descriptors
from paceline.launch.watcher import StatusWatcher
from paceline.runs.folder import BUDGET_NAME, PLAN_NAME
from paceline.runs.launcher import this_launcher
from paceline.runs.result import RunResult
from paceline.store.feed.options import LoaderConfig
from paceline.store.posix.mounts import variables as mount_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.clock import Clock
    from paceline.core.machine import Machine
    from paceline.core.plan_file import PlanFile
    from paceline.launch.budget.budget import CpuBudget
    from paceline.launch.exits import RankExit
    from paceline.launch.options import RunConfig
    from paceline.launch.prepare import PreparedJob
    from paceline.trace.format.header import Status

_LOG = logging.getLogger(__name__)


def execute(
    job: PreparedJob,
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
        The run's result. From a launcher other than rank 0's: a result without measurements, if its
        ranks ended well.

    Raises:
        ScriptFailed: a rank raised (the message begins with its traceback), exited badly, or left
            too early.
        RankLost: a rank was killed, or hung, or a task failed before all had arrived.
        DeadlineExceeded: a task did not arrive or stopped reporting, or rank 0's task did not say
            how the run ended.
        Interrupted: a signal stopped the run; traces are kept.
        Preempted: all ranks ended with exit code 75, to be started again.
        StorageError: the folder cannot be written.
    """
    if job.task_number == 0:
        _write_start(job, machine)
    if not job.outputs:
        return _run(job, None, clock, on_status)
    with OutputServers(job) as outputs:
        try:
            result = _run(job, outputs, clock, on_status)
        except BaseException:  # what was written before counts, whatever ended the run
            if problem := outputs.finish():
                _LOG.warning("%s", problem)
            raise
        if problem := outputs.finish():
            if job.task_number == 0:
                result = dataclasses.replace(result, exit_code=problem.exit_code)
                commit_text(job.run_folder / "result.json", result.to_text())
            raise problem
        return result


def _run(
    job: PreparedJob,
    outputs: OutputServers | None,
    clock: Clock,
    on_status: Callable[[list[Status]], None] | None,
) -> RunResult:
    """Run the ranks to their end, and return the result or raise the error."""
    with contextlib.ExitStack() as stack:
        data = stack.enter_context(DataServers(job)) if job.data else None
        served = _Served(data, outputs)
        rendezvous = stack.enter_context(_rendezvous(job, clock, served)) if job.task else None
        exits = _run_ranks(job, rendezvous, served, clock, on_status)
        if rendezvous is not None and job.task_number != 0:
            return _follow(job, exits, rendezvous)
        interrupted = interruption(exits)
        # Only if a rank exited badly: a shell script may have ignored the exception of a process it
        # started.
        failure = None if interrupted else hang_failure(job.run_folder)
        if failure is None and exits and not interrupted:
            failure = first_failure(job.run_folder, exits)
        result = summarize(job.run_folder, job.ranks, exit_code(exits, failure), failure)
        failure = result.failure
        commit_text(job.run_folder / "result.json", result.to_text())
        if rendezvous is not None:
            signal_name = interrupted.signal if interrupted else ""
            end = JobEnd(exit_code=result.exit_code, signal=signal_name, failure=failure)
            rendezvous.announce(end)
    raise_failure(job.run_folder, job.program.name, exits, failure, _command_alone(job))
    return result


def _command_alone(job: PreparedJob) -> str:
    """Return how Python starts a run's program by itself; empty for several ranks, or no Python."""
    if job.ranks > 1 or job.program.kind is ProgramKind.EXECUTABLE:
        return ""
    return shlex.join(["python", *job.program.command[1:], *job.args])


def _rendezvous(job: PreparedJob, clock: Clock, served: _Served) -> TaskRendezvous:
    assert job.task is not None
    return TaskRendezvous(
        job.run_folder,
        job.task,
        host=socket.gethostname(),
        cores=allowed_cores(),
        deadlines=job.resolved.config.deadlines,
        clock=clock,
        data=served.offers,
        token_file=job.resolved.config.token_file,
    )


def _run_ranks(
    job: PreparedJob,
    rendezvous: TaskRendezvous | None,
    served: _Served,
    clock: Clock,
    on_status: Callable[[list[Status]], None] | None,
) -> tuple[RankExit, ...]:
    """Run this launcher's ranks; return the exits that explain a bad end, empty if all ended well.

    On rank 0 these are exits of the ranks of all launchers.
    """
    before = frozenset(descendants(os.getpid()))
    become_reaper()
    if threading.current_thread() is threading.main_thread():
        outlive_preemption()
    watch = StatusWatcher(job.run_folder, clock, on_status)
    config = job.resolved.config
    hangs = HangWatcher(job.run_folder, clock, config.hang_timeout_s if config.record else 0.0)
    children = ChildMemoryWatcher(job.run_folder, clock, is_on=config.record)
    with contextlib.ExitStack() as stack:
        # Removed when all ranks have ended: a killed rank does not remove its loader workers'
        # sockets. The path of a socket is limited: the name is as long as multiprocessing's own.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="pace-", ignore_cleanup_errors=True)
        )
        output = stack.enter_context(TaggedOutput(clock)) if config.tag_output else None
        try:
            with watch, ended_on_signal(clock), children, hangs:
                # A program that is not Python runs below a supervisor process (`launch.guard`),
                # which is stopped by SIGTERM.
                guarded = job.started.kind is ProgramKind.EXECUTABLE
                local = LocalRanks(clock, output, STOP_SIGNAL if guarded else signal.SIGINT)
                start = _Starter(job, local, served, Path(folder))
                if rendezvous is None:
                    return _run_alone(local, start, clock, hangs.stop_reason)
                return run_task(job.task_number, local, start, rendezvous, clock, hangs.stop_reason)
        except StopRequested as stop:
            return (interrupted_exit(None, stop, clock.wall_s()),)
        finally:
            end_descendants(clock, before)


def _run_alone(
    local: LocalRanks, start: _Starter, clock: Clock, stop_reason: Callable[[], str]
) -> tuple[RankExit, ...]:
    """Run all ranks of a run on one node."""
    try:
        start(None)
        local.wait(stop_reason)
    except StopRequested as stop:
        local.stop(SIGNAL_DELAY_S)
        return (interrupted_exit(None, stop, clock.wall_s()),)
    return explaining_exits(local.exits())


class _Served(NamedTuple):
    """What servers of this node do for the ranks; None: there is nothing to do."""

    data: DataServers | None
    outputs: OutputServers | None

    @property
    def offers(self) -> tuple[DataOffer, ...]:
        """What other launchers have to know of the servers."""
        return tuple(offer for servers in self if servers is not None for offer in servers.offers)


class _Starter:
    """Starts this launcher's ranks, each as a `worker`; called once, when all launchers are there.

    Attributes:
        job: the run.
        local: takes the ranks.
        served: what servers of this node do for them.
        temporary: a folder that is removed with the run.
    """

    def __init__(
        self, job: PreparedJob, local: LocalRanks, served: _Served, temporary: Path
    ) -> None:
        self.job = job
        self.local = local
        self.served = served
        self.temporary = temporary

    def __call__(self, start: StartInfo | None) -> None:
        """Start the ranks.

        Args:
            start: where rank 0 listens, and which share of the cores is this launcher's; None for
                a launcher that is alone.

        Raises:
            StorageError: a process cannot be started.
            UsageError, RankLost, DeadlineExceeded: as `DataServers.start`.
        """
        if self.served.data is not None:
            self.served.data.start(start.data if start is not None else None)
        if self.served.outputs is not None:
            self.served.outputs.start(start.data if start is not None else None)
        if start is None:
            run_id = uuid.uuid4().hex
            start = StartInfo(
                address="127.0.0.1", port=free_port(run_id), share_index=0, share_count=1
            )
        else:  # the node may have a file system of its own
            (self.job.run_folder / "trace").mkdir(parents=True, exist_ok=True)
            name = self.job.task.job_name if self.job.task else ""
            run_id = name or f"{start.address}:{start.port}"  # the same on all nodes
        local_ranks = self.job.local_ranks
        budget = self._budget(start.share_count * len(local_ranks))
        for number, ids in enumerate(local_ranks):
            index = start.share_index * len(local_ranks) + number
            command = self._command(budget, index)
            variables = ids.environment(start.address, start.port, run_id)
            variables |= _budget_variables(budget, index)
            environ = {**environment(), **variables, **self._extra()}
            self.local.start(ids.rank, command, environ, self._descriptors())
        self.local.all_started()

    def _budget(self, ranks: int) -> CpuBudget:
        """Return the budget of the ranks that share this launcher's cores, and keep it."""
        job = self.job
        budget = node_budget(
            job.resolved.config.budget,
            job.cores,
            ranks=ranks,
            environ=environment(),
            plan=job.plan.plan if job.plan else None,
            task=job.task,
        )
        if job.task_number == 0:
            commit_text(job.run_folder / BUDGET_NAME, budget.to_text())
        if job.budget is None and budget.fix and (job.task is None or job.task.is_first_of_node):
            _LOG.warning("%s. Ask for more: %s", budget.why, budget.fix)
        for servers in self.served:
            if servers is not None and budget.server:
                servers.bind(parse_core_list(budget.server))
        return budget

    def _command(self, budget: CpuBudget, index: int) -> list[str]:
        """Return the command line of the worker of rank `index` of those in the budget."""
        config = self.job.resolved.config
        return [
            *(sys.executable, "-m", "paceline.launch.worker"),
            *("--run", str(self.job.run_folder)),
            *("--launcher", str(os.getpid())),
            *("--temporary", str(self.temporary)),
            *_budget_options(budget, index),
            *("--record", "on" if config.record else "off"),
            *("--profile-steps", str(config.profile_steps)),
            *("--collectives", self.job.collectives),
            *("--pace", config.pace or resolve(LoaderConfig).config.pace),
            *_plan_options(self.job.plan),
            *_memory_options(config),
            *_balance_options(self.job),
            *_tune_options(config),
            *("--kind", self.job.started.kind),
            # without this "--", argparse would consume the first "--" among the program's arguments
            "--",
            self.job.started.name,
            *self.job.started_args,
        ]

    def _descriptors(self) -> tuple[int, ...]:
        """Return what a rank needs of the mpirun that started this launcher for it alone."""
        task = self.job.task
        is_rank = task is not None and task.source != "nodes"
        return mpirun_descriptors(environment()) if is_rank else ()

    def _extra(self) -> dict[str, str]:
        # A rank's stdout is a pipe when its lines are tagged: Python would keep them for long.
        unbuffered = {"PYTHONUNBUFFERED": "1"} if self.local.output else {}
        # The worker replaces gloo by itself: this is for what it starts, and for other programs.
        replaced = registration.variables(self.job.collectives)
        machine = self.job.machine  # has the table of collectives between hosts
        table = {"PACELINE_COLLECTIVES__MACHINE": str(machine)} if machine else {}
        choice, pace = self.job.resolved.config.node_reader, self.job.resolved.config.pace
        reader = {"PACELINE_LOADER__NODE_READER": choice} if choice else {}
        paced = {"PACELINE_LOADER__PACE": pace} if pace else {}
        # `paceline.training.prepare` follows it.
        plan = {PLAN_VARIABLE: self.job.plan.plan.to_text()} if self.job.plan else {}
        training = {**plan, **self.job.resolved.config.training}
        # The allocator's variables are settings of glibc's malloc.
        allocator = self.job.allocator.variables
        data, outputs = self.served
        served = data.variables if data is not None else {}
        mounts = (*self.job.mounts, *(data.mounts if data is not None else ()))
        folders = outputs.folders if outputs is not None else ()
        mounted = mount_variables(mounts, environment(), outputs=folders)
        run_folder = self.job.run_folder
        if self.job.mpi is not None:
            mounted |= self.job.mpi.variables(run_folder, {**environment(), **mounted})
        if self.job.records_io:
            mounted |= file_call_variables(run_folder, {**environment(), **mounted})
        return {
            **allocator,
            **unbuffered,
            **replaced,
            **table,
            **reader,
            **paced,
            **training,
            **served,
            **mounted,
        }


def _budget_variables(budget: CpuBudget, index: int) -> dict[str, str]:
    """Return the number of a rank's threads, for libraries that it loads before it follows it.

    numpy's BLAS takes the number when it is loaded, and forked loader workers inherit it.
    """
    if budget.state not in ("bound", "unbound"):
        return {}
    return threads_variables(budget.ranks[index])


def _budget_options(budget: CpuBudget, index: int) -> list[str]:
    """Return the worker's command-line options that carry its part of the budget."""
    if budget.state not in ("bound", "unbound"):
        return []
    loaders = {core for rank in budget.ranks for core in parse_core_list(rank.loader)}
    server = budget.server or core_list(loaders)
    return ["--budget", json.dumps(budget.ranks[index].to_json()), "--server", server]


def _plan_options(plan: PlanFile | None) -> list[str]:
    """Return the worker's command-line options that carry the plan's values."""
    if plan is None:
        return []
    buckets = (plan.plan.bucket_bytes, plan.plan.first_bucket_bytes)
    return ["--threads", str(plan.plan.threads), "--buckets", *map(str, buckets)]


def _memory_options(config: RunConfig) -> list[str]:
    """Return the worker's command-line options that carry the memory budget."""
    if config.memory_budget_bytes is None:
        return []
    budget = str(config.memory_budget_bytes)
    return ["--memory-budget", budget, "--spill-folder", config.spill_folder]


def _balance_options(job: PreparedJob) -> list[str]:
    """Return the worker's command-line options that have it rebalance."""
    if not job.rebalance:
        return []
    return ["--rebalance", ",".join(map(str, job.weights)) or "measured"]


def _tune_options(config: RunConfig) -> list[str]:
    """Return the worker's command-line options that carry the setting to tune."""
    return ["--tune", config.tune] if config.tune else []


def _threads(job: PreparedJob) -> int | None:
    """Return the compute threads of each rank; None where torch, Slurm or mpirun chooses."""
    if job.plan is not None:
        return job.plan.plan.threads
    if job.budget is not None and job.budget.ranks:
        return job.budget.ranks[0].compute_threads
    return threads_of_environment(environment())


def describe(job: PreparedJob) -> dict[str, Any]:
    """Return what the run's ``config.json`` says of the job, as JSON data."""
    return {
        "values": job.values,
        "script": job.program.name,
        "args": list(job.args),
        "world_size": job.ranks,
        "threads": _threads(job),
        "allocator": job.allocator.to_json(),
        "collectives": job.collectives,
        "collectives_values": job.collectives_settings.to_json(),
    }


def _write_start(job: PreparedJob, machine: Machine) -> None:
    write_start(job.run_folder, machine, **describe(job), launcher=this_launcher())
    if job.plan is not None:
        commit_text(job.run_folder / PLAN_NAME, job.plan.to_text())


def _follow(job: PreparedJob, exits: tuple[RankExit, ...], rendezvous: TaskRendezvous) -> RunResult:
    """Return the result, or raise the error, of a launcher other than rank 0's."""
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
        raise_failure(job.run_folder, job.program.name, exits, end.failure)
    else:
        # rank 0's launcher is lost: report an own failure, unless this launcher itself stopped its
        # ranks
        was_stopped = exits[0].outcome is ExitOutcome.STOPPED
        failure = None if was_stopped else first_failure(job.run_folder, exits)
        raise_failure(job.run_folder, job.program.name, exits, failure)
    raise DeadlineExceeded(
        "rank 0 did not report how the run ended",
        where=str(job.run_folder),
        why="the run was stopped, and rank 0's task stopped answering",
        fix="See rank 0's output",
    )
