"""What the ranks did together: collectives by group, messages by peer and tag, and disagreement."""

import io
import re

import numpy as np
import pytest
from rich.console import Console
from support.traces import (
    MS,
    Event,
    data_parallel,
    set_boot_id,
    write_run,
    write_trace,
    write_trace_v1,
)

from paceline.core.breakdown import PHASES
from paceline.report.model import gather
from paceline.report.terminal import render_stats
from paceline.trace.analysis import analyse
from paceline.trace.analysis.stats import TraceStats, summarize_trace
from paceline.trace.format.events import COMMUNICATION, COMPLETION_UNKNOWN, Kind
from paceline.trace.format.files import read_trace, trace_name
from paceline.trace.merge import load_run, merge
from paceline.trace.merge.keys import row_ids

WORLD = (0, 1, 2)
STEPS = 12


def _pair(kind, name, begin_ms, end_ms, sequence, **more):
    """Return a collective or message that is waited for at once, and the wait for it."""
    begin, end = round(begin_ms * MS), round(end_ms * MS)
    more = {"group": "group 0", "members": WORLD, "sequence": sequence, **more}
    wait = {key: value for key, value in more.items() if key not in ("amount", "flags")}
    return [
        Event(kind, begin, end, name, location=COMMUNICATION, **more),
        Event(Kind.WAIT, begin, end, name, **wait),
    ]


def _collective(name, begin_ms, end_ms, sequence=1, **more):
    return _pair(Kind.COLLECTIVE, name, begin_ms, end_ms, sequence, **{"amount": 64, **more})


def _message(kind, begin_ms, end_ms, peer, sequence=1, **more):
    more = {"amount": 64, "peer": peer, **more}
    return _pair(kind, kind.name.lower(), begin_ms, end_ms, sequence, **more)


def _step(end_ms, begin_ms=0.0, step=0):
    return Event(Kind.STEP, round(begin_ms * MS), round(end_ms * MS), "step", step)


def _analyse(run, by_rank):
    return analyse(load_run(write_run(run, by_rank)))


def _ms(phases, name):
    return phases.seconds[:, PHASES.index(name)].sum() * 1e3


# --- messages ------------------------------------------------------------------------------------


def test_a_receive_waits_for_its_sender_and_for_nobody_else(tmp_path):
    by_rank = [
        [*_message(Kind.SEND, 7, 7.5, peer=1), _step(20)],
        [*_message(Kind.RECV, 2, 8, peer=0), _step(20)],
        [*_collective("all_reduce", 19, 20, group="group 2", members=(2,)), _step(20)],
    ]
    sender, receiver, _ = _analyse(tmp_path, by_rank).phases
    assert (_ms(sender, "waiting"), _ms(sender, "transfer")) == pytest.approx((0, 0.5))
    assert (_ms(receiver, "waiting"), _ms(receiver, "transfer")) == pytest.approx((5, 1))


@pytest.mark.parametrize(("received_ms", "waited_ms"), [(6, 4), (9, 0)])
def test_a_send_waited_for_its_receiver_only_if_that_had_come_when_it_went_on(
    tmp_path, received_ms, waited_ms
):
    by_rank = [
        [*_message(Kind.SEND, 2, 8, peer=1), _step(20)],
        [*_message(Kind.RECV, received_ms, 10, peer=0), _step(20)],
    ]
    sender, _ = _analyse(tmp_path, by_rank).phases
    assert _ms(sender, "waiting") == pytest.approx(waited_ms)
    assert _ms(sender, "transfer") == pytest.approx(6 - waited_ms)


def test_messages_are_told_apart_by_direction_tag_and_group(tmp_path):
    """All four have number 1, and each waits for its own sender."""
    kinds = [
        {"tag": 0, "group": "group 0", "members": (0, 1)},
        {"tag": 7, "group": "group 0", "members": (0, 1)},
        {"tag": 0, "group": "group 1", "members": (0, 1)},
    ]
    first, second = [], []
    for i, kind in enumerate(kinds):
        first += _message(Kind.SEND, 10 + i, 11 + i, peer=1, **kind)
        second += _message(Kind.RECV, 4 + i, 5 + i, peer=0, **kind)
    first += _message(Kind.RECV, 14, 19, peer=1, members=(0, 1))
    second += _message(Kind.SEND, 17, 18, peer=0, members=(0, 1))
    by_rank = [[*first, _step(20)], [*second, _step(20)]]
    by_rank[1] = [
        event
        if event.kind is not Kind.WAIT or event.name != "recv"
        else Event(**{**vars(event), "end_ns": 16 * MS})
        for event in by_rank[1]
    ]
    analysis = _analyse(tmp_path, by_rank)
    assert (analysis.matches.messages["partner"] >= 0).all()
    receives = analysis.waits[1][:3]
    assert (receives["ready_ns"] / MS).tolist() == [10, 11, 12]
    assert analysis.waits[0]["ready_ns"][-1] == 17 * MS
    lines = {(line.operation, line.group): line.count for line in analysis.traffic}
    assert lines == {("send", "group 0"): 3, ("send", "group 1"): 1}


def test_a_message_whose_other_side_is_missing_is_transfer(tmp_path):
    by_rank = [[*_message(Kind.RECV, 2, 8, peer=1), _step(20)], [_step(20)]]
    analysis = _analyse(tmp_path, by_rank)
    assert _ms(analysis.phases[0], "transfer") == pytest.approx(6)
    (line,) = analysis.traffic
    assert (line.operation, line.ranks, line.transfer_s) == ("recv", 1, pytest.approx(0.006))


def _message_before_each_reduction(late_ms=0.0):
    """Rank 0 sends to rank 1, then all three reduce; rank 2 may be late by `late_ms`."""
    by_rank = [[], [], []]
    at = 100.0
    for step in range(STEPS):
        sent = at + 2  # and received at once
        entered = (at + 3, at + 3, at + 3 + late_ms)
        done = max(entered) + 1
        by_rank[0] += _message(Kind.SEND, at + 2, sent, peer=1, sequence=step + 1)
        by_rank[1] += _message(Kind.RECV, at + 2, sent, peer=0, sequence=step + 1)
        for rank in WORLD:
            by_rank[rank] += _collective("all_reduce", entered[rank], done, sequence=step + 1)
            by_rank[rank].append(_step(done, at, step))
        at = done
    return [
        [
            Event(**{**vars(event), "step": int((event.begin_ns / MS - 100) // (4 + late_ms))})
            for event in events
        ]
        for events in by_rank
    ]


def test_messages_of_two_ranks_shift_no_collective_of_the_third(tmp_path):
    analysis = _analyse(tmp_path, _message_before_each_reduction())
    for phases in analysis.phases:
        assert _ms(phases, "waiting") == pytest.approx(0)
    assert analysis.skew_s == pytest.approx(0)
    assert analysis.matches.mismatches() == ()


def test_the_late_rank_of_such_a_run_is_the_one_that_is_late(tmp_path):
    analysis = _analyse(tmp_path, _message_before_each_reduction(late_ms=5))
    assert [late.rank for late in analysis.stragglers] == [2]
    assert analysis.skew_s[2, 1:] == pytest.approx(0.005)
    assert analysis.skew_s[:2, 1:] == pytest.approx(0, abs=1e-3)


@pytest.mark.parametrize("version", [1, 2])
def test_messages_set_no_clock_wrong(tmp_path, version):
    """Rank 2 is on another node, whose clock is 3 s ahead; both versions of the file tell so."""
    by_rank = _message_before_each_reduction()
    ahead_ns = 3_000_000_000
    by_rank[2] = [
        Event(
            **{
                **vars(event),
                "begin_ns": event.begin_ns + ahead_ns,
                "end_ns": event.end_ns + ahead_ns,
            }
        )
        for event in by_rank[2]
    ]
    if version == 2:
        run = write_run(tmp_path, by_rank)
        set_boot_id(run / "trace" / trace_name(2), "another node")
        trace = load_run(run)
    else:
        trace = _merged_v1(tmp_path, _numbered_as_version_1(by_rank), {2: b"another node"})
    clock = trace.clocks[2]
    assert clock.error_ns is not None
    assert abs(clock.to_run_ns(200 * MS + ahead_ns) - 200 * MS) <= clock.error_ns <= 1.1 * MS


# --- version 1 -----------------------------------------------------------------------------------


def _numbered_as_version_1(by_rank):
    """Give messages numbers of their group's collectives, in order of issue."""
    result = []
    for events in by_rank:
        issued = sorted(
            (e for e in events if e.kind in (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)),
            key=lambda event: event.begin_ns,
        )
        numbers = {
            (event.name, event.sequence): number for number, event in enumerate(issued, start=1)
        }
        result.append(
            [
                Event(
                    **{
                        **vars(event),
                        "sequence": numbers.get((event.name, event.sequence), 0),
                    }
                )
                for event in events
            ]
        )
    return result


def _merged_v1(folder, by_rank, boot_ids=None):
    folder.mkdir(exist_ok=True)
    traces = []
    for rank, events in enumerate(by_rank):
        path = write_trace_v1(folder / trace_name(rank), rank, len(by_rank), events)
        if boot_ids and rank in boot_ids:
            data = bytearray(path.read_bytes())
            data[40:80] = boot_ids[rank].ljust(40, b"\0")
            path.write_bytes(bytes(data))
        traces.append(read_trace(path))
    return merge(traces)


def test_a_version_1_run_with_messages_is_read_without_their_shift(tmp_path):
    by_rank = _message_before_each_reduction(late_ms=5)
    analysis = analyse(_merged_v1(tmp_path, _numbered_as_version_1(by_rank)))
    new = analyse(load_run(write_run(tmp_path / "new", by_rank)))
    for old_phases, new_phases in zip(analysis.phases, new.phases, strict=True):
        assert old_phases.seconds == pytest.approx(new_phases.seconds)
    assert analysis.skew_s == pytest.approx(new.skew_s)
    assert analysis.stragglers == new.stragglers
    assert analysis.traffic == new.traffic


def test_roots_in_groups_of_version_1_are_known_only_in_that_of_all_ranks(tmp_path):
    """Ranks 1 and 2 of 3 broadcast from their group's rank 1, which is rank 2, not rank 1."""

    def rank(begin_ms, end_ms):
        return [*_collective("broadcast", begin_ms, end_ms, peer=1), _step(12)]

    some = analyse(_merged_v1(tmp_path / "some", [[_step(12)], rank(1, 10), rank(9, 10)]))
    assert _ms(some.phases[1], "transfer") == pytest.approx(9)
    everyone = [rank(8, 10), rank(9, 10), rank(1, 10)]
    of_all = analyse(_merged_v1(tmp_path / "all", everyone))
    assert _ms(of_all.phases[2], "waiting") == pytest.approx(8)


# --- agreement -----------------------------------------------------------------------------------


def test_ranks_that_do_not_agree_on_operation_or_bytes_are_reported_and_not_joined(tmp_path):
    first = [
        *_collective("all_reduce", 1, 9, 1),
        *_collective("all_reduce", 10, 11, 2, amount=100),
        *_collective("all_gather", 12, 13, 3, amount=100),
        _step(20),
    ]
    second = [
        *_collective("all_gather", 8, 9, 1),
        *_collective("all_reduce", 10.5, 11, 2, amount=200),
        *_collective("all_gather", 12.5, 13, 3, amount=200),
        _step(20),
    ]
    analysis = _analyse(tmp_path, [first, second])
    one, other = analysis.mismatches
    assert (one.group, one.sequence, one.ranks) == ("group 0", 1, (0, 1))
    assert one.operations == ("all_reduce", "all_gather")
    assert (other.sequence, other.bytes) == (2, (100, 200))
    assert analysis.matches.mismatch_count == 2
    # Only the third one, whose ranks may give different amounts, tells who waited.
    assert _ms(analysis.phases[0], "waiting") == pytest.approx(0.5)
    assert _ms(analysis.phases[0], "transfer") == pytest.approx(8 + 1 + 0.5)
    assert [line.operation for line in analysis.traffic] == ["all_gather"]
    stats = summarize_trace(analysis)
    assert stats.mismatches == (one, other)
    assert TraceStats.from_text(stats.to_text()) == stats


def test_a_rank_that_is_twice_in_a_collective_is_a_mismatch(tmp_path):
    twice = [*_collective("all_reduce", 1, 2), *_collective("all_reduce", 3, 4), _step(20)]
    analysis = _analyse(tmp_path, [twice, [*_collective("all_reduce", 1, 2), _step(20)]])
    (mismatch,) = analysis.mismatches
    assert mismatch.ranks == (0, 0, 1)


def test_groups_of_one_name_and_different_members_are_different_groups(tmp_path):
    """Subgroups that were made apart count their names apart, and may take the same one."""

    def rank(begin_ms, members):
        return [*_collective("all_reduce", begin_ms, 10, members=members), _step(20)]

    by_rank = [rank(1, (0, 1)), rank(2, (0, 1)), rank(8, (2, 3)), rank(9, (2, 3))]
    analysis = _analyse(tmp_path, by_rank)
    assert [_ms(phases, "waiting") for phases in analysis.phases] == pytest.approx([1, 0, 1, 0])


# --- completion ----------------------------------------------------------------------------------


def test_what_nobody_saw_complete_sets_no_clock_no_skew_and_no_transfer(tmp_path):
    unknown = {"flags": COMPLETION_UNKNOWN}
    by_rank = [
        [*_collective("all_reduce", 1, 1.1, 1, **unknown), _step(10)],
        [*_collective("all_reduce", 5, 5.1, 1, **unknown), _step(10)],
    ]
    run = write_run(tmp_path, by_rank)
    set_boot_id(run / "trace" / trace_name(1), "another node")
    analysis = analyse(load_run(run))
    assert analysis.trace.clocks[1].error_ns is None
    (line,) = analysis.traffic
    assert (line.untimed_count, line.transfer_s, line.bandwidth_bytes_per_s) == (1, 0.0, None)
    assert analysis.untimed_count == 1
    assert not analysis.waits[0]["synchronises"].any()


def test_equal_rows_have_equal_numbers():
    ids = row_ids(np.array([3, 1, 3, 1]), np.array([0, 5, 0, 6]))
    assert ids.tolist() == [2, 0, 2, 1]
    assert row_ids(np.array([], dtype=int)).tolist() == []


def test_a_trace_that_was_cut_short_joins_what_it_has(tmp_path):
    by_rank = data_parallel(2, 10)
    first = read_trace(write_trace(tmp_path / "a", 0, 2, by_rank[0]))
    second = read_trace(write_trace(tmp_path / "b", 1, 2, by_rank[1][: 7 * 5], close=False))
    analysis = analyse(merge([first, second]))
    assert analysis.steps == 5
    assert analysis.matches.instances["ranks"].tolist() == [2] * 5 + [1] * 5


def test_what_the_trace_leaves_open_is_said_in_the_verdict_and_the_stats(tmp_path):
    unknown = {"flags": COMPLETION_UNKNOWN}
    first = [
        *_collective("all_reduce", 1, 1.1, 1, **unknown),
        *_collective("all_gather", 2, 3, 2),
        _step(10),
    ]
    second = [
        *_collective("all_reduce", 1, 1.1, 1, **unknown),
        *_collective("all_reduce", 2, 3, 2),
        _step(10),
    ]
    run = write_run(tmp_path, [first, second])
    words = gather(run).words
    assert "does not show when 1 collective completed" in words
    assert "In 1 collective the ranks do not agree" in words
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_stats(summarize_trace(analyse(load_run(run)))))
    text = console.export_text()
    assert "does not show when 1 collective completed" in text
    assert re.search(r"^0 +all_gather +2 +0 +64 B", text, re.M)
    assert re.search(r"^0 +all_reduce +2 +1 +64 B", text, re.M)
