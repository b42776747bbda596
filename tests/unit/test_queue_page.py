"""The report of a queue: complete, harmless whatever names it shows, small whatever the length."""

import io
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from paceline.core.errors import DestinationExists, NotFound
from paceline.report.queue.figures import comparison, unit_for, waiting
from paceline.report.queue.gantt import MAX_RECTANGLES, colours_of, gantt, lanes, shares
from paceline.report.queue.model import (
    HeldDevices,
    PolicyRun,
    QueueFigures,
    QueueReport,
    WaitOfSize,
)
from paceline.report.queue.page import render_queue_page, write_queue_page
from paceline.report.queue.terminal import render_queue

HOSTILE = '<script>alert("x")</script>&\'\x1b[31m'
NODES = (("n0", 4), ("n1", 4))


def figures(name="fifo", hours=2.0):
    return QueueFigures(
        policy=name,
        jobs=3,
        refused=0,
        jct_mean_s=3600 * hours,
        jct_p50_s=3000.0,
        jct_p99_s=9000.0,
        makespan_s=14400.0,
        rho_worst=1.5,
        rho_p99=1.25,
        rho_above_1_1=1 / 3,
        allocated=0.5,
        useful=0.25,
        restarts=1200,
        waits=(
            WaitOfSize(devices=1, jobs=2, mean_s=60.0, p99_s=120.0),
            WaitOfSize(devices=4, jobs=1, mean_s=7200.0, p99_s=9000.0),
        ),
        jct_bound_s=1800.0,
        makespan_bound_s=7200.0,
    )


def policy_run(name="fifo", hours=2.0, held=None):
    if held is None:
        held = (
            HeldDevices(f"job {name}", 0.0, 7200.0, ((0, 4),)),
            HeldDevices("b", 3600.0, 14400.0, ((4, 1), (6, 2))),
        )
    return PolicyRun(
        figures=figures(name, hours),
        ended_s=np.array([3600.0, 7200.0, 14400.0]),
        jct_s=np.array([3600.0, 7200.0, 10800.0]),
        alone_s=np.array([1800.0, 1800.0, 1800.0]),
        held=tuple(held),
    )


def report(*runs, cautions=()):
    return QueueReport(
        title="jobs.csv", summary="3 jobs", cautions=cautions, nodes=NODES, runs=tuple(runs)
    )


def drawings(page):
    """Return every drawing of the page as XML: each must be well formed."""
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_has_all_sections_and_every_policy_in_each():
    page = render_queue_page(report(policy_run("fifo"), policy_run("las", 1.0)))
    titles = ["Policies", "Jobs done", "Completion times", "Waiting", "Devices over time"]
    assert re.findall(r"<h2>(.*?)</h2>", page) == titles
    assert "Jobs complete soonest under las: 1 h on average, of at least 0.5 h." in page
    tie = render_queue_page(report(policy_run("fifo", 1.0), policy_run("las", 1.004)))
    assert "Jobs complete soonest under fifo and las: 1 h on average, within 1 %" in tie
    assert "All work is done soonest" not in tie
    for name in ("jobs-done", "completion-times"):
        chart = re.search(rf'<figure[^>]* id="{name}".*?</figure>', page, re.DOTALL).group()
        assert chart.count("<polyline") == 3  # two policies and the lower bound
        assert "fifo</li>" in chart
        assert "las</li>" in chart
    assert 'id="devices-0"' in page
    assert 'id="devices-1"' in page
    assert "http" not in page.replace("http-equiv", "")


def test_every_drawing_is_well_formed():
    assert len(drawings(render_queue_page(report(policy_run())))) > 5


def test_names_can_do_no_harm():
    shown = report(policy_run(HOSTILE), cautions=(HOSTILE,))
    page = render_queue_page(shown)
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_queue(shown))
    assert "\x1b" not in console.export_text()


def test_a_bar_stands_where_and_when_the_devices_were_held():
    run = policy_run()
    colours = colours_of([run])
    chart, note = gantt(run, NODES, name="devices", end_s=14400.0, colours=colours)
    assert "point at a bar" in note
    bars = [
        (float(x), float(width))
        for x, width in re.findall(
            r'class="job-\d" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', "".join(chart.marks)
        )
    ]
    assert sorted(bars) == [(0.0, 500.0), (250.0, 750.0), (250.0, 750.0)]
    assert chart.end == 4.0


def test_a_job_has_one_colour_and_all_policies_one_time_axis():
    short = policy_run("las", held=[HeldDevices("b", 0.0, 3600.0, ((0, 1),))])
    page = render_queue_page(report(policy_run(), short))
    for name in ("devices-0", "devices-1"):
        chart = re.search(rf'<figure[^>]* id="{name}".*?</figure>', page, re.DOTALL).group()
        assert 'data-end="4"' in chart
        assert set(re.findall(r'"job-(\d)"[^>]*><title>b:', chart)) == {"1"}


def test_jobs_that_share_devices_have_lanes_and_others_the_whole_row():
    held = [
        HeldDevices("a", 0, 10, ((0, 2),)),
        HeldDevices("b", 2, 6, ((0, 2),)),
        HeldDevices("c", 6, 9, ((0, 2),)),
        HeldDevices("d", 10, 20, ((0, 2),)),
        HeldDevices("e", 0, 20, ((2, 1),)),
    ]
    placed = {bar.held.name: (bar.lane, bar.lanes) for bar in lanes(held)}
    assert placed == {"a": (0, 2), "b": (1, 2), "c": (1, 2), "d": (0, 1), "e": (0, 1)}


def test_shares_are_those_of_the_devices_held_and_shared_devices_count_once():
    held = [
        HeldDevices("a", 0, 50, ((0, 2),)),
        HeldDevices("b", 0, 50, ((0, 2),)),
        HeldDevices("c", 25, 100, ((4, 4),)),
        HeldDevices("d", 0.0, 0.125, ((2, 2),)),
    ]
    cells = shares(held, NODES, 100.0)
    assert cells.shape[0] == 2
    assert cells.mean(axis=1).tolist() == pytest.approx([0.25 + 0.5 * 0.125 / 100, 0.75])
    assert cells[0, 0] == pytest.approx(0.5 + 0.25)
    assert cells[0, 1:200].tolist() == pytest.approx([0.5] * 199)
    assert cells[1, 100:].tolist() == pytest.approx([1.0] * 300)


def test_a_long_queue_is_drawn_as_shares_and_stays_small():
    held = [HeldDevices(f"job {i}", i, i + 10, ((i % 8, 1),)) for i in range(10 * MAX_RECTANGLES)]
    page = render_queue_page(report(policy_run(held=held)))
    assert "too many to draw one by one" in page
    assert len(page) < 500_000
    assert drawings(page)


def test_without_devices_the_page_has_no_chart_of_them():
    assert "Devices over time" not in render_queue_page(report(policy_run(held=())))


def test_tables_have_a_row_for_each_policy_and_the_bound():
    heads, rows = comparison([figures("fifo"), figures("las")])
    assert heads[:5] == ["policy", "JCT mean, h", "JCT p50, h", "JCT p99, h", "makespan, h"]
    assert [row[0] for row in rows] == ["fifo", "las", "lower bound"]
    assert rows[0][1:5] == ["2.00", "0.833", "2.50", "4.00"]
    assert rows[0][7:] == ["33 %", "50 %", "25 %", "1,200"]
    assert rows[2][1] == "0.500"
    heads, rows = waiting([figures("fifo")])
    assert heads == ["mean / p99, h", "1 device", "4 devices"]
    assert rows == [["fifo", "0.0167 / 0.0333", "2.00 / 2.50"], ["jobs", "2", "1"]]
    assert unit_for([200.0]).name == "min"


def test_an_older_page_is_replaced_and_nothing_else(tmp_path):
    page = tmp_path / "queue.html"
    write_queue_page(report(policy_run()), page)
    write_queue_page(report(policy_run()), page)
    other = tmp_path / "notes.html"
    other.write_text("mine")
    with pytest.raises(DestinationExists):
        write_queue_page(report(policy_run()), other)
    assert other.read_text() == "mine"
    with pytest.raises(NotFound):
        write_queue_page(report(policy_run()), tmp_path / "none" / "queue.html")
