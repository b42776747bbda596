"""`paceline run --collectives paceline`: an unchanged script on the backend, and its trace."""

import json

import pytest
from launching import SCRIPTS, last_json, paceline

from paceline.trace.format.events import Kind
from paceline.trace.merge import load_run

PATHS = {"shared memory", "gloo"}


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
    shown = paceline(done.folder, "report", "RUN")
    assert "shared memory" in shown.out + shown.err
