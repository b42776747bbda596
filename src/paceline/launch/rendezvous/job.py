"""One task of a job: runs its member, and on rank 0 also the root, from arrival to the end."""

from __future__ import annotations

import logging
import math
import secrets
import uuid
from typing import TYPE_CHECKING, Self

from paceline.core.errors import DeadlineExceeded, RankLost
from paceline.core.token import find_token
from paceline.launch.exits import ExitOutcome, RankExit
from paceline.launch.rendezvous.addresses import (
    FOLDER,
    job_identity,
    listening_hosts,
    name_addresses,
    open_listener,
    write_address,
)
from paceline.launch.rendezvous.client import MemberClient
from paceline.launch.rendezvous.member import CloseAsked, MemberState, RankEnded
from paceline.launch.rendezvous.messages import JobEnd, TaskReport
from paceline.launch.rendezvous.root import ResultWritten, RootState, StopAsked
from paceline.launch.rendezvous.server import RootServer
from paceline.launch.rendezvous.shares import name_ranks

if TYPE_CHECKING:
    import threading
    from pathlib import Path

    from paceline.core.clock import Clock
    from paceline.launch.rendezvous.messages import DataOffer, StartInfo
    from paceline.launch.rendezvous.root import AllEnded, Deadlines
    from paceline.launch.task_placement import TaskPlacement

_LOG = logging.getLogger(__name__)
_TELL_S = 5.0  # how long tasks may take to arrive before it is said that they are waited for
_POLL_INTERVAL_S = 0.25  # the longest wait between two checks for stop signals
_LEAVE_S = 3.0  # how long leaving may take, to send the last message


class TaskRendezvous:
    """This task's rendezvous with the other tasks: `start` joins, leaving the context leaves.

    The methods belong to the task's main thread.

    Attributes:
        task_number: number of this task.
        first_rank: the first global rank that this task starts.
        started: whether `start` has returned.
    """

    def __init__(
        self,
        run: Path,
        task: TaskPlacement,
        *,
        host: str,
        cores: tuple[int, ...],
        deadlines: Deadlines,
        clock: Clock,
        data: tuple[DataOffer, ...] = (),
        token_file: str = "",
    ) -> None:
        self._token = find_token(token_file)
        self.task_number = task.task_number
        self.first_rank = task.task_number * task.ranks_per_task
        self._run = run
        self._task = task
        self._deadlines = deadlines
        self._clock = clock
        self._server: RootServer | None = None
        self._listens_at = ""
        self._announced = self.started = False
        identity = TaskReport(
            job=job_identity(task, run),
            run="",
            task=uuid.uuid4().hex,
            rank=task.task_number,
            world_size=task.task_count,
            host=host,
            cores=cores,
            data=data,
        )
        state = MemberState(
            identity=identity, deadlines=deadlines, begin_s=clock.now_s(), stays=bool(data)
        )
        self._client = MemberClient(state, task, run, clock, self._token)
        self._job = identity.job

    def __enter__(self) -> Self:
        return self

    def start(self) -> None:
        """Start the root on rank 0, and begin to connect to it.

        Raises:
            StorageError: the root cannot listen, or cannot write its address.
        """
        if self.task_number == 0:
            self._start_root()
        self._client.start()
        self.started = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.started:
            return
        if kind is not None and self._client.leave is None:
            stopped = RankExit(rank=self.first_rank, code=1, outcome=ExitOutcome.STOPPED)
            self.report(stopped)
        if self._server is not None:
            if not self._announced:
                self.announce(JobEnd(exit_code=1))
            self._server.join(self._deadlines.stop_timeout_s + _LEAVE_S)
        self._client.put(CloseAsked())
        self._client.join(_LEAVE_S)
        self._client.put(CloseAsked(at_once=True))
        self._client.join(_LEAVE_S)

    def _start_root(self) -> None:
        listener = open_listener(self._task, self._job)
        port = listener.getsockname()[1]
        hosts = listening_hosts(self._task)
        self._listens_at = f"port {port} of {' or '.join(hosts) or 'this host'}"
        state = RootState(
            job=self._job,
            run=uuid.uuid4().hex,
            world_size=self._task.task_count,
            deadlines=self._deadlines,
            begin_s=self._clock.now_s(),
            ranks_per_task=self._task.ranks_per_task,
            noun=self._task.noun,
            data_token=secrets.token_hex(16),
            folder=str(self._run.resolve()),
        )
        try:
            run_token = write_address(self._run, state.run, hosts, port)
        except BaseException:
            listener.close()
            raise
        tokens = (self._token, run_token)
        self._server = RootServer(state, listener, self._run, self._task, self._clock, tokens)
        self._server.start()

    def await_start(self) -> StartInfo:
        """Return how to start the rank, when all tasks have arrived.

        Raises:
            DeadlineExceeded: a task, or rank 0, did not arrive in time.
            RankLost: a task failed before all had arrived.
        """
        client = self._client
        told_s = self._clock.now_s() + _TELL_S
        while client.start_info is None:
            if client.leave is not None and client.leave.problem:
                raise self._without_rank_0(client.leave.problem)
            if client.stop_reason:
                raise self._stopped_before_start()
            if self._server is not None and self._clock.now_s() >= told_s:
                told_s = math.inf
                _LOG.warning("%s", self._waits_words())
            self._wait(client.changed)
        return client.start_info

    def _waits_words(self) -> str:
        """Return for what this launcher waits, and for how long at most."""
        count, noun = self._task.task_count, self._task.noun
        words = f"waits for all of {count} {noun}s, "
        words += f"{self._deadlines.rendezvous_timeout_s:g} s at most"
        if self._task.source == "slurm":
            words += (
                "; in a shell of a Slurm step, whose other tasks have ended: unset SLURM_STEP_ID"
            )
        return words

    def stop_reason(self) -> str:
        """Return why this task's rank is to end; empty while it may go on."""
        return self._client.stop_reason

    def report(self, ended: RankExit, others: tuple[RankExit, ...] = ()) -> None:
        """Tell the root how this task's ranks ended; see `TaskReport`."""
        self._client.put(RankEnded(ended, others))

    def interrupt(self, ended: RankExit) -> None:
        """Have all ranks stop: rank 0's launcher got a stop signal after its own rank had ended."""
        assert self._server is not None
        self._server.put(StopAsked(ended))

    def gather(self) -> tuple[RankExit, ...]:
        """Return, on rank 0, the exits that explain a bad end; empty if all ranks succeeded.

        Ranks whose tasks keep reporting may run for any time.
        """
        return self._outcome().exits

    def _outcome(self) -> AllEnded:
        assert self._server is not None
        while not self._server.ended.is_set():
            self._wait(self._server.ended)
        assert self._server.outcome is not None, "the root's thread failed"
        return self._server.outcome

    def announce(self, end: JobEnd) -> None:
        """Send all tasks the result of the run, on rank 0."""
        self._announced = True
        if self._server is not None:
            self._server.put(ResultWritten(end))

    def await_end(self) -> JobEnd | None:
        """Return the result of the run, from the root; None if the root is lost.

        A task whose rank succeeded only waits until the root knows this, and also gets None.
        """
        if not self.started:
            return None
        while self._client.leave is None:
            self._wait(self._client.changed)
        return self._client.leave.end

    def _wait(self, event: threading.Event) -> None:
        self._clock.wait(event, _POLL_INTERVAL_S)
        if event is self._client.changed:
            event.clear()

    def _stopped_before_start(self) -> RankLost:
        self.report(
            RankExit(rank=self.first_rank, code=RankLost.exit_code, outcome=ExitOutcome.STOPPED)
        )
        if self._server is not None and (outcome := self._outcome()).missing:
            return self._without_others(outcome)
        return RankLost(
            "another task failed before all had arrived",
            where=f"{self._task.noun} {self.task_number}",
            why=self._client.stop_reason,
            fix="See the output of the other tasks",
        )

    def _without_others(self, outcome: AllEnded) -> DeadlineExceeded:
        noun = self._task.noun
        return DeadlineExceeded(
            f"{len(outcome.missing)} of {self._task.task_count} tasks did not arrive: "
            f"{name_ranks(outcome.missing, noun)}",
            where=f"{self._listens_at}, written to {self._run / FOLDER}",
            why=f"{self._deadlines.rendezvous_timeout_s:g} s passed; "
            f"{name_ranks(outcome.present, noun) if outcome.present else f'no {noun}'} arrived",
            fix="Check the output of the missing tasks, and that they can reach that port or that "
            "folder; raise rendezvous_timeout_s if they need more time",
        )

    def _without_rank_0(self, problem: str) -> DeadlineExceeded:
        why = f"{self._deadlines.rendezvous_timeout_s:g} s passed; looked at "
        why += f"{name_addresses(self._task)} and in {self._run / FOLDER}"
        fix = "See rank 0's output; a firewall must let the tasks connect, or the nodes share the "
        fix += "run's folder"
        if self._client.refusal and self._task.port:
            fix = "Give each node its own --node-rank, and each job a port and a name of its own, "
            fix += "the same on all of its nodes: --rdzv-endpoint HOST:PORT --rdzv-id NAME"
        if self._client.has_other_token:
            why += "; what listens there refused the token of this task"
            fix = "Have all launchers share their user's home or the run's folder, or give them "
            fix += "the same --token-file"
        where = f"{self._task.noun} {self.task_number}, job {self._job}"
        return DeadlineExceeded(problem, where=where, why=why, fix=fix)
