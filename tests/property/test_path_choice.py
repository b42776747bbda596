"""The choice between one flat group and two levels follows the measured curves, at every size."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from paceline.collectives.choice import FLAT, TWO_LEVEL, Crossover, PathChoice, measured_crossovers
from paceline.core.machine import CollectiveCost, CollectivePoint, Quantity

SIZES = st.lists(st.integers(0, 1 << 26), min_size=1, max_size=7, unique=True).map(sorted)
SECONDS = st.floats(1e-6, 10.0)


def cost(algorithm, points, *, operation="all_reduce", ranks=4, hosts=2):
    return CollectiveCost(
        backend="gloo" if algorithm == FLAT else "paceline",
        operation=operation,
        algorithm=algorithm,
        ranks=ranks,
        hosts=hosts,
        level="network",
        points=tuple(
            CollectivePoint(bytes=float(size), seconds=Quantity(value=seconds, source="probe"))
            for size, seconds in points
        ),
    )


@st.composite
def curves(draw):
    """Return a flat and a two-level curve; seconds rise with bytes, as the probe sees to."""
    costs = []
    for algorithm in (FLAT, TWO_LEVEL):
        sizes = draw(SIZES)
        seconds = sorted(draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes))))
        costs.append(cost(algorithm, zip(sizes, seconds, strict=True)))
    return costs


@given(curves(), st.integers(0, 1 << 30))
def test_the_way_taken_is_never_slower_than_the_other_one_by_the_table(both, size):
    flat, two_level = both
    crossover = Crossover.between(flat, two_level)
    chosen, other = (two_level, flat) if crossover.takes_two_levels(size) else (flat, two_level)
    chosen_s, other_s = chosen.seconds_at(size), other.seconds_at(size)
    assert chosen_s <= other_s * (1 + 1e-6)  # the size of a crossing is rounded


@given(curves())
def test_sizes_rise_and_survive_the_store(both):
    crossover = Crossover.between(*both)
    assert all(low <= high for low, high in itertools.pairwise(crossover.sizes_bytes))
    choice = PathChoice(measured={"all_reduce": crossover}, otherwise=crossover)
    assert PathChoice.from_text(choice.to_text()) == choice


@given(curves())
def test_between_two_crossings_the_choice_does_not_change(both):
    crossover = Crossover.between(*both)
    ends = (0.0, *crossover.sizes_bytes, 2.0**40)
    for low, high in itertools.pairwise(ends):
        inside = {crossover.takes_two_levels(low + (high - low) * part) for part in (0.0, 0.5)}
        assert len(inside) == 1 or high - low < 1


def test_equal_times_go_to_the_flat_group():
    points = [(0, 1.0), (100, 2.0)]
    crossover = Crossover.between(cost(FLAT, points), cost(TWO_LEVEL, points))
    assert not any(crossover.takes_two_levels(size) for size in (0, 50, 100, 1000))


def test_lines_that_meet_beyond_the_last_point_cross_there():
    flat, two_level = cost(FLAT, [(0, 1), (100, 2)]), cost(TWO_LEVEL, [(0, 3), (100, 3)])
    assert Crossover.between(flat, two_level) == Crossover(sizes_bytes=(200.0,))


def test_the_table_of_the_nearest_hosts_counts_and_half_a_table_does_not():
    def table(hosts, ranks, crossing, operation="all_reduce"):
        shape = {"hosts": hosts, "ranks": ranks, "operation": operation}
        return [
            cost(FLAT, [(0, 1.0), (2 * crossing, 3.0)], **shape),
            cost(TWO_LEVEL, [(0, 2.0), (2 * crossing, 2.0)], **shape),
        ]

    costs = [*table(2, 4, 100), *table(8, 16, 200), *table(8, 64, 300)]
    costs += table(2, 4, 1, operation="reduce")[:1]

    def crossing(hosts, ranks):
        (found,) = measured_crossovers(costs, hosts, ranks).items()
        assert found[0] == "all_reduce"
        return found[1].sizes_bytes

    assert crossing(2, 4) == crossing(2, 64) == crossing(3, 6) == (100.0,)
    assert crossing(8, 16) == crossing(32, 16) == (200.0,)
    assert crossing(8, 64) == crossing(100, 200) == (300.0,)


def test_costs_of_one_host_are_no_table():
    costs = [cost(way, [(0, 1.0)], hosts=1) for way in (FLAT, TWO_LEVEL)]
    assert measured_crossovers(costs, 2, 4) == {}


def test_a_reduce_scatter_is_chosen_by_the_part_of_a_rank():
    shape = {"operation": "reduce_scatter", "ranks": 4}
    costs = [
        cost(FLAT, [(0, 1.0), (400, 3.0)], **shape),
        cost(TWO_LEVEL, [(0, 2.0), (400, 2.0)], **shape),
    ]
    choice = PathChoice(
        measured=measured_crossovers(costs, 2, 4), otherwise=Crossover(sizes_bytes=(8.0,))
    )
    assert not choice.takes_two_levels("reduce_scatter", 49)
    assert choice.takes_two_levels("reduce_scatter", 50)
    assert choice.takes_two_levels("all_reduce", 8)
    assert not choice.takes_two_levels("all_reduce", 7)
