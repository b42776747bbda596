"""Watches the ranks of a run, and finds the one that hangs: the shell around `detector`.

    trace headers (each second)   ranks that others wait for: /proc, stacks
              |                              |
              +-----------> samples <--------+
                               |
                       detector.observe -> a verdict: stacks of all ranks, RUN/hang.json,
                                           and `stop_reason` has the launcher end its ranks

A launcher sees the ranks whose traces it sees, and looks at processes of its own node only: with
several nodes the launcher of the rank that hangs finds it, if the run's folder is shared.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from paceline.core.clock import SystemClock
from paceline.core.errors import PacelineError
from paceline.core.files import commit_text
from paceline.core.processes import boot_id, descendants
from paceline.launch.hangs.detector import (
    GroupKey,
    GroupPlace,
    HangDetector,
    MessagePlace,
    RankSample,
    Signs,
    Verdict,
)
from paceline.launch.hangs.signs import kernel_place, signs_of
from paceline.launch.hangs.stacks import Thread, answers, since_fork, stacks_of
from paceline.launch.hangs.words import busy_words, detail_of, doing
from paceline.launch.lost_children import LostChild, read_lost_child
from paceline.launch.summary import place_of
from paceline.runs.hang import HANG_NAME, Hang, HungChild, HungRank
from paceline.trace.format.events import MAIN, Kind
from paceline.trace.format.files import RankTrace, read_tables
from paceline.trace.format.progress import HISTORY, GroupProgress, LiveHeader, read_live_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from paceline.core.clock import Clock

_LOG = logging.getLogger(__name__)
_INTERVAL_S = 1.0
_HEADERS_PER_S = 256  # of a run with very many ranks in one folder


@dataclass(slots=True, eq=False)
class _WatchedRank:
    """What is known of a rank's trace."""

    path: Path
    header: LiveHeader
    tables: RankTrace

    @property
    def thread(self) -> Thread | None:
        """The thread of the training loop; None if the trace does not say."""
        if len(self.tables.locations) <= MAIN or not self.tables.locations[MAIN].process:
            return None
        main = self.tables.locations[MAIN]
        return Thread(process=main.process, thread=main.number)


class HangWatcher:
    """Watches the ranks from `__enter__` to `__exit__`, in a thread of its own.

    Args:
        run: the run's folder.
        clock: for waits and times.
        deadline_s: how long ranks wait for one that shows no sign of work; 0: nothing is watched.
    """

    def __init__(self, run: Path, clock: Clock, deadline_s: float) -> None:
        self.run = run
        self.clock = clock
        self.deadline_s = deadline_s
        self._detector = HangDetector(deadline_s)
        self._boot = ""
        self._ranks: dict[int, _WatchedRank] = {}
        self._lost: dict[int, tuple[LostChild, int]] = {}  # of each rank, and in which step
        self._reason = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-hangs", daemon=True)

    def __enter__(self) -> Self:
        if self.deadline_s:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self.deadline_s:
            self._thread.join()

    def stop_reason(self) -> str:
        """Return why the ranks are to end; empty while none hangs."""
        return self._reason

    def look_back(self) -> None:
        """Look for a rank that the others still needed, now that all have ended.

        An mpirun may end well though a rank left without a word, and was missed.
        """
        if not self.deadline_s or self._reason:
            return
        self._boot = boot_id()
        self._read()
        samples = self._samples(frozenset(self._ranks), {})
        finding = HangDetector(0.0).observe(samples, self.clock.now_s())
        if finding.hang is not None:
            self._tell(finding.hang, samples)

    def mismatched_rank(self) -> int | None:
        """Return the rank that called another collective than the others; None if none did."""
        self._read()
        detector = HangDetector(0.0)
        detector.observe(self._samples(frozenset(), {}), 0.0)
        return detector.mismatched_rank()

    def _watch(self) -> None:
        try:
            self._boot = boot_id()
            examine: frozenset[int] = frozenset()
            interval_s = min(_INTERVAL_S, self.deadline_s / 10)
            while not self.clock.wait(self._ended, interval_s):
                examine = self._observe(examine)
                if self._reason:
                    return
                interval_s = min(_INTERVAL_S, self.deadline_s / 10)
                interval_s = max(interval_s, len(self._ranks) / _HEADERS_PER_S)
        except Exception:  # noqa: BLE001  # whatever it is: the run goes on without being watched
            _LOG.exception("the ranks are no longer watched for hangs")

    def _observe(self, examine: frozenset[int]) -> frozenset[int]:
        """Look at all ranks, and return those to examine the next time."""
        self._read()
        samples = self._samples(examine, {})
        finding = self._detector.observe(samples, self.clock.now_s())
        if finding.stacks:
            stacks = self._stacks(finding.stacks)
            samples = self._samples(finding.examine, stacks)
            finding = self._detector.observe(samples, self.clock.now_s())
        if finding.busy is not None:
            _LOG.warning("%s", busy_words(finding.busy))
        if finding.hang is not None:
            self._tell(finding.hang, samples)
        return finding.examine

    def _read(self) -> None:
        """Read the headers of all ranks, and the tables of those that name something new."""
        for path in (self.run / "trace").glob("rank-*.trace"):
            try:
                header = read_live_header(path)
                known = self._ranks.get(header.status.rank)
                if known is not None and _is_known(known.tables, header):
                    known.header = header
                    continue
                tables = read_tables(path)
            except (OSError, PacelineError):  # just being made
                continue
            if _is_known(tables, header):
                self._ranks[header.status.rank] = _WatchedRank(path, header, tables)

    def _samples(
        self, examine: frozenset[int], stacks: Mapping[int, tuple[str, ...]]
    ) -> dict[int, RankSample]:
        samples = {}
        for number, rank in self._ranks.items():
            lost, signs = self._lost_child(number), None
            if number in examine:
                signs = self._signs(rank, stacks.get(number), thread_alone=bool(lost))
            samples[number] = _sample(rank, signs, lost)
        return samples

    def _lost_child(self, number: int) -> str:
        """Return which process below a rank was killed in the step that it is in; or nothing."""
        status = self._ranks[number].header.status
        if status.boot_id != self._boot:
            return ""
        lost = read_lost_child(self.run, number)
        if lost is None:
            return ""
        if number not in self._lost or self._lost[number][0] != lost:
            self._lost[number] = (lost, status.step)
        return (
            f"{lost.name} was killed by {lost.signal}"
            if self._lost[number][1] == status.step
            else ""
        )

    def _signs(
        self, rank: _WatchedRank, stack: tuple[str, ...] | None, *, thread_alone: bool
    ) -> Signs | None:
        status, thread = rank.header.status, rank.thread
        if thread is None or status.boot_id != self._boot:  # of another node
            return None
        text = "\n".join(stack or ("none",)) if stack is not None else ""
        return signs_of(
            thread.process,
            thread.thread,
            status.written_bytes,
            text,
            thread_alone=thread_alone,
        )

    def _stacks(self, numbers: Iterable[int]) -> dict[int, tuple[str, ...]]:
        """Return the stacks of those ranks that are on this node."""
        threads = {}
        for number in numbers:
            rank = self._ranks[number]
            if rank.thread is not None and rank.header.status.boot_id == self._boot:
                threads[number] = rank.thread
        return stacks_of(threads, self.clock)

    def _children(self, number: int) -> tuple[HungChild, ...]:
        """Return the Python processes below a rank that waits for a batch, with their stacks."""
        rank = self._ranks[number]
        status, thread = rank.header.status, rank.thread
        if status.phase is not Kind.INPUT or thread is None or status.boot_id != self._boot:
            return ()
        found = []
        for process in sorted(descendants(thread.process)):
            if answers(process):
                # One after the other: forked processes write to the same memory.
                main = Thread(process=process, thread=process)
                stack = stacks_of({number: main}, self.clock)[number]
                place = kernel_place(process, process)
                where = [line for line in place if line.startswith("wchan")]
                found.append(HungChild(process=process, stack=(*since_fork(stack), *where)))
        return tuple(found)

    def _tell(self, verdict: Verdict, samples: Mapping[int, RankSample]) -> None:
        """Write what is known of the hang, and have the launcher end the run."""
        stacks = self._stacks(self._ranks)
        children = self._children(verdict.rank)
        child_stacks = [child.stack for child in children]
        own_stack = stacks.get(verdict.rank, ())
        detail = detail_of(verdict, samples[verdict.rank], own_stack, child_stacks)
        step, phase = place_of(self._ranks[verdict.rank].header.status)
        hang = Hang(
            rank=verdict.rank,
            kind=str(verdict.kind),
            detail=detail,
            waiting=verdict.waiting,
            waited_s=verdict.waited_s,
            ranks=tuple(
                HungRank(rank=rank, doing=doing(sample), stack=stacks.get(rank, ()))
                for rank, sample in sorted(samples.items())
            ),
            step=step,
            phase=phase,
            children=children,
        )
        try:
            commit_text(self.run / HANG_NAME, hang.to_text())
        except PacelineError as problem:  # a full disk: the run must end all the same
            _LOG.warning("%s", problem)
        self._reason = f"rank {verdict.rank} hangs: {detail}"


def mismatched_rank(run: Path) -> int | None:
    """Return the rank that called another collective than the others, of a run that has ended.

    None where the traces in folder `run` do not show one.
    """
    return HangWatcher(run, SystemClock(), 0.0).mismatched_rank()


def _is_known(tables: RankTrace, header: LiveHeader) -> bool:
    """Whether a trace's tables hold all that its header refers to."""
    entries = [*header.groups, *([header.message] if header.message is not None else [])]
    names = max((max(entry.name, *entry.names) for entry in entries), default=0)
    groups = max((entry.group for entry in entries), default=0)
    has_main = len(tables.locations) > MAIN
    return has_main and names < len(tables.names) and groups < len(tables.groups)


def _sample(rank: _WatchedRank, signs: Signs | None, lost_child: str) -> RankSample:
    header, tables = rank.header, rank.tables
    groups: dict[GroupKey, GroupPlace] = {}
    for entry in header.groups:
        group = tables.groups[entry.group]
        groups[group.name, group.members] = _place(entry, tables.names)
    message = None
    if header.message is not None and header.message.entered:
        message = MessagePlace(
            count=header.message.entered,
            is_open=header.message.left < header.message.entered,
            peer=header.message.peer,
            name=tables.names[header.message.name],
        )
    return RankSample(
        events=header.status.recorded_count,
        step=header.status.step,
        in_wait=header.status.phase is Kind.WAIT,
        in_input=header.status.phase is Kind.INPUT,
        lost_child=lost_child,
        closed=header.status.closed,
        groups=groups,
        has_all_groups=header.group_room,
        message=message,
        signs=signs,
    )


def _place(entry: GroupProgress, names: tuple[str, ...]) -> GroupPlace:
    first = max(1, entry.entered - HISTORY + 1)
    return GroupPlace(
        entered=entry.entered,
        left=entry.left,
        unseen=entry.unseen,
        names={
            number: names[entry.names[number % HISTORY]]
            for number in range(first, entry.entered + 1)
        },
    )
