"""Entries of a flat tensor as a message: the values, then where they are, in a few bits each.

::

    | count: int32 | codes: int32 | values: count x 4 or 2 bytes | indices |

Indices, ascending, are gaps between neighbours as codes of 1 or 2 bytes, or a bitmap of the tensor:
whichever is the smallest for the most entries that the message can have, so that both ends know it.
A code is the number of elements to skip; the largest code skips as many elements and has no entry.
At a density of 0.1 % an entry takes 2 bytes besides its value, of which 11.4 bits are information.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.errors import CorruptData, UsageError
from paceline.training.compression.selection import Entries

VALUE_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_HEAD_BYTES = 8
_LIMITS = {1: 2**8 - 1, 2: 2**16 - 1}  # the largest code, by its bytes


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values as a message of that dtype carries them; float16 saturates.

    The difference to the values is exact in float32 for the other values, since rounding to nearest
    changes a value by less than itself.
    """
    if dtype is torch.float32:
        return values
    if dtype is torch.float16:
        most = torch.finfo(dtype).max
        values = values.clamp(-most, most)
    return values.to(dtype).to(torch.float32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Codec:
    """The encoding of messages about a flat tensor.

    Attributes:
        length: elements of the tensor.
        capacity: the most entries that `padded` messages have.
        dtype: of the values: float32, float16 or bfloat16.
    """

    length: int
    capacity: int
    dtype: torch.dtype = torch.float32
    code_bytes: int = field(init=False)  # 0: a bitmap
    max_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.dtype not in VALUE_TYPES:
            raise UsageError(
                f"values of dtype {self.dtype} cannot be sent",
                where="compression",
                fix="Choose torch.float32, torch.float16 or torch.bfloat16",
            )
        sizes = {
            0: -(-self.length // 8),
            **{width: width * (self.capacity + self.length // _LIMITS[width]) for width in (1, 2)},
        }
        width = min(sizes, key=lambda width: (sizes[width], width))
        size = _HEAD_BYTES + self.capacity * self.dtype.itemsize + sizes[width]
        object.__setattr__(self, "code_bytes", width)
        object.__setattr__(self, "max_bytes", size)

    def encode(self, entries: Entries) -> Tensor:
        """Return the message, uint8, as long as it needs to be."""
        indices, values = entries
        if self.dtype is torch.float16:
            values = rounded(values, self.dtype)
        codes = self._codes(indices)
        head = torch.tensor([indices.numel(), codes.numel()], dtype=torch.int32)
        return torch.cat(
            [
                head.view(torch.uint8).to(values.device),
                values.to(self.dtype).contiguous().view(torch.uint8),
                codes.view(torch.uint8),
            ]
        )

    def padded(self, entries: Entries) -> Tensor:
        """Return the message with `max_bytes` bytes; the entries are at most `capacity`."""
        assert entries.indices.numel() <= self.capacity, "more entries than agreed"
        message = self.encode(entries)
        out = message.new_zeros(self.max_bytes)
        out[: message.numel()] = message
        return out

    def decode(self, message: Tensor) -> Entries:
        """Return the entries of a message, which may have padding.

        Raises:
            CorruptData: the message's counts do not match its length or its indices.
        """
        if message.numel() < _HEAD_BYTES:
            raise _corrupt(f"{message.numel()} bytes are no message")
        # A copy aligns the header; the slices below start at multiples of their element's size.
        count, codes = message[:_HEAD_BYTES].clone().view(torch.int32).tolist()
        values_end = _HEAD_BYTES + count * self.dtype.itemsize
        end = values_end + codes * max(self.code_bytes, 1)
        if codes < 0 or not 0 <= count <= codes * (1 if self.code_bytes else 8):
            raise _corrupt(f"{count} entries in {codes} codes")
        if end > message.numel():
            raise _corrupt(f"needs {end} bytes, has {message.numel()}")
        values = message[_HEAD_BYTES:values_end].clone().view(self.dtype).to(torch.float32)
        indices = self._indices(message[values_end:end].clone())
        if indices.numel() != count or (count and int(indices[-1]) >= self.length):
            raise _corrupt(f"{indices.numel()} indices for {count} values")
        return Entries(indices, values)

    def _codes(self, indices: Tensor) -> Tensor:
        if not self.code_bytes:
            bits = indices.new_zeros(-(-self.length // 8) * 8, dtype=torch.uint8)
            bits[indices] = 1
            weights = 2 ** torch.arange(8, device=bits.device, dtype=torch.uint8)
            return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)
        limit = _LIMITS[self.code_bytes]
        gaps = torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1
        skips = gaps // limit
        ends = (skips + 1).cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        codes = gaps.new_full((total,), limit)
        codes[ends - 1] = gaps - skips * limit
        if self.code_bytes == 1:
            return codes.to(torch.uint8)
        return torch.where(codes > 2**15 - 1, codes - 2**16, codes).to(torch.int16)

    def _indices(self, data: Tensor) -> Tensor:
        if not self.code_bytes:
            shifts = torch.arange(8, device=data.device, dtype=torch.uint8)
            return ((data.unsqueeze(1) >> shifts) & 1).flatten().nonzero().squeeze(1)
        limit = _LIMITS[self.code_bytes]
        codes = data.to(torch.int64)
        if self.code_bytes == 2:
            codes = data.view(torch.int16).to(torch.int64) & limit
        ends = codes.cumsum(0)[codes != limit]
        return ends + torch.arange(ends.numel(), device=ends.device)


def _corrupt(why: str) -> CorruptData:
    return CorruptData(
        "a message of compressed gradients is damaged",
        where="compression",
        why=why,
        fix="Start all ranks with the same options and the same version",
    )
