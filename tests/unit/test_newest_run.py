"""Which run a command takes that names none."""

import json
import os

import pytest

from paceline.core.errors import NotFound
from paceline.runs.folder import RunFolder
from paceline.runs.newest import newest_run, refuse_folder_of_runs


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


def test_a_run_that_recorded_nothing_is_taken_only_where_there_is_no_other(tmp_path):
    empty = _run(tmp_path / "paceline-runs" / "mistyped", 2_000)
    assert newest_run(tmp_path) == empty
    mine = _run(tmp_path / "mine", 1_000)
    (mine / "trace" / "rank-00000.trace").touch()
    assert newest_run(tmp_path) == mine


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


def test_folders_that_cannot_be_read_are_passed_over(tmp_path, monkeypatch):
    """lost+found, which is root's, and a folder with a subfolder run/ and JSON of another kind."""
    mine = _run(tmp_path / "mine", 1_000)
    (tmp_path / "app" / "run").mkdir(parents=True)
    (tmp_path / "app" / "result.json").write_text("not JSON")
    (tmp_path / "lost+found").mkdir()
    opened = RunFolder.open

    def refuse_lost_and_found(path):
        if path.name == "lost+found":  # a test may run as root, whom no mode keeps out
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path)

    monkeypatch.setattr(RunFolder, "open", refuse_lost_and_found)
    assert newest_run(tmp_path) == mine


def test_a_folder_of_runs_is_not_a_run_and_its_newest_is_named(tmp_path):
    runs = tmp_path / "paceline-runs"
    _run(runs / "train-1", 1_000)
    newest = _run(runs / "train-2", 2_000)
    (tmp_path / "config.json").write_text("{}")  # of the project
    for folder in (tmp_path, runs):
        with pytest.raises(NotFound, match="not the folder of a run") as caught:
            refuse_folder_of_runs(folder)
        assert caught.value.where == str(folder)
        assert caught.value.why == "it holds 2 runs"
        assert str(newest) in caught.value.fix


def test_a_run_a_demo_and_a_folder_without_runs_are_not_folders_of_runs(tmp_path):
    demo = tmp_path / "paceline-demo"
    _run(demo / "run", 2_000)
    (demo / "result.json").write_text(json.dumps({"version": 1, "kind": "demo"}))
    (tmp_path / "empty").mkdir()
    for folder in (demo, demo / "run", tmp_path / "empty", tmp_path / "nothing"):
        refuse_folder_of_runs(folder)
