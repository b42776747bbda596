"""A small form of bench/truth.py: planted culprits on real ranks, and a clean run."""

import json
import subprocess
import sys

import pytest


@pytest.mark.campaign("e2e")
def test_planted_culprits_are_named_and_a_clean_run_accuses_nobody(root):
    done = subprocess.run(
        [sys.executable, root / "bench" / "truth.py", "--quick", "--json"],
        stdout=subprocess.PIPE,
        timeout=400,
        check=False,
    )
    result = json.loads(done.stdout)
    planted = [row for row in result["rows"] if row["culprit"] is not None]
    clean = [row for row in result["rows"] if row["culprit"] is None]
    assert len(planted) >= 6
    assert sum(row["rank_right"] for row in planted) >= len(planted) - 1
    assert sum(row["accused"] for row in clean) <= 1
