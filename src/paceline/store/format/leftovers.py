"""Files that a killed append or repair left in the folder of a pack.

An append renames the index first and the parity files after it: parity files that are not renamed
yet are pending, not stale. Other files that no index names are stale: the next writer removes them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from paceline.store.format.layout import NUMBERED, PARTIAL_SUFFIX, UNFINISHED, parity_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from paceline.store.format.index import IndexFile


def file_digest(path: Path) -> bytes:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def pending_parity(folder: Path, index: IndexFile) -> Iterator[int]:
    """Yield the parity files that the index names and an append had not renamed yet."""
    for number, expected in enumerate(index.parity_digests):
        waiting = folder / (parity_name(number) + PARTIAL_SUFFIX)
        if waiting.is_file() and file_digest(waiting) == expected:
            yield number


def stale_files(names: Iterable[str], index: IndexFile) -> list[str]:
    """Return which of the files `names` belong to no version of the pack."""
    counts = {"shard": len(index.shard_lengths), "parity": len(index.parity_digests)}
    stale = []
    for name in sorted(names):
        numbered = NUMBERED.fullmatch(name)
        is_beyond = numbered is not None and int(numbered[2]) >= counts[numbered[1]]
        if is_beyond or UNFINISHED.fullmatch(name):
            stale.append(name)
    return stale
