"""`paceline plan FILE.py:FUNCTION --search`: the best plan of a user's model on this machine."""

import dataclasses
import json
import platform

import pytest
from click.testing import CliRunner
from support.machines import collective, small_machine

from paceline.cli.plan import plan
from paceline.core import node
from paceline.core.affinity import allowed_cores
from paceline.core.errors import UsageError
from paceline.core.plan_file import load_plan_file

torch = pytest.importorskip("torch")

MODEL = """
import torch
from torch import nn

def block():
    return nn.Sequential(nn.Linear(32, 32), nn.GELU())

def step():
    module = nn.Sequential(block(), block(), nn.Linear(32, 10))
    target = torch.zeros(16, dtype=torch.long)
    return module, torch.zeros(16, 32), target, nn.functional.cross_entropy, torch.optim.Adam
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model, and with this host as a machine."""
    place = tmp_path_factory.mktemp("search")
    (place / "model.py").write_text(MODEL)
    device = small_machine().devices[0]
    device = dataclasses.replace(
        device,
        name=node.cpu_name(),
        cores=len(allowed_cores()),
        memory_bytes=dataclasses.replace(device.memory_bytes, value=float(node.memory_bytes())),
    )
    costs = tuple(
        collective(operation, latency_s, 1e9, 2, backend)
        for operation in ("all_reduce", "broadcast")
        for backend, latency_s in (("gloo", 2e-3), ("paceline", 1e-5))
    )
    machine = dataclasses.replace(
        small_machine(), name=platform.node(), devices=(device,), collectives=costs
    )
    (place / "machine.json").write_text(machine.to_text())
    return place


def searched(folder, *arguments):
    flags = ["--search", "--machine", f"{folder}/machine.json", "--json"]
    return CliRunner().invoke(
        plan, [f"{folder}/model.py:step", *flags, *arguments], catch_exceptions=False
    )


def test_the_fastest_plan_by_rates_is_written_for_a_run(folder, tmp_path):
    out = tmp_path / "plan.json"
    flags = ("-n", "2", "--batch", "32", "--compute", "rates", "--threads", "1", "--out", str(out))
    result = searched(folder, *flags)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    axes = {item["axis"] for item in found["alternatives"]}
    # With fixed threads and one rank's torch, these are left to vary.
    assert {"ranks", "microbatch", "recompute"} <= axes
    assert "threads" not in axes
    assert found["best"]["batch"] == 32
    again = next(item for item in found["alternatives"] if item["axis"] == "recompute")
    assert again["value"] == "full"
    assert again["slower"] > 0
    planned = load_plan_file(out)
    assert planned.plan.mesh.data == found["best"]["plan"]["mesh"]["data"]
    assert planned.workload.batch * planned.plan.mesh.data * planned.plan.microbatch_count == 32


@pytest.mark.campaign("e2e")
def test_forms_of_the_step_run_where_the_machine_is_this_host(folder):
    flags = ("-n", "2", "--batch", "32", "--threads", "1", "--recompute", "none")
    found = json.loads(searched(folder, *flags).stdout)
    assert found["best"]["sources"]["forward"].startswith("measured: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "needs the samples of a step"),
        (("--batch", "32", "--strategy", "auto"), "--strategy is for a single plan"),
        (("--batch", "32", "--tensor", "2"), "--tensor has an effect with --model"),
    ],
)
def test_flags_without_effect_are_refused(folder, flags, message):
    with pytest.raises(UsageError, match=message):
        searched(folder, *flags)
