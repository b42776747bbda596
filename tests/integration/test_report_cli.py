"""`paceline why`, `report` and `trace` as a user calls them; none of them may load torch."""

import json
import os
from pathlib import Path

import pytest
from support.command_line import without_torch
from support.traces import Late, data_parallel, write_run

from paceline.trace.format.files import trace_name


def _paceline(*arguments, **options):
    return without_torch(*arguments, text=True, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    late = (Late(1, 18, 40, 80),)
    return write_run(tmp_path_factory.mktemp("run"), data_parallel(2, 120, late=late))


def test_why_says_it_in_a_sentence(run):
    done = _paceline("why", run)
    assert done.returncode == 0, done.stderr
    verdict, *advice = done.stdout.splitlines()
    assert verdict == (
        "Rank 1 arrives 18 ms late at every all-reduce between steps 40 and 80, because of data "
        "loading; rank 0 waits 64 % of each of these steps. A step ends with each step of the "
        "optimizer."
    )
    assert advice[0] == (
        "What would help: Loading the next batch while the ranks compute would hide 9.0 of 19.0 ms "
        "of waiting for data in steps 40 to 80. Saves up to 23 % of the loop. Of a mean step "
        "of 28.0 ms rank 1 waits 19.0 ms for data."
    )


def test_why_as_json(run):
    data = json.loads(_paceline("why", run, "--json").stdout)
    assert (data["version"], data["kind"]) == (1, "why")
    assert data["stragglers"][0]["cause"] == "data"
    assert data["nan"] is None
    assert data["step_rule"] == "optimizer"


def test_the_verdict_as_json_leaves_the_cautions_to_their_own_field(tmp_path):
    run = write_run(tmp_path, data_parallel(2, 30)[:1])
    (run / "config.json").write_text('{"launcher": {"host": "elsewhere", "boot": "b", "pid": 1}}')
    for command in ("why", "report"):
        data = json.loads(_paceline(command, run, "--json").stdout)
        assert any("The run has no result" in caution for caution in data["cautions"])
        assert "The run has no result" not in data["verdict"]
    first, second, *_ = _paceline("why", run).stdout.splitlines()  # as report shows them
    assert first.startswith("The run has no result")
    assert "The run has no result" not in second


def test_report_writes_its_page_and_shows_the_rest(run, tmp_path):
    page = tmp_path / "page.html"
    done = _paceline("report", run, "--out", page)
    assert done.returncode == 0, done.stderr
    assert "Rank 1 arrives 18 ms late" in done.stdout
    assert "all_reduce" in done.stdout
    assert str(page) in done.stderr
    assert page.read_text().startswith("<!doctype html>")


def test_report_as_json_keeps_stdout_clean(run):
    done = _paceline("report", run, "--json")
    data = json.loads(done.stdout)
    assert data["report"] == str(run / "report.html")
    assert (run / "report.html").exists()


def test_trace_export_and_stats(run, tmp_path):
    done = _paceline("trace", "export", run, "--format", "chrome", "--out", tmp_path / "one.json")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "one.json").read_text())["traceEvents"]
    again = _paceline("trace", "export", run, "--out", tmp_path / "one.json")
    assert again.returncode == 2
    assert _paceline("trace", "export", run).returncode == 0
    assert (run / "trace.json").exists()
    assert _paceline("trace", "export", run, "--out", tmp_path / "no" / "x").returncode == 2
    shown = _paceline("trace", "stats", run)
    assert "collective" in shown.stdout
    data = json.loads(_paceline("trace", "stats", run, "--json").stdout)
    assert data["ranks"][1]["events"]["step"] == 120


@pytest.mark.parametrize("verb", [["why"], ["report"], ["trace", "stats"], ["trace", "export"]])
def test_missing_runs_are_misuse_and_damaged_ones_corrupt(verb, tmp_path):
    missing = _paceline(*verb, tmp_path / "nothing")
    assert missing.returncode == 2
    assert "nothing" in missing.stderr
    run = write_run(tmp_path / "run", data_parallel(2, 10))
    path = run / "trace" / trace_name(1)
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(bytes(data))
    damaged = _paceline(*verb, run)
    assert damaged.returncode == 4
    assert "rank 1" in damaged.stderr


def test_errors_are_json_when_asked(tmp_path):
    done = _paceline("why", tmp_path / "nothing", "--json")
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "NotFound"
    assert error["fix"]


@pytest.mark.parametrize("verb", [["why"], ["report"], ["trace", "stats", "--json"]])
def test_a_full_disk_behind_stdout_is_explained(run, verb):
    with Path("/dev/full").open("w") as full:
        done = _paceline(*verb, run, stdout=full)
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "standard output" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", ["why", "report", "trace"])
def test_help_has_an_example(verb):
    done = _paceline(verb, "--help")
    assert done.returncode == 0
    assert "Example: paceline" in done.stdout


def test_the_demos_folder_stands_for_its_run(tmp_path):
    write_run(tmp_path / "run", data_parallel(2, 30))
    (tmp_path / "result.json").write_text('{"version": 1, "kind": "demo"}')
    for verb in ("why", "report"):
        done = _paceline(verb, tmp_path)
        assert done.returncode == 0, done.stderr
        assert "No rank was late in 30 steps" in done.stdout
    for verb in ("stats", "export"):
        done = _paceline("trace", verb, tmp_path)
        assert done.returncode == 0, done.stderr
    # What a verb makes of the run stands in the run.
    assert (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "trace.json").exists()


def test_without_an_argument_the_newest_run_is_taken(run, tmp_path):
    (tmp_path / "mine").symlink_to(run)
    (run / "config.json").write_text('{"version": 2, "values": {}, "script": "train.py"}')
    done = _paceline("why", "--verbose", cwd=tmp_path)
    (run / "config.json").unlink()
    assert "run: mine (the newest one here)" in done.stderr
    assert "Rank 1 arrives 18 ms late" in done.stdout
    assert "straggler" in done.stdout
    assert "communication" in done.stdout


def test_an_ascii_locale_gets_ascii(run):
    environ = {**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "80"}
    done = without_torch("report", run, env=environ)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode("ascii").splitlines()
    assert any(line.startswith("-----") for line in lines)
    assert max(map(len, lines)) <= 80


def test_without_any_run_the_fix_is_named(tmp_path):
    (tmp_path / "data").mkdir()
    done = _paceline("why", cwd=tmp_path)
    assert done.returncode == 2
    assert "no run here" in done.stderr
    assert "paceline run script.py" in done.stderr
