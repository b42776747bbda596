"""The demo as a newcomer runs it: the whole loop, with the right verdict for each slowdown."""

import json
import re

import pytest
from support.launching import Launched

JUDGES_TIMES = pytest.mark.campaign("measures")


def demo(folder, *args):
    launched = Launched(folder, "demo", *args, threads=0).wait(300)
    assert launched.code == 0, launched.err
    return json.loads((folder / "paceline-demo/result.json").read_text()), launched


@pytest.fixture(scope="module")
def slowed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    return (*demo(folder, "--json"), folder)


def test_it_trains_to_a_good_model_on_all_images(slowed):
    result, _, _ = slowed
    assert result["images"] == 1797
    assert result["test_accuracy"] >= 0.95


@JUDGES_TIMES
def test_it_finds_the_rank_that_was_slowed(slowed):
    result, launched, _ = slowed
    check_straggler(result, rank=1, cause="data", about_ms=20)
    assert "Rank 1 arrives" in launched.err
    assert "because of data loading" in launched.err


def test_it_sets_prediction_beside_measurement(slowed):
    result, _, _ = slowed
    assert result["step_time_error"] is not None
    phases = {phase["name"]: phase for phase in result["phases"]}
    for name in ("input", "forward", "backward", "optimizer", "transfer"):
        assert phases[name]["predicted_s"] > 0
        assert phases[name]["measured_s"] > 0


def test_it_marks_a_run_that_other_processes_disturbed(slowed):
    result, launched, _ = slowed
    assert result["foreign_cores"] >= 0
    for disturbed in result["disturbed"]:
        assert f"disturbed: {disturbed}" in launched.err
    assert ("disturbed: the training" in launched.err) == (result["foreign_cores"] > 0.1)


def test_it_says_the_same_as_json_and_writes_only_in_its_folder(slowed):
    result, launched, folder = slowed
    assert json.loads(launched.out) == result
    assert {path.name for path in folder.iterdir()} <= {"paceline-demo", "cache"}
    launched.assert_nothing_left()


def test_its_report_is_one_page_without_references(slowed):
    result, launched, folder = slowed
    page = (folder / result["report"]).read_text()
    assert result["report"] in launched.err
    assert len(page) < 2_000_000
    assert not re.search(r"(src|href)=[\"']?https?:", page)


@JUDGES_TIMES
def test_the_verbs_that_read_a_run_take_the_demos_folder(slowed):
    _, _, folder = slowed
    why = Launched(folder, "why", "paceline-demo").wait()
    assert why.code == 0, why.err
    assert "Rank 1" in why.out


@pytest.mark.campaign("measures")
def test_another_rank_and_cause_and_an_earlier_demo_is_replaced(slowed):
    _, _, folder = slowed
    result, _ = demo(folder, "--straggler", "0,12,compute")
    check_straggler(result, rank=0, cause="compute", about_ms=12)


@pytest.mark.campaign("measures")
def test_nobody_is_accused_when_nobody_was_slowed(tmp_path):
    result, launched = demo(tmp_path, "--straggler", "none", "--seed", "1")
    assert result["injected"] is None
    assert result["straggler"] is None, launched.err


def test_a_folder_that_no_demo_made_is_left_alone(tmp_path):
    (tmp_path / "paceline-demo").mkdir()
    (tmp_path / "paceline-demo/precious").write_text("mine")
    launched = Launched(tmp_path, "demo").wait()
    assert launched.code == 2
    assert "not made by a demo" in launched.err
    assert (tmp_path / "paceline-demo/precious").read_text() == "mine"


@pytest.mark.parametrize("text", ["2,20", "1", "x,20", "1,20,disk", "1,-5", "1,20,data,more"])
def test_a_bad_straggler_is_refused_before_anything_is_written(tmp_path, text):
    launched = Launched(tmp_path, "demo", "--straggler", text).wait()
    assert launched.code == 2
    assert not (tmp_path / "paceline-demo").exists()


def check_straggler(result, *, rank, cause, about_ms):
    found, injected = result["straggler"], result["injected"]
    assert (found["rank"], found["cause"]) == (rank, cause)
    assert injected["injected_ms"] == pytest.approx(about_ms, rel=0.25)
    assert found["late_ms"] == pytest.approx(found["injected_ms"], rel=0.25)
    length = injected["last_step"] - injected["first_step"] + 1
    assert abs(found["first_step"] - injected["first_step"]) <= 0.1 * length
    assert abs(found["last_step"] - injected["last_step"]) <= 0.1 * length
