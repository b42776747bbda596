"""The axes of a sweep, and the cells that their values make.

One change at a time: the first value of each axis makes the baseline; every other value is combined
with the baseline's other values. So k axes of v values take 1 + k (v - 1) combinations instead of
v^k, and each effect is a comparison with one and the same baseline. `cross` combines all values,
for effects that depend on each other. Each combination is run on every number of ranks.

A program gets a setting where its arguments have the axis's name in braces::

    paceline characterize train.py --batch 16,32 -- --batch-size {batch} --json {result}
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.record import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BATCH, WORKERS, CHECKPOINTING, PRECISION = "batch", "loader_workers", "checkpointing", "precision"
AXES = ("model", BATCH, "storage", WORKERS, "optimizer", "compression", PRECISION, CHECKPOINTING)
# Other names that arguments may have in braces.
RANKS, EPOCHS, REPEAT, RESULT = "ranks", "epochs", "repeat", "result"
_UNFIT = re.compile(r"[^\w.+=-]+")  # for the name of a folder, and a column of a CSV
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A combination of settings, and a number of ranks.

    Attributes:
        name: of the settings, for example ``cnn-batch32-files``.
        ranks: of the job.
        settings: values by the axis's name.
    """

    name: str
    ranks: int
    settings: Mapping[str, str]

    @property
    def key(self) -> str:
        """What identifies the cell in a sweep, and names its files."""
        return f"{self.name}-ranks{self.ranks}"

    @property
    def words(self) -> str:
        """The cell for people."""
        return f"{self.name} on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"


def make_cells(
    program: str,
    axes: Mapping[str, Sequence[str]],
    ranks: Sequence[int],
    *,
    cross: bool = False,
) -> tuple[Cell, ...]:
    """Return the cells of a sweep, those of the baseline first.

    Args:
        program: begins the names of cells where no axis ``model`` does.
        axes: values by the axis's name, the baseline's first.
        ranks: numbers of ranks.
        cross: combine all values with each other, not only with the baseline.

    Raises:
        UsageError: an axis has no value or one twice, or two combinations have the same name.
    """
    asked: dict[str, Sequence[str]] = {**axes, RANKS: tuple(map(str, ranks))}
    for name, values in asked.items():
        if not values or len(set(values)) < len(values):
            raise UsageError(
                f"the axis {name} has the values {', '.join(values) or 'none'}",
                where="paceline characterize",
                fix="Give each value once, separated by commas",
            )
    combined = list(_combinations(axes, cross=cross))
    names = [_name(program, axes, settings) for settings in combined]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UsageError(
            f"two combinations of settings would both be called {twice}",
            where="paceline characterize",
            fix="Give values of different axes different names",
        )
    return tuple(
        Cell(name=name, ranks=count, settings=settings)
        for name, settings in zip(names, combined, strict=True)
        for count in sorted(ranks)
    )


def _combinations(axes: Mapping[str, Sequence[str]], *, cross: bool) -> Iterable[dict[str, str]]:
    if cross:
        for chosen in itertools.product(*axes.values()):
            yield dict(zip(axes, chosen, strict=True))
        return
    baseline = {axis: values[0] for axis, values in axes.items()}
    yield baseline
    for axis, values in axes.items():
        for value in values[1:]:
            yield {**baseline, axis: value}


def _name(program: str, axes: Mapping[str, Sequence[str]], settings: Mapping[str, str]) -> str:
    words = [settings.get("model", program)]
    for axis, value in settings.items():
        values = axes[axis]
        is_said = value != values[0] or (axis == BATCH and len(values) > 1)
        if axis != "model" and is_said:
            words.append(_word(axis, value))
    return _UNFIT.sub("_", "-".join(words))


def _word(axis: str, value: str) -> str:
    """Return a setting as a part of a name.

    >>> _word("batch", "32"), _word("optimizer", "lars"), _word("checkpointing", "on")
    ('batch32', 'lars', 'checkpointing')
    """
    if axis == CHECKPOINTING:
        return axis if value == "on" else f"{axis}-{value}"
    if axis in (BATCH, WORKERS):
        return f"{axis.removeprefix('loader_')}{value}"
    return value if axis in AXES else f"{axis}-{value}"


def placeholders(args: Iterable[str]) -> frozenset[str]:
    """Return the names in braces."""
    return frozenset(name for arg in args for name in _PLACEHOLDER.findall(arg))


def fill(args: Iterable[str], values: Mapping[str, str]) -> list[str]:
    """Return arguments with values in place of the names in braces.

    An argument that is nothing but a name is left out where the value is empty, so that a flag can
    be on or off.

    >>> fill(["--lr={lr}", "{amp}"], {"lr": "0.1", "amp": ""})
    ['--lr=0.1']
    """
    filled = []
    for arg in args:
        text = _PLACEHOLDER.sub(lambda match: values[match.group(1)], arg)
        if text or not _PLACEHOLDER.fullmatch(arg):
            filled.append(text)
    return filled


def check_placeholders(
    args: Sequence[str], axes: Mapping[str, Sequence[str]], *, planned: frozenset[str]
) -> None:
    """Raise an error if an axis does not reach the program, or a name in braces is unknown.

    Args:
        args: of the program.
        axes: of the sweep.
        planned: axes that reach the program by its plan.

    Raises:
        UsageError: they do not fit.
    """
    used, known = placeholders(args), {*axes, RANKS, EPOCHS, REPEAT, RESULT}
    for name in sorted(used - known):
        raise UsageError(
            f"no axis is named {{{name}}}",
            where=" ".join(args),
            fix=f"{nearest(name, known)} Other axes: --vary {name}=VALUE,VALUE",
        )
    for name in axes:
        if name not in used and name not in planned:
            raise UsageError(
                f"the axis {name} does not reach the program",
                where=" ".join(args) or "no arguments",
                fix=f"Put {{{name}}} where the program's arguments have this value, as in: "
                f"-- --{name.replace('_', '-')} {{{name}}}",
            )
