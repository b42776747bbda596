"""The findings and actions of a repair, as records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from paceline.core.record import Record


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairFinding(Record):
    """Something that was wrong.

    Attributes:
        what: sample, shard, parity file or index.
        file: name of the file that holds it.
        why: what was wrong with it.
        recovered_from: source, replica, parity, index, shards, or append (the file that a killed
            append had written but not put in place); empty = it could not be repaired.
    """

    version: ClassVar[int] = 2

    what: str
    file: str
    why: str
    recovered_from: str

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 called `recovered_from` `mended_from`."""
        assert from_version == 1
        return {"recovered_from": data.pop("mended_from"), **data}


@dataclass(frozen=True, kw_only=True, slots=True)
class RepairReport(Record):
    """Findings and actions of `repair_pack`; with `dry_run` the actions it would take.

    Attributes:
        path: path of the pack.
        identity: identity of the pack.
        dry_run: whether nothing was written.
        repaired: what was damaged and is intact again.
        lost: what could not be repaired.
        stale_files: names of files that belonged to no version of the pack and were removed.
    """

    version: ClassVar[int] = 2

    path: str
    identity: str
    dry_run: bool
    repaired: tuple[RepairFinding, ...]
    lost: tuple[RepairFinding, ...]
    stale_files: tuple[str, ...]

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 called `repaired` `mended`, and `stale_files` `litter`."""
        assert from_version == 1
        repaired, stale_files = data.pop("mended"), data.pop("litter")
        return {"repaired": repaired, "stale_files": stale_files, **data}

    @property
    def ok(self) -> bool:
        """Whether the pack is intact afterwards."""
        return not self.lost


class Findings:
    """Collects findings while a repair runs."""

    def __init__(self) -> None:
        self.repaired: list[RepairFinding] = []
        self.lost: list[RepairFinding] = []

    def note(self, what: str, file: str, why: str, recovered_from: str) -> None:
        """Add what was wrong; with an empty `recovered_from` it is lost."""
        finding = RepairFinding(what=what, file=file, why=why, recovered_from=recovered_from)
        (self.repaired if recovered_from else self.lost).append(finding)
