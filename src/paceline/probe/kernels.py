"""The small computations whose speed makes up a Machine. Imports torch: only a probe loads it.

Each kernel is one operator class with its backward. A chain of tiny ones gives the overhead per
operator, single larger ones give the rate. Which operators a kernel really runs is not assumed:
they are counted as `training.capture` counts those of a model, so both speak of the same work.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F  # noqa: N812  # the name everybody knows it by
from torch import nn

from paceline.core.machine import Operator
from paceline.probe.figures import typical_s
from paceline.training.capture import TrainingStep, capture

if TYPE_CHECKING:
    from paceline.core.machine import Phase
    from paceline.core.workload import Operation

WARMUP_COUNT = 2
LEAST_COUNT = 3
# After this long a chain is not called again. Two threads of OpenMP on cores that another process
# uses too wait a time slice for each other at every parallel region: a call of a small LSTM then
# takes seconds.
LIMIT_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One operator class at one size.

    Attributes:
        operator: that dominates it.
        layer: makes a module that maps a tensor to one of the same shape, or to any when it is not
            tiny.
        shape: of its input.
        dtype: of input and parameters.
    """

    operator: Operator
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """Fused attention of a tensor with itself."""

    def forward(self, x_BHSD: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape letters
        """Return the attended values."""
        return F.scaled_dot_product_attention(x_BHSD, x_BHSD, x_BHSD)


class Lookup(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """Rows of a table by index; the scaling gives the indices a gradient path of their own."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape letters
        """Return x plus the row of each sample."""
        index = torch.arange(x_BW.shape[0], device=x_BW.device) % self.table.num_embeddings
        return x_BW + self.table(index)


class LookupBag(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """Sums of rows of a table; the addition gives the indices a gradient path of their own."""

    def __init__(self, rows: int, width: int, length: int) -> None:
        super().__init__()
        self.table, self.length = nn.EmbeddingBag(rows, width, mode="sum"), length

    def forward(self, x_BW: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape letters
        """Return x plus the sum of the rows of each sample."""
        count = x_BW.shape[0] * self.length
        index = torch.arange(count, device=x_BW.device) * 7919 % self.table.num_embeddings
        return x_BW + self.table(index.view(-1, self.length))


class Recurrent(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """A fused recurrent layer; its output has the shape of its input where the widths are equal."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(inputs, width)

    def forward(self, x_TBW: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape letters
        """Return the outputs of all time steps."""
        return self.cells(x_TBW)[0]


class Transpose(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """A view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x transposed."""
        return x.t()


class TransformerPart(nn.Module):  # type: ignore[misc]  # torch is not typed for us
    """A layer of a transformer, its attention and its feed-forward block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x_BTW: torch.Tensor) -> torch.Tensor:  # noqa: N803  # shape letters
        """Return the layer's output."""
        batch, length, width = x_BTW.shape
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x_BTW)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x_BTW = x_BTW + self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # noqa: N806
        return x_BTW + self.down(F.gelu(self.up(self.norm2(x_BTW))))


def convolutional_part() -> nn.Module:
    """Return a few layers of a network for images of 3 channels."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    )


@functools.cache
def networks() -> list[Kernel]:
    """Return small networks of operators of several classes, named by the most costly one."""

    def transformer() -> nn.Module:
        return nn.Sequential(*(TransformerPart(80, 4) for _ in range(4)))

    return [
        Kernel(operator="matmul", layer=transformer, shape=(8, 40, 80)),
        Kernel(operator="convolution", layer=convolutional_part, shape=(8, 3, 24, 24)),
    ]


def _linear(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, width)


def _conv(into: int, out: int, size: int = 3) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(into, out, size, padding=size // 2)


def _depthwise(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv2d(width, width, 3, padding=1, groups=width)


def _transposed(into: int, out: int, size: int, stride: int) -> Callable[[], nn.Module]:
    return lambda: nn.ConvTranspose2d(into, out, size, stride, (size - stride) // 2)


def _conv_1d(width: int, size: int) -> Callable[[], nn.Module]:
    return lambda: nn.Conv1d(width, width, size, padding=size // 2)


def _group_norm(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.GroupNorm(width // 4, width)


def _upsample() -> nn.Module:
    return nn.Upsample(scale_factor=2, mode="bilinear")


def _upsample_tiny() -> nn.Module:
    return nn.Upsample(size=(4, 4), mode="bilinear")


def _pool() -> nn.Module:
    return nn.MaxPool2d(2)


def _pool_tiny() -> nn.Module:
    return nn.MaxPool2d(3, stride=1, padding=1)


@functools.cache
def tiny_kernels() -> list[Kernel]:
    """Return kernels whose time is all overhead; a view first, since the others contain views."""
    return [
        Kernel(operator="view", layer=Transpose, shape=(8, 8)),
        Kernel(operator="elementwise", layer=nn.ReLU, shape=(8, 8)),
        Kernel(operator="transcendental", layer=nn.GELU, shape=(8, 8)),
        Kernel(operator="exponential", layer=nn.Softplus, shape=(8, 8)),
        Kernel(operator="hyperbolic", layer=nn.Tanh, shape=(8, 8)),
        Kernel(operator="random", layer=lambda: nn.Dropout(0.5), shape=(8, 8)),
        Kernel(operator="matmul", layer=_linear(8), shape=(8, 8)),
        Kernel(operator="convolution", layer=_conv(2, 2), shape=(2, 2, 4, 4)),
        Kernel(operator="batch_norm", layer=lambda: nn.BatchNorm2d(2), shape=(2, 2, 4, 4)),
        Kernel(operator="layer_norm", layer=lambda: nn.LayerNorm(8), shape=(8, 8)),
        Kernel(operator="softmax", layer=lambda: nn.Softmax(-1), shape=(8, 8)),
        Kernel(operator="pooling", layer=_pool_tiny, shape=(2, 2, 4, 4)),
        Kernel(operator="embedding", layer=lambda: Lookup(8, 8), shape=(8, 8)),
        Kernel(operator="embedding_bag", layer=lambda: LookupBag(8, 8, 2), shape=(8, 8)),
        Kernel(operator="convolution_1d", layer=_conv_1d(2, 3), shape=(2, 2, 8)),
        Kernel(operator="depthwise", layer=_depthwise(4), shape=(2, 4, 4, 4)),
        Kernel(operator="transposed", layer=_transposed(2, 2, 3, 1), shape=(2, 2, 4, 4)),
        Kernel(operator="recurrent", layer=lambda: Recurrent(8, 8), shape=(24, 2, 8)),
        Kernel(operator="group_norm", layer=_group_norm(8), shape=(2, 8, 4, 4)),
        Kernel(operator="upsampling", layer=_upsample_tiny, shape=(2, 2, 4, 4)),
        Kernel(operator="attention", layer=Attention, shape=(1, 1, 4, 8)),
    ]


@functools.cache
def rate_kernels(*, quick: bool) -> list[Kernel]:
    """Return kernels of rising size for each class; `quick` keeps one size of each."""
    sizes: list[tuple[Operator, list[tuple[Callable[[], nn.Module], tuple[int, ...]]]]] = [
        ("matmul", [(_linear(1024), (2, 1024))]),  # little to compute for each byte of the weight
        ("matmul", [(_linear(w), (m, w)) for m, w in ((32, 128), (64, 256), (128, 512))]),
        ("matmul", [(_linear(1024), (256, 1024))]),
        ("convolution", [(_conv(3, 16), (8, 3, 32, 32)), (_conv(16, 16), (16, 16, 16, 16))]),
        ("convolution", [(_conv(32, 32, 1), (16, 32, 16, 16)), (_conv(3, 32), (16, 3, 32, 32))]),
        ("convolution", [(_conv(64, 64), (8, 64, 8, 8)), (_conv(32, 64), (16, 32, 16, 16))]),
        # Kernels work on 8 or 16 channels at a time: others fill these up.
        ("convolution", [(_conv(10, 28), (8, 10, 40, 40)), (_conv(28, 28), (8, 28, 24, 24))]),
        ("convolution_1d", [(_conv_1d(32, 3), (8, 32, 1024))]),
        ("convolution_1d", [(_conv_1d(64, 5), (8, 64, 256))]),
        ("depthwise", [(_depthwise(32), (8, 32, 32, 32))]),
        ("depthwise", [(_depthwise(96), (16, 96, 14, 14))]),
        ("transposed", [(_transposed(32, 16, 4, 2), (8, 32, 16, 16))]),
        ("transposed", [(_transposed(64, 32, 2, 2), (16, 64, 8, 8))]),
        ("elementwise", [(nn.ReLU, (n, 1024)) for n in (16, 64, 256, 1024)]),
        ("transcendental", [(nn.GELU, (n, 1024)) for n in (16, 64, 256, 1024)]),
        ("exponential", [(nn.Softplus, (n, 1024)) for n in (16, 256)]),
        ("hyperbolic", [(nn.Tanh, (n, 1024)) for n in (16, 256)]),
        ("random", [(lambda: nn.Dropout(0.5), (n, 1024)) for n in (16, 256)]),
        ("batch_norm", [(lambda: nn.BatchNorm2d(16), (n, 16, 16, 16)) for n in (4, 32, 128)]),
        ("layer_norm", [(lambda: nn.LayerNorm(256), (n, 256)) for n in (64, 1024, 4096)]),
        ("group_norm", [(_group_norm(16), (n, 16, 32, 32)) for n in (4, 16)]),
        ("softmax", [(lambda: nn.Softmax(-1), (n, 64)) for n in (256, 4096)]),
        ("softmax", [(lambda: nn.LogSoftmax(-1), (512, 1024))]),
        ("pooling", [(_pool, (n, 16, 16, 16)) for n in (4, 32, 128)]),
        ("upsampling", [(_upsample, (n, 16, 16, 16)) for n in (4, 32)]),
        ("embedding", [(lambda: Lookup(1024, 128), (n, 128)) for n in (256, 1024)]),
        ("embedding_bag", [(lambda: LookupBag(8192, 32, 4), (n, 32)) for n in (64, 512)]),
        ("recurrent", [(lambda: Recurrent(32, 64), (24, 8, 32))]),
        ("recurrent", [(lambda: Recurrent(128, 160), (24, 24, 128))]),
        ("attention", [(Attention, (b, 4, s, 32)) for b, s in ((4, 32), (8, 64), (16, 128))]),
    ]
    kernels = [
        Kernel(operator=operator, layer=layer, shape=shape)
        for operator, variants in sizes
        for layer, shape in (variants[-1:] if quick else variants)
    ]
    kernels += [
        Kernel(operator="matmul", layer=_linear(w), shape=(m, w), dtype=torch.bfloat16)
        for m, w in ((64, 256), (256, 1024))[1 if quick else 0 :]
    ]
    kernels += [
        Kernel(operator="attention", layer=Attention, shape=shape, dtype=torch.bfloat16)
        for shape in ((4, 4, 32, 32), (8, 4, 64, 32))[1 if quick else 0 :]
    ]
    return kernels


@functools.cache
def operations_of(kernel: Kernel, length: int = 1) -> tuple[Operation, ...]:
    """Return the operators of a chain of the kernel, counted as `capture` counts a model's."""
    module = _chain(kernel, length)
    inputs = torch.zeros(kernel.shape, dtype=kernel.dtype, requires_grad=True)
    workload = capture(TrainingStep(module=module, inputs=inputs, loss_fn=_dense_loss))
    # The chain itself holds only the loss, which `time_phases` does without.
    return tuple(
        operation for layer in workload.layers if layer.name for operation in layer.operations
    )


def _dense_loss(output: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient is as dense as that which `time_phases` gives."""
    return (output * torch.ones_like(output)).sum()


def _chain(kernel: Kernel, length: int) -> nn.Module:
    return nn.Sequential(*(kernel.layer() for _ in range(length))).to(kernel.dtype)


def time_phases(kernel: Kernel, length: int, budget_s: float) -> dict[Phase, float]:
    """Return seconds of forward and of backward of a chain of the kernel.

    The gradient that comes in is dense, as in a network: some backward operators are several times
    slower on the broadcast one that a sum as loss would give.
    """
    module = _chain(kernel, length)
    inputs = torch.randn(kernel.shape, dtype=torch.float32).to(kernel.dtype).requires_grad_()
    with torch.no_grad():
        gradient = torch.ones_like(module(inputs))
    forward, backward = [], []
    begin_s = time.perf_counter()
    count, passed_s = 0, 0.0
    while passed_s < LIMIT_S and (count < WARMUP_COUNT + LEAST_COUNT or passed_s < budget_s):
        module.zero_grad()
        inputs.grad = None
        begin = time.perf_counter()
        output = module(inputs)
        middle = time.perf_counter()
        output.backward(gradient)
        forward.append(middle - begin)
        backward.append(time.perf_counter() - middle)
        count, passed_s = count + 1, time.perf_counter() - begin_s
    warm = min(WARMUP_COUNT, count - 1)
    return {"forward": typical_s(forward[warm:]), "backward": typical_s(backward[warm:])}


def time_calls(function: Callable[[], Any], budget_s: float) -> list[float]:
    """Return the seconds of each call after the first few."""
    samples = []
    end = time.perf_counter() + budget_s
    count = 0
    while count < WARMUP_COUNT + LEAST_COUNT or time.perf_counter() < end:
        begin = time.perf_counter()
        function()
        if count >= WARMUP_COUNT:
            samples.append(time.perf_counter() - begin)
        count += 1
    return samples
