"""What deposits, rounds, audits and the end of a run mean in postings."""

import math

import pytest

from paceline.core.errors import ConfigError, UsageError
from paceline.federated.ledger import RoundWork, RunTerms, improvement_ppm, payments
from paceline.federated.ledger.division import divide
from paceline.federated.ledger.transactions import canonical_json, parse_body

TERMS = RunTerms(budget_per_round=1000, rounds=4, infrastructure_ppm=100_000, target_ppm=200_000)
UPDATE = "0f" * 32


def _work(client, score):
    return RoundWork(client=client, score=score, update=UPDATE, samples=10)


def test_a_rounds_budget_is_divided_by_score_after_the_fee():
    assert TERMS.fee == 100
    works = [_work("a", 2.0), _work("b", 1.0), _work("free rider", 0.0)]
    assert payments.round_pay(TERMS, works) == {"a": 600, "b": 300, "free rider": 0}


def test_nobody_is_paid_where_all_scores_are_zero():
    assert payments.round_pay(TERMS, [_work("a", 0.0), _work("b", 0.0)]) == {"a": 0, "b": 0}
    assert payments.round_pay(TERMS, []) == {}


def test_samples_that_a_client_claims_do_not_change_its_pay():
    modest = RoundWork(client="a", score=1.0, update=UPDATE, samples=1)
    boasting = RoundWork(client="b", score=1.0, update=UPDATE, samples=10**9)
    assert payments.round_pay(TERMS, [modest, boasting]) == {"a": 450, "b": 450}


def test_the_units_left_go_to_the_largest_remainders():
    assert divide(10, {"c": 1.0, "b": 1.0, "a": 1.0}) == {"a": 4, "b": 3, "c": 3}
    assert divide(7, {"a": 0.5, "b": 0.25, "c": 0.25}) == {"a": 3, "b": 2, "c": 2}


@pytest.mark.parametrize("score", [-1.0, math.nan, math.inf])
def test_a_score_that_cannot_be_is_refused_by_name(score):
    with pytest.raises(UsageError, match="client b"):
        divide(10, {"a": 1.0, "b": score})


def test_a_client_occurs_once_in_a_round():
    with pytest.raises(UsageError, match="client a occurs twice"):
        payments.round_pay(TERMS, [_work("a", 1.0), _work("a", 2.0)])


@pytest.mark.parametrize(
    ("unspent", "deposits", "improvement", "expected"),
    [
        (4000, 4000, 200_000, 4000),  # nothing was spent, the target was reached
        (1000, 4000, 200_000, 1000),  # reduction ratio 1/4
        (1000, 4000, 100_000, 500),  # half of the target
        (1000, 4000, 900_000, 1000),  # beyond the target
        (1000, 1000, 200_000, 250),  # consumers paid a quarter of the budget
        (1000, 9000, 200_000, 1000),  # or more than all of it
        (0, 4000, 200_000, 0),  # all was spent
        (1000, 4000, 0, 0),  # the model is no better
    ],
)
def test_consumers_are_reimbursed_by_both_ratios(unspent, deposits, improvement, expected):
    assert payments.reimbursement(TERMS, unspent, deposits, improvement) == expected


def test_the_end_of_a_run_reimburses_by_deposit_and_keeps_the_rest():
    ending = payments.end_run("r", TERMS, 1000, {"a": 3000, "b": 1000}, 100_000)
    moved = [posting for transaction in ending for posting in transaction.postings]
    assert ("client:a", 375) in moved
    assert ("client:b", 125) in moved
    assert ("treasury", 500) in moved
    assert ending[-1].note == {"token_reduction_ppm": 250_000, "utility_improvement_ppm": 100_000}


def test_improvement_is_a_ratio_and_never_below_zero():
    assert improvement_ppm(0.1, 0.8) == 7_000_000
    assert improvement_ppm(0.5, 0.4) == 0
    for before, after in ((0.0, 1.0), (math.nan, 1.0), (0.5, math.inf), (-1.0, 1.0)):
        with pytest.raises(UsageError, match="no ratio"):
            improvement_ppm(before, after)


@pytest.mark.parametrize(
    "fields",
    [
        {"budget_per_round": 0},
        {"budget_per_round": 1.5},
        {"rounds": 0},
        {"infrastructure_ppm": 1_000_001},
        {"audit_delay_ms": -1},
        {"target_ppm": 0},
    ],
)
def test_terms_that_cannot_be_are_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        RunTerms(**{"budget_per_round": 10, "rounds": 1, **fields})


def test_a_budget_beyond_the_supply_is_refused():
    with pytest.raises(UsageError, match="budget of a run"):
        RunTerms(budget_per_round=2**61, rounds=4)


@pytest.mark.parametrize("update", ["", "ab", "G" * 64, "AB" * 32])
def test_the_hash_of_an_update_is_checked(update):
    with pytest.raises(UsageError, match="client a"):
        RoundWork(client="a", score=1.0, update=update, samples=1)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\ud800"])
def test_names_are_printable(name):
    with pytest.raises(UsageError, match="a client is no name"):
        _work(name, 1.0)


def test_a_body_is_canonical_and_round_trips():
    paid = payments.pay_client("r", 3, _work("zoë", 1.0), 7)
    assert parse_body(paid.body()) == paid
    assert paid.body().isascii()
    assert canonical_json(["pay", "r", 3, "zoë"]) == paid.key_text


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "{}",
        "not JSON",
        '{"key":["x"],"kind":"x","note":{},"postings":[["a",1]]}',
        '{"key":["x"],"kind":"x","note":{},"postings":[["a",1],["a",-1]]}',
        '{"key":["x"],"kind":"x","note":{},"postings":[["a",0]]}',
        '{"key":["x"],"kind":"x","note":{},"postings":[["a","1"]]}',
    ],
)
def test_a_body_that_is_no_transaction_is_refused(body):
    with pytest.raises(ValueError):  # noqa: PT011  # the texts differ
        parse_body(body)
