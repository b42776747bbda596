"""paceline plan --model --from RUN: a machine is fitted to the steps of a run of the model."""

import json

import pytest
from support.launching import paceline

from paceline.perf.transformer.options import make_architecture

pytest.importorskip("torch")

MODEL = "layers=2,hidden=64,heads=4,vocab=512,sequence=32"
OTHER = "layers=3,hidden=64,heads=4,vocab=512,sequence=32"
FLAGS = ("--machine", "laptop", "--precision", "float32", "--batch", 8)
TRAIN = """
import sys
import torch

weights = torch.nn.Parameter(torch.ones(int(sys.argv[1])))  # as many as the architecture has
optimizer = torch.optim.SGD([weights], lr=0.1)
for _ in range(int(sys.argv[2]) if len(sys.argv) > 2 else 60):
    optimizer.zero_grad()
    sum((weights * weights).sum() for _ in range(20)).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("fitted")
    (place / "train.py").write_text(TRAIN)
    for model, name in ((MODEL, "plan.json"), (OTHER, "other.json")):
        done = paceline(place, "plan", "--model", model, *FLAGS, "--out", name)
        assert done.code == 0, done.err
    count = make_architecture(MODEL).parameters
    run = ("--plan", "plan.json", "--out", "planned", "train.py", count)
    done = paceline(place, "run", *run, threads=None)
    assert done.code == 0, done.err
    short = ("--plan", "plan.json", "--out", "short", "train.py", count, 4)
    done = paceline(place, "run", *short, threads=None)
    assert done.code == 0, done.err
    done = paceline(place, "run", "--out", "unplanned", "train.py", count)
    assert done.code == 0, done.err
    return place


def test_a_machine_that_is_fitted_to_a_run_predicts_it_better(folder):
    def predicted(*arguments):
        done = paceline(folder, "plan", "--model", MODEL, *FLAGS, *arguments, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    done = paceline(folder, "report", "planned", "--json")
    assert done.code == 0, done.err
    measured_s = json.loads(done.out)["step_time_s"]
    before, after = predicted(), predicted("--from", "planned")
    off = [abs(found["step_time_s"] / measured_s - 1) for found in (before, after)]
    assert off[1] < off[0]
    assert after["sources"]["forward"] == "fit: 1 measured steps"
    assert "not measured: the machine's efficiency" not in " ".join(after["warnings"])


@pytest.mark.parametrize(
    ("model", "run", "words"),
    [
        (OTHER, "planned", "the run trained another architecture"),
        (MODEL, "unplanned", "the run does not say what model it trained"),
        (MODEL, "short", "steps in which no rank was late are too few to fit to"),
        (MODEL, "missing", "missing"),
    ],
)
def test_a_run_of_another_model_or_of_none_is_refused(folder, model, run, words):
    done = paceline(folder, "plan", "--model", model, *FLAGS, "--from", run)
    assert done.code != 0
    assert words in done.err
