"""The backend ``paceline`` is a process group as torch's own are; gloo passes the same cases."""

import ast
from pathlib import Path

import pytest
from process_groups import run_ranks

SCRIPTS = Path(__file__).parent / "scripts"


def cases_of(script):
    tree = ast.parse(script.read_text())
    return [node.name for node in tree.body if getattr(node, "name", "").startswith("case_")]


class ProcessGroupCases:
    """Runs the cases of a script once, and has a test for each case."""

    script = SCRIPTS / "process_group_cases.py"
    backend = "paceline"
    ranks = 2

    @pytest.fixture(scope="class")
    def outcome(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("ranks")
        return run_ranks(self.script, folder, self.ranks, self.backend)

    @pytest.mark.parametrize("case", cases_of(SCRIPTS / "process_group_cases.py"))
    def test_case(self, outcome, case):
        for rank, results in enumerate(outcome):
            assert results.get(case, "") == "", f"rank {rank}: {results[case]}"


class TestTwoRanks(ProcessGroupCases):
    pass


@pytest.mark.campaign("e2e")
class TestThreeRanks(ProcessGroupCases):
    ranks = 3


@pytest.mark.campaign("e2e")
class TestGloo(ProcessGroupCases):
    """What the cases ask for is what gloo does."""

    backend = "gloo"
