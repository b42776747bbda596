"""The guide to pipeline schedules shows what the code prints."""

import re
from pathlib import Path

import pytest
from support.pipeline_cases import chain

from paceline.core.errors import InvalidSchedule, MemoryExceeded
from paceline.report.timeline import timeline
from paceline.schedules.pipeline import (
    LayerCosts,
    PipelineAction,
    PipelineSchedule,
    StageCosts,
    check_pipeline,
    fill_drain,
    live_microbatches,
    one_forward_one_backward,
    partition,
    replay,
    zero_bubble,
)

DOCS = Path(__file__).parent.parent.parent / "docs"
GUIDE = DOCS / "guides/pipeline-schedules.md"
REFERENCE = DOCS / "reference/pipeline-schedule.md"
MB = 10**6


@pytest.fixture(scope="module")
def words():
    """Return the guide with one blank between words, however its lines are broken."""
    return " ".join(GUIDE.read_text().split())


@pytest.mark.parametrize("make", [fill_drain, one_forward_one_backward, zero_bubble])
def test_the_charts_are_those_of_the_orders(make):
    replayed = replay(make(4, 6), chain(4), StageCosts.uniform(4, 1.0, 2.0))
    chart = timeline(make(4, 6), replayed)
    assert "".join(f"    {line}\n" for line in chart.splitlines()) in GUIDE.read_text()


def test_the_errors_are_those_of_the_code(words):
    actions = [
        [(kind, stage, m) for m in order for kind in ("forward", "backward")]
        for stage, order in enumerate([(0, 1), (1, 0)])
    ]
    cyclic = PipelineSchedule(
        name="test",
        stages=2,
        microbatches=2,
        rank_of=(0, 1),
        actions=tuple(tuple(PipelineAction(*row) for row in order) for order in actions),
    )
    with pytest.raises(InvalidSchedule) as caught:
        check_pipeline(cyclic, chain(2))
    assert str(caught.value).partition(". ")[0] in words
    layers = LayerCosts(
        forward_s=(2e-3,) * 24,
        backward_s=(4e-3,) * 24,
        parameter_bytes=(16 * MB,) * 24,
        activation_bytes=(8 * MB,) * 24,
    )
    live = live_microbatches(one_forward_one_backward(4, 8))
    with pytest.raises(MemoryExceeded) as exceeded:
        partition(layers, 4, bound_bytes=[200 * MB] * 4, live=live)
    assert str(exceeded.value) in words


def test_the_reference_shows_a_schedule_as_it_is_written():
    text = REFERENCE.read_text()
    shown = re.search(r"^    (\{\"version\".*?\})\n\n", text, re.DOTALL | re.MULTILINE)[1]
    assert PipelineSchedule.from_text(shown) == one_forward_one_backward(2, 2)
