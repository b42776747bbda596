"""``paceline characterize`` with real ranks: it goes on after a kill, names failures, is read."""

import json
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import forking
from support.command_line import without_torch

from paceline.cli.app import app

SCRIPT = Path(__file__).parent / "scripts" / "swept.py"
DEADLINE_S = 120
MODEL = "layers=12,hidden=768,heads=12,vocab=30522,sequence=128"


def characterize(tmp_path, *ending, repeats=1):
    arguments = ["{batch}", "{ranks}", "{result}", str(tmp_path / "mark"), *ending]
    return forking.run(
        [
            *(sys.executable, "-m", "paceline", "characterize", "--batch", "8", "--ranks", "1,2"),
            *("--repeats", str(repeats), "--out", "sweep", "--json", str(SCRIPT), *arguments),
        ],
        modules=forking.TORCH,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def lines(tmp_path):
    return (tmp_path / "sweep" / "cells.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    "name", ["SIGKILL", pytest.param("SIGINT", marks=pytest.mark.campaign("faults"))]
)
def test_a_sweep_that_was_interrupted_goes_on_where_it_was(tmp_path, name):
    pytest.importorskip("torch")
    stopped = characterize(tmp_path, name)
    if name == "SIGKILL":
        assert stopped.returncode == -signal.SIGKILL
    else:
        assert stopped.returncode == 130
        assert "the same command goes on where it was" in stopped.stderr
    before = lines(tmp_path)
    assert [json.loads(line)["ranks"] for line in before] == [1]

    done = characterize(tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert "run 1 of 2" not in done.stderr  # it has ended before
    assert "run 2 of 2" in done.stderr
    after = lines(tmp_path)
    assert after[0] == before[0]
    assert [json.loads(line)["ranks"] for line in after] == [1, 2]
    profile = json.loads(done.stdout)
    assert [point["ranks"] for point in profile["curves"][0]["points"]] == [1, 2]
    assert all(p["scores"]["accuracy"]["value"] == 0.58 for p in profile["curves"][0]["points"])
    assert (tmp_path / "sweep" / "report.html").exists()


def test_a_cell_that_fails_is_named_and_the_others_are_measured(tmp_path):
    pytest.importorskip("torch")
    done = characterize(tmp_path, "raise")
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert [point["ranks"] for point in profile["curves"][0]["points"]] == [1]
    (failed,) = profile["failed"]
    assert failed["ranks"] == 2
    assert "it does not run on two ranks" in failed["why"]


def test_a_predicted_profile_feeds_the_simulator_without_torch(tmp_path):
    sweep = ["characterize", "--predict", "--machine", "summitdev", "--model", MODEL]
    sweep += ["--batch", "8,32", "--ranks", "1,4,16", "--out", "predicted", "--json"]
    done = without_torch(*sweep, cwd=tmp_path, text=True)
    assert done.returncode == 0, done.stderr
    curve = json.loads(done.stdout)["curves"][0]
    rate = curve["points"][1]["throughput"]["value"]
    (tmp_path / "jobs.csv").write_text(
        f"name,devices,profile,work\na,4,{curve['name']},{1000 * rate}\n"
    )
    simulated = without_torch(
        *("queue", "simulate", "jobs.csv", "--rates", "predicted", "--cluster", "1x4"),
        *("--policy", "fifo", "--json"),
        cwd=tmp_path,
        text=True,
    )
    assert simulated.returncode == 0, simulated.stderr
    makespan_s = json.loads(simulated.stdout)["policies"][0]["makespan_s"]
    assert makespan_s == pytest.approx(1000)
    planned = without_torch(
        *("plan", "none.json", "--from", "predicted", "--json"), cwd=tmp_path, text=True
    )
    assert planned.returncode == 2
    assert "followed a plan" in json.loads(planned.stdout)["error"]["what"]


def test_misuse_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, words in (
        (["--vary", "lr"], "Give NAME=VALUE,VALUE"),
        (["--budget", "soon"], "is no time"),
        (["--ranks", "0"], "not a whole number of at least 1"),
        (["--predict"], "a prediction needs a model and batches"),
        (["--optimizer", "adam"], "optimizer cannot be 'adam'"),
        (["--batch", "8", str(SCRIPT)], "axis batch does not reach the program"),
    ):
        done = CliRunner().invoke(app, ["characterize", *arguments])
        said = str(done.exception) + done.output
        assert words in said, arguments
        assert getattr(done.exception, "exit_code", done.exit_code) == 2
    assert not (tmp_path / "paceline-characterize").exists()
