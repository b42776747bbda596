"""A run folder that version 1 of every format wrote: report, why and trace still read it."""

import json
import re
import shutil

import pytest
from click.testing import CliRunner

from paceline.cli.app import app


@pytest.fixture
def run(root, tmp_path):
    return shutil.copytree(root / "tests/golden/run-v1", tmp_path / "run")


def paceline(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_report_shows_it_with_its_prediction(run, tmp_path):
    done = paceline("report", run, "--out", tmp_path / "page.html", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["world_size"], report["steps"]) == (2, 23)
    assert report["step_time_error"] is not None
    assert "backward" in (tmp_path / "page.html").read_text()


def test_why_gives_a_verdict(run):
    done = paceline("why", run)
    assert done.exit_code == 0, done.output
    assert re.match("No rank was late .*in 23 steps", done.stdout)


def test_trace_stats_counts_its_collectives(run):
    done = paceline("trace", "stats", run, "--json")
    assert done.exit_code == 0, done.output
    operations = {line["operation"] for line in json.loads(done.stdout)["traffic"]}
    assert {"all_reduce", "broadcast"} <= operations


def test_a_newer_folder_names_the_version_that_is_needed(run):
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "version": 99}))
    versions = json.loads((run / "versions.json").read_text())
    (run / "versions.json").write_text(json.dumps({**versions, "paceline": "7.1.0"}))
    done = paceline("report", run)
    assert done.exit_code != 0
    assert "99" in str(done.exception)
    assert "7.1.0" in str(done.exception)
