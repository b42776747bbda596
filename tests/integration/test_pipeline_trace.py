"""What a recorded run of a model in stages shows: actions, idle time and its causes, transfers."""

from pathlib import Path

import pytest
from support.launching import last_json, paceline

from paceline.schedules.pipeline import one_forward_one_backward
from paceline.trace.analysis import analyse
from paceline.trace.efficiency import measure_efficiency
from paceline.trace.format.events import WITHOUT_GRADIENTS, Kind
from paceline.trace.merge import load_run

SCRIPT = Path(__file__).parent / "scripts/staged.py"
STEPS, SAMPLES, WIDTH = 24, 32, 64


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("staged")
    done = paceline(folder, "run", "-n", "2", "--out", "run", str(SCRIPT), "4", "1f1b")
    assert done.code == 0, done.err
    return folder / "run"


def test_each_rank_records_its_actions_in_the_order_of_the_schedule(run):
    wanted = one_forward_one_backward(2, 4)
    for rank in load_run(run).ranks:
        events = rank.events_of(Kind.STAGE)
        trained = events[(events["flags"] & WITHOUT_GRADIENTS) == 0]
        numbers = sorted(set(trained["sequence"].tolist()))
        assert len(numbers) == STEPS
        for number in numbers:
            batch = trained[trained["sequence"] == number]
            actions = [(rank.names[e["name"]], int(e["tag"]), int(e["amount"])) for e in batch]
            assert actions == [tuple(action) for action in wanted.actions[rank.rank]]
        assert len(events) > len(trained)  # evaluations


def test_microbatches_are_no_steps(run):
    # A rank that is killed is said to be in the step that its trace's header counts.
    assert [rank.marks_within_steps for rank in load_run(run).ranks] == [0, 0]


def test_why_says_the_bubble_with_its_cause(run):
    found = last_json(paceline(run.parent, "why", "run", "--json").out)
    use, bubble = found["pipeline"], found["bubble"]
    assert (use["batches"], use["microbatches"], bubble["schedule"]) == (STEPS - 1, 4, "1f1b")
    assert bubble["by_schedule"] == pytest.approx(1 / 5)
    assert bubble["with_more"] == pytest.approx(1 / 9)
    assert 0 < bubble["measured"] < 1
    for rank in use["ranks"]:
        parts = ("busy_s", "warm_up_s", "between_s", "drain_s", "exposed_s")
        assert all(rank[part] >= 0 for part in parts)
        assert sum(rank[part] for part in parts) == pytest.approx(use["batch_s"], rel=1e-6)
    assert "of a step in the pipeline: " in found["verdict"]


def test_transfers_have_the_bytes_of_the_values(run):
    found = last_json(paceline(run.parent, "why", "run", "--json").out)["pipeline"]["transfers"]
    # The value between the stages and its gradient, of all microbatches together.
    assert found["hidden_bytes"] + found["exposed_bytes"] == pytest.approx(
        2 * SAMPLES * WIDTH * 4, abs=2
    )


def test_the_report_shows_a_batch(run):
    done = paceline(run.parent, "report", "run")
    assert done.code == 0, done.err
    page = (run / "report.html").read_text()
    assert "A batch in the pipeline" in page
    assert page.count("forward, stage 0, microbatch") == 4
    assert "idle, all ranks" in done.out


def test_waits_of_stages_are_replayed_and_charged(run):
    found = measure_efficiency(analyse(load_run(run)))
    assert found.replay_error == pytest.approx(0, abs=0.01)
    assert found.cut_count == 0
    assert sum(part.seconds for part in found.path.parts) == pytest.approx(found.path.seconds)
    assert {call.state for call in found.waits.calls} >= {"late sender"}
    costs = sum(cost.seconds for cost in found.waits.delays)
    assert costs == pytest.approx(found.waits.seconds, rel=1e-4)
    for rank in load_run(run).ranks:
        sent = rank.events_of(Kind.SEND)
        other = 1 - rank.rank
        pair = next(p for p in found.matrix.pairs if (p.source, p.target) == (rank.rank, other))
        assert (pair.messages, pair.message_bytes) == (len(sent), int(sent["amount"].sum()))
        assert pair.message_bytes >= STEPS * SAMPLES * WIDTH * 4
