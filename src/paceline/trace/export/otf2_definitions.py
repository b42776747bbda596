"""What the events of an archive refer to: regions, communicators, windows and metrics.

References are given out as ranks are converted, and written at the end: OTF2 reads definitions
before events, but does not ask in which order they were written. So all ranks use one numbering,
and nobody needs to see the events of all ranks at a time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.trace.export.otf2_library import UNDEFINED
from paceline.trace.format.events import Group, Kind

Definition = tuple[Any, ...]  # the arguments of `Otf2Archive.define`

# Numbers of OTF2's enumerations.
_USER, _MPI = 1, 4  # paradigms
_FUNCTION, _FILE_IO, _DATA_TRANSFER, _CODE = 1, 27, 30, 4  # roles of regions
_POINT_TO_POINT, _BARRIER = 28, 15
_ONE_TO_ALL, _ALL_TO_ONE, _ALL_TO_ALL, _COLLECTIVE = 23, 24, 25, 26
_PHASE = 2  # flag of a region
_COMM_LOCATIONS, _COMM_GROUP = 4, 5  # types of groups
_CPU, _UINT64, _DECIMAL = 2, 4, 1  # kind of recorder, type of a value, base
_OTHER_METRIC, _ABSOLUTE_POINT, _ASYNCHRONOUS = 0, 17, 2

_ROLES = {
    **dict.fromkeys(("send", "recv"), _POINT_TO_POINT),
    **dict.fromkeys(("barrier", "fence", "open_fence"), _BARRIER),
    **dict.fromkeys(("broadcast", "scatter"), _ONE_TO_ALL),
    **dict.fromkeys(("reduce", "gather"), _ALL_TO_ONE),
    **dict.fromkeys(
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "scan"), _ALL_TO_ALL
    ),
}
_PHASE_ROLES = {
    Kind.CHECKPOINT: _FILE_IO,
    Kind.READ: _FILE_IO,
    Kind.WRITE: _FILE_IO,
    Kind.COPY: _DATA_TRANSFER,
    Kind.STEP: _CODE,
}
_UNITS = {"_ns": "ns", "_bytes": "B"}


@dataclass(frozen=True, slots=True, eq=False)
class Communicator:
    """A group of ranks that communicate.

    Attributes:
        reference: in the archive.
        members: global ranks, in order of their rank in the group.
    """

    reference: int
    members: np.ndarray

    def ranks_of(self, peers: np.ndarray) -> np.ndarray:
        """Return the rank in the group of each global rank; `UNDEFINED` for others."""
        places = np.full(int(self.members.max(initial=-1)) + 1, UNDEFINED, dtype=np.uint32)
        places[self.members] = np.arange(len(self.members))
        inside = (peers >= 0) & (peers < len(places))
        found = np.full(len(peers), UNDEFINED, dtype=np.uint32)
        found[inside] = places[peers[inside]]
        return found


@dataclass(slots=True, eq=False)
class Otf2Definitions:
    """References by what they stand for.

    Attributes:
        world_size: number of ranks of the run.
    """

    world_size: int
    _strings: dict[str, int] = dataclasses.field(default_factory=dict)
    _regions: dict[tuple[str, Kind, bool], int] = dataclasses.field(default_factory=dict)
    _communicators: dict[Group, Communicator] = dataclasses.field(default_factory=dict)
    _windows: dict[Group, int] = dataclasses.field(default_factory=dict)
    _metrics: dict[str, int] = dataclasses.field(default_factory=dict)

    def string(self, text: str) -> int:
        """Return the reference of a text."""
        return self._strings.setdefault(text, len(self._strings))

    def region(self, name: str, kind: Kind, *, is_call: bool) -> int:
        """Return the reference of a region.

        Args:
            name: of the events; may be empty.
            kind: of the events.
            is_call: whether it is a call that blocks, rather than a wait for one that did not.
        """
        return self._regions.setdefault((name, kind, is_call), len(self._regions))

    def communicator(self, group: Group) -> Communicator:
        """Return the communicator of a group; a group of unknown members is one of all ranks."""
        if group not in self._communicators:
            members = np.array(group.members or range(self.world_size), dtype=np.int64)
            self._communicators[group] = Communicator(len(self._communicators), members)
        return self._communicators[group]

    def window(self, group: Group) -> int:
        """Return the reference of the window whose accesses are in a group."""
        self.communicator(group)
        return self._windows.setdefault(group, len(self._windows))

    def metric(self, name: str) -> int:
        """Return the reference of a counter."""
        return self._metrics.setdefault(name, len(self._metrics))

    def strings(self) -> list[Definition]:
        """Return the definitions of all texts that the others refer to so far."""
        return [("String", reference, text) for text, reference in self._strings.items()]

    def rows(self, comm_locations: np.ndarray) -> list[Definition]:
        """Return the other definitions, each after those that it refers to.

        Args:
            comm_locations: main location of each rank of the run, by global rank.
        """
        return [
            *(self._region(*key, reference) for key, reference in self._regions.items()),
            *self._groups(comm_locations),
            *self._metric_rows(),
        ]

    def _region(self, name: str, kind: Kind, is_call: bool, reference: int) -> Definition:
        word = kind.name.lower()
        text, role, paradigm = name or word, _PHASE_ROLES.get(kind, _FUNCTION), _USER
        if kind is Kind.STEP:
            text = word
        elif kind is Kind.WAIT:
            paradigm, role = _MPI, _ROLES.get(name, _COLLECTIVE)
            text = word if not name else name if is_call else f"wait for {name}"
        called = self.string(text)
        flags = _PHASE if kind is Kind.STEP else 0
        return (
            *("Region", reference, called, called, self.string(word), role, paradigm, flags),
            *(self.string(""), 0, 0),
        )

    def _groups(self, comm_locations: np.ndarray) -> list[Definition]:
        """Return groups, communicators and windows; members are indices of the first group."""
        rows: list[Definition] = []

        def add_group(reference: int, name: str, kind: int, members: np.ndarray) -> None:
            head = ("Group", reference, self.string(name), kind, _MPI, 0)
            rows.append((*head, len(members), members.astype(np.uint64)))

        add_group(0, "", _COMM_LOCATIONS, comm_locations)
        for group, communicator in self._communicators.items():
            number = communicator.reference
            add_group(number + 1, group.name, _COMM_GROUP, communicator.members)
            rows.append(("Comm", number, self.string(group.name), number + 1, UNDEFINED, 0))
        for group, reference in self._windows.items():
            of = self._communicators[group].reference
            rows.append(("RmaWin", reference, self.string(group.name), of, 0))
        return rows

    def _metric_rows(self) -> list[Definition]:
        rows: list[Definition] = []
        for name, reference in self._metrics.items():
            unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "#")
            rows += [
                (
                    *("MetricMember", reference, self.string(name), self.string("")),
                    *(_OTHER_METRIC, _ABSOLUTE_POINT, _UINT64, _DECIMAL, 0, self.string(unit)),
                ),
                (
                    *("MetricClass", reference, 1, np.array([reference], dtype=np.uint32)),
                    *(_ASYNCHRONOUS, _CPU),
                ),
            ]
        return rows
