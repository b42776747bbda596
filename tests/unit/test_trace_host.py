"""Names for the time between phases: recorded work, and gaps that samples name."""

import pytest
from support.traces import MS, Event, write_run

from paceline.trace.analysis import analyse
from paceline.trace.analysis.nans import NanValue
from paceline.trace.format.events import COMMUNICATION, NAN_READ, PYTHON_CODE, Kind
from paceline.trace.merge import load_run


def loop(steps, samples=(), inside=()):
    """Return steps of forward (2 ms), 3 ms that `inside` may fill, optimizer (1 ms), 4 ms.

    Args:
        steps: number of steps; the first of each 10 ms begins at 0.
        samples: (milliseconds, name).
        inside: for each step, events as (kind, begin and end after the forward pass in ms, name).
    """
    events = []
    for step in range(steps):
        at = 10 * step * MS
        events.append(Event(Kind.FORWARD, at, at + 2 * MS, "forward", step))
        for kind, begin, end, name in inside:
            begin_ns, end_ns = at + round((2 + begin) * MS), at + round((2 + end) * MS)
            events.append(Event(kind, begin_ns, end_ns, name, step))
        events.append(Event(Kind.OPTIMIZER, at + 5 * MS, at + 6 * MS, "step", step))
        begun = max(0, at - 4 * MS)
        events.append(Event(Kind.STEP, begun, at + 6 * MS, "step", step))
    for at_ms, name in samples:
        at = round(at_ms * MS)
        events.append(Event(Kind.SAMPLE, at, at, name, int((at_ms + 4) // 10)))
    return events


def analyse_loop(tmp_path, events):
    return analyse(load_run(write_run(tmp_path, [events]))).phases[0]


def host(phases):
    return {time.name: (pytest.approx(time.measured_s), time.samples) for time in phases.host}


def test_recorded_work_is_host_work(tmp_path):
    inside = [(Kind.HOST, 0.5, 2.5, "logging"), (Kind.HOST, 1.0, 1.5, "garbage collection")]
    phases = analyse_loop(tmp_path, loop(4, inside=inside))
    assert phases.breakdown().host == pytest.approx(0.008)
    assert host(phases) == {"logging": (0.008, 0), "garbage collection": (0.002, 0)}


def test_one_sample_names_all_gaps_of_its_kind(tmp_path):
    """3 ms after each forward pass, sampled once; 4 ms after each optimizer step, never sampled."""
    phases = analyse_loop(tmp_path, loop(10, samples=[(23.0, "train.py:7")]))
    assert host(phases) == {"train.py:7": (0.030, 1)}
    assert phases.breakdown().host == pytest.approx(0.030)
    assert phases.breakdown().other == pytest.approx(9 * 0.004)
    assert phases.seconds.sum(axis=1) == pytest.approx(phases.step_s)


def test_gaps_are_split_by_their_samples(tmp_path):
    names = 3 * ["a.f"] + ["b.g"]
    samples = [(10 * step + 3.0, name) for step, name in enumerate(names)]
    phases = analyse_loop(tmp_path, loop(8, samples=samples))
    assert host(phases) == {"a.f": (0.018, 3), "b.g": (0.006, 1)}


def test_a_stack_that_was_read_after_its_gap_names_python_code(tmp_path):
    events = loop(10)
    for begin_ms, late_ms in ((23.0, 1), (33.0, 1), (43.0, 8)):
        at = round(begin_ms * MS)
        events.append(Event(Kind.SAMPLE, at, at, "a.f", int(begin_ms // 10), late_ms * MS))
    found = host(analyse_loop(tmp_path, events))
    assert found == {"a.f": (0.020, 2), PYTHON_CODE: (0.010, 1)}


@pytest.mark.parametrize(
    ("late_ms", "words"),
    [((0, 0, 1), "a.f"), ((1, 0.5, 0), "near a.f")],
)
def test_samples_that_were_read_as_the_lock_came_free_are_near_their_line(tmp_path, late_ms, words):
    events = loop(10)
    for step, late in zip((2, 3, 4), late_ms, strict=True):
        at = round((10 * step + 3) * MS)
        events.append(Event(Kind.SAMPLE, at, at, "a.f", step, round(late * MS)))
    times = analyse_loop(tmp_path, events).host
    assert [time.words for time in times if time.name == "a.f"] == [words]


def test_a_sample_within_a_phase_names_nothing(tmp_path):
    """Between looking and recording, the main thread may have entered a phase."""
    phases = analyse_loop(tmp_path, loop(4, samples=[(21.0, "a.f"), (25.5, "b.g"), (500.0, "c.h")]))
    assert phases.host == ()
    assert phases.breakdown().host == 0


def test_a_collective_under_way_is_no_bound_of_a_gap(tmp_path):
    events = loop(4, samples=[(23.0, "a.f")])
    events.append(Event(Kind.COLLECTIVE, 22 * MS, 24 * MS, "all_reduce", 2, location=COMMUNICATION))
    assert host(analyse_loop(tmp_path, events)) == {"a.f": (0.012, 1)}


def test_the_first_value_that_is_no_number_is_told(tmp_path):
    ranks = [loop(4) for _ in range(3)]
    for rank, steps in ((0, (3,)), (1, (2, 3)), (2, (2,))):
        for step in steps:
            ranks[rank].append(Event(Kind.COUNTER, MS, MS, NAN_READ, step, amount=1))
    found = analyse(load_run(write_run(tmp_path, ranks)))
    assert found.nan == NanValue(rank=1, step=2)
    assert analyse(load_run(write_run(tmp_path / "clean", [loop(4)]))).nan is None
