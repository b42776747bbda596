"""What the daemon of a queue makes of a request: inputs of the queue, and later an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.scheduler.local.machine.orders import impossible
from paceline.scheduler.local.protocol.messages import VERBS, Reply, Request
from paceline.scheduler.local.queue.turns import Cancel, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.scheduler.local.jobs.records import JobView
    from paceline.scheduler.local.paths import QueuePaths
    from paceline.scheduler.local.queue.database import Database
    from paceline.scheduler.local.queue.job_queue import JobQueue
    from paceline.scheduler.local.queue.turns import Entry, Input


class Requests:
    """Understands the requests of a queue's clients."""

    def __init__(self, paths: QueuePaths, database: Database) -> None:
        self._paths = paths
        self._database = database

    def act_on(
        self, request: Request, inputs: list[Input], queue: JobQueue, now_s: float
    ) -> Callable[[], Reply]:
        """Add what a request changes to the inputs; return what makes its reply after that.

        Args:
            request: of a client.
            inputs: of this instant, so far.
            queue: that gets them.
            now_s: of the queue.

        Raises:
            PacelineError: it is refused.
        """
        name = request.name
        if request.verb == "submit":
            name = self._submit(request, inputs, queue, now_s)
            return lambda: Reply(jobs=(self.view(queue.entries[name]),))
        if request.verb == "list" and not name:
            return lambda: Reply(jobs=tuple(self._list(queue, ended=request.ended)))
        if request.verb not in VERBS:
            raise UsageError(
                f"the daemon does not know '{request.verb}'",
                where=str(self._paths.socket),
                fix="Use the same Paceline for the daemon and for commands",
            )
        entry = queue.entry(name)
        if request.verb == "cancel":
            inputs.append(Cancel(name))
        if request.verb == "why":
            return lambda: Reply(jobs=(self.view(entry),), text=queue.why(name, now_s))
        return lambda: Reply(jobs=(self.view(entry),))

    def _submit(self, request: Request, inputs: list[Input], queue: JobQueue, now_s: float) -> str:
        """Add a submission to the inputs; return the job's name."""
        submission = request.submission
        if submission is None:
            raise UsageError("the request has no job", fix="Submit with paceline queue submit")
        pending = {
            given.submission.job.name: given.submission
            for given in inputs
            if isinstance(given, Submit)
        }
        known = self._database.name_of(submission.token) if submission.token else None
        for name, other in pending.items():
            known = name if submission.token and other.token == submission.token else known
        if known is not None:
            return known  # the answer to the first try was lost
        taken = {*queue.entries, *pending}

        def is_taken(name: str) -> bool:  # also by a job that was forgotten: its folder is left
            return name in taken or self._paths.job(name).exists()

        name = submission.job.name or _new_name(submission.command[0], len(taken) + 1, is_taken)
        if is_taken(name):
            raise UsageError(
                f"a job named '{name}' was submitted before",
                where=f"queue {self._paths.folder}",
                fix="Submit it under another --name; one that ended long ago has left its folder",
            )
        deadline_s = submission.job.deadline_s
        job = replace(
            submission.job,
            name=name,
            # What is learned of a job without a class is true of it alone.
            profile=submission.job.profile or name,
            submitted_s=now_s,
            deadline_s=None if deadline_s is None else now_s + deadline_s,
        )
        submission = replace(submission, job=job)
        if why := impossible(submission) or queue.refusal(submission):
            raise UsageError(
                f"job '{name}' can never run here",
                where=f"queue {self._paths.folder}",
                why=why,
                fix="Correct the job, or serve a queue with the devices it needs",
            )
        inputs.append(Submit(submission))
        return name

    def _list(self, queue: JobQueue, *, ended: bool) -> Iterator[JobView]:
        for entry in queue.entries.values():
            if ended or not entry.ended:
                yield self.view(entry)

    def view(self, entry: Entry) -> JobView:
        """Return a job as users see it."""
        log = str(self._paths.attempt(entry.name, entry.starts) / "log") if entry.starts else ""
        return entry.view(self._database.first_s, log)


def _new_name(program: str, number: int, is_taken: Callable[[str], bool]) -> str:
    """Return a name for a job that has none: of its program, with a number."""
    stem = "".join(c if c.isalnum() else "-" for c in Path(program).stem).strip("-")[:40] or "job"
    while is_taken(f"{stem}-{number}"):
        number += 1
    return f"{stem}-{number}"
