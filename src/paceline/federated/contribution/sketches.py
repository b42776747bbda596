"""Short random projections of updates, so that the gate can remember many rounds of them.

Each parameter is added, with a random sign, to one of `size` buckets. Inner products survive:

    <sketch(x), sketch(y)> = <x, y>  +-  |x| |y| / sqrt(size)      (one standard deviation)

so that with 4096 buckets a cosine is known to 0.016, for 16 KiB per update whatever the model.
The seed is the server's secret: a client that knew it could make updates whose sketches look
unrelated although they are copies.
Source: M. Charikar et al., Finding Frequent Items in Data Streams, ICALP 2002; K. Weinberger et
al., Feature Hashing for Large Scale Multitask Learning, ICML 2009, lemma 2.
"""

from __future__ import annotations

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.randomness import make_generator

_CHUNK = 1 << 18


class Sketcher:
    """Projects vectors of `parameters` values to `size`; 5 bytes per parameter.

    Args:
        parameters: of the model.
        size: buckets.
        seed: secret of the server; the same one for all sketches that are compared.
    """

    def __init__(self, parameters: int, *, size: int, seed: int) -> None:
        if parameters < 1 or size < 1:
            raise UsageError(
                f"{parameters} parameters cannot be sketched in {size} buckets",
                where="sketch",
                fix="Give 1 or more of both",
            )
        rng = make_generator(seed, "sketch")
        self.parameters, self.size = parameters, size
        self._bucket = rng.integers(0, size, parameters, dtype=np.int32)
        self._sign = rng.integers(0, 2, parameters, dtype=np.int8) * np.int8(2) - np.int8(1)

    def sketch(self, delta: np.ndarray) -> np.ndarray:
        """Return the sketch of a vector; float32, shape (size,)."""
        total = np.zeros(self.size)
        for begin in range(0, self.parameters, _CHUNK):
            part = slice(begin, begin + _CHUNK)
            signed = delta[part] * self._sign[part]
            total += np.bincount(self._bucket[part], weights=signed, minlength=self.size)
        return total.astype(np.float32)
