"""Seconds of a layer's work on a device: roofline terms, added up.

A product of M x K by K x N takes ``FLOPs / (peak x matmul) + bytes / (memory bandwidth x
bandwidth)``: the second term is what makes small and thin products slow. Both are added, not the
larger taken, since a kernel's loads and stores at its ends overlap with nothing. Dimensions that do
not fit tiles (of 64 elements, of heads 32) cost the factor `Efficiency.unaligned`, and those that
are no multiples of a load's width cost `unvectored_factor` as well; `tiles` has what a last wave of
tiles leaves idle. Other operators move bytes. A pass is no shorter than the host takes to start its
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.perf.transformer.efficiency import efficiency_of, unvectored_factor
from paceline.perf.transformer.layer import ACTIVATION_BYTES, HEAD_TILE, TILE
from paceline.perf.transformer.tiles import multiprocessors, wave_factor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from paceline.core.machine import Efficiency, Machine
    from paceline.perf.transformer.layer import LayerWork, Product

# Steps along the inner dimension in which a tile of a product starts and ends: four stages of 32.
TILE_FILL = 128
# Elements of 16 bits that kernels load at once.
VECTOR = 8
# Of the forward pass of a fused kernel: five products of the backward pass over two.
ATTENTION_BACKWARD = 2.5
# A backward pass starts about two kernels for each of the forward pass.
BACKWARD_OVERHEAD = 2.0
# Exponent of the mean of host and device; the larger, the nearer to the slower of both.
RUN_AHEAD = 6
_FALLBACKS = {"float8": "bfloat16", "bfloat16": "float16", "float16": "float32"}


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Rates that a device reaches in training.

    Attributes:
        matmul_per_s: FLOP/s of large aligned products in the plan's precision.
        attention_per_s: FLOP/s of attention in one kernel, which computes in 16 bits.
        bytes_per_s: of memory.
        unaligned: factor of `matmul_per_s` for products that do not fit tiles.
        layer_s: fixed cost of a layer's forward pass.
        dtype: whose peak rate is taken.
        unvectored: factor, beside `unaligned`, for products that kernels cannot load 16 bytes at a
            time.
        processors: that compute a tile of a product each; 0: not known.
    """

    matmul_per_s: float
    attention_per_s: float
    bytes_per_s: float
    unaligned: float
    layer_s: float
    dtype: str
    unvectored: float
    processors: int

    @classmethod
    def of(
        cls, machine: Machine, precision: str, efficiency: Efficiency | None = None
    ) -> DeviceRates:
        """Return the rates of the machine's first device.

        Args:
            machine: its first device has peaks and a memory bandwidth.
            precision: of products; where the device has no such peak, the next wider dtype's.
            efficiency: instead of the device's own.

        Raises:
            UsageError: the device has no peak rate, or no memory bandwidth.
        """
        device = machine.devices[0]
        peaks = {peak.dtype: peak.flops_per_s.value for peak in device.peaks}
        if not peaks or device.bandwidth_bytes_per_s is None:
            raise UsageError(
                "the machine's device has no peak rate or no memory bandwidth",
                where=f"{machine.name}: devices[0].peaks, devices[0].bandwidth_bytes_per_s",
                fix="Add them to the machine file, or take one of the library (plan --machines)",
            )
        dtype = _known(precision, peaks)
        wide = _known("bfloat16", peaks)
        reached = efficiency or efficiency_of(device)
        return cls(
            matmul_per_s=peaks[dtype] * reached.matmul.value,
            attention_per_s=peaks[wide] * reached.attention.value,
            bytes_per_s=device.bandwidth_bytes_per_s.value * reached.bandwidth.value,
            unaligned=reached.unaligned.value,
            layer_s=reached.layer_s.value,
            dtype=dtype,
            unvectored=unvectored_factor(device),
            processors=multiprocessors(device),
        )

    def products_s(self, products: Iterable[Product]) -> float:
        """Return the seconds of matrix products."""
        total_s = 0.0
        for product in products:
            rate = self.matmul_per_s * (1.0 if product.fits(TILE) else self.unaligned)
            if not product.fits(VECTOR):
                rate *= self.unvectored
            waves = wave_factor(product.rows, product.columns, product.count, self.processors)
            total_s += product.flops / rate * (1 + TILE_FILL / product.inner) * waves
            total_s += ACTIVATION_BYTES * product.elements / self.bytes_per_s
        return total_s

    def scores_s(self, products: Iterable[Product]) -> float:
        """Return the seconds of attention's products where each is a kernel of its own."""
        total_s = 0.0
        for product in products:
            rate = self.attention_per_s * (1.0 if product.fits(HEAD_TILE) else self.unaligned)
            total_s += product.flops / rate + ACTIVATION_BYTES * product.elements / self.bytes_per_s
        return total_s


def _known(dtype: str, peaks: dict[str, float]) -> str:
    while dtype not in peaks and dtype in _FALLBACKS:
        dtype = _FALLBACKS[dtype]
    return dtype if dtype in peaks else next(iter(peaks))


def layer_seconds(
    work: LayerWork, rates: DeviceRates, exchanges_s: tuple[float, float] = (0.0, 0.0)
) -> tuple[float, float]:
    """Return the seconds of a layer's (forward pass, backward pass).

    The backward pass has two products for each of the forward pass, and computes again what the
    plan does not keep.

    Args:
        work: of the layer.
        rates: of the device.
        exchanges_s: seconds in which the device waits for collectives inside of each pass. The host
            starts kernels meanwhile: a pass that its kernels' start bounds hides them.
    """
    products_s = rates.products_s(work.products)
    scores_s = rates.scores_s(work.scores)
    softmax_s = work.score_traffic / rates.bytes_per_s
    attention_s = work.attention / rates.attention_per_s
    attend_s = scores_s + softmax_s + attention_s
    forward_s = products_s + attend_s + work.forward_traffic / rates.bytes_per_s
    backward_s = (
        sum(rates.products_s(product.gradients) for product in work.products)
        + sum(rates.scores_s(product.gradients) for product in work.scores)
        + 2 * softmax_s
        + ATTENTION_BACKWARD * attention_s
        + work.backward_traffic / rates.bytes_per_s
    )
    if work.recompute_all:
        backward_s += forward_s
    elif work.recompute_operators:
        backward_s += forward_s - products_s / 2 - attention_s
    elif work.recompute_scores:
        backward_s += scores_s + softmax_s
    return (
        _launched(forward_s + exchanges_s[0], rates.layer_s),
        _launched(
            backward_s + exchanges_s[1], rates.layer_s * (BACKWARD_OVERHEAD + work.recompute_all)
        ),
    )


def _launched(device_s: float, host_s: float) -> float:
    """Return the seconds of a pass whose kernels the host starts while the device computes.

    The slower of both, with a short transition: CUDA's queues hold about a thousand kernels, so
    that the host runs ahead by many layers wherever nothing makes it wait for the device.
    """
    return float((device_s**RUN_AHEAD + host_s**RUN_AHEAD) ** (1 / RUN_AHEAD))
