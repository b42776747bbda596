"""Reads data in place once and adds the checksums of their samples to the side file.

LMDB and tar verify nothing. From then on, each sample is compared with what it was at this time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import DataChanged, UsageError
from paceline.store.in_place.find import find_data
from paceline.store.in_place.indexing_lock import IndexingLock
from paceline.store.in_place.side_file import SideFolder, writing_side_file
from paceline.store.write.index.build import IndexMetadata
from paceline.store.write.index.sorted_runs import sorted_run_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.store.read.pack import Pack

_SAMPLES = 256  # per call: short enough for Ctrl-C and progress


def add_checksums(pack: Pack, on_progress: Callable[[int, int], None] | None = None) -> None:
    """Read all samples of data in place and keep their checksums in the side file.

    `pack` goes on without them; opened again, the data are verified.

    Args:
        pack: data in place; nothing is done if they have checksums.
        on_progress: called with the samples read so far and their total.

    Raises:
        UsageError: it is a pack, which has checksums.
        DataChanged: the data were written to since they were indexed.
        StorageError: they cannot be read, or the side file cannot be written.
        DeadlineExceeded: another process makes the side file, and does not end.
    Cost: reads all samples; 4 bytes of memory for each.
    """
    place, sources = pack.side_file, pack.index.sources
    data = find_data(pack.path)
    if place is None or sources is None or data is None:
        raise UsageError(
            "a pack has checksums", where=str(pack.path), fix="Verify it: paceline store verify"
        )
    if pack.is_verified:
        return
    total = len(pack)
    checksums = np.zeros(total, np.uint32)
    for first in range(0, total, _SAMPLES):
        end = min(first + _SAMPLES, total)
        checksums[first:end] = pack.checksums(first, end)
        if on_progress is not None:
            on_progress(end, total)
    index = pack.index
    index.check()
    known = sorted_run_of(index, place)
    metadata = IndexMetadata(
        folders=index.folder_names,
        classes=index.class_names,
        shard_lengths=index.shard_lengths.tolist(),
        shard_digests=[],
        sources=sources,
    )
    run = replace(known, extents=replace(known.extents, checksums=checksums))
    with writing_side_file(place), IndexingLock(place) as lock:
        lock.wait()
        difference = sources.difference(data.sources(place.parent))
        if difference:
            raise DataChanged(
                "the data was changed while it was read",
                where=str(pack.path),
                why=difference,
                fix="Verify it when no other program writes to it",
            )
        with SideFolder(lock) as folder:
            folder.put([run], metadata, data.access(metadata.folders), durable=True)
