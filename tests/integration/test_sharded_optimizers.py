"""LARS and LAMB on sharded layers equal those on whole layers, on 1, 2 and 3 real ranks.

Three ranks run in `make test`, one and two with `scripts/campaign launchers`.
"""

import ast
from pathlib import Path

import pytest
from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts" / "sharded_optimizers.py"
CASES = [
    f"{node.name}:{name}"
    for node in ast.parse(SCRIPT.read_text()).body
    if getattr(node, "name", "").startswith("case_")
    for name in ("lars", "lamb")
]


LATER = pytest.mark.campaign("launchers")


@pytest.fixture(
    scope="module",
    params=[3, pytest.param(2, marks=LATER), pytest.param(1, marks=LATER)],
    ids="{} ranks".format,
)
def outcome(request, tmp_path_factory):
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.parametrize("case", CASES)
def test_sharded_equals_whole(outcome, case):
    for rank, results in enumerate(outcome):
        difference = results[case]
        assert not isinstance(difference, str), f"rank {rank}: {difference}"
        assert difference < 2e-6, f"rank {rank}: parameters differ by {difference}"
