"""`paceline plan --fit`: what goes where within a memory budget, beside what a session records."""

import json
import subprocess
import sys

import pytest
from launching import SCRIPTS, last_json, paceline
from machines import small_machine

SCRIPT = SCRIPTS / "fitted_models.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fit")
    (path / "machine.json").write_text(small_machine(1e10).to_text())
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
    done = subprocess.run(
        [sys.executable, SCRIPT, name], capture_output=True, text=True, timeout=300, check=True
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
    assert "no plan fits a memory budget of 104,857,600 bytes" in done.err
    assert "Give at least" in done.err


def test_stages_have_no_budget(folder):
    done = planned(folder, "mlp", "1G", "-n", "2", "--partitions", "2")
    assert done.code == 2
    assert "Leave out --strategy" in done.err
