"""Runs that hang: the rank that the others wait for is named, and a slow rank is left alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.launching import SCRIPTS, await_true, paceline

from paceline.core.clock import SystemClock
from paceline.core.processes import stat_fields
from paceline.launch.hangs.stacks import Thread, stacks_of

PROGRAMS = Path(__file__).parents[2] / "bench" / "hangs_programs"
BIN = Path(sys.executable).parent
TRAIN = SCRIPTS / "train.py"
QUICK = ("--hang-timeout", 2, "--out", "RUN")


def check(done, folder, culprit, kind):
    assert done.code == 5, done.err
    hang = json.loads((folder / "RUN" / "hang.json").read_text())
    result = json.loads((folder / "RUN" / "result.json").read_text())
    assert (hang["rank"], hang["kind"]) == (culprit, kind), hang["detail"]
    assert result["failure"]["rank"] == culprit
    assert f"rank {culprit} hung" in done.err
    return next(rank["stack"] for rank in hang["ranks"] if rank["rank"] == culprit)


@pytest.mark.parametrize(
    ("backend", "fault", "kind", "function"),
    [
        ("gloo", "lock", "blocked", "hold_lock (faults.py:"),
        ("paceline", "stop", "stopped", "stop (faults.py:"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_its_stack(
    tmp_path, backend, fault, kind, function
):
    script = PROGRAMS / "collectives.py"
    done = paceline(tmp_path, "run", *QUICK, "-n", 2, script, backend, fault, 1, 4)
    stack = check(done, tmp_path, 1, kind)
    assert any(frame.replace(f"{PROGRAMS}/", "").startswith(function) for frame in stack), stack
    why = paceline(tmp_path, "why", "RUN")
    assert "Rank 1 hung" in why.out
    assert function[:-1] in why.out


@pytest.mark.parametrize(
    ("ranks", "waits"),
    [(1, "its loop has waited "), (2, "rank 0 has waited ")],
)
def test_a_loaders_worker_that_does_not_go_on_is_named_with_its_line(tmp_path, ranks, waits):
    """With one rank nobody waits for it, but its own loop."""
    options = ("--workers", 2, "--fail-at-sample", ranks - 1, 60, "lock")
    done = paceline(tmp_path, "run", *QUICK, "-n", ranks, TRAIN, *options)
    check(done, tmp_path, ranks - 1, "blocked")
    assert f"why: {waits}" in done.err
    assert "a loader worker is in fail (train.py:" in done.err
    assert "waiting for a lock" in done.err
    assert ", phase input\n" in done.err
    done.assert_nothing_left()


POOL = """
import multiprocessing, os, signal, torch

def load(number):
    if number == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((4,), float(number))

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with multiprocessing.get_context("fork").Pool(2) as pool:
    for first in range(0, 12, 2):
        optimizer.zero_grad()
        model(torch.stack(pool.map(load, range(first, first + 2)))).mean().backward()
        optimizer.step()
"""


def test_a_pool_that_waits_for_a_killed_process_is_named_by_it(tmp_path):
    """Its other threads spin then, and no exception follows."""
    (tmp_path / "script.py").write_text(POOL)
    done = paceline(tmp_path, "run", *QUICK, "script.py")
    check(done, tmp_path, 0, "blocked")
    assert "process ForkPoolWorker-" in done.err
    assert " was killed by SIGKILL; it is in wait (threading.py" in done.err
    assert "called by <module> (script.py:14)" in done.err
    done.assert_nothing_left()


STOPS = """
import os, signal, threading
from paceline.launch.startup.sitecustomize import offer_stacks

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def go_on():
    while True:
        pass

offer_stacks()
for _ in range(8):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
stop()
go_on()
"""


def test_a_stopped_rank_with_many_threads_is_seen_where_it_stopped(monkeypatch):
    """The signal went to any thread that woke, and the main one had gone on by then."""
    monkeypatch.setenv("PATH", "/nowhere")  # no py-spy, which asks nobody
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", STOPS]) as rank:
            try:
                await_true(
                    lambda rank=rank: stat_fields(rank.pid)[0] == b"T", "the rank is stopped"
                )
                thread = Thread(process=rank.pid, thread=rank.pid)
                (stack,) = stacks_of({0: thread}, SystemClock()).values()
            finally:
                rank.kill()
        assert stack[0].startswith("stop ("), stack


@pytest.mark.campaign("mpi")
@pytest.mark.parametrize("program", ["mpi.c", "mpi.py"])
def test_ranks_of_mpi_are_named_too(tmp_path, program):
    path = PROGRAMS / program
    if program.endswith(".c"):
        path = tmp_path / "program"
        build = [BIN / "mpicc", "-O1", "-g", PROGRAMS / program, "-o", path, "-lpthread"]
        subprocess.run(build, check=True, timeout=60)
    done = paceline(tmp_path, "run", *QUICK, "-n", 2, "--mpi", "--", path, "lock", 0, 4)
    stack = check(done, tmp_path, 0, "blocked")
    assert any("hold_lock" in frame for frame in stack), stack


@pytest.mark.campaign("mpi")
def test_a_rank_in_another_collective_is_named_though_mpi_ends_all_by_itself(tmp_path):
    path = PROGRAMS / "mpi.py"
    done = paceline(tmp_path, "run", *QUICK, "-n", 3, "--mpi", "--", path, "order", 0, 3)
    assert done.code != 0
    result = json.loads((tmp_path / "RUN" / "result.json").read_text())
    assert result["failure"]["rank"] == 0, result["failure"]


def test_a_rank_that_works_for_several_deadlines_is_not_accused(tmp_path):
    script = PROGRAMS / "collectives.py"
    done = paceline(tmp_path, "run", *QUICK, "-n", 2, script, "gloo", "slow-checkpoint-6", 1, 4)
    assert done.code == 0, done.err
    assert "rank 1 works on" in done.err


def test_off_is_no_number_of_seconds(tmp_path):
    script = PROGRAMS / "collectives.py"
    done = paceline(tmp_path, "run", "--hang-timeout", "0.2", "-n", 2, script)
    assert done.code == 2
    assert "hang_timeout_s must be 0 or between 1" in done.err
    done = paceline(tmp_path, "run", "--hang-timeout", "off", "--dry-run", "--json", script)
    assert done.code == 0, done.err
