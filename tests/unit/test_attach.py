"""How a process becomes a rank of a recorded run, and what keeps it from becoming one."""

import json
import logging
import os
import sys

import pytest

from paceline.core.errors import DestinationExists
from paceline.launch import attach, scripted
from paceline.launch.failure_report import read_reports
from paceline.launch.summary import summarize, trace_warnings
from paceline.native import Recorder
from paceline.trace.format.files import trace_name


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "trace").mkdir()
    monkeypatch.setattr(logging.getLogger("paceline"), "propagate", True)  # a worker turns it off
    monkeypatch.setenv(attach.VARIABLE, json.dumps({"run": str(tmp_path)}))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def trace(run, rank, world_size, steps=2):
    path = run / "trace" / trace_name(rank)
    recorder = Recorder(str(path), rank, world_size)
    for _ in range(steps):
        recorder.end_step()
    recorder.close()
    return path


def test_a_second_job_of_one_run_with_other_ranks_is_not_recorded(run):
    """`python pretrain.py; torchrun train.py` in one shell script: rank 1 is new in the folder."""
    trace(run, 0, 1)
    for rank in range(2):
        with pytest.raises(DestinationExists, match="a job with world size 1 is recorded"):
            attach._open(run, rank, 2)
    assert not (run / "trace" / trace_name(1)).exists()


def test_ranks_are_recorded_beside_the_parent_that_starts_them_and_beside_each_other(run):
    trace(run, 0, 1, steps=0)
    attach._open(run, 1, 2).close()
    attach._open(run, 0, 2).close()  # replaces that of the parent


def test_a_run_with_a_damaged_trace_keeps_its_exit_code_and_says_why_it_has_no_measurements(run):
    trace(run, 0, 1)
    trace(run, 1, 2)
    result = summarize(run, 2, 0)
    assert (result.exit_code, result.world_size, result.ranks) == (0, 2, ())
    (run / "result.json").write_text(result.to_text())
    (warning,) = trace_warnings(run)
    assert "no measurements: the traces are of runs with different numbers of ranks" in warning


def test_the_line_in_the_script_changes_nothing_below_the_launcher(run, caplog):
    """Below torchrun --max-restarts the rank's trace is there: training goes on, unrecorded."""
    before = trace(run, 0, 1).read_bytes()
    scripted.record("elsewhere")
    assert "another process is recorded as rank 0" in caplog.text
    assert (run / "trace" / trace_name(0)).read_bytes() == before


@pytest.fixture
def forked(run, monkeypatch):
    """This process, as if it were forked from one that is recorded."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    monkeypatch.setattr(attach.atexit, "register", lambda _: None)
    parent = attach._Recording(os.getpid(), run, 0, None, None)
    monkeypatch.setattr(attach, "start", lambda *_: None)
    monkeypatch.setattr(attach, "_recording", parent)
    attach.start_here(run)
    parent.pid += 1
    return run


def test_a_rank_that_is_forked_after_its_parent_has_trained_says_that_it_is_not_recorded(
    forked, caplog
):
    attach.on_training()
    assert "this process is not recorded: it was forked by a process that had" in caplog.text


def test_what_a_forked_child_raises_is_not_a_failure_of_its_parents_rank(forked):
    sys.excepthook(ValueError, ValueError("of the child"), None)
    assert read_reports(forked) == []
