"""How many bytes a run's collectives and messages moved, and how fast, without waiting.

The transfer of a collective lasts from the time at which its last rank entered to the time at which
the last rank had its result. Time that a collective is queued after earlier collectives counts as
transfer, since no rank can tell the two apart. Collectives are grouped by operation, path, process
group and size, so that each of these can be compared with the bandwidth of the machine's links.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import RECV, SEND
from paceline.trace.merge.keys import row_ids
from paceline.trace.merge.matches import NONE

if TYPE_CHECKING:
    from paceline.trace.merge.matches import Matches


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic(Record):
    """Collectives, or messages, of one operation, group and size class.

    Attributes:
        operation: name of the operation, for example ``all_reduce``; ``send`` for messages.
        group: name of the process group.
        ranks: largest number of ranks that took part in one of the collectives.
        size_class_bytes: the power of two that no collective of the class exceeds; 0 for
            collectives without data.
        count: number of collectives, each counted once and not per rank.
        bytes: input bytes of one rank, summed over these collectives, the mean over ranks.
        typical_bytes: input bytes of one rank in one collective, the median over collectives.
        transfer_s: time from the last rank's entry to the last completion, the median over
            collectives whose completion was seen; 0 if no completion was seen.
        spread_s: time from the first rank's entry to the last rank's entry, the median.
        untimed_count: number of collectives whose completion was not seen, because the backend
            reports it when work is queued on a device.
        path: by which a backend that says so moved the data, for example ``shared memory``.
    """

    operation: str
    group: str
    ranks: int
    size_class_bytes: int
    count: int
    bytes: int
    typical_bytes: float
    transfer_s: float
    spread_s: float
    untimed_count: int = 0
    path: str = ""

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Input bytes of one rank over the transfer time; None if no bytes were transferred."""
        if not self.typical_bytes or self.transfer_s <= 0:
            return None
        return self.typical_bytes / self.transfer_s


# One row per collective or message, not per rank.
_TRANSFER = np.dtype(
    [
        ("transfer_ns", "<i8"),
        ("spread_ns", "<i8"),
        ("largest", "<i8"),
        ("mean", "<f8"),
        ("group", "<i4"),
        ("operation", "<i4"),
        ("path", "<i4"),
        ("ranks", "<i4"),
        ("timed", "?"),
    ]
)


def traffic(matches: Matches) -> tuple[Traffic, ...]:
    """Return the run's collectives and messages by operation, path, group and size.

    The costliest come first.

    Collectives on which ranks do not agree are left out.
    """
    operations = (*matches.operations, SEND, RECV)
    rows = np.concatenate([_collectives(matches), _messages(matches, len(matches.operations))])
    if not len(rows):
        return ()
    sizes = size_classes_bytes(rows["largest"])
    ids = row_ids(rows["operation"], rows["path"], rows["group"], sizes)
    order = np.argsort(ids, kind="stable")
    classes = np.split(order, np.flatnonzero(np.diff(ids[order])) + 1)
    found = [
        _of_class(
            rows[members],
            operations[rows["operation"][members[0]]],
            matches.paths[rows["path"][members[0]]],
            matches.groups[rows["group"][members[0]]].name,
            int(sizes[members[0]]),
        )
        for members in classes
    ]
    return tuple(sorted(found, key=lambda line: -line.count * line.transfer_s))


def size_classes_bytes(amounts: np.ndarray) -> np.ndarray:
    """Return for each number of bytes the smallest power of two that is not less; 0 for 0 bytes.

    >>> size_classes_bytes(np.array([0, 1, 4, 5])).tolist()
    [0, 1, 4, 8]
    """
    _, exponents = np.frexp(np.maximum(amounts - 1, 0).astype(np.float64))
    return np.where(amounts > 0, np.left_shift(np.int64(1), exponents.astype(np.int64)), 0)


def _collectives(matches: Matches) -> np.ndarray:
    instances = matches.instances[matches.instances["agrees"]]
    rows = np.zeros(len(instances), _TRANSFER)
    rows["transfer_ns"] = np.maximum(0, instances["complete_ns"] - instances["last_ns"])
    rows["spread_ns"] = instances["last_ns"] - instances["first_ns"]
    for field in ("largest", "mean", "group", "operation", "path", "ranks", "timed"):
        rows[field] = instances[field]
    return rows


def _messages(matches: Matches, first_operation: int) -> np.ndarray:
    """Return one row per message: as a send if both sides are known, otherwise as recorded."""
    messages = matches.messages
    chosen = np.flatnonzero(messages["sends"] | (messages["partner"] == NONE))
    own, partners = messages[chosen], messages["partner"][chosen]
    other = messages[np.where(partners == NONE, chosen, partners)]
    last_ns = np.maximum(own["enter_ns"], other["enter_ns"])
    rows = np.zeros(len(chosen), _TRANSFER)
    rows["transfer_ns"] = np.maximum(0, np.maximum(own["exit_ns"], other["exit_ns"]) - last_ns)
    rows["spread_ns"] = last_ns - np.minimum(own["enter_ns"], other["enter_ns"])
    rows["largest"] = np.maximum(own["amount"], other["amount"])
    rows["mean"] = (own["amount"] + other["amount"]) / 2
    rows["group"] = own["group"]
    rows["operation"] = np.where(own["sends"], first_operation, first_operation + 1)
    rows["ranks"] = np.where(partners == NONE, 1, 2)
    rows["timed"] = own["timed"] & other["timed"]
    return rows


def _of_class(rows: np.ndarray, operation: str, path: str, group: str, size: int) -> Traffic:
    timed = rows["transfer_ns"][rows["timed"]]
    return Traffic(
        operation=operation,
        path=path,
        group=group,
        ranks=int(rows["ranks"].max()),
        size_class_bytes=size,
        count=len(rows),
        bytes=round(float(rows["mean"].sum())),
        typical_bytes=float(np.median(rows["mean"])),
        transfer_s=float(np.median(timed)) / 1e9 if len(timed) else 0.0,
        spread_s=float(np.median(rows["spread_ns"])) / 1e9,
        untimed_count=len(rows) - len(timed),
    )
