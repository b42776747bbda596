"""Resources of a loader on this machine: workers, shared memory, page-locked memory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch

from paceline.core.errors import StorageError, UsageError

if TYPE_CHECKING:
    from paceline.store.feed.options import LoaderOptions

_LOG = logging.getLogger(__name__)

_MAX_WORKERS = 16
_SHARED_MEMORY = "/dev/shm"
_MIB = 1 << 20


def worker_count(options: LoaderOptions) -> int:
    """Return the number of workers, within the cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    if options.workers is None:
        computing = 1 if torch.cuda.is_available() else torch.get_num_threads()
        return max(1, min(_MAX_WORKERS, cores - computing))
    if options.workers > cores and options.worker_kind == "thread":  # torch warns about processes
        _LOG.warning("%d loader workers share %d cores", options.workers, cores)
    return options.workers


def check_shared_memory(needed_bytes: int) -> None:
    """Raise an error if the stored batches do not fit /dev/shm: writing them would raise SIGBUS.

    Batches reach this process through files in /dev/shm. What a transform makes of them may be
    larger, which is not known yet.
    """
    try:
        found = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return  # torch reports a missing /dev/shm itself
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise StorageError(
            "there is too little shared memory for the batches of worker processes",
            where=_SHARED_MEMORY,
            why=f"{free_bytes / _MIB:,.1f} MiB are free, {needed_bytes / _MIB:,.1f} MiB are needed",
            fix='Use worker_kind="thread", fewer batches_ahead, or a larger /dev/shm (--shm-size)',
        )


def pins_memory(options: LoaderOptions) -> bool:
    """Return whether batches are delivered in page-locked memory."""
    if options.pin_memory and not torch.cuda.is_available():
        raise UsageError(
            "pin_memory is asked for without a GPU",
            fix="Leave pin_memory out: the default, None, pins memory if there is a GPU",
        )
    return torch.cuda.is_available() if options.pin_memory is None else options.pin_memory
