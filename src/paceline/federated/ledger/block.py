"""A block that is being made: the operations of a ledger, within one transaction of SQLite.

Each operation checks first, then adds its transactions: all of them or, after an error, none, so
that a caller may catch the error and go on with the block. An operation that was done before, in
this block or an earlier one, changes nothing and says so; the same operation with other content is
an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.errors import UsageError
from paceline.federated.ledger import accounts, keys, payments, queries, receipts
from paceline.federated.ledger.database import RowRefused
from paceline.federated.ledger.payments import Payment, RunTerms
from paceline.federated.ledger.transactions import Transaction, text_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from paceline.federated.ledger.database import Connection
    from paceline.federated.ledger.keys import SigningKey
    from paceline.federated.ledger.payments import RoundWork
    from paceline.federated.ledger.transactions import Plain

_INSERT_TRANSACTION = "INSERT INTO transactions VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_POSTING = "INSERT INTO postings VALUES (?, ?, ?, ?)"
_UNSIGNED = "its signature of the work is not valid"


class PaymentReceipt(NamedTuple):
    """What the server owes a client for a round.

    Attributes:
        amount: in micro-tokens.
        reason: why it is 0; empty if it is not.
        signature: of the server, of `receipts.payment_text`; empty without a key.
    """

    amount: int
    reason: str
    signature: str


class LedgerBlock:
    """The operations; made by `Ledger.block`."""

    def __init__(
        self,
        sql: Connection,
        settings: Mapping[str, str],
        key: SigningKey | None,
        number: int,
        at_ms: int,
    ) -> None:
        """Begin a block; the caller has begun the transaction of SQLite.

        Args:
            sql: the writer's connection.
            settings: of the ledger.
            key: of the server; None: nothing is signed.
            number: of the block.
            at_ms: its time.
        """
        self.number = number
        self.at_ms = at_ms
        self.hashes: list[str] = []
        self._sql = sql
        self._path = sql.path
        self._ledger = settings["ledger"]
        self._key = key
        self.last_transaction: int = sql.row("SELECT COALESCE(MAX(id), 0) FROM transactions")[0]
        self.last_posting: int = sql.row("SELECT COALESCE(MAX(id), 0) FROM postings")[0]
        self._added: list[tuple[Transaction, str, str]] = []  # with body and hash, of an operation

    def begin_ledger(self, name: str, public_key: str) -> None:
        """Store what identifies the ledger, so that the chain covers it; `Ledger.create` does."""
        self._add_alone(payments.begin_ledger(name, public_key))

    def issue(self, client: str, amount: int, reference: str) -> bool:
        """Put tokens into circulation; see `payments.issue`. Return whether that is new."""
        transaction = payments.issue(client, amount, reference)
        issued = -queries.balance(self._sql, accounts.ISSUED)
        if issued + amount > accounts.MAX_SUPPLY and not self._stored(transaction):
            raise UsageError(
                f"cannot issue {amount:,} micro-tokens",
                where=str(self._path),
                why=f"{issued:,} are in circulation, and there can be {accounts.MAX_SUPPLY:,}",
                fix="Issue fewer",
            )
        return self._add_alone(transaction)

    def register(self, client: str, public_key: str) -> bool:
        """Bind a client to its Ed25519 key (64 hexadecimal digits); return whether that is new.

        From then on its work is paid only with its valid signature. Register a client before its
        first round: a round that was paid without a signature can then not be repeated as it was.

        Raises:
            UsageError: it is no such key, or the client has another one.
        """
        if len(public_key) != 64 or set(public_key) - set("0123456789abcdef"):
            raise UsageError(
                f"client {client} has no public key {public_key!r:.80}",
                fix="Give the 32 bytes of an Ed25519 key as 64 hexadecimal digits",
            )
        return self._add_alone(payments.register(client, public_key))

    def deposit(self, run: str, client: str, amount: int, reference: str) -> bool:
        """Let a consumer pay for a run in advance; return whether that is new.

        Raises:
            UsageError: the client has too little, or the run has ended.
        """
        transaction = payments.deposit(run, client, amount, reference)
        if not self._stored(transaction):
            self._check_open(run)
        return self._add_alone(transaction)

    def lock_stake(self, client: str, amount: int, reference: str) -> bool:
        """Let a client put up a stake; return whether that is new."""
        return self._add_alone(payments.lock_stake(client, amount, reference))

    def return_stake(self, client: str, amount: int, reference: str) -> bool:
        """Return a client's stake; return whether that is new.

        Raises:
            UsageError: a payment of the client is within its audit delay, or the stake is smaller.
        """
        transaction = payments.return_stake(client, amount, reference)
        if not self._stored(transaction) and queries.payments_of(self._sql, client):
            raise UsageError(
                f"the stake of client {client} stays",
                where=str(self._path),
                why="a payment of the client is within its audit delay",
                fix="Release its payments first",
            )
        return self._add_alone(transaction)

    def begin_run(self, run: str, terms: RunTerms) -> bool:
        """Reserve the budget of a run's rounds from the treasury; return whether that is new.

        Raises:
            UsageError: the treasury has too little, or the run has other terms.
        """
        return self._add_alone(payments.begin_run(run, terms))

    def pay_round(
        self, run: str, number: int, works: Sequence[RoundWork]
    ) -> dict[str, PaymentReceipt]:
        """Pay infrastructure and clients for a round, once; return each client's receipt.

        A client that registered a key, and whose signature of its work is not valid, is paid 0.

        Args:
            run: that has begun and not ended.
            number: of the round, from 0.
            works: of all clients that took part, those that get nothing too.

        Raises:
            UsageError: there is no such run or round, it has ended, or the round was paid
                otherwise.
        """
        terms = self._terms_of_open_run(run, number)
        works = [self._checked(run, number, work) for work in works]
        amounts = payments.round_pay(terms, works)
        made = {}
        release_ms = self.at_ms + terms.audit_delay_ms
        with self._operation():
            is_new = self._add(payments.pay_fee(run, number, terms))
            for work in works:
                receipt = self._receipt(run, number, terms, work, amounts[work.client])
                made[work.client] = receipt
                paid = payments.pay_client(run, number, work, receipt.amount, receipt.signature)
                if self._add(paid) != is_new:
                    raise self._conflict(paid, "the round was paid for other clients")
            if is_new:
                self._sql.execute_many(
                    "INSERT INTO held VALUES (?, ?, ?, ?, ?)",
                    [
                        (run, number, client, receipt.amount, release_ms)
                        for client, receipt in made.items()
                        if receipt.amount
                    ],
                )
        return made

    def release(self, run: str, number: int, client: str) -> bool:
        """Give a client its pay for a round; return whether that is new.

        Raises:
            UsageError: there is no such payment, it is within its audit delay, or it was slashed.
        """
        payment = queries.payment_for(self._sql, run, number, client)
        if payment is None:
            text = queries.body_of(self._sql, payments.settle_key(run, number, client))
            if text and json.loads(text)["kind"] == "release":
                return False
            raise UsageError(
                f"client {client} has no pay for round {number} of run {run} to release",
                where=str(self._path),
                why="it was slashed" if text else "it was paid nothing",
                fix="See `paceline fed ledger statement`",
            )
        if payment.release_ms > self.at_ms:
            raise UsageError(
                f"the pay of client {client} for round {number} of run {run} stays in escrow",
                where=str(self._path),
                why=f"its audit delay ends in {payment.release_ms - self.at_ms:,} ms",
                fix="Release it after that",
            )
        self._settle([payment])
        return True

    def release_due(self) -> list[Payment]:
        """Give all clients the pay whose audit delay has ended; return it."""
        due = queries.due_payments(self._sql, self.at_ms)
        self._settle(due)
        return due

    def slash(self, client: str, reference: str, reason: str, evidence: str = "") -> int:
        """Take a client's stake, and all its pay that is within its audit delay.

        Args:
            client: whose misbehaviour is proven.
            reference: of the case; the same one twice is one case, also if more was paid since.
            reason: in words; the client's statement shows it.
            evidence: a hash of what proves it; may be empty.

        Returns:
            Micro-tokens that were taken now; 0 if the case was closed before.
        """
        stake = queries.balance(self._sql, accounts.stake(client))
        note: dict[str, Plain] = {"reason": reason, "evidence": evidence}
        case = payments.slash_stake(client, stake, reference, note)
        if before := queries.body_of(self._sql, case.key):
            if json.loads(before)["note"] != note:
                raise self._conflict(case, "the case was closed for another reason")
            return 0
        taken = queries.payments_of(self._sql, client)
        with self._operation():
            self._add(case)
            for payment in taken:
                self._add(payments.slash_pay(payment, note))
            self._forget(taken)
        return stake + sum(payment.amount for payment in taken)

    def end_run(self, run: str, improvement_ppm: int) -> bool:
        """Reimburse a run's consumers, return the rest to the treasury; whether that is new.

        Args:
            run: that has begun.
            improvement_ppm: of the model's utility; see `payments.improvement_ppm`.

        Raises:
            UsageError: there is no such run, or it ended with another improvement.
        """
        terms = self._terms(run)
        if before := queries.body_of(self._sql, ("end", run)):
            if json.loads(before)["note"]["utility_improvement_ppm"] != improvement_ppm:
                why = "the run ended with another improvement"
                ended = Transaction(kind="end", key=("end", run), postings=(), note={})
                raise self._conflict(ended, why)
            return False
        if type(improvement_ppm) is not int or improvement_ppm < 0:
            raise UsageError(
                f"a run cannot end with an improvement of {improvement_ppm!r}",
                fix="Give millionths, an integer of at least 0: payments.improvement_ppm",
            )
        unspent = queries.balance(self._sql, accounts.budget(run))
        with self._operation():
            deposits = queries.deposits(self._sql, run)
            for transaction in payments.end_run(run, terms, unspent, deposits, improvement_ppm):
                self._add(transaction)
        return True

    def _settle(self, due: Sequence[Payment]) -> None:
        with self._operation():
            for payment in due:
                self._add(payments.release(payment))
            self._forget(due)

    def _forget(self, settled: Sequence[Payment]) -> None:
        self._sql.execute_many(
            "DELETE FROM held WHERE run = ? AND round = ? AND client = ?",
            [(payment.run, payment.round, payment.client) for payment in settled],
        )

    def _checked(self, run: str, number: int, work: RoundWork) -> RoundWork:
        """Return the work, unpaid if its client has a key and did not sign it.

        A signature that is not known to be valid is not stored: whatever it is, it proves nothing.
        """
        body = queries.body_of(self._sql, ("client", work.client))
        if body is None or not work.update:  # none came: there is nothing to sign
            return dataclasses.replace(work, signature="")
        public_key = json.loads(body)["note"]["public_key"]
        text = receipts.work_text(self._ledger, run, number, work)
        if keys.is_signed(public_key, work.signature, text):
            return work
        return dataclasses.replace(work, score=0.0, signature="", reason=_UNSIGNED)

    def _receipt(
        self, run: str, number: int, terms: RunTerms, work: RoundWork, amount: int
    ) -> PaymentReceipt:
        signature = ""
        if self._key is not None:
            delay_ms = terms.audit_delay_ms
            text = receipts.payment_text(self._ledger, run, number, work, amount, delay_ms)
            signature = self._key.sign(text)
        return PaymentReceipt(amount, "" if amount else work.reason, signature)

    def _terms(self, run: str) -> RunTerms:
        body = queries.body_of(self._sql, ("run", run))
        if body is None:
            raise UsageError(
                f"run {run} has not begun",
                where=str(self._path),
                why="its budget is fixed before its first round",
                fix="Call begin_run first",
            )
        return _terms_in(body)

    def _terms_of_open_run(self, run: str, number: int) -> RunTerms:
        terms = self._terms(run)
        if type(number) is not int or not 0 <= number < terms.rounds:
            raise UsageError(
                f"run {run} pays no round {number!r}",
                where=str(self._path),
                why=f"its terms are {terms.rounds:,} rounds, numbered from 0",
                fix="Begin another run",
            )
        was_paid = queries.body_of(self._sql, ("fee", run, number)) is not None
        if not was_paid:  # what was paid may be repeated after the end
            self._check_open(run)
        return terms

    def _check_open(self, run: str) -> None:
        if queries.body_of(self._sql, ("end", run)) is not None:
            raise UsageError(
                f"run {run} has ended",
                where=str(self._path),
                why="what it did not spend was reimbursed",
                fix="Begin another run",
            )

    def _stored(self, transaction: Transaction) -> bool:
        return queries.body_of(self._sql, transaction.key) is not None

    def _add_alone(self, transaction: Transaction) -> bool:
        with self._operation():
            return self._add(transaction)

    @contextlib.contextmanager
    def _operation(self) -> Iterator[None]:
        """Let the transactions that are added inside happen wholly or not at all."""
        self._added = []
        self._sql.execute("SAVEPOINT operation")
        try:
            yield
            self._store()
        except BaseException:
            if self._sql.sql.in_transaction:  # a full disk may have ended it
                self._sql.execute("ROLLBACK TO operation")
                self._sql.execute("RELEASE operation")
            raise
        self._sql.execute("RELEASE operation")
        self.hashes += [hashed for _, _, hashed in self._added]
        self.last_transaction += len(self._added)
        self.last_posting += sum(len(added.postings) for added, _, _ in self._added)

    def _add(self, transaction: Transaction) -> bool:
        """Add a transaction to the operation; return False if the ledger has it already.

        Raises:
            UsageError: the ledger has another one with this key.
        """
        body = transaction.body()
        before = queries.body_of(self._sql, transaction.key)
        if before is not None:
            if before != body:
                raise self._conflict(transaction, "it is there with other content")
            return False
        self._added.append((transaction, body, text_hash(body)))
        return True

    def _store(self) -> None:
        """Write the operation's transactions.

        Raises:
            UsageError: an account has too little.
        """
        rows = enumerate(self._added, self.last_transaction + 1)
        transactions: list[tuple[str | int, ...]] = []
        postings: list[tuple[str | int, ...]] = []
        for row, (transaction, body, hashed) in rows:
            kind = transaction.kind
            transactions.append((row, self.number, transaction.key_text, kind, body, hashed))
            first = self.last_posting + len(postings) + 1
            postings += [
                (first + i, row, *posting) for i, posting in enumerate(transaction.postings)
            ]
        try:
            self._sql.execute_many(_INSERT_TRANSACTION, transactions)
            self._sql.execute_many(_INSERT_POSTING, postings)
        except RowRefused as refusal:
            self._sql.execute("ROLLBACK TO operation")
            raise self._shortage() or refusal from refusal

    def _shortage(self) -> UsageError | None:
        """Return which account has too little for the operation, if that is why it was refused."""
        balances: dict[str, int] = {}
        for transaction, _, _ in self._added:
            for account, amount in transaction.postings:
                balance = balances.get(account, queries.balance(self._sql, account))
                balances[account] = balance + amount
                if balances[account] < 0 and account != accounts.ISSUED:
                    return UsageError(
                        f"{account} has {balance:,} micro-tokens, and {-amount:,} are needed",
                        where=f"{self._path}: {transaction.key_text}",
                        why="no account falls below zero",
                        fix="Move tokens to it first, or move fewer",
                    )
        return None

    def _conflict(self, transaction: Transaction, why: str) -> UsageError:
        return UsageError(
            f"the ledger has {transaction.key_text} already",
            where=str(self._path),
            why=why,
            fix="Repeat it as it was, or give a new round or reference",
        )


@functools.lru_cache(maxsize=64)
def _terms_in(body: str) -> RunTerms:
    """Return the terms in the body of the transaction that began a run."""
    return RunTerms.from_json(json.loads(body)["note"]["terms"])
