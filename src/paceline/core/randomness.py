"""Randomness as an argument: one seed, and a stream of its own for each use.

Streams are independent, and adding one leaves the others as they are, so that a run can be
replayed piece by piece.
"""

from __future__ import annotations

import hashlib

import numpy as np


def make_generator(seed: int, *stream: str | int) -> np.random.Generator:
    """Return the generator of a named stream: a pure function of the seed and the names.

    Args:
        seed: of the run.
        stream: name of the use, for example ``"bootstrap", 3``.

    Source: Philox4x64, J. Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
    """
    text = "\0".join(map(str, (seed, *stream)))
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=key))
