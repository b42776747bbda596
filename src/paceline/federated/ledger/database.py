"""The SQLite file of a ledger: opening it for one writer or for readers, and errors in our terms.

A writer holds a lock on ``LEDGER.lock`` as long as it lives, which the kernel ends with it, so that
a second writer is refused at once instead of waiting. Readers need no lock: in WAL mode they see
the last commit. `synchronous = FULL` syncs each commit, so that it survives a power failure. Use a
connection from one thread.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import TYPE_CHECKING, Any

from paceline.core.errors import (
    CorruptData,
    NewerFormat,
    NotFound,
    PacelineError,
    StorageError,
    UsageError,
    storage_errors,
)
from paceline.core.files import LockOutcome, sync_folder, try_lock
from paceline.federated.ledger import schema

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

BUSY_S = 10.0  # the longest wait for another program's transaction or checkpoint
_STORAGE_CODES = tuple(
    f"SQLITE_{name}"
    for name in ("BUSY", "CANTOPEN", "FULL", "IOERR", "LOCKED", "NOMEM", "PERM", "READONLY")
)
_WRITE_FIX = "Free space, and keep it on a local file system that you may write to"


class RowRefused(CorruptData):
    """A trigger or a CHECK of the ledger refused a row."""


def create(path: Path, settings: Mapping[str, str]) -> None:
    """Make an empty ledger, in place of what a process left there that was killed meanwhile.

    Args:
        path: of the new file.
        settings: kept in it for good.

    Raises:
        StorageError: it cannot be written; nothing is left.
    """
    _remove(path)
    try:
        with storage_errors("cannot make a ledger", where=path, fix=_WRITE_FIX):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        with errors(path), contextlib.closing(_connect(path, "rw")) as sql:
            sql.execute("PRAGMA journal_mode = WAL")
            sql.execute("BEGIN IMMEDIATE")
            for statement in schema.statements():
                sql.execute(statement)
            rows = [("format", str(schema.FORMAT)), *settings.items()]
            sql.executemany("INSERT INTO settings VALUES (?, ?)", rows)
            sql.execute("COMMIT")
    except BaseException:
        _remove(path)
        raise


def rename(partial: Path, path: Path) -> None:
    """Give a closed ledger its name."""
    with storage_errors("cannot make a ledger", where=path, fix=_WRITE_FIX):
        partial.rename(path)
        sync_folder(path.parent)


def open_writer(path: Path) -> Connection:
    """Return a connection for the one writer; call `lock` first.

    Raises:
        NotFound: there is no such file.
        CorruptData: it is no ledger, or damaged beyond reading.
    """
    connection = Connection(_open(path, "rw"), path)
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def open_reader(path: Path) -> Connection:
    """Return a connection that cannot write; errors as in `open_writer`."""
    return Connection(_open(path, "ro"), path)


def lock(path: Path) -> int:
    """Take the writer's lock of a ledger; return its descriptor, whose closing releases it.

    Raises:
        UsageError: another process writes to the ledger.
        StorageError: the lock's file cannot be made.
    """
    name = path.with_name(path.name + ".lock")
    with storage_errors("cannot lock a ledger", where=name, fix=_WRITE_FIX):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if try_lock(descriptor) is LockOutcome.HELD:
                writer = os.pread(descriptor, 32, 0).decode(errors="replace")
                raise UsageError(
                    "another process writes to this ledger",
                    where=str(path),
                    why=f"process {writer or 'unknown'} holds its lock",
                    fix="Wait until it ends; reading works meanwhile",
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


@contextlib.contextmanager
def errors(path: Path) -> Iterator[None]:
    """Let SQLite's errors leave the context as ours."""
    try:
        yield
    except sqlite3.Error as problem:
        raise _translated(problem, path) from problem


@contextlib.contextmanager
def readable_rows(path: Path) -> Iterator[None]:
    """Let an error about what a row holds leave the context as CorruptData."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as problem:
        raise CorruptData(
            "the ledger is damaged",
            where=str(path),
            why=str(problem),
            fix="`paceline fed ledger verify` names the first bad row",
        ) from problem


class Connection:
    """A connection whose errors are ours."""

    def __init__(self, sql: sqlite3.Connection, path: Path) -> None:
        """Wrap a connection of SQLite to the ledger at `path`."""
        self.sql = sql
        self.path = path

    def execute(self, text: str, values: tuple[str | int, ...] = ()) -> None:
        """Execute a statement that returns nothing."""
        try:
            self.sql.execute(text, values)
        except sqlite3.Error as problem:
            raise _translated(problem, self.path) from problem

    def execute_many(self, text: str, values: Iterable[tuple[str | int, ...]]) -> None:
        """Execute a statement for each of the values."""
        try:
            self.sql.executemany(text, values)
        except sqlite3.Error as problem:
            raise _translated(problem, self.path) from problem

    def rows(self, text: str, values: tuple[str | int, ...] = ()) -> list[Any]:
        """Return all rows of a query."""
        try:
            return self.sql.execute(text, values).fetchall()
        except sqlite3.Error as problem:
            raise _translated(problem, self.path) from problem

    def row(self, text: str, values: tuple[str | int, ...] = ()) -> Any:
        """Return the first row of a query, or None."""
        try:
            return self.sql.execute(text, values).fetchone()
        except sqlite3.Error as problem:
            raise _translated(problem, self.path) from problem

    def rollback(self) -> None:
        """End the transaction, if there is one: a full disk may have ended it."""
        if self.sql.in_transaction:
            self.execute("ROLLBACK")

    def close(self) -> None:
        """Close the file."""
        self.sql.close()


def settings_of(connection: Connection) -> dict[str, str]:
    """Return the settings of a ledger.

    Raises:
        NewerFormat: a newer Paceline made it.
        CorruptData: it is no ledger.
    """
    tables = {name for (name,) in connection.rows("SELECT name FROM sqlite_master")}
    found = {}
    if {"settings", "blocks", "transactions", "postings"} <= tables:
        found = dict(connection.rows("SELECT key, value FROM settings"))
    path = connection.path
    if not {"format", "ledger", "public_key"} <= found.keys():
        raise CorruptData(
            "not a ledger",
            where=str(path),
            why="it has not the tables and settings of one",
            fix="Name the file that Ledger.create made",
        )
    if found["format"] != str(schema.FORMAT):
        raise NewerFormat(
            f"the ledger has format {found['format']:.20}",
            where=str(path),
            why=f"this Paceline reads format {schema.FORMAT}",
            fix="Use the Paceline that wrote it",
        )
    return found


def schema_of(sql: sqlite3.Connection) -> dict[str, str]:
    """Return the SQL of each table, index and trigger, by name."""
    rows = sql.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")
    return dict(rows.fetchall())


def expected_schema() -> dict[str, str]:
    """Return what `schema_of` has for an intact ledger."""
    with contextlib.closing(sqlite3.connect(":memory:")) as sql:
        for statement in schema.statements():
            sql.execute(statement)
        return schema_of(sql)


def _translated(problem: sqlite3.Error, path: Path) -> PacelineError:
    code = getattr(problem, "sqlite_errorname", "")
    if isinstance(problem, sqlite3.IntegrityError):
        return RowRefused(
            "the ledger refused a row",
            where=str(path),
            why=str(problem),
            fix="Nothing was written. Find the first bad row: paceline fed ledger verify",
        )
    if code.startswith(_STORAGE_CODES):
        busy = code.startswith("SQLITE_BUSY")
        return StorageError(
            "the ledger cannot be used",
            where=str(path),
            why=f"another program held it for {BUSY_S:.0f} s" if busy else str(problem),
            fix="Nothing of this block was written. " + ("End it" if busy else _WRITE_FIX),
        )
    return CorruptData(
        "the ledger is damaged",
        where=str(path),
        why=str(problem),
        fix="Restore the file from a copy; `paceline fed ledger verify` says what is wrong",
    )


def _remove(path: Path) -> None:
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        path.with_name(name).unlink(missing_ok=True)


def _open(path: Path, mode: str) -> sqlite3.Connection:
    if not path.is_file():
        raise NotFound("no such ledger", where=str(path), fix="Name the file of a ledger")
    with errors(path):
        sql = _connect(path, mode)
        try:
            sql.execute("SELECT COUNT(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            sql.close()
            # On read-only storage a reader cannot make the files beside it; with no log beside
            # it, the file alone is the ledger.
            if mode != "ro" or path.with_name(path.name + "-wal").exists():
                raise
            sql = _connect(path, "ro&immutable=1")
            sql.execute("SELECT COUNT(*) FROM sqlite_master")
    return sql


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_S, isolation_level=None)
