"""Loops as people write them (bench/loops/plain.py): the same weights recorded, and their steps.

`bench/real_scripts.py` does this for all of them and for frameworks, and measures what has names.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from support import forking
from support.launching import paceline

from paceline.runs.folder import RunFolder

PLAIN = Path(__file__).parents[2] / "bench" / "loops" / "plain.py"
STEPS, RANKS = 8, 2
RULES = {
    "wgan": "optimizers in turn",
    "no_optimizer": "loader",
    "pipeline": "optimizer",
    "marked": "paceline.step()",
    "by_hand": "backward",
    "evaluation": "optimizer",
    "accumulation": "optimizer",
    "lbfgs": "optimizer",
    "update_in_backward": "optimizer",
    "iterable": "optimizer",
    "nested": "optimizer",
}
ALWAYS = ("pipeline",)


def results(folder, name):
    paths = [folder / f"{name}-{rank}.json" for rank in range(RANKS)]
    return [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def unrecorded(tmp_path_factory, request):
    """Return what the loops come to under torchrun, by name."""
    folder = tmp_path_factory.mktemp("unrecorded")
    names = [item.callspec.params["name"] for item in request.session.items if _is_loop(item)]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(PLAIN), ",".join(names), str(STEPS)]
    environment = {**os.environ, "LOOP_OUT": str(folder), "OMP_NUM_THREADS": "1"}
    done = forking.run(
        command,
        modules=forking.TORCH,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return {name: results(folder, name) for name in names}


def _is_loop(item):
    return item.module.__name__ == __name__ and hasattr(item, "callspec")


@pytest.mark.parametrize(
    "name",
    [
        name if name in ALWAYS else pytest.param(name, marks=pytest.mark.campaign("e2e"))
        for name in RULES
    ],
)
def test_a_loop_trains_the_same_and_its_steps_are_counted(unrecorded, tmp_path, name):
    environment = {"LOOP_OUT": str(tmp_path)}
    done = paceline(
        tmp_path, "run", "-n", RANKS, "--out", "RUN", PLAIN, name, STEPS, env=environment
    )
    assert done.code == 0, done.err
    assert results(tmp_path, name) == unrecorded[name]
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result is not None
    assert result.step_rule == RULES[name]
    assert [rank.steps for rank in result.ranks] == [STEPS] * RANKS
    spent = [{phase.name: phase.measured_s for phase in rank.phases} for rank in result.ranks]
    assert all((phases["evaluation"] > 0) == (name == "evaluation") for phases in spent)
    if name == "pipeline":  # each rank waits for the other one's half of the step
        assert all(phases["waiting"] > 0 for phases in spent)
    assert result.nan is None
