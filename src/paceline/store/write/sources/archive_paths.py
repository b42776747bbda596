"""Finds the archives that a user names: files, patterns with braces or wildcards, folders."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound
from paceline.store.format.layout import is_of_side_file
from paceline.store.write.sources.folder_scan import unreadable

if TYPE_CHECKING:
    from collections.abc import Sequence

_SUFFIX = re.compile(r"\.(tar(\.(gz|bz2|xz|zst))?|tgz|tbz2?|txz|tzst)$", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def is_archive(path: str) -> bool:
    """Return whether a path is named like a tar archive."""
    return _SUFFIX.search(path) is not None


def find_archives(paths: Sequence[str]) -> list[str]:
    """Return the archives that `paths` name; an empty list when one of them is something else.

    A path may be an archive, a pattern with braces (``train-{000..147}.tar``) or with ``*``, or a
    folder in which only archives lie.

    Raises:
        NotFound: nothing matches a pattern.
    """
    found: list[str] = []
    for path in paths:
        names = _listed(path)
        if names is not None:
            if not names or not all(is_archive(name) for name in names):
                return []
            found += [str(Path(path) / name) for name in names]
            continue
        matches = expand(path)
        if not all(is_archive(match) for match in matches):
            return []
        found += matches
    return found


def expand(path: str) -> list[str]:
    """Return the paths that a pattern with braces or wildcards stands for; of another path, itself.

    Raises:
        NotFound: nothing matches the pattern.
    """
    return [match for pattern in _expand(path) for match in _matches(pattern)]


def _listed(path: str) -> list[str] | None:
    """Return the entries of a folder, sorted, without side files; None if it is not a folder."""
    try:
        names = (entry.name for entry in Path(path).iterdir())
        return sorted(name for name in names if not is_of_side_file(name))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # packing it says so
        return None
    except OSError as problem:
        # Not passed over: read a moment later, its archives would be packed as samples.
        raise unreadable(os.fsencode(path), problem) from problem


def _matches(pattern: str) -> list[str]:
    if not glob.has_magic(pattern) or os.path.lexists(pattern):
        return [pattern]
    matches = sorted(glob.glob(pattern))  # noqa: PTH207  # a pattern
    if not matches:
        raise NotFound("nothing matches the pattern", where=pattern, fix="Check the pattern")
    return matches


def _expand(pattern: str) -> list[str]:
    """Return what a pattern with braces stands for.

    >>> _expand("a-{08..10}.tar"), _expand("{x,y}.tar")
    (['a-08.tar', 'a-09.tar', 'a-10.tar'], ['x.tar', 'y.tar'])
    """
    braces = _BRACES.search(pattern)
    if braces is None:
        return [pattern]
    inside = braces[1]
    if span := _RANGE.fullmatch(inside):
        low, high = span.groups()
        choices = [str(k).zfill(len(low)) for k in range(int(low), int(high) + 1)]
    else:
        choices = inside.split(",")
    before, after = pattern[: braces.start()], pattern[braces.end() :]
    return [path for choice in choices for path in _expand(before + choice + after)]
