"""The stream of random operations: a function of a seed, for ledger and model alike."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import UsageError
from paceline.federated.ledger.payments import RoundWork, RunTerms

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.federated.ledger.block import LedgerBlock
    from paceline.federated.ledger.ledger import Ledger

CLIENTS = 50
_OPERATION_MS = 10
_PER_ROUND = 20  # operations from one round to the next
_ROUNDS_PER_RUN = 50
MOST_PER_BLOCK = 100
# Releases choose rounds that are so much older that their delay has ended, whatever the blocks.
_RELEASE_AFTER = (5 * MOST_PER_BLOCK) // _PER_ROUND
TERMS = RunTerms(
    budget_per_round=1_000_003, rounds=_ROUNDS_PER_RUN, audit_delay_ms=1000, target_ppm=200_000
)
GRANT = 10**15
_TOO_MUCH = 10**18
_KINDS = ("deposit", "issue", "stake", "release", "slash", "overdraw", "repeat", "rewrite")
_WEIGHTS = (25, 15, 15, 25, 2, 5, 8, 5)


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
    client = f"client-{rng.randrange(CLIENTS)}"
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


def write_operations(
    ledger: Ledger, seed: int, first: int, last: int, most_per_block: int = MOST_PER_BLOCK
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
                block.begin_run(wanted.run, TERMS)
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


def found_ledger(ledger: Ledger) -> None:
    """Give the clients tokens, and the treasury what budgets are paid from."""
    with ledger.block(0) as block:
        for client in (f"client-{i}" for i in range(CLIENTS)):
            block.issue(client, GRANT, "grant")
        block.deposit("all runs", "client-0", GRANT // 2, "grant")


def _now_ms(number: int) -> int:
    """Return the time of a block that begins with an operation; sometimes the clock goes back."""
    now_ms = 1_000_000 + number * _OPERATION_MS
    return now_ms - (500_000 if number % 7 == 0 else 0)


def _works(rng: random.Random) -> tuple[RoundWork, ...]:
    chosen = rng.sample(range(CLIENTS), rng.randint(1, 8))
    scores = [rng.choice((0.0, 0.1, 1 / 3, rng.random())) for _ in chosen]
    return tuple(_work(f"client-{i}", score) for i, score in zip(chosen, scores, strict=True))


def _work(client: str, score: float) -> RoundWork:
    return RoundWork(client=client, score=score, update="5f" * 32, samples=7)
