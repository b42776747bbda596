"""What the workers of torch's DataLoader do for a batch, counted for the run's trace."""

import json

import pytest
from support.launching import SCRIPTS, paceline

from paceline.native import io_library
from paceline.trace.analysis import analyse
from paceline.trace.format.events import DATALOADER_COUNTERS, Kind
from paceline.trace.merge import load_run

SAMPLES, BATCH = 40, 8  # of an epoch of the script, which has two


def sums_of(trace):
    """Return the sums of the counters of the first rank's loader, by stage."""
    (rank,) = trace.ranks
    counters = rank.events_of(Kind.COUNTER)
    found = {}
    for stage, name in DATALOADER_COUNTERS.items():
        if name in rank.names:
            named = counters[counters["name"] == rank.names.index(name)]
            assert set(named["tag"].tolist()) <= {1}
            found[stage] = int(named["amount"].sum())
    return found


@pytest.mark.parametrize("workers", ["0 fork", "2 fork", "1 spawn"])
def test_batches_and_samples_count_however_workers_are_started(tmp_path, workers):
    script = (SCRIPTS / "loaded.py", *workers.split())
    done = paceline(tmp_path, "run", "-n", 1, "--out", "RUN", *script)
    assert done.code == 0, done.err
    assert "not recorded" not in done.err
    plain = paceline(tmp_path, "run", "-n", 1, "--no-record", "--out", "PLAIN", *script)
    assert plain.out.splitlines()[0] == done.out.splitlines()[0]  # the same batches and weights
    trace = load_run(tmp_path / "RUN")
    sums = sums_of(trace)
    assert (sums["batches"], sums["samples"]) == (2 * SAMPLES // BATCH, 2 * SAMPLES)
    assert "files" not in sums
    assert sums["fetch"] > 0
    assert sums["collate"] > 0
    assert 0 <= sums["core"] <= sums["fetch"]
    assert 0 <= sums["queued"] <= sums["fetch"]
    assert (sums["hand_over"] > 0) is (workers != "0 fork")
    ceiling = analyse(trace).loader
    assert (ceiling.source, ceiling.workers) == ("torch", int(workers[0]))
    assert ceiling.stages[0].stage == "read and decode"
    why = paceline(tmp_path, "why", "RUN", "--json")
    assert json.loads(why.out)["loader"]["slowest"] == ceiling.slowest
    stats = paceline(tmp_path, "trace", "stats", "RUN")
    assert "read and decode" in stats.out


@pytest.mark.skipif(not io_library().is_file(), reason="no glibc here")
def test_recorded_calls_for_files_divide_reading_from_decoding(tmp_path):
    script = (SCRIPTS / "loaded.py", 2, "fork")
    done = paceline(tmp_path, "run", "-n", 1, "--record-io", "--out", "RUN", *script)
    assert done.code == 0, done.err
    trace = load_run(tmp_path / "RUN")
    sums = sums_of(trace)
    assert 0 < sums["files"] <= sums["fetch"]
    names = [stage.stage for stage in analyse(trace).loader.stages]
    assert names == ["read", "decode", "collate", "hand over"]
