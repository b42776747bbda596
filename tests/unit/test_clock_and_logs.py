"""The seams of core: time that tests move, and log records that carry their rank."""

import logging
import threading

import pytest

from paceline.core import logs
from paceline.core.clock import ManualClock, SystemClock
from paceline.core.logs import RankFilter


def test_a_manual_clock_stands_until_it_is_moved():
    clock = ManualClock(now=5.0)
    wall = clock.wall_s()
    assert clock.now_s() == clock.now_s() == 5.0
    clock.advance(2.5)
    assert clock.now_s() == 7.5
    assert clock.wall_s() == wall + 2.5
    with pytest.raises(AssertionError):
        clock.advance(-1)


def test_waiting_moves_a_manual_clock_unless_there_is_nothing_to_wait_for():
    clock, event = ManualClock(), threading.Event()
    assert not clock.wait(event, 3.0)
    assert clock.now_s() == 3.0
    event.set()
    assert clock.wait(event, 3.0)
    assert clock.now_s() == 3.0


def test_the_system_clock_goes_forward():
    clock, event = SystemClock(), threading.Event()
    before = clock.now_s()
    assert not clock.wait(event, 0.0)
    assert clock.now_s() >= before
    assert clock.wall_s() > 1_700_000_000
    event.set()
    assert clock.wait(event, 60.0)


def test_each_record_carries_the_rank():
    record = logging.makeLogRecord({"msg": "late"})
    assert RankFilter(3).filter(record)
    assert record.rank == 3


def test_only_our_records_go_to_stderr_and_once(capsys):
    ours = logging.getLogger("paceline")
    before = ours.handlers[:], ours.level, ours.propagate
    root = logging.getLogger().handlers[:]
    try:
        logs.configure(1)
        logs.configure(2)
        logging.getLogger("paceline.launch").warning("late by %d ms", 18)
        logging.getLogger("paceline.launch").info("unseen")
        assert logging.getLogger().handlers == root
    finally:
        ours.handlers[:], ours.level, ours.propagate = before
    assert capsys.readouterr().err == "paceline: rank 2: late by 18 ms\n"
