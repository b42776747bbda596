"""How the ranks' memory allocator treats freed memory: it stays, or goes back to the system.

glibc gives the end of its heap back to the system when more than a threshold is free there, and
takes large blocks from the system one by one and gives each back when it is freed. A training step
frees and takes the same memory again and again: each time the system hands out fresh pages, zeroes
them, and takes a page fault for every 4 KiB. With `keep` freed memory stays with the process, for
its next step. `bench/allocator.py` measures what that gains, and what it costs in memory.

The setting goes to the ranks as environment variables, which glibc reads when a process starts:
what a rank starts (workers of loaders, compilers) inherits it. What measures for a prediction (the
probe, the capture of a model) runs under the same allocator as the ranks.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

AllocatorChoice = Literal["keep", "system"]

# No block comes from the system by itself, and no free memory goes back (1 TiB is never reached).
# Source: mallopt(3), M_MMAP_MAX and M_TRIM_THRESHOLD.
KEEP: dict[str, str] = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
# What the user may have set to the same end.
_VARIABLES = (*KEEP, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
_TUNABLES = re.compile(r"glibc\.malloc\.(mmap_max|mmap_threshold|trim_threshold|top_pad)=")
_OTHERS = re.compile(r"lib(?:(?:je|tc|mi|rp|sn)malloc|hoard)[^/: ]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorSetting:
    """What the ranks get, and why.

    Attributes:
        in_effect: ``keep`` or ``system``; ``own`` if the user's own settings decide.
        variables: what is added to the ranks' environment.
        note: one line for the start of the run.
    """

    in_effect: Literal["keep", "system", "own"]
    variables: dict[str, str]
    note: str

    def to_json(self) -> dict[str, object]:
        """Return what ``config.json`` of a run says of it."""
        return {"in_effect": self.in_effect, "variables": dict(self.variables)}


def allocator_setting(
    choice: AllocatorChoice, environ: Mapping[str, str], libc: str | None = None
) -> AllocatorSetting:
    """Return what the ranks' allocator becomes.

    Args:
        choice: what the run is configured to.
        environ: the environment that the ranks inherit; settings of the user's in it win.
        libc: name and version of the C library, empty if it is not glibc; None asks the system.
    """
    libc = _glibc() if libc is None else libc
    own = {name: environ[name] for name in _VARIABLES if environ.get(name)}
    if choice == "keep" and own.items() <= KEEP.items():
        own = {}  # of a run that this one is part of
    if _TUNABLES.search(tunables := environ.get("GLIBC_TUNABLES", "")):
        own["GLIBC_TUNABLES"] = tunables
    preloaded = _OTHERS.search(environ.get("LD_PRELOAD", ""))
    if preloaded:
        return _nothing("own", f"{preloaded.group(0)}, which LD_PRELOAD names")
    if own:
        listed = " ".join(f"{name}={value}" for name, value in own.items())
        return _nothing("own", f"as your environment says ({listed})")
    if choice == "system":
        return _nothing("system", "system (the C library's defaults)")
    if not libc.startswith("glibc"):
        why = "keep needs glibc, and this Python runs on another C library"
        return _nothing("system", f"system ({why})")
    listed = " ".join(f"{name}={value}" for name, value in KEEP.items())
    note = f"keep (freed memory stays with the ranks: {listed}; else --allocator system)"
    return AllocatorSetting(in_effect="keep", variables=KEEP, note=f"allocator {note}")


def _nothing(in_effect: Literal["system", "own"], note: str) -> AllocatorSetting:
    return AllocatorSetting(in_effect=in_effect, variables={}, note=f"allocator {note}")


def _glibc() -> str:
    """Return name and version of glibc; empty under another C library, such as musl."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # a name that only glibc has
        return ""
