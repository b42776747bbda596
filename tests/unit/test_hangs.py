"""The decision whether a rank hangs, from samples: no processes, no clock."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.hangs.detector import (
    INPUT,
    GroupPlace,
    HangDetector,
    HangKind,
    MessagePlace,
    RankSample,
    Signs,
    odd_rank,
)
from paceline.launch.hangs.stacks import _frames, since_fork
from paceline.launch.hangs.words import busy_words, detail_of, doing

DEADLINE_S = 10.0
WORLD = ("group 0", (0, 1, 2))
PAIR = ("group 1", (0, 1))
QUIET = Signs(state="S", stack="main")


def place(entered, left, **names):
    """Return a place whose collectives are all-reduces but for those named ``at5="broadcast"``."""
    known = dict.fromkeys(range(1, entered + 1), "all_reduce")
    known |= {int(name[2:]): word for name, word in names.items()}
    return GroupPlace(entered=entered, left=left, names=known)


def waiting(entered, group=WORLD, **names):
    return RankSample(groups={group: place(entered, entered - 1, **names)}, in_wait=True)


def behind(entered, signs=QUIET, group=WORLD):
    return RankSample(groups={group: place(entered, entered)}, signs=signs)


def findings(at, seconds=3 * DEADLINE_S):
    """Observe what `at(second)` returns once a second; return the findings up to a verdict."""
    detector, found = HangDetector(DEADLINE_S), []
    for second in range(int(seconds)):
        found.append((second, detector.observe(at(second), float(second))))
        if found[-1][1].hang is not None:
            break
    return found


def verdict(at, seconds=3 * DEADLINE_S):
    return findings(at, seconds)[-1][1].hang


def test_a_rank_that_has_not_entered_and_shows_no_sign_of_work_hangs():
    samples = {0: waiting(5), 1: behind(4), 2: waiting(5)}
    found = findings(lambda _: samples)
    second, last = found[-1]
    assert (last.hang.rank, last.hang.kind) == (1, HangKind.BLOCKED)
    assert (last.hang.waiting, last.hang.sequence, last.hang.name) == ((0, 2), 5, "all_reduce")
    assert second <= DEADLINE_S + 2
    assert not any(finding.busy for _, finding in found)


@pytest.mark.parametrize(
    "work",
    [
        lambda second: Signs(state="R", cpu_ns=second * 10**8),
        lambda second: Signs(state="D", io_bytes=second * 10**5),
        lambda second: Signs(state="S", switches=second * 10),
        lambda second: Signs(state="S", stack=f"line {second}"),
        lambda _: Signs(state="t", stack="main"),  # in a debugger
    ],
    ids=["computes", "writes", "wakes", "moves", "is debugged"],
)
def test_a_rank_that_works_is_not_accused_and_is_named_once(work):
    found = findings(lambda second: {0: waiting(5), 1: behind(4, work(second))}, 200)
    assert found[-1][1].hang is None
    busy = [finding.busy for _, finding in found if finding.busy is not None]
    assert [finding.rank for finding in busy] == [1]
    assert "rank 1 works on" in busy_words(busy[0])


def test_a_rank_that_was_busy_and_then_blocks_hangs_a_deadline_later():
    def at(second):
        return {0: waiting(5), 1: behind(4, Signs(state="S", cpu_ns=min(second, 30) * 10**9))}

    hang = None
    detector = HangDetector(DEADLINE_S)
    for second in range(100):
        samples = at(second)
        finding = detector.observe(samples, float(second))
        if finding.stacks:
            signs = dataclasses.replace(samples[1].signs, stack="main")
            samples = {**samples, 1: dataclasses.replace(samples[1], signs=signs)}
            finding = detector.observe(samples, second + 0.1)
        hang = finding.hang
        if hang is not None:
            break
    assert hang is not None
    assert 30 + DEADLINE_S <= second <= 30 + DEADLINE_S + 3


def test_what_a_rank_does_inside_a_wait_is_no_work():
    def at(second):
        spins = RankSample(in_wait=True, signs=Signs(state="R", cpu_ns=second * 10**9, stack="m"))
        return {0: waiting(5), 1: spins}

    assert verdict(at).rank == 1


def test_a_stopped_rank_needs_no_stack():
    hang = verdict(lambda _: {0: waiting(5), 1: behind(4, Signs(state="T"))})
    assert (hang.rank, hang.kind) == (1, HangKind.STOPPED)


@pytest.mark.parametrize(
    "gone", [RankSample(closed=True), behind(4, Signs(state=""))], ids=["closed", "killed"]
)
def test_a_rank_that_is_gone_is_named(gone):
    hang = verdict(lambda _: {0: waiting(5), 1: gone})
    assert (hang.rank, hang.kind) == (1, HangKind.GONE)


def test_different_collectives_at_one_sequence_name_the_fewest():
    samples = {0: waiting(5), 1: waiting(5), 2: waiting(5, at5="broadcast")}
    hang = verdict(lambda _: samples)
    assert (hang.rank, hang.kind, hang.own_name) == (2, HangKind.MISMATCHED, "broadcast")
    assert hang.waiting == (0, 1)


def test_of_two_ranks_the_one_that_leaves_the_order_so_far_is_odd():
    assert odd_rank({0: "a", 1: "b"}, ["b", "a", "b", "a", "b"]) == 1
    assert odd_rank({0: "a", 1: "b"}, ["a", "b", "a", "b", "a"]) == 0


def test_the_odd_rank_is_known_after_all_have_raised_too():
    detector = HangDetector(0.0)
    samples = {0: waiting(5), 1: waiting(5), 2: waiting(5, at5="broadcast")}
    detector.observe(samples, 0.0)
    assert detector.mismatched_rank() == 2
    detector = HangDetector(0.0)
    detector.observe({0: waiting(5), 1: behind(4)}, 0.0)
    assert detector.mismatched_rank() is None


def test_the_chain_of_waits_is_followed_to_its_end():
    samples = {0: waiting(5), 1: waiting(3, PAIR), 2: behind(4)}
    samples[1] = dataclasses.replace(
        samples[1], message=MessagePlace(count=1, is_open=True, peer=2, name="recv"), groups={}
    )
    assert verdict(lambda _: samples).rank == 2


def test_ranks_that_wait_for_each_other_are_a_circle():
    ring = {
        rank: RankSample(message=MessagePlace(count=1, is_open=True, peer=1 - rank, name="recv"))
        for rank in (0, 1)
    }
    hang = verdict(lambda _: ring)
    assert hang.kind is HangKind.CIRCLE
    assert "wait" in detail_of(hang, ring[hang.rank], ("recv (train.py:4)",))


def test_nobody_is_missing_in_a_collective_that_all_have_entered():
    samples = {rank: waiting(5) for rank in range(3)}
    assert verdict(lambda _: samples, 100) is None


def test_completions_that_are_not_seen_do_not_hide_who_is_behind():
    ahead = RankSample(groups={WORLD: GroupPlace(entered=9, left=9, unseen=9, names={})})
    assert verdict(lambda _: {0: ahead, 1: behind(7), 2: ahead}).rank == 1


def test_a_job_that_was_stopped_as_a_whole_starts_anew():
    detector = HangDetector(DEADLINE_S)
    samples = {0: waiting(5), 1: behind(4)}
    assert detector.observe(samples, 0.0).hang is None
    assert detector.observe(samples, 1000.0).hang is None


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2**31), st.booleans()), min_size=3, max_size=40
    )
)
def test_nobody_is_accused_before_the_deadline(steps):
    """Whatever the ranks do, a verdict needs a wait of the whole deadline."""
    detector = HangDetector(DEADLINE_S)
    entered = [0, 0, 0, 0]
    changed = [0.0] * 4
    for second, (mover, cpu_ns, stacks) in enumerate(steps):
        entered[mover] += 1
        changed[mover] = float(second)
        samples = {
            rank: RankSample(
                groups={WORLD: place(count, max(0, count - 1))},
                signs=Signs(state="S", cpu_ns=cpu_ns, stack="main" if stacks else ""),
            )
            for rank, count in enumerate(entered)
        }
        hang = detector.observe(samples, float(second)).hang
        if hang is not None:
            assert second - min(changed[rank] for rank in hang.waiting) >= DEADLINE_S


@given(st.integers(2, 8), st.data())
def test_the_only_rank_that_stands_still_is_the_one_that_is_named(count, data):
    culprit = data.draw(st.integers(0, count - 1))
    members = ("group 0", tuple(range(count)))
    at = data.draw(st.integers(2, 30))
    samples = {
        rank: behind(at - 1, group=members) if rank == culprit else waiting(at, members)
        for rank in range(count)
    }
    assert verdict(lambda _: samples).rank == culprit


def test_the_sentence_has_the_last_event_and_the_script_s_frame():
    samples = {0: waiting(5), 1: behind(4)}
    hang = verdict(lambda _: samples)
    stack = ("acquire (/usr/lib/python3.11/threading.py:3)", "save (/home/me/train.py:41)")
    assert detail_of(hang, samples[1], stack).startswith("rank 0 has waited 1")
    assert detail_of(hang, samples[1], stack).endswith(
        "its last was all_reduce 4 of group 0; it is in acquire (threading.py:3), called by save "
        "(train.py:41)"
    )
    assert doing(RankSample()) == "it has entered no collective"


def test_a_stack_without_a_frame_of_the_script_has_its_innermost_one():
    samples = {0: waiting(5), 1: behind(4)}
    hang = verdict(lambda _: samples)
    stack = ("acquire (/usr/lib/python3.11/threading.py:3)", "get (/usr/lib/python3.11/queue.py:9)")
    assert detail_of(hang, samples[1], stack).endswith("it is in acquire (threading.py:3)")
    assert detail_of(hang, samples[1], ("state S",)).endswith("it is in the kernel (state S)")


def fed(signs=QUIET, step=3):
    """Return a rank whose loop waits for a batch, and which nobody else waits for."""
    return RankSample(step=step, in_input=True, signs=signs)


def test_a_loop_that_waits_for_a_batch_in_vain_is_missed_by_itself():
    found = findings(lambda _: {0: fed()})
    second, last = found[-1]
    assert (last.hang.rank, last.hang.kind) == (0, HangKind.BLOCKED)
    assert (last.hang.group, last.hang.waiting) == (INPUT, ())
    assert DEADLINE_S <= second <= DEADLINE_S + 2
    worker = ("read (/home/me/data.py:7)", "fetch (/x/torch/utils/data/_utils/fetch.py:5)")
    stuck, idle = (*worker, "wchan: futex_do_wait"), ("poll (/usr/lib/python3.11/selectors.py:1)",)
    detail = detail_of(last.hang, fed(), ("wait (q.py:1)",), [stuck, idle])
    assert re.sub(r"\d+ s", "N s", detail) == (
        "its loop has waited N s for a batch; a loader worker is in read (data.py:7), waiting for "
        "a lock"
    )
    two = detail_of(last.hang, fed(), (), [stuck, idle, stuck])
    assert "2 loader workers are in read (data.py:7)" in two


@pytest.mark.parametrize(
    "at",
    [
        lambda second: {0: fed(Signs(state="S", cpu_ns=second * 10**8))},
        lambda second: {0: fed(step=second)},
        lambda second: {0: fed() if second % 4 else RankSample(step=3, signs=QUIET)},
        lambda second: {0: RankSample(lost_child="was killed", step=second // 5, signs=QUIET)},
    ],
    ids=[
        "its workers compute",
        "it steps",
        "it gets batches now and then",
        "it steps although a process was killed",
    ],
)
def test_a_loop_that_gets_batches_or_whose_workers_work_is_left_alone(at):
    found = findings(at, 100)
    assert all(finding.hang is None and finding.busy is None for _, finding in found)


def test_a_loop_that_stands_still_after_a_process_was_killed_is_missed_by_itself():
    """As that of a pool, which never gets the result that the process owed."""
    lost = RankSample(lost_child="process Loads-1 was killed by SIGKILL", signs=QUIET)
    hang = verdict(lambda _: {0: lost})
    assert (hang.rank, hang.kind, hang.group) == (0, HangKind.BLOCKED, INPUT)
    detail = detail_of(hang, lost, ("wait (/home/me/pool.py:5)",))
    assert re.sub(r"\d+ s", "N s", detail) == (
        "its loop has waited N s; process Loads-1 was killed by SIGKILL; it is in wait (pool.py:5)"
    )


def test_what_others_wait_in_is_told_before_that_the_rank_waits_for_a_batch():
    late = RankSample(groups={WORLD: place(4, 4)}, in_input=True, signs=QUIET)
    hang = verdict(lambda second: {0: waiting(5) if second > 3 else behind(4), 1: late})
    assert (hang.rank, hang.group, hang.waiting) == (1, WORLD, (0,))
    worker = [("read (/home/me/data.py:7)",)]
    assert detail_of(hang, late, (), worker).endswith(
        "it waits for a batch, and a loader worker is in read (data.py:7)"
    )


def test_after_the_run_a_rank_that_ended_amid_its_input_is_missed_by_nobody():
    ended = {0: fed(Signs(state=""))}
    assert HangDetector(0.0).observe(ended, 0.0).hang is None
    waits = {0: waiting(5), 1: RankSample(groups={WORLD: place(4, 4)}, signs=Signs(state=""))}
    assert HangDetector(0.0).observe(waits, 0.0).hang.rank == 1


def test_a_forked_processs_stack_ends_where_it_was_forked():
    own = ("read (data.py:7)", "run (/usr/lib/python3.11/multiprocessing/process.py:108)")
    rest = ("_bootstrap (/usr/lib/python3.11/multiprocessing/process.py:314)", "main (a.py:1)")
    assert since_fork((*own, *rest)) == own
    assert since_fork(own) == own


def test_the_main_thread_is_the_last_that_python_writes():
    text = (
        'Thread 0x1 (most recent call first):\n  File "a.py", line 1 in other\n\n'
        'Current thread 0x2 (most recent call first):\n  File "b c.py", line 2 in f\n'
        '  File "b c.py", line 9 in <module>\n'
    )
    assert _frames(text) == ("f (b c.py:2)", "<module> (b c.py:9)")


def test_an_exported_name_far_away_is_not_taken_for_the_function():
    text = (
        "lib.so(+0x1)[0x1]\nlibc.so.6(+0x2)[0x2]\nlibmpi.so.12(MPI_Send+0x99999)[0x3]\n"
        "libc.so.6(read+0x10)[0x4]\n"
    )
    assert _frames(text) == ("? (libmpi.so.12)", "read (libc.so.6)")
