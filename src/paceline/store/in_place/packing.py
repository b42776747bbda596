"""Packs data that can be read in place: LMDB databases and TFRecord files as sources."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from paceline.store.in_place.find import find_data
from paceline.store.in_place.lmdb import LmdbData
from paceline.store.in_place.opening import open_pack
from paceline.store.in_place.tfrecord import TfRecordData
from paceline.store.write.pack import find_source as find_files
from paceline.store.write.sources.archive_paths import find_archives
from paceline.store.write.sources.samples import Samples

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.store.write.sources.archives import Archives
    from paceline.store.write.sources.folder import Folder


def find_source(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
) -> Folder | Archives | Samples:
    """Return what `paths` name: archives, one LMDB database, TFRecord files, or one folder.

    Packing a database or TFRecord files makes their index first (docs/guides/in-place.md), and
    cannot resume.

    Raises:
        NotFound: nothing matches a pattern.
        UsageError: several paths, and not all are archives; or data that cannot be read in place.
    """
    named = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if len(named) == 1 and not find_archives([os.fspath(named[0])]):
        data = find_data(named[0])
        if isinstance(data, LmdbData | TfRecordData):
            return Samples(_samples(named[0]), where=os.fspath(named[0]))
    return find_files(named)


def _samples(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, bytes]]:
    with open_pack(path) as pack:
        for sample in range(len(pack)):
            yield pack.index.name(sample), pack.read(sample)
