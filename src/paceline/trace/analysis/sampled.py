"""What is known of some steps alone: times of layers, operators, and memory by what holds it.

The collectors look closely at few steps (`collectors.sampled_steps`), and torch.profiler at those
for which it was asked. Figures are means over these steps and over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.format.events import (
    MAIN,
    MEMORY_COUNTERS,
    MEMORY_HOST,
    SAMPLED_LAYERS,
    SAMPLED_MEMORY,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.format.files import RankTrace

OPERATORS_MAX = 100
ROOT = "(model)"  # the layer of parameters that are the model's own


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime(Record):
    """One layer, in the mean of its sampled steps and of the ranks.

    Attributes:
        name: qualified, as ``features.0``.
        calls: of the layer in a step's forward passes; 0 for one that was not seen to be called,
            as within compiled code.
        forward_s: in these calls, of a step, with the layers within it.
        self_s: the same without the layers within it.
        ready_s: from the begin of a backward pass until the last of its gradients was ready; None
            without gradients.
        gradient_bytes: of these gradients.
        steps: sampled steps of all ranks on which this rests.
    """

    name: str
    calls: float
    forward_s: float
    self_s: float
    ready_s: float | None
    gradient_bytes: int
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledOperator(Record):
    """One operator or kernel, in the mean of the profiled steps and of the ranks.

    Attributes:
        name: as torch.profiler has it.
        device: ``cpu``, or the name of the device's stream.
        calls: in a step.
        total_s: of a step in them.
        self_s: the same without the operators within it.
        steps: profiled steps of all ranks on which this rests.
    """

    name: str
    device: str
    calls: float
    total_s: float
    self_s: float
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldMemory(Record):
    """What held the memory of a rank, the most in any of its samples.

    Attributes:
        rank: the global rank.
        samples: number of steps in which it was counted.
        held_bytes: by kind: parameters (with buffers), gradients, optimizer, activations (what a
            forward pass left for the backward pass), other. Those that are
            not known are left out.
        host_bytes: resident anonymous memory of the process; 0 if not known.
    """

    rank: int
    samples: int
    held_bytes: dict[str, int]
    host_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples(Record):
    """What the sampled steps of a run show.

    Attributes:
        layers: in the order in which a step calls them.
        operators: of the profiled steps, the longest self time first; at most `OPERATORS_MAX`.
        memory: of each rank that counted it.
        cost_s: seconds that sampling took, summed over the steps, the mean over ranks.
    """

    layers: tuple[LayerTime, ...] = ()
    operators: tuple[ProfiledOperator, ...] = ()
    memory: tuple[HeldMemory, ...] = ()
    cost_s: float = 0.0


def step_samples(ranks: Sequence[RankTrace]) -> StepSamples:
    """Return what the sampled steps of the ranks' traces show."""
    cost_ns = sum(
        int(_counter(rank, name).sum())
        for rank in ranks
        for name in (SAMPLED_LAYERS, SAMPLED_MEMORY)
    )
    return StepSamples(
        layers=_layers(ranks),
        operators=_operators(ranks),
        memory=tuple(held for rank in ranks if (held := _memory(rank)) is not None),
        cost_s=cost_ns / 1e9 / max(1, len(ranks)),
    )


class _Sums:
    """What adds up for one layer."""

    def __init__(self) -> None:
        self.calls = self.forward_ns = self.self_ns = 0
        self.ready_ns: list[float] = []
        self.gradient_bytes = 0


def _layers(ranks: Sequence[RankTrace]) -> tuple[LayerTime, ...]:
    sums: dict[str, _Sums] = {}
    steps = 0
    for rank in ranks:
        calls = rank.events_of(Kind.LAYER)
        gradients = rank.events_of(Kind.GRADIENT)
        steps += len(np.union1d(calls["step"], gradients["step"]))
        _add_calls(rank, calls, sums)
        _add_gradients(rank, gradients, sums)
    return tuple(
        LayerTime(
            name=name,
            calls=found.calls / steps,
            forward_s=found.forward_ns / 1e9 / steps,
            self_s=found.self_ns / 1e9 / steps,
            ready_s=float(np.mean(found.ready_ns)) / 1e9 if found.ready_ns else None,
            gradient_bytes=round(found.gradient_bytes / steps),
            steps=steps,
        )
        for name, found in sums.items()
    )


def _add_calls(rank: RankTrace, calls: np.ndarray, sums: dict[str, _Sums]) -> None:
    calls = calls[np.lexsort((-calls["end_ns"].astype(np.int64), calls["begin_ns"]))]
    own = self_ns(calls["begin_ns"].astype(np.int64), calls["end_ns"].astype(np.int64))
    names, firsts, which = np.unique(calls["name"], return_index=True, return_inverse=True)
    lengths = (calls["end_ns"] - calls["begin_ns"]).astype(np.int64)
    for number in np.argsort(firsts).tolist():  # in the order of their first calls
        chosen = which == number
        found = sums.setdefault(rank.names[names[number]], _Sums())
        found.calls += int(chosen.sum())
        found.forward_ns += int(lengths[chosen].sum())
        found.self_ns += int(own[chosen].sum())


def _add_gradients(rank: RankTrace, gradients: np.ndarray, sums: dict[str, _Sums]) -> None:
    """Add when the last gradient of each layer was ready, for each backward pass."""
    passes = rank.events_of(Kind.BACKWARD)
    if not len(passes):
        return
    inside = np.searchsorted(passes["begin_ns"], gradients["begin_ns"], side="right") - 1
    gradients, inside = gradients[inside >= 0], inside[inside >= 0]
    ready_ns = (gradients["begin_ns"] - passes["begin_ns"][inside]).astype(np.int64)
    layer_of = {name: rank.names[name].rpartition(".")[0] or ROOT for name in
                np.unique(gradients["name"]).tolist()}  # fmt: skip
    layers = sorted(set(layer_of.values()))
    numbers = np.zeros(len(rank.names), dtype=np.int64)
    for name, layer in layer_of.items():
        numbers[name] = layers.index(layer)
    keys = numbers[gradients["name"]] * len(passes) + inside
    order = np.argsort(keys, kind="stable")
    found, first = np.unique(keys[order], return_index=True)
    last_ns = np.maximum.reduceat(ready_ns[order], first) if len(first) else ready_ns
    sizes = np.bincount(numbers[gradients["name"]], gradients["amount"], minlength=len(layers))
    for number, layer in enumerate(layers):
        own = sums.setdefault(layer, _Sums())
        own.gradient_bytes += int(sizes[number])
        own.ready_ns += last_ns[found // len(passes) == number].tolist()


def self_ns(begin_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
    """Return what each of nested intervals lasts without those within it, shape (intervals,).

    Args:
        begin_ns: in order; of equal ones the outer interval comes first.
        end_ns: shaped as `begin_ns`.

    >>> self_ns(np.array([0, 1, 2, 6]), np.array([10, 5, 4, 8])).tolist()
    [4, 2, 2, 2]
    """
    own: np.ndarray = end_ns - begin_ns
    lengths = own.copy()
    # Of the intervals that began before, those that have ended are not around this one.
    depths = np.arange(len(own)) - np.searchsorted(np.sort(end_ns), begin_ns, side="right")
    for depth in range(1, int(depths.max(initial=0)) + 1):
        inner, outer = np.flatnonzero(depths == depth), np.flatnonzero(depths == depth - 1)
        around = outer[np.searchsorted(outer, inner) - 1]
        np.subtract.at(own, around, lengths[inner])
    return own


def _operators(ranks: Sequence[RankTrace]) -> tuple[ProfiledOperator, ...]:
    sums: dict[tuple[str, str], np.ndarray] = {}
    steps = 0
    for rank in ranks:
        events = rank.events_of(Kind.OPERATOR, Kind.KERNEL)
        steps += len(np.unique(events["step"]))
        is_kernel = events["kind"] == Kind.KERNEL
        lengths = (events["end_ns"] - events["begin_ns"]).astype(np.int64)
        own = np.where(is_kernel, lengths, events["amount"].astype(np.int64))
        places = np.where(is_kernel, events["location"].astype(np.int64) + 1, 0)
        keys = places << 16 | events["name"]
        found, which = np.unique(keys, return_inverse=True)
        columns = [np.bincount(which, weights=weights) for weights in (None, lengths, own)]
        for number, key in enumerate(found.tolist()):
            device = rank.locations[(key >> 16) - 1].name if key >> 16 else "cpu"
            column = np.array([values[number] for values in columns], dtype=float)
            place = (rank.names[key & 0xFFFF], device)
            sums[place] = sums[place] + column if place in sums else column
    rows = [
        ProfiledOperator(
            name=name,
            device=device,
            calls=float(calls) / steps,
            total_s=float(total) / 1e9 / steps,
            self_s=float(own) / 1e9 / steps,
            steps=steps,
        )
        for (name, device), (calls, total, own) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.self_s, row.name))[:OPERATORS_MAX])


def _memory(rank: RankTrace) -> HeldMemory | None:
    counted = {kind: _counter(rank, name) for kind, name in MEMORY_COUNTERS.items()}
    samples = len(counted["parameters"])
    if not samples:
        return None
    return HeldMemory(
        rank=rank.rank,
        samples=samples,
        held_bytes={kind: int(values.max()) for kind, values in counted.items() if len(values)},
        host_bytes=int(_counter(rank, MEMORY_HOST).max(initial=0)),
    )


def _counter(rank: RankTrace, name: str) -> np.ndarray:
    """Return the values of a counter of the main thread."""
    if name not in rank.names:
        return np.zeros(0, dtype=np.uint64)
    events = rank.events[rank.events["kind"] == Kind.COUNTER]
    chosen = (events["name"] == rank.names.index(name)) & (events["location"] == MAIN)
    values: np.ndarray = events["amount"][chosen]
    return values
