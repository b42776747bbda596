"""Which child process a rank's exception is about."""

import multiprocessing
import os
import signal
from concurrent.futures.process import BrokenProcessPool

import pytest

from paceline.launch import lost_children
from paceline.launch.lost_children import (
    LostChild,
    lost_child,
    note_lost_children,
    read_lost_child,
)

FORK = multiprocessing.get_context("fork")
GONE = ConnectionResetError(104, "Connection reset by peer")


def end(how):
    if isinstance(how, signal.Signals):
        os.kill(os.getpid(), how)
        signal.pause()
    os._exit(how)


def started(how):
    child = FORK.Process(target=end, args=(how,), name="Loads-1")
    child.start()
    return child


def until_ended(child):
    child.join(30)
    assert child.exitcode is not None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2])
@pytest.mark.parametrize("error", [GONE, ValueError("what a handler interrupted")])
def test_a_killed_child_is_the_cause(number, error):
    child = started(number)
    until_ended(child)
    assert lost_child(error) == LostChild("process Loads-1", number.name, 0, by_oom=False)


@pytest.mark.parametrize("how", [3, signal.SIGTERM])
def test_a_child_that_exited_or_was_stopped_explains_only_that_it_is_gone(how):
    child = started(how)
    until_ended(child)
    assert lost_child(ValueError("of the script's own")) is None
    found = lost_child(BrokenProcessPool("A process in the process pool was terminated abruptly"))
    code = 0 if how == signal.SIGTERM else 3
    assert found == LostChild("process Loads-1", "SIGTERM" if not code else "", code, by_oom=False)


def test_a_child_whose_connections_have_closed_is_waited_for():
    """A process closes its files some time before its parent can ask how it ended."""
    child = started(signal.SIGKILL)
    assert lost_child(GONE).signal == "SIGKILL"
    until_ended(child)


def test_children_that_ended_well_and_none_explain_nothing():
    assert lost_child(GONE) is None
    child = started(0)
    until_ended(child)
    assert lost_child(GONE) is None


def test_of_a_worker_whose_loader_is_gone_torchs_message_is_left(monkeypatch):
    said = "DataLoader worker (pid 27071) is killed by signal: Killed. "
    counts = iter([lost_children._KILLS_BEFORE, lost_children._KILLS_BEFORE + 1])
    monkeypatch.setattr(lost_children, "oom_kills", lambda: next(counts))
    for by_oom in (False, True):
        expected = LostChild("a loader worker", "SIGKILL", 0, by_oom)
        assert lost_child(RuntimeError(said)) == expected
    said = said.replace("Killed", "Bus error")
    assert lost_child(RuntimeError(said)) == LostChild("a loader worker", "SIGBUS", 0, by_oom=False)
    assert lost_child(RuntimeError(said.replace("Bus error", "Nothing known"))) is None


@pytest.fixture
def noted(tmp_path, monkeypatch):
    """Have this process note its lost children as a rank does; return how to read the last one."""
    (tmp_path / "trace").mkdir()
    monkeypatch.setattr(lost_children, "_noted", [])
    note_lost_children(tmp_path, 3)
    yield lambda: read_lost_child(tmp_path, 3)
    lost_children._notes.clear()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_pools_killed_process_is_noted_although_the_pool_forgets_it(noted, method):
    pool = multiprocessing.get_context(method).Pool(1)
    result = pool.apply_async(os.kill, (pool.apply(os.getpid), signal.SIGKILL))
    while noted() is None:
        result.wait(0.05)  # which ends never
    name = "ForkPoolWorker" if method == "fork" else "ForkServerPoolWorker"
    lost = noted()
    assert lost.name.startswith(f"process {name}-")
    assert (lost.signal, lost.by_oom) == ("SIGKILL", False)
    pool.terminate()
    pool.join()
    assert noted() == lost  # what its parent ends is not lost
    assert lost_child(BrokenProcessPool("terminated abruptly")) == lost
    assert lost_child(ValueError("of the script's own")) is None


def test_a_process_that_its_parent_kills_is_not_noted(noted):
    child = FORK.Process(target=signal.pause)
    child.start()
    child.kill()
    until_ended(child)
    assert noted() is None


def test_a_file_that_was_cut_short_is_passed_over(tmp_path):
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "rank-00003.lost").write_text('{"name": "process')
    assert read_lost_child(tmp_path, 3) is None
