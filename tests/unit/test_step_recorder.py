"""How many steps are recorded before there is a plan."""

import pytest

from paceline.training.out_of_core.process_memory import ProcessMemory
from paceline.training.out_of_core.recording import END, Event, OrderRecorder


def record(recorder, *events):
    """Record a step; return whether enough is recorded."""
    recorder.begin_step()
    for event in events:
        recorder.step.enter(event)
        recorder.step.leave()
    return recorder.end_step()


@pytest.mark.parametrize("least", [2, 3])
def test_steps_are_recorded_until_two_agree_and_there_are_enough(least):
    memory = ProcessMemory()
    recorder = OrderRecorder(memory, least)
    enough = [record(recorder, Event("saved", 0, 8), END) for _ in range(least)]
    recorder.forget()
    memory.close()
    assert enough == [False] * (least - 1) + [True]


def test_two_steps_of_another_order_are_not_enough():
    memory = ProcessMemory()
    recorder = OrderRecorder(memory)
    enough = [record(recorder, Event("saved", 0, size), END) for size in (8, 16, 16)]
    recorder.forget()
    memory.close()
    assert enough == [False, False, True]
