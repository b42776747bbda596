"""A small form of bench/truth.py: planted culprits on real ranks, and a clean run."""

import json
import subprocess
import sys

import pytest


def run_truth(root, *options):
    done = subprocess.run(
        [sys.executable, root / "bench" / "truth.py", "--json", *options],
        stdout=subprocess.PIPE,
        timeout=400,
        check=False,
    )
    return json.loads(done.stdout)


@pytest.mark.campaign("measures")
def test_planted_culprits_are_named_and_a_clean_run_accuses_nobody(root):
    result = run_truth(root, "--quick", "--framework", "torch")
    planted = [row for row in result["rows"] if row["culprit"] is not None]
    clean = [row for row in result["rows"] if row["culprit"] is None]
    assert len(planted) >= 6
    assert sum(row["rank_right"] for row in planted) >= len(planted) - 1
    assert sum(row["accused"] for row in clean) <= 1


@pytest.mark.campaign("measures")
@pytest.mark.parametrize("framework", ["mpi", "gloo"])
def test_planted_patterns_of_ring_programs_are_named(root, framework):
    result = run_truth(root, "--quick", "--framework", framework)
    planted = [row for row in result["rows"] if row["culprit"] is not None]
    assert {row["pattern"] for row in planted} >= {"late sender", "slow disk", "hog", "checkpoint"}
    assert sum(row["cause_right"] for row in planted) >= len(planted) - 1
    assert all(row["bytes_right"] for row in result["rows"])


def test_a_slow_disk_of_an_mpi_program_is_named(root, tmp_path):
    """Calls for files say so: to the kernel the thread sleeps."""
    keep = tmp_path / "keep"
    options = ("--framework", "mpi", "--cases", "3", "--keep", keep)
    (row,) = run_truth(root, *options)["rows"]
    assert row["pattern"] == "slow disk"
    assert row["cause_right"], row["found"]
    assert row["bytes_right"]
    kept = keep / "mpi-0-003" / "row.json"
    assert json.loads(kept.read_text()) == row
    kept.write_text(json.dumps({**row, "kept": True}))
    (again,) = run_truth(root, *options)["rows"]
    assert again == {**row, "kept": True}  # it has been run, and is not run again


def test_a_late_sender_of_a_program_on_gloo_is_named(root):
    (row,) = run_truth(root, "--framework", "gloo", "--cases", "7")["rows"]
    assert (row["pattern"], row["blocking"]) == ("late sender", True)
    assert row["cause_right"], row["found"]
    assert row["state_right"]
    assert row["bytes_right"]
