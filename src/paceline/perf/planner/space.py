"""The plans that a search compares: all that divide devices, layers and batch without a rest.

Axes, from the outside:

    nodes        those that are asked for
    tensor       divisors of the heads, at most `MOST_TENSOR` ranks
    stages       divisors of the other devices, at most one stage per layer
    context      divisors of the rest that leave `LEAST_TOKENS` tokens of a sequence to a rank
    sequence_parallel    with tensor-parallel ranks: whether they share out the sequence as well
    microbatch   divisors of a replica's batch
    interleave   divisors of a stage's layers, where the microbatches are a multiple of the stages
    schedule     of a pipeline that is not interleaved
    zero         0 to 3, with replicas; 0 where gradients are compressed
    recompute    all kinds; ``selective`` where attention is not fused

What changes results or takes other resources has values only on request: `VARIED`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from paceline.core.errors import UsageError
from paceline.perf.transformer.options import TransformerOptions, make_plan
from paceline.perf.transformer.supply import SampleCost

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.transformer.architecture import Architecture

MOST_TENSOR = 64
LEAST_TOKENS = 256
MOST_INTERLEAVE = 12
AXES = (
    "tensor", "stages", "context", "sequence_parallel", "microbatch", "interleave", "schedule",
    "zero", "recompute",
)  # fmt: skip
VARIED = ("precision", "compression", "loader_workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What is fixed and what is varied.

    Attributes:
        batch: samples of a step over all replicas.
        nodes: numbers of nodes to try.
        fixed: fields of `TransformerOptions` that all plans share, with their values; an axis that
            is not among them is varied.
        varied: fields of `VARIED`, each with the values that are tried.
        sample: what it takes to load one; None: data are in memory.
        budget_bytes: of each device; what exceeds it goes over the host link in every step. None:
            plans that need more than a device has do not fit.
    """

    batch: int
    nodes: tuple[int, ...]
    fixed: dict[str, Any]
    varied: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    sample: SampleCost | None = None
    budget_bytes: int | None = None

    def __post_init__(self) -> None:
        known = {known.name for known in fields(TransformerOptions)} - {"nodes", "batch"}
        unknown = sorted({*(set(self.fixed) - known), *(set(self.varied) - set(VARIED))})
        twice = sorted(set(self.fixed) & set(self.varied))
        if twice:
            raise UsageError(
                f"'{twice[0]}' is fixed at {self.fixed[twice[0]]} and varied",
                where="SearchSpace",
                fix="Fix it, or vary it",
            )
        if unknown or not self.nodes or min(self.nodes) < 1 or self.batch < 1:
            raise UsageError(
                f"'{unknown[0]}' is no field of a plan that can be fixed or varied"
                if unknown
                else "there is nothing to search",
                where="SearchSpace",
                fix="Give a batch and numbers of nodes from 1",
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """What is varied: always, and on request."""
        return (*AXES, *self.varied)

    def options(self, machine: Machine, model: Architecture) -> Iterator[TransformerOptions]:
        """Yield the options of each plan."""
        for chosen in itertools.product(*self.varied.values()):
            varied = dict(zip(self.varied, chosen, strict=True))
            base = TransformerOptions(batch=self.batch, **self.fixed, **varied)
            yield from self._of_base(machine, model, base)

    def _of_base(
        self, machine: Machine, model: Architecture, base: TransformerOptions
    ) -> Iterator[TransformerOptions]:
        for nodes in self.nodes:
            devices = nodes * machine.devices[0].count
            for mesh in self._meshes(model, devices):
                inner = mesh["tensor"] * mesh["stages"] * mesh["context"]
                replicas = devices // inner
                if self.batch % replicas:
                    continue
                shares = (True, False) if mesh["tensor"] > 1 else (False,)
                for shared in self._values("sequence_parallel", shares):
                    chosen = replace(base, nodes=nodes, sequence_parallel=shared, **mesh)
                    yield from self._with_passes(model, chosen, replicas)

    def plans(self, machine: Machine, model: Architecture) -> Iterator[Plan]:
        """Yield each plan."""
        for options in self.options(machine, model):
            yield make_plan(machine, options)[0]

    def _values(self, name: str, found: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else found

    def _meshes(self, model: Architecture, devices: int) -> Iterator[dict[str, Any]]:
        widest = min(MOST_TENSOR, devices)
        for tensor in self._values("tensor", _divisors(model.heads, widest)):
            if devices % tensor or model.heads % tensor:
                continue
            left = devices // tensor
            for stages in self._values("stages", _divisors(left, min(model.layers, left))):
                if left % stages or stages > model.layers:
                    continue
                rest = left // stages
                most = max(1, min(rest, model.sequence // LEAST_TOKENS))
                for context in self._values("context", _divisors(rest, most)):
                    if rest % context == 0 and model.sequence % context == 0:
                        yield {"tensor": tensor, "stages": stages, "context": context}

    def _with_passes(
        self, model: Architecture, chosen: TransformerOptions, replicas: int
    ) -> Iterator[TransformerOptions]:
        """Yield the options with each way to pass a batch through the stages."""
        share = self.batch // replicas
        fused = chosen.fused_attention
        kinds = (
            ("none", "operators", "full") if fused else ("none", "selective", "operators", "full")
        )
        shares_state = replicas * chosen.context > 1 and chosen.compression == 1
        zeros = (0, 1, 2, 3) if shares_state else (0,)
        for microbatch in self._values("microbatch", _divisors(share, share)):
            if share % microbatch:
                continue
            count = share // microbatch
            for interleave, schedule in self._orders(model, chosen.stages, count):
                for zero in self._values("zero", zeros):
                    for recompute in self._values("recompute", kinds):
                        yield replace(
                            chosen,
                            microbatch=microbatch,
                            interleave=interleave,
                            schedule=schedule,
                            zero=zero,
                            recompute=recompute,
                        )

    def _orders(self, model: Architecture, stages: int, count: int) -> Iterator[tuple[int, Any]]:
        orders = ("1f1b", "fill_drain", "zero_bubble") if stages > 1 else ("1f1b",)
        if 1 in self._values("interleave", (1,)):
            yield from ((1, schedule) for schedule in self._values("schedule", orders))
        if stages == 1 or model.layers % stages or count % stages:
            return
        if "1f1b" not in self._values("schedule", orders):  # interleaved stages have that order
            return
        layers = model.layers // stages
        for interleave in self._values("interleave", _divisors(layers, MOST_INTERLEAVE)):
            if interleave > 1 and layers % interleave == 0:
                yield interleave, "1f1b"


def _divisors(number: int, most: int) -> tuple[int, ...]:
    """Return the divisors up to `most`, ascending."""
    return tuple(value for value in range(1, min(number, most) + 1) if number % value == 0)
