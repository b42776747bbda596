"""Gives each rank's events the steps of the training loop, one rank in memory at a time.

What ends a step is decided for all ranks together: whether their collectives repeat
(`repetition`), and which optimizer steps came with a batch (`steps`). So traces are read more than
once: first for what the decision needs, then to apply it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.trace.merge.blocking import add_waits
from paceline.trace.merge.evaluation import find_evaluations
from paceline.trace.merge.repetition import common_repetition, mark_repetition
from paceline.trace.merge.steps import join_steps, shared_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paceline.trace.format.files import RankTrace

    Source = Callable[[], RankTrace]  # reads a trace, each time anew


def prepared(sources: Sequence[Source]) -> Iterator[RankTrace]:
    """Yield the traces with their steps, evaluations and waits, in the order of `sources`.

    Args:
        sources: of all ranks; each is called two to four times.
    """
    repetition = common_repetition(source() for source in sources)
    if repetition is not None:
        marked = (mark_repetition(source(), repetition) for source in sources)
        if any(rank is None for rank in marked):
            repetition = None

    def read(source: Source) -> RankTrace:
        rank = add_waits(source())
        marked = None if repetition is None else mark_repetition(rank, repetition)
        return rank if marked is None else marked

    batches = shared_batches(read(source) for source in sources)
    for source, has_batch in zip(sources, batches, strict=True):
        yield find_evaluations(join_steps(read(source), has_batch))
