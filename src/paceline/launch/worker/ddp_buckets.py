"""Gives DistributedDataParallel the plan's bucket sizes where a script sets none.

Imports torch: a rank's worker imports this module with importlib, after it has set its threads and
cores.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MIB = 1024 * 1024
DEFAULT_BYTES = 25 * MIB  # torch's default, in every version so far

_LOG = logging.getLogger(__name__)


def set_bucket_bytes(bucket_bytes: int, first_bucket_bytes: int) -> None:
    """Make these sizes DDP's defaults in this process; a script's own arguments still win.

    Args:
        bucket_bytes: size of the gradients that are reduced in one collective.
        first_bucket_bytes: size of the bucket that is ready first. Torch documents a variable of
            its module for it, but reads that only while `bucket_bytes` is torch's default; since
            torch 2.13 a list sets both.
    """
    dist._DEFAULT_FIRST_BUCKET_BYTES = first_bucket_bytes  # noqa: SLF001  # documented by torch for this
    if bucket_bytes == DEFAULT_BYTES:
        return
    original = DistributedDataParallel.__init__
    signature = inspect.signature(original)
    settings: dict[str, Any] = {"bucket_cap_mb": bucket_bytes / MIB}
    if first_bucket_bytes != bucket_bytes:
        if "bucket_cap_mb_list" in signature.parameters:
            settings = {"bucket_cap_mb_list": [first_bucket_bytes / MIB, bucket_bytes / MIB]}
        else:
            _LOG.warning(
                "this torch takes bucket_bytes = %d for DDP's first bucket too, "
                "in place of the plan's %d",
                bucket_bytes,
                first_bucket_bytes,
            )

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if all(
            given.arguments.get(name) is None for name in ("bucket_cap_mb", "bucket_cap_mb_list")
        ):
            given.arguments.update(settings)
        original(*given.args, **given.kwargs)

    DistributedDataParallel.__init__ = init
