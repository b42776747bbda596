"""Reads what ``nvidia-smi topo -m`` prints: how the GPUs of a node are connected.

A row for each GPU and network card, cells separated by tabs::

            GPU0  GPU1  NIC0  CPU Affinity
    GPU0     X    NV12  SYS   0-51
    GPU1    NV12   X    SYS   0-51

A cell names the way between two GPUs; the distance is the seconds that a byte takes, by a bandwidth
that is assumed for each kind of way: what counts for a mapping of ranks is their order. Bonded
NVLinks add up, 25 GB/s each (NVLink 2 to 4); the others are those of PCIe 3 x16 in practice.
Source: legend of nvidia-smi; NVIDIA's data sheets for NVLink.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import CorruptData

if TYPE_CHECKING:
    from numpy.typing import NDArray

NVLINK_BYTES_PER_S = 25e9  # of one link, in one direction
BYTES_PER_S = {
    "PIX": 12e9,  # at most one PCIe bridge
    "PXB": 11e9,  # several bridges
    "PHB": 10e9,  # the host bridge, so through the CPU
    "NODE": 8e9,  # several host bridges of one NUMA node
    "SYS": 6e9,  # between NUMA nodes
}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the header is underlined on a terminal
_GPU = re.compile(r"GPU\d+$")
_NVLINK = re.compile(r"NV(\d+)$")


def gpu_distances(text: str) -> NDArray[np.float64]:
    """Return seconds per byte between the GPUs of a node, in their order.

    Args:
        text: what ``nvidia-smi topo -m`` printed; the legend may be missing.

    Returns:
        Shape (GPUs, GPUs), 0 on the diagonal.

    Raises:
        CorruptData: there is no matrix of GPUs, or a cell is not known.
    """
    lines = [_ESCAPES.sub("", line).split() for line in text.splitlines()]
    header = next((line for line in lines if line and _GPU.match(line[0])), [])
    count = sum(bool(_GPU.match(name)) for name in header)
    rows = [line for line in lines if line and line is not header and _GPU.match(line[0])]
    if not count or [row[0] for row in rows] != header[:count]:
        raise CorruptData(
            f"no matrix of GPUs: {count} in the header, {len(rows)} rows",
            fix="Pass all that 'nvidia-smi topo -m' prints",
        )
    matrix = np.zeros((count, count))
    for i, row in enumerate(rows):
        if len(row) <= count:
            raise CorruptData(
                f"{len(row) - 1} cells for {count} GPUs",
                where=row[0],
                fix="Pass all that 'nvidia-smi topo -m' prints",
            )
        for j, cell in enumerate(row[1 : count + 1]):
            matrix[i, j] = 0.0 if i == j else _seconds_per_byte(cell, f"{row[0]}, {header[j]}")
    return matrix


def _seconds_per_byte(cell: str, where: str) -> float:
    bonded = _NVLINK.match(cell)
    if bonded and int(bonded[1]):
        return 1 / (int(bonded[1]) * NVLINK_BYTES_PER_S)
    if cell not in BYTES_PER_S:
        raise CorruptData(
            f"'{cell}' is no known connection",
            where=where,
            fix=f"Expected NV1, NV2, ... or one of {', '.join(BYTES_PER_S)}",
        )
    return 1 / BYTES_PER_S[cell]
