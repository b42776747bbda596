"""What deposits, rounds, audits and the end of a run mean in postings: pure functions.

::

    consumers   issued -> client:C -> treasury                        issue, deposit
    a run       treasury -> escrow:budget:RUN                         begin_run
    a round     escrow:budget:RUN -> infrastructure                   fee, at once
                escrow:budget:RUN -> escrow:pay:C                     pay, by score
    its audit   escrow:pay:C -> client:C                              release, after the delay
                escrow:pay:C -> slashed                               slash, in place of a release
    the end     escrow:budget:RUN -> client:C, treasury               reimburse, close

Published (TIFF, IEEE CLOUD 2022, by its abstract): participants are providers and consumers, tokens
pay providers and infrastructure, consumers are reimbursed by a token reduction ratio and a utility
improvement ratio, low quality earns less. Its formulas are not public. Reconstructed here:

    fee                  f = b x infrastructure share        b: budget of the round
    pay of a provider    = (b - f) s / S                     s: its score, S: of all
    token reduction      r = 1 - spent / budgeted                          0: all was spent
    utility improvement  u = (utility after - before) / before, from 0 on
    reimbursed in all    = (budgeted - spent) x min(1, deposits / budgeted) x min(1, u / target)
                         = deposits x r x min(1, u / target)  where deposits <= budgeted

in proportion to deposits. If nothing was saved (r = 0) or gained (u = 0), nothing is reimbursed; at
the target, all that was not spent. The rest stays in the treasury, for the next run. Ours as well,
and not published: escrow and audit delay (0 pays at once, as published), stakes, slashing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, UsageError
from paceline.core.record import Record
from paceline.federated.ledger import accounts
from paceline.federated.ledger.accounts import check_amount, check_name
from paceline.federated.ledger.division import divide
from paceline.federated.ledger.transactions import Posting, Transaction

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.federated.ledger.transactions import Plain

PPM = 1_000_000
_MAX_ROUNDS = 10**9
_HASH_DIGITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class RunTerms(Record):
    """What a run pays, fixed before its first round.

    Attributes:
        budget_per_round: in micro-tokens, for providers and infrastructure.
        rounds: at most so many are paid; they are numbered from 0.
        infrastructure_ppm: the fee's share of a round's budget, in millionths.
        audit_delay_ms: between a round's payment and its release.
        target_ppm: utility improvement, in millionths, at which all that was not spent is
            reimbursed.
    """

    budget_per_round: int
    rounds: int
    infrastructure_ppm: int = 100_000
    audit_delay_ms: int = 86_400_000
    target_ppm: int = 100_000

    def __post_init__(self) -> None:
        fields = (
            ("budget_per_round", 1, accounts.MAX_SUPPLY),
            ("rounds", 1, _MAX_ROUNDS),
            ("infrastructure_ppm", 0, PPM),
            ("audit_delay_ms", 0, 10**12),
            ("target_ppm", 1, 10**12),
        )
        for name, low, high in fields:
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(
                    f"{name} of a run's terms cannot be {value!r}",
                    fix=f"Give an integer from {low:,} to {high:,}",
                )
        check_amount(self.budget, "the budget of a run")

    @property
    def budget(self) -> int:
        """Of all rounds, in micro-tokens."""
        return self.budget_per_round * self.rounds

    @property
    def fee(self) -> int:
        """Of a round, for the infrastructure, in micro-tokens; rounded down."""
        return self.budget_per_round * self.infrastructure_ppm // PPM


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundWork:
    """What a client did in a round.

    Attributes:
        client: its id.
        score: of its contribution, at least 0; pay is in proportion to it.
        update: SHA-256 of its update, 64 hexadecimal digits; empty if none came that could be used.
        samples: that it claims to have trained on; recorded, never paid for.
        signature: its signature of `receipts.work_text`; empty if it has no key.
        reason: why it is unpaid, if its score is 0.
    """

    client: str
    score: float
    update: str
    samples: int
    signature: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        check_name(self.client, "a client")
        digits = 0 if self.score == 0 and not self.update else _HASH_DIGITS
        if len(self.update) != digits or set(self.update) - set("0123456789abcdef"):
            raise UsageError(
                f"the hash of the update of client {self.client} is {self.update!r:.80}",
                fix="Give the SHA-256 of the update's bytes as 64 hexadecimal digits",
            )
        if type(self.samples) is not int or not 0 <= self.samples <= accounts.MAX_SUPPLY:
            raise UsageError(
                f"client {self.client} claims {self.samples!r:.80} samples",
                fix="Give an integer of at least 0",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Payment:
    """The pay of a client for a round, in escrow.

    Attributes:
        amount: in micro-tokens.
        release_ms: from then on it may be released.
    """

    run: str
    round: int
    client: str
    amount: int
    release_ms: int


def move(
    kind: str,
    key: tuple[str | int, ...],
    source: str,
    target: str,
    amount: int,
    note: dict[str, Plain] | None = None,
) -> Transaction:
    """Return the transaction that moves an amount, of 0 or more, from one account to another."""
    postings = (Posting(source, -amount), Posting(target, amount)) if amount else ()
    return Transaction(kind=kind, key=key, postings=postings, note=note or {})


def begin_ledger(name: str, public_key: str) -> Transaction:
    """Return the first transaction of a ledger, by which the chain covers its name and key."""
    note: dict[str, Plain] = {"ledger": name, "public_key": public_key}
    return Transaction(kind="ledger", key=("ledger",), postings=(), note=note)


def issue(client: str, amount: int, reference: str) -> Transaction:
    """Return the transaction that puts tokens into circulation.

    Args:
        client: who gets them.
        amount: in micro-tokens.
        reference: of the sale or grant that they stand for; the same one twice is one issue.
    """
    key = ("issue", check_name(client, "a client"), check_name(reference, "a reference"))
    check_amount(amount, "an issue")
    return move("issue", key, accounts.ISSUED, accounts.spendable(client), amount)


def deposit(run: str, client: str, amount: int, reference: str) -> Transaction:
    """Return the transaction by which a consumer pays for a run in advance."""
    check_name(run, "a run")
    key = ("deposit", run, check_name(client, "a client"), check_name(reference, "a reference"))
    check_amount(amount, "a deposit")
    return move("deposit", key, accounts.spendable(client), accounts.TREASURY, amount)


def lock_stake(client: str, amount: int, reference: str) -> Transaction:
    """Return the transaction by which a client puts up a stake."""
    key = ("stake", check_name(client, "a client"), check_name(reference, "a reference"))
    check_amount(amount, "a stake")
    return move("stake", key, accounts.spendable(client), accounts.stake(client), amount)


def return_stake(client: str, amount: int, reference: str) -> Transaction:
    """Return the transaction by which a client gets its stake back."""
    key = ("unstake", check_name(client, "a client"), check_name(reference, "a reference"))
    check_amount(amount, "a stake")
    return move("unstake", key, accounts.stake(client), accounts.spendable(client), amount)


def register(client: str, public_key: str) -> Transaction:
    """Return the transaction that binds a client to its public key, once and for all."""
    key = ("client", check_name(client, "a client"))
    return Transaction(kind="client", key=key, postings=(), note={"public_key": public_key})


def begin_run(run: str, terms: RunTerms) -> Transaction:
    """Return the transaction that reserves the budget of all rounds."""
    note: dict[str, Plain] = {"terms": terms.to_json()}
    key = ("run", check_name(run, "a run"))
    return move("run", key, accounts.TREASURY, accounts.budget(run), terms.budget, note)


def round_pay(terms: RunTerms, works: Sequence[RoundWork]) -> dict[str, int]:
    """Return what each client earns in a round, in micro-tokens.

    Raises:
        UsageError: a client occurs twice, or a score is negative or not finite.
    """
    scores = {work.client: work.score for work in works}
    if len(scores) < len(works):
        clients = [work.client for work in works]
        twice = next(client for client in clients if clients.count(client) > 1)
        raise UsageError(
            f"client {twice} occurs twice in a round",
            why="a client is paid once for a round",
            fix="Give its work once",
        )
    return divide(terms.budget_per_round - terms.fee, scores)


def pay_fee(run: str, number: int, terms: RunTerms) -> Transaction:
    """Return the transaction that pays the infrastructure for a round.

    It exists for every paid round, also with a fee of 0: by its key a round is paid once.
    """
    source, target = accounts.budget(run), accounts.INFRASTRUCTURE
    return move("fee", ("fee", run, number), source, target, terms.fee)


def pay_client(
    run: str, number: int, work: RoundWork, amount: int, server_signature: str = ""
) -> Transaction:
    """Return the transaction that puts a client's pay for a round into escrow.

    Args:
        run: name of the run.
        number: of the round, from 0.
        work: of the client.
        amount: in micro-tokens; 0 is recorded too, with the reason.
        server_signature: of `receipts.payment_text`; empty without a key.
    """
    note: dict[str, Plain] = {"update": work.update, "samples": work.samples}
    extras = {"client": work.signature, "server": server_signature, "reason": work.reason}
    note.update({name: text for name, text in extras.items() if text})
    key = ("pay", run, number, work.client)
    return move("pay", key, accounts.budget(run), accounts.held_pay(work.client), amount, note)


def settle_key(run: str, number: int, client: str) -> tuple[str | int, ...]:
    """Return the key that release and slash of a payment share, so that one of them happens."""
    return ("settle", run, number, client)


def release(payment: Payment) -> Transaction:
    """Return the transaction that gives a client its pay."""
    source, target = accounts.held_pay(payment.client), accounts.spendable(payment.client)
    key = settle_key(payment.run, payment.round, payment.client)
    return move("release", key, source, target, payment.amount)


def slash_pay(payment: Payment, note: dict[str, Plain]) -> Transaction:
    """Return the transaction that takes a payment back within its audit delay."""
    key = settle_key(payment.run, payment.round, payment.client)
    source = accounts.held_pay(payment.client)
    return move("slash", key, source, accounts.SLASHED, payment.amount, note)


def slash_stake(client: str, amount: int, reference: str, note: dict[str, Plain]) -> Transaction:
    """Return the transaction that takes a client's stake."""
    key = ("slash stake", client, check_name(reference, "a reference"))
    return move("slash stake", key, accounts.stake(client), accounts.SLASHED, amount, note)


def improvement_ppm(before: float, after: float) -> int:
    """Return the utility improvement ratio in millionths, at least 0.

    Args:
        before: utility of the model before the run, for example accuracy, above 0.
        after: of the model after it.

    >>> improvement_ppm(0.5, 0.6)
    200000
    """
    if not (0 < before < float("inf") and 0 <= after < float("inf")):
        raise UsageError(
            f"utility before {before!r} and after {after!r} have no ratio",
            fix="Give finite utilities, the one before above 0: for example the accuracy of chance",
        )
    return min(max(0, round((after - before) / before * PPM)), 10**15)


def reimbursement(terms: RunTerms, unspent: int, deposits: int, improvement: int) -> int:
    """Return what consumers are reimbursed in all, in micro-tokens; rounded down.

    Args:
        terms: of the run.
        unspent: of its budget, in micro-tokens.
        deposits: of all consumers for this run, in micro-tokens.
        improvement: utility improvement ratio in millionths.

    Limits: at most `unspent`, and at most `deposits`.
    """
    covered = min(deposits, terms.budget)
    gained = min(improvement, terms.target_ppm)
    return unspent * covered * gained // (terms.budget * terms.target_ppm)


def end_run(
    run: str, terms: RunTerms, unspent: int, deposits: Mapping[str, int], improvement: int
) -> list[Transaction]:
    """Return the transactions that reimburse consumers and close a run.

    Args:
        run: name of the run.
        terms: of the run.
        unspent: of its budget, in micro-tokens.
        deposits: for this run, by consumer, in micro-tokens.
        improvement: utility improvement ratio in millionths.
    """
    total = reimbursement(terms, unspent, sum(deposits.values()), improvement)
    parts = divide(total, deposits)
    source = accounts.budget(run)
    note: dict[str, Plain] = {
        "token_reduction_ppm": unspent * PPM // terms.budget,
        "utility_improvement_ppm": improvement,
    }
    transactions = [
        move("reimburse", ("reimburse", run, client), source, accounts.spendable(client), part)
        for client, part in parts.items()
    ]
    rest = unspent - sum(parts.values())
    return [*transactions, move("end", ("end", run), source, accounts.TREASURY, rest, note)]
