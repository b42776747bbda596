"""bench/truth.py: a rank that hangs is noticed."""

import importlib
from pathlib import Path
from types import SimpleNamespace

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
