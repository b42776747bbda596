"""The backend ``paceline`` is a process group as torch's own are, and what torch builds runs on it.

Two ranks run in `make test`. Three ranks, and the same cases on gloo (which shows that they ask for
no more than torch's own backend gives), run with `scripts/campaign launchers`.
"""

import ast
import sys
from pathlib import Path

import pytest
from support.process_groups import lost_peer, run_mpi_ranks, run_ranks

SCRIPTS = Path(__file__).parent / "scripts"
GROUP_CASES = SCRIPTS / "process_group_cases.py"
TWO_LEVEL_CASES = SCRIPTS / "two_level_cases.py"
FRAMEWORK_CASES = SCRIPTS / "framework_cases.py"
PRETENDED_HOSTS = SCRIPTS / "pretended_hosts.py"
MPIEXEC = Path(sys.executable).with_name("mpiexec")


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


def test_two_levels_give_what_one_gives(tmp_path):
    layouts = ("0,2/1,3", "0,1,3/2")
    cases = (
        "case_all_reduce_of_types_operations_and_sizes",
        "case_broadcast_and_reduce_at_each_root",
        "case_reduce_scatter_of_types_operations_and_sizes",
        "case_all_gather_of_types_and_sizes",
        "case_gather_and_scatter_at_each_root",
        "case_barrier_after_calls_that_are_under_way",
        "case_works_say_their_path",
    )
    expected = {f"{layout} {case}": "" for layout in layouts for case in cases}
    for results in run_ranks(TWO_LEVEL_CASES, tmp_path, 4, "same", ";".join(layouts), *cases):
        assert results == expected


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize(
    ("ranks", "wire", "layouts"),
    [
        (4, "same", "0,1/2,3;0,3/1,2;0,1,3/2"),
        (4, "bfloat16", "0,1/2,3;0,2,3/1;0/1/2/3"),
        (3, "same", "0,1/2;0,2/1;0/1/2"),
        (5, "same", "0,2,4/1/3"),
    ],
)
def test_all_of_two_levels(tmp_path, ranks, wire, layouts):
    for results in run_ranks(TWO_LEVEL_CASES, tmp_path, ranks, wire, layouts):
        assert set(results.values()) == {""}, results


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize(("ranks", "hosts"), [(4, "0,2/1,3"), (3, "0,1/2")])
def test_a_group_on_several_hosts_does_what_gloo_does(tmp_path, ranks, hosts):
    cases = [case for case in cases_of(GROUP_CASES) if "beyond_gloo" not in case]
    given = (hosts, "same", GROUP_CASES, "paceline", *cases)
    for results in run_ranks(PRETENDED_HOSTS, tmp_path, ranks, *given):
        assert results == dict.fromkeys(cases, "")


# A rank that does not come is left out: MPI's calls cannot be taken back, so the job could not end.
def cases_over_mpi(script):
    left_out = ("beyond_gloo", "deadline", "does_not_come")
    return [case for case in cases_of(script) if not any(word in case for word in left_out)]


@pytest.mark.campaign("mpi")
@pytest.mark.parametrize("layouts", ["0,1/2,3;0,2/1,3", "0,1,3/2"])
def test_two_levels_over_mpi(tmp_path, layouts):
    given = (TWO_LEVEL_CASES, tmp_path, 4, "mpi", layouts, *cases_over_mpi(TWO_LEVEL_CASES))
    for results in run_mpi_ranks(MPIEXEC, *given):
        assert set(results.values()) == {""}, results


@pytest.mark.campaign("mpi")
def test_a_group_on_several_hosts_over_mpi_does_what_gloo_does(tmp_path):
    cases = cases_over_mpi(GROUP_CASES)
    given = (PRETENDED_HOSTS, tmp_path, 4, "0,2/1,3", "mpi", GROUP_CASES, "paceline", *cases)
    for results in run_mpi_ranks(MPIEXEC, *given):
        assert results == dict.fromkeys(cases, "")


@pytest.mark.campaign("mpi")
def test_pipelines_send_over_mpi_what_they_send_over_gloo(tmp_path):
    cases = ("case_pipelines", "case_stages_of_prepare")
    given = (PRETENDED_HOSTS, tmp_path, 2, "0/1", "mpi", FRAMEWORK_CASES, tmp_path, *cases)
    for results in run_mpi_ranks(MPIEXEC, *given):
        assert set(results) == set(cases)
        for case, numbers in results.items():
            assert isinstance(numbers, list), numbers
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-7), case


def test_mpi_is_refused_where_its_launcher_did_not_start_the_ranks(tmp_path):
    given = ("0/1", "mpi", GROUP_CASES, "paceline", "case_barrier")
    with pytest.raises(AssertionError, match="rank 1 of torch is rank 0 of MPI") as raised:
        run_ranks(PRETENDED_HOSTS, tmp_path, 2, *given)
    assert str(raised.value).count("MPI cannot carry data between hosts") >= 2


@pytest.mark.campaign("launchers")
def test_what_torch_builds_trains_between_hosts_as_on_gloo(tmp_path):
    given = ("0/1", "same", FRAMEWORK_CASES, tmp_path)
    for rank, results in enumerate(run_ranks(PRETENDED_HOSTS, tmp_path, 2, *given)):
        for case, numbers in results.items():
            assert isinstance(numbers, list), f"rank {rank}: {numbers}"
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-5, abs=1e-7), case


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
