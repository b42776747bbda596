"""Real ranks, one slowed on purpose: the right one is named, with cause, window and lateness."""

import pytest
from launching import SCRIPTS, last_json, paceline

from paceline.runs.folder import RunFolder

pytestmark = pytest.mark.campaign("e2e")  # judges times; rules are tested on written traces

FIRST, LAST, STEPS = 40, 100, 140
WINDOW_TOLERANCE = 0.1 * (LAST - FIRST + 1)


def run(folder, *arguments):
    script = (SCRIPTS / "slowed.py", "--steps", STEPS, "--first", FIRST, "--last", LAST)
    done = paceline(folder, "run", "-n", 2, "--out", "RUN", *script, *arguments)
    assert done.code == 0, done.err
    return done, RunFolder(folder / "RUN").read_result()


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        (1, "data"),
        (0, "compute"),
        (0, "data"),
        (1, "compute"),
    ],
)
def test_the_slowed_rank_is_named(tmp_path, rank, place):
    done, result = run(tmp_path, "--rank", rank, "--place", place, "--ms", 25)
    late = result.straggler
    assert late is not None
    assert late.rank == rank
    assert late.cause == place
    assert abs(late.first_step - FIRST) <= WINDOW_TOLERANCE
    assert abs(late.last_step - LAST) <= WINDOW_TOLERANCE
    assert late.late_ms == pytest.approx(last_json(done.out)["injected_ms"], rel=0.25)
    assert 0 < late.others_wait < 1


@pytest.mark.parametrize("engine", ["allreduce", "sharded"])
def test_the_slowed_rank_is_named_under_our_engine(tmp_path, engine):
    """Its all-reduce in shared memory was not recorded: no rank had waited for the late one."""
    _, result = run(tmp_path, "--rank", 1, "--place", "data", "--ms", 25, "--engine", engine)
    late = result.straggler
    assert late is not None
    assert (late.rank, late.cause) == (1, "data")
    assert abs(late.first_step - FIRST) <= WINDOW_TOLERANCE


def test_nobody_is_named_when_nobody_is_slowed(tmp_path):
    _, result = run(tmp_path)
    # Another process that takes cores is named where there is one, and so is a core that another
    # virtual machine slows down; no rank is accused.
    assert {late.cause for late in result.stragglers} <= {"not_running", "slow_core"}
