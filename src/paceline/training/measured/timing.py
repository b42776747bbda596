"""Times one operator call alone, with inputs that are not in the cache.

In a step an operator finds its weights and saved activations where other operators' data have
displaced them from the cache. So copies of its inputs are used in turn, as many as make up the
bytes that a step touches (at most twice the last-level cache), and its results are kept in a ring
of as many, so that it writes to memory that is as cold.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.utils._pytree import tree_map

from paceline.core.measured_step import OperatorTime
from paceline.training.operators import tensors_in

LEAST_CALLS, MOST_CALLS, MOST_COPIES = 6, 200, 32
_SMALL_BYTES = 1 << 18  # what smaller inputs are counted as: the copies themselves cost time


def time_call(
    function: Any, args: Any, kwargs: Any, *, cold_bytes: int, budget_s: float
) -> OperatorTime | None:
    """Return the time of an operator call; None if it cannot be called on copies of its inputs.

    Args:
        function: the operator; it may change its arguments, which are copies.
        args: of the call; left as they are.
        kwargs: likewise.
        cold_bytes: that lie between two uses of the same copy.
        budget_s: after which no more calls are made, beyond the least number.
    """
    own = tensors_in(args) + tensors_in(kwargs)
    size = max(sum(_span_bytes(tensor) for tensor in own), _SMALL_BYTES)
    count = max(1, min(MOST_COPIES, cold_bytes // size))
    try:
        copies = [(tree_map(_copy, args), tree_map(_copy, kwargs)) for _ in range(count)]
        samples = _samples(function, copies, budget_s)
    except Exception:  # noqa: BLE001  # whatever it is, the operator stays without a time
        return None
    if len(samples) < LEAST_CALLS:
        return None
    low_s, seconds, high_s = statistics.quantiles(samples, n=4)
    return OperatorTime(seconds=seconds, low_s=low_s, high_s=high_s)


def _samples(function: Any, copies: list[tuple[Any, Any]], budget_s: float) -> list[float]:
    """Return the seconds of each call but the first."""
    ring: list[Any] = [None] * len(copies)
    samples = []
    end = time.perf_counter() + budget_s
    number = 0
    while number <= LEAST_CALLS or (number < MOST_CALLS and time.perf_counter() < end):
        at = number % len(copies)
        args, kwargs = copies[at]
        ring[at] = None  # frees the result of before, which is not timed
        begin = time.perf_counter()
        result = function(*args, **kwargs)
        seconds = time.perf_counter() - begin
        ring[at] = result
        if number:
            samples.append(seconds)
        number += 1
    return samples


def _copy(value: Any) -> Any:
    """Return a copy of a tensor with its strides, also of one that overlaps itself."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.layout is not torch.strided or not value.numel():
        return value.clone()
    span = value.as_strided((_span(value),), (1,), value.storage_offset())
    return span.clone().as_strided(value.shape, value.stride(), 0)


def _span(tensor: torch.Tensor) -> int:
    """Return the number of elements between a tensor's first and last one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return int(1 + sum((size - 1) * stride for size, stride in sizes))


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return int(_span(tensor) * tensor.element_size())
