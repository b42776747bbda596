"""Writes operations, kills the writer, and compares what is left with the model."""

from __future__ import annotations

import logging
import os
import random
import select
import shutil
import signal
import struct
import tempfile
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import NotFound
from paceline.core.record import Record
from paceline.federated.ledger import database
from paceline.federated.ledger.ledger import Ledger
from paceline.federated.ledger.torture.model import Model
from paceline.federated.ledger.torture.operations import (
    MOST_PER_BLOCK,
    found_ledger,
    operation,
    write_operations,
)
from paceline.federated.ledger.verify import check_tail

if TYPE_CHECKING:
    from collections.abc import Callable

_BLOCKS_AGAIN = 3
_MOMENT_S = 0.01
_ATTEMPT_DEADLINE_S = 600.0
_MAX_SHOWN = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerTorture(Record):
    """What a campaign came to.

    Attributes:
        seed: of the operations; the moments of the kills are not repeated.
        operations: of the stream.
        kills: how often the writer was killed.
        repeated: operations that were given again after a kill.
        refused: operations that had to be refused, and were.
        blocks: of the ledger in the end.
        transactions: of the ledger.
        postings: of the ledger.
        elapsed_s: of all of it.
        verify_s: of the last verification.
        failures: the first of them, in words.
        failure_count: of all of them.
    """

    seed: int
    operations: int
    kills: int
    repeated: int
    refused: int
    blocks: int
    transactions: int
    postings: int
    elapsed_s: float
    verify_s: float
    failures: tuple[str, ...]
    failure_count: int

    @property
    def ok(self) -> bool:
        """Whether nothing was lost, doubled or left half-written."""
        return not self.failure_count


def torture_ledger(
    folder: Path,
    *,
    operations: int,
    kills: int,
    seed: int = 1,
    on_progress: Callable[[str], None] | None = None,
    clock: Clock | None = None,
) -> LedgerTorture:
    """Run a campaign in a new folder below `folder`, which is removed at the end.

    It forks: call it from a process without other threads.

    Args:
        folder: on the file system to test.
        operations: of the stream.
        kills: how often to kill the writer.
        seed: of the operations.
        on_progress: is given a line for each step.
        clock: in place of the system's.

    Raises:
        NotFound: there is no such folder.
        StorageError: it cannot be written to.
    """
    if not folder.is_dir():
        raise NotFound("no such folder", where=str(folder), fix="Give a folder on the disk to test")
    clock = clock or SystemClock()
    work = Path(tempfile.mkdtemp(prefix="paceline-torture-", dir=folder.absolute()))
    try:
        campaign = _Campaign(work / "ledger.db", operations, kills, seed, clock)
        return campaign.run(on_progress or (lambda _line: None))
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Campaign:
    """Writes, kills, and compares."""

    def __init__(self, path: Path, operations: int, kills: int, seed: int, clock: Clock) -> None:
        self._path = path
        self._operations = operations
        self._kills = kills
        self._seed = seed
        self._clock = clock
        self._rng = random.Random(seed)
        self._failures: list[str] = []
        self._repeated = 0
        # Several blocks between two kills.
        self._most_per_block = max(1, min(MOST_PER_BLOCK, operations // (2 * max(kills, 1))))

    def run(self, on_progress: Callable[[str], None]) -> LedgerTorture:
        start_s = self._clock.now_s()
        with Ledger.create(self._path, now_ms=0, name="torture") as ledger:
            found_ledger(ledger)
        acknowledged, killed = 0, 0
        while acknowledged < self._operations and not self._failures:
            left = self._kills - killed
            on_progress(f"operations: {acknowledged:,} of {self._operations:,}; kills: {killed:,}")
            target = None
            if left > 0:  # spread over what is left
                step = (self._operations - acknowledged) / (left + 1)
                target = acknowledged + int(self._rng.uniform(0.2, 1.3) * step)
            acknowledged, was_killed = self._attempt(acknowledged, target)
            killed += was_killed
            if was_killed:
                self._check_after_kill()
        on_progress("verifying")
        verify_start_s = self._clock.now_s()
        with Ledger.read(self._path) as ledger:
            report = ledger.verify()
            verify_s = self._clock.now_s() - verify_start_s
            if report.damage is not None:
                self._failures.append(report.damage.text())
            refused = self._compare(ledger, report.transactions)
        return LedgerTorture(
            seed=self._seed,
            operations=self._operations,
            kills=killed,
            repeated=self._repeated,
            refused=refused,
            blocks=report.blocks,
            transactions=report.transactions,
            postings=report.postings,
            elapsed_s=round(self._clock.now_s() - start_s, 3),
            verify_s=round(verify_s, 3),
            failures=tuple(self._failures[:_MAX_SHOWN]),
            failure_count=len(self._failures),
        )

    def _attempt(self, acknowledged: int, target: int | None) -> tuple[int, bool]:
        """Let a process write from about `acknowledged` on; return how far, and if it was killed.

        Args:
            acknowledged: the first operation that is not known to be committed.
            target: kill soon after so many; None: let it write to the end.
        """
        first = max(0, acknowledged - self._rng.randrange(_BLOCKS_AGAIN * self._most_per_block + 1))
        self._repeated += acknowledged - first
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._write_and_exit(first, writer)
        os.close(writer)
        try:
            reached = self._follow(reader, acknowledged, target)
            if target is not None or self._failures:
                os.kill(child, signal.SIGKILL)
            # What it had acknowledged before the signal came is committed too.
            reached = max(reached, *_acknowledged(_drain(reader)), acknowledged)
        except BaseException:  # interrupted: no process is left behind
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise
        finally:
            os.close(reader)
        _, status = os.waitpid(child, 0)
        was_killed = os.WIFSIGNALED(status)
        if not was_killed and os.waitstatus_to_exitcode(status) != 0:
            self._failures.append(f"the writer failed after operation {reached:,}: see its output")
        elif target is None and was_killed:
            self._failures.append(f"the writer died of signal {os.WTERMSIG(status)}")
        return reached, was_killed

    def _write_and_exit(self, first: int, pipe: int) -> NoReturn:
        """Write operations and acknowledge them through a pipe, in a process that ends here."""
        code = 1
        logging.disable(logging.WARNING)  # the clock goes back on purpose
        try:
            with Ledger.open(self._path, check="last") as ledger:
                assert ledger.damage is None, ledger.damage
                for number in write_operations(
                    ledger, self._seed, first, self._operations, self._most_per_block
                ):
                    os.write(pipe, struct.pack("<q", number))
            code = 0
        except Exception:  # noqa: BLE001  # whatever it is: it ends this process
            os.write(2, f"from operation {first}: {traceback.format_exc()}".encode())
        finally:
            os._exit(code)  # the parent's buffers and handlers are not this process's

    def _follow(self, reader: int, reached: int, target: int | None) -> int:
        """Read acknowledgements until the target, and for a random moment longer.

        The moment is two blocks at most: a writer that is fast would leave no room for other kills.
        """
        deadline_s = self._clock.now_s() + _ATTEMPT_DEADLINE_S
        first_s, blocks, most_s = 0.0, 0, _MOMENT_S
        while target is None or reached < target:
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
                self._failures.append(f"no block was committed in {_ATTEMPT_DEADLINE_S:.0f} s")
                return reached
            numbers = _acknowledged(os.read(reader, 1 << 16))
            if not numbers:  # it has ended
                return reached
            reached = max(reached, *numbers)
            now_s = self._clock.now_s()
            if blocks:
                most_s = min(_MOMENT_S, 2 * (now_s - first_s) / blocks)
            else:
                first_s = now_s
            blocks += len(numbers)
        moment_s = self._clock.now_s() + self._rng.uniform(0, most_s)
        while (left_s := moment_s - self._clock.now_s()) > 0:
            if select.select([reader], [], [], left_s)[0]:
                numbers = _acknowledged(os.read(reader, 1 << 16))
                if not numbers:
                    break
                reached = max(reached, *numbers)
        return reached

    def _check_after_kill(self) -> None:
        with closing(database.open_reader(self._path)) as sql:
            damage = check_tail(sql)
        if damage is not None:
            self._failures.append(f"after a kill: {damage.text()}")

    def _compare(self, ledger: Ledger, transactions: int) -> int:
        """Note where the ledger differs from the model; return how many operations are refused."""
        model = Model()
        for number in range(self._operations):
            model.apply(operation(self._seed, number))
        found = {account: amount for account, amount in ledger.balances().items() if amount}
        expected = {account: amount for account, amount in model.balances.items() if amount}
        for account in sorted({*found, *expected}):
            if found.get(account) != expected.get(account):
                self._failures.append(
                    f"{account} has {found.get(account)}, the model {expected.get(account)}"
                )
        held = {(pay.run, pay.round, pay.client): pay.amount for pay in ledger.held()}
        if held != model.held:
            self._failures.append(f"{len(held)} payments are held, in the model {len(model.held)}")
        if transactions != model.transactions:
            self._failures.append(
                f"{transactions:,} transactions, in the model {model.transactions:,}"
            )
        return model.refused


def _acknowledged(data: bytes) -> list[int]:
    """Return the whole numbers in what a pipe gave; writes of 8 bytes are never divided."""
    return [number for (number,) in struct.iter_unpack("<q", data)]


def _drain(reader: int) -> bytes:
    """Return what is left in a pipe whose writer ends."""
    parts = []
    while part := os.read(reader, 1 << 16):
        parts.append(part)
    return b"".join(parts)
