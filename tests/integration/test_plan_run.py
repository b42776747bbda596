"""From a plan to a run and back: the run follows its plan, and is compared with nothing else."""

import json

import pytest
from launching import paceline
from machines import small_machine

from paceline.core.machine import Machine
from paceline.core.plan_file import load_plan_file
from paceline.report.model import gather

pytest.importorskip("torch")

TRAIN = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

def model(width=64):
    module = nn.Sequential(nn.Linear(32, 256), nn.Linear(256, width), nn.Linear(width, 4))
    module[0].requires_grad_(False)  # a frozen backbone
    return module

def step():
    return model(), torch.zeros(16, 32), torch.zeros(16, 4), nn.functional.mse_loss, sgd

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(model(*map(int, sys.argv[1:])))
    optimizer = sgd(ddp.parameters())
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(torch.ones(16, 32)), torch.zeros(16, 4)).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(torch.get_num_threads(), ddp.bucket_bytes_cap)
    dist.destroy_process_group()
"""
RATE_PER_S = 1e6  # a thousandth of the truth: a busy machine is never as slow
TRAINED_BYTES = 4 * (256 * 64 + 64 + 64 * 4 + 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a plan for one rank: on a busy machine no rank is late for all of its run."""
    place = tmp_path_factory.mktemp("planned")
    (place / "train.py").write_text(TRAIN)
    (place / "machine.json").write_text(small_machine(RATE_PER_S).to_text())
    arguments = ("train.py:step", "-n", 1, "--threads", 2, "--machine", "machine.json")
    done = paceline(place, "plan", *arguments, "--out", "plan.json")
    assert done.code == 0, done.err
    data = json.loads((place / "plan.json").read_text())
    data["plan"]["mesh"]["data"] = 2
    data["plan"]["bucket_bytes"] = data["plan"]["first_bucket_bytes"] = 1 << 20
    (place / "by-hand.json").write_text(json.dumps({"plan": data["plan"]}))
    return place


@pytest.fixture(scope="module")
def planned(folder):
    arguments = ("--plan", "plan.json", "--machine", "machine.json", "--out", "planned")
    done = paceline(folder, "run", *arguments, "train.py", threads=None)
    assert done.code == 0, done.err
    return done


def test_a_run_follows_its_plan_keeps_it_and_is_compared_with_it(folder, planned):
    assert planned.out.split() == ["2", str(25 << 20)]
    assert "will not compare" not in planned.err
    run = folder / "planned"
    assert load_plan_file(run / "plan.json") == load_plan_file(folder / "plan.json")
    report = gather(run)
    assert report.world_size == 1
    assert report.comparison.not_compared == ""
    assert report.comparison.step_time_error is not None
    assert report.estimate.trained_parameter_bytes == TRAINED_BYTES


def test_a_calibrated_machine_predicts_the_run_better(folder, planned):
    done = paceline(folder, "calibrate", "planned", "--out", "better.json", "--json")
    assert done.code == 0, done.err
    outcome = json.loads(done.out)
    measured_s = outcome["measured_step_s"]
    before, after = (
        abs(outcome[name] / measured_s - 1) for name in ("prior_step_s", "fitted_step_s")
    )
    assert after < before
    better = Machine.from_text((folder / "better.json").read_text())
    assert {rate.source for rate in better.devices[0].rates} == {"datasheet", "fit"}


def test_another_model_or_machine_is_not_compared(folder):
    elsewhere = ("--plan", "plan.json", "--out", "other")
    done = paceline(folder, "run", *elsewhere, "train.py", 48, threads=None)
    assert done.code == 0, done.err
    assert "will not compare this run with its plan" in done.err
    assert "the prediction is for machine m" in gather(folder / "other").comparison.not_compared
    (folder / "other" / "machine.json").unlink()
    found = gather(folder / "other").comparison
    assert found.step_time_error is None
    assert "of trained parameters, the run trained" in found.not_compared


def test_a_plan_by_hand_sets_buckets_and_needs_no_estimate(folder):
    arguments = ("--plan", "by-hand.json", "--no-record", "--out", "by-hand")
    done = paceline(folder, "run", *arguments, "train.py", threads=None)
    assert done.code == 0, done.err
    assert done.out.split() == ["2", str(1 << 20)]
    refused = paceline(folder, "run", "-n", 3, *arguments, "train.py", threads=None)
    assert refused.code == 2
    assert "--ranks is 3, the plan's number of ranks (mesh.data) is 2" in refused.err


PREPARED = """
import torch, torch.distributed as dist
from torch import nn
from paceline.training import prepare
dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(32, 4))
prepared = prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
if dist.get_rank() == 0:
    print(prepared.options.engine, prepared.options.precision)
dist.destroy_process_group()
"""


def test_prepare_follows_the_plan_of_the_run(folder):
    (folder / "prepared.py").write_text(PREPARED)
    data = json.loads((folder / "by-hand.json").read_text())
    data["plan"] |= {"engine": "sharded", "precision": "bfloat16"}
    (folder / "engine.json").write_text(json.dumps(data))
    arguments = ("--plan", "engine.json", "--no-record", "--out", "prepared", "prepared.py")
    done = paceline(folder, "run", *arguments, threads=None)
    assert done.code == 0, done.err
    assert done.out.split() == ["sharded", "bfloat16"]
    assert "precision = bfloat16, engine = sharded: only the script itself" in done.err
