"""What rebalancing measures of a rank's own thread."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from paceline.training.balance.stopwatch import ThreadClock  # noqa: E402


def spin():
    count = 0
    while count < 100_000:
        count += 1


def test_a_threads_time_on_a_core_is_counted():
    clock = ThreadClock()
    before = clock()
    spin()
    assert clock().running_s > before.running_s


def test_a_clock_whose_file_the_script_closed_counts_on():
    clock = ThreadClock()
    clock._file.close()
    before = clock()
    spin()
    assert clock().running_s > before.running_s
    assert clock().not_running_s == 0
