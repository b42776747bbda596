"""Finds what a path names: data in place, by what lies there, or else a pack."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import os_errors_as
from paceline.store.format.layout import (
    INDEX_NAME,
    NUMBERED,
    PARTIAL_SUFFIX,
    SIDE_SUFFIX,
    UNFINISHED,
    is_of_side_file,
)
from paceline.store.in_place.archives import ArchivesData
from paceline.store.in_place.data import unreadable
from paceline.store.in_place.files import FilesData
from paceline.store.in_place.lmdb import LMDB_FILE, LmdbData, is_lmdb
from paceline.store.in_place.tfrecord import TfRecordData, is_tfrecord
from paceline.store.write.sources.archive_paths import expand, is_archive

if TYPE_CHECKING:
    from paceline.store.in_place.data import DataInPlace


def find_data(
    named: str | os.PathLike[str], *, allow_truncated: bool = False
) -> DataInPlace | None:
    """Return the data in place that a path or pattern names; None: a pack, or nothing.

    Args:
        named: path or pattern.
        allow_truncated: a TFRecord file that ends amid a record ends with the record before it.

    Raises:
        NotFound: nothing matches a pattern, or there is no such file.
        UsageError: the data are compressed.
        StorageError: they cannot be read.
    """
    where = os.fspath(named)
    path = Path(os.path.abspath(where))  # noqa: PTH100  # keeps links as the user wrote them
    with os_errors_as(lambda problem: unreadable(path, problem)):
        try:
            mode = path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError, ValueError):
            matches = [match for match in expand(where) if not is_of_side_file(match)] or [where]
            paths = [Path(os.path.abspath(match)) for match in matches]  # noqa: PTH100  # as above
            return _of_files(paths, where, to_cut=allow_truncated)
        if stat.S_ISDIR(mode):
            return _in_folder(path, where, to_cut=allow_truncated)
        if stat.S_ISREG(mode) and is_lmdb(path):
            return LmdbData(path, where)
    return _of_files([path], where, to_cut=allow_truncated)


def _in_folder(path: Path, where: str, *, to_cut: bool) -> DataInPlace | None:
    if os.path.lexists(path / INDEX_NAME) or path.resolve().name.endswith(PARTIAL_SUFFIX):
        return None
    names = sorted(os.listdir(path))  # noqa: PTH208  # of names only
    if not names or any(NUMBERED.fullmatch(name) or UNFINISHED.fullmatch(name) for name in names):
        return None  # files of a pack that has lost its index
    if LMDB_FILE in names and is_lmdb(path / LMDB_FILE):
        return LmdbData(path / LMDB_FILE, where)
    names = [name for name in names if not is_of_side_file(name)]
    if not names:
        return None
    paths = [path / name for name in names]
    return _of_files(paths, where, path, to_cut=to_cut) or FilesData(path, where)


def _of_files(
    paths: list[Path], where: str, folder: Path | None = None, *, to_cut: bool
) -> DataInPlace | None:
    """Return the data in files of one kind; None if they are of no kind, or of several."""
    side_file = _side_file(paths[0] if folder is None else folder, where, count=len(paths))
    if all(is_archive(path.name) for path in paths):
        return ArchivesData(paths, where, side_file)
    if all(map(is_tfrecord, paths)):
        return TfRecordData(paths, where, side_file, to_cut=to_cut)
    return None


def _side_file(path: Path, where: str, *, count: int) -> Path:
    """Return where the side file of some files lies: beside the first, named as the user did."""
    is_pattern = count > 1 and path.name != Path(where).name
    name = Path(where).name if is_pattern else path.name
    return path.with_name(name + SIDE_SUFFIX)
