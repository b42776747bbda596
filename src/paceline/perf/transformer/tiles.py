"""How well a matrix product fills a device: its tiles come in waves, of which the last is not full.

A kernel computes its result in tiles, one on each multiprocessor at a time. 600 tiles on 108
multiprocessors take six waves, in the last of which 48 stand still. Smaller tiles fill the last
wave better and read their inputs more often; a library takes the kernel that is fastest.

    waves = ceil(tiles / multiprocessors)
    factor = waves x multiprocessors x area of a tile / (area of the result x reach of the tile)

Source: NVIDIA, Matrix multiplication background, 2023, sections on tile and wave quantization; the
reach of smaller tiles is recalled.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.core.machine import Device

# Rows and columns of a tile, and what its kernel reaches of the rate of the largest ones.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.6))
# `Device.cores` of a multiprocessor: CUDA cores; of AMD's devices a core is a compute unit.
_CORES = {"v100": 64, "a100": 64, "h100": 128, "h200": 128, "h800": 128, "mi250": 1}


def multiprocessors(device: Device) -> int:
    """Return how many tiles a device computes at the same time; 0 if that is not known.

    >>> from paceline.core.machine_file import library_machine
    >>> [multiprocessors(library_machine(name).devices[0]) for name in ("selene", "dgx-h100")]
    [108, 132]
    """
    name = device.name.lower()
    for words, cores in _CORES.items():
        if words in name:
            return device.cores // cores
    return 0


@lru_cache(maxsize=4096)
def wave_factor(rows: float, columns: float, count: int, processors: int) -> float:
    """Return the time of a product over that of one whose last wave is full, at least 1.

    Args:
        rows: of the result.
        columns: of the result.
        count: of equal products in a kernel.
        processors: that compute a tile each; 0: not known, and the factor is 1.
    """
    if not processors:
        return 1.0
    factors = []
    for high, wide, reach in _TILES:
        tiles = math.ceil(rows / high) * math.ceil(columns / wide) * count
        area = math.ceil(tiles / processors) * processors * high * wide
        factors.append(area / (rows * columns * count * reach))
    return max(1.0, min(factors))
