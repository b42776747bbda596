"""Gradients, and in some modes parameters, in flat buckets.

    elements of a bucket    p0 .......... | p1 ...... | p2 ... | used | padding

`used` has an element for each parameter: 1 where the rank has a gradient. It is reduced with the
gradients, so that all ranks know without another collective which parameters any rank used. The
padding makes the length a multiple of the number of ranks, for a reduce-scatter.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    Empty = Callable[[int, torch.dtype, torch.device], torch.Tensor]

_PAGE = 4096
_LINE_ELEMENTS = 16  # of 4 bytes: a cache line, so that no two ranks write to one


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Parameters whose gradients are reduced in one collective.

    Attributes:
        number: place in the order in which buckets are reduced.
        names, parameters: in the order in which they lie in the bucket.
        gradients: flat, of all parameters, with `used` and padding.
        extents: first element of each parameter, and the one after its last.
        views: of `gradients`, one for each parameter, in its shape.
        missing: parameters of which the backward pass has not brought the gradient yet.
        present: for each parameter, whether this rank has its gradient in the bucket.
    """

    number: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    gradients: torch.Tensor
    extents: tuple[tuple[int, int], ...] = field(init=False)
    views: tuple[torch.Tensor, ...] = field(init=False)
    missing: int = field(init=False)
    present: list[bool] = field(init=False)

    def __post_init__(self) -> None:
        ends = list(itertools.accumulate(parameter.numel() for parameter in self.parameters))
        self.extents = tuple(zip([0, *ends], ends, strict=False))
        self.views = tuple(
            self.gradients[begin:end].view(parameter.shape)
            for parameter, (begin, end) in zip(self.parameters, self.extents, strict=True)
        )
        self.reset()

    @property
    def used(self) -> torch.Tensor:
        """The part of `gradients` that says which parameters have one; shape [parameters]."""
        begin = self.extents[-1][1]
        return self.gradients[begin : begin + len(self.parameters)]

    def reset(self) -> None:
        """Expect the gradients of a new backward pass."""
        self.missing = len(self.parameters)
        self.present = [False] * len(self.parameters)

    def take(self, index: int) -> bool:
        """Put the gradient of a parameter into the bucket; return whether it was the last one.

        Args:
            index: of the parameter in the bucket.

        One that is sparse has all elements from then on: ranks have others of them.
        """
        parameter, view = self.parameters[index], self.views[index]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        if gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view
        if not self.present[index]:
            self.present[index] = True
            self.missing -= 1
        return self.missing == 0

    def complete(self) -> None:
        """Take what the backward pass did not bring, before the bucket is reduced.

        That is what earlier passes left: those that were not reduced, and those whose average has
        not been set to zero since, which all ranks have alike. Zeros where there is nothing.
        """
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if self.present[index]:
                continue
            if parameter.grad is None:
                view.zero_()
            else:
                self.take(index)
        flags = torch.tensor(self.present, dtype=self.gradients.dtype)
        self.used.copy_(flags)


def divide(
    named: Iterable[tuple[str, nn.Parameter]], first_bytes: int, bucket_bytes: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Yield lists of parameters of one data type and device, of a limited size.

    Args:
        named: in the order in which their gradients become ready.
        first_bytes: the most of the first list; a small one starts early.
        bucket_bytes: the most of each other list; a single larger parameter makes its own.
    """
    lists: dict[tuple[torch.dtype, torch.device], list[tuple[str, nn.Parameter]]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}
    limit = first_bytes
    for name, parameter in named:
        kind = (parameter.dtype, parameter.device)
        size_bytes = parameter.numel() * parameter.element_size()
        if lists.get(kind) and filled[kind] + size_bytes > limit:
            yield lists.pop(kind)
            filled[kind], limit = 0, bucket_bytes
        lists.setdefault(kind, []).append((name, parameter))
        filled[kind] = filled.get(kind, 0) + size_bytes
    yield from lists.values()


def make_buckets(
    lists: Iterable[Sequence[tuple[str, nn.Parameter]]], ranks: int, empty: Empty
) -> list[GradientBucket]:
    """Return a bucket for each list of named parameters.

    Args:
        lists: as `divide` yields them.
        ranks: of the group.
        empty: returns a tensor of a length, type and device, with undefined values.
    """
    buckets = []
    for number, members in enumerate(lists):
        parameters = tuple(parameter for _, parameter in members)
        length = padded(sum(p.numel() for p in parameters) + len(parameters), ranks)
        gradients = empty(length, parameters[0].dtype, parameters[0].device)
        gradients.zero_()
        buckets.append(
            GradientBucket(number, tuple(name for name, _ in members), parameters, gradients)
        )
    return buckets


def padded(length: int, ranks: int) -> int:
    """Return the length that divides into equal parts, of whole cache lines, for all ranks.

    >>> padded(100, 2), padded(128, 2)
    (128, 128)
    """
    unit = ranks * _LINE_ELEMENTS
    return -(-length // unit) * unit


def bytes_of_buckets(parameters: Iterable[torch.Tensor], ranks: int) -> int:
    """Return at least the bytes that the buckets of these parameters take, each in whole pages."""
    padding = ranks * _LINE_ELEMENTS + 1
    return sum((p.numel() + padding) * p.element_size() + _PAGE for p in parameters)
