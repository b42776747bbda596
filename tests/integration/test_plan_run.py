"""From a plan to a run and back: the run follows its plan, and is compared with nothing else."""

import dataclasses
import json

import pytest
from support.launching import paceline
from support.machines import sheet, small_machine

from paceline.core.machine import Link, Machine
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


def test_the_sizes_of_buckets_are_planned(folder):
    arguments = ("train.py:step", "-n", 2, "--machine", "machine.json", "--out", "sized.json")
    for given, expected in (("8MiB", 8 << 20), ("auto", 25 << 20)):
        done = paceline(folder, "plan", *arguments, "--buckets", given)
        assert done.code == 0, done.err
        plan = load_plan_file(folder / "sized.json").plan
        # On this machine's figures no size gains: small gradients are ready at the end.
        assert plan.bucket_bytes == expected
        assert ("in buckets of" in done.out) == (expected == 8 << 20)
    for given, said in (("0", "hold no gradient"), ("many", "is not a size")):
        done = paceline(folder, "plan", *arguments, "--buckets", given)
        assert (done.code, said in done.err) == (2, True), done.err
    done = paceline(folder, "plan", *arguments, "--buckets", "auto", "--partitions", 2)
    assert "sizes of their own" in done.err


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


def test_a_plan_from_a_run_is_that_of_the_calibrated_machine(folder, planned):
    done = paceline(folder, "calibrate", "planned", "--out", "again.json", "--json")
    assert done.code == 0, done.err
    fitted_s = json.loads(done.out)["fitted_step_s"]
    arguments = ("train.py:step", "--threads", 2, "--machine", "machine.json", "--compute", "rates")
    done = paceline(folder, "plan", *arguments, "--from", "planned", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["step_time_s"] == pytest.approx(fitted_s)


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


STAGED = """
import torch, torch.distributed as dist
from torch import nn
from paceline.training import prepare

class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        x = first = self.stem(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x + first)  # skips all stages between

def step():
    return Residual(), torch.zeros(12, 16), torch.zeros(12, 4), nn.functional.mse_loss, sgd

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.002)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Residual()
    prepared = prepare(model, sgd(model.parameters()), loss_fn=nn.functional.mse_loss)
    losses = []
    for _ in range(20):
        prepared.optimizer.zero_grad()
        losses.append(prepared.forward_backward(torch.ones(12, 16), torch.zeros(12, 4)))
        prepared.optimizer.step()
    if dist.get_rank() == 0:
        schedule = prepared.model.schedule_of(3)
        counts = [len(stage.layers) for stage in prepared.model.staged.stages]
        print(counts, prepared.options.microbatches, schedule.name, bool(losses[-1] < losses[0]))
    dist.destroy_process_group()
"""


def test_a_plan_in_stages_is_followed_and_compared_with_its_run(folder):
    (folder / "staged.py").write_text(STAGED)
    loopback = Link(
        level="loopback", latency_s=sheet(1e-4), bandwidth_bytes_per_s=sheet(1e9), sharing="all"
    )
    machine = dataclasses.replace(small_machine(RATE_PER_S), links=(loopback,))
    (folder / "linked.json").write_text(machine.to_text())
    arguments = ("staged.py:step", "-n", 2, "--threads", 1, "--machine", "linked.json")
    chosen = ("--partitions", 2, "--microbatches", 3, "--schedule", "fill_drain")
    done = paceline(folder, "plan", *arguments, *chosen, "--out", "staged.json")
    assert done.code == 0, done.err
    assert "2 stages x 1 replica, 3 microbatches, schedule fill_drain" in " ".join(done.out.split())
    file = load_plan_file(folder / "staged.json")
    assert file.workload.batch == 4
    assert [stage.live_microbatches for stage in file.estimate.stages] == [3, 3]
    assert sum(file.plan.layers) == len(file.workload.layers) == 6

    ran = ("--plan", "staged.json", "--machine", "linked.json", "--out", "staged", "staged.py")
    run = paceline(folder, "run", *ran, threads=None)
    assert run.code == 0, run.err
    assert run.out.strip() == f"{list(file.plan.layers)} 3 fill_drain True"
    assert "mesh.pipeline = 2: only the script itself can set that, or" in run.err
    comparison = gather(folder / "staged").comparison
    assert comparison.not_compared == ""
    assert comparison.step_time_error is not None

    every = paceline(folder, "plan", *arguments, "--strategy", "auto", "--json")
    assert every.code == 0, every.err
    found = json.loads(every.out)
    meshes = {(c["mesh"]["pipeline"], c["microbatches"]) for c in found["candidates"]}
    assert meshes == {(1, 1), (2, 2), (2, 4), (2, 8)}
    steps = [candidate["step_time_s"] for candidate in found["candidates"]]
    assert steps == sorted(steps)
    assert found["step_time_s"] == steps[0]
    assert {candidate["batch"] for candidate in found["candidates"]} == {24}
