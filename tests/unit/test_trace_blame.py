"""Who was late: the right rank, cause, size and step range; and nobody when it is noise."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.traces import MS, Event, Late, data_parallel, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.blame import excess_s
from paceline.trace.format.events import COMMUNICATION, DRAIN, NOT_RUNNING, RUNNING, Kind
from paceline.trace.merge import load_run

STEPS = 120


def _stragglers(run, by_rank):
    return analyse(load_run(write_run(run, by_rank))).stragglers


def _skew_ms(run, by_rank):
    return analyse(load_run(write_run(run, by_rank))).skew_s * 1e3


def _jitter_ns(seed, world_size, steps, scale_ms):
    generator = np.random.default_rng(seed)
    return (generator.exponential(scale_ms, (world_size, steps)) * MS).astype(np.int64)


@pytest.mark.parametrize(("ms", "accused"), [(4, False), (60, True)])
def test_nobody_is_named_for_what_costs_the_run_next_to_nothing(tmp_path, ms, accused):
    late = (Late(1, ms, 300, 311),)  # 12 of 600 steps of 10 ms: 48 ms and 720 ms of 6 s
    found = _stragglers(tmp_path, data_parallel(2, 600, late=late))
    assert [straggler.rank for straggler in found] == ([1] if accused else [])


@pytest.mark.parametrize("cause", ["data", "compute", "not_running"])
@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_is_found_for_each_cause(tmp_path, rank, cause):
    late = (Late(rank, 18, 40, 80, cause),)
    jitter_ns = _jitter_ns(1, 4, STEPS, 0.2)
    (found,) = _stragglers(tmp_path, data_parallel(4, STEPS, late=late, jitter_ns=jitter_ns))
    assert (found.rank, found.cause) == (rank, cause)
    assert (found.first_step, found.last_step) == (40, 80)
    assert found.late_ms == pytest.approx(18, rel=0.05)
    assert found.others_wait == pytest.approx(18 / 28, rel=0.05)


def test_a_rank_that_is_late_all_the_time_is_found(tmp_path):
    (found,) = _stragglers(tmp_path, data_parallel(2, STEPS, late=(Late(1, 6, 0, STEPS),)))
    assert found.rank == 1
    assert found.first_step <= 1
    assert found.last_step == STEPS - 1


def test_the_costliest_of_several_comes_first(tmp_path):
    late = (Late(2, 8, 10, 30), Late(5, 12, 50, 110, "compute"))
    found = _stragglers(tmp_path, data_parallel(8, STEPS, late=late))
    assert [(late.rank, late.cause) for late in found] == [
        (5, "compute"),
        (2, "data"),
    ]


def test_three_slow_ranks_of_eight_are_all_found(tmp_path):
    late = tuple(Late(rank, 10, 20, 90) for rank in (1, 4, 6))
    found = _stragglers(tmp_path, data_parallel(8, STEPS, late=late))
    assert sorted(straggler.rank for straggler in found) == [1, 4, 6]


def test_nobody_is_late_alone_or_in_a_few_steps(tmp_path):
    assert _stragglers(tmp_path / "alone", data_parallel(1, STEPS, late=(Late(0, 9, 0, 99),))) == ()
    assert _stragglers(tmp_path / "short", data_parallel(2, 7, late=(Late(0, 9, 0, 6),))) == ()


def test_one_hiccup_is_named_only_where_it_costs_much(tmp_path):
    hiccup = data_parallel(2, STEPS, late=(Late(1, 80, 60, 60),))
    assert _stragglers(tmp_path / "short", hiccup) == ()
    costly = data_parallel(2, STEPS, late=(Late(1, 500, 60, 60),))  # a third of the loop
    (late,) = _stragglers(tmp_path / "long", costly)
    assert (late.rank, late.cause, late.shape) == (1, "data", "rare")


@example(460, 2, 5, 20, 5.0, "data", None)  # five batches of four steps were too few to tell
@settings(max_examples=examples(25), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    world_size=st.sampled_from([2, 4, 6]),
    first=st.integers(5, 60),
    length=st.integers(20, 50),
    ms=st.floats(5, 40),
    cause=st.sampled_from(["data", "compute"]),
    data=st.data(),
)
def test_step_ranges_end_where_the_delay_ends(
    tmp_path_factory, seed, world_size, first, length, ms, cause, data
):
    rank = data.draw(st.integers(0, world_size - 1)) if data is not None else 0
    last = first + length - 1
    late = (Late(rank, ms, first, last, cause),)
    jitter_ns = _jitter_ns(seed, world_size, STEPS, 0.3)
    by_rank = data_parallel(world_size, STEPS, late=late, jitter_ns=jitter_ns)
    (found,) = _stragglers(tmp_path_factory.mktemp("run"), by_rank)
    assert (found.rank, found.cause) == (rank, cause)
    assert abs(found.first_step - first) <= 0.1 * length
    assert abs(found.last_step - last) <= 0.1 * length
    assert found.late_ms == pytest.approx(ms, rel=0.25)


def test_a_rank_whose_threads_queue_behind_its_own_computing_computes_longer(tmp_path):
    """On a shared core 18 ms of computing keeps another thread of the rank waiting for as long."""
    by_rank = data_parallel(2, STEPS, late=(Late(0, 18, 40, 80, "compute"),))
    for step in range(40, 81):
        for name in (RUNNING, NOT_RUNNING):
            by_rank[0].append(Event(Kind.COUNTER, 1, 1, name, step, 18 * MS))
    (found,) = _stragglers(tmp_path, by_rank)
    assert (found.rank, found.cause) == (0, "compute")


# --- what skew is -------------------------------------------------------------------------


def _sync_step(step, begin_ms, parts):
    """Return a rank's events of one step: (kind, name, group sequence, issue, end, peer) in ms."""
    events = []
    for name, sequence, issue_ms, end_ms, peer in parts:
        issue, end = round(issue_ms * MS), round(end_ms * MS)
        events += [
            Event(
                Kind.COLLECTIVE,
                issue,
                end,
                name,
                step,
                64,
                "group 0",
                sequence,
                peer,
                location=COMMUNICATION,
            ),
            Event(Kind.WAIT, issue, end, name, step, 0, "group 0", sequence, peer),
        ]
    return events


def _hidden_culprit(steps, slow_ms):
    """DDP with BatchNorm: rank 0 is slow before it broadcasts buffers; rank 1 computes 1 ms longer.

    Rank 1 takes on the delay while it waits for the broadcast, and arrives last at the all-reduce.
    """
    ranks = [[], []]
    at = 100.0
    for step in range(steps):
        root = at + 1 + slow_ms
        received = root + 0.5
        reduce = [root + 0.1 + 5, received + 6]
        end = max(reduce) + 1
        for rank, issue in ((0, root), (1, at + 1)):
            done = root + 0.1 if rank == 0 else received
            ranks[rank] += _sync_step(
                step,
                at,
                [
                    ("broadcast", 2 * step + 1, issue, done, 0),
                    ("all_reduce", 2 * step + 2, reduce[rank], end, -1),
                ],
            )
            ranks[rank] += [
                Event(Kind.INPUT, round(at * MS), round(issue * MS), "loader", step),
                Event(Kind.BACKWARD, round(done * MS), round(end * MS), "backward", step),
                Event(Kind.STEP, round(at * MS), round(end * MS), "step", step),
            ]
        at = end
    return ranks


def test_a_broadcast_does_not_hide_its_slow_root(tmp_path):
    by_rank = _hidden_culprit(30, 20)
    skew_ms = _skew_ms(tmp_path / "once", by_rank)
    # From the second step on: rank 0 took 20 ms longer for data, rank 1 computed 1 ms longer.
    assert skew_ms[0, 1:] == pytest.approx(19.0, abs=0.01)
    assert skew_ms[1, 1:] == pytest.approx(0.0, abs=0.01)
    (found,) = _stragglers(tmp_path / "again", by_rank)
    assert (found.rank, found.cause) == (0, "data")


def test_skews_at_several_syncs_of_a_step_add_up(tmp_path):
    """After the first all-reduce all are equal again, so the second skew is a new one."""
    ranks = [[], []]
    at = 100.0
    for step in range(10):
        first = [at + 2, at + 2 + 5]  # rank 1 comes 5 ms late
        met = max(first) + 1
        second = [met + 4, met + 4 + 3]  # and 3 ms late again
        end = max(second) + 1
        for rank in (0, 1):
            ranks[rank] += _sync_step(
                step,
                at,
                [
                    ("all_reduce", 2 * step + 1, first[rank], met, -1),
                    ("all_reduce", 2 * step + 2, second[rank], end, -1),
                ],
            )
            ranks[rank].append(Event(Kind.STEP, round(at * MS), round(end * MS), "step", step))
        at = end
    skew_ms = _skew_ms(tmp_path, ranks)
    assert skew_ms[1, 1:] == pytest.approx(8.0)
    assert skew_ms[0] == pytest.approx(0.0)


def test_buckets_of_one_backward_count_once(tmp_path):
    """Two buckets, both 5 ms late, drained together: the rank is 5 ms late, not 10."""
    ranks = [[], []]
    at = 100.0
    for step in range(10):
        issue = [(at + 2, at + 4), (at + 7, at + 9)]
        end = at + 10
        for rank in (0, 1):
            for i, issued in enumerate(issue[rank]):
                ranks[rank].append(
                    Event(
                        Kind.COLLECTIVE,
                        round(issued * MS),
                        round(end * MS),
                        "all_reduce",
                        step,
                        64,
                        "group 0",
                        2 * step + 1 + i,
                        location=COMMUNICATION,
                    )
                )
            computed, finished = round(issue[rank][1] * MS), round(end * MS)
            ranks[rank] += [
                Event(Kind.WAIT, computed, finished, DRAIN, step),
                Event(Kind.BACKWARD, round(at * MS), finished, "backward", step),
                Event(Kind.STEP, round(at * MS), finished, "step", step),
            ]
        at = end
    skew_ms = _skew_ms(tmp_path, ranks)
    assert skew_ms[1, 1:] == pytest.approx(5.0)
    assert skew_ms[0] == pytest.approx(0.0)


def test_excess_is_over_the_median_of_the_others():
    late = np.array([[0.0, 5.0], [1.0, 0.0], [2.0, 1.0], [9.0, 2.0]])
    #                     others of row 3 in step 0: 0, 1, 2 -> 1
    assert excess_s(late)[:, 0].tolist() == [-2.0, -1.0, 1.0, 8.0]
    three = np.array([[0.0], [1.0], [9.0]])  # the others of row 0: 1 and 9 -> 5
    assert excess_s(three)[:, 0].tolist() == [-5.0, -3.5, 8.5]
    two = np.array([[0.0, 3.0], [4.0, 0.0]])
    assert excess_s(two).tolist() == [[-4.0, 3.0], [4.0, -3.0]]


@given(st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_excess_equals_its_plain_form(ranks, seed):
    late = np.random.default_rng(seed).integers(0, 6, (ranks, 7)).astype(float)
    plain = np.empty_like(late)
    for i in range(ranks):
        plain[i] = late[i] - np.median(np.delete(late, i, axis=0), axis=0)
    assert np.array_equal(excess_s(late), plain)
