"""How far a rank has come with its collectives, from the header's page of its trace.

The recorder changes the page while it is read. An entry counts only if two reads of the page found
the same in it, and no change was under way: who waits for the rank sees it stand still, or sees
that it moves.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.trace.format.header import HEADER_BYTES, Status, parse_header

if TYPE_CHECKING:
    from pathlib import Path

PROGRESS_AT = 1024
PROGRESS = struct.Struct("<IHHIIIiQ8HQH6x")
HISTORY = 8  # collectives of a group whose names the page keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupProgress:
    """A rank's progress with the collectives of one group, or with the messages it waits for.

    Attributes:
        group: number of the group in the trace's table.
        name: number of the last collective's or message's name.
        entered: sequence of the last collective that was entered; of messages, their count.
        left: how many have ended.
        unseen: sequence of the last collective whose completion the recorder does not see.
        peer: global rank of its root, or of the message's other side; negative if there is none.
        names: numbers of the names of the last collectives, by sequence modulo `HISTORY`.
        amount: bytes that the rank gave to the last collective; 0 if not known.
        element: number of the name of their type; 0 if not known.
    """

    group: int
    name: int
    entered: int
    left: int
    unseen: int
    peer: int
    names: tuple[int, ...]
    amount: int = 0
    element: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveHeader:
    """The first page of a trace that is being written.

    Attributes:
        status: the header.
        message: of the messages that the main thread waits for; None if the entry was changing.
        groups: of the groups whose entry was not changing.
        group_room: whether the page has room for more groups: where it has none, a group that is
            not in it may have been left out.
    """

    status: Status
    message: GroupProgress | None
    groups: tuple[GroupProgress, ...]
    group_room: bool


def read_live_header(path: Path) -> LiveHeader:
    """Return the first page of the trace at `path`.

    Raises:
        OSError: it cannot be read.
        CorruptTrace: it is not a trace.
    """
    with path.open("rb") as file:
        before = file.read(HEADER_BYTES)
        file.seek(0)
        page = file.read(HEADER_BYTES)
    status = parse_header(page, path)
    entries: list[GroupProgress | None] = []
    for at in range(PROGRESS_AT, HEADER_BYTES, PROGRESS.size):
        version, *fields = PROGRESS.unpack_from(page, at)
        if version == 0 and at > PROGRESS_AT:
            break
        same = before[at : at + PROGRESS.size] == page[at : at + PROGRESS.size]
        entries.append(_entry(fields) if same and version % 2 == 0 else None)
    room = PROGRESS_AT + len(entries) * PROGRESS.size < HEADER_BYTES
    return LiveHeader(
        status=status,
        message=entries[0],
        groups=tuple(entry for entry in entries[1:] if entry is not None),
        group_room=room,
    )


def _entry(fields: list[int]) -> GroupProgress:
    group, name, entered, left, unseen, peer, _, *names, amount, element = fields
    return GroupProgress(
        group=group,
        name=name,
        entered=entered,
        left=left,
        unseen=unseen,
        peer=peer,
        names=tuple(names),
        amount=amount,
        element=element,
    )
