"""The HTML page: complete, small, harmless whatever names it shows, and needing nothing else."""

import base64
import dataclasses
import hashlib
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from support.machines import collective
from support.traces import (
    Event,
    Late,
    data_parallel,
    set_boot_id,
    set_dropped_count,
    write_run,
    write_trace,
)

from paceline.core.breakdown import PHASES, Breakdown
from paceline.core.errors import (
    CorruptData,
    CorruptTrace,
    DestinationExists,
    NotFound,
    PacelineError,
)
from paceline.core.estimate import Estimate
from paceline.core.machine import Device, Machine, Quantity
from paceline.core.plan import Mesh, Plan
from paceline.core.plan_file import PlanFile
from paceline.report.model import gather, modelled_s, to_json
from paceline.report.page.by_step import skew_map, skew_scale_s, step_lines
from paceline.report.page.chart import MAX_VALUES, blocks, encode, render, to_zoom, worst
from paceline.report.page.document import render_html, write_html
from paceline.report.page.overview import _step_range_s
from paceline.report.terminal import render_terminal
from paceline.runs.result import Failure, RunResult
from paceline.trace.analysis.phases import RankPhases
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name
from paceline.trace.merge.clocks import ClockCorrection

GOLDEN = Path(__file__).parents[1] / "golden"
HOSTILE = '<script>alert("x")</script>&\'<img src=x onerror=y>'
LATE = (Late(1, 18, 40, 80),)
SECTIONS = [
    "Time by phase",
    "Timeline",
    "Skew",
    "Efficiency and waits",
    "Step time",
    "Prediction beside measurement",
    "Collectives",
    "Traffic between ranks",
    "Memory",
    "Provenance",
]


def _machine(name="box"):
    quantity = Quantity(value=1e9, source="probe")
    costs = tuple(collective(operation, 1e-4, 1e9) for operation in ("all_reduce", "broadcast"))
    device = Device(name=name, kind="cpu", cores=2, memory_bytes=quantity)
    return Machine(name=name, devices=(device,), collectives=costs, missing=(name,))


def _estimate(name="net"):
    predicted = Breakdown(input=0.001, forward=0.002, backward=0.004, transfer=0.002)
    values = {
        "workload": name,
        "machine": name,
        "plan": Plan(mesh=Mesh(data=2)),
        "trained_parameter_bytes": 1 << 20,
        "breakdown": predicted,
        "step_time_s": predicted.total_s,
        "low_s": 0.007,
        "high_s": 0.011,
        "memory_bytes": {"parameters": 3 << 20, name: 5 << 20},
        "link_bytes": {},
        "limit": name,
        "shares": {name: 0.7, "compute": 0.3},
        "sources": {},
    }
    return Estimate(**values)


def _run(folder, name="script.py", *, failure=None):
    """Write a run's whole folder, with `name` wherever somebody else's text goes."""
    run = write_run(folder, data_parallel(2, 120, late=LATE, group=f"group {name}"))
    result = RunResult(
        exit_code=0 if failure is None else 5,
        world_size=2,
        step_time_s=0.01,
        loop_wall_s=1.0,
        ranks=(),
        failure=failure,
    )
    (run / "result.json").write_text(result.to_text())
    (run / "machine.json").write_text(_machine(name).to_text())
    (run / "estimate.json").write_text(_estimate(name).to_text())
    (run / "versions.json").write_text(json.dumps({"version": 1, "torch": name, name: None}))
    values = {name: {"value": name, "origin": name}}
    config = {"version": 1, "values": values, "script": name, "args": [name]}
    (run / "config.json").write_text(json.dumps(config))
    return run


class _Tags(HTMLParser):
    """Collects a page's elements, attributes and text, and checks that they nest."""

    VOID = frozenset({"meta", "br", "img", "input", "link"})

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.texts, self.stack = [], [], [], []
        self.feed(page)
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_every_section_is_there_with_its_numbers(tmp_path):
    report = gather(_run(tmp_path), in_detail=True)
    page = render_html(report)
    found = _Tags(page)
    text = " ".join(found.texts)
    for title in SECTIONS:
        assert f"<h2>{title}</h2>" in page
    assert "Rank 1 arrives 18 ms late at every all-reduce between steps 40 and 80" in text
    assert "finished" in text
    assert "exit code 0" in text
    for head in ("predicted", "measured", "ratio", "modelled transfer", "provenance"):
        assert head in found.texts
    assert found.tags.count("details") >= 4
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def test_hostile_names_do_nothing(tmp_path):
    failure = Failure(rank=1, step=3, phase="backward", error=HOSTILE)
    page = render_html(gather(_run(tmp_path, HOSTILE, failure=failure), in_detail=True))
    found = _Tags(page)
    assert page.count("<script") == 1
    assert "script-src 'sha256-" in page
    assert "<img" not in page
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert page.count("&lt;script&gt;") >= 8  # it is shown, as text
    assert "failed" in " ".join(found.texts)


def test_the_page_needs_nothing_else(tmp_path):
    page = render_html(gather(_run(tmp_path)))
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"url\(|@import|\bsrc=|\bhref=", page)
    assert "default-src 'none'" in page


def _long(report, ranks, steps):
    """Return `report` as if its run had had so many ranks and steps."""
    generator = np.random.default_rng(0)
    seconds = generator.exponential(0.001, (steps, len(PHASES)))
    parts = tuple(
        RankPhases(
            rank=rank,
            seconds=seconds,
            step_s=seconds.sum(axis=1),
            running_s=np.zeros(steps),
            not_running_s=np.zeros(steps),
            recorded=np.ones(steps, dtype=bool),
        )
        for rank in range(ranks)
    )
    skew_s = generator.exponential(0.01, (ranks, steps))
    traffic = report.traffic * 500
    traces = tuple(
        SimpleNamespace(
            rank=rank, status=report.trace.ranks[0].status, complete=True, step_rule="optimizer"
        )
        for rank in range(ranks)
    )
    trace = dataclasses.replace(report.trace, ranks=traces, clocks=(ClockCorrection(),) * ranks)
    return dataclasses.replace(
        report, rank_phases=parts, skew_s=skew_s, traffic=traffic, trace=trace
    )


@pytest.mark.parametrize(("ranks", "steps"), [(64, 5000), (1500, 700), (2, 200_000)])
def test_long_and_wide_runs_stay_small(tmp_path, ranks, steps):
    page = render_html(_long(gather(_run(tmp_path)), ranks, steps))
    assert len(page.encode()) < 2_000_000
    _Tags(page)


def test_the_timeline_shows_each_rank_around_the_longest_step(tmp_path):
    late = (Late(1, 90, 200, 200),)
    report = gather(write_run(tmp_path, data_parallel(2, 300, late=late)), in_detail=True)
    strips = report.strips
    assert strips.first_step <= 200 <= strips.last_step
    assert strips.last_step - strips.first_step + 1 == 100
    assert strips.seconds == pytest.approx(99 * 0.010 + 0.100)
    # What the columns show adds up to what the ranks spent, within a column at each change.
    for row, rank in enumerate(report.rank_phases):
        spent = rank.seconds[strips.first_step : strips.last_step + 1].sum(axis=0)
        columns = np.bincount(strips.phases[row], minlength=len(PHASES))
        shown = columns * strips.seconds / strips.phases.shape[1]
        assert shown == pytest.approx(spent, abs=0.03 * spent.sum())
    waiting, data = (PHASES.index(name) for name in ("waiting", "input"))
    longest = np.abs(strips.step_ends_s - strips.step_ends_s[200 - strips.first_step]).argmin()
    middle = int((strips.step_ends_s[longest] - 0.05) / strips.seconds * strips.phases.shape[1])
    assert strips.phases[:, middle].tolist() == [waiting, data]
    page = render_html(report)
    assert "Steps 150 to 249, the longest step of the run among them" in page
    assert page.count('class="step-end"') == 100


def test_a_timeline_of_many_ranks_shows_the_late_ones_and_stays_small(tmp_path):
    run = write_run(tmp_path, data_parallel(150, 40, late=(Late(77, 20, 10, 30),)))
    report = gather(run, in_detail=True)
    assert 60 <= len(report.strips.ranks) <= 64
    assert 77 in report.strips.ranks
    page = render_html(report)
    assert len(page.encode()) < 2_000_000
    _Tags(page)
    assert f"{len(report.strips.ranks)} of 150 ranks, the late ones among them" in page
    assert to_json(report)["efficiency"]["matrix"]["pairs"]


def test_a_run_of_one_rank_has_a_timeline_and_no_efficiency(tmp_path):
    report = gather(write_run(tmp_path, data_parallel(1, 10)), in_detail=True)
    page = render_html(report)
    assert "<h2>Timeline</h2>" in page
    assert "<h2>Efficiency" not in page
    assert to_json(report)["efficiency"] is None


def test_steps_that_a_rank_lost_leave_out_what_needs_them(tmp_path):
    by_rank = data_parallel(2, 20)
    by_rank[1] = [event for event in by_rank[1] if event.step < 3]
    report = gather(write_run(tmp_path, by_rank), in_detail=True)
    assert report.strips.last_step <= 2
    _Tags(render_html(report))


def test_an_unknown_clock_error_is_said(tmp_path):
    run = _run(tmp_path)
    report = gather(run)
    clocks = (ClockCorrection(), ClockCorrection(offset_ns=5_000_000, drift=2e-5, error_ns=None))
    report = dataclasses.replace(report, trace=dataclasses.replace(report.trace, clocks=clocks))
    text = " ".join(_Tags(render_html(report)).texts)
    assert "5.00 ms 20.00 ppm unknown" in text
    assert "clocks whose error is unknown" in text
    assert to_json(report)["ranks"][1]["clock_error_ns"] is None


def test_what_a_bad_end_did_not_leave_is_shown_as_missing(tmp_path):
    run = tmp_path / "run"
    (run / "trace").mkdir(parents=True)
    events = data_parallel(2, 30)[0]
    write_trace(run / "trace" / trace_name(0), 0, 2, events, close=False)
    report = gather(run)
    assert report.missing_ranks == (1,)
    # One rank alone cannot be late, and nothing is known of the other one.
    assert report.words.startswith(
        "The trace is incomplete: rank 0 has not closed its file (it still runs, or was killed). "
        "What follows covers steps 0 to 29. Rank 1 left no trace, so only the other ranks are "
        "described. What is called communication may include waiting for rank 1. One rank took 30 "
        "steps: "
    )
    text = " ".join(_Tags(render_html(report)).texts)
    assert "not finished" in text
    assert "1 rank left no trace" in text
    assert "truncated" in text


def test_a_script_that_recorded_itself_is_not_called_unfinished(tmp_path):
    run = write_run(tmp_path, data_parallel(2, 30))
    text = " ".join(_Tags(render_html(gather(run))).texts)
    assert "recorded by the script itself on 2 ranks." in text
    assert "not finished" not in text
    # A launcher that is gone should have left a result.
    (run / "config.json").write_text(json.dumps({"launcher": {"host": "h", "boot": "b", "pid": 1}}))
    assert "not finished" in " ".join(_Tags(render_html(gather(run))).texts)


def test_evaluations_are_no_part_of_the_spread_of_step_times(tmp_path):
    by_rank = data_parallel(2, 40)
    for events in by_rank:  # half of each fourth step
        for event in [event for event in events if event.kind == Kind.STEP and not event.step % 4]:
            begin = event.end_ns - 5_000_000
            events.append(Event(Kind.EVALUATION, begin, event.end_ns, "forward", event.step))
        events.sort(key=lambda event: event.end_ns)
    report = gather(write_run(tmp_path, by_rank))
    low, high = _step_range_s(report)
    assert low < 0.009  # a step takes 10 ms with its evaluation
    assert high == pytest.approx(0.010)


def test_a_run_of_one_rank_and_no_steps_still_has_a_page(tmp_path):
    report = gather(write_run(tmp_path, [[]]), in_detail=True)
    text = " ".join(_Tags(render_html(report)).texts)
    assert "No step was recorded" in text
    assert to_json(report)["steps"] == 0


def test_ranks_that_lost_events_are_pointed_out(tmp_path):
    run = _run(tmp_path)
    set_dropped_count(run / "trace" / trace_name(0), 7)
    assert "rank 0 lost 7 events" in render_html(gather(run))


def test_clock_offsets_are_told(tmp_path):
    run = _run(tmp_path)
    set_boot_id(run / "trace" / trace_name(1), "another node")
    # an all-reduce takes 1 ms
    row = r'rank 1</td>(<td class="n">[^<]*</td>){2}<td class="n">1\.\d\d ms</td>'
    assert re.search(row, render_html(gather(run)))


@pytest.mark.parametrize("name", ["machine.json", "estimate.json", "config.json", "result.json"])
def test_files_that_make_no_sense_are_named(tmp_path, name):
    run = _run(tmp_path)
    (run / name).write_text('{"version": 1, "surprise": ')
    with pytest.raises(CorruptData, match=re.escape(name)) as caught:
        gather(run)
    assert caught.value.exit_code == 4


def test_a_damaged_trace_names_its_rank(tmp_path):
    run = _run(tmp_path)
    path = run / "trace" / trace_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptTrace, match="rank 1"):
        gather(run)


def test_missing_runs_and_unrecorded_failures_are_told_apart(tmp_path):
    with pytest.raises(NotFound, match="no such run"):
        gather(tmp_path / "nothing")
    with pytest.raises(NotFound, match="no traces"):
        gather(tmp_path)
    failure = Failure(rank=0, error="ImportError: no module")
    result = RunResult(
        exit_code=1, world_size=2, step_time_s=0, loop_wall_s=0, ranks=(), failure=failure
    )
    (tmp_path / "result.json").write_text(result.to_text())
    with pytest.raises(NotFound, match="ImportError"):
        gather(tmp_path)


def test_only_reports_are_overwritten(tmp_path):
    report = gather(_run(tmp_path / "run"))
    page = tmp_path / "page.html"
    write_html(report, page)
    write_html(report, page)
    other = tmp_path / "thesis.html"
    other.write_text("years of work")
    for taken in (other, tmp_path):
        with pytest.raises(DestinationExists):
            write_html(report, taken)
    assert other.read_text() == "years of work"
    with pytest.raises(NotFound, match="no such folder"):
        write_html(report, tmp_path / "nowhere" / "page.html")


def test_the_model_prices_what_the_machine_has_figures_for(tmp_path):
    report = gather(_run(tmp_path))
    (traffic,) = report.traffic
    assert modelled_s(traffic, _machine()) == pytest.approx(1e-4 + (1 << 20) / 1e9)
    broadcast = dataclasses.replace(traffic, operation="broadcast", ranks=4)
    assert modelled_s(broadcast, _machine()) == pytest.approx(2 * (1e-4 + (1 << 20) / 1e9))
    assert modelled_s(dataclasses.replace(traffic, operation="barrier"), _machine()) is None
    assert modelled_s(traffic, None) is None


@pytest.mark.parametrize(
    ("path", "seconds"), [("", 1.0), ("shared memory", 2.0), ("two levels", 4.0), ("gloo", 3.0)]
)
def test_the_path_of_a_collective_says_whose_cost_counts(tmp_path, path, seconds):
    """A script that asks for the backend itself was compared with gloo's cost."""
    (traffic,) = gather(_run(tmp_path)).traffic
    costs = (
        collective("all_reduce", 1.0, 1e15),
        collective("all_reduce", 2.0, 1e15, backend="paceline"),
        collective("all_reduce", 3.0, 1e15, algorithm="flat", hosts=2),
        collective("all_reduce", 4.0, 1e15, backend="paceline", algorithm="two_level", hosts=2),
    )
    machine = dataclasses.replace(_machine(), collectives=costs)
    line = dataclasses.replace(traffic, path=path)
    assert modelled_s(line, machine) == pytest.approx(seconds, rel=1e-3)


def test_json_holds_what_the_page_shows(tmp_path):
    data = json.loads(json.dumps(to_json(gather(_run(tmp_path)))))
    assert data["version"] == 1
    assert data["stragglers"][0]["rank"] == 1
    assert [phase["name"] for phase in data["phases"]] == list(PHASES)
    assert data["step_time_error"] == pytest.approx(0.1)
    assert data["collectives"][0]["modelled_s"] > 0
    assert data["ranks"][1]["phases"]["input"] > data["ranks"][0]["phases"]["input"]


def test_the_terminal_shows_the_same_in_short(tmp_path):
    name = "evil\x1b[2J[red]"
    failure = Failure(rank=1, step=3, phase="backward", error=name)
    report = gather(_run(tmp_path, name, failure=failure))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_terminal(report))
    shown = console.export_text()
    assert "\x1b" not in shown
    assert "[red]" in shown
    assert "Rank 1 failed in step 3" in shown
    assert "error 10 %" in shown
    many = _long(report, 40, 200)
    console.print(render_terminal(many))
    assert "and 24 ranks more" in console.export_text()


# --- charts -----------------------------------------------------------------------------------


def test_bounding_a_heat_map_keeps_the_worst():
    values = np.zeros((200, 5000))
    values[131, 3777] = 9
    small = worst(values)
    assert small.shape == (64, 400)
    assert small.max() == 9
    assert worst(np.eye(3)).tolist() == np.eye(3).tolist()
    assert blocks(200, 64)[-1] == 200


def _marks(chart):
    return "".join(chart.marks)


def test_noise_looks_pale_and_a_straggler_full():
    noise = np.abs(np.random.default_rng(0).normal(0, 1e-4, (4, 300)))
    assert skew_scale_s(noise, (), 0.001) == 0.002
    assert "heat-" not in re.sub("heat-none", "", _marks(skew_map(noise, range(4), (), 0.02)))
    late = noise.copy()
    late[2, 100:150] = 0.02
    assert 'class="heat-8"' in _marks(skew_map(late, range(4), (), 0.02))


def test_steps_beyond_the_scale_are_marked():
    times = np.full((2, 100), 0.01)
    times[:, 0] = 3.0
    chart = render(step_lines(times, [0, 1]))
    assert 'class="beyond"' in chart
    assert "3.00 s" in chart
    assert 'class="band"' in render(step_lines(np.full((9, 100), 0.01), range(9)))


def test_the_allocator_in_effect_is_named_and_not_only_the_setting(tmp_path):
    """The page said `keep` where the user's own settings had won."""
    run = _run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    config["values"] = {"allocator": {"value": "keep", "provenance": "default"}}
    config["allocator"] = {"in_effect": "own", "variables": {}}
    (run / "config.json").write_text(json.dumps(config))
    assert "own: as the environment of the run says" in render_html(gather(run))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": Plan(mesh=Mesh(data=4))}, "the prediction is of 4 ranks, the run had 2"),
        ({"plan": Plan(mesh=Mesh(data=2), threads=3)}, "the prediction is of 3 threads per rank"),
        (
            {"plan": Plan(mesh=Mesh(data=2), allocator="system")},
            "the prediction is for allocator system, the run had keep",
        ),
        (
            {"plan": Plan(mesh=Mesh(data=2), collectives="paceline")},
            "the prediction is for collectives paceline, the run had torch",
        ),
        ({"plan": Plan(mesh=Mesh(data=2), nodes=2)}, "the prediction is of 2 nodes, the run had 1"),
        (
            {"machine_digest": "sha256:0"},
            "the prediction is for machine net, the run was on script.py",
        ),
        ({"machine_digest": "sha256:0", "machine": "script.py"}, "another measurement of machine"),
        ({"trained_parameter_bytes": 3 << 20}, "3.00 MiB of gradients per step, the run reduced"),
    ],
)
def test_a_prediction_of_something_else_is_not_compared(tmp_path, changes, words):
    run = _run(tmp_path)
    config = json.loads((run / "config.json").read_text())
    config |= {"threads": 1, "allocator": {"in_effect": "keep", "variables": {}}}
    config["collectives"] = "torch"
    (run / "config.json").write_text(json.dumps(config))
    assert gather(run).comparison.step_time_error is not None
    other = dataclasses.replace(_estimate(), **changes)
    (run / "plan.json").write_text(PlanFile(plan=other.plan, estimate=other).to_text())
    report = gather(run)
    assert report.comparison.step_time_error is None
    assert words in to_json(report)["not_compared"]
    assert words in render_html(report)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_terminal(report))
    assert words in console.export_text()


def test_the_run_says_itself_how_much_it_trained(tmp_path):
    by_rank = data_parallel(2, 30)
    for events in by_rank:  # gradients are reduced in four steps, and the optimizer steps after
        events.append(Event(Kind.COUNTER, 1, 1, "trained_parameter_bytes", 0, 4 << 20))
    run = write_run(tmp_path, by_rank)
    for size, fits in ((4 << 20, True), (1 << 20, False)):
        estimate = dataclasses.replace(_estimate(), trained_parameter_bytes=size)
        (run / "plan.json").write_text(PlanFile(plan=estimate.plan, estimate=estimate).to_text())
        found = gather(run).comparison
        assert (found.step_time_error is not None) == fits
        assert fits or "the run trained 4.00 MiB" in found.not_compared


def test_gradients_that_are_reduced_several_times_per_step_fit(tmp_path):
    run = _run(tmp_path)  # 1 MiB per step
    for size, fits in ((1 << 19, True), (1 << 20, True), (3 << 18, False), (1 << 21, False)):
        estimate = dataclasses.replace(_estimate(), trained_parameter_bytes=size)
        (run / "estimate.json").write_text(estimate.to_text())
        assert (gather(run).comparison.not_compared == "") == fits, size


def test_a_run_that_an_earlier_paceline_planned_is_compared(tmp_path):
    run = write_run(tmp_path, data_parallel(2, 60, amount=350_000))
    for name in ("machine", "estimate"):
        (run / f"{name}.json").write_text((GOLDEN / f"{name}-v1.json").read_text())
    report = gather(run)
    assert report.machine.collective("all_reduce") is not None
    assert report.comparison.step_time_error is not None
    (run / "machine.json").unlink()
    larger = write_run(tmp_path / "larger", data_parallel(2, 60, amount=1 << 20))
    (larger / "estimate.json").write_text((GOLDEN / "estimate-v1.json").read_text())
    why = gather(larger).comparison.not_compared
    assert "of gradients per step, the run reduced 1.00 MiB" in why


def test_the_demos_folder_stands_for_its_run(tmp_path):
    run = _run(tmp_path / "run")
    (tmp_path / "result.json").write_text(json.dumps({"version": 1, "kind": "demo"}))
    assert gather(tmp_path).run == run
    (tmp_path / "result.json").write_text(json.dumps({"version": 1, "kind": "other"}))
    with pytest.raises(PacelineError):
        gather(tmp_path)


# --- the page as a document -------------------------------------------------------------------


def _attributes(page, name):
    return [value for key, value in _Tags(page).attributes if key == name]


def test_ids_are_unique_and_what_refers_to_them_finds_them(tmp_path):
    page = render_html(gather(_run(tmp_path)))
    ids = _attributes(page, "id")
    assert len(ids) == len(set(ids)) >= 9
    referred = " ".join(_attributes(page, "aria-labelledby")).split()
    assert set(referred) <= set(ids)


def test_each_chart_has_a_legend_words_and_a_place_in_the_order_of_keys(tmp_path):
    charts = re.findall(r"<figure.*?</figure>", render_html(gather(_run(tmp_path))), re.DOTALL)
    assert len(charts) == 3
    for chart in charts:
        assert chart.count('<ul class="legend">') == 1
        words = re.findall(r"<li>(<svg.*?</svg>)+([^<]+)</li>", chart)
        assert words
        assert 'tabindex="0"' in chart
        assert re.search(r'role="img" aria-labelledby="[\w-]+-title [\w-]+-description"', chart)
        assert re.search(r"<title [^>]*>[^<]+</title><desc [^>]*>[^<]+</desc>", chart)


@pytest.mark.parametrize("ranks", [1, 2, 8, 9, 100])
def test_the_legend_names_each_mark_of_the_step_times(ranks):
    chart = step_lines(np.full((ranks, 50), 0.01), range(ranks))
    names = [words for _, words in chart.legend]
    lines = [f"rank {rank}" for rank in range(ranks)]
    assert names == (lines if ranks <= 8 else ["median of the ranks", "range of the ranks"])


def test_the_script_may_run_and_nothing_else(tmp_path):
    page = render_html(gather(_run(tmp_path)))
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [value for value in _attributes(page, "content") if "default-src" in value]
    assert policy == (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    )


def test_zooming_has_the_values_that_are_drawn():
    seconds = np.random.default_rng(0).exponential(0.01, (3, 700))
    seconds[1, 5] = 0.0
    kept = 1e-9 * 10 ** (13 * (encode(seconds).astype(float) - 1) / 65534)
    assert np.allclose(kept[seconds > 0], seconds[seconds > 0], rtol=5e-4)
    assert encode(seconds)[1, 5] == 0
    long = to_zoom(np.ones((64, 100_000)))
    assert long.size <= MAX_VALUES
    assert to_zoom(seconds).shape == (3, 700)


def test_without_a_prediction_there_is_no_comparison(tmp_path):
    run = _run(tmp_path)
    (run / "estimate.json").unlink()
    (run / "machine.json").unlink()
    page = render_html(gather(run))
    assert "Prediction" not in page
    assert "A typical step" in page
    assert "modelled</" not in page
    assert "modelled transfer" not in page


def test_the_rows_of_a_comparison_add_up_to_its_last_row(tmp_path):
    page = render_html(gather(_run(tmp_path)))
    section = page[page.index("Prediction beside measurement") : page.index("Collectives")]
    rows = [re.findall(r'<td class="n">([^<]*)</td>', row) for row in section.split("<tr")]
    columns = list(zip(*[row[:2] for row in rows if len(row) == 3], strict=True))
    for column in columns:
        *parts, total = [0.0 if cell == "-" else float(cell.split()[0]) for cell in column]
        assert sum(parts) == pytest.approx(total)


def test_advice_stands_below_the_verdict_with_its_figures(tmp_path):
    text = " ".join(_Tags(render_html(gather(_run(tmp_path)))).texts)
    assert "What would help" in text
    assert "would hide 9.0 of 19.0 ms of waiting for data in steps 40 to 80." in text
    assert "Of a mean step of 28.0 ms rank 1 waits 19.0 ms for data." in text


def test_a_cut_trace_is_said_before_the_verdict(tmp_path):
    run = tmp_path / "run"
    (run / "trace").mkdir(parents=True)
    for rank, events in enumerate(data_parallel(2, 30)):
        write_trace(run / "trace" / trace_name(rank), rank, 2, events, close=rank == 0)
    page = render_html(gather(run))
    caution = page.index("The trace is incomplete: rank 1 has not closed its file")
    assert caution < page.index('class="verdict"')


def test_named_host_work_and_evaluation_have_their_places(tmp_path):
    by_rank = data_parallel(2, 40)
    for events in by_rank:
        steps = [event for event in events if event.kind == Kind.STEP]
        for step in steps:
            end = step.end_ns
            host = Event(Kind.HOST, end - 900_000, end - 500_000, "logging", step.step)
            optimizer = next(
                i
                for i, event in enumerate(events)
                if event.kind == Kind.OPTIMIZER and event.step == step.step
            )
            events[optimizer] = dataclasses.replace(events[optimizer], end_ns=end - 1_000_000)
            events.append(host)
            if step.step % 10 == 0:
                events.append(
                    Event(Kind.EVALUATION, end - 450_000, end - 50_000, "forward", step.step)
                )
        events.sort(key=lambda event: event.end_ns)
    report = gather(write_run(tmp_path, by_rank))
    assert [time.name for time in report.host_work] == ["logging"]
    page = render_html(report)
    assert "<h2>Host work</h2>" in page
    assert "evaluation" in page
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_terminal(report))
    text = console.export_text()
    assert "logging" in text
    assert re.search(r"host work +mean over ranks +of the loop", text)


def test_every_table_scrolls_within_its_container_on_a_narrow_screen(tmp_path):
    page = render_html(gather(_run(tmp_path)))
    assert page.count("<table>") == page.count('<div class="wide"><table>') > 3
    (rule,) = re.findall(r"\.wide \{([^}]*)\}", page)
    assert "overflow-x: auto" in rule
    assert "background-attachment: local, local, scroll, scroll" in rule  # shows that it does


def test_the_terminal_shows_path_and_modelled_time_in_80_columns(tmp_path):
    run = tmp_path / "run"
    cost = collective("all_reduce", backend="paceline")
    machine = dataclasses.replace(_machine(), collectives=(cost,))
    report = dataclasses.replace(gather(_run(run)), machine=machine)
    line = dataclasses.replace(report.traffic[0], path="shared memory", group="group 0")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_terminal(dataclasses.replace(report, traffic=(line,))))
    shown = console.export_text().splitlines()
    (heads,) = (row for row in shown if row.startswith("collective") and "transfer" in row)
    assert heads.split()[2] == "path"
    assert heads.split()[-1] == "modelled"
