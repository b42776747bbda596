"""`paceline plan --fit`: what goes where within a memory budget, beside what a session records."""

import dataclasses
import json
import sys

import pytest
from support import forking
from support.launching import SCRIPTS, last_json, paceline
from support.machines import sheet, small_machine
from support.process_groups import run_ranks

from paceline.core.machine import Link

SCRIPT = SCRIPTS / "fitted_models.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit")
    link = Link(level="loopback", latency_s=sheet(1e-5), bandwidth_bytes_per_s=sheet(1e9))
    machine = dataclasses.replace(small_machine(1e10), links=(link,))
    (path / "machine.json").write_text(machine.to_text())
    return path


def planned(folder, name, budget, *options):
    return paceline(
        folder, "plan", f"{SCRIPT}:{name}", "--machine", "machine.json", "--fit", budget, *options
    )


def fit_of(folder, name, budget):
    done = planned(folder, name, budget, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)["memory_fit"]


@pytest.fixture(scope="module")
def wide(folder):
    return fit_of(folder, "mlp", "1T")


def recorded_peak_bytes(name):
    done = forking.run(
        [sys.executable, SCRIPT, name],
        modules=forking.TORCH,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return last_json(done.stdout)["peak_bytes"]


def test_the_peak_is_that_of_a_recorded_session(wide):
    assert wide["in_core_peak_bytes"] == pytest.approx(recorded_peak_bytes("mlp"), rel=0.05)


@pytest.mark.campaign("torch")
@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_the_peak_of_other_models_is_that_of_a_recorded_session(folder, name):
    found = fit_of(folder, name, "1T")
    assert found["in_core_peak_bytes"] == pytest.approx(recorded_peak_bytes(name), rel=0.05)


def test_what_fits_is_kept(wide):
    assert wide["spilled_bytes"] == 0
    assert wide["step_s"] == pytest.approx(wide["in_core_step_s"])
    assert all(set(counts) <= {"keep"} for counts in wide["kinds"].values())
    # Six layers of 512 x 512, their norms and biases, and the head; Adam has two of each.
    parameters = 4 * (6 * (512 * 512 + 3 * 512) + 512 * 10 + 10)
    assert wide["kinds"]["parameters"]["keep"] == parameters
    assert wide["kinds"]["gradients"]["keep"] == parameters


def test_a_tight_budget_holds_and_says_what_goes_where(folder, wide):
    least, most = wide["least_bytes"], wide["in_core_peak_bytes"]
    done = planned(folder, "mlp", str((least + most) // 2))
    assert done.code == 0, done.err
    found = fit_of(folder, "mlp", str((least + most) // 2))
    assert found["peak_bytes"] <= found["budget_bytes"] < most
    moved = sum(
        count
        for counts in found["kinds"].values()
        for action, count in counts.items()
        if action != "keep"
    )
    assert moved > 0
    assert found["step_s"] >= found["in_core_step_s"]
    for words in ("smallest budget", "tensors", "recomputed", "spilled", "optimizer state"):
        assert words in done.out


def test_a_budget_that_is_too_small_says_the_smallest_one(folder, wide):
    done = planned(folder, "mlp", "100MiB")
    assert done.code == 1
    assert "no plan fits a memory budget of 100 MiB" in done.err
    assert "Give at least" in done.err


def stages_of(folder, name, budget, schedule="1f1b"):
    stages = ("-n", "2", "--partitions", "2", "--microbatches", "4", "--schedule", schedule)
    done = planned(folder, name, budget, *stages, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize("schedule", ["1f1b", "fill_drain"])
def test_the_peak_of_stages_is_that_of_recorded_ranks(folder, tmp_path, schedule):
    found = stages_of(folder, "mlp", "1T", schedule)["stages"]
    recorded = run_ranks(SCRIPT, tmp_path, 2, "mlp", schedule)
    for stage, rank in zip(found, recorded, strict=True):
        fit = stage["memory_fit"]
        assert fit["in_core_peak_bytes"] == pytest.approx(rank["peak_bytes"], rel=0.05)
        assert fit["spilled_bytes"] == 0


def test_stages_within_a_budget_say_what_goes_where_on_each(folder):
    wide = stages_of(folder, "mlp", "1T")
    assert wide["fitted_step_s"] == pytest.approx(wide["step_time_s"])
    fits = [stage["memory_fit"] for stage in wide["stages"]]
    budget = (fits[0]["least_bytes"] + fits[0]["in_core_peak_bytes"]) // 2
    tight = stages_of(folder, "mlp", str(budget))
    first = tight["stages"][0]["memory_fit"]
    assert first["peak_bytes"] <= budget < fits[0]["in_core_peak_bytes"]
    assert first["spilled_bytes"] > 0
    assert tight["fitted_step_s"] >= wide["fitted_step_s"]
    done = planned(folder, "mlp", str(budget), "-n", "2", "--partitions", "2")
    for words in ("smallest budget", "activations spilled", "of each rank's process"):
        assert words in done.out


def test_a_budget_that_is_too_small_names_the_stage(folder):
    done = planned(folder, "mlp", "100MiB", "-n", "2", "--partitions", "2")
    assert done.code == 1
    assert "where: stage 0" in done.err
    assert "Give at least" in done.err


@pytest.mark.parametrize(
    "options",
    [("--strategy", "auto"), ("--batch", "64"), ("--partitions", "2", "--engine", "fsdp2")],
)
def test_what_has_no_budget_is_refused(folder, options):
    done = planned(folder, "mlp", "1G", "-n", "2", *options)
    assert done.code == 2
    assert "Leave" in done.err
