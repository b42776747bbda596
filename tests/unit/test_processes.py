"""Nothing keeps running: real processes, found, adopted and ended.

Each test runs in a process of its own, because what is tested ends all children of its process.
"""

import subprocess
import sys
import textwrap

import pytest

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from paceline.core.clock import ManualClock, SystemClock
from paceline.core.processes import (
    StopRequested, become_reaper, descendants, end_descendants, ended_on_signal, started_ticks
)
FOREVER = [sys.executable, "-c", "import signal; print(flush=True); signal.pause()"]
DEAF = [sys.executable, "-c",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)\\n"
    "while True: signal.pause()"]
PARENT = [sys.executable, "-c",
    "import subprocess, sys; child = subprocess.Popen(sys.argv[1:]); print(child.pid, flush=True);"
    "child.wait()", *FOREVER]

def ready(command):
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return child, child.stdout.readline()

def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
"""


def run(body):
    code = PRELUDE + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_descendants_are_found_parents_first():
    run("""
    child, line = ready(PARENT)
    grandchild = int(line)
    assert descendants(os.getpid()) == [child.pid, grandchild]
    assert descendants(child.pid) == [grandchild]
    assert descendants(grandchild) == []
    end_descendants(SystemClock())
    """)


def test_a_process_whose_name_is_no_text_is_found():
    run("""
    name = r"import ctypes; ctypes.CDLL(None).prctl(15, b'\\xff) \\xfe', 0, 0, 0); "
    child, _ = ready([sys.executable, "-c", name + FOREVER[2]])
    assert descendants(os.getpid()) == [child.pid]
    assert started_ticks(child.pid) > 0
    end_descendants(SystemClock())
    assert started_ticks(child.pid) is None
    """)


def test_all_descendants_are_killed_but_those_from_before():
    run("""
    kept, _ = ready(FOREVER)
    before = frozenset(descendants(os.getpid()))
    become_reaper()
    child, line = ready(PARENT)
    deaf, _ = ready(DEAF)
    end_descendants(SystemClock(), before)
    assert not alive(child.pid) and not alive(int(line)) and not alive(deaf.pid)
    assert kept.poll() is None
    kept.kill()
    kept.wait()
    """)


def test_an_orphan_is_adopted_and_killed():
    run("""
    become_reaper()
    child, line = ready(PARENT)
    orphan = int(line)
    child.kill()
    child.wait()
    assert alive(orphan)
    assert descendants(os.getpid()) == [orphan]
    end_descendants(SystemClock())
    assert not alive(orphan)
    """)


def test_a_child_that_has_ended_is_reaped():
    run("""
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    end_descendants(SystemClock())
    assert not alive(pid)
    """)


def test_after_a_stop_signal_who_does_not_answer_is_killed():
    run("""
    deaf, _ = ready(DEAF)
    with ended_on_signal(ManualClock()):
        signal.signal(signal.SIGTERM, lambda *_: None)  # as the agent takes the handler
        os.kill(os.getpid(), signal.SIGTERM)
        assert deaf.wait(30) == -signal.SIGKILL
    assert signal.set_wakeup_fd(-1) == -1
    """)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"])
def test_the_first_stop_signal_stops_and_the_second_does_not_disturb(name):
    run(f"""
    number = signal.{name}
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, before)  # nohup, and a shell's background, have it ignored
    try:
        with ended_on_signal(SystemClock()):
            try:
                os.kill(os.getpid(), number)
                raise AssertionError("not stopped")
            finally:
                os.kill(os.getpid(), number)
    except StopRequested as stop:
        assert stop.signal == "{name}"
    assert signal.getsignal(number) == before
    """)


def test_an_ignored_signal_stays_ignored():
    run("""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ended_on_signal(SystemClock()):
        os.kill(os.getpid(), signal.SIGHUP)
    """)


def test_a_process_ends_with_its_parent():
    run("""
    become_reaper()
    child = ("import os, signal; from paceline.core.processes import die_with_parent;"
        "die_with_parent(os.getppid()); print(os.getpid(), flush=True); signal.pause()")
    parent = subprocess.Popen([sys.executable, "-c", "import subprocess, sys;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"], stdout=subprocess.PIPE)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    """)


def test_other_signals_and_no_signal_kill_nobody():
    run("""
    signal.signal(signal.SIGUSR1, lambda *_: None)
    child, _ = ready(FOREVER)
    with ended_on_signal(ManualClock()):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert child.poll() is None
    end_descendants(SystemClock())
    """)


def test_in_another_thread_signals_stay_with_the_main_one():
    run("""
    seen = []
    def body():
        with ended_on_signal(SystemClock()):
            seen.append(signal)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen
    """)
