"""A model in stages within a memory budget: each rank spills what its own stage saves."""

from pathlib import Path

from support.process_groups import run_ranks

SCRIPT = Path(__file__).parent / "scripts/stages_out_of_core.py"


def test_stages_spill_and_their_gradients_are_equal_to_the_bit(tmp_path):
    for found in run_ranks(SCRIPT, tmp_path, 2, tmp_path):
        assert found["found"] == found["expected"]
        assert len(set(found["expected"])) == len(found["expected"])
        assert found["tight"]["plan"]["spilled_bytes"] > 0
        assert found["tight"]["planned_steps"] >= 2
