"""Which value each step has: a function of the number of the step, so that all ranks agree.

::

    warm-up | block | block | block | block | ...        pairs of blocks, each in an order by lot
               B       A       A       B
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from paceline.core.randomness import make_generator

if TYPE_CHECKING:
    from paceline.launch.tuning.paired_test import TuneRules


class TunedBlock(NamedTuple):
    """The place of a step in the schedule.

    Attributes:
        pair: number of the pair.
        value: 0 for the first value, 1 for the second.
        step: number of the step in the block.
        is_last: of the pair, the last block.
    """

    pair: int
    value: int
    step: int
    is_last: bool


def block_of(step: int, rules: TuneRules, seed: int) -> TunedBlock | None:
    """Return the place of a step; None in the warm-up, and after the last pair.

    Args:
        step: its number, from 0.
        rules: of the test.
        seed: of the orders, the same on all ranks.
    """
    number, within = divmod(step - rules.warm_up_steps, rules.block_steps)
    pair, second = divmod(number, 2)
    if step < rules.warm_up_steps or pair >= rules.most_pairs:
        return None
    begins_with = int(make_generator(seed, "tune", pair).integers(2))
    return TunedBlock(pair, (begins_with + second) % 2, within, bool(second))
