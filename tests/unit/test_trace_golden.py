"""Traces that real recorders wrote, one folder per version, are read as they were when written.

`analysis.json` beside them holds what the code of that version made of them. A folder is never
written anew: a change of the format gets a version, and a folder, of its own.
"""

import json
from pathlib import Path

import pytest

from paceline.trace.analysis import analyse
from paceline.trace.merge import load_run

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = [
    (version, run)
    for version in (1, 2, 3)
    for run in ("ddp", "killed", "frontends", "messages")
    if (GOLDEN / f"trace-v{version}" / run).exists()
]


def described(analysis):
    """Return what is pinned of an analysis, as JSON has it."""
    return {
        "steps": [rank.steps for rank in analysis.phases],
        "step_time_s": analysis.step_time_s,
        "breakdown": [dict(rank.breakdown().items()) for rank in analysis.phases],
        "skew_s": analysis.skew_s.sum(axis=1).tolist(),
        "stragglers": [late.to_json() for late in analysis.stragglers],
        "traffic": [line.to_json() for line in analysis.traffic],
    }


def _assert_equal(found, expected, where):
    """Compare what was pinned; what later versions add to a record is not."""
    if isinstance(expected, dict):
        for key, value in expected.items():
            _assert_equal(found[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            _assert_equal(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12), where
    else:
        assert found == expected, where


def test_there_are_golden_traces_of_each_version():
    assert [run for version, run in RUNS if version == 1] == ["ddp", "killed", "frontends"]
    assert [run for version, run in RUNS if version == 2] == ["ddp", "killed", "messages"]
    assert [run for version, run in RUNS if version == 3] == ["ddp"]


@pytest.mark.parametrize(("version", "run"), RUNS)
def test_a_golden_run_is_analysed_as_when_it_was_written(version, run):
    folder = GOLDEN / f"trace-v{version}"
    trace = load_run(folder / run)
    assert {rank.status.version for rank in trace.ranks} == {version}
    expected = json.loads((folder / "analysis.json").read_text())[run]
    _assert_equal(described(analyse(trace)), expected, run)
    assert trace.matches.mismatches() == ()


@pytest.mark.parametrize("version", [1, 2])
def test_the_killed_rank_of_a_golden_run_is_truncated(version):
    survivor, killed = load_run(GOLDEN / f"trace-v{version}" / "killed").ranks
    assert survivor.complete
    assert not killed.complete
    assert killed.status.phase_name == "backward"
