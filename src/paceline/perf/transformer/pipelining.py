"""Seconds of a pipeline's batch, from the PipelineSchedule that the runtime executes.

Small schedules are replayed action by action. Large ones (64 stages and 512 microbatches have
65,000 actions) are extended from replays of small ones: where all stages but the first and the last
are equal, one more microbatch adds the same time each, and one more stage adds the same time each,
once the pipeline is full::

    T(p, m) = T(p0, m0) + (p - p0) dT/dp + (m - m0) dT/dm

A property test pins the extension to the replay: within 2 % with one stage per rank, within 5 % for
interleaved ones, within rounding where all stages are equal. Then the closed form is (m v + p - 1)
(f + b) with v stages per rank.

Messages move while ranks compute. With one stage per rank and boundaries that are all alike they
make each pass longer, see `StagePasses.with_messages`; else they are replayed: interleaved ranks
have more microbatches on their way, which hides short messages. Where the plan says that messages
do not overlap, a rank computes nothing while it sends or receives (`StagePasses.blocking`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.machine import Link, Quantity
from paceline.schedules import Topology
from paceline.schedules.pipeline import (
    ORDERS,
    StageCosts,
    StageEdge,
    interleaved,
    peak_activation_bytes,
    replay,
)

if TYPE_CHECKING:
    from paceline.core.plan import Plan
    from paceline.schedules.pipeline import PipelineSchedule

_MOST_ACTIONS = 600  # replayed in about 3 ms
_SMALL = 4  # ranks from which large pipelines are extended
_ROUNDS = 3  # microbatches per rank at which the pipeline is full


@dataclass(frozen=True, slots=True)
class StagePasses:
    """Seconds of the stages of a pipeline for one microbatch.

    Attributes:
        forward_s: by stage, in the order of the model.
        backward_s: the same of the backward pass.
        messages_s: of an activation to the next rank of the pipeline, by rank that sends; empty:
            none take time.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    messages_s: tuple[float, ...] = ()

    @property
    def is_regular(self) -> bool:
        """Whether all stages but the first and the last cost the same."""
        inner = zip(self.forward_s[1:-1], self.backward_s[1:-1], strict=True)
        return len(set(inner)) <= 1

    @property
    def is_uniform(self) -> bool:
        """Whether all messages take the same time."""
        return len(set(self.messages_s)) <= 1

    def with_messages(self) -> StagePasses:
        """Return passes that include their messages, all of which take the same time.

        Of p ranks under 1F1B, the first has p microbatches on their way through p - 1 boundaries
        and back: in the steady state each pass is longer by (p - 1) / p of a message.
        """
        ranks = len(self.messages_s) + 1
        more_s = self.messages_s[0] * (ranks - 1) / ranks if self.messages_s else 0.0
        return StagePasses(
            tuple(seconds + more_s for seconds in self.forward_s),
            tuple(seconds + more_s for seconds in self.backward_s),
        )

    def blocking(self, ranks: int) -> StagePasses:
        """Return passes that include their messages, in which a rank computes nothing.

        A pass receives at one end of its stage and sends at the other, one message after the other.
        The last rank's message to the first one, of interleaved stages, takes as long as the
        longest one.

        Args:
            ranks: of the pipeline.
        """
        if not self.messages_s:
            return self
        last = len(self.forward_s) - 1
        longest_s = max(self.messages_s)
        sent_s = [(*self.messages_s, longest_s)[stage % ranks] for stage in range(last)]
        around_s = [
            (sent_s[stage - 1] if stage else 0.0) + (sent_s[stage] if stage < last else 0.0)
            for stage in range(last + 1)
        ]
        return StagePasses(
            tuple(own_s + more_s for own_s, more_s in zip(self.forward_s, around_s, strict=True)),
            tuple(own_s + more_s for own_s, more_s in zip(self.backward_s, around_s, strict=True)),
        )

    def shortened(self, ranks: int, chunks: int) -> StagePasses:
        """Return the times of a model with fewer inner stages, on `ranks` with `chunks` each."""
        inner = ranks * chunks - 1
        return StagePasses(
            self.forward_s[:inner] + self.forward_s[-1:],
            self.backward_s[:inner] + self.backward_s[-1:],
            self.messages_s[: ranks - 1],
        )


def make_schedule(plan: Plan, ranks: int, microbatches: int) -> PipelineSchedule:
    """Return the order that the plan names, for so many ranks and microbatches."""
    if plan.stages_per_rank > 1:
        return interleaved(ranks, plan.stages_per_rank, microbatches)
    return ORDERS[plan.schedule](ranks, microbatches)


def batch_s(plan: Plan, passes: StagePasses, microbatches: int) -> float:
    """Return the seconds from the first forward pass to the end of the last backward pass."""
    ranks = plan.mesh.pipeline
    if ranks == 1:
        return microbatches * (sum(passes.forward_s) + sum(passes.backward_s))
    times = passes
    if not plan.overlap_pipeline:
        times = passes.blocking(ranks)
    elif passes.is_uniform and plan.stages_per_rank == 1:
        times = passes.with_messages()
    if 2 * microbatches * len(times.forward_s) <= _MOST_ACTIONS:
        return replayed_s(plan, times, ranks, microbatches)
    if not times.is_uniform or not times.is_regular or ranks <= _SMALL:
        return _more_microbatches(plan, times, microbatches)
    return _extended(plan, times, microbatches)


def replayed_s(plan: Plan, times: StagePasses, ranks: int, microbatches: int) -> float:
    """Return `batch_s` by replaying all actions.

    Messages of different lengths are replayed as well: a message moves while ranks compute.
    """
    edges = [StageEdge(stage, stage + 1, 1) for stage in range(len(times.forward_s) - 1)]
    costs = StageCosts(forward_s=times.forward_s, backward_s=times.backward_s)
    schedule = make_schedule(plan, ranks, microbatches)
    return replay(schedule, edges, costs, _topology(times.messages_s)).makespan_s


def _topology(messages_s: tuple[float, ...]) -> Topology | None:
    """Return ranks on hosts between which messages are slow, and inside of which they are fast."""
    if not messages_s:
        return None
    fast_s, slow_s = min(messages_s), max(messages_s)
    hosts: list[list[int]] = [[0]]
    for rank, seconds in enumerate(messages_s):
        if seconds >= (fast_s + slow_s) / 2:
            hosts.append([])
        hosts[-1].append(rank + 1)
    return Topology(
        hosts=tuple(tuple(host) for host in hosts),
        inside=_link("inside", fast_s),
        across=_link("across", slow_s),
    )


def _link(level: str, seconds: float) -> Link:
    """Return a link over which a message of one byte takes `seconds`, one after another."""
    rate = 1 / max(seconds, 1e-12)
    return Link(
        level=level,
        latency_s=Quantity(value=0.0, source="fit"),
        bandwidth_bytes_per_s=Quantity(value=rate, source="fit"),
        sharing="pair",
    )


def _more_microbatches(plan: Plan, times: StagePasses, microbatches: int) -> float:
    ranks = plan.mesh.pipeline
    few = _ROUNDS * ranks
    if microbatches <= few + ranks:
        return replayed_s(plan, times, ranks, microbatches)
    base_s = replayed_s(plan, times, ranks, few)
    round_s = replayed_s(plan, times, ranks, few + ranks) - base_s
    return base_s + (microbatches - few) * round_s / ranks


def _extended(plan: Plan, times: StagePasses, microbatches: int) -> float:
    chunks, few = plan.stages_per_rank, _ROUNDS * _SMALL
    small, larger = (times.shortened(ranks, chunks) for ranks in (_SMALL, _SMALL + 1))
    base_s = replayed_s(plan, small, _SMALL, few)
    per_microbatch_s = (replayed_s(plan, small, _SMALL, few + _SMALL) - base_s) / _SMALL
    more = _ROUNDS * (_SMALL + 1)
    per_rank_s = replayed_s(plan, larger, _SMALL + 1, more) - base_s
    per_rank_s -= (more - few) * per_microbatch_s
    ranks = plan.mesh.pipeline - _SMALL
    return base_s + ranks * per_rank_s + (microbatches - few) * per_microbatch_s


def live_layers(plan: Plan, stage_layers: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
    """Return for each rank the most layers whose activations it keeps, over all microbatches.

    Args:
        plan: its pipeline and order.
        stage_layers: number of layers of each stage, in the order of the model.
        microbatches: of the batch.

    A large schedule keeps at most what one with as many microbatches as two rounds of the ranks
    keeps, except for fill_drain, which keeps all.
    """
    ranks = plan.mesh.pipeline
    if ranks == 1:
        return (sum(stage_layers),)
    if plan.schedule == "fill_drain" and plan.stages_per_rank == 1:
        return tuple(layers * microbatches for layers in stage_layers)
    few = min(microbatches, 2 * ranks)
    if 2 * few * len(stage_layers) <= _MOST_ACTIONS:
        return peak_activation_bytes(make_schedule(plan, ranks, few), stage_layers)
    if plan.stages_per_rank == 1 and plan.schedule == "zero_bubble":
        return tuple(layers * min(few, ranks) for layers in stage_layers)
    return _live_in_closed_form(plan, stage_layers, few)


def _live_in_closed_form(
    plan: Plan, stage_layers: tuple[int, ...], microbatches: int
) -> tuple[int, ...]:
    """Return `live_layers` of 1F1B and of the interleaved order.

    Exact where a rank's stages have equal numbers of layers, else at most too many.
    """
    ranks, chunks = plan.mesh.pipeline, plan.stages_per_rank
    found = []
    for rank in range(ranks):
        warm_up = ranks - 1 - rank
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * ranks
        live = min(warm_up + 1, microbatches * chunks)
        found.append(live * max(stage_layers[rank::ranks]))
    return tuple(found)
