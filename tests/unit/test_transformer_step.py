"""The step of a transformer: bubbles, overlap, what a plan's fields change, and wrong plans."""

import dataclasses
import math

import pytest

from paceline.core.errors import ConfigError, UsageError
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf.transformer import (
    Architecture,
    Risks,
    TimedStep,
    estimate_transformer,
    fit_efficiency,
    with_efficiency,
)
from paceline.perf.transformer.efficiency import FIGURES, efficiency_of, prior
from paceline.perf.transformer.fitting import informative, pooled
from paceline.perf.transformer.lanes import LaneTask, pass_s
from paceline.perf.transformer.layer import layer_work
from paceline.perf.transformer.network import Network
from paceline.perf.transformer.pipelining import StagePasses, batch_s
from paceline.perf.transformer.pricing import DeviceRates, layer_seconds
from paceline.perf.transformer.reliability import checkpoint_plan, straggler_wait_s
from paceline.perf.transformer.step import step_times
from paceline.perf.transformer.tiles import wave_factor

SELENE = library_machine("selene")
MODEL = Architecture(layers=32, hidden=4096, heads=32, vocab=51200, sequence=2048)


def plan(nodes=1, microbatches=8, **fields):
    mesh = Mesh(**{axis: fields.pop(axis, 1) for axis in ("data", "tensor", "pipeline", "context")})
    return Plan(mesh=mesh, nodes=nodes, microbatches=microbatches, precision="bfloat16", **fields)


def seconds(chosen, batch=64):
    return step_times(SELENE, MODEL, chosen, batch).breakdown.total_s


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 64), (16, 512), (64, 256)])
def test_equal_stages_have_the_bubble_of_the_closed_form(ranks, microbatches):
    chosen = plan(pipeline=ranks, nodes=8)
    passes = StagePasses((1.0,) * ranks, (2.0,) * ranks)
    expected = (microbatches + ranks - 1) * 3.0
    assert batch_s(chosen, passes, microbatches) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches"), [(4, 2, 16), (8, 3, 64), (35, 3, 280)]
)
def test_interleaved_stages_divide_the_bubble(ranks, chunks, microbatches):
    chosen = plan(pipeline=ranks, nodes=8, stages_per_rank=chunks)
    passes = StagePasses((1.0,) * ranks * chunks, (2.0,) * ranks * chunks)
    expected = (microbatches * chunks + ranks - 1) * 3.0
    assert batch_s(chosen, passes, microbatches) == pytest.approx(expected)


def test_blocking_messages_are_part_of_the_passes_around_them():
    """A rank inside of the pipeline receives and sends in each pass, the first and last do one."""
    chosen = plan(pipeline=3, nodes=1, overlap_pipeline=False)
    passes = StagePasses((1.0,) * 3, (2.0,) * 3, (0.25, 0.5))
    longer = passes.blocking(3)
    assert longer == StagePasses((1.25, 1.75, 1.5), (2.25, 2.75, 2.5))
    assert batch_s(chosen, passes, 8) == batch_s(plan(pipeline=3), longer, 8)
    around = StagePasses((1.0,) * 4, (2.0,) * 4, (0.5,)).blocking(2)  # two stages of each rank
    assert around.forward_s == (1.5, 2.0, 2.0, 1.5)


def test_a_message_uses_one_adapter_of_its_node():
    (link,) = [link for link in SELENE.links if link.level == "network"]
    one = dataclasses.replace(link, adapters=1)
    rest = tuple(other for other in SELENE.links if other is not link)
    times = {}
    for name, network in (("eight", link), ("one", one)):
        machine = dataclasses.replace(SELENE, links=(*rest, network))
        found = Network.of(machine, efficiency_of(SELENE.devices[0]), 2)
        times[name] = [found.boundary_s(0, senders, 1e9) for senders in (8, 16)]
        times[name].append(found.boundary_s(7, 1, 1e9))  # the last device of a node to the next
    assert times["eight"][:2] == times["one"][:2]  # all adapters are in use
    latency_s = link.latency_s.value
    assert times["eight"][2] - latency_s == pytest.approx(8 * (times["one"][2] - latency_s))
    with pytest.raises(ConfigError, match="'adapters' is 0"):
        dataclasses.replace(link, adapters=0)


def test_a_pass_that_starting_its_kernels_bounds_hides_its_collectives():
    chosen = plan(tensor=8)
    work = layer_work(MODEL, chosen, 1.0)
    rates = DeviceRates.of(SELENE, "bfloat16")
    for layer_s, share in ((1.0, 0.01), (1e-9, 1.0)):
        slow = dataclasses.replace(rates, layer_s=layer_s)
        alone, both = layer_seconds(work, slow), layer_seconds(work, slow, (1e-3, 1e-3))
        for before_s, after_s in zip(alone, both, strict=True):
            assert after_s - before_s <= share * 1e-3 * (1 + 1e-6)


def test_a_vocabulary_that_no_load_fits_slows_down_the_output_layer():
    model = dataclasses.replace(MODEL, vocab=50257)
    padded, bare = (
        step_times(SELENE, model, plan(padded_vocabulary=pads), 64).breakdown.total_s
        for pads in (True, False)
    )
    assert 1.01 < bare / padded < 1.3


def test_tiles_of_a_product_come_in_waves():
    assert wave_factor(256.0 * 108, 128.0, 1, 108) == 1.0  # one full wave
    assert 1.5 < wave_factor(256.0 * 109, 128.0, 1, 108) < 2 * 108 / 109  # smaller tiles pay
    assert wave_factor(64.0, 64.0, 1, 108) == pytest.approx(108 / 0.6)
    assert wave_factor(64.0, 64.0, 1, 0) == 1.0  # multiprocessors that are not known


def test_the_last_stage_may_have_the_output_layer_alone():
    own = plan(pipeline=4, layers=(12, 10, 10, 0))
    assert seconds(own) > seconds(plan(pipeline=4, layers=(9, 8, 8, 7)))
    for layers in ((12, 0, 10, 10), (12, 10, 11, -1)):
        with pytest.raises(ConfigError, match="'layers' is"):
            plan(pipeline=4, layers=layers)


def test_a_gather_is_hidden_by_the_layer_before_it():
    hidden = pass_s([LaneTask(1.0, 2.0)] * 10)
    assert hidden == pytest.approx(1.0 + 10 * 2.0)
    exposed = pass_s([LaneTask(3.0, 2.0)] * 10)
    assert exposed == pytest.approx(10 * 3.0 + 2.0)


def test_a_reduction_waits_for_its_layer():
    assert pass_s([LaneTask(0.0, 2.0, 1.0)] * 4) == pytest.approx(4 * 2.0 + 1.0)
    assert pass_s([LaneTask(0.0, 1.0, 2.0)] * 4) == pytest.approx(1.0 + 4 * 2.0)


def test_full_recomputation_takes_a_forward_pass_more():
    none, full = (
        step_times(SELENE, MODEL, plan(tensor=8, recompute=kind), 64).breakdown
        for kind in ("none", "full")
    )
    layers = none.forward
    assert none.backward < full.backward < none.backward + 1.2 * layers


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ({"tensor": 8, "overlap_tensor": False}, {"tensor": 8, "overlap_tensor": True}),
        ({"data": 8, "overlap_data": False}, {"data": 8, "overlap_data": True}),
        ({"tensor": 8, "compiled": False}, {"tensor": 8, "compiled": True}),
        ({"tensor": 8, "fused_attention": False}, {"tensor": 8, "fused_attention": True}),
        ({"tensor": 8}, {"tensor": 8, "sequence_parallel": True}),
        ({"pipeline": 8, "overlap_pipeline": False}, {"pipeline": 8}),
        ({"data": 8, "zero": 3, "overlap_data": False}, {"data": 8, "zero": 3}),
    ],
)
def test_what_saves_time_does(slow, fast):
    assert seconds(plan(**fast)) < seconds(plan(**slow))


def test_a_network_is_never_priced_as_another_link():
    lonely = dataclasses.replace(
        SELENE, links=tuple(link for link in SELENE.links if link.level != "network")
    )
    with pytest.raises(UsageError, match="a plan on 2 nodes needs a link between nodes"):
        step_times(lonely, MODEL, plan(nodes=2, data=16), 128)


def test_a_slower_network_slows_down_plans_on_several_nodes():
    chosen = plan(nodes=4, data=32, overlap_data=False)
    (network,) = [link for link in SELENE.links if link.level == "network"]
    slow = dataclasses.replace(
        network,
        bandwidth_bytes_per_s=dataclasses.replace(network.bandwidth_bytes_per_s, value=1e9),
    )
    others = tuple(link for link in SELENE.links if link is not network)
    machine = dataclasses.replace(SELENE, links=(*others, slow))
    fast_s = step_times(SELENE, MODEL, chosen, 256).breakdown.total_s
    assert step_times(machine, MODEL, chosen, 256).breakdown.total_s > 2 * fast_s


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"data": 16}, "16 ranks need as many devices, 1 nodes have 8"),
        ({"pipeline": 8, "stages_per_rank": 8}, "32 layers cannot be cut into 64 stages"),
        ({"tensor": 5}, "5 tensor-parallel ranks do not divide 32 heads"),
        ({"pipeline": 2, "layers": (10, 10)}, "the stages have 20 layers, the model 32"),
    ],
)
def test_a_wrong_plan_says_what_is_wrong(fields, words):
    with pytest.raises(UsageError, match=words):
        step_times(SELENE, MODEL, plan(**fields), 64)


def test_a_machine_without_peaks_says_which_keys_are_missing():
    device = dataclasses.replace(SELENE.devices[0], peaks=())
    machine = dataclasses.replace(SELENE, devices=(device,))
    with pytest.raises(UsageError, match=r"no peak rate") as raised:
        step_times(machine, MODEL, plan(), 64)
    assert "devices[0].peaks" in raised.value.where


def test_the_estimate_says_what_it_rests_on_and_what_is_extrapolated():
    chosen = plan(nodes=1024, data=1024, tensor=8, microbatches=1, zero=1)
    found = estimate_transformer(SELENE, MODEL, chosen, 8192)
    assert any("1024 nodes, the machine 560" in text for text in found.warnings)
    assert any("prior of gpu" in text for text in found.warnings)
    assert found.low_s < found.step_time_s < found.high_s
    assert set(found.link_bytes) == {"nvlink", "network"}
    assert sum(found.shares.values()) == pytest.approx(1, abs=0.1)


def test_stragglers_and_failures_cost_what_order_statistics_and_young_say():
    assert straggler_wait_s(1.0, 0.02, 1024) == pytest.approx(0.02 * math.sqrt(2 * math.log(1024)))
    assert straggler_wait_s(1.0, 0.02, 1) == 0.0
    found = checkpoint_plan(checkpoint_s=50.0, failure_s=40_000.0)
    assert found.interval_s == pytest.approx(2000.0)
    assert found.useful_share == pytest.approx(1 - 50 / 2050 - 1050 / 40_000)
    assert checkpoint_plan(checkpoint_s=1e4, failure_s=1e3).useful_share == 0.0
    risky = Risks(jitter=0.02, node_failure_s=1e6)
    chosen = plan(nodes=2, data=16)
    quiet, real = (estimate_transformer(SELENE, MODEL, chosen, 128, each) for each in (None, risky))
    assert real.breakdown.waiting > quiet.breakdown.waiting
    assert 0 < real.useful_share < 1 == quiet.useful_share


def steps_of(machine, plans):
    return [
        TimedStep(
            model=MODEL, plan=chosen, batch=64,
            step_s=step_times(machine, MODEL, chosen, 64).breakdown.total_s,
        )
        for chosen in plans
    ]  # fmt: skip


PLANS = [plan(tensor=8), plan(data=8, zero=3), plan(tensor=2, data=4), plan(pipeline=8)]


def test_a_fit_finds_the_efficiency_that_made_the_steps():
    start = prior(SELENE.devices[0])
    true = dataclasses.replace(
        start,
        matmul=dataclasses.replace(start.matmul, value=0.7),
        link=dataclasses.replace(start.link, value=0.6),
    )
    steps = steps_of(with_efficiency(SELENE, true), PLANS)
    found = fit_efficiency(SELENE, steps)
    machine = with_efficiency(SELENE, found)
    for step in steps:
        again = step_times(machine, MODEL, step.plan, step.batch).breakdown.total_s
        assert again == pytest.approx(step.step_s, rel=0.03)
    assert found.matmul.value == pytest.approx(0.7, rel=0.06)
    assert found.matmul.source == "fit"


def test_one_wrong_step_does_not_move_the_machine():
    steps = steps_of(SELENE, [*PLANS, *PLANS])
    steps[0] = dataclasses.replace(steps[0], step_s=3 * steps[0].step_s)
    found = fit_efficiency(SELENE, steps)
    expected = efficiency_of(SELENE.devices[0])
    assert found.matmul.value == pytest.approx(expected.matmul.value, rel=0.1)


def test_without_steps_the_prior_stays():
    start = prior(SELENE.devices[0])
    assert fit_efficiency(SELENE, []) == start
    assert pooled(start, []) == start


def test_the_choice_of_steps_does_not_look_at_their_times():
    steps = steps_of(SELENE, PLANS)
    wrong = [dataclasses.replace(step, step_s=step.step_s * 5) for step in steps]
    assert informative(SELENE, steps, 2) == informative(SELENE, wrong, 2)


def test_other_machines_move_the_prior_of_the_device_but_not_of_the_network():
    start = prior(SELENE.devices[0])
    narrow = {"low": 0.59, "high": 0.61, "source": "fit"}
    others = [
        dataclasses.replace(
            start,
            matmul=dataclasses.replace(start.matmul, value=0.6, **narrow),
            network=dataclasses.replace(start.network, value=0.6, **narrow),
        )
    ] * 3
    found = pooled(start, others)
    assert 0.6 < found.matmul.value < start.matmul.value
    assert found.network == start.network
    assert all(getattr(found, name) == getattr(start, name) for name in FIGURES if name != "matmul")
