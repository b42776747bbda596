"""bench/truth.py: a rank that hangs is noticed, and what ranks note says what happened."""

import dataclasses
import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

BENCH = Path(__file__).parents[2] / "bench"


class HangingProcess:
    """A rank that does not end by itself."""

    exitcode = None
    pid = 1

    def start(self):
        pass

    def join(self, timeout_s=None):
        pass

    def kill(self):
        pass


@pytest.fixture
def truth_ring(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("truth_ring")


def notes_of(truth_ring, step_ms, computed_ms):
    """Return the notes of two ranks that took so long in each of 120 steps."""
    steps = np.ones(truth_ring.STEPS) / 1e3
    return truth_ring.Notes(
        calls=[], step_s=np.outer(step_ms, steps), computed_s=np.outer(computed_ms, steps)
    )


def test_a_culprit_counts_by_how_late_it_really_was(truth_ring):
    cases = truth_ring.make_ring_cases("mpi", 0, 28, 0)
    imbalance = next(case for case in cases if case.pattern == "imbalance" and case.culprit == 1)
    for step_ms, share in (([10, 13], 0.3), ([20, 13], -0.35)):
        step_s = notes_of(truth_ring, step_ms, [3, 3]).step_s
        found = truth_ring.slowed(imbalance.culprit, imbalance.seconds(), step_s)
        assert found == pytest.approx(share)


def test_a_checkpoint_every_few_steps_slows_by_its_share_of_all(truth_ring):
    step_s = np.full((2, 12), 0.010)
    step_s[0, 3::4] += 0.008
    seconds = np.where(np.arange(12) % 4 == 3, 0.008, 0.0)
    assert truth_ring.slowed(0, seconds, step_s) == pytest.approx(0.2)


def test_a_rank_late_by_the_same_work_was_on_a_slower_core(truth_ring):
    notes = notes_of(truth_ring, [10, 12], [3, 4.5])
    late = SimpleNamespace(rank=1, cause="compute", first_step=20, last_step=99)
    assert notes.core_was_slower(late)
    for other in ({"rank": 0}, {"cause": "blocked"}):
        assert not notes.core_was_slower(SimpleNamespace(**{**vars(late), **other}))
    assert not notes_of(truth_ring, [10, 12], [3, 3.5]).core_was_slower(late)


def test_waiting_lies_between_what_ranks_know(truth_ring):
    """Rank 1 is 8 ms late in a step; its calls, and those of rank 0, take 1 ms to issue."""
    case = truth_ring.make_ring_cases("gloo", 0, 0, 1)[0]
    case = dataclasses.replace(case, blocking=True)
    ms = 1_000_000

    def calls(entered_ms):
        rows = {name: np.array([[0, 0, 0]]) for name in ("barrier", "send", "recv")}
        entered = entered_ms * ms
        return {**rows, "all_reduce": np.array([[entered, entered + ms, 20 * ms]])}

    notes = truth_ring.Notes(calls=[calls(2), calls(10)], step_s=None, computed_s=None)
    assert truth_ring.true_waiting_s(case, notes, truth_ring.ENTERED).tolist() == [0.007, 0]
    assert truth_ring.true_waiting_s(case, notes, truth_ring.ISSUED).tolist() == [0.008, 0]


def test_a_rank_that_hangs_fails_its_case(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    truth = importlib.import_module("truth")
    ended = SimpleNamespace(
        exitcode=0, pid=2, start=lambda: None, join=lambda *_: None, kill=lambda: None
    )
    stage = object.__new__(truth.Stage)
    stage._rank = lambda case, folder, rank, demand: HangingProcess() if rank else ended
    case = truth.Case(number=7, seed=1, ranks=2, neighbour=False)
    with pytest.raises(RuntimeError, match=r"case 7: ranks ended with \[0, None\]"):
        stage.run(case, tmp_path)
