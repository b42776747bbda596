"""Integer keys that are equal for equal rows of several arrays."""

from __future__ import annotations

import numpy as np


def row_ids(*columns: np.ndarray) -> np.ndarray:
    """Return a number for each row of `columns`, from 0; equal rows have equal numbers."""
    count = len(columns[0])
    order = np.lexsort(columns[::-1])
    differs = np.zeros(count, dtype=bool)
    for column in columns:
        ordered = column[order]
        differs[1:] |= ordered[1:] != ordered[:-1]
    ids = np.empty(count, dtype=np.int64)
    ids[order] = np.cumsum(differs)
    return ids


def collective_keys(groups: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Return (group, sequence) as one integer."""
    return np.asarray((groups.astype(np.int64) << 32) | sequences.astype(np.int64))
