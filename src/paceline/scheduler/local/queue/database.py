"""What the queue remembers, in SQLite: jobs, live attempts, and the log of events and decisions.

    settings   key, value            format version, the queue's first moment
    segments   id, policy, devices,  the log begins anew when one of these changes, and when it is
               rates, options        long; each segment can be decided again by itself
    events     id, segment, instant, at_s, event         in the order in which they were applied
    decisions  id, segment, instant, at_s, decision      what `decide` answered at that instant
    jobs       name, submission, entry                   each job as it stands
    attempts   job, number, attempt, live                each start of each job

One process writes: the daemon. A turn is one transaction, before it is carried out. The log is
written ahead (WAL) and synced at each commit, so a turn that was carried out is never forgotten.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import CorruptData, NotFound, StorageError, storage_errors
from paceline.scheduler.events import (
    Cancelled,
    Carried,
    DevicesBack,
    DevicesLost,
    Ended,
    Measured,
    NodeBack,
    NodeLost,
    Rated,
    Started,
    Stopped,
    Submitted,
    Timer,
)
from paceline.scheduler.local.jobs.devices import LocalDevices
from paceline.scheduler.local.jobs.rates import MeasuredRates
from paceline.scheduler.local.jobs.records import Attempt
from paceline.scheduler.local.jobs.submission import Submission
from paceline.scheduler.local.queue.setup import PolicyOptions, Setup
from paceline.scheduler.local.queue.turns import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paceline.core.record import Record
    from paceline.scheduler.decide import Decision
    from paceline.scheduler.events import Event
    from paceline.scheduler.local.queue.turns import Turn

FORMAT = 2  # 1 has no segments.options
_BUSY_S = 10.0
_FIX = "Free space; keep it on a local file system that you may write to"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS segments (
    id INTEGER PRIMARY KEY, policy TEXT NOT NULL, devices TEXT NOT NULL, rates TEXT NOT NULL,
    options TEXT NOT NULL DEFAULT '{}');
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, instant INTEGER NOT NULL,
    at_s REAL NOT NULL, event TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS decisions (
    id INTEGER PRIMARY KEY, segment INTEGER NOT NULL, instant INTEGER NOT NULL,
    at_s REAL NOT NULL, decision TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS events_by_instant ON events (segment, instant);
CREATE INDEX IF NOT EXISTS decisions_by_instant ON decisions (segment, instant);
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, token TEXT NOT NULL,
    submission TEXT NOT NULL, entry TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS jobs_by_token ON jobs (token);
CREATE TABLE IF NOT EXISTS attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL, attempt TEXT NOT NULL, live INTEGER NOT NULL,
    PRIMARY KEY (job, number));
"""
_EVENTS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        Submitted,
        Started,
        Ended,
        Stopped,
        Cancelled,
        Measured,
        Carried,
        Rated,
        DevicesLost,
        DevicesBack,
        NodeLost,
        NodeBack,
        Timer,
    )
}
_OF_SEGMENTS = (("events", "segment"), ("decisions", "segment"), ("segments", "id"))
_STORED = (
    "status",
    "starts",
    "own_stops",
    "lost_by_stop",
    "failed_starts",
    "retry_s",
    "submitted_s",
    "began_s",
    "ended_s",
    "work_done",
    "rate",
    "exit_code",
    "reason",
)


class Segment(NamedTuple):
    """A part of the log that begins with a fresh state.

    Attributes:
        number: from 1.
        setup: for all of it.
    """

    number: int
    setup: Setup


class Instant(NamedTuple):
    """Events that were passed to `decide` together, and its answer."""

    number: int
    events: list[Event]
    decisions: list[str]


class Database:
    """The queue's memory; use it from one thread."""

    def __init__(self, path: Path, *, first_s: float | None = None) -> None:
        """Open the database; create it if `first_s` is given.

        Args:
            path: of the file.
            first_s: the queue's first moment, seconds since 1970, if the database is new; None:
                open it for reading only.

        Raises:
            NotFound: it is not there.
            CorruptData: it is not a database of a queue, or damaged.
            StorageError: it cannot be opened.
        """
        self.path = path
        if first_s is None and not path.is_file():
            raise NotFound("no such queue log", where=str(path), fix="Name the file queue.db")
        with self._errors():
            if first_s is not None:  # jobs have their users' variables, and so passwords
                with storage_errors("cannot make the queue's log", where=path, fix=_FIX):
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            uri = f"{path.absolute().as_uri()}?mode={'ro' if first_s is None else 'rwc'}"
            self._sql = sqlite3.connect(uri, uri=True, timeout=_BUSY_S, isolation_level=None)
            if first_s is not None:
                self._sql.execute("PRAGMA journal_mode = WAL")
                self._sql.execute("PRAGMA synchronous = FULL")
                with self._transaction():
                    for statement in _SCHEMA.split(";"):
                        self._sql.execute(statement)
                    for key, value in (("format", str(FORMAT)), ("first_s", repr(first_s))):
                        self._sql.execute(
                            "INSERT OR IGNORE INTO settings VALUES (?, ?)", (key, value)
                        )
                    self._upgrade()
            self._settings = dict(self._sql.execute("SELECT key, value FROM settings"))
        if self._settings.get("format") not in ("1", str(FORMAT)):
            raise CorruptData(
                f"the queue's log has format {self._settings.get('format')}",
                where=str(path),
                why=f"this Paceline reads formats 1 to {FORMAT}",
                fix="Use the Paceline that wrote it, or another --dir",
            )

    def _upgrade(self) -> None:
        """Make a database of format 1 one of format 2."""
        row = self._sql.execute("SELECT value FROM settings WHERE key = 'format'").fetchone()
        if row == ("1",):
            self._sql.execute("ALTER TABLE segments ADD COLUMN options TEXT NOT NULL DEFAULT '{}'")
            self._sql.execute("UPDATE settings SET value = '2' WHERE key = 'format'")

    def close(self) -> None:
        """Close the file."""
        self._sql.close()

    @property
    def first_s(self) -> float:
        """The queue's first moment, seconds since 1970."""
        return float(self._settings["first_s"])

    def last_s(self) -> float:
        """Return the time of the last event; 0 if there is none."""
        with self._errors():
            row = self._sql.execute("SELECT at_s FROM events ORDER BY id DESC LIMIT 1").fetchone()
            return float(row[0]) if row else 0.0

    def last_segment(self) -> Segment | None:
        """Return the segment that was begun last."""
        return next(reversed(self.segments()), None)

    def segments(self) -> list[Segment]:
        """Return all segments, oldest first."""
        with self._errors():
            options = "options" if self._settings["format"] != "1" else "'{}'"
            rows = self._sql.execute(
                f"SELECT id, policy, devices, rates, {options} FROM segments ORDER BY id"
            )
            return [_segment(*row) for row in rows]

    def begin_segment(self, setup: Setup, turn: Turn, entries: dict[str, Entry]) -> Segment:
        """Begin a segment with the turn in which jobs of the last one are submitted anew."""
        with self._errors(), self._transaction():
            done = self._sql.execute(
                "INSERT INTO segments (policy, devices, rates, options) VALUES (?, ?, ?, ?)",
                (setup.policy, *(_text(record) for record in setup[1:])),
            )
            assert done.lastrowid is not None
            self._put(done.lastrowid, turn, entries)
            return Segment(done.lastrowid, setup)

    def instants(self, segment: int) -> Iterator[Instant]:
        """Yield the instants of a segment in order."""
        with self._errors():
            decisions: dict[int, list[str]] = {}
            for instant, text in self._sql.execute(
                "SELECT instant, decision FROM decisions WHERE segment = ? ORDER BY id", (segment,)
            ):
                decisions.setdefault(instant, []).append(text)
            events: list[Event] = []
            last = None
            for instant, text in self._sql.execute(
                "SELECT instant, event FROM events WHERE segment = ? ORDER BY id", (segment,)
            ):
                if last is not None and instant != last:
                    yield Instant(last, events, decisions.get(last, []))
                    events = []
                events.append(_event(text))
                last = instant
            if last is not None:
                yield Instant(last, events, decisions.get(last, []))

    def entries(self) -> dict[str, Entry]:
        """Return all jobs by name in the order of submission, with their live attempts."""
        with self._errors():
            entries = {}
            for name, submission, text in self._sql.execute(
                "SELECT name, submission, entry FROM jobs ORDER BY number"
            ):
                entry = Entry(Submission.from_text(submission))
                for key, value in json.loads(text).items():
                    setattr(entry, key, value)
                entries[name] = entry
            for job, text in self._sql.execute("SELECT job, attempt FROM attempts WHERE live"):
                entries[job].attempt = Attempt.from_text(text)
            return entries

    def name_of(self, token: str) -> str | None:
        """Return the name of the job that was submitted with a token, or None."""
        with self._errors():
            row = self._sql.execute("SELECT name FROM jobs WHERE token = ?", (token,)).fetchone()
            return str(row[0]) if row else None

    def event_count(self, segment: int) -> int:
        """Return the number of events of a segment."""
        with self._errors():
            row = self._sql.execute("SELECT COUNT(*) FROM events WHERE segment = ?", (segment,))
            return int(row.fetchone()[0])

    def forget(self, jobs: Iterable[str], *, keep_events: int) -> None:
        """Delete jobs that ended, and the oldest segments beyond so many events.

        The last segment stays. The file does not shrink; what becomes free in it is used again.
        """
        with self._errors(), self._transaction():
            counts = self._sql.execute(
                "SELECT segments.id, COUNT(events.id) FROM segments LEFT JOIN events "
                "ON events.segment = segments.id GROUP BY segments.id ORDER BY segments.id DESC"
            ).fetchall()
            kept = 0
            for index, (segment, count) in enumerate(counts):
                kept += count
                if index and kept > keep_events:
                    for table, column in _OF_SEGMENTS:
                        self._sql.execute(f"DELETE FROM {table} WHERE {column} = ?", (segment,))
            names = [(name,) for name in jobs]
            self._sql.executemany("DELETE FROM jobs WHERE name = ?", names)
            self._sql.executemany("DELETE FROM attempts WHERE job = ?", names)

    def commit(self, segment: int, turn: Turn, entries: dict[str, Entry]) -> None:
        """Store what a turn changed, all of it or nothing.

        Raises:
            StorageError: the disk is full or cannot be written; nothing was stored.
        """
        with self._errors(), self._transaction():
            self._put(segment, turn, entries)

    def _put(self, segment: int, turn: Turn, entries: dict[str, Entry]) -> None:
        if turn.events:
            self._log(segment, turn)
        for name in turn.changed:
            self._store(entries[name])
        for attempt in turn.ended:
            self._sql.execute(
                "UPDATE attempts SET live = 0 WHERE job = ? AND number = ?",
                (attempt.job, attempt.number),
            )

    def _log(self, segment: int, turn: Turn) -> None:
        row = self._sql.execute("SELECT COALESCE(MAX(id), 0) + 1 FROM events").fetchone()
        instant = row[0]  # the number of its first event
        self._sql.executemany(
            "INSERT INTO events (segment, instant, at_s, event) VALUES (?, ?, ?, ?)",
            [(segment, instant, event.at_s, _event_text(event)) for event in turn.events],
        )
        self._sql.executemany(
            "INSERT INTO decisions (segment, instant, at_s, decision) VALUES (?, ?, ?, ?)",
            [(segment, instant, made.at_s, decision_text(made)) for made in turn.decisions],
        )

    def _store(self, entry: Entry) -> None:
        submission = entry.submission
        text = json.dumps({key: getattr(entry, key) for key in _STORED})
        self._sql.execute(
            "INSERT INTO jobs (name, token, submission, entry) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (name) DO UPDATE SET entry = excluded.entry",
            (entry.name, submission.token, _text(submission), text),
        )
        if entry.attempt is not None:
            self._sql.execute(
                "INSERT OR REPLACE INTO attempts VALUES (?, ?, ?, 1)",
                (entry.name, entry.attempt.number, _text(entry.attempt)),
            )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._sql.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK")
            raise
        self._sql.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as problem:
            raise StorageError(
                "the queue's log cannot be used",
                where=str(self.path),
                why=str(problem),
                fix=_FIX,
            ) from problem
        except sqlite3.DatabaseError as problem:
            raise CorruptData(
                "the queue's log is damaged",
                where=str(self.path),
                why=str(problem),
                fix="Restore it, or serve another --dir",
            ) from problem


def _segment(number: int, policy: str, devices: str, rates: str, options: str) -> Segment:
    setup = Setup(
        policy,
        LocalDevices.from_text(devices),
        MeasuredRates.from_text(rates),
        PolicyOptions.from_text(options),
    )
    return Segment(number, setup)


def _text(record: Record) -> str:
    return json.dumps(record.to_json())


def decision_text(decision: Decision) -> str:
    """Return a decision as the log has it."""
    kind = type(decision.action).__name__
    return json.dumps({"kind": kind, **decision.to_json()}, sort_keys=True)


def _event_text(event: Event) -> str:
    return json.dumps({"kind": type(event).__name__, **event.to_json()})


def _event(text: str) -> Event:
    data = json.loads(text)
    return _EVENTS[data.pop("kind")].from_json(data)
