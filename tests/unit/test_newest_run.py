"""Which run a command takes that names none."""

import json
import os

import pytest

from paceline.core.errors import NotFound
from paceline.runs.newest import newest_run


def _run(folder, started_s):
    (folder / "trace").mkdir(parents=True)
    config = folder / "config.json"
    config.write_text("{}")
    os.utime(config, (started_s, started_s))
    return folder


def test_the_run_that_was_started_last_is_taken(tmp_path):
    old = _run(tmp_path / "paceline-runs" / "train-1", 1_000)
    mine = _run(tmp_path / "mine", 3_000)  # as with --out mine
    _run(tmp_path / "paceline-runs" / "train-2", 2_000)
    assert newest_run(tmp_path) == mine
    os.utime(old / "config.json", (4_000, 4_000))
    assert newest_run(tmp_path) == old


def test_inside_a_run_that_run_is_taken(tmp_path):
    assert newest_run(_run(tmp_path / "mine", 1_000)) == tmp_path / "mine"


def test_the_run_of_the_demo_counts(tmp_path):
    demo = tmp_path / "paceline-demo"
    _run(demo / "run", 2_000)
    (demo / "result.json").write_text(json.dumps({"version": 1, "kind": "demo"}))
    _run(tmp_path / "paceline-runs" / "train-1", 1_000)
    assert newest_run(tmp_path) == demo


def test_what_is_not_a_run_is_passed_over(tmp_path):
    (tmp_path / "data" / "trace").mkdir(parents=True)
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotFound, match="no run here") as caught:
        newest_run(tmp_path)
    assert str(tmp_path) in caught.value.where
