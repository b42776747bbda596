"""Numbers as people read them: three significant digits and the unit that keeps them short.

Everything else in Paceline counts in seconds and bytes; this is the edge where they convert.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# Binary units for memory and files, decimal units for rates, as the field has them.
_DECIMAL = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_LEAST_SHARE = 0.0005  # 0.1 % when it is rounded
_SECONDS = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"), (1e9, "ns"))
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def significant(value: float, digits: int = 3) -> str:
    """Return `value` with `digits` significant digits; whole digits are never rounded away.

    >>> significant(0.012345), significant(9.996), significant(1234.4)
    ('0.0123', '10.0', '1,234')
    """
    if not math.isfinite(value):
        return "-"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    rounded = round(value, digits - 1 - magnitude)
    magnitude = math.floor(math.log10(abs(rounded)))  # 9.996 has become 10.0
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def format_seconds(seconds: float | None, digits: int = 3) -> str:
    """Return a duration with its unit; ``-`` where there is none.

    >>> format_seconds(0.0124494), format_seconds(2.5e-6), format_seconds(75)
    ('12.4 ms', '2.50 µs', '75.0 s')
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds == 0:
        return "0 s"
    for factor, unit in _SECONDS[:-1]:
        if abs(seconds) * factor >= 0.9995:
            return f"{significant(seconds * factor, digits)} {unit}"
    return f"{significant(seconds * 1e9, digits)} ns"


def seconds_that_add_up(parts_s: Sequence[float]) -> list[str]:
    """Return durations, and after them their sum: the shown numbers add up to the shown sum.

    All have one unit and as many decimals, the sum with four digits. A part differs by less than
    one unit of the last digit from what it is.

    >>> seconds_that_add_up([0.00333, 0.00333, 0.00333])
    ['3.33 ms', '3.33 ms', '3.33 ms', '9.99 ms']
    >>> seconds_that_add_up([0.004666, 0.004666, 0.004666])
    ['4.67 ms', '4.67 ms', '4.66 ms', '14.00 ms']
    """
    total_s = math.fsum(parts_s)
    factor, unit = next(
        ((factor, unit) for factor, unit in _SECONDS if total_s * factor >= 0.9995), _SECONDS[-1]
    )
    whole_digits = len(f"{total_s * factor:.0f}")
    decimals = max(0, min(2, 4 - whole_digits) if whole_digits > 1 else 3)
    units = rounded_parts([part_s * factor * 10**decimals for part_s in parts_s])
    scale = 10**decimals
    return [f"{count / scale:,.{decimals}f} {unit}" for count in [*units, sum(units)]]


def shares_that_add_up(parts: Sequence[float]) -> list[str]:
    """Return each part as a share of their sum, in percent with one decimal; together 100.0 %.

    >>> shares_that_add_up([1, 1, 1]), shares_that_add_up([0, 0])
    (['33.4 %', '33.3 %', '33.3 %'], ['0.0 %', '0.0 %'])
    """
    total = math.fsum(parts)
    scaled = [1000 * part / total if total > 0 else 0.0 for part in parts]
    return [f"{count / 10:.1f} %" for count in rounded_parts(scaled)]


def shown_parts(names: Sequence[str], wholes: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the parts that some whole has so much of that `shares_that_add_up` would show it.

    >>> shown_parts(["input", "copy", "other"], [{"input": 1.0, "copy": 0.0, "other": 1e-9}])
    ['input']
    """
    kept = set()
    for whole in wholes:
        total = math.fsum(whole.values())
        kept |= {name for name in names if whole[name] >= _LEAST_SHARE * total > 0}
    return [name for name in names if name in kept]


def rounded_parts(parts: Sequence[float]) -> list[int]:
    """Return whole numbers near `parts` whose sum is the rounded sum of `parts`.

    Every number is rounded down, and those with the largest remainders take what is missing: the
    method of largest remainders (A. Hamilton, 1792).

    >>> rounded_parts([1.4, 1.4, 1.4])
    [2, 1, 1]
    """
    floors = [math.floor(part) for part in parts]
    missing = round(math.fsum(parts)) - sum(floors)
    by_remainder = sorted(range(len(parts)), key=lambda i: floors[i] - parts[i])
    for i in by_remainder[:missing]:
        floors[i] += 1
    return floors


def format_clock_error(error_ns: int | None) -> str:
    """Return the largest error of a rank's clock; where nothing bounds it, that it is unknown.

    >>> format_clock_error(1500), format_clock_error(None)
    ('1.50 µs', 'unknown')
    """
    return "unknown" if error_ns is None else format_seconds(error_ns / 1e9)


def format_bytes(count: float | None) -> str:
    """Return bytes with a binary unit; ``-`` where there are none.

    >>> format_bytes(512), format_bytes(417210368), format_bytes(1024)
    ('512 B', '398 MiB', '1.00 KiB')
    """
    if count is None or not math.isfinite(count):
        return "-"
    value = float(count)
    for unit in _BINARY[:-1]:
        if abs(value) < 1023.5:
            return f"{value:,.0f} B" if unit == "B" else f"{significant(value)} {unit}"
        value /= 1024
    return f"{significant(value)} {_BINARY[-1]}"


def format_size_class(count: int) -> str:
    """Return the upper end of a class of sizes, a power of two.

    >>> format_size_class(524288), format_size_class(0)
    ('512 KiB', 'no data')
    """
    if not count:
        return "no data"
    return format_bytes(count).replace(".00", "").replace(".0 ", " ")


def format_rate(bytes_per_s: float | None) -> str:
    """Return a bandwidth with a decimal unit; ``-`` where there is none.

    >>> format_rate(1.5e9), format_rate(2.5e4), format_rate(12)
    ('1.50 GB/s', '25.0 kB/s', '12.0 B/s')
    """
    if bytes_per_s is None or not math.isfinite(bytes_per_s):
        return "-"
    value = float(bytes_per_s)
    for unit in _DECIMAL[:-1]:
        if abs(value) < 999.5:
            return f"{significant(value)} {unit}"
        value /= 1000
    return f"{significant(value)} {_DECIMAL[-1]}"


def format_share(share: float | None) -> str:
    """Return a share of 1 in percent.

    >>> format_share(0.2449), format_share(0.0004), format_share(0)
    ('24 %', '< 0.1 %', '0 %')
    """
    if share is None or not math.isfinite(share):
        return "-"
    percent = 100 * share
    if percent == 0:
        return "0 %"
    if 0 < percent < 0.1:
        return "< 0.1 %"
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def plural(count: int, noun: str) -> str:
    """Return the count with its noun.

    >>> plural(1, "rank"), plural(2048, "step"), plural(2, "class")
    ('1 rank', '2,048 steps', '2 classes')
    >>> plural(2, "batch")
    '2 batches'
    """
    if count == 1:
        return f"{count:,} {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
