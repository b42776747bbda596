"""A search of plans: bounds hold, the winner is that of pricing all, and the answer has reasons."""

import csv
import dataclasses
import json
from xml.etree import ElementTree

import pytest
from support.command_line import without_torch

from paceline.cli.plan_model import NodeRange
from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.machine_file import library_machine
from paceline.perf.planner import SearchSpace, search_plans
from paceline.perf.planner.bounds import PlanBounds
from paceline.perf.planner.candidates import BoundedPlans, PlanPricer
from paceline.perf.planner.changes import parse_changes, with_changes
from paceline.perf.planner.scaling import scaling_study
from paceline.perf.transformer import Architecture, SampleCost
from paceline.report.plan_search import plan_in_words

SELENE = library_machine("selene")
SMALL = Architecture(layers=6, hidden=512, heads=8, vocab=32000, sequence=2048)
LARGE = Architecture(layers=48, hidden=8192, heads=64, vocab=51200, sequence=2048)
MODELS = {
    "small": (SMALL, 64, (1, 2)),
    "uneven layers": (dataclasses.replace(SMALL, layers=7, tied=False), 48, (1,)),
    "large": (LARGE, 128, (4,)),
}


def priced(machine, model, space):
    pricer = PlanPricer(machine, model, space, deadline_s=float("inf"))
    return [pricer(plan) for plan in space.plans(machine, model)]


@pytest.mark.parametrize("name", MODELS)
def test_no_plan_is_faster_or_smaller_than_its_bounds(name):
    model, batch, nodes = MODELS[name]
    space = SearchSpace(batch=batch, nodes=nodes, fixed={})
    bounds = PlanBounds(SELENE, model, space)
    plans = list(space.plans(SELENE, model))
    pricer = PlanPricer(SELENE, model, space, deadline_s=float("inf"))
    for plan in plans[:: max(1, len(plans) // 300)]:
        found = pricer(plan)
        assert bounds.step_s(plan) <= found.step_s * (1 + 1e-9), plan
        assert bounds.memory_bytes(plan) <= found.memory_bytes + 16, plan


SUPPLIED = {
    "loaders": {
        "sample": SampleCost(bytes=4 << 20, seconds=0.02),
        "varied": {"loader_workers": (0, 1, 8)},
    },
    "precision and compression": {
        "varied": {"precision": ("bfloat16", "float32"), "compression": (1.0, 8.0)},
    },
    "a budget": {"budget_bytes": 3 << 30},
}


@pytest.mark.parametrize("name", SUPPLIED)
def test_bounds_hold_and_the_winner_is_the_fastest_with_data_and_budgets(name):
    """Of a search with --compression, plans with ZeRO ended in an error."""
    fixed = {"context": 1, "schedule": "1f1b", "interleave": 1}
    space = SearchSpace(batch=64, nodes=(1,), fixed=fixed, **SUPPLIED[name])
    bounds = PlanBounds(SELENE, SMALL, space)
    pricer = PlanPricer(SELENE, SMALL, space, deadline_s=float("inf"))
    plans = list(space.plans(SELENE, SMALL))
    for plan in plans:
        found = pricer(plan)
        fits = found.memory_bytes <= pricer.capacity_bytes  # else, what leaves takes no time
        assert not fits or bounds.step_s(plan) <= found.step_s * (1 + 1e-9), plan
        assert bounds.memory_bytes(plan) <= found.memory_bytes + 16, plan
        assert not (plan.compression > 1 and plan.zero)
    fitting = [plan for plan in pricer.plans if plan.memory_bytes <= pricer.capacity_bytes]
    search = search_plans(SELENE, SMALL, space)
    assert search.front[0].step_s == min(plan.step_s for plan in fitting)
    assert search.compared == len(plans)
    fit = search.best.memory_fit
    whole_s = fit.step_s if fit else search.best.step_time_s
    assert whole_s == pytest.approx(search.front[0].step_s)
    assert {item.axis for item in search.alternatives} >= set(space.varied)


def test_a_plan_that_leaves_on_the_host_beats_none():
    """Without the budget, nothing fits."""
    fixed = {"tensor": 8, "stages": 1, "context": 1, "microbatch": 1, "recompute": "full"}
    space = SearchSpace(batch=64, nodes=(1,), fixed={**fixed, "zero": 0})
    model = dataclasses.replace(LARGE, layers=56)
    assert not search_plans(SELENE, model, space, explains=False).fits
    spilled = dataclasses.replace(space, budget_bytes=75 << 30)
    search = search_plans(SELENE, model, spilled)
    assert search.front[0].memory_bytes <= 75 << 30
    assert search.best.memory_fit.kinds["optimizer state"]["spill"] > 0


def test_the_front_is_that_of_pricing_every_plan():
    space = SearchSpace(batch=64, nodes=(1, 2), fixed={"zero": 1, "context": 1})
    everything = priced(SELENE, SMALL, space)
    search = search_plans(SELENE, SMALL, space)
    assert search.compared == len(everything) > search.priced
    assert search.front[0].step_s == min(plan.step_s for plan in everything)
    assert not search.left_out
    for point in search.front:
        assert not any(
            other.step_s < point.step_s * (1 - 1e-9)
            and other.devices <= point.devices
            and other.memory_bytes <= point.memory_bytes
            for other in everything
        )


def test_alternatives_name_what_each_choice_of_the_winner_is_worth():
    space = SearchSpace(batch=64, nodes=(1,), fixed={"context": 1})
    search = search_plans(SELENE, SMALL, space)
    everything = priced(SELENE, SMALL, space)
    winner = search.front[0].plan
    exact = [item for item in search.alternatives if item.slower is not None and not item.is_bound]
    assert {"tensor", "zero", "recompute"} <= {item.axis for item in exact}
    for item in exact:
        if item.axis != "tensor":
            continue
        best_s = min(plan.step_s for plan in everything
                     if plan.plan.mesh.tensor == int(item.value))  # fmt: skip
        assert item.slower == pytest.approx(best_s / search.front[0].step_s - 1)
    assert all(item.value != str(winner.mesh.tensor) for item in exact if item.axis == "tensor")


def test_what_is_given_is_fixed():
    space = SearchSpace(batch=128, nodes=(4,), fixed={"tensor": 4, "stages": 2, "zero": 0})
    plans = list(space.plans(SELENE, LARGE))
    assert {(plan.mesh.tensor, plan.mesh.pipeline, plan.zero) for plan in plans} == {(4, 2, 0)}
    assert {plan.stages_per_rank for plan in plans} > {1}
    ordered = dataclasses.replace(space, fixed={**space.fixed, "schedule": "zero_bubble"})
    found = {(plan.schedule, plan.stages_per_rank) for plan in ordered.plans(SELENE, LARGE)}
    assert found == {("zero_bubble", 1)}


@pytest.mark.parametrize(
    ("fixed", "words"),
    [({"zero": 0}, "zero 3 in place of 0"), ({}, "nodes: a rank needs")],
    ids=["a flag", "nodes"],
)
def test_where_nothing_fits_the_cheapest_change_is_named(fixed, words):
    space = SearchSpace(batch=64, nodes=(1,), fixed={"tensor": 8, "microbatch": 1, **fixed})
    if not fixed:
        model = dataclasses.replace(LARGE, layers=400)
    else:
        model = dataclasses.replace(LARGE, layers=12, hidden=8192)
        space = dataclasses.replace(space, fixed={"tensor": 1, "stages": 1, "context": 1, **fixed})
    search = search_plans(SELENE, model, space)
    assert not search.fits
    assert search.best.needed_memory_bytes > search.best.available_memory_bytes
    assert words in search.cheapest_change


def test_a_search_that_runs_out_of_time_says_what_it_left_out():
    space = SearchSpace(batch=64, nodes=(1,), fixed={"context": 1})
    search = search_plans(SELENE, SMALL, space, budget_s=0.0)
    assert search.priced == 0
    assert search.left_out == search.fitting > 0


def test_a_batch_that_nothing_divides_is_refused():
    space = SearchSpace(batch=7, nodes=(2,), fixed={"tensor": 1, "stages": 1, "context": 1})
    with pytest.raises(UsageError, match="no plan divides a batch of 7"):
        BoundedPlans.of(space, SELENE, SMALL)


def command(*flags):
    model = "layers=6,hidden=512,heads=8,vocab=32000,sequence=2048"
    return without_torch("plan", "--model", model, "--machine", "selene", *flags, text=True)


def test_the_command_prints_the_best_plan_and_writes_it(tmp_path):
    out = tmp_path / "plan.json"
    done = command("--nodes", "1..2", "--batch", "64", "--context", "1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "plans compared" in done.stdout
    assert "in place of the winner's" in done.stdout
    written = json.loads(out.read_text())["plan"]
    as_json = command("--search", "--batch", "64", "--nodes", "2", "--context", "1", "--json")
    assert json.loads(as_json.stdout)["best"]["plan"]["nodes"] == 2
    assert written["mesh"]["context"] == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--search",), "a search needs the samples of a step"),
        (("--nodes", "4..2", "--batch", "8"), "ends before it begins"),
        (("--nodes", "some"), "no number of nodes"),
        (("--steps", "3"), "--steps has an effect with --simulate"),
        (("--samples", "3"), "--samples has an effect with --scaling"),
        (("--epochs", "3"), "--epochs has an effect with --samples"),
        (("--vary", "compression=1,4"), "--vary has an effect where plans are compared"),
        (("--vary", "zero=1"), "'zero' is none of precision, compression, loader-workers"),
        (("--vary", "compression=0.5"), "0.5 is not in the range x>=1"),
        (
            ("--search", "--batch", "8", "--compression", "2", "--vary", "compression=1,4"),
            "'compression' is fixed at 2.0 and varied",
        ),
        (("--what-if", "loader x2"), "'loader' has an effect with --sample-seconds"),
        (("--what-if", "storage x2"), "'storage' has an effect with --sample-bytes"),
        (("--what-if", "netwrk x2"), "unknown figure 'netwrk'"),
        (("--what-if", "network 2"), "no figure with a factor above 0"),
        (("--simulate", "x", "--slow", "9:2"), "rank 9 is disturbed, and there are 8"),
        (("--simulate", "x", "--slow", "1"), "no rank with a factor"),
    ],
)
def test_wrong_ranges_and_missing_batches_are_refused(flags, words):
    done = command(*flags)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_scaling_study_is_printed_drawn_and_written(tmp_path):
    flags = ("--nodes", "1..4", "--batch", "64", "--zero", "1", "--context", "1")
    done = command(*flags, "--scaling", str(tmp_path), "--samples", "1000000")
    assert done.returncode == 0, done.stderr
    assert "the fastest plan" in done.stdout
    rows = list(csv.DictReader((tmp_path / "scaling.csv").read_text().splitlines()))
    assert [row["nodes"] for row in rows] == ["1", "2", "4"]
    assert float(rows[0]["efficiency"]) == 1.0
    assert float(rows[0]["training_s"]) > float(rows[-1]["training_s"]) > 0
    drawing = ElementTree.fromstring((tmp_path / "scaling.svg").read_text())
    assert drawing.tag.endswith("svg")


def test_a_study_leaves_out_sizes_that_do_not_fit_or_divide():
    space = SearchSpace(batch=96, nodes=(1, 4, 64), fixed={"stages": 1, "context": 1, "tensor": 8})
    study = scaling_study(SELENE, LARGE, space)
    assert study.too_small or study.points[0].nodes == 1
    assert study.indivisible == (64,)
    twice = scaling_study(with_changes(SELENE, {"network": 2.0}), LARGE, space)
    assert twice.points[-1].step_s <= study.points[-1].step_s
    with pytest.raises(MemoryExceeded, match="fits at none"):
        scaling_study(SELENE, LARGE, dataclasses.replace(space, nodes=(64, 128)))


def test_a_study_counts_epochs_loaders_and_faster_ones(tmp_path):
    flags = ("--nodes", "1..2", "--batch", "64", "--zero", "1", "--context", "1", "--samples",
             "100000", "--sample-seconds", "0.05", "--vary", "loader-workers=0,4")  # fmt: skip
    hours = []
    for more in ((), ("--epochs", "3"), ("--what-if", "loader x50")):
        done = command(*flags, *more, "--scaling", str(tmp_path), "--json")
        assert done.returncode == 0, done.stderr
        study = json.loads(done.stdout)
        hours.append(study["samples"] / study["points"][0]["samples_per_s"])
        assert study["points"][0]["plan"]["loader_workers"] == 4
    assert hours[1] == pytest.approx(3 * hours[0])
    assert hours[2] < 0.6 * hours[0]


def test_changes_of_a_machine_multiply_its_figures():
    changed = with_changes(SELENE, {"compute": 2.0, "memory": 0.5, "network": 3.0, "link": 4.0})
    device, old = changed.devices[0], SELENE.devices[0]
    assert device.memory_bytes.value == old.memory_bytes.value / 2
    assert device.peaks[0].flops_per_s.value == 2 * old.peaks[0].flops_per_s.value
    for level, factor in (("network", 3.0), ("nvlink", 4.0)):
        before, after = SELENE.link(level), changed.link(level)
        assert after.bandwidth_bytes_per_s.value == factor * before.bandwidth_bytes_per_s.value
    assert parse_changes(" memory x0.5,network x 2 ") == {"memory": 0.5, "network": 2.0}


def test_the_command_simulates_a_plan(tmp_path):
    run = tmp_path / "run"
    flags = ("--batch", "64", "--stages", "2", "--simulate", str(run), "--steps", "20")
    done = command(*flags, "--slow", "5:1.5")
    assert done.returncode == 0, done.stderr
    why = without_torch("why", str(run), text=True)
    assert "Rank 5 arrives" in why.stdout, why.stderr


def test_a_range_of_nodes_doubles_until_its_end():
    assert NodeRange().convert("1..512", None, None)[-2:] == (256, 512)
    assert NodeRange().convert("24", None, None) == (24,)


def test_a_plan_is_told_in_words():
    space = SearchSpace(batch=64, nodes=(1,), fixed={"tensor": 2, "stages": 2, "zero": 3,
                        "recompute": "full", "microbatch": 32, "schedule": "1f1b"})  # fmt: skip
    plan = next(iter(space.plans(SELENE, SMALL)))
    assert plan_in_words(plan) == (
        "2 data x 2 tensor x 2 pipeline, 1 microbatch, 1f1b, zero 3, recompute full"
    )
