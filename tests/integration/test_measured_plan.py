"""`paceline plan` on the host that was probed: the step runs, and the prediction rests on it."""

import dataclasses
import json
import platform

import pytest
from click.testing import CliRunner
from support.machines import small_machine

from paceline.cli.plan import plan
from paceline.core import node
from paceline.core.affinity import allowed_cores
from paceline.core.errors import ScriptFailed, UsageError
from paceline.studies.measured_estimate import reason_not_to_measure
from paceline.training.measured import process
from paceline.training.measured.prices import PriceKey, known_times

pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

def step():
    module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    target = torch.zeros(16, dtype=torch.long)
    return module, torch.zeros(16, 32), target, nn.functional.cross_entropy, torch.optim.Adam

class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if type(x).__name__ != "FakeTensor":
            raise RuntimeError("no real step")
        return self.layer(x)

def breaks():
    return Breaks(), torch.zeros(2, 4)
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a folder with a model, and with this host as a machine."""
    place = tmp_path_factory.mktemp("measured")
    (place / "model.py").write_text(MODEL)
    device = dataclasses.replace(
        small_machine().devices[0],
        name=node.cpu_name(),
        cores=len(allowed_cores()),
        memory_bytes=dataclasses.replace(
            small_machine().devices[0].memory_bytes, value=float(node.memory_bytes())
        ),
    )
    machine = dataclasses.replace(small_machine(), name=platform.node(), devices=(device,))
    (place / "machine.json").write_text(machine.to_text())
    return place


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    """Let rounds be short, and times of operators lie in a folder of the test's own."""
    monkeypatch.setattr(process, "ROUND_S", 0.02)
    monkeypatch.setattr(process, "BUDGET_S", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(here, *arguments, catch=False):
    return CliRunner().invoke(
        plan,
        [*arguments, "--machine", f"{here}/machine.json", "--json"],
        catch_exceptions=catch,
    )


def test_the_step_is_measured_where_it_is_planned_and_its_operators_are_kept(here):
    estimate = json.loads(planned(here, f"{here}/model.py:step", "--threads", "1").stdout)
    assert estimate["sources"]["forward"].startswith("measured: ")
    assert estimate["low_s"] < estimate["step_time_s"] < estimate["high_s"]
    memory = estimate["memory_bytes"]
    assert memory["process"] > 100 << 20
    key = PriceKey(
        machine=estimate["machine_digest"],
        torch=process.torch_version(),
        allocator="keep",
        threads=1,
        processes=1,
    )
    times = known_times(key)
    assert any(signature.startswith("aten.addmm") for signature in times)
    assert all(time.seconds > 0 for time in times.values())


@pytest.mark.campaign("e2e")
def test_two_ranks_measure_at_the_same_time(here):
    step = process.measure_step(
        f"{here}/model.py:step", machine_digest="two", ranks=2, threads=1, deadline_s=120
    )
    assert (step.processes, step.threads) == (2, 1)
    assert {"forward", "backward", "optimizer"} == set(step.phases)
    assert step.whole_steps >= 8
    assert step.peak_bytes > step.base_bytes > 100 << 20
    assert step.reduced_bytes > 0
    assert step.reduced_s > 0


def test_a_step_that_does_not_run_is_predicted_from_rates_and_says_why(here):
    estimate = json.loads(planned(here, f"{here}/model.py:breaks").stdout)
    assert estimate["sources"]["forward"].startswith("rates: ")
    assert "no real step" in estimate["warnings"][-1]


@pytest.mark.campaign("e2e")
def test_a_step_that_does_not_run_fails_where_it_has_to(here):
    with pytest.raises(ScriptFailed, match="no real step"):
        planned(here, f"{here}/model.py:breaks", "--compute", "measured")


@pytest.mark.campaign("e2e")
def test_rates_are_taken_where_they_are_asked_for(here):
    result = planned(here, f"{here}/model.py:step", "--compute", "rates")
    assert json.loads(result.stdout)["sources"]["forward"].startswith("rates: ")


def test_another_machine_is_not_measured_here(here, tmp_path):
    (tmp_path / "other.json").write_text(small_machine().to_text())
    arguments = [f"{here}/model.py:step", "--machine", f"{tmp_path}/other.json"]
    with pytest.raises(UsageError, match="cannot be measured here") as caught:
        CliRunner().invoke(plan, [*arguments, "--compute", "measured"], catch_exceptions=False)
    assert platform.node() in caught.value.why


def test_a_divided_batch_is_not_measured(here):
    with pytest.raises(UsageError, match="whole model and the function's batch"):
        planned(here, f"{here}/model.py:step", "--compute", "measured", "--batch", "8")


def test_what_does_not_fit_is_not_run(here):
    from paceline.core.machine import Machine
    from paceline.core.plan import Mesh, Plan

    machine = Machine.from_text((here / "machine.json").read_text())
    assert reason_not_to_measure(machine, Plan(), 1 << 20) == ""
    assert "bytes of memory" in reason_not_to_measure(machine, Plan(), 1 << 50)
    assert "nodes" in reason_not_to_measure(machine, Plan(mesh=Mesh(data=2), nodes=2), 0)
    assert "processes" in reason_not_to_measure(machine, Plan(mesh=Mesh(data=4096)), 0)
