"""`paceline run` under a scheduler: its process group gets a signal, and its ranks save."""

import os
import signal

import pytest
from support.launching import SCRIPTS, Launched, await_true


@pytest.mark.parametrize("shell", [False, True])
def test_all_ranks_may_save_their_state_and_the_run_ends_with_75(tmp_path, shell):
    script = [SCRIPTS / "preempted_late.py", tmp_path]
    if shell:  # a program that is not Python runs below a guard
        program = tmp_path / "train.sh"
        program.write_text(f'#!/bin/sh\nexec python3 {script[0]} "$@"\n')
        program.chmod(0o755)
        script[0] = program
    arguments = ("run", "-n", 2, "--out", tmp_path / "run", *script)
    with Launched(tmp_path, *arguments, own_group=True) as run:
        ready = [tmp_path / "ready-0", tmp_path / "ready-1"]
        await_true(lambda: all(path.exists() for path in ready), "both ranks")
        os.killpg(run.process.pid, signal.SIGUSR1)
        run.wait()
        assert run.code == 75, run.err
        assert (tmp_path / "saved").exists()
        assert "preempted" in run.err
