"""`paceline run --memory-budget`: an unchanged script on two ranks, out of core."""

import json

import pytest
from support.launching import SCRIPTS, last_json, paceline

MIB = 1 << 20
SCRIPT = SCRIPTS / "out_of_core.py"


@pytest.mark.campaign("torch")
def test_an_unchanged_script_trains_the_same_in_less_memory(tmp_path):
    plain = paceline(tmp_path, "run", "-n", 2, "--out", "PLAIN", SCRIPT)
    assert plain.code == 0, plain.err
    folder = ("--spill-folder", tmp_path)
    wide = paceline(
        tmp_path, "run", "-n", 2, "--memory-budget", "1T", *folder, "--out", "WIDE", SCRIPT
    )
    assert wide.code == 0, wide.err
    assert "nothing is spilled" in wide.err
    result = json.loads((tmp_path / "WIDE/result.json").read_text())
    peaks = [rank["memory"]["predicted_peak_bytes"] for rank in result["ranks"]]

    budget = min(peaks) - 8 * MIB
    tight = paceline(
        tmp_path, "run", "-n", 2, "--memory-budget", budget, *folder, "--out", "TIGHT", SCRIPT
    )
    assert tight.code == 0, tight.err
    assert "go to disk and back" in tight.err
    result = json.loads((tmp_path / "TIGHT/result.json").read_text())
    for rank in result["ranks"]:
        assert rank["memory"]["budget_bytes"] == budget
        assert rank["memory"]["spilled_bytes"] > 0
        assert rank["memory"]["planned_steps"] >= 2
        assert rank["memory"]["transfer_s"] > 0
    found = last_json(paceline(tmp_path, "why", "TIGHT", "--json").out)
    # Ranks plan by what each measured, so that two may choose other tensors to spill.
    waits = {rank["rank"]: rank["memory"]["exposed_s"] for rank in result["ranks"]}
    slowest = found["spilling"]["rank"]
    assert waits[slowest] == max(waits.values())
    memory = result["ranks"][slowest]["memory"]
    assert found["spilling"]["spilled_bytes"] == memory["spilled_bytes"]
    assert "a step spills " in found["verdict"]
    assert paceline(tmp_path, "report", "TIGHT").code == 0
    assert "A step out of core" in (tmp_path / "TIGHT/report.html").read_text()
    digests = [last_json(run.out)["digest"] for run in (plain, wide, tight)]
    assert len(set(digests)) == 1


def test_a_budget_without_a_unit_that_is_known_is_refused(tmp_path):
    done = paceline(tmp_path, "run", "--memory-budget", "8 hats", SCRIPT)
    assert done.code == 2
    assert "is not a size" in done.err


def test_an_executable_with_a_budget_is_refused(tmp_path):
    done = paceline(tmp_path, "run", "--memory-budget", "1G", "/bin/true")
    assert done.code == 2
    assert "a memory budget needs a Python script" in done.err


@pytest.mark.campaign("torch")
def test_a_spill_folder_that_is_not_there_fails_the_run(tmp_path):
    done = paceline(
        tmp_path, "run", "--memory-budget", "1G", "--spill-folder", tmp_path / "none", SCRIPT
    )
    assert done.code == 1
    assert "cannot make a spill file" in done.err
