"""The queue of one machine as a state machine: inputs and a time in, things to do out.

    inputs of one instant --> events --> decide --> decisions --> wanted placements
                                                                        |
             live attempts, compared with what is wanted  --> starts, stops

`decide` gives a job new devices at once, as its actions say. Here devices are taken by processes
that need time to save their state and end, so two maps are kept: the placement that is wanted for a
job, and its live attempt. An attempt that is not wanted any more is asked to stop; a wanted one is
started when no process that shall leave still holds one of its devices. That is the only rule, so a
preemption, a move to other devices and a restart of the daemon are all the same case.

Nothing here reads a clock, a file or a socket. The shell (`daemon`) stores what a turn changed
before it carries the turn out: after a crash the stored attempts are what may be running.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, UsageError
from paceline.core.processes import signal_name
from paceline.report.units import plural
from paceline.scheduler.decide import Decision, decide
from paceline.scheduler.events import (
    Cancelled,
    Carried,
    DevicesBack,
    DevicesLost,
    Ended,
    Event,
    Measured,
    Preempt,
    Rated,
    Refuse,
    Start,
    Started,
    Stopped,
    Submitted,
    Timer,
)
from paceline.scheduler.job import Job
from paceline.scheduler.local.jobs.records import Attempt, Exit, JobStatus, Stop
from paceline.scheduler.local.jobs.submission import TRY_AGAIN, Submission
from paceline.scheduler.local.queue.turns import (
    Began,
    Cancel,
    DevicesSeen,
    Entry,
    Exited,
    Input,
    Progress,
    Submit,
    TimerExpired,
    Turn,
)
from paceline.scheduler.policies.fitting import never_fits
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.policies.reasons import why
from paceline.scheduler.policies.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.scheduler.decide import Policy
    from paceline.scheduler.local.jobs.devices import LocalDevices
    from paceline.scheduler.local.jobs.rates import MeasuredRates
    from paceline.scheduler.placement import Placement
    from paceline.scheduler.state.state import State

_OWN_STOPS_MAX = 100  # a job that asks to be started again for ever, without being stopped
# Starts that fail before the job runs, because the machine lacks something for a moment: tried
# again after 1 s, 2 s, 4 s ... at most 5 minutes; the last try comes after about 19 minutes.
_FAILED_STARTS_MAX = 12
_RETRY_S, _RETRY_S_MAX = 1.0, 300.0

_MEASURED_SHARE, _MEASURED_S_MAX = 0.01, 60.0  # between two reports that the policy sees


class JobQueue:
    """Jobs, what is wanted for them, and what runs.

    Attributes:
        policy: decides.
        state: what the policy sees.
        devices: of the machine.
        entries: all jobs, by name, in order of submission.
        now_s: time of the last turn.
    """

    def __init__(self, policy: Policy, state: State, devices: LocalDevices) -> None:
        self.policy = policy
        self.state = state
        self.devices = devices
        self.entries: dict[str, Entry] = {}
        self.now_s = 0.0

    @property
    def active(self) -> list[Entry]:
        """Jobs that have not ended."""
        return [entry for entry in self.entries.values() if not entry.ended]

    def refusal(self, submission: Submission) -> str:
        """Return why a job can never run here, in words; empty if it can."""
        job = submission.job
        if reason := never_fits(self.state, job):
            return reason
        policy = self.policy.policy if isinstance(self.policy, Rounds) else self.policy
        return policy.never_allowed(job) if isinstance(policy, Paceline) else ""

    def learned_rates(self, rates: MeasuredRates) -> MeasuredRates:
        """Return the rates with which the queue began, with what was given and learned since."""
        for entry in self.entries.values():
            if entry.submission.rates:
                rates = rates.given_also(entry.submission.job.profile, entry.submission.rates)
        return rates.after(self.state.rates)

    def wake_s(self) -> float | None:
        """Return when there is something to do although nothing happened."""
        times = [entry.retry_s for entry in self.entries.values() if entry.retry_s is not None]
        if (policy_s := self.policy.wake_s(self.state)) is not None:
            times.append(policy_s)
        return min(times, default=None)

    def why(self, name: str, now_s: float) -> str:
        """Return why a job waits, where it runs or how it ended.

        Args:
            name: of the job.
            now_s: not before the last turn.

        Raises:
            NotFound: there is no such job.
        """
        entry = self.entry(name)
        text = self._why(entry, now_s)
        if entry.ended or not entry.lost_by_stop:
            return text
        return (
            f"{text} It is not preempted again: asked to stop, it did not end with exit code "
            f"{TRY_AGAIN} ({entry.lost_by_stop}), so that it began anew."
        )

    def _why(self, entry: Entry, now_s: float) -> str:
        name = entry.name
        if entry.ended or entry.attempt is not None:
            where = f" on {entry.attempt.placement.describe()}" if entry.attempt else ""
            reason = f": {entry.reason}" if entry.reason else ""
            return f"It is {entry.status}{where}{reason}."
        if entry.retry_s is not None:
            return f"It is tried again in {max(0.0, entry.retry_s - now_s):.0f} s: {entry.reason}."
        if self.state.job(name) is None:
            return f"It waits for another queue daemon: {entry.reason}."
        if entry.wanted is not None:
            holders = ", ".join(sorted(self._leaving(entry)))
            return f"It gets {entry.wanted.describe()} when {holders} left: {entry.reason}."
        text = why(self.state, self.policy, name)
        return f"{text} Its last start: {entry.reason}." if entry.starts else text

    def entry(self, name: str) -> Entry:
        """Return a job.

        Raises:
            NotFound: there is no such job.
        """
        try:
            return self.entries[name]
        except KeyError:
            raise NotFound(
                f"the queue has no job '{name}'",
                fix="See its jobs: paceline queue ls --all; those that ended long ago: ended.jsonl",
            ) from None

    def handle(self, inputs: Sequence[Input], now_s: float) -> Turn:
        """Return what the inputs of one instant change, and what there is to do.

        Args:
            inputs: in the order in which they came.
            now_s: not before that of the last turn.
        """
        turn = Turn()
        self.now_s = now_s
        for given in inputs:
            turn.events.extend(self._event(given, turn))
        if turn.events:
            turn.decisions = self._decide(turn.events, turn)
        self._pursue(turn)
        return turn

    def begin_anew(self, now_s: float, *, same_devices: bool = True) -> Turn:
        """Submit all jobs that have not ended to a fresh state, as a new log begins.

        Jobs that can never run on these devices were accepted on others: they wait for them,
        unknown to the policy, instead of being refused by it.

        Args:
            now_s: not before that of the last turn.
            same_devices: a live attempt goes on if the job gets the devices again that it has;
                otherwise all are stopped at a checkpoint: an index may mean another device now.
        """
        turn = Turn()
        self.now_s = now_s
        for entry in self.active:
            entry.wanted = entry.retry_s = None
            attempt = entry.attempt
            if attempt and attempt.stop == Stop.CANCEL:
                continue
            if attempt and not attempt.stop and not same_devices:
                entry.reason = "the queue's devices changed"
                self._stop(entry, attempt, Stop.PREEMPT, turn)
            if why_not := self.refusal(entry.submission):
                entry.reason = f"the queue's devices changed: {why_not}"
                turn.changed[entry.name] = None
                turn.notes.append(f"{entry.name}: waits" + _because(entry.reason))
                continue
            turn.events.append(Submitted(at_s=now_s, job=entry.job))
        if turn.events:
            turn.decisions = self._decide(turn.events, turn)
        self._pursue(turn)
        return turn

    def carry_on(self, before: JobQueue, now_s: float) -> Turn:
        """Take over the jobs of a queue as they stand: a new log begins, nothing else changes.

        Args:
            before: of the same policy and devices; it is not used any more.
            now_s: not before that of its last turn.
        """
        turn = Turn()
        self.now_s, self.entries = now_s, before.entries
        state = before.state
        (node,), (bits,) = state.cluster.nodes, state.inventory.lost_bits
        if bits:
            lost = tuple(index for index in range(node.devices) if bits >> index & 1)
            turn.events.append(DevicesLost(at_s=now_s, node=node.name, devices=lost))
        for name in (*state.running, *state.waiting):
            carried = state.carried(name, now_s)
            turn.events.append(replace(carried, placement=self.entries[name].wanted))
        if turn.events:
            turn.decisions = self._decide(turn.events, turn)
        self._pursue(turn)
        return turn

    def ended_before_last(self, count: int) -> list[Entry]:
        """Return jobs that ended, the first ones first, but for the last so many."""
        ended = [entry for entry in self.entries.values() if entry.ended_s is not None]
        ended.sort(key=lambda entry: entry.ended_s or 0.0)
        return ended[: max(0, len(ended) - count)]

    def repeat(self, events: Sequence[Event]) -> list[Decision]:
        """Apply logged events of one instant, and return what is decided now: as it was logged."""
        self.now_s = events[0].at_s
        for event in events:
            match event:
                case Ended(name=name) | Cancelled(name=name) | Stopped(name=name):
                    self.entries[name].wanted = None
                case Carried(job=job, placement=placement):
                    self.entries[job.name].wanted = placement
                case DevicesLost(devices=devices):
                    self._take_away(devices)
        decisions = decide(self.policy, self.state, events)
        for decision in decisions:
            action = decision.action
            self.entries[action.name].wanted = (
                action.placement if isinstance(action, Start) else None
            )
        return decisions

    def live(self) -> list[Attempt]:
        """Return the attempts of which processes may exist."""
        return [entry.attempt for entry in self.active if entry.attempt is not None]

    # Inputs to events.

    def _event(self, given: Input, turn: Turn) -> Iterable[Event]:
        match given:
            case Submit(submission=submission):
                return self._submit(submission, turn)
            case Cancel(name=name):
                return self._cancel(self.entry(name), turn)
            case TimerExpired():
                return self._wake(turn)
            case DevicesSeen():
                return self._see(given, turn)
        entry = self.entries[given.name]
        if entry.attempt is None or entry.attempt.number != given.number:
            return []  # of an attempt that is over
        match given:
            case Began():
                return self._began(entry, entry.attempt, turn)
            case Exited(exit=ended):
                return self._exited(entry, entry.attempt, ended, turn)
            case Progress(work_done=work_done, rate=rate):
                return self._progress(entry, work_done, rate, turn)

    def _wake(self, turn: Turn) -> Iterable[Event]:
        """Let jobs be started again whose time came, and ask the policy if it wants to be."""
        policy_s = self.policy.wake_s(self.state)
        for entry in self.active:
            if entry.retry_s is not None and entry.retry_s <= self.now_s:
                entry.retry_s = None
                turn.changed[entry.name] = None
                yield Submitted(at_s=self.now_s, job=entry.job)
        if policy_s is not None and policy_s <= self.now_s:
            yield Timer(at_s=self.now_s)

    def _see(self, seen: DevicesSeen, turn: Turn) -> Iterable[Event]:
        """Stop the jobs of devices that were lost, at a checkpoint if they still can."""
        (node,) = self.state.cluster.nodes
        known = self.state.inventory.lost_bits[0]
        lost = tuple(
            index
            for index in range(node.devices)
            if index not in seen.present and not known >> index & 1
        )
        back = tuple(index for index in sorted(seen.present) if known >> index & 1)
        if back:
            turn.notes.append(f"{plural(len(back), 'device')} can be used again: {back}")
            yield DevicesBack(at_s=self.now_s, node=node.name, devices=back)
        if not lost:
            return
        turn.notes.append(f"{plural(len(lost), 'device')} lost: {lost} ({seen.reason})")
        for entry in self._take_away(lost):
            held = sorted(_indices(entry.attempt.placement) & {*lost} if entry.attempt else lost)
            entry.reason = f"{self.devices.names(held)} was lost: {seen.reason}"
            turn.changed[entry.name] = None
            if entry.attempt and not entry.attempt.stop:
                self._stop(entry, entry.attempt, Stop.PREEMPT, turn)
        yield DevicesLost(
            at_s=self.now_s,
            node=node.name,
            devices=lost,
            reason=f"{self.devices.names(lost)} lost: {seen.reason}",
        )

    def _take_away(self, devices: Sequence[int]) -> list[Entry]:
        """Let no job want lost devices; return the jobs that did."""
        losers = [
            entry
            for entry in self.active
            if entry.wanted and not _indices(entry.wanted).isdisjoint(devices)
        ]
        for entry in losers:
            entry.wanted = None
        return losers

    def _submit(self, submission: Submission, turn: Turn) -> Iterable[Event]:
        # Numbers as the log has them (1.0, not 1): digests of inputs are made of their texts.
        job = Job.from_json(submission.job.to_json())
        name = job.name
        if name in self.entries:
            raise UsageError(
                f"a job named '{name}' was submitted before", fix="Submit it under another name"
            )
        self.entries[name] = Entry(replace(submission, job=job), submitted_s=self.now_s)
        turn.changed[name] = None
        turn.notes.append(f"{name}: submitted, {plural(submission.job.devices, 'device')}")
        if submission.rates:
            yield Rated(at_s=self.now_s, profile=job.profile, alone=submission.rates)
        yield Submitted(at_s=self.now_s, job=job)

    def _cancel(self, entry: Entry, turn: Turn) -> Iterable[Event]:
        if entry.ended or (entry.attempt and entry.attempt.stop == Stop.CANCEL):
            return
        entry.wanted = entry.retry_s = None
        entry.reason = "its user cancelled it"
        turn.changed[entry.name] = None
        if entry.attempt is None:
            self._end(entry, JobStatus.CANCELLED, turn)
        else:
            self._stop(entry, entry.attempt, Stop.CANCEL, turn)
        yield Cancelled(at_s=self.now_s, name=entry.name)

    def _began(self, entry: Entry, attempt: Attempt, turn: Turn) -> Iterable[Event]:
        if attempt.began:
            return
        entry.attempt = replace(attempt, began=True)
        entry.beside = self._beside(attempt)
        if entry.began_s is None:
            entry.began_s = self.now_s
        turn.changed[entry.name] = None
        if attempt.stop:  # it was asked before it could hear
            turn.stops.append(entry.attempt)
            return
        entry.status = JobStatus.RUNNING
        turn.notes.append(
            f"{entry.name}: runs on {attempt.placement.describe()}, start {attempt.number}"
        )
        yield Started(at_s=self.now_s, name=entry.name)

    def _progress(
        self, entry: Entry, work_done: float, rate: float | None, turn: Turn
    ) -> Iterable[Event]:
        entry.work_done, entry.rate = work_done, rate
        if entry.attempt is None or entry.attempt.stop or not self._is_due(entry):
            return
        entry.measured_s = self.now_s
        turn.changed[entry.name] = None
        beside, entry.beside = entry.beside, self._beside(entry.attempt)
        job = self.state.running.get(entry.name)
        decided = {other.name for other in job.neighbours} if job else None
        if not entry.beside == beside == decided:
            rate = None  # of an interval in which its neighbours changed
        yield Measured(at_s=self.now_s, name=entry.name, work_done=work_done, rate=rate)

    def _is_due(self, entry: Entry) -> bool:
        """Whether the policy should see a report: seldom of long jobs, as the log keeps it."""
        if entry.measured_s is None or entry.began_s is None:
            return True
        ran_s = self.now_s - entry.began_s
        return self.now_s - entry.measured_s >= min(_MEASURED_SHARE * ran_s, _MEASURED_S_MAX)

    def _beside(self, attempt: Attempt) -> set[str]:
        """Return the other jobs of which processes run on an attempt's devices."""
        return {
            other.job
            for other in self.live()
            if other.began
            and other.job != attempt.job
            and _indices(other.placement) == _indices(attempt.placement)
        }

    def _exited(self, entry: Entry, attempt: Attempt, ended: Exit, turn: Turn) -> Iterable[Event]:
        """The end of an attempt: the job's own end, or it waits again."""
        entry.attempt = entry.rate = entry.beside = None
        turn.ended.append(attempt)
        turn.changed[entry.name] = None
        how = _how(ended, entry.submission.grace_s)
        if not ended.error:
            entry.failed_starts = 0
        if attempt.stop == Stop.CANCEL:
            entry.exit_code = ended.code
            entry.reason = f"{entry.reason}; {how}"
            self._end(entry, JobStatus.CANCELLED, turn)
        elif ended.code == 0:
            entry.exit_code, entry.reason = 0, ""
            yield from self._finish(entry, JobStatus.DONE, turn)
        elif attempt.stop == Stop.PREEMPT:
            # Whatever it ended with: nobody knows what it would have come to without the stop.
            entry.reason = f"{entry.reason}; {how}"
            self._wait(entry, turn)
            if _is_lost(ended, entry.submission.signal_number):
                yield from self._leave_alone(entry, how)
        elif ended.passing:
            yield from self._put_off(entry, ended, turn)
        elif ended.code in (TRY_AGAIN, None) and not ended.error:
            entry.own_stops += 1
            if entry.own_stops > _OWN_STOPS_MAX:
                entry.exit_code = ended.code
                entry.reason = f"it stopped {entry.own_stops} times by itself; {how}"
                yield from self._finish(entry, JobStatus.FAILED, turn)
                return
            entry.reason = how
            entry.wanted = None
            self._wait(entry, turn)
            yield Stopped(
                at_s=self.now_s, name=entry.name, work_done=entry.work_done or None, reason=how
            )
        else:
            entry.exit_code = ended.code
            entry.reason = f"{how}\n{ended.tail}".strip()
            yield from self._finish(entry, JobStatus.FAILED, turn)

    def _leave_alone(self, entry: Entry, how: str) -> Iterable[Event]:
        """Do not preempt a job again that its preemption killed: it begins from its start."""
        if entry.lost_by_stop or not entry.submission.job.preemptible:
            return
        entry.lost_by_stop = how
        if self.state.job(entry.name) is None:
            return
        entry.wanted = None
        entry.work_done = 0.0
        carried = self.state.carried(entry.name, self.now_s)
        yield Cancelled(at_s=self.now_s, name=entry.name)
        yield replace(carried, job=entry.job, placement=None, rate=0.0, work_done=0.0)

    def _put_off(self, entry: Entry, ended: Exit, turn: Turn) -> Iterable[Event]:
        """Have a job wait that could not be started; the policy forgets it for so long."""
        entry.failed_starts += 1
        if entry.failed_starts >= _FAILED_STARTS_MAX:
            entry.exit_code = ended.code
            entry.reason = f"it could not be started {entry.failed_starts} times: {ended.error}"
            yield from self._finish(entry, JobStatus.FAILED, turn)
            return
        after_s = min(_RETRY_S * 2 ** (entry.failed_starts - 1), _RETRY_S_MAX)
        entry.wanted = None
        entry.retry_s = self.now_s + after_s
        entry.reason = f"start {entry.starts} failed: {ended.error}"
        self._wait(entry, turn)
        yield Cancelled(at_s=self.now_s, name=entry.name)

    def _finish(self, entry: Entry, status: JobStatus, turn: Turn) -> Iterable[Event]:
        entry.wanted = None
        self._end(entry, status, turn)
        yield Ended(at_s=self.now_s, name=entry.name)

    def _end(self, entry: Entry, status: JobStatus, turn: Turn) -> None:
        entry.status = status
        entry.ended_s = self.now_s
        turn.notes.append(f"{entry.name}: {status}" + _because(entry.reason))

    def _wait(self, entry: Entry, turn: Turn) -> None:
        entry.status = JobStatus.WAITING
        turn.notes.append(f"{entry.name}: waits again" + _because(entry.reason))

    # Decisions to what is wanted, and from there to processes.

    def _decide(self, events: Sequence[Event], turn: Turn) -> list[Decision]:
        decisions = decide(self.policy, self.state, events)
        for decision in decisions:
            action = decision.action
            entry = self.entries[action.name]
            turn.changed[action.name] = None
            match action:
                case Start(placement=placement, reason=reason):
                    entry.wanted = placement
                    if entry.attempt is None:
                        entry.reason = reason
                case Preempt(reason=reason):
                    entry.wanted = None
                    entry.reason = reason
                case Refuse(reason=reason):
                    entry.wanted = None
                    entry.reason = reason
                    if entry.attempt is None:
                        self._end(entry, JobStatus.REFUSED, turn)
                    else:
                        self._stop(entry, entry.attempt, Stop.CANCEL, turn)
        return decisions

    def _pursue(self, turn: Turn) -> None:
        """Ask attempts to end that are not wanted any more, and start those that are."""
        for entry in self.active:
            attempt = entry.attempt
            if attempt and not attempt.stop and entry.wanted != attempt.placement:
                self._stop(entry, attempt, Stop.PREEMPT, turn)
        for entry in self.active:
            if entry.wanted and entry.attempt is None and not self._leaving(entry):
                entry.starts += 1
                entry.attempt = Attempt(job=entry.name, number=entry.starts, placement=entry.wanted)
                entry.status = JobStatus.STARTING
                turn.changed[entry.name] = None
                turn.starts.append(entry.attempt)

    def _stop(self, entry: Entry, attempt: Attempt, stop: Stop, turn: Turn) -> None:
        entry.attempt = replace(attempt, stop=stop)
        entry.status = JobStatus.STOPPING
        turn.changed[entry.name] = None
        turn.stops.append(entry.attempt)
        turn.notes.append(f"{entry.name}: asked to stop" + _because(entry.reason))

    def _leaving(self, entry: Entry) -> list[str]:
        """Return the jobs that still hold wanted devices of `entry` and shall leave them."""
        assert entry.wanted is not None
        wanted = {(part.node, device) for part in entry.wanted.parts for device in part.devices}
        return [
            other.name
            for other in self.active
            if other.attempt is not None
            and other.attempt.stop
            and not wanted.isdisjoint(
                (part.node, device)
                for part in other.attempt.placement.parts
                for device in part.devices
            )
        ]


def _is_lost(ended: Exit, stop_signal: int) -> bool:
    """Whether a job that was asked to stop was killed by that; a shell adds 128 to the signal."""
    return ended.killed or ended.code in (-stop_signal, 128 + stop_signal)


def _indices(holder: Placement) -> set[int]:
    """Return the indices of devices on the queue's one node."""
    return {index for part in holder.parts for index in part.devices}


def _because(reason: str) -> str:
    first = reason.partition("\n")[0]
    return f" ({first})" if first else ""


def _how(ended: Exit, grace_s: float) -> str:
    """Return how an attempt ended, in words."""
    if ended.error:
        return ended.error
    if ended.killed:
        return f"it ignored its signal and was killed after its grace period of {grace_s:g} s"
    if ended.code is None:
        return "its processes were killed together with their supervisor, or the machine stopped"
    if ended.code == TRY_AGAIN:
        return f"it ended with exit code {TRY_AGAIN}, to be started again"
    if ended.code < 0:
        return f"it was killed by {signal_name(-ended.code)}"
    return f"it ended with exit code {ended.code}"
