"""`paceline why --remedies` and `report --before` as a user calls them."""

import json

import pytest
from support.command_line import without_torch
from support.traces import Late, data_parallel
from support.traces import write_run as write_traces

from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.imbalance import RemedyForecast
from paceline.perf.simulator import simulate, write_run
from paceline.perf.transformer import Architecture
from paceline.report.model import gather
from paceline.report.remedies import RemedyOutcome, changed_settings

STEPS = 60


def _paceline(*arguments):
    return without_torch(*arguments, text=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    late = (Late(1, 18, 0, STEPS),)
    found = {}
    for name, delays in (("even", ()), ("late", late)):
        folder = tmp_path_factory.mktemp(name)
        found[name] = write_traces(folder, data_parallel(2, STEPS, late=delays))
        values = {"rebalance": {"value": name == "even", "provenance": "flag"}}
        (folder / "config.json").write_text(json.dumps({"version": 2, "values": values}))
    return found


def test_a_slow_rank_is_worth_rebalancing_at_any_size(runs):
    done = _paceline("why", runs["late"], "--remedies", "--ranks", "24576", "--json")
    assert done.returncode == 0, done.stderr
    found = RemedyForecast.from_json({"version": 1, **json.loads(done.stdout)["remedies"]})
    assert [world.ranks for world in found.worlds] == [2, 24_576]
    for world in found.worlds:
        assert world.gain_of("rebalancing").gain > 0.2
        assert world.gain_of("rebalancing").gain == world.gain_of("together").gain
    words = _paceline("why", runs["late"], "--remedies").stdout
    assert "rebalancing would save" in words
    assert "24,576" in words
    assert "Not judged: CPU budget" in words
    assert "One node was measured" in words


def test_what_a_remedy_brought_stands_beside_what_was_expected(runs):
    done = _paceline("why", runs["even"], "--remedies", "--before", runs["late"], "--json")
    assert done.returncode == 0, done.stderr
    came = RemedyOutcome.from_json({"version": 1, **json.loads(done.stdout)["remedy_outcome"]})
    assert came.settings == {"rebalance": "off -> on"}
    assert came.expected.remedy == "rebalancing"
    assert came.step.verdict == "faster"
    assert came.gain == pytest.approx(1 - came.step.b_s / came.step.a_s)
    done = _paceline("report", runs["even"], "--before", runs["late"])
    assert done.returncode == 0, done.stderr
    assert "% saved (95 %:" in " ".join(done.stdout.split())
    page = (runs["even"] / "report.html").read_text()
    assert "What remedies against imbalance would bring" in page
    assert "rebalance off -&gt; on" in page


def test_questions_that_cannot_be_answered_are_refused(runs, tmp_path):
    done = _paceline("why", runs["late"], "--ranks", "64")
    assert done.returncode == 2
    assert "Give --remedies" in done.stderr
    done = _paceline("why", runs["late"], "--remedies", "--ranks", "1")
    assert done.returncode == 2
    assert "Ask for 2 ranks or more" in done.stderr
    short = write_traces(tmp_path, data_parallel(2, 12))
    done = _paceline("why", short, "--remedies")
    assert done.returncode != 0
    assert "Record a longer run" in done.stderr
    assert gather(short, in_detail=True).remedies.forecast is None


def test_stages_that_wait_in_turn_have_no_forecast(tmp_path):
    model = Architecture(layers=24, hidden=2048, heads=16, vocab=51200, sequence=2048)
    plan = Plan(mesh=Mesh(data=1, pipeline=2), microbatches=4, precision="bfloat16")
    machine = library_machine("dgx-h100")
    write_run(simulate(machine, model, plan, 8, steps=30, by="rank", records=True), tmp_path)
    done = _paceline("why", tmp_path, "--remedies")
    assert done.returncode != 0
    assert "its model is in stages" in done.stderr
    assert gather(tmp_path, in_detail=True).remedies.forecast is None


def test_settings_are_compared_by_value():
    before = {"values": {"budget": {"value": "off", "provenance": "default"}, "ranks": 2}}
    now = {"values": {"budget": {"value": "auto", "provenance": "flag"}, "ranks": 2}}
    assert changed_settings(before, now) == {"budget": "off -> auto"}
    assert changed_settings({}, now) == {}
