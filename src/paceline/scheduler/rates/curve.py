"""How a job's rate grows with its devices: the concave envelope of what was measured.

Measured rates are noisy: some fall with more devices, some grow faster than the devices do. A
scheduler that compares gains needs a curve without bumps, so it takes the least concave and
monotone curve above the points::

    rate |            o  (4, 3.1)                 * measured below the envelope
         |       ....-----------  8: 3.1          o measured on it
         |    o (2, 1.9)      * (8, 2.8)
         |  o (1, 1.0)
         +---------------------------- devices

Between points the rate is linear, beyond the last point it stays. Where only one number of devices
was measured, the prior of the model's class gives the rest of the shape::

    rate(n) = n / (1 + serial (n - 1) + exchange n log2 n)      relative to one device

serial is the share of a step that more devices do not shorten (at the limit n -> inf and without
exchange: 1 / serial), exchange what each doubling of the ranks adds to it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Prior:
    """Shape of a scaling curve that was not measured.

    Attributes:
        serial: share of a step that more devices do not shorten.
        exchange: added share of a step for each doubling of the ranks.
    """

    serial: float
    exchange: float

    def speedup(self, devices: int) -> float:
        """Return the rate on `devices` devices, relative to one."""
        log = math.log2(devices)
        return devices / (1 + self.serial * (devices - 1) + self.exchange * devices * log)


PRIORS = {  # by class of model; what is exchanged per FLOP decides
    "convolutional": Prior(0.01, 0.01),
    "transformer": Prior(0.01, 0.03),
    "recurrent": Prior(0.02, 0.08),
    "recommendation": Prior(0.05, 0.15),
}
DEFAULT_PRIOR = Prior(0.02, 0.05)


class Curve:
    """Rates by number of devices, monotone and concave."""

    def __init__(self, points: Iterable[tuple[int, float]], prior: Prior = DEFAULT_PRIOR) -> None:
        """Make the envelope of points.

        Args:
            points: devices and the measured rate, in units of work per second.
            prior: gives the shape where one point alone was measured.

        Raises:
            ConfigError: there is no point, or one is not positive.
        """
        measured: dict[int, float] = {}
        for devices, rate in points:
            if devices < 1 or not rate > 0 or not math.isfinite(rate):
                raise ConfigError(
                    f"a rate of {rate} on {devices} devices cannot be",
                    fix="Give positive rates on one or more devices",
                )
            measured[devices] = max(rate, measured.get(devices, 0.0))
        if not measured:
            raise ConfigError("no rate was measured", fix="Give the rate on at least one device")
        if len(measured) == 1:
            ((known, rate),) = measured.items()
            sizes = sorted({known, *(1 << power for power in range(11))})
            unit = rate / prior.speedup(known)
            measured = {size: unit * prior.speedup(size) for size in sizes}
        self._devices, self._rates = _envelope(sorted(measured.items()))

    def rate(self, devices: int) -> float:
        """Return units of work per second."""
        known, rates = self._devices, self._rates
        index = bisect.bisect_left(known, devices)
        if index == len(known):
            return rates[-1]
        if known[index] == devices:
            return rates[index]
        below, above = (known[index - 1], known[index]) if index else (0, known[0])
        rate_below = rates[index - 1] if index else 0.0
        part = (devices - below) / (above - below)
        return rate_below + part * (rates[index] - rate_below)


def knee(rates: Sequence[float], threshold: float) -> int:
    """Return the largest number of devices at which the last one still pays; at least 1.

    Args:
        rates: on 1, 2, ... devices, as measured or on a curve.
        threshold: gain of a device, relative to the rate on one, that still pays.
    """
    pays = [after - before >= threshold * rates[0] for before, after in itertools.pairwise(rates)]
    return max((devices for devices, paid in enumerate(pays, 2) if paid), default=1)


def _envelope(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    """Return the upper hull of the origin and the points, up to the largest rate."""
    hull: list[tuple[int, float]] = [(0, 0.0)]
    for devices, rate in points:
        if rate <= hull[-1][1]:
            continue  # fewer devices are as fast
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2], hull[-1]
            if (y1 - y0) * (devices - x0) > (rate - y0) * (x1 - x0):
                break
            hull.pop()
        hull.append((devices, rate))
    return [devices for devices, _ in hull[1:]], [rate for _, rate in hull[1:]]
