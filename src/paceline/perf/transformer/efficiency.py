"""Which part of a device's peaks training reaches: priors by kind, until measurements refit them.

A machine file may hold an `Efficiency` of its own. Where it holds none, the prior of the device's
kind is taken; its interval is what is known of such devices, and becomes the step's interval.

Sources of the priors, all recalled: cuBLAS reaches 80 to 90 % of the peak of V100 and A100 on large
products and about 70 % on H100, whose clock falls at its power limit; FlashAttention 2 reaches 50
to 70 % on A100 and 35 to 45 % on H100; STREAM-like kernels reach 80 to 90 % of a device's memory
bandwidth; NCCL's tests reach 75 to 85 % of NVLink's and of InfiniBand's bandwidth. A decoder of 32
layers generates a token in 25 to 30 ms where starting its kernels bounds it (eager PyTorch, Hugging
Face's models): about a millisecond a layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.machine import Efficiency, Quantity

if TYPE_CHECKING:
    from paceline.core.machine import Device

FIGURES = ("matmul", "attention", "bandwidth", "link", "network", "unaligned", "layer_s")

# value, and the factor by which the truth may be lower or higher
_GPU = {
    "matmul": (0.80, 1.25),
    "attention": (0.40, 2.5),
    "bandwidth": (0.80, 1.5),
    "link": (0.75, 1.25),
    "network": (0.70, 1.5),
    "unaligned": (0.70, 1.3),
    "layer_s": (1e-3, 5.0),
}
_KINDS: dict[str, dict[str, tuple[float, float]]] = {
    "gpu": _GPU,
    "gpu-hopper": _GPU | {"matmul": (0.70, 1.3), "attention": (0.35, 2.5)},
    "gpu-old": _GPU | {"matmul": (0.75, 1.25), "attention": (0.30, 2.0)},
    "tpu": _GPU | {"matmul": (0.80, 1.25), "attention": (0.40, 2.5), "link": (0.80, 1.25)},
    "cpu": _GPU | {"matmul": (0.60, 1.5), "attention": (0.30, 2.0), "link": (0.60, 1.5)},
}
_GENERATIONS = {
    "gpu-hopper": ("h100", "h200", "h800"),
    "gpu-old": ("k80", "p40", "p100", "gtx"),
}

# Of a product's rate, beside `unaligned`, where a dimension is no multiple of 16 bytes. Padding the
# vocabulary of GPT-2 from 50257 to 50304 makes its whole step about 25 % faster on an A100
# (karpathy/nanoGPT, recalled): its output layer, a quarter of the FLOPs, reaches half of the rate.
# Hopper's matrix units and bulk copies need multiples of 16 bytes (NVIDIA/cutlass#2491): kernels of
# Ampere take their place, which its more and faster cores make 1.5 times as fast as on an A100.
_UNVECTORED = {"gpu-hopper": 0.4}
_UNVECTORED_ELSE = 0.75


def device_class(device: Device) -> str:
    """Return the class of devices whose priors hold for `device`.

    >>> from paceline.core.machine import Device
    >>> memory = Quantity(value=8e10, source="datasheet")
    >>> device_class(Device(name="NVIDIA H100 SXM", kind="gpu", cores=1, memory_bytes=memory))
    'gpu-hopper'
    """
    name = device.name.lower()
    for generation, words in _GENERATIONS.items():
        if device.kind == "gpu" and any(word in name for word in words):
            return generation
    return device.kind if device.kind in _KINDS else "gpu"


def unvectored_factor(device: Device) -> float:
    """Return what is left of the rate of products whose dimensions are no multiples of 16 bytes."""
    return _UNVECTORED.get(device_class(device), _UNVECTORED_ELSE)


def prior(device: Device) -> Efficiency:
    """Return the efficiency that is expected of `device` before anything was measured."""
    figures = _KINDS[device_class(device)]
    return Efficiency(
        **{
            name: Quantity(
                value=value,
                source="recalled",
                low=value / factor,
                high=value * factor,
                reference=f"prior of {device_class(device)}",
            )
            for name, (value, factor) in figures.items()
        }
    )


def efficiency_of(device: Device) -> Efficiency:
    """Return the device's own efficiency, else the prior of its kind."""
    return device.efficiency or prior(device)
