"""Parity files: the exclusive or of a group of shards, from which one lost shard is rebuilt.

Reading never needs parity files. They are written after the shards, and verified by their digests.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from typing import TYPE_CHECKING

import numpy as np

from paceline.store.format.layout import (
    HEADER_BYTES,
    FileMagic,
    file_header,
    parity_name,
    shard_name,
)
from paceline.store.write.files import FileDigest

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.store.write.files import PackFolder

_BLOCK_BYTES = 4 << 20


def write_parity(folder: PackFolder, group: int, shards: range, name: str) -> FileDigest:
    """Write the parity of the `group`-th shards as the file `name`; return length and digest.

    Cost: reads each shard once; memory for two blocks of 4 MiB.
    """
    file = folder.create(name)
    digest = hashlib.sha256()

    def write(data: bytes | memoryview) -> None:
        file.write(data)
        digest.update(data)

    write(file_header(FileMagic.PARITY, group))
    with ExitStack() as stack:
        files = [stack.enter_context(_shard(folder.folder, k).open("rb")) for k in shards]
        while True:
            total = np.zeros(_BLOCK_BYTES, np.uint8)
            length = 0
            for shard in files:
                block = np.frombuffer(shard.read(_BLOCK_BYTES), np.uint8)
                total[: len(block)] ^= block
                length = max(length, len(block))
            if not length:
                break
            write(total[:length].data)
    folder.close(file)
    return FileDigest(file.length, digest.digest())


def groups(shard_count: int, group_size: int) -> list[range]:
    """Return the shards of each group.

    >>> groups(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    starts = range(0, shard_count, group_size)
    return [range(k, min(k + group_size, shard_count)) for k in starts]


def write_all_parity(folder: PackFolder, shard_count: int, group_size: int) -> list[FileDigest]:
    """Write the parity of all groups of shards; return length and digest of each file."""
    return [
        write_parity(folder, k, shards, parity_name(k))
        for k, shards in enumerate(groups(shard_count, group_size))
    ]


def parity_length(shard_lengths: list[int]) -> int:
    """Return the length of the parity file of shards of these lengths."""
    return HEADER_BYTES + max(shard_lengths)


def _shard(folder: Path, shard: int) -> Path:
    return folder / shard_name(shard)
