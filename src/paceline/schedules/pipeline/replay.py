"""Predicts when each action of a PipelineSchedule runs: the schedule on a virtual clock.

An action begins when the action before it on its rank has ended and all data that it needs have
arrived; it takes the seconds of its stage. When it ends, its messages are sent, one per edge to a
stage on another rank; a message of n bytes takes::

    wait for the link + n / bandwidth + latency

On a link messages move one after another, in the order in which they were ready. `Link.sharing`
says what is one link: each ``pair`` of ranks; what a ``device`` or a ``node`` sends, and what it
receives (links are full duplex); or ``all`` messages of the level. Compute is not slowed down by
transfers: the model holds where the network does not take the cores' time.

Time in which a rank is idle is its bubble. The part of it during which the message that the rank
waited for longest was already on its way is exposed transfer.

Any order that `check_pipeline` accepts can be replayed, by the same graph of actions.

Cost: half a second for 100,000 actions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.core.machine import Link
from paceline.core.record import Record
from paceline.schedules.pipeline.check import cycle_error
from paceline.schedules.pipeline.graph import ActionGraph
from paceline.schedules.topology import Topology

if TYPE_CHECKING:
    from paceline.schedules.pipeline.costs import StageCosts
    from paceline.schedules.pipeline.schedule import PipelineSchedule, StageEdge


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineReplay(Record):
    """When each action of a schedule ran.

    Attributes:
        start_s: of each rank's actions, in its order; the batch begins at 0.
        end_s: of each rank's actions, in its order.
        busy_s: seconds of actions, by rank.
        exposed_transfer_s: seconds of each rank's bubble during which the data that it waited for
            were on their way.
    """

    start_s: tuple[tuple[float, ...], ...]
    end_s: tuple[tuple[float, ...], ...]
    busy_s: tuple[float, ...]
    exposed_transfer_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Seconds until the last action of any rank has ended."""
        return max((ends[-1] for ends in self.end_s if ends), default=0.0)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank is idle."""
        return tuple(self.makespan_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks over their time, 0 to 1."""
        makespan_s = self.makespan_s
        if makespan_s == 0:
            return 0.0
        return 1 - sum(self.busy_s) / (makespan_s * len(self.busy_s))


def replay(
    schedule: PipelineSchedule,
    edges: Sequence[StageEdge],
    costs: StageCosts,
    link: Link | Topology | None = None,
    *,
    microbatch_sizes: Sequence[float] = (),
) -> PipelineReplay:
    """Return when each action runs if computing and sending take as long as stated.

    Args:
        schedule: to replay.
        edges: of the model's stages, with the bytes of one microbatch.
        costs: of the stages, one microbatch each.
        link: between all ranks, each of which then counts as a node; or where the ranks are and
            which links connect them. None: transfers take no time.
        microbatch_sizes: of each microbatch, relative to that of costs and edges, to which its
            seconds and bytes are proportional; empty: 1 each.

    Raises:
        InvalidSchedule: the schedule deadlocks, or lacks an action.
        UsageError: costs, topology or sizes are of other stages, ranks or microbatches.
    """
    if len(costs.forward_s) != schedule.stages:
        raise UsageError(
            f"the costs are of {len(costs.forward_s)} stages, the schedule has {schedule.stages}",
            fix="Give the costs of this model's stages",
        )
    sizes = microbatch_sizes or (1.0,) * schedule.microbatches
    if len(sizes) != schedule.microbatches:
        raise UsageError(
            f"{len(sizes)} sizes are given for {schedule.microbatches} microbatches",
            fix="Give the relative size of each microbatch",
        )
    graph = ActionGraph.of(schedule, edges)
    times = _Times.run(graph, costs, _Network.of(schedule.ranks, link), sizes)
    if times.count < len(graph.actions):
        raise cycle_error(schedule, graph, graph.cycle())
    ranges = list(zip(graph.begins[:-1], graph.begins[1:], strict=True))
    return PipelineReplay(
        start_s=tuple(tuple(times.start_s[begin:end]) for begin, end in ranges),
        end_s=tuple(tuple(times.end_s[begin:end]) for begin, end in ranges),
        busy_s=tuple(sum(times.seconds[begin:end]) for begin, end in ranges),
        exposed_transfer_s=tuple(sum(times.exposed_s[begin:end]) for begin, end in ranges),
    )


@dataclass(kw_only=True, slots=True)
class _Times:
    """Times by number of the action; `count` is the number of actions that were performed."""

    seconds: list[float]
    start_s: list[float]
    end_s: list[float]
    exposed_s: list[float]
    count: int = 0

    @classmethod
    def run(
        cls, graph: ActionGraph, costs: StageCosts, network: _Network, sizes: Sequence[float]
    ) -> _Times:
        """Return the times of all actions that can be performed."""
        by_kind = costs.by_kind()
        total = len(graph.actions)
        times = cls(
            seconds=[
                by_kind[kind][stage] * sizes[microbatch]
                for kind, stage, microbatch in graph.actions
            ],
            start_s=[0.0] * total,
            end_s=[0.0] * total,
            exposed_s=[0.0] * total,
        )
        waits, rank = list(graph.waits), graph.rank
        sent_s = [0.0] * total  # when the data that arrived last, at start_s, were sent
        # Ends of actions that have begun. They come out of the heap in the order of time, hence
        # messages enter the network in the order in which they are ready.
        running = [(times.seconds[n], n) for n, count in enumerate(waits) if count == 0]
        heapq.heapify(running)
        while running:
            now_s, number = heapq.heappop(running)
            times.count += 1
            times.end_s[number] = now_s
            size = sizes[graph.actions[number].microbatch]
            arrivals = [
                (after, network.arrival_s(now_s, rank[number], rank[after], size * count))
                for after, count in graph.arcs[number]
            ]
            if number + 1 < total and rank[number + 1] == rank[number]:
                arrivals.append((number + 1, now_s))
            for after, arrival_s in arrivals:
                if (arrival_s, now_s) > (times.start_s[after], sent_s[after]):
                    times.start_s[after], sent_s[after] = arrival_s, now_s
                waits[after] -= 1
                if waits[after] == 0:
                    times._begin(after, sent_s[after], graph)
                    heapq.heappush(running, (times.start_s[after] + times.seconds[after], after))
        return times

    def _begin(self, number: int, sent_s: float, graph: ActionGraph) -> None:
        """Note how much of the rank's wait for an action's data was their transfer."""
        is_first = number == graph.begins[graph.rank[number]]
        free_s = 0.0 if is_first else self.end_s[number - 1]
        self.exposed_s[number] = self.start_s[number] - max(free_s, sent_s)


@dataclass(kw_only=True, slots=True)
class _Route:
    """From one rank to another: what a message takes there, and the ports that it occupies."""

    latency_s: float
    s_per_byte: float
    ports: tuple[tuple[object, ...], ...]


@dataclass(kw_only=True, slots=True)
class _Network:
    """Which ports are occupied until when. None as topology: transfers take no time."""

    topology: Topology | None
    host_of: Sequence[int] = ()
    device_of: Sequence[int] = ()
    routes: dict[tuple[int, int], _Route] = field(default_factory=dict)
    free_s: dict[tuple[object, ...], float] = field(default_factory=dict)

    @classmethod
    def of(cls, ranks: int, link: Link | Topology | None) -> _Network:
        if link is None:
            return cls(topology=None)
        if isinstance(link, Link):
            link = Topology(hosts=tuple((rank,) for rank in range(ranks)), across=link)
        placed = sum(len(host) for host in link.hosts)
        if placed != ranks:
            raise UsageError(
                f"the schedule is for {ranks} ranks, the hosts have {placed}",
                fix="Make the schedule for the ranks of these hosts",
            )
        return cls(
            topology=link, host_of=link.host_of().tolist(), device_of=link.device_of().tolist()
        )

    def arrival_s(self, ready_s: float, source: int, destination: int, size: float) -> float:
        """Return when a message arrives, and occupy its ports until it has left them."""
        if source == destination or self.topology is None:
            return ready_s
        route = self.routes.get((source, destination))
        if route is None:
            route = self.routes[source, destination] = self._route(source, destination)
        start_s = ready_s
        for port in route.ports:
            start_s = max(start_s, self.free_s.get(port, 0.0))
        end_s = start_s + size * route.s_per_byte
        for port in route.ports:
            self.free_s[port] = end_s
        return end_s + route.latency_s

    def _route(self, source: int, destination: int) -> _Route:
        assert self.topology is not None
        inside = self.host_of[source] == self.host_of[destination]
        link = self.topology.inside if inside else self.topology.across
        if link is None:
            raise UsageError(
                f"the topology has no link between ranks {source} and {destination}",
                fix="Give the link " + ("inside hosts" if inside else "across hosts"),
            )
        ports: tuple[tuple[object, ...], ...]
        if link.sharing == "pair":
            ports = ((inside, source, destination),)
        elif link.sharing == "all":
            ports = ((inside,),)
        else:
            place = self.device_of if link.sharing == "device" else self.host_of
            ports = ((inside, "out", place[source]), (inside, "in", place[destination]))
        return _Route(
            latency_s=link.latency_s.value,
            s_per_byte=1 / link.bandwidth_bytes_per_s.value,
            ports=ports,
        )
