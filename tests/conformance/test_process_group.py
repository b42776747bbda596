"""The backend ``paceline`` is a process group as torch's own are, and what torch builds runs on it.

Two ranks run in `make test`. Three ranks, and the same cases on gloo (which shows that they ask for
no more than torch's own backend gives), run with `scripts/campaign launchers`.
"""

import ast
from pathlib import Path

import pytest
from process_groups import lost_peer, run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
GROUP_CASES = SCRIPTS / "process_group_cases.py"
TWO_LEVEL_CASES = SCRIPTS / "two_level_cases.py"
FRAMEWORK_CASES = SCRIPTS / "framework_cases.py"


def cases_of(script):
    tree = ast.parse(script.read_text())
    return [node.name for node in tree.body if getattr(node, "name", "").startswith("case_")]


class ProcessGroupCases:
    """Runs the cases of a script once, and has a test for each case."""

    backend = "paceline"
    ranks = 2

    @pytest.fixture(scope="class")
    def outcome(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ranks")
        return run_ranks(GROUP_CASES, folder, self.ranks, self.backend)

    @pytest.mark.parametrize("case", cases_of(GROUP_CASES))
    def test_case(self, outcome, case):
        for rank, results in enumerate(outcome):
            assert results.get(case, "") == "", f"rank {rank}: {results[case]}"


class TestTwoRanks(ProcessGroupCases):
    pass


@pytest.mark.campaign("launchers")
class TestThreeRanks(ProcessGroupCases):
    ranks = 3


@pytest.mark.campaign("launchers")
class TestGloo(ProcessGroupCases):
    backend = "gloo"


def test_two_levels_sum_as_one(tmp_path):
    case = "case_all_reduce_of_types_operations_and_sizes"
    for results in run_ranks(TWO_LEVEL_CASES, tmp_path, 2, "same", case):
        assert results == {case: ""}


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize("wire", ["same", "bfloat16"])
def test_all_of_two_levels(tmp_path, wire):
    for results in run_ranks(TWO_LEVEL_CASES, tmp_path, 4, wire):
        assert set(results.values()) == {""}, results


@pytest.mark.parametrize("how", ["backward", "other_size"])
def test_a_rank_that_is_killed_or_calls_something_else_is_named(tmp_path, how):
    (error,) = lost_peer(tmp_path, 2, how)
    if how == "backward":
        assert error["kind"] == "RankLost"
        assert "rank 1 is gone, while rank 0 waited for it in all_reduce" in error["text"]
    else:
        assert error["kind"] == "CollectiveMismatch"
        assert "all_reduce of 10 float32" in error["text"]
        assert "all_reduce of 11 float32" in error["text"]


@pytest.mark.campaign("faults")
@pytest.mark.parametrize("how", ["all_reduce", "other_call"])
def test_a_rank_is_named_whatever_it_was_waited_for(tmp_path, how):
    (error,) = lost_peer(tmp_path, 2, how)
    assert error["kind"] in ("RankLost", "CollectiveMismatch")
    assert "rank 1" in error["text"]


@pytest.mark.campaign("faults")
def test_a_lost_rank_of_a_subgroup_has_its_global_rank(tmp_path):
    (error,) = lost_peer(tmp_path, 3, "in_subgroup")
    assert "global ranks: 0 is 1, 1 is 2" in error["text"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frameworks")
    return run_ranks(FRAMEWORK_CASES, folder, 2, folder)


@pytest.mark.parametrize("case", cases_of(FRAMEWORK_CASES))
def test_what_torch_builds_trains_as_on_gloo(trained, case):
    for rank, results in enumerate(trained):
        assert isinstance(results[case], list), f"rank {rank}: {results[case]}"
        ours, of_gloo = results[case]
        assert ours == pytest.approx(of_gloo, rel=1e-5, abs=1e-7)
        assert ours
