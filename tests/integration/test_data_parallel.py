"""The data-parallel engine trains as one process does, in every mode."""

import json
import sys
from pathlib import Path

import pytest
from support.emulated_hosts import require_namespaces, run_on_hosts
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/data_parallel.py"


@pytest.mark.parametrize(
    ("ranks", "backend"), [(1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "paceline"), (3, "paceline")]
)
def test_parameters_are_those_of_one_process(tmp_path, ranks, backend):
    for found in run_ranks(SCRIPT, tmp_path, ranks, backend):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong


@pytest.mark.parametrize(
    ("host_ranks", "backend"), [((1, 1), "gloo"), ((1, 1, 1), "paceline"), ((2, 1), "paceline")]
)
def test_sharded_parameters_are_those_of_one_process_between_hosts(tmp_path, host_ranks, backend):
    require_namespaces()
    rank = [sys.executable, SCRIPT, tmp_path / "store", "$RANK", "$WORLD_SIZE", backend, "sharded"]
    codes, out, err = run_on_hosts(host_ranks, rank)
    assert not any(codes), err
    found = [json.loads(line) for line in "".join(out).splitlines() if line.startswith("{")]
    assert len(found) == sum(host_ranks)
    assert not [case for each in found for case, error in each.items() if not error < 1e-12]
