"""The folder of a run: older files open, newer ones say what is needed, damaged ones are named."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from paceline.core.errors import CorruptData, NotFound, UsageError
from paceline.runs.folder import RunFolder, RunState
from paceline.runs.launcher import is_alive, this_launcher
from paceline.runs.result import RunResult

RESULT = RunResult(exit_code=0, world_size=2, step_time_s=0.1, loop_wall_s=1.0, ranks=())


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "RUN"
    (folder / "trace").mkdir(parents=True)
    return RunFolder(folder)


def test_what_launch_writes_is_read(run):
    run.file("result.json").write_text(RESULT.to_text())
    assert run.read_result() == RESULT
    assert RunFolder.open(run.path).read_result() == RESULT
    assert run.trace.is_dir()


def test_a_run_without_files_has_nothing_to_read(run):
    assert run.read_result() is None
    assert run.read_config() == {}
    assert run.read_versions() == {}
    with pytest.raises(NotFound, match="no such run"):
        RunFolder.open(run.path / "none")


def test_the_demos_folder_stands_for_its_run(tmp_path, run):
    inner = tmp_path / "run"
    run.path.rename(inner)
    assert RunFolder.open(tmp_path).path == tmp_path
    (tmp_path / "result.json").write_text('{"kind": "demo"}')
    assert RunFolder.open(tmp_path).path == inner


def test_a_configuration_of_version_1_is_read(run):
    """It named the provenance of a setting "origin"."""
    values = {"ranks": {"value": 2, "origin": "flag"}}
    old = {"version": 1, "values": values, "script": "train.py", "world_size": 2}
    run.file("config.json").write_text(json.dumps(old))
    config = run.read_config()
    assert config["values"] == {"ranks": {"value": 2, "provenance": "flag"}}
    assert config["script"] == "train.py"


@pytest.mark.parametrize("name", ["result.json", "config.json", "versions.json"])
@pytest.mark.parametrize("writer", [None, "0.9.1"])
def test_a_newer_file_says_which_paceline_wrote_it(run, name, writer):
    if writer:
        run.file("versions.json").write_text(json.dumps({"version": 1, "paceline": writer}))
    data = {**RESULT.to_json(), "version": 99, "paceline": writer}
    run.file(name).write_text(json.dumps(data))
    read = {
        "result.json": run.read_result,
        "config.json": run.read_config,
        "versions.json": run.read_versions,
    }[name]
    with pytest.raises(UsageError, match="a newer Paceline wrote this run") as caught:
        read()
    assert caught.value.where == str(run.file(name))
    assert "format version 99" in caught.value.why
    assert caught.value.fix == f"Use {f'Paceline {writer} or' if writer else 'a'} newer" + (
        "" if writer else " Paceline"
    )


@pytest.mark.parametrize("text", ["{", '{"version": 1, "exit_code": "none"}', "\0"])
def test_a_damaged_file_is_named(run, text):
    run.file("result.json").write_text(text)
    with pytest.raises(CorruptData, match="not readable") as caught:
        run.read_result()
    assert "result.json" in caught.value.where
    assert caught.value.fix


def started_by(run, launcher):
    run.file("config.json").write_text(json.dumps({"version": 2, "launcher": launcher}))
    return run


def test_a_run_with_a_result_is_finished(run):
    started_by(run, this_launcher()).file("result.json").write_text(RESULT.to_text())
    assert (run.state(), run.state_words()) == (RunState.FINISHED, "")


def test_a_run_that_a_signal_ended_is_stopped(run):
    stopped = dataclasses.replace(RESULT, exit_code=130, failure=None)
    started_by(run, this_launcher()).file("result.json").write_text(stopped.to_text())
    assert run.state() is RunState.STOPPED
    assert "stopped by a signal" in run.state_words()


def test_the_state_of_a_run_with_a_damaged_result_is_known(run):
    run.file("result.json").write_text("{")
    assert run.state() is RunState.FINISHED


def test_a_run_whose_launcher_is_alive_goes_on(run):
    assert started_by(run, this_launcher()).state() is RunState.RUNNING
    assert "still going on" in run.state_words()


def test_a_run_whose_launcher_is_gone_did_not_come_to_its_end(run):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        launcher = {**this_launcher(), "pid": child.pid}
        child.communicate(b"\n")
    assert started_by(run, launcher).state() is RunState.LAUNCHER_KILLED
    assert "its launcher was killed" in run.state_words()


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"started_ticks": 1}, False),  # the number is another process's now
        ({"boot_id": "before"}, False),  # this machine was started again
        ({"boot_id": "other", "host": "other"}, None),
        ({"namespace": "pid:[1]"}, None),  # in a container
        ({"boot_id": ""}, None),
    ],
)
def test_a_launcher_is_known_by_more_than_its_number(changes, alive):
    assert is_alive({**this_launcher(), **changes}) is alive
    assert this_launcher()["pid"] == os.getpid()


@pytest.mark.parametrize("launcher", [None, "x", {}, {"host": "far", "boot_id": "b"}])
def test_of_other_launchers_nothing_is_claimed(run, launcher):
    assert started_by(run, launcher).state() is RunState.UNKNOWN
    assert ("killed" in run.state_words()) == isinstance(launcher, dict)
