"""Collectives in numbers, and a trace's summary."""

import numpy as np
import pytest
from support.traces import MS, Event, Late, data_parallel, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.communication import size_classes_bytes
from paceline.trace.analysis.stats import TraceStats, summarize_trace
from paceline.trace.format.events import COMMUNICATION, Kind
from paceline.trace.merge import load_run


def test_transfer_begins_when_the_last_rank_is_there(tmp_path):
    late = (Late(1, 7, 0, 19),)
    trace = load_run(write_run(tmp_path, data_parallel(2, 20, late=late, amount=1 << 20)))
    (one,) = analyse(trace).traffic
    assert (one.operation, one.group, one.ranks) == ("all_reduce", "group default", 2)
    assert (one.count, one.bytes, one.typical_bytes) == (20, 20 << 20, 1 << 20)
    assert one.transfer_s == pytest.approx(0.001)
    assert one.spread_s == pytest.approx(0.007)
    assert one.bandwidth_bytes_per_s == pytest.approx((1 << 20) / 0.001)


def test_sizes_groups_and_operations_are_kept_apart(tmp_path):
    def event(name, group, sequence, amount):
        begin = sequence * 10 * MS
        return Event(
            Kind.COLLECTIVE,
            begin,
            begin + MS,
            name,
            0,
            amount,
            group,
            sequence,
            location=COMMUNICATION,
        )

    events = [
        event("all_reduce", "a", 1, 900),
        event("all_reduce", "a", 2, 1000),
        event("all_reduce", "a", 3, 5000),
        event("all_reduce", "b", 1, 1000),
        event("barrier", "a", 4, 0),
    ]
    found = analyse(load_run(write_run(tmp_path, [events, events]))).traffic
    assert {(line.operation, line.group, line.size_class_bytes, line.count) for line in found} == {
        ("all_reduce", "a", 1024, 2),
        ("all_reduce", "a", 8192, 1),
        ("all_reduce", "b", 1024, 1),
        ("barrier", "a", 0, 1),
    }
    assert next(line for line in found if line.operation == "barrier").bandwidth_bytes_per_s is None
    assert found[0].count == 2  # the costliest first


@pytest.mark.parametrize(
    ("amount", "size"), [(0, 0), (1, 1), (2, 2), (3, 4), (1024, 1024), (1025, 2048)]
)
def test_size_classes_hold_their_bytes(amount, size):
    assert size_classes_bytes(np.array([amount])).tolist() == [size]


def test_a_trace_without_collectives_has_no_traffic(tmp_path):
    run = write_run(tmp_path, [[Event(Kind.FORWARD, 0, MS, "forward")]])
    assert analyse(load_run(run)).traffic == ()


def test_the_summary_counts_and_round_trips(tmp_path):
    stats = summarize_trace(analyse(load_run(write_run(tmp_path, data_parallel(2, 20)))))
    assert stats.world_size == 2
    assert stats.ranks[1].events["collective"] == 20
    assert stats.ranks[0].steps == 20
    assert stats.ranks[0].breakdown.forward == pytest.approx(0.060)
    assert stats.ranks[0].complete
    assert TraceStats.from_text(stats.to_text()) == stats
