"""Kills the writer of a ledger again and again, and compares what is left with a model.

A stream of random operations is a function of a seed: deposits, rounds, releases, slashing, runs
that end, operations that must be refused, operations that were done before. A process writes them
in blocks, and is killed with SIGKILL at random moments. The next one begins some blocks earlier
than the last acknowledged one, as a caller would that does not know what was committed. In the end
the ledger must verify, and must come to what a model comes to that did each operation once:

    conserved       balances sum to zero, after every kill
    never negative  also in the model, which knows no SQLite
    exactly once    as many transactions, and equal balances and held payments

A killed process loses nothing that it had given to the operating system: this shows atomicity and
idempotency. That commits survive a power failure rests on SQLite's fsync (synchronous = FULL).
"""

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
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from paceline.core.clock import Clock, SystemClock
from paceline.core.errors import NotFound, UsageError
from paceline.core.record import Record
from paceline.federated.ledger import database
from paceline.federated.ledger.ledger import Ledger
from paceline.federated.ledger.payments import RoundWork, RunTerms
from paceline.federated.ledger.verify import check_tail

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.federated.ledger.block import LedgerBlock

_CLIENTS = 50
_OPERATION_MS = 10
_PER_ROUND = 20  # operations from one round to the next
_ROUNDS_PER_RUN = 50
_MOST_PER_BLOCK = 100
_BLOCKS_AGAIN = 3
# Releases choose rounds that are so much older that their delay has ended, whatever the blocks.
_RELEASE_AFTER = (5 * _MOST_PER_BLOCK) // _PER_ROUND
_TERMS = RunTerms(
    budget_per_round=1_000_003, rounds=_ROUNDS_PER_RUN, audit_delay_ms=1000, target_ppm=200_000
)
_GRANT = 10**15
_TOO_MUCH = 10**18
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


class LedgerOperation(NamedTuple):
    """An operation of the stream, for ledger and model alike.

    Attributes:
        kind: of the operation.
        number: its place in the stream.
        client: that it is about.
        run: that it is about.
        round: that it is about.
        amount: in micro-tokens, or the improvement of a run that ends.
        works: of a round.
    """

    kind: str
    number: int
    client: str = ""
    run: str = ""
    round: int = 0
    amount: int = 0
    works: tuple[RoundWork, ...] = ()


def operation(seed: int, number: int) -> LedgerOperation:
    """Return the operation at a place of the stream."""
    rng = random.Random(f"{seed}:{number}")
    rounds, phase = divmod(number, _PER_ROUND)
    run, within = divmod(rounds, _ROUNDS_PER_RUN)
    if phase == 0 and within == 0:
        return LedgerOperation("begin", number, run=f"run-{run}")
    if phase == 1:
        return LedgerOperation("round", number, run=f"run-{run}", round=within, works=_works(rng))
    if phase == _PER_ROUND - 1 and within == _ROUNDS_PER_RUN - 1:
        return LedgerOperation("end", number, run=f"run-{run}", amount=rng.randrange(400_000))
    client = f"client-{rng.randrange(_CLIENTS)}"
    older = rounds - _RELEASE_AFTER - rng.randrange(100)
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    if kind in ("release", "repeat", "rewrite") and older < 0:
        kind = "issue"
    if kind in ("release", "repeat", "rewrite"):
        run, within = divmod(older, _ROUNDS_PER_RUN)
        paid = operation(seed, older * _PER_ROUND + 1)
        works = paid.works if kind != "rewrite" else (*paid.works[1:], _work("client-x", 0.5))
        client = rng.choice(paid.works).client
        return LedgerOperation(kind, number, client, f"run-{run}", within, works=works)
    amount = _TOO_MUCH if kind == "overdraw" else rng.randrange(1, 1000)
    return LedgerOperation(kind, number, client, f"run-{run}", amount=amount)


_KINDS = ("deposit", "issue", "stake", "release", "slash", "overdraw", "repeat", "rewrite")
_WEIGHTS = (25, 15, 15, 25, 2, 5, 8, 5)


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


def write_operations(
    ledger: Ledger, seed: int, first: int, last: int, most_per_block: int = _MOST_PER_BLOCK
) -> Iterator[int]:
    """Write operations in blocks; yield the number of the next operation after each commit."""
    number = first
    while number < last:
        size = random.Random(f"{seed}:block:{number}").randint(1, most_per_block)
        end = min(last, number + size)
        with ledger.block(_now_ms(number)) as block:
            for place in range(number, end):
                apply(block, operation(seed, place))
        number = end
        yield number


def apply(block: LedgerBlock, wanted: LedgerOperation) -> None:
    """Do an operation; those that must be refused have to be.

    Raises:
        AssertionError: an operation was not refused that had to be.
    """
    reference = str(wanted.number)
    try:
        match wanted.kind:
            case "issue":
                block.issue(wanted.client, wanted.amount, reference)
            case "stake":
                block.lock_stake(wanted.client, wanted.amount, reference)
            case "deposit" | "overdraw":
                block.deposit(wanted.run, wanted.client, wanted.amount, reference)
            case "begin":
                block.begin_run(wanted.run, _TERMS)
            case "round" | "repeat" | "rewrite":
                block.pay_round(wanted.run, wanted.round, wanted.works)
            case "release":
                block.release(wanted.run, wanted.round, wanted.client)
            case "slash":
                block.slash(wanted.client, reference, "torture")
            case "end":
                block.end_run(wanted.run, wanted.amount)
    except UsageError:
        if wanted.kind not in ("overdraw", "rewrite", "release"):
            raise
        return
    assert wanted.kind not in ("overdraw", "rewrite"), wanted


class Model:
    """What the operations come to, in dictionaries: written to be obvious, and shares no code."""

    def __init__(self) -> None:
        """Begin as `_found` does."""
        self.balances: Counter[str] = Counter()
        self.held: dict[tuple[str, int, str], int] = {}
        self.settled: dict[tuple[str, int, str], str] = {}
        self.deposits: dict[str, Counter[str]] = {}
        self.transactions = 1
        self.refused = 0
        for client in (f"client-{i}" for i in range(_CLIENTS)):
            self._move("issued", f"client:{client}", _GRANT)
        self._move("client:client-0", "treasury", _GRANT // 2)

    def apply(self, wanted: LedgerOperation) -> None:
        """Do an operation."""
        client = f"client:{wanted.client}"
        budget = f"escrow:budget:{wanted.run}"
        match wanted.kind:
            case "issue":
                self._move("issued", client, wanted.amount)
            case "stake":
                self._move(client, f"escrow:stake:{wanted.client}", wanted.amount)
            case "deposit":
                self._move(client, "treasury", wanted.amount)
                of_run = self.deposits.setdefault(wanted.run, Counter())
                of_run[wanted.client] += wanted.amount
            case "begin":
                self._move("treasury", budget, _TERMS.budget_per_round * _TERMS.rounds)
            case "round":
                self._pay(wanted, budget)
            case "release":
                self._release(wanted)
            case "slash":
                self._slash(wanted.client)
            case "end":
                self._end(wanted, budget)
            case "overdraw" | "rewrite":
                self.refused += 1

    def _move(self, source: str, target: str, amount: int) -> None:
        self.balances[source] -= amount
        self.balances[target] += amount
        assert source == "issued" or self.balances[source] >= 0, source
        self.transactions += 1

    def _pay(self, wanted: LedgerOperation, budget: str) -> None:
        fee = _TERMS.budget_per_round * _TERMS.infrastructure_ppm // 1_000_000
        self._move(budget, "infrastructure", fee)
        pool = _TERMS.budget_per_round - fee
        for client, amount in _shares(
            pool, {work.client: Fraction(work.score) for work in wanted.works}
        ).items():
            self._move(budget, f"escrow:pay:{client}", amount)
            if amount:
                self.held[wanted.run, wanted.round, client] = amount

    def _release(self, wanted: LedgerOperation) -> None:
        key = wanted.run, wanted.round, wanted.client
        if key in self.held:
            self._move(f"escrow:pay:{wanted.client}", f"client:{wanted.client}", self.held.pop(key))
            self.settled[key] = "release"
        elif self.settled.get(key) != "release":
            self.refused += 1

    def _slash(self, client: str) -> None:
        account = f"escrow:stake:{client}"
        self._move(account, "slashed", self.balances[account])
        for key in [key for key in self.held if key[2] == client]:
            self._move(f"escrow:pay:{client}", "slashed", self.held.pop(key))
            self.settled[key] = "slash"

    def _end(self, wanted: LedgerOperation, budget: str) -> None:
        deposits = self.deposits.pop(wanted.run, Counter())
        planned = _TERMS.budget_per_round * _TERMS.rounds
        unspent = self.balances[budget]
        gained = min(Fraction(wanted.amount, _TERMS.target_ppm), Fraction(1))
        covered = min(Fraction(deposits.total(), planned), Fraction(1))
        pool = int(unspent * covered * gained)
        weights = {client: Fraction(amount) for client, amount in deposits.items()}
        for client, amount in _shares(pool, weights).items():
            self._move(budget, f"client:{client}", amount)
        self._move(budget, "treasury", self.balances[budget])


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
        self._most_per_block = max(1, min(_MOST_PER_BLOCK, operations // (2 * max(kills, 1))))

    def run(self, on_progress: Callable[[str], None]) -> LedgerTorture:
        start_s = self._clock.now_s()
        with Ledger.create(self._path, now_ms=0, name="torture") as ledger:
            _found(ledger)
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
            if target is not None:
                os.kill(child, signal.SIGKILL)
            # What it had acknowledged before the signal came is committed too.
            reached = max(reached, *_acknowledged(_drain(reader)), acknowledged)
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
        """Read acknowledgements until the target, and for a random moment longer."""
        deadline_s = self._clock.now_s() + _ATTEMPT_DEADLINE_S
        while target is None or reached < target:
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0 or not select.select([reader], [], [], left_s)[0]:
                self._failures.append(f"no block was committed in {_ATTEMPT_DEADLINE_S:.0f} s")
                return reached
            numbers = _acknowledged(os.read(reader, 1 << 16))
            if not numbers:  # it has ended
                return reached
            reached = max(reached, *numbers)
        moment_s = self._clock.now_s() + self._rng.uniform(0, 0.01)
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


def _found(ledger: Ledger) -> None:
    """Give the clients tokens, and the treasury what budgets are paid from."""
    with ledger.block(0) as block:
        for client in (f"client-{i}" for i in range(_CLIENTS)):
            block.issue(client, _GRANT, "grant")
        block.deposit("all runs", "client-0", _GRANT // 2, "grant")


def _now_ms(number: int) -> int:
    """Return the time of a block that begins with an operation; sometimes the clock goes back."""
    now_ms = 1_000_000 + number * _OPERATION_MS
    return now_ms - (500_000 if number % 7 == 0 else 0)


def _works(rng: random.Random) -> tuple[RoundWork, ...]:
    chosen = rng.sample(range(_CLIENTS), rng.randint(1, 8))
    scores = [rng.choice((0.0, 0.1, 1 / 3, rng.random())) for _ in chosen]
    return tuple(_work(f"client-{i}", score) for i, score in zip(chosen, scores, strict=True))


def _work(client: str, score: float) -> RoundWork:
    return RoundWork(client=client, score=score, update="5f" * 32, samples=7)


def _shares(amount: int, weights: dict[str, Fraction]) -> dict[str, int]:
    """Divide by largest remainder, in fractions."""
    total = sum(weights.values())
    if not total:
        return dict.fromkeys(weights, 0)
    quotas = {client: amount * weight / total for client, weight in weights.items()}
    parts = {client: int(quota) for client, quota in quotas.items()}
    order = sorted(quotas, key=lambda client: (parts[client] - quotas[client], client))
    for client in order[: amount - sum(parts.values())]:
        parts[client] += 1
    return parts


def _acknowledged(data: bytes) -> list[int]:
    """Return the whole numbers in what a pipe gave; writes of 8 bytes are never divided."""
    return [number for (number,) in struct.iter_unpack("<q", data)]


def _drain(reader: int) -> bytes:
    """Return what is left in a pipe whose writer ends."""
    parts = []
    while part := os.read(reader, 1 << 16):
        parts.append(part)
    return b"".join(parts)
