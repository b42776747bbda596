"""Random numbers of transforms: other ones on each rank.

A script that seeds all ranks alike, as most do, would have all of them augment alike. Worker
processes are seeded by their rank. Threads share the generators of the script, which must stay as
the script seeded them: ranks may rely on equal draws.
"""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_LOG = logging.getLogger(__name__)


def seed_worker(rank: int, worker: int) -> None:
    """Seed the generators of a worker process, which torch seeded alike on all ranks.

    Called by torch's DataLoader in worker `worker`. Rank 0 keeps torch's own seeds.
    """
    del worker  # is part of the seed already
    if not rank:
        return
    seed = int(np.random.SeedSequence([torch.initial_seed(), rank]).generate_state(1, np.uint64)[0])
    torch.manual_seed(seed)
    random.seed(seed)  # noqa: TID251  # those of transforms, as the next
    np.random.seed(seed % 2**32)  # noqa: TID251


def saying_draws(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the same transform, which logs a warning if it draws from a global generator."""

    def watched(item: Any) -> Any:
        before = _states()
        made = transform(item)
        after = _states()
        drawn = [name for name in before if before[name] != after[name]]
        if drawn:
            _LOG.warning(
                "the transform draws from the generator of %s, which ranks that are seeded alike "
                "draw from alike: seed it by rank, or use LoaderOptions(worker_kind='process'), "
                "whose workers are",
                " and of ".join(drawn),
            )
        return made

    return watched


def _states() -> dict[str, Any]:
    of_numpy: Any = np.random.get_state()
    return {
        "numpy.random": (of_numpy[1].tobytes(), of_numpy[2]),
        "random": random.getstate(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
