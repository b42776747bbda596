"""The two ways in which memory that a rank frees is treated, and what makes glibc keep it.

glibc reads these variables when a process starts. What measures for a prediction (the probe, a
benchmark) runs under the same allocator as the ranks that are predicted.
"""

from __future__ import annotations

from typing import Literal

AllocatorChoice = Literal["keep", "system"]

# No block comes from the system by itself, and no free memory goes back (1 TiB is never reached).
# Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD.
KEEP: dict[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
