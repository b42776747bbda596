"""A program that is not ours: its end is the guard's, and nothing of it outlives the launcher."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import await_true


def guard(*command, **options):
    """Start a guard below this process."""
    stub = (sys.executable, "-m", "paceline.launch.guard", str(os.getpid()))
    return subprocess.Popen([*stub, *map(str, command)], **options)


@pytest.mark.parametrize(
    ("script", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15)],
)
def test_the_end_of_the_program_is_the_guards(script, code):
    assert guard("sh", "-c", script).wait(60) == code


def test_what_cannot_be_executed_is_an_exit_code(tmp_path):
    (tmp_path / "program").write_text("#!/no/such/shell\n")
    (tmp_path / "program").chmod(0o755)
    with guard(tmp_path / "program", stderr=subprocess.PIPE, text=True) as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == 126
    assert "cannot execute" in said


def test_the_program_is_interrupted_when_the_launcher_stops_the_guard(tmp_path):
    ready = tmp_path / "ready"
    body = (
        "import pathlib, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        f"pathlib.Path({str(ready)!r}).touch(); signal.pause()"
    )
    process = guard(sys.executable, "-c", body, stderr=subprocess.DEVNULL)
    await_true(ready.exists, "the program to wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGINT  # as Python ends on Ctrl-C


def test_a_program_below_a_shell_is_interrupted_too(tmp_path):
    """A shell that waits for a child does not pass SIGINT on, and the rank's trace was cut."""
    ready, done = tmp_path / "ready", tmp_path / "done"
    body = (
        "import pathlib, signal, sys\n"
        f"def stop(*_): pathlib.Path({str(done)!r}).touch(); sys.exit(0)\n"
        f"signal.signal(signal.SIGINT, stop); pathlib.Path({str(ready)!r}).touch()\n"
        "signal.pause()\n"
    )
    (tmp_path / "train.py").write_text(body)
    process = guard("sh", "-c", f"{sys.executable} {tmp_path / 'train.py'}; exit 3")
    await_true(ready.exists, "the program to wait")
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert done.exists()


def test_a_background_job_without_a_terminal_is_interrupted(tmp_path):
    """Its shell started the launcher with SIGINT ignored, and the program inherited that."""
    ready = tmp_path / "ready"
    process = guard(
        *("sh", "-c", f"touch {ready}; exec sleep 1000"),
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    await_true(ready.exists, "the program to wait")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGINT


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    """The shell has started another process, of which the kernel knows no launcher."""
    pids = tmp_path / "pids"
    shell = f"sleep 1000 & echo $! >> {pids}; echo $$ >> {pids}; wait"
    body = (
        "import os, subprocess, sys, signal\n"
        "stub = [sys.executable, '-m', 'paceline.launch.guard', str(os.getpid())]\n"
        f"child = subprocess.Popen([*stub, 'sh', '-c', {shell!r}])\n"
        "signal.pause()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", body])
    await_true(lambda: pids.exists() and len(pids.read_text().split()) == 2, "both processes")
    launcher.kill()
    launcher.wait(60)
    for pid in pids.read_text().split():
        status = Path(f"/proc/{pid}/status")
        await_true(lambda status=status: not status.exists(), "the processes to end")
