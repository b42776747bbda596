"""The classes that ``.cls`` members of WebDataset shards name.

Members of one archive that share their name up to the first dot of its last component, their key,
are of one class, wherever they stand in the archive. Labels are given before the class of a key may
be known: a label below -1 is a slot, whose class `MemberClasses.classes` tells in the end::

    x1.jpg   slot 0                slots     class
    x2.jpg   slot 1                  0         3
    x1.cls   says 3: of slot 0       1        none, or the folder's where no key has a class
    x3.cls   says 3: kept            2         3
    x3.jpg   slot 2
"""

from __future__ import annotations

import logging
import os
import re
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.store.write.sources.source import FolderTree, SourceClasses, label_map

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

_LOG = logging.getLogger(__name__)

MAX_CLASS_BYTES = 255
MAX_CLASS_NUMBER = 1 << 20  # each number up to the largest has an entry in the index
_MAX_KEYS = 200_000  # of an archive that are remembered
_MAX_OPEN_SLOTS = 1 << 20  # before the first class: archives without classes take no more
_NUMBER = re.compile(rb"-?\d+")
_NONE = -1


@dataclass(frozen=True, slots=True)
class ArchiveMember:
    """A file of an archive; `body` is a file when it is large.

    Of a member that is only located, `body` is that of a class and otherwise empty, and `offset`
    says where its bytes lie in the archive.
    """

    name: bytes
    body: bytes | IO[bytes]
    length: int
    mode: int
    mtime_ns: int
    archive: int
    offset: int = 0

    @property
    def class_name(self) -> bytes | None:
        """The class that a ``.cls`` member names; None if it cannot be one."""
        name = self.body.strip() if isinstance(self.body, bytes) else b""
        return name if 0 < len(name) <= MAX_CLASS_BYTES and b"\0" not in name else None


class MemberClasses:
    """Learns the class of each key. Memory: 4 bytes for each key, and the keys of an archive.

    Call `label` or `name` for each member, in their order, and `end` after each archive.

    Args:
        where: what the archives are, for messages.
        tree: knows the labels of folders, which count where no key has a class.
    """

    def __init__(self, where: str, tree: FolderTree) -> None:
        self._where = where
        self._tree = tree
        self._numbers: dict[bytes, int] = {}  # of each class, as first seen
        self._shared: dict[int, int] = {}  # class to the slot of keys whose class came first
        self._slots = array("i")  # class of each slot, or -1 - n for the folder labelled n - 1
        self._keys: dict[bytes, int] = {}  # of this archive, to their slots
        self._early: dict[bytes, ArchiveMember] = {}  # classes whose members have not come
        self._has_forgotten = False  # a key of this archive
        self._unnamed: Counter[str] = Counter()  # keys without a class by archive
        self._first_unnamed: list[bytes] = []

    def label(self, key: bytes, member: bytes) -> int:
        """Return the label of a member that is no class; `key` may be empty.

        Raises:
            UsageError: what its ``.cls`` member says is no class.
        """
        folder = self._tree.label(member)
        if not key:
            return folder
        slot = self._keys.get(key)
        if slot is None:
            early = self._early.pop(key, None)
            if early is not None:
                slot = self._shared_slot(self._number(early))
            elif self._numbers or len(self._slots) < _MAX_OPEN_SLOTS:
                slot = self._new_slot(-2 - folder)
            else:
                self._has_forgotten = True
                return folder
            self._remember(key, slot)
        return -2 - slot

    def name(self, key: bytes, member: ArchiveMember) -> None:
        """Note the class of a key.

        Raises:
            UsageError: it is no class, or the key has another one.
        """
        slot = self._keys.get(key)
        if slot is None:
            early = self._early.setdefault(key, member)
            if early.class_name != member.class_name:
                raise self._contradicts(early.class_name, member)
            return
        number, before = self._number(member), self._slots[slot]
        if before >= 0 and before != number:
            raise self._contradicts(list(self._numbers)[before], member)
        self._slots[slot] = number

    def end(self, archive: str) -> Iterable[ArchiveMember]:
        """Finish an archive; return its ``.cls`` members that are files like others.

        Raises:
            UsageError: members of a class may have been forgotten.
        """
        early = list(self._early.values())
        unnamed = [key for key, slot in self._keys.items() if self._slots[slot] < 0]
        has_classes = len(unnamed) < len(self._keys)
        if early and self._has_forgotten:
            raise UsageError(
                f"{_shown(early[0].name)} stands too far from the members that it names",
                where=archive,
                why=f"the last {_MAX_KEYS:,} keys of an archive are remembered",
                fix="Make the archive with the members of each sample side by side",
            )
        if unnamed:
            self._unnamed[archive] += len(unnamed)
            self._first_unnamed = self._first_unnamed or unnamed[:3]
        self._keys.clear()
        self._early.clear()
        self._has_forgotten = False
        if early and has_classes:
            _LOG.warning(
                "%s: %s .cls member(s) name the class of no sample (%s)",
                archive,
                f"{len(early):,}",
                ", ".join(_shown(member.name) for member in early[:3]),
            )
            return ()
        return early

    def classes(self) -> SourceClasses:
        """Return the classes that were named, and the label of each slot.

        Raises:
            UsageError: a number is too large for a label.
        """
        if not self._numbers:
            return self._of_folders()
        if self._unnamed:
            _LOG.warning(
                "%s sample(s) of %s have no .cls member and the label -1 (%s)",
                f"{self._unnamed.total():,}",
                " and ".join(list(self._unnamed)[:2]),
                ", ".join(_shown(key) for key in self._first_unnamed),
            )
        first_seen = list(self._numbers)
        are_numbers = all(_NUMBER.fullmatch(name) for name in first_seen)
        if are_numbers:
            labels = np.array([self._checked(name) for name in first_seen], np.int64)
            ordered = [b"%d" % number for number in range(int(labels.max()) + 1)]
        else:
            ordered = sorted(first_seen)
            labels = label_map(first_seen, ordered)[:-1].astype(np.int64)
        slots = np.frombuffer(self._slots, np.int32)
        of_slot = np.where(slots >= 0, np.append(labels, _NONE)[slots], _NONE).astype(np.int32)
        none = np.full(self._tree.count(), _NONE, np.int32)
        return SourceClasses(ordered, _by_label(none, of_slot), are_numbers)

    def _of_folders(self) -> SourceClasses:
        of_folders = self._tree.classes()
        assert of_folders.label_map is not None
        by_number = of_folders.label_map  # its last is that of -1
        slots = np.frombuffer(self._slots, np.int32)
        return SourceClasses(of_folders.names, _by_label(by_number[:-1], by_number[-2 - slots]))

    def _checked(self, name: bytes) -> int:
        number = int(name)
        if not _NONE <= number < MAX_CLASS_NUMBER:
            raise UsageError(
                f"a .cls member says {number}, which is no label",
                where=self._where,
                why=f"a label is -1, for no class, or from 0 to {MAX_CLASS_NUMBER - 1:,}",
                fix="Number the classes from 0, or give them names",
            )
        return number

    def _number(self, member: ArchiveMember) -> int:
        name = member.class_name
        if name is None:
            raise UsageError(
                f"{_shown(member.name)} names no class",
                where=self._where,
                why=f"a .cls member holds one class in at most {MAX_CLASS_BYTES} bytes",
                fix="Correct the archive",
            )
        return self._numbers.setdefault(name, len(self._numbers))

    def _shared_slot(self, number: int) -> int:
        slot = self._shared.get(number)
        if slot is None:
            slot = self._shared[number] = self._new_slot(number)
        return slot

    def _new_slot(self, value: int) -> int:
        self._slots.append(value)
        return len(self._slots) - 1

    def _remember(self, key: bytes, slot: int) -> None:
        if len(self._keys) >= _MAX_KEYS:
            del self._keys[next(iter(self._keys))]
            self._has_forgotten = True
        self._keys[key] = slot

    def _contradicts(self, before: bytes | None, member: ArchiveMember) -> UsageError:
        return UsageError(
            f"{_shown(member.name)} names a second class",
            where=self._where,
            why=f"its key is {_shown(before or b'')} already",
            fix="Give each sample of the archive one .cls member",
        )


def _by_label(of_folders: NDArray[np.int32], of_slots: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return an array whose index is a label: of a folder, of none, or -2 - slot."""
    return np.concatenate([of_folders, of_slots[::-1], np.array([_NONE], np.int32)])


def _shown(name: bytes) -> str:
    return repr(os.fsdecode(name)[:200])
