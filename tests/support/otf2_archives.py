"""Reads OTF2 archives by two tools that nobody here wrote, and compares them with the trace.

The package `otf2` gives events as objects, Debian's otf2-print a line of text per event.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
from dataclasses import dataclass

import numpy as np
import pytest

from paceline.trace.format.events import Kind

COMMUNICATION = (Kind.COLLECTIVE, Kind.SEND, Kind.RECV)
ONE_SIDED = ("put", "get", "accumulate")
OPERATIONS = {  # as the reader names them
    "ALLREDUCE": {"all_reduce"},
    "ALLGATHER": {"all_gather", "neighbor_all_gather"},
    "ALLTOALL": {"all_to_all", "neighbor_all_to_all"},
    "BARRIER": {"barrier", "fence", "open_fence"},
    "BCAST": {"broadcast"},
    "CREATE_HANDLE": {"make_communicator", "make_window", "open_file"},
    "GATHER": {"gather"},
    "REDUCE": {"reduce"},
    "REDUCE_SCATTER": {"reduce_scatter"},
    "SCAN": {"scan"},
    "SCATTER": {"scatter"},
}
_LINE = re.compile(r"^([A-Z][A-Z0-9_]+) +(\d+) +(\d+) *(.*)$")


@dataclass(frozen=True)
class Archive:
    """The events by location, each with its time, and the locations' ranks."""

    events: dict[int, list]
    rank_of: dict[int, int]
    names: dict[int, str]
    types: dict[int, str]
    nodes: dict[int, str]


def read(anchor) -> Archive:
    """Read an archive by the package `otf2`."""
    import otf2

    events: dict[int, list] = collections.defaultdict(list)
    with otf2.reader.open(str(anchor)) as trace:
        assert trace.definitions.clock_properties.timer_resolution == 10**9
        places = list(trace.definitions.locations)
        keys = {place: place._ref for place in places}
        for place, event in trace.events:
            events[keys[place]].append(event)
        for place in places:
            assert place.number_of_events == len(events[keys[place]])
        return Archive(
            events,
            {keys[place]: int(place.group.name.removeprefix("rank ")) for place in places},
            {keys[place]: place.name for place in places},
            {keys[place]: str(place.type).rpartition(".")[2] for place in places},
            {keys[place]: place.group.system_tree_parent.name for place in places},
        )


def printed(anchor) -> list[tuple[str, int, int, str]]:
    """Return the events that otf2-print prints: what, location, time, attributes."""
    program = shutil.which("otf2-print")
    if program is None:
        pytest.skip("no otf2-print here")
    done = subprocess.run([program, anchor], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = [_LINE.match(line) for line in done.stdout.splitlines()]
    return [(m[1], int(m[2]), int(m[3]), m[4]) for m in found if m]


def check_archive(anchor, trace, *, counters=True):
    """Check that an archive says what the trace says, by both readers; return what was read."""
    archive = read(anchor)
    lines = printed(anchor)
    assert len(lines) == sum(len(events) for events in archive.events.values())
    counts = collections.Counter(line[0] for line in lines)
    assert counts == _counts(archive)
    for location, events in archive.events.items():
        times = [event.time for event in events]
        assert times == sorted(times)
        assert times == [time for _, place, time, _ in lines if place == location]
        _check_nesting(events)
    assert set(archive.rank_of.values()) == set(range(trace.world_size))
    for index, rank in enumerate(trace.ranks):
        _check_rank(archive, trace, index, rank, counters=counters)
    sent = _bytes_by_pair(archive, "MpiSend", "MpiIsend", by_peer=False)
    received = _bytes_by_pair(archive, "MpiRecv", "MpiIrecv", by_peer=True)
    assert sent == _expected_pairs(trace, sends=True)
    assert received == _expected_pairs(trace, sends=False)
    lengths = [
        int(re.search(r"Length: (\d+)", text)[1])
        for what, _, _, text in lines
        if what in ("MPI_SEND", "MPI_ISEND")
    ]
    assert sum(lengths) == sum(sent.values())
    _check_collectives(archive, trace)
    return archive


def _counts(archive):
    """Return the events by name, as otf2-print spells names."""
    names = (type(event).__name__ for events in archive.events.values() for event in events)
    spelled = (re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).upper() for name in names)
    return collections.Counter(spelled)


def _check_nesting(events):
    stack = []
    for event in events:
        name = type(event).__name__
        if name == "Enter":
            stack.append(event.region)
        elif name == "Leave":
            assert stack.pop() == event.region
    assert not stack


def _check_rank(archive, trace, index, rank, *, counters):
    own = [place for place, number in archive.rank_of.items() if number == rank.rank]
    events = [event for place in own for event in archive.events[place]]
    found = collections.Counter(type(event).__name__ for event in events)
    kinds = rank.events["kind"]
    intervals = ~np.isin(kinds, [*COMMUNICATION, Kind.COUNTER])
    assert found["Enter"] == found["Leave"] == int(intervals.sum())
    assert found["Metric"] == (int((kinds == Kind.COUNTER).sum()) if counters else 0)
    collectives = int((kinds == Kind.COLLECTIVE).sum())
    assert found["MpiCollectiveBegin"] == found["MpiCollectiveEnd"]
    requests = found["NonBlockingCollectiveRequest"]
    assert requests == found["NonBlockingCollectiveComplete"]
    assert requests + found["MpiCollectiveEnd"] == collectives
    accesses = sum(found[name] for name in ("RmaPut", "RmaGet", "RmaAtomic"))
    assert accesses == found["RmaOpCompleteBlocking"]
    names = [rank.names[event["name"]] for event in rank.events[kinds == Kind.SEND]]
    one_sided = sum(name in ONE_SIDED for name in names)
    assert found["MpiSend"] + found["MpiIsend"] == len(names) - one_sided
    assert found["MpiIsend"] == found["MpiIsendComplete"]
    assert found["MpiIrecv"] == found["MpiIrecvRequest"]
    begins = trace.clocks[index].to_run_ns(rank.events["begin_ns"])
    assert min((event.time for event in events), default=None) == min(begins, default=None)


def _members(communicator):
    return [int(member.group.name.removeprefix("rank ")) for member in communicator.group.members]


def _bytes_by_pair(archive, *names, by_peer):
    """Return bytes by (source, destination); `by_peer` if the peer is the source."""
    pairs = collections.Counter()
    for place, events in archive.events.items():
        for event in events:
            if type(event).__name__ in names:
                peer = event.sender if by_peer else event.receiver
                other = _members(event.communicator)[peer]
                own = archive.rank_of[place]
                pair = (other, own) if by_peer else (own, other)
                pairs[pair, event.communicator.name, event.msg_tag] += event.msg_length
    return pairs


def _expected_pairs(trace, *, sends):
    pairs = collections.Counter()
    for rank in trace.ranks:
        for event in rank.events[rank.events["kind"] == (Kind.SEND if sends else Kind.RECV)]:
            if rank.names[event["name"]] in ONE_SIDED:
                continue
            pair = (rank.rank, int(event["peer"]))
            pair = pair if sends else pair[::-1]
            pairs[pair, rank.groups[event["group"]].name, int(event["tag"])] += int(event["amount"])
    return pairs


def _check_collectives(archive, trace):
    """Check each rank's collectives by communicator, and that the members agree on them."""
    found = collections.defaultdict(collections.Counter)
    for place, events in archive.events.items():
        for event in events:
            if type(event).__name__ in ("MpiCollectiveEnd", "NonBlockingCollectiveComplete"):
                members = tuple(_members(event.communicator))
                root = event.root if event.root < len(members) else None
                key = (event.communicator.name, members)
                name = str(event.collective_op).rpartition(".")[2]
                found[key, archive.rank_of[place]][name, root and members[root]] += 1
    expected = collections.defaultdict(collections.Counter)
    spelled = {word: name for name, words in OPERATIONS.items() for word in words}
    for index, rank in enumerate(trace.ranks):
        groups = trace.matches.local_groups[index]
        for event in rank.events[rank.events["kind"] == Kind.COLLECTIVE]:
            group = trace.matches.groups[groups[event["group"]]]
            root = int(event["peer"]) if event["peer"] >= 0 else None
            members = group.members or tuple(range(trace.world_size))
            place = members.index(root) if root in members else None
            name = spelled[rank.names[event["name"]]]
            expected[(group.name, members), rank.rank][name, place and root] += 1
    assert found == expected
    complete = not trace.missing_ranks and all(rank.complete for rank in trace.ranks)
    for (name, members), rank in found:
        if complete and not trace.matches.mismatch_count:
            for other in members:
                assert found[(name, members), rank] == found[(name, members), other]
