"""What rebalancing measures of a rank's own thread."""

from __future__ import annotations

import os
import time

import pytest

pytest.importorskip("torch")

from paceline.training.balance.stopwatch import ThreadClock


def spin():
    """Compute for some ticks of the kernel, at which it counts."""
    end_s = time.thread_time() + 0.05
    while time.thread_time() < end_s:
        pass


def test_a_threads_time_on_a_core_is_counted():
    clock = ThreadClock()
    before = clock()
    spin()
    assert clock().running_s > before.running_s


def test_a_clock_whose_file_the_script_closed_counts_on():
    clock = ThreadClock()
    os.close(clock._descriptor)
    before = clock()
    spin()
    assert clock().running_s > before.running_s
    assert clock().not_running_s == 0
