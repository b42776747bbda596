"""Process groups as the trace knows them: their members' global ranks, and their numbering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from paceline.trace.collectors import torch_internals as internals
from paceline.trace.collectors.torch_internals import Capability
from paceline.trace.format.events import BACKEND

if TYPE_CHECKING:
    from paceline.native import Recorder


@dataclass(slots=True, eq=False)
class GroupRecord:
    """A process group as it is recorded, with the numbers of collectives and messages so far.

    Attributes:
        number: index of the group in the trace's table of groups.
        members: global ranks, in order of their rank in the group; empty if not known.
        ranks: the dict from which `members` was taken; another group of the same name has another
            dict.
        collectives: number of collectives that were issued so far.
        messages: number of messages that were issued so far, by (direction, peer, tag).
        completes: whether completion is seen, by type of device.
    """

    number: int
    members: tuple[int, ...]
    ranks: dict[int, int]
    collectives: int = 0
    messages: dict[tuple[bool, int, int], int] = field(default_factory=dict)
    completes: dict[str, bool] = field(default_factory=dict)

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank in the group; -1 if it is not known."""
        return self.members[rank] if 0 <= rank < len(self.members) else -1

    def next_collective(self) -> int:
        """Return the sequence of the next collective."""
        self.collectives += 1
        return self.collectives

    def next_message(self, sends: bool, peer: int, tag: int) -> int:
        """Return the sequence of the next message to or from `peer`."""
        key = (sends, peer, tag)
        number = self.messages[key] = self.messages.get(key, 0) + 1
        return number


class Groups:
    """The groups of this process; used by the main thread and the threads of the backward pass."""

    def __init__(self, recorder: Recorder, available: frozenset[Capability]) -> None:
        self._recorder = recorder
        self._knows_members = Capability.GROUP_MEMBERS in available
        self._knows_backends = Capability.BACKENDS in available
        self._latest: dict[str, GroupRecord] = {}  # by the group's name
        self._defined: dict[int, GroupRecord] = {}  # by number: counts continue

    def record_of(self, group: Any) -> GroupRecord:
        """Return the record of a process group."""
        name = group.group_name
        known = self._latest.get(name)
        ranks = internals.members_of(group) if self._knows_members else {}
        if known is not None and known.ranks is ranks:
            return known
        members = tuple(sorted(ranks, key=lambda rank: ranks[rank]))
        number = self._recorder.define_group(f"group {name}", members)
        record = self._defined.get(number)
        if record is None:
            if backend := internals.backend_name(group):
                self._recorder.intern(BACKEND + backend)
            record = self._defined[number] = GroupRecord(number, members, ranks)
        record.ranks = ranks
        self._latest[name] = record
        return record

    def sees_completion(self, group: Any, record: GroupRecord, device_type: str) -> bool:
        """Return whether the completion of work on tensors of a type of device is seen."""
        seen = record.completes.get(device_type)
        if seen is None:
            backend = ""
            if device_type != "cpu" and self._knows_backends:
                backend = internals.backend_of(group, device_type)
            seen = record.completes[device_type] = internals.completion_is_seen(
                backend, device_type
            )
        return seen
