"""Counters of nodes: one rank of each counts, and a long run has fewer, longer intervals."""

import pytest
from support.traces import MS

from paceline.native import Recorder
from paceline.report.node_activity import activity_rows
from paceline.trace.analysis.nodes import INTERVALS_MAX, node_activities
from paceline.trace.format.events import Kind, LocationType
from paceline.trace.format.files import trace_name
from paceline.trace.merge import load_run

S = 1000 * MS


def write(folder, rank, ranks, intervals):
    """Write a trace with a step a second and the node's counters of each interval."""
    (folder / "trace").mkdir(exist_ok=True)
    recorder = Recorder(str(folder / "trace" / trace_name(rank)), rank, ranks)
    node = recorder.define_location(int(LocationType.PROCESS), "node a1", 0)
    for step in range(3):
        span = (step * S, (step + 1) * S)
        recorder.record(int(Kind.FORWARD), 0, recorder.intern("forward"), *span, step=step)
        recorder.record(int(Kind.STEP), 0, recorder.intern("step"), *span, step=step)
    for begin_s, end_s, counters in intervals:
        span = (round(begin_s * S), round(end_s * S))
        for name, value in counters.items():
            recorder.record(int(Kind.COUNTER), node, recorder.intern(name), *span, value, step=0)
    recorder.close()


def busy(cpu_s, **others):
    return {"node_busy_ns": round(cpu_s * S), "node_cores": 4, **others}


def test_counters_become_shares_and_rates(tmp_path):
    first = busy(1, node_received_bytes=1000, node_gpu0_busy_percent=40, node_memory_bytes=3 << 30)
    second = busy(4, node_received_bytes=0, node_gpu0_busy_percent=60, node_memory_bytes=5 << 30)
    second |= {"node_memory_total_bytes": 8 << 30, "node_gpu0_power_mw": 300_000}
    write(tmp_path, 0, 2, [(0.5, 1, first), (1, 3, second)])
    write(tmp_path, 1, 2, [])
    (node,) = node_activities(load_run(tmp_path))
    assert (node.node, node.ranks, node.cores) == ("a1", (0, 1), 4)
    assert (node.begin_s, node.ends_s, node.memory_bytes) == (0.5, (1.0, 3.0), 8 << 30)
    series = {figure.name: figure for figure in node.series}
    assert series["cpu"].values == (0.5, 0.5)
    assert series["received"].values == (2000.0, 0.0)
    assert (series["received"].mean, series["received"].most) == (pytest.approx(400), 2000)
    assert series["gpu0 busy"].mean == pytest.approx((0.4 * 0.5 + 0.6 * 2) / 2.5)
    assert series["gpu0 power"].unit == "W"
    names, cells = activity_rows([node], 8)
    assert names[0] == "a1"
    assert ["cpu, 4 cores", "50 %", "50 %"] in cells
    assert ["memory of 8.00 GiB", "4.60 GiB", "5.00 GiB"] in cells


def test_of_a_node_another_rank_goes_on_where_one_ended_and_none_counts_twice(tmp_path):
    write(tmp_path, 0, 3, [(0, 1, busy(4))])
    write(tmp_path, 1, 3, [(1, 2, busy(1)), (2, 3, busy(1))])
    write(tmp_path, 2, 3, [(1.5, 2.5, busy(2))])  # it could not see that another one counts
    (node,) = node_activities(load_run(tmp_path))
    assert node.ends_s == (1.0, 2.0, 3.0)
    assert node.series[0].values == (1.0, 0.25, 0.25)


def test_a_long_run_has_fewer_intervals_with_the_same_mean(tmp_path):
    intervals = [(k / 100, (k + 1) / 100, busy(0.04 * (k % 2))) for k in range(1000)]
    write(tmp_path, 0, 1, intervals)
    (node,) = node_activities(load_run(tmp_path))
    (cpu,) = node.series
    assert len(node.ends_s) == len(cpu.values) == INTERVALS_MAX
    assert cpu.mean == pytest.approx(0.5)
    assert cpu.most == pytest.approx(1.0)
    assert max(cpu.values) < 1.0


def test_a_run_without_them_has_none(tmp_path):
    write(tmp_path, 0, 1, [])
    assert node_activities(load_run(tmp_path)) == ()
    assert activity_rows([], 8) == ([], [])
