"""Another machine: one with some figures multiplied, for "what if the network were twice as fast".

compute      peak rates of the devices
bandwidth    of their memory
memory       its size
link         bandwidth between the devices of a node
network      bandwidth between nodes
storage      bandwidth of all tiers
loader       samples that a loader process prepares a second: of no machine, see `sample_with`
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.record import nearest
from paceline.perf.transformer.network import NETWORK, OUTSIDE_LEVELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.machine import Device, Link, Machine, Quantity
    from paceline.perf.transformer.supply import SampleCost

FIGURES = ("compute", "bandwidth", "memory", "link", "network", "storage", "loader")
_CHANGE = re.compile(r"([a-z]+)\s*x\s*([0-9.]+)")


def parse_changes(text: str) -> dict[str, float]:
    """Return the factors that a text names.

    >>> parse_changes("network x2, compute x1.5")
    {'network': 2.0, 'compute': 1.5}

    Raises:
        UsageError: the text is of another form, or names an unknown figure.
    """
    found = {}
    for part in text.split(","):
        matched = _CHANGE.fullmatch(part.strip())
        try:
            factor = float(matched[2]) if matched else 0.0
        except ValueError:
            factor = 0.0
        if not matched or not (0 < factor < math.inf):
            raise UsageError(
                f"'{part.strip()}' is no figure with a factor above 0",
                where=f"--what-if '{text}'",
                fix='Give changes as in "network x2, compute x1.5"',
            )
        if matched[1] not in FIGURES:
            raise UsageError(
                f"unknown figure '{matched[1]}'",
                where=f"--what-if '{text}'",
                fix=f"{nearest(matched[1], FIGURES)}; there are {', '.join(FIGURES)}",
            )
        found[matched[1]] = factor
    return found


def with_changes(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """Return the machine with its figures multiplied; figures that it lacks stay away."""
    devices = tuple(_device(device, factors) for device in machine.devices)
    links = tuple(_link(link, factors) for link in machine.links)
    storage = factors.get("storage", 1.0)
    tiers = tuple(
        replace(tier, bandwidth_bytes_per_s=_times(tier.bandwidth_bytes_per_s, storage))
        for tier in machine.tiers
    )
    return replace(machine, devices=devices, links=links, tiers=tiers)


def sample_with(sample: SampleCost, factors: Mapping[str, float]) -> SampleCost:
    """Return what a sample takes with loaders that are so many times as fast."""
    return replace(sample, seconds=sample.seconds / factors.get("loader", 1.0))


def _device(device: Device, factors: Mapping[str, float]) -> Device:
    compute = factors.get("compute", 1.0)
    peaks = tuple(
        replace(peak, flops_per_s=_times(peak.flops_per_s, compute)) for peak in device.peaks
    )
    bandwidth = device.bandwidth_bytes_per_s
    return replace(
        device,
        peaks=peaks,
        memory_bytes=_times(device.memory_bytes, factors.get("memory", 1.0)),
        bandwidth_bytes_per_s=bandwidth and _times(bandwidth, factors.get("bandwidth", 1.0)),
    )


def _link(link: Link, factors: Mapping[str, float]) -> Link:
    if link.level == NETWORK:
        factor = factors.get("network", 1.0)
    else:
        factor = 1.0 if link.level in OUTSIDE_LEVELS else factors.get("link", 1.0)
    return replace(link, bandwidth_bytes_per_s=_times(link.bandwidth_bytes_per_s, factor))


def _times(quantity: Quantity, factor: float) -> Quantity:
    """Return a figure times a factor, with its interval."""
    if factor == 1.0:
        return quantity
    low, high = (end * factor if end else end for end in (quantity.low, quantity.high))
    return replace(quantity, value=quantity.value * factor, low=low, high=high)
