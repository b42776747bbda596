"""The runs of a sweep that correct predictions: what a scaling profile names, as folders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import NotFound
from paceline.core.scaling_profile import is_profile, read_profile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def planned_runs(paths: Iterable[Path]) -> tuple[Path, ...]:
    """Return the folders of runs: those given, and in place of a profile those that it names.

    Args:
        paths: folders of runs, scaling profiles, or folders of sweeps.

    Raises:
        NotFound: a profile names no run whose plan has a prediction.
        ConfigError: a profile cannot be read.
    """
    found: list[Path] = []
    for path in paths:
        if not is_profile(path):
            found.append(path)
            continue
        profile = read_profile(path)
        folder = path if path.is_dir() else path.parent
        # Fewest ranks first: figures of a rank alone do not depend on what ranks share.
        points = sorted(
            (point for curve in profile.curves for point in curve.points if point.run),
            key=lambda point: point.ranks,
        )
        if not points:
            raise NotFound(
                "no run of the sweep followed a plan with a prediction",
                where=str(path),
                why="the machine was not probed before, or the sweep was predicted itself",
                fix="Run `paceline probe`, and the sweep once more, of a script with --step",
            )
        found += [folder / point.run for point in points]
    return tuple(found)
