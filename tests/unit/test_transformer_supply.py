"""The supply of samples of a transformer: what a step waits, what it rests on, wrong numbers."""

import dataclasses

import pytest

from paceline.core.errors import UsageError
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import Architecture, SampleCost, estimate_transformer

SELENE = library_machine("selene")
MODEL = Architecture(layers=24, hidden=1024, heads=16, vocab=1000, sequence=256, patch_inputs=768)
BATCH = 512


def estimate(sample=None, nodes=2, data=16, **fields):
    plan = Plan(mesh=Mesh(data=data), nodes=nodes, precision="bfloat16", **fields)
    return estimate_transformer(SELENE, MODEL, plan, BATCH, sample=sample)


def test_loaders_that_are_fast_enough_cost_nothing():
    plain = estimate()
    fast = estimate(SampleCost(seconds=1e-4, bytes=1000), loader_workers=2)
    assert fast.breakdown.input == 0
    assert fast.step_time_s == plain.step_time_s
    assert fast.limit == plain.limit != "data loading"


def test_a_step_lasts_as_long_as_its_loaders():
    found = estimate(SampleCost(seconds=0.1), loader_workers=4)
    assert found.step_time_s == pytest.approx(BATCH / 16 * 0.1 / 4)
    assert found.limit == "data loading"
    assert found.shares == {"data loading": 1.0}  # nothing else makes the step shorter
    assert found.sources["input"] == "0.1 s a sample, 4 at once"


def test_without_processes_the_loop_loads():
    plain, found = estimate(), estimate(SampleCost(seconds=0.001))
    assert found.breakdown.input == pytest.approx(BATCH / 16 * 0.001)
    assert found.step_time_s == pytest.approx(plain.step_time_s + BATCH / 16 * 0.001)


def test_replicas_of_a_node_share_its_storage():
    rate = SELENE.tiers[-1].bandwidth_bytes_per_s.value
    size = 100_000_000
    found = estimate(SampleCost(bytes=size), loader_workers=1)
    assert found.step_time_s == pytest.approx(BATCH / 2 * size / rate)
    assert "parallel file system" in found.sources["input"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SampleCost(seconds=-1.0), "cannot be loaded"),
        (lambda: estimate(loader_workers=2), "loader processes have nothing to load"),
    ],
)
def test_wrong_numbers_are_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_samples_need_a_storage():
    bare = dataclasses.replace(SELENE, tiers=())
    with pytest.raises(UsageError, match="of which the machine has none") as raised:
        estimate_transformer(bare, MODEL, Plan(), 8, sample=SampleCost(bytes=10))
    assert raised.value.where == "Selene: tiers"
