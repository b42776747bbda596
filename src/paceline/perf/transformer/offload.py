"""Training of a transformer within a memory budget: what goes over the host link, and its cost.

Activations leave after a microbatch's forward pass and come back for its backward pass, beside the
passes of other layers; the optimizer's state comes and goes once a step, for the update. Two layers
of each stay on the device, one that is computed and one on its way. As the link has two
directions, a pass hides so many bytes as the link moves meanwhile; an update hides none.

What is spilled first costs least: activations that the passes hide, then the optimizer's state, a
byte of which crosses the link once each way, then the other activations, which do so for every
microbatch. Where activations are to be computed again, the plan says so (`Plan.recompute`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import MemoryExceeded, UsageError
from paceline.core.estimate import MemoryFit
from paceline.perf.transformer.layer import activation_bytes
from paceline.perf.transformer.memory import rank_memory, stage_layer_counts, state_bytes

if TYPE_CHECKING:
    from paceline.core.machine import Link, Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.step import StepSeconds

HOST = "host"
RESIDENT_LAYERS = 2  # one that is computed, one on its way
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """What a rank of the pipeline can spill.

    Attributes:
        kinds: bytes that it needs in core, by kind.
        activations: bytes of layers' activations that may leave the device.
        optimizer: bytes of the optimizer's state that may.
        moved_bytes: of activations that a microbatch's forward pass would write if all left.
    """

    kinds: dict[str, int]
    activations: float
    optimizer: float
    moved_bytes: float

    @property
    def total_bytes(self) -> int:
        """All that it needs in core."""
        return sum(self.kinds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spill:
    """Bytes that leave a rank's device, and the seconds of a step that this adds."""

    activations: float
    optimizer: float
    exposed_s: float


def fit_device(
    machine: Machine,
    model: Architecture,
    plan: Plan,
    microbatch: float,
    times: StepSeconds,
    *,
    step_s: float,
    budget_bytes: int,
) -> MemoryFit:
    """Return what stays on the device within a budget, and the predicted cost.

    The ranks of a pipeline have budgets of their own; the answer is that of the rank that waits
    longest for its link, or is fullest where none does.

    Args:
        machine: with a link of the level ``host``.
        model: to train.
        plan: how it is spread.
        microbatch: samples of one.
        times: of the step in core, without what it waits for data and others.
        step_s: of that step in all.
        budget_bytes: of each device.

    Raises:
        MemoryExceeded: no plan fits; the error has the smallest budget that one fits.
        UsageError: the machine has no link to its hosts' memory.
    """
    rate, source = host_rate(machine)
    ranks = _ranks(machine, model, plan, microbatch)
    least = max(rank.total_bytes - rank.activations - rank.optimizer for rank in ranks)
    if least > budget_bytes:
        raise MemoryExceeded(
            f"no plan keeps {budget_bytes / GIB:.1f} GiB of each device",
            where="paceline plan --fit",
            why=f"with all that can leave on the host, {least / GIB:.1f} GiB stay",
            fix=f"Give {least / GIB:.1f} GiB or more, or more ranks to --tensor, --stages or --zero"
            + ("" if plan.recompute == "full" else ", or --recompute full"),
        )
    spills = [_spilled(rank, plan, times, rate, budget_bytes) for rank in ranks]
    chosen = max(
        range(len(ranks)), key=lambda rank: (spills[rank].exposed_s, ranks[rank].total_bytes)
    )
    rank, spill = ranks[chosen], spills[chosen]
    moved = plan.microbatch_count * _moved_bytes(rank, spill.activations)
    return MemoryFit(
        budget_bytes=budget_bytes,
        least_bytes=math.ceil(least),
        peak_bytes=round(rank.total_bytes - spill.activations - spill.optimizer),
        in_core_peak_bytes=rank.total_bytes,
        step_s=step_s + spill.exposed_s,
        in_core_step_s=step_s,
        exposed_s=spill.exposed_s,
        spilled_bytes=round(moved + spill.optimizer),
        kinds=_kinds(rank, spill),
        disk_bytes_per_s=rate,
        disk_source=source,
    )


def _kinds(rank: _Rank, spill: _Spill) -> dict[str, dict[str, int]]:
    """Return bytes by kind, and by what becomes of them."""
    leaving = {"activations": spill.activations, "optimizer state": spill.optimizer}
    names = {"optimizer": "optimizer state"}
    found = {}
    for kind in ("activations", "optimizer", "parameters", "gradients"):
        name = names.get(kind, kind)
        gone = round(leaving.get(name, 0.0))
        found[name] = {"keep": rank.kinds[kind] - gone, "spill": gone}
    return found


def host_rate(machine: Machine) -> tuple[float, str]:
    """Return bytes a second between a device and its host's memory, and where that is from."""
    link = machine.link(HOST)
    if link is None:
        raise UsageError(
            "a device spills over its link to the host, of which the machine says nothing",
            where=f"{machine.name}: links",
            fix="Add a link of the level 'host' to the machine file",
        )
    return _share(link, machine), f"host link: {link.bandwidth_bytes_per_s.source}"


def _share(link: Link, machine: Machine) -> float:
    devices = machine.devices[0].count if link.sharing in ("node", "all") else 1
    return link.bandwidth_bytes_per_s.value / devices


def _ranks(machine: Machine, model: Architecture, plan: Plan, microbatch: float) -> list[_Rank]:
    counts, stages = stage_layer_counts(model, plan), plan.mesh.pipeline
    saved, _ = activation_bytes(model, plan, microbatch)
    layer = state_bytes(model.layer_parameters / plan.mesh.tensor, plan).optimizer
    found = []
    for number, kinds in enumerate(rank_memory(model, plan, microbatch, machine.devices[0])):
        found.append(
            _Rank(
                kinds=kinds,
                activations=max(0.0, kinds["activations"] - RESIDENT_LAYERS * saved),
                optimizer=max(0.0, kinds["optimizer"] - RESIDENT_LAYERS * layer),
                moved_bytes=sum(counts[number::stages]) * saved,
            )
        )
    return found


def _spilled(rank: _Rank, plan: Plan, times: StepSeconds, rate: float, budget_bytes: int) -> _Spill:
    """Return what leaves a rank's device, the cheapest first, until the rest keeps the budget."""
    count = plan.microbatch_count
    passes_s = (times.breakdown.forward / count, times.breakdown.backward / count)
    hidden = min(1.0, rate * min(passes_s) / rank.moved_bytes) if rank.moved_bytes else 0.0
    excess = max(0.0, rank.total_bytes - budget_bytes)
    activations = min(excess, hidden * rank.activations)
    optimizer = min(excess - activations, rank.optimizer)
    activations += min(excess - activations - optimizer, rank.activations - activations)
    moved_s = _moved_bytes(rank, activations) / rate
    waits_s = sum(max(0.0, moved_s - pass_s) for pass_s in passes_s)
    return _Spill(
        activations=activations,
        optimizer=optimizer,
        exposed_s=count * times.stretch * waits_s + optimizer / rate,
    )


def _moved_bytes(rank: _Rank, activations: float) -> float:
    """Return the bytes of a microbatch that cross the link each way."""
    return rank.moved_bytes * activations / rank.activations if rank.activations else 0.0
