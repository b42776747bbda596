"""paceline.step(): nothing without a recorder, a mark from any thread with one."""

import subprocess
import sys
import threading

import pytest

import paceline
from paceline.core import step_mark


@pytest.fixture
def marks():
    found = []
    step_mark.set_listener(lambda: found.append(threading.get_ident()))
    yield found
    step_mark.set_listener(None)


def test_without_a_recorder_it_does_nothing():
    assert paceline.step() is None


def test_each_call_is_one_mark_from_whatever_thread(marks):
    paceline.step()
    thread = threading.Thread(target=paceline.step)
    thread.start()
    thread.join()
    assert marks == [threading.get_ident(), thread.ident]


def test_it_is_there_without_torch_or_numpy():
    program = "import sys, paceline; paceline.step(); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
