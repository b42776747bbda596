"""The engine's modes where all ranks share memory: copies, barriers, states, ranks that end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import forking
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/shared_memory_modes.py"


def test_only_sharded_parameters_are_one_copy(tmp_path):
    for rank, found in enumerate(run_ranks(SCRIPT, tmp_path, 2, "copies")):
        assert found == {"allreduce": rank == 0, "sharded": True, "root": rank == 0}


@pytest.mark.parametrize("ranks", [2, 3])
def test_models_train_in_turns_and_are_read_between_steps(tmp_path, ranks):
    every = run_ranks(SCRIPT, tmp_path, ranks, "together")
    for found in every:
        assert max(found["errors"].values()) < 1e-12
        assert found["losses_equal"]
    # Statistics of a rank's own batches stay its own.
    assert len({found["buffers"][1] for found in every}) == ranks


def test_each_engine_goes_on_from_the_state_of_each(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 3, "states"):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong


@pytest.mark.parametrize("mode", ["sharded", "root"])
@pytest.mark.parametrize("place", ["forward", "step"])
def test_a_rank_that_ends_is_named(tmp_path, mode, place):
    arguments = ["lost", mode, place]
    processes = [
        forking.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / "store"), str(rank), "3", *arguments],
            modules=forking.TORCH,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(3)
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    for rank in (0, 2):
        problem = json.loads(said[rank].splitlines()[-1])
        assert problem["kind"] == "RankLost"
        assert "rank 1 is gone" in problem["text"]
