"""How tasks meet and tell their ends: in one process, with a clock moved by hand."""

import doctest
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import files
from paceline.core.clock import ManualClock, SystemClock
from paceline.core.errors import DeadlineExceeded, DestinationExists, RankLost, StorageError
from paceline.core.processes import Exit
from paceline.launch import meeting
from paceline.launch.failures import exit_code, first_failure, raise_failure
from paceline.launch.meeting import Meeting, await_result, parts, refuse_taken

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")


def listen():
    return "10.0.0.1", 4711


def opened(run, *ranks, size=2, clock=None):
    (run / "meeting").mkdir(exist_ok=True)
    (run / "trace").mkdir(exist_ok=True)
    clock = clock or ManualClock()
    return [Meeting(run, rank, size, clock) for rank in ranks]


def test_the_examples_in_the_module_run():
    result = doctest.testmod(meeting)
    assert result.attempted
    assert not result.failed


def test_tasks_meet_and_share_the_cores_that_they_have_in_common(tmp_path):
    found = {}

    def task(rank):
        here = Meeting(tmp_path, rank, 3, SystemClock())
        cores = (0, 1) if rank < 2 else (2,)
        found[rank] = here.start("node", cores, listen)

    threads = [threading.Thread(target=task, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {(one.address, one.port) for one in found.values()} == {listen()}
    assert {rank: (one.index, one.count) for rank, one in found.items()} == {
        0: (0, 2),
        1: (1, 2),
        2: (0, 1),
    }


@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([(0, 1), (2, 3), (0,)]))))
def test_parts_of_a_set_of_cores_are_complete_and_used_once(places):
    by_place = {}
    for place, (index, count) in zip(places, parts(places), strict=True):
        by_place.setdefault(place, []).append((index, count))
    for shares in by_place.values():
        assert shares == [(index, len(shares)) for index in range(len(shares))]


def test_a_start_of_an_earlier_run_is_not_taken_for_ours(tmp_path):
    (one,) = opened(tmp_path, 1)
    stale = '{"numbers": ["a", "b"], "address": "x", "port": 1, "parts": [[0, 1], [0, 1]]}'
    (tmp_path / "meeting" / "start.json").write_text(stale)
    with pytest.raises(DeadlineExceeded, match="rank 0 did not come"):
        one.start("node", (0,), listen)


def test_tasks_that_do_not_come_are_named(tmp_path):
    zero = Meeting(tmp_path, 0, 4, ManualClock())
    with pytest.raises(DeadlineExceeded, match=r"3 of 4 tasks did not come: rank 1, 2, 3"):
        zero.start("node", (0,), listen)


def test_a_task_does_not_wait_for_those_that_failed_before_all_were_here(tmp_path):
    one, two = opened(tmp_path, 1, 2, size=3)
    two.fail()
    with pytest.raises(RankLost, match="another task failed"):
        one.start("node", (0,), listen)


def test_all_ended_well(tmp_path):
    zero, one = opened(tmp_path, 0, 1)
    for each in (zero, one):
        each.tell(Exit(rank=each.rank, code=0))
    assert not zero.failed()
    assert zero.gather() == ()
    assert not (tmp_path / "meeting").exists()


@pytest.mark.parametrize("code", [0, 130])
def test_the_last_to_tell_may_find_the_meeting_over(tmp_path, monkeypatch, code):
    """Rank 0 removes the folder when all have told: while the last one still does."""
    zero, one = opened(tmp_path, 0, 1)
    zero.tell(Exit(rank=0, code=0))
    sync = files.sync_folder

    def sync_later(folder):
        zero.gather()
        sync(folder)

    monkeypatch.setattr(files, "sync_folder", sync_later)
    one.tell(Exit(rank=1, code=code, fate="stopped" if code else ""))
    assert not one.folder.exists()


def test_a_rank_that_cannot_tell_says_so(tmp_path):
    (one,) = opened(tmp_path, 1)
    (one.folder / "rank-00001.exit").mkdir()
    with pytest.raises(StorageError):
        one.tell(Exit(rank=1, code=0))


def test_a_killed_rank_that_told_late_comes_first(tmp_path):
    """Its peer raised because of it, and those whom their launchers stopped say nothing."""
    zero, one, two = opened(tmp_path, 0, 1, 2, size=3)
    zero.tell(Exit(rank=0, code=1, at_s=10.1))
    one.tell(Exit(rank=1, code=-9, signal="SIGKILL", at_s=10.0))
    two.tell(Exit(rank=2, code=-9, signal="SIGKILL", fate="stopped", at_s=13.0))
    assert two.failed()
    assert zero.gather() == (
        Exit(rank=1, code=-9, signal="SIGKILL"),
        Exit(rank=0, code=1),
    )


@pytest.mark.parametrize(("interrupted_s", "code"), [(9.0, 130), (11.0, 5)])
def test_what_came_first_counts(tmp_path, interrupted_s, code):
    zero, one = opened(tmp_path, 0, 1)
    stopped = Exit(rank=-1, code=130, signal="SIGTERM", fate="interrupted", at_s=interrupted_s)
    zero.tell(stopped)
    one.tell(Exit(rank=1, code=-9, signal="SIGKILL", at_s=10.0))
    exits = zero.gather()
    assert exit_code(exits, first_failure(tmp_path, exits)) == code


@pytest.mark.parametrize("code", [0, 1])
def test_a_task_that_never_tells_is_lost_and_named(tmp_path, code):
    clock = ManualClock()
    (zero,) = opened(tmp_path, 0, clock=clock)
    zero.tell(Exit(rank=0, code=code))
    if code:
        report = f'{{"rank": 0, "at_ns": 1, "phase": "", "traceback": "{LOST!r}", "error": ""}}'
        (tmp_path / "trace" / "rank-00000.failure").write_text(report)
    exits = zero.gather()
    limit_s = meeting.AFTER_FAILURE_S if code else meeting.TAIL_S
    assert limit_s <= clock.now_s() <= limit_s + 1
    failure = first_failure(tmp_path, exits)
    assert failure.rank == 1
    assert exit_code(exits, failure) == 5
    with pytest.raises(DeadlineExceeded, match="rank 1 is lost"):
        raise_failure(tmp_path, tmp_path / "train.py", exits, failure)


def test_the_result_is_awaited_for_a_while(tmp_path):
    assert not await_result(tmp_path, ManualClock())
    (tmp_path / "result.json").write_text("{}")
    assert await_result(tmp_path, ManualClock())


# --- a folder that is taken -------------------------------------------------------------------


def test_a_folder_that_rank_0_has_just_made_is_free_for_the_others(tmp_path):
    refuse_taken(tmp_path / "none", 1)
    refuse_taken(tmp_path, 0)
    opened(tmp_path, 0)
    for name in ("config.json", ".machine.json.7.partial", "meeting/rank-00000.hello"):
        (tmp_path / name).write_text("")
    refuse_taken(tmp_path, 1)
    with pytest.raises(DestinationExists):
        refuse_taken(tmp_path, 0)


@pytest.mark.parametrize(
    "name",
    [
        *("result.json", "mine.txt", "trace/rank-00000.trace"),
        *("meeting/start.json", "meeting/rank-00001.hello", "meeting/failed"),
    ],
)
def test_a_folder_of_an_earlier_run_is_refused_by_all(tmp_path, name):
    opened(tmp_path, 0)
    (tmp_path / name).write_text("")
    for rank in (0, 1):
        with pytest.raises(DestinationExists):
            refuse_taken(tmp_path, rank)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationExists):
        refuse_taken(tmp_path / "file", 1)
