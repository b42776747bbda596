"""Which rank of a recorded command failed first, from what its ranks left and how it ended."""

import json
import sys

import pytest

from paceline.collectives.options import CollectivesConfig
from paceline.core.clock import SystemClock
from paceline.core.config import resolve
from paceline.core.errors import RankLost, ScriptFailed
from paceline.launch import record as record_module
from paceline.launch.exits import RankExit, exit_of
from paceline.launch.failures import raise_failure
from paceline.launch.record import RecordedCommand, record_command
from paceline.native import Recorder
from paceline.probe.machine_file import known_machine
from paceline.runs.folder import RunFolder
from paceline.runs.result import Failure
from paceline.trace.format.events import Kind
from paceline.trace.format.files import trace_name

LOST = "RuntimeError('[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer')"


@pytest.fixture
def traced(tmp_path):
    """Write the traces of ranks with so many steps; those of the first ranks are closed.

    Those of `waiting` end while they wait, the others in their backward passes.
    """
    recorders = []

    def write(*steps, closed=0, waiting=()):
        (tmp_path / "trace").mkdir()
        for rank, count in enumerate(steps):
            path = tmp_path / "trace" / trace_name(rank)
            recorder = Recorder(str(path), rank, len(steps))
            for _ in range(count):
                recorder.end_step()
            recorder.begin(int(Kind.WAIT if rank in waiting else Kind.BACKWARD))
            if rank < closed:
                recorder.close()
            else:
                recorders.append(recorder)
        return tmp_path

    yield write
    for recorder in recorders:
        recorder.close()


def report_lost_peer(run, rank):
    body = {"rank": rank, "at_ns": 100, "phase": "", "traceback": LOST, "error": LOST}
    (run / "trace" / f"rank-{rank:05d}.failure").write_text(json.dumps(body))


def record(run, *command):
    job = RecordedCommand(
        command=command,
        run_folder=run,
        is_default_name=False,
        collectives_settings=resolve(CollectivesConfig),
    )
    return record_command(job, machine=known_machine(None), clock=SystemClock())


def test_a_single_rank_that_was_killed_is_lost_to_the_signal(traced):
    """It was a script that failed with exit code 1, with a traceback that nobody saw."""
    ended = exit_of(0, -9)
    failure = record_module._failure(traced(3), ended)
    assert failure == Failure(rank=0, signal="SIGKILL", step=3, phase="backward")


def test_a_rank_below_a_launcher_that_vanished_is_lost(traced):
    run = traced(5, 3)
    ended = RankExit(rank=0, code=1)
    failure = record_module._failure(run, ended)
    assert (failure.rank, failure.signal, failure.step) == (1, "", 3)
    with pytest.raises(RankLost, match="rank 1 ended without closing its trace") as caught:
        raise_failure(run, "torchrun", (ended,), failure)
    assert caught.value.exit_code == 5
    assert "os._exit" in caught.value.why


def test_a_rank_that_waited_is_stopped_for_another_one_in_the_same_step(traced):
    failure = record_module._failure(traced(4, 4, waiting={0}), RankExit(rank=0, code=1))
    assert (failure.rank, failure.step, failure.phase) == (1, 4, "backward")


def test_a_rank_that_left_early_is_the_culprit_and_not_its_victims(traced):
    """Rank 2 was blamed, which the launcher had stopped when rank 1 lost rank 0."""
    run = traced(7, 7, 7, closed=1)
    report_lost_peer(run, 1)
    failure = record_module._failure(run, RankExit(rank=0, code=1))
    error = "left without an exception while rank 1 still needed it"
    assert failure == Failure(rank=0, step=7, phase=failure.phase, error=error)
    with pytest.raises(ScriptFailed) as caught:
        raise_failure(run, "torchrun", (), failure)
    assert "same number of steps" in caught.value.fix


def test_a_rank_that_took_more_steps_than_a_killed_one_is_no_culprit(traced):
    run = traced(9, 9, 7, closed=1)
    report_lost_peer(run, 1)
    assert record_module._failure(run, RankExit(rank=0, code=1)).rank == 2


def test_the_result_has_the_exit_code_that_the_command_ends_with(tmp_path):
    """Without a trace the result said 1, and the process ended with 5."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(RankLost) as caught:
        record(tmp_path, sys.executable, "-c", kill)
    assert RunFolder(tmp_path).read_result().exit_code == caught.value.exit_code == 5
