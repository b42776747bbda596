"""`scripts/changed`: which tests and campaigns a change concerns."""

import importlib.machinery
import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def changed():
    loader = importlib.machinery.SourceFileLoader("changed", str(ROOT / "scripts" / "changed"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("changed", loader))
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def edges(changed):
    return changed.dependencies()


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("src/paceline/report/words.py", {"tests/unit/test_report_words.py": 1, "campaign:e2e": 3}),
        # A verb's words, a name of the compiled module, an MPI's interposed calls.
        ("src/paceline/cli/why.py", {"tests/integration/test_report_cli.py": 1}),
        (
            "native/src/recorder.cpp",
            {"native/tests/recorder_test.cpp": 2, "campaign:sanitizers": 3},
        ),
        ("native/mpi/windows.cpp", {"src/paceline/launch/mpi.py": 1, "campaign:mpi": 3}),
        # What tests share, and what they name.
        ("tests/support/launching.py", {"tests/integration/test_run.py": 1}),
        ("tests/integration/scripts/train.py", {"tests/integration/test_run.py": 1}),
        ("docs/architecture.md", {"tests/e2e/test_documents.py": 1}),
    ],
)
def test_what_depends_on_a_file_is_found(changed, edges, path, near):
    assert (ROOT / path).exists()
    found = changed.distances(edges, {path})
    assert {other: found.get(other) for other in near} == near


def test_a_change_of_the_federation_concerns_no_mpi(changed, edges):
    found = changed.distances(edges, {"src/paceline/federated/__init__.py"})
    assert "campaign:flower" in found
    assert "campaign:mpi" not in found


def test_every_campaign_has_tests_and_runs_at_least_once_in_five_changes(
    changed, edges, monkeypatch
):
    assert all(edges[changed.CAMPAIGN + part] for part in changed.PARTS)
    monkeypatch.setattr(changed, "dependencies", lambda: edges)
    monkeypatch.setattr(changed, "changed_since", lambda ref: set())
    record = {part: {"commit": "0" * 40, "date": "2020"} for part in changed.IN_CI}
    ran = set()
    for change in range(5):
        chosen = [part for part, _ in changed.due(record)]
        assert len(chosen) == 2
        ran |= {*chosen}
        record |= {part: {"commit": "0" * 40, "date": f"2021-{change}"} for part in chosen}
    assert ran == {*changed.IN_CI}


def test_a_campaign_is_due_when_what_it_depends_on_changed(changed, edges, monkeypatch, capsys):
    monkeypatch.setattr(changed, "dependencies", lambda: edges)
    monkeypatch.setattr(changed, "changed_since", lambda ref: {"native/mpi/windows.cpp"})
    record = {part: {"commit": "0" * 40, "date": "2020"} for part in changed.IN_CI}
    record["mpi"]["date"] = record["scheduler"]["date"] = "2021"
    due = [part for part, _ in changed.due(record)]
    assert due[2] in ("e2e", "mpi")  # behind the two oldest, the nearest
    assert "scheduler" not in due
    assert "scheduler is not due" in capsys.readouterr().err


def test_a_slower_machine_is_expected_to_take_longer(changed):
    entry = {"seconds": 100, "suite_s": 600}
    assert changed.expected(entry, 0) == pytest.approx(120)  # of nothing that ran before
    assert changed.expected(entry, 1200) == pytest.approx(240)
    assert changed.expected({"seconds": 100}, 1200) == pytest.approx(120)
