"""`paceline run --collectives paceline`: an unchanged script on the backend, and its trace."""

import json
import sys
from pathlib import Path

import pytest
from support.launching import SCRIPTS, last_json, paceline

from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

PATHS = {"shared memory", "gloo"}
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    folder = tmp_path_factory.mktemp("collectives")
    names = ("plain", "any_source", "groups", "fsdp", "dtensor", "ddp")
    options = ("--collectives", "paceline", "--out", "RUN")
    done = paceline(folder, "run", "-n", 2, *options, SCRIPTS / "collectives.py", *names)
    assert done.code == 0, done.err
    return done


@pytest.fixture(scope="module")
def trace(done):
    return load_run(done.folder / "RUN")


def test_the_script_gets_the_backend_and_the_output_says_so(done):
    assert last_json(done.out)["backend"] == "paceline"
    assert "collectives paceline (in place of gloo" in done.err
    assert "not recorded" not in done.err
    done.assert_nothing_left()


def test_the_setting_is_kept_with_the_run(done):
    config = json.loads((done.folder / "RUN/config.json").read_text())
    assert config["values"]["collectives"] == {"value": "paceline", "provenance": "flag"}


def test_both_ranks_tell_the_same_of_each_collective(trace):
    matches = trace.matches
    assert (matches.instances["ranks"] == 2).sum() > 30
    assert matches.mismatches() == ()


def test_sequences_of_each_group_count_from_one(trace):
    for rank in trace.ranks:
        events = rank.events_of(Kind.COLLECTIVE)
        for group in set(events["group"].tolist()):
            numbers = events["sequence"][events["group"] == group].tolist()
            assert numbers == list(range(1, len(numbers) + 1))


def test_a_collective_says_which_path_it_took(trace):
    for rank in trace.ranks:
        events = rank.events_of(Kind.COLLECTIVE)
        own = events[events["tag"] > 0]
        assert {rank.names[tag] for tag in own["tag"]} <= PATHS
        reductions = own[[rank.names[name] == "all_reduce" for name in own["name"]]]
        assert {rank.names[tag] for tag in reductions["tag"]} == {"shared memory"}


def test_the_thread_that_made_a_call_waited_for_it(trace):
    for rank in trace.ranks:
        waits = rank.events_of(Kind.WAIT)
        named = {rank.names[name] for name in waits["name"]}
        assert {"all_reduce", "all_gather", "reduce_scatter"} <= named
        assert (waits["end_ns"] >= waits["begin_ns"]).all()


def test_the_report_names_the_path_of_every_all_reduce_and_of_ddps_broadcasts(done):
    report = paceline(done.folder, "report", "RUN", "--json")
    lines = last_json(report.out)["collectives"]
    paths = {(line["operation"], line["path"]) for line in lines}
    assert {path for operation, path in paths if operation == "all_reduce"} == {"shared memory"}
    assert {path for operation, path in paths if operation == "broadcast"} == {"shared memory"}
    assert {path for operation, path in paths if operation in ("send", "recv")} <= {""}
    explained = paceline(done.folder, "why", "RUN")
    assert "Paths of the collectives: shared memory (" in explained.out
    shown = paceline(done.folder, "report", "RUN")
    assert "shared memory" in shown.out + shown.err


# --- ranks that Paceline does not start itself ----------------------------------------------------


def paths_of_all_reduces(run):
    """The paths of each rank's all-reduces."""
    found = []
    for rank in load_run(run).ranks:
        events = rank.events_of(Kind.COLLECTIVE)
        reductions = events[[rank.names[name] == "all_reduce" for name in events["name"]]]
        found.append({rank.names[tag] for tag in reductions["tag"]})
    return found


@pytest.mark.campaign("launchers")
def test_ranks_that_a_script_spawns_get_the_backend(tmp_path):
    options = ("--collectives", "paceline", "--out", "RUN")
    done = paceline(tmp_path, "run", *options, SCRIPTS / "spawns.py", 10)
    assert done.code == 0, done.err
    assert paths_of_all_reduces(tmp_path / "RUN") == [{"shared memory"}] * 2


@pytest.mark.campaign("launchers")
def test_ranks_below_a_program_that_is_not_python_get_the_backend(tmp_path):
    (tmp_path / "train.sh").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "train.sh").chmod(0o755)
    options = ("-n", 2, "--collectives", "paceline", "--out", "RUN")
    script = (SCRIPTS / "collectives.py", "plain")
    done = paceline(tmp_path, "run", *options, "./train.sh", *script)
    assert done.code == 0, done.err
    assert paths_of_all_reduces(tmp_path / "RUN") == [{"shared memory"}] * 2


@pytest.mark.campaign("launchers")
def test_ranks_of_a_recorded_torchrun_get_the_backend(tmp_path):
    options = ("--collectives", "paceline", "--out", "RUN")
    torchrun = (TORCHRUN, "--standalone", "--nproc-per-node", 2)
    script = (SCRIPTS / "collectives.py", "plain")
    done = paceline(tmp_path, "record", *options, "--", *torchrun, *script)
    assert done.code == 0, done.err
    assert paths_of_all_reduces(tmp_path / "RUN") == [{"shared memory"}] * 2
    assert json.loads((tmp_path / "RUN/config.json").read_text())["collectives"] == "paceline"


@pytest.mark.parametrize("verb", [("run",), ("record", "--", sys.executable)])
def test_a_misspelt_setting_of_the_backend_starts_no_rank(tmp_path, monkeypatch, verb):
    monkeypatch.setenv("PACELINE_COLLECTIVES__WIR", "bfloat16")
    done = paceline(tmp_path, *verb, SCRIPTS / "collectives.py", "plain")
    assert done.code == 2
    assert "Did you mean 'wire'?" in done.err
    assert not list(tmp_path.iterdir())
