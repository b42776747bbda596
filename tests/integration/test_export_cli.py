"""`paceline trace export` as a user calls it, of a hand-made run and of a real one."""

import json

import pytest
from support.command_line import without_torch
from support.launching import SCRIPTS, paceline
from support.otf2_archives import check_archive
from support.traces import data_parallel, write_run

from paceline.trace.export.chakra import write_chakra
from paceline.trace.export.chrome import write_chrome
from paceline.trace.export.otf2 import write_otf2
from paceline.trace.export.table import write_csv, write_parquet
from paceline.trace.merge import load_run

PLACES = {
    "chrome": "trace.json",
    "otf2": "otf2/traces.otf2",
    "parquet": "trace.parquet",
    "csv": "trace.csv",
    "chakra": "chakra",
}


def _export(*arguments):
    return without_torch("trace", "export", *arguments, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), data_parallel(2, 12))


@pytest.mark.parametrize("form", PLACES)
def test_each_format_has_its_place_and_says_what_was_written(run, form):
    done = _export(run, "--format", form, "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["kind"], said["format"], said["ranks"]) == ("export", form, 2)
    assert said["path"] == str(run / PLACES[form])
    assert (run / PLACES[form]).exists()
    assert said["events"] > 0
    assert said["cautions"] == []


def test_a_folder_is_not_overwritten(run, tmp_path):
    out = tmp_path / "out"
    assert _export(run, "--format", "otf2", "--no-counters", "--out", out).returncode == 0
    again = _export(run, "--format", "chakra", "--out", out)
    assert again.returncode == 2
    assert "not overwritten" in again.stderr
    assert (out / "traces.otf2").exists()


def test_a_training_with_gloo_is_read_by_tools_that_others_wrote(tmp_path):
    """OTF2 is compared with the trace event by event, the other formats by their numbers."""
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", SCRIPTS / "train.py", "--steps", 8)
    assert done.code == 0, done.err
    trace = load_run(tmp_path / "RUN")
    events = sum(len(rank.events) for rank in trace.ranks)
    written = write_otf2(trace, tmp_path / "otf2")
    archive = check_archive(written.path, trace)
    assert sum(len(found) for found in archive.events.values()) == written.events
    assert write_csv(trace, tmp_path / "csv").events == events
    assert write_parquet(trace, tmp_path / "parquet").events == events
    assert write_chrome(trace, tmp_path / "chrome").events == events
    information = json.loads((tmp_path / "chrome").read_text())["distributedInfo"]
    assert information == {"rank": 0, "world_size": 2, "backend": "gloo", "ranks": [0, 1]}
    collectives = len(trace.matches.calls)
    assert write_chakra(trace, tmp_path / "chakra").events > collectives
