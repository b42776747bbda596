"""Makes traces with the native recorder from hand-made events, for tests of what reads them."""

from __future__ import annotations

import dataclasses
import struct
from typing import TYPE_CHECKING

import numpy as np

from paceline.native import Recorder, crc32c
from paceline.schedules.pipeline import StageEdge, replay
from paceline.trace.format.events import COMMUNICATION, MAIN, NOT_RUNNING, Kind
from paceline.trace.format.files import trace_name
from paceline.trace.format.header import (
    FIXED_CHECKSUM_AT,
    FIXED_END,
    HEADER,
    HEADER_BYTES,
    LIVE_END,
)
from paceline.trace.format.version1 import EVENT_DTYPE_V1

if TYPE_CHECKING:
    from pathlib import Path

MS = 1_000_000
BOOT_ID_AT = 8 + 4 * 4 + 2 * 8  # in the header: after magic, four numbers and two clocks
DROPPED_AT = BOOT_ID_AT + 40 + 4 * 4 + 8  # after the boot id, four numbers and a count


@dataclasses.dataclass(frozen=True)
class Event:
    """One event, with names instead of their numbers."""

    kind: Kind
    begin_ns: int
    end_ns: int
    name: str = ""
    step: int = 0
    amount: int = 0
    group: str = ""
    sequence: int = 0
    peer: int = -1
    tag: int = 0
    location: int = MAIN
    members: tuple[int, ...] = ()  # of the group
    flags: int = 0
    tag_name: str = ""  # the tag is the number of this name


def write_trace(
    path: Path, rank: int, world_size: int, events: list[Event], *, close: bool = True
) -> Path:
    """Write `events` as the trace of `rank`; a file that is not closed is what a crash leaves."""
    recorder = Recorder(
        str(path), rank, world_size, buffer_events=2 * len(events) + 16, flush_interval_s=60.0
    )
    for event in events:
        recorder.record(
            int(event.kind),
            event.location,
            recorder.intern(event.name),
            event.begin_ns,
            event.end_ns,
            event.amount,
            recorder.define_group(event.group, event.members),
            event.sequence,
            event.peer,
            recorder.intern(event.tag_name) if event.tag_name else event.tag,
            event.step,
            event.flags,
        )
    recorder.flush()
    if not close:
        open_bytes = path.read_bytes()
        recorder.close()
        path.write_bytes(open_bytes)
        return path
    recorder.close()
    assert recorder.dropped_count == 0
    return path


def write_trace_v1(path: Path, rank: int, world_size: int, events: list[Event]) -> Path:
    """Write `events` as version 1 did: messages are collectives, groups are names."""
    names = ["", *sorted({event.name for event in events} | {event.group for event in events})]
    names = list(dict.fromkeys(names))
    rows = np.zeros(len(events), EVENT_DTYPE_V1)
    for row, event in zip(rows, events, strict=True):
        kind = {Kind.STEP: 0, Kind.SEND: 6, Kind.RECV: 6}.get(event.kind, int(event.kind))
        row["kind"], row["lane"] = kind, int(event.location != MAIN)
        for field in ("begin_ns", "end_ns", "amount", "step", "sequence", "peer"):
            row[field] = getattr(event, field)
        row["name"], row["group"] = names.index(event.name), names.index(event.group)
    texts = b"".join(struct.pack("<I", len(name)) + name.encode() for name in names)
    blocks = b""
    for kind, count, payload in ((2, len(names), texts), (1, len(rows), rows.tobytes())):
        head = struct.pack("<III", kind, count, len(payload))
        blocks += head + struct.pack("<I", crc32c(payload, crc32c(head))) + payload
    written = HEADER_BYTES + len(blocks)
    numbers = (1, rank, world_size, 0, 1, 1, b"node", 0, 0, 1, 0, len(rows), 0, 1, written, 0)
    path.write_bytes(HEADER.pack(b"PACETRCE", *numbers).ljust(HEADER_BYTES, b"\0") + blocks)
    return path


def write_run(run: Path, by_rank: list[list[Event]]) -> Path:
    """Write the traces of a run, one list of events per rank."""
    (run / "trace").mkdir(parents=True, exist_ok=True)
    for rank, events in enumerate(by_rank):
        write_trace(run / "trace" / trace_name(rank), rank, len(by_rank), events)
    return run


def set_boot_id(path: Path, boot_id: str) -> None:
    """Make the trace look as if it came from another node."""
    data = bytearray(path.read_bytes())
    data[BOOT_ID_AT : BOOT_ID_AT + 40] = boot_id.encode().ljust(40, b"\0")
    path.write_bytes(with_checksums(data))


def set_dropped_count(path: Path, count: int) -> None:
    """Make the trace say that `count` events were dropped."""
    data = bytearray(path.read_bytes())
    data[DROPPED_AT : DROPPED_AT + 8] = count.to_bytes(8, "little")
    path.write_bytes(with_checksums(data))


def with_checksums(data: bytearray) -> bytes:
    """Return a trace's bytes with the checksums that its header should have."""
    at = FIXED_CHECKSUM_AT
    fixed = crc32c(data[at + 4 : FIXED_END], crc32c(data[:at]))
    data[at : at + 4] = fixed.to_bytes(4, "little")
    data[LIVE_END : LIVE_END + 4] = crc32c(data[FIXED_END:LIVE_END]).to_bytes(4, "little")
    return bytes(data)


@dataclasses.dataclass(frozen=True)
class Late:
    """One rank made late in steps `first` to `last`, by `ms`, for a cause."""

    rank: int
    ms: float
    first: int
    last: int
    cause: str = "data"

    def extra_ns(self, rank: int, step: int, cause: str) -> int:
        """Return what this adds to the part of a step that `cause` names."""
        hit = rank == self.rank and self.first <= step <= self.last and cause == self.cause
        return round(self.ms * MS) if hit else 0


# A data-parallel step in milliseconds: the parts of it that nobody disturbs.
INPUT_MS, FORWARD_MS, BACKWARD_MS, TRANSFER_MS, OPTIMIZER_MS = 1.0, 3.0, 4.0, 1.0, 1.0


def data_parallel(
    world_size: int,
    steps: int,
    *,
    late: tuple[Late, ...] = (),
    jitter_ns=None,
    amount: int = 1 << 20,
    group: str = "group default",
    start_ns: int = 10**12,
) -> list[list[Event]]:
    """Return the events of ordinary data-parallel training: one all-reduce per step, in backward.

    Args:
        world_size: how many ranks.
        steps: of each.
        late: who is slowed, and when; cause `not_running` slows backward and counts as waiting
            for a core.
        jitter_ns: integers of shape (ranks, steps) added to the forward pass.
        amount: bytes of each all-reduce.
        group: its name.
        start_ns: of the first step.
    """
    by_rank: list[list[Event]] = [[] for _ in range(world_size)]
    at = [start_ns] * world_size
    for step in range(steps):
        issues = []
        for rank in range(world_size):
            extra = {
                cause: sum(delay.extra_ns(rank, step, cause) for delay in late)
                for cause in ("data", "compute", "not_running")
            }
            begin = at[rank]
            forward = begin + round(INPUT_MS * MS) + extra["data"]
            wobble = 0 if jitter_ns is None else int(jitter_ns[rank][step])
            backward = forward + round(FORWARD_MS * MS) + wobble + extra["compute"]
            issue = backward + round(BACKWARD_MS * MS) + extra["not_running"]
            issues.append(issue)
            by_rank[rank] += [
                Event(Kind.INPUT, begin, forward, "loader", step),
                Event(Kind.FORWARD, forward, backward, "forward", step),
            ]
            at[rank] = backward
            if extra["not_running"]:
                by_rank[rank].append(
                    Event(Kind.COUNTER, begin, begin, NOT_RUNNING, step, extra["not_running"])
                )
        done = max(issues) + round(TRANSFER_MS * MS)
        end = done + round(OPTIMIZER_MS * MS)
        for rank in range(world_size):
            previous = by_rank[rank][-2].begin_ns
            if by_rank[rank][-1].kind == Kind.COUNTER:
                previous = by_rank[rank][-3].begin_ns
            by_rank[rank] += [
                Event(
                    Kind.COLLECTIVE,
                    issues[rank],
                    done,
                    "all_reduce",
                    step,
                    amount,
                    group,
                    step + 1,
                    location=COMMUNICATION,
                ),
                Event(Kind.WAIT, issues[rank], done, "all_reduce", step, 0, group, step + 1),
                Event(Kind.BACKWARD, at[rank], done, "backward", step),
                Event(Kind.OPTIMIZER, done, end, "optimizer", step),
                Event(Kind.STEP, previous, end, "step", step),
            ]
            at[rank] = end
    return by_rank


def pipelined(
    schedule,
    costs,
    *,
    steps: int,
    link=None,
    amount: int = 1000,
    step_ms: float = 1.0,
    group: str = "group default",
) -> list[list[Event]]:
    """Return the events of a model in stages: a batch in each step, as its schedule is replayed.

    Args:
        schedule: of the batch; each stage sends one value to the next one.
        costs: of the stages.
        steps: of each rank.
        link: between ranks.
        amount: bytes of a value.
        step_ms: of the optimizer after each batch.
        group: of the messages.
    """
    edges = [StageEdge(stage, stage + 1, amount) for stage in range(schedule.stages - 1)]
    found = replay(schedule, edges, costs, link)
    ends = {
        action: found.end_s[rank][place]
        for rank, actions in enumerate(schedule.actions)
        for place, action in enumerate(actions)
    }
    length_ns = round(found.makespan_s * 1e9) + round(step_ms * MS)
    by_rank: list[list[Event]] = []
    for rank, actions in enumerate(schedule.actions):
        events = []
        for step in range(steps):
            begin = 10**12 + step * length_ns
            now = begin
            for place, action in enumerate(actions):
                start, end = (
                    begin + round(times[rank][place] * 1e9)
                    for times in (found.start_s, found.end_s)
                )
                source = _needed(action, schedule.stages)
                peer = schedule.rank_of[source.stage] if source else rank
                message = {"name": "recv", "step": step, "group": group, "sequence": step + 1}
                if source and peer != rank:
                    sent = begin + round(ends[source] * 1e9)
                    message |= {"peer": peer, "tag": _tag(source, schedule.microbatches)}
                    events += [
                        Event(Kind.WAIT, now, max(now, start), **message),
                        Event(
                            *(Kind.RECV, min(now, sent), max(now, start)),
                            **message,
                            amount=amount,
                            location=COMMUNICATION,
                        ),
                    ]
                events.append(
                    Event(
                        *(Kind.STAGE, now, end, action.kind, step, action.microbatch),
                        sequence=step + 1,
                        tag=action.stage,
                    )
                )
                target = _user(action, schedule.stages)
                peer = rank if target is None else schedule.rank_of[target]
                if peer != rank:
                    message |= {"peer": peer, "tag": _tag(action, schedule.microbatches)}
                    message["name"] = "send"
                    events.append(
                        Event(Kind.SEND, end, end, **message, amount=amount, location=COMMUNICATION)
                    )
                now = end
            last = begin + length_ns
            events += [
                Event(Kind.OPTIMIZER, last - round(step_ms * MS), last, "optimizer", step),
                Event(Kind.STEP, begin, last, "step", step),
            ]
        by_rank.append(events)
    return by_rank


def _needed(action, stages: int):
    """Return the action of another stage that brings what this one needs."""
    if action.kind == "forward":
        return action._replace(stage=action.stage - 1) if action.stage else None
    if action.kind == "backward_weight" or action.stage == stages - 1:
        return None
    return action._replace(stage=action.stage + 1)


def _user(action, stages: int) -> int | None:
    """Return the stage that uses what an action brings."""
    if action.kind == "backward_weight":
        return None
    other = action.stage + (1 if action.kind == "forward" else -1)
    return other if 0 <= other < stages else None


def _tag(action, microbatches: int) -> int:
    number = action.stage * microbatches + action.microbatch
    return 2 * number + (action.kind != "forward")
