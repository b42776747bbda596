"""Lower bounds of a plan's step time and memory, from parts that many plans share.

Pricing a plan replays its schedule, in milliseconds. A bound takes tens of microseconds: the costs
of a layer depend on few fields of the plan and are kept; the pipeline's time is at least

    T >= busy(last rank) + first forward passes of all stages before its first one
                         + last backward passes of the same stages
    T >= busy(first rank)

since the last rank can neither begin before nor end after them. Where backward passes are split
(zero_bubble), gradients of weights may come last, and the last term is left out. What follows the
pipeline, the reduction of gradients and the optimizer, is priced as it is, and so is the wait for
data. With a memory budget the bytes beyond it leave the device: activations may do so beside the
passes, the optimizer's state may not, and nothing else leaves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.perf.transformer.efficiency import efficiency_of
from paceline.perf.transformer.layer import activation_bytes
from paceline.perf.transformer.memory import (
    memory_of_rank,
    parameters_of_rank,
    stage_layer_counts,
)
from paceline.perf.transformer.network import Network
from paceline.perf.transformer.offload import host_rate
from paceline.perf.transformer.pipelining import live_layers
from paceline.perf.transformer.pricing import DeviceRates
from paceline.perf.transformer.step import after_passes, microbatch_costs, sharded_layer_s
from paceline.perf.transformer.supply import supply

if TYPE_CHECKING:
    from paceline.core.machine import Machine
    from paceline.core.plan import Plan
    from paceline.perf.planner.space import SearchSpace
    from paceline.perf.transformer.architecture import Architecture
    from paceline.perf.transformer.step import MicrobatchCosts


class PlanBounds:
    """Bounds of the plans of one model on one machine."""

    def __init__(self, machine: Machine, model: Architecture, space: SearchSpace) -> None:
        """Bound the plans of a space.

        Raises:
            UsageError: the machine has no device, peak or bandwidth; see `DeviceRates`.
        """
        self._machine, self._model, self._space = machine, model, space
        self._host_rate = host_rate(machine)[0] if space.budget_bytes is not None else 0.0
        self._device = machine.devices[0]
        self._reached = efficiency_of(self._device)
        self._rates: dict[str, DeviceRates] = {}
        self._networks: dict[int, Network] = {}
        self._costs: dict[tuple[object, ...], tuple[MicrobatchCosts, tuple[float, float]]] = {}
        self._live: dict[tuple[object, ...], tuple[int, int]] = {}

    def step_s(self, plan: Plan) -> float:
        """Return seconds that a step of the plan takes at least."""
        mesh, count, model = plan.mesh, plan.microbatch_count, self._model
        network, rates = self._network(plan), self._rates_of(plan)
        costs, _ = self._layer(plan)
        replicas = network.group(mesh.data * mesh.context, mesh.tensor)
        gather_s, reduce_s = sharded_layer_s(model, plan, network, replicas)
        forward_s = costs.layer_forward_s + costs.tensor_forward_s
        backward_s = costs.layer_backward_s + costs.tensor_backward_s
        first, last, before = self._rank_layers(plan)
        last_s = max(last * forward_s + costs.output_forward_s, last * gather_s)
        last_s += max(last * backward_s + costs.output_backward_s, last * (gather_s + reduce_s))
        wait_s = before * max(forward_s, gather_s)
        if plan.schedule != "zero_bubble" or plan.stages_per_rank > 1:
            wait_s += before * max(backward_s, gather_s + reduce_s)
        layer_s = max(forward_s, gather_s) + max(backward_s, gather_s + reduce_s)
        pipeline_s = max(count * last_s + wait_s, count * first * layer_s)
        parameters = max(
            parameters_of_rank(model, plan, 0, first),
            parameters_of_rank(model, plan, mesh.pipeline - 1, last),
        )
        window_s = first * backward_s + (costs.output_backward_s if mesh.pipeline == 1 else 0.0)
        after = after_passes(plan, parameters, window_s, rates, network, replicas)
        step_s = pipeline_s + after.total_s
        pass_s = first * costs.layer_forward_s + costs.output_forward_s
        step_s += self._least_exposed_s(plan, (first, last), pass_s)
        sample = self._space.sample
        if sample is not None:
            step_s += supply(self._machine, plan, self._space.batch, sample).wait_s(step_s)
        return step_s

    def memory_bytes(self, plan: Plan) -> int:
        """Return bytes that the fullest rank needs at least: those of the first or the last one."""
        found = []
        for kinds in self._memory(plan):
            size = sum(kinds.values())
            budget = self._space.budget_bytes
            if budget is not None and size > budget:
                size = max(budget, size - kinds["activations"] - kinds["optimizer"])
            found.append(size)
        return max(found)

    def _least_exposed_s(self, plan: Plan, layers: tuple[int, int], pass_s: float) -> float:
        """Return seconds that a budget adds at least on the first or the last rank.

        Args:
            plan: with bytes beyond the budget or not.
            layers: of the two ranks.
            pass_s: the longest forward pass of a rank. It hides so many bytes of its activations as
                the link moves meanwhile; any other byte crosses the link once or more by itself.
        """
        budget = self._space.budget_bytes
        if budget is None:
            return 0.0
        saved = self._layer(plan)[1][0]
        exposed = [0.0]
        for kinds, count in zip(self._memory(plan), layers, strict=True):
            hidden = min(1.0, self._host_rate * pass_s / (count * saved)) if count else 1.0
            exposed.append(sum(kinds.values()) - budget - hidden * kinds["activations"])
        return max(exposed) / self._host_rate if self._host_rate else 0.0

    def _memory(self, plan: Plan) -> tuple[dict[str, int], ...]:
        """Return the bytes of the first and the last rank, by kind."""
        first, last, _ = self._rank_layers(plan)
        _, activations = self._layer(plan)
        found = []
        for rank, layers, live in zip(
            (0, plan.mesh.pipeline - 1), (first, last), self._live_layers(plan), strict=True
        ):
            parameters = parameters_of_rank(self._model, plan, rank, layers)
            found.append(
                memory_of_rank(
                    self._model,
                    plan,
                    plan.microbatch_samples(self._space.batch),
                    self._device,
                    rank,
                    parameters,
                    live,
                    activations,
                )
            )
        return tuple(found)

    def _network(self, plan: Plan) -> Network:
        if plan.nodes not in self._networks:
            self._networks[plan.nodes] = Network.of(self._machine, self._reached, plan.nodes)
        return self._networks[plan.nodes]

    def _rates_of(self, plan: Plan) -> DeviceRates:
        if plan.precision not in self._rates:
            found = DeviceRates.of(self._machine, plan.precision, self._reached)
            self._rates[plan.precision] = found
        return self._rates[plan.precision]

    def _layer(self, plan: Plan) -> tuple[MicrobatchCosts, tuple[float, float]]:
        """Return a microbatch's costs and a layer's activations: of plans that agree in these."""
        microbatch = plan.microbatch_samples(self._space.batch)
        key = (plan.mesh.tensor, plan.mesh.context, microbatch, plan.recompute, plan.precision,
               plan.sequence_parallel, plan.fused_attention, plan.compiled, plan.balanced_context,
               plan.overlap_tensor, plan.nodes)  # fmt: skip
        if key not in self._costs:
            self._costs[key] = (
                microbatch_costs(
                    self._model, plan, microbatch, self._rates_of(plan), self._network(plan)
                ),
                activation_bytes(self._model, plan, microbatch),
            )
        return self._costs[key]

    def _rank_layers(self, plan: Plan) -> tuple[int, int, int]:
        """Return the layers of the first and the last rank, and of stages before the last rank."""
        ranks, chunks = plan.mesh.pipeline, plan.stages_per_rank
        least, more = divmod(self._model.layers, ranks * chunks)  # the first stages have one more
        first = chunks * least + -(-more // ranks)
        last = chunks * least + more // ranks
        return first, last, (ranks - 1) * least + min(more, ranks - 1)

    def _live_layers(self, plan: Plan) -> tuple[int, int]:
        """Return the layers whose activations the first and the last rank keep."""
        ranks, count = plan.mesh.pipeline, plan.microbatch_count
        few = count if plan.schedule == "fill_drain" else min(count, 2 * ranks)
        key = (ranks, plan.stages_per_rank, plan.schedule, few)
        if key not in self._live:
            live = live_layers(plan, stage_layer_counts(self._model, plan), count)
            self._live[key] = live[0], live[-1]
        return self._live[key]
