"""Whatever is done in whatever order: tokens are conserved, none below zero, all exactly once."""

import tempfile
from fractions import Fraction
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.ledgers import UPDATE

from paceline.core.errors import UsageError
from paceline.federated.ledger import Ledger, RoundWork, RunTerms, payments
from paceline.federated.ledger.division import divide

NAMES = st.sampled_from(["a", "b", "c", 'quoted"/\\', "zoë"])
RUNS = st.sampled_from(["r", "r/2"])
REFERENCES = st.sampled_from(["1", "2"])
AMOUNTS = st.integers(1, 3000)
SCORES = st.one_of(st.just(0.0), st.floats(0, 1e300), st.floats(1e-320, 1e-300))


@given(st.integers(0, 2**62), st.dictionaries(NAMES, SCORES))
def test_a_division_is_exact_fair_and_a_function_of_the_scores_alone(amount, scores):
    parts = divide(amount, scores)
    total = sum(map(Fraction, scores.values()))
    assert sum(parts.values()) == (amount if total else 0)
    for client, score in scores.items():
        quota = amount * Fraction(score) / total if total else Fraction(0)
        assert quota - 1 < parts[client] < quota + 1
        assert score or not parts[client]
        for other, least in scores.items():
            assert score < least or parts[client] >= parts[other] - (score == least)
    assert divide(amount, dict(reversed(scores.items()))) == parts


@given(
    st.integers(1, 10**9),
    st.integers(1, 50),
    st.integers(1, 10**7),
    st.fractions(0, 1),
    st.dictionaries(NAMES, st.integers(0, 10**12), max_size=4),
    st.integers(0, 10**8),
)
def test_a_refund_is_within_what_was_not_spent_and_within_each_deposit(
    per_round, rounds, target, saved, deposits, improvement
):
    terms = RunTerms(budget_per_round=per_round, rounds=rounds, target_ppm=target)
    unspent = int(terms.budget * saved)
    *refunds, end = payments.end_run("r", terms, unspent, deposits, improvement)
    paid = {refund.key[2]: refund.postings[1].amount for refund in refunds if refund.postings}
    rest = end.postings[1].amount if end.postings else 0
    assert sum(paid.values()) + rest == unspent
    for client, amount in paid.items():
        assert amount <= deposits[client]
    # More of either never reimburses less.
    less = payments.reimbursement(terms, unspent // 2, sum(deposits.values()), improvement // 2)
    assert less <= payments.reimbursement(terms, unspent, sum(deposits.values()), improvement)


def operations():
    """Return a strategy of operations: a method of a block, and its arguments."""
    works = st.dictionaries(NAMES, SCORES, max_size=4).map(
        lambda scores: [
            RoundWork(client=name, score=score, update=UPDATE, samples=1)
            for name, score in scores.items()
        ]
    )
    terms = st.builds(
        RunTerms,
        budget_per_round=AMOUNTS,
        rounds=st.integers(1, 3),
        infrastructure_ppm=st.integers(0, 1_000_000),
        audit_delay_ms=st.integers(0, 30),
    )
    made = {
        "issue": (NAMES, AMOUNTS, REFERENCES),
        "deposit": (RUNS, NAMES, AMOUNTS, REFERENCES),
        "lock_stake": (NAMES, AMOUNTS, REFERENCES),
        "return_stake": (NAMES, AMOUNTS, REFERENCES),
        "begin_run": (RUNS, terms),
        "pay_round": (RUNS, st.integers(0, 2), works),
        "release": (RUNS, st.integers(0, 2), NAMES),
        "release_due": (),
        "slash": (NAMES, REFERENCES, st.just("reason")),
        "end_run": (RUNS, st.integers(0, 200_000)),
    }
    return st.one_of(
        st.tuples(st.just(name), st.tuples(*arguments)) for name, arguments in made.items()
    )


def _do(ledger, batch, now_ms):
    """Do a block of operations; return those that were accepted."""
    accepted = []
    with ledger.block(now_ms) as block:
        for name, arguments in batch:
            try:
                getattr(block, name)(*arguments)
                accepted.append((name, arguments))
            except UsageError:
                pass
    return accepted


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.lists(operations(), max_size=8), st.integers(0, 100)), max_size=8),
)
def test_any_operations_conserve_tokens_and_happen_once(batches):
    # What makes the random ones succeed often enough.
    opening = [("issue", ("a", 10**6, "0")), ("deposit", ("r", "a", 10**5, "0"))]
    with tempfile.TemporaryDirectory() as folder:
        with Ledger.create(Path(folder) / "ledger.db", now_ms=0) as ledger:
            for batch, now_ms in [(opening, 0), *batches]:
                accepted = _do(ledger, batch, now_ms)
                before = ledger.balances(), ledger.held(), ledger.head()
                assert sum(before[0].values()) == 0
                assert all(amount >= 0 for name, amount in before[0].items() if name != "issued")
                # A caller that does not know whether it was done does it again, in any order.
                repeated = [once for once in reversed(accepted) if once[0] != "release_due"]
                assert len(_do(ledger, repeated, now_ms)) == len(repeated)
                assert (ledger.balances(), ledger.held(), ledger.head()) == before
            report = ledger.verify()
        assert report.ok, report.damage.text()
