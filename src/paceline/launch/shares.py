"""The shares of a batch with which rebalancing begins: ``paceline run --shares``."""

from __future__ import annotations

from pathlib import Path

from paceline.core.errors import UsageError
from paceline.runs.folder import RunFolder

_RANGE = (0.1, 10.0)  # of speeds, over their mean: beyond it something else is meant


def parse_shares(text: str, ranks: int) -> tuple[float, ...]:
    """Return the ranks' speeds, in any unit; empty for an empty text.

    Args:
        text: speeds separated by commas, or the folder of a run.
        ranks: of the run.

    Raises:
        UsageError: there are not as many as ranks, one is not a speed, or the run has none.
        NotFound: there is no such folder.
    """
    if not text:
        return ()
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = _speeds_of_run(Path(text))
    if len(speeds) != ranks:
        raise UsageError(
            f"{len(speeds)} shares are given for {ranks} ranks",
            where=f"--shares {text}",
            fix="Give the speed of each rank, as --shares 1,0.6",
        )
    mean = sum(speeds) / len(speeds)
    if not all(_RANGE[0] * mean <= speed <= _RANGE[1] * mean for speed in speeds):
        raise UsageError(
            "a share is not between a tenth and ten times the mean",
            where=f"--shares {text}",
            fix="Give speeds above 0, as --shares 1,0.6",
        )
    return speeds


def _speeds_of_run(folder: Path) -> tuple[float, ...]:
    result = RunFolder.open(folder).read_result()
    if result is None or result.balance is None or not result.balance.samples:
        raise UsageError(
            "the run has no shares",
            where=f"--shares {folder}",
            why="it was not rebalanced, or its shares stayed equal",
            fix="Give the speeds of the ranks, as --shares 1,0.6, or leave the option out",
        )
    return tuple(float(samples) for samples in result.balance.samples)
