"""Evaluations among training: sequences of events, one letter each, whose evaluations are known.

N asks the training loader for a batch, V the one for validation; F is a forward pass of training,
B backward, O the optimizer's step. Without gradients and in evaluation mode: e is a pass of the
module that is trained, t of another one. Without gradients only: g. In evaluation mode only: s.
"""

import pytest
from support.traces import MS, Event, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.phases import step_time_s
from paceline.trace.format.events import (
    EVALUATION_MODE,
    NEXT,
    WITHOUT_GRADIENTS,
    Kind,
)
from paceline.trace.merge import load_run

BOTH = WITHOUT_GRADIENTS | EVALUATION_MODE
LETTERS = {
    "N": (Kind.INPUT, NEXT, 1, 0),
    "V": (Kind.INPUT, NEXT, 2, 0),
    "F": (Kind.FORWARD, "forward", 1, 0),
    "B": (Kind.BACKWARD, "backward", 0, 0),
    "O": (Kind.OPTIMIZER, "step", 1, 0),
    "e": (Kind.EVALUATION, "forward", 1, BOTH),
    "t": (Kind.EVALUATION, "forward", 2, BOTH),
    "g": (Kind.FORWARD, "forward", 1, WITHOUT_GRADIENTS),
    "s": (Kind.FORWARD, "forward", 1, EVALUATION_MODE),
    "H": (Kind.HOST, "logging", 0, 0),
    "C": (Kind.CHECKPOINT, "save", 0, 0),
}


def phases_of(tmp_path, text, first_ns=0, gap_ns=MS):
    """Return the phases of a rank with these events, each of 1 ms."""
    events = []
    at = begun = first_ns
    step = 0
    for letter in text:
        kind, name, tag, flags = LETTERS[letter]
        events.append(Event(kind, at, at + MS, name, step, tag=tag, flags=flags))
        at += MS
        if letter == "O":
            events.append(Event(Kind.STEP, begun, at, "step", step, tag=1))
            begun, step = at, step + 1
        at += gap_ns
    (phases,) = analyse(load_run(write_run(tmp_path, [events]))).phases
    return phases


@pytest.mark.parametrize(
    ("text", "evaluation_ms", "forward_ms"),
    [
        ("NFBONFBO", 0, 2),
        ("NFBOVeVeVNFBO", 9, 2),  # five events and what is between them
        ("NFBOVtVtVNFBO", 9, 2),  # an average of the weights is evaluated
        ("NFBOVgVgVNFBO", 9, 2),  # without model.eval()
        ("NFBOVsVsVNFBO", 9, 2),  # without torch.no_grad()
        ("FBOeeeFBO", 5, 2),  # without a loader
        ("FBOgggFBOFBOFBOFBOFBOFBO", 5, 7),
        ("NFBOVeHVeVNFBO", 11, 2),
        ("NFBOVeVeVNFBOVeVeV", 18, 2),  # the last one belongs to the last step
        ("NFBONeNeNFBO", 7, 2),  # on the training set
        ("NtFBONtFBONtFBO", 0, 6),  # a teacher
        ("tFBOtFBOtFBO", 0, 6),
        ("NeFBONeFBONeFBO", 0, 6),  # the trained module's own pseudo labels
        ("eeFBOeeFBOeeFBO", 0, 9),  # it makes the experience that it learns from
        ("FBOFBOeFBOFBO", 1, 4),
        ("NgFBONgFBONgFBO", 0, 6),  # a generator's samples, or pseudo labels
        ("NsBONsBO", 0, 2),  # fine-tuning in evaluation mode
        ("NssBONssBO", 0, 4),
    ],
)
def test_what_is_an_evaluation(tmp_path, text, evaluation_ms, forward_ms):
    found = phases_of(tmp_path, text).breakdown()
    assert found.evaluation == pytest.approx(evaluation_ms / 1e3)
    assert found.forward == pytest.approx(forward_ms / 1e3)
    assert found.host == 0


def test_times_after_a_year_without_a_restart_are_not_rounded(tmp_path):
    """Floats of this size are multiples of eight: rounded, an event ends after the next begins."""
    found = phases_of(tmp_path, "NFBOVeVeVNFBO", first_ns=2**55 + 7, gap_ns=0).breakdown()
    assert found.evaluation == pytest.approx(0.005)
    assert found.forward == pytest.approx(0.002)


def test_a_checkpoint_within_an_evaluation_stays_one(tmp_path):
    found = phases_of(tmp_path, "NFBOVeCVeVNFBO").breakdown()
    assert found.checkpoint == pytest.approx(0.001)
    assert found.evaluation == pytest.approx(0.010)


def test_an_evaluation_is_not_part_of_the_step_time(tmp_path):
    """One after each step: without them a step takes 7 ms, and 1 ms to the next batch."""
    phases = phases_of(tmp_path, "NFBO" + 5 * "VeVeVNFBO")
    assert step_time_s((phases,)) == pytest.approx(0.008, abs=0.002)
    assert (phases.train_s < 0.011).all()
    assert phases.step_s[1:].min() > 0.015


def test_a_script_that_only_evaluates_has_no_steps(tmp_path):
    assert phases_of(tmp_path, "VeVeVe").steps == 0
