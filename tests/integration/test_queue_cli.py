"""``paceline queue simulate`` as a user meets it: output, files, exit codes, and never torch."""

import json
import os
import pty

import pytest
from support import queues
from support.command_line import without_torch

from paceline.cli.queue.group import VERBS
from paceline.cli.queue.progress import shown_progress
from paceline.cli.queue.simulate import FORMATS as CHOICES
from paceline.core.clock import ManualClock
from paceline.scheduler.cluster import Cluster
from paceline.scheduler.formats.read import FORMATS


def paceline(folder, *args, **options):
    return without_torch("queue", *args, cwd=folder, text=True, **options)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "jobs.csv").write_text(queues.OWN)
    (tmp_path / "rates.csv").write_text(queues.OWN_RATES)
    (tmp_path / "philly.csv").write_text(queues.PHILLY)
    return tmp_path


def test_a_table_a_page_and_a_log_from_one_command(folder):
    done = paceline(
        folder,
        *("simulate", "jobs.csv", "--rates", "rates.csv", "--cluster", "v100=1x2,p100=1x2"),
        *("--policy", "fifo", "--out", "queue.html", "--log", "decisions.jsonl"),
    )
    assert done.returncode == 0, done.stderr
    assert "2 jobs on 2 v100, 2 p100 in 2 nodes" in done.stdout
    assert "fifo" in done.stdout
    assert "lower bound" in done.stdout
    assert "simulate: wrote queue.html" in done.stderr
    assert "<h2>Devices over time</h2>" in (folder / "queue.html").read_text()
    decisions = [json.loads(line) for line in (folder / "decisions.jsonl").read_text().splitlines()]
    assert [(d["policy"], d["action"], d["name"]) for d in decisions] == [
        ("fifo", "start", "train"),
        ("fifo", "start", "tune"),
    ]
    assert decisions[0]["placement"]["parts"] == [{"node": "v100-0", "devices": [0, 1]}]
    assert all(decision["reason"] and decision["inputs"] for decision in decisions)


def test_json_is_one_object_and_the_same_for_the_same_seed(folder):
    args = ("simulate", "philly.csv", "--cluster", "2x8", "--failures", "2", "--seed", "5")
    options = ("--durations", "2", "--rate-error", "0.3", "--restart", "60", "--json")
    first, second = (paceline(folder, *args, *options) for _ in range(2))
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    shown = json.loads(first.stdout)
    assert (shown["version"], shown["kind"], shown["seed"]) == (1, "queue-simulation", 5)
    assert shown["trace"] == "philly.csv"
    assert shown["cluster"] == {"nodes": 2, "devices": {"gpu": 16}}
    assert shown["policies"][0]["jobs"] == 3
    assert shown["scenario"]["rate_error"] == 0.3


def test_the_first_jobs_only_and_a_cluster_from_a_file(folder):
    (folder / "cluster.json").write_text(Cluster.of_text("1x2").to_text())
    done = paceline(
        folder, "simulate", "philly.csv", "--cluster", "cluster.json", "--jobs", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["policies"][0]["jobs"] == 2


def test_a_job_that_can_never_run_is_named_with_the_reason(folder):
    done = paceline(folder, "simulate", "philly.csv", "--cluster", "1x8")
    assert done.returncode == 0, done.stderr
    assert "job 2 can never run: it needs 16 devices" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("philly.csv",), 2, "needs a cluster"),
        (("none.csv", "--cluster", "1x8"), 2, "no such file"),
        (("philly.csv", "--cluster", "many"), 2, "does not describe nodes"),
        (("philly.csv", "--cluster", "none.json"), 2, "no such file"),
        (("philly.csv", "--cluster", "1x8", "--policy", "fiffo"), 2, "no policy 'fiffo'"),
        (("philly.csv", "--cluster", "1x8", "--durations", "soon"), 2, "known, unknown"),
        (("philly.csv", "--cluster", "1x8", "--out", "rates.csv"), 2, "not overwrite"),
        (("philly.csv", "--cluster", "1x8", "--log", "rates.csv"), 2, "not overwrite"),
        (("philly.csv", "--cluster", "1x8", "--log", "none/log"), 2, "no such folder"),
        (("philly.csv", "--cluster", "1x8", "--format", "muri"), 4, "no column 'job_id'"),
        (("wrong.csv", "--cluster", "1x8"), 4, "wrong.csv, line 4, duration"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(folder, args, code, words):
    (folder / "wrong.csv").write_text(queues.PHILLY.replace(",3600,", ",an hour,"))
    done = paceline(folder, "simulate", *args, "--json")
    assert done.returncode == code
    assert done.stderr == ""
    error = json.loads(done.stdout)["error"]
    assert words in f"{error['what']} ({error['where']})"
    assert error["fix"]


def test_a_subcommand_with_a_slip_is_answered_with_the_nearest(folder):
    done = paceline(folder, "simulat")
    assert done.returncode == 2
    assert "simulate" in done.stderr


def test_the_help_names_every_subcommand_and_every_format(folder):
    shown = paceline(folder, "--help").stdout
    assert [verb for verb in VERBS if verb not in shown] == []
    assert set(CHOICES) >= set(FORMATS)
    assert "Example: paceline queue simulate" in paceline(folder, "simulate", "--help").stdout


class _Left:
    def __init__(self, jobs_left):
        self.jobs_left = jobs_left


def test_progress_is_a_line_every_ten_seconds_with_the_time_left(capsys):
    clock = ManualClock()
    with shown_progress(["fifo", "las"], 100, clock) as of_policy:
        show = of_policy(0)
        for instant in range(64 * 30):
            if instant % 64 == 0:
                clock.advance(1.0)
            show(_Left(100 - instant // 64))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("simulate: fifo, 9 of 100 jobs done, about ")
    assert lines[0].endswith("s left, then las")


def test_on_a_terminal_progress_is_a_bar_that_goes_away(folder):
    master, terminal = pty.openpty()
    args = ("simulate", "philly.csv", "--cluster", "2x8", "--policy", "fifo", "--json")
    done = paceline(folder, *args, stderr=terminal, env={**os.environ, "TERM": "xterm"})
    os.close(terminal)
    assert done.returncode == 0
    assert json.loads(done.stdout)["kind"] == "queue-simulation"
    assert b"fifo" in os.read(master, 1 << 16)
    os.close(master)
