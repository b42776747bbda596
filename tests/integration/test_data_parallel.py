"""The data-parallel engine trains as one process does, in every mode."""

from pathlib import Path

import pytest
from process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/data_parallel.py"


@pytest.mark.parametrize(
    ("ranks", "backend"), [(1, "gloo"), (2, "gloo"), (3, "gloo"), (2, "paceline"), (3, "paceline")]
)
def test_parameters_are_those_of_one_process(tmp_path, ranks, backend):
    for found in run_ranks(SCRIPT, tmp_path, ranks, backend):
        wrong = {case: error for case, error in found.items() if not error < 1e-12}
        assert not wrong
