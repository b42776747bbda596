"""What holds of forecasts against imbalance for any measured steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from support.examples import examples

from paceline.perf.imbalance.maxima import slowest
from paceline.perf.imbalance.remedies import equal_shares

SECONDS = st.floats(1e-4, 10.0)


@given(
    sharable_s=arrays(float, st.tuples(st.integers(2, 9), st.integers(1, 4)), elements=SECONDS),
    data=st.data(),
)
def test_shares_add_up_keep_their_bounds_and_never_make_the_last_rank_later(sharable_s, data):
    fixed_s = data.draw(arrays(float, sharable_s.shape, elements=st.floats(0.0, 5.0)))
    shares, ready_s = equal_shares(sharable_s, fixed_s, 0.25, 3.0)
    np.testing.assert_allclose(shares.sum(axis=0), len(shares), rtol=1e-6)
    assert (shares >= 0.25).all()
    assert (shares <= 3.0).all()
    assert (ready_s <= (fixed_s + sharable_s).max(axis=0) * (1 + 1e-6)).all()
    free = (shares > 0.2501) & (shares < 2.9999)  # ranks that no bound holds are ready together
    times_s = np.where(free, fixed_s + shares * sharable_s, np.nan)
    for column in times_s.T:
        ready = column[~np.isnan(column)]
        if len(ready):
            assert np.ptp(ready) <= 1e-4 * ready.max()


@given(values=st.lists(arrays(float, 12, elements=SECONDS), min_size=1, max_size=4))
@settings(max_examples=examples(50))
def test_of_more_nodes_the_slowest_is_slower_up_to_what_was_measured(values):
    copies = [1, 2, 8, 64, 4096, 1e6]
    found = slowest(values, copies)
    assert (np.diff(found.mean_s) >= -1e-9).all()
    assert (np.diff(found.p95_s) >= 0).all()
    largest = max(node.max() for node in values)
    assert found.mean_s[-1] == pytest.approx(largest, rel=1e-3)
    assert (found.mean_s <= largest * (1 + 1e-9)).all()
    combined = np.zeros(1)
    for node in values:  # every combination of the nodes' steps is as likely as any other
        combined = np.maximum.outer(combined, node).ravel()
    assert found.mean_s[0] == pytest.approx(combined.mean(), rel=1e-6)


@given(values=arrays(float, 200, elements=SECONDS), count=st.integers(1, 50))
@settings(max_examples=examples(30))
def test_the_fitted_tail_is_that_of_the_values_where_they_are(values, count):
    """With few nodes the tail hardly counts; with many it only makes the slowest slower."""
    measured = slowest([values], [1, count])
    fitted = slowest([values], [1, count], "pareto")
    assert fitted.mean_s[0] == pytest.approx(measured.mean_s[0], rel=0.05)
    assert fitted.mean_s[1] <= 40 * values.max()
