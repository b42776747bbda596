"""A Machine of version 1, probed before links, collectives and frameworks were told apart."""

import json
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.estimate import Estimate
from paceline.core.machine import Machine
from paceline.core.plan import Mesh, Plan
from paceline.core.workload import Workload
from paceline.perf import estimate

GOLDEN = Path(__file__).parents[1] / "golden"
MACHINE = Machine.from_text((GOLDEN / "machine-v1.json").read_text())
# What the committed code of version 1 predicted from that machine.
WRITTEN = json.loads((GOLDEN / "predictions-v1.json").read_text())
WORKLOADS = {workload.name: workload for workload in map(Workload.from_json, WRITTEN["workloads"])}


@pytest.mark.parametrize(
    "written", WRITTEN["predictions"], ids=lambda prediction: prediction["workload"]
)
def test_an_upgraded_machine_predicts_what_it_did(written):
    # When these were written, ranks always had the C library's allocator.
    plan = Plan.from_json({**written["plan"], "allocator": "system"})
    found = estimate(MACHINE, WORKLOADS[written["workload"]], plan)
    assert found.step_time_s == pytest.approx(written["step_time_s"], rel=1e-9)
    assert found.memory_bytes == written["memory_bytes"]
    for name, seconds in found.breakdown.items():
        # A phase that the file does not know yet is predicted to take no time.
        assert seconds == pytest.approx(written["breakdown"].get(name, 0.0), rel=1e-9), name


def test_the_kinds_of_figures_are_told_apart():
    (device,) = MACHINE.devices
    assert [link.level for link in MACHINE.links] == ["shared-memory", "loopback"]
    assert {cost.backend for cost in MACHINE.collectives} == {"gloo"}
    assert {cost.operation for cost in MACHINE.collectives} == {"all_reduce", "broadcast"}
    assert {cost.what for cost in device.framework_overheads if cost.framework == "ddp"} == {
        "wrapper",
        "reduction",
        "buffer_broadcast",
    }
    assert Machine.from_text(MACHINE.to_text()) == MACHINE


def test_links_that_version_1_could_hold_but_a_probe_never_wrote():
    number = {"value": 1e9, "source": "datasheet"}
    line = {"latency_s": number, "bandwidth_bytes_per_s": number}
    data = {
        "version": 1,
        "name": "m",
        "devices": [],
        "links": [
            {"level": "ddp", "operation": "all_reduce", **line},
            {"level": "network", "operation": "broadcast", "ranks": 4, **line},
            {"level": "network", **line},
        ],
    }
    machine = Machine.from_json(data)
    levels = {cost.operation: (cost.level, cost.ranks) for cost in machine.collectives}
    assert levels == {"all_reduce": ("loopback", 2), "broadcast": ("network", 4)}
    assert [link.level for link in machine.links] == ["network"]
    with pytest.raises(ConfigError, match="cannot be read as version 2"):
        Machine.from_json({"version": 1, "name": "m"})


def test_ddps_own_time_for_a_byte_is_what_its_all_reduce_takes_longer_than_the_backends():
    data = json.loads((GOLDEN / "machine-v1.json").read_text())
    for link in data["links"]:
        if link.get("operation") == "all_reduce":
            slower = link["level"] == "ddp"
            link["bandwidth_bytes_per_s"]["value"] = 1e9 if slower else 4e9
    costs = Machine.from_json(data).devices[0].framework_overheads
    (own,) = [cost for cost in costs if cost.what == "reduction"]
    assert own.seconds_per_byte.value == pytest.approx(1e-9 - 0.25e-9)


def test_an_estimate_of_version_1_gets_the_plan_that_it_was_of():
    old = Estimate.from_text((GOLDEN / "estimate-v1.json").read_text())
    assert old.plan == Plan(mesh=Mesh(data=2))
    assert old.trained_parameter_bytes == WORKLOADS["cnn"].trained_bytes
    assert (old.machine_digest, old.workload_digest) == ("", "")
