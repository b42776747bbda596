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
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.errors import UsageError
from paceline.core.machine import Link
from paceline.core.record import Record
from paceline.schedules.pipeline.check import cycle_error
from paceline.schedules.pipeline.graph import ActionGraph
from paceline.schedules.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from paceline.schedules.pipeline.costs import StageCosts
    from paceline.schedules.pipeline.schedule import PipelineSchedule, StageEdge

_NO_PORT = -1


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
    by_kind = costs.by_kind()
    seconds = [by_kind[kind][stage] * sizes[m] for kind, stage, m in graph.actions]
    sent = np.array(sizes)[[action.microbatch for action in graph.actions]]
    messages = _Messages.of(graph, sent[graph.before], schedule.ranks, link)
    times = _Times.run(graph, seconds, messages)
    if times.count < len(graph.actions):
        raise cycle_error(schedule, graph, graph.cycle())
    ranges = list(zip(graph.begins[:-1], graph.begins[1:], strict=True))
    return PipelineReplay(
        start_s=tuple(tuple(times.start_s[begin:end]) for begin, end in ranges),
        end_s=tuple(tuple(times.end_s[begin:end]) for begin, end in ranges),
        busy_s=tuple(sum(times.seconds[begin:end]) for begin, end in ranges),
        exposed_transfer_s=tuple(sum(times.exposed_s[begin:end]) for begin, end in ranges),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Messages:
    """What each arc of the graph sends, as columns: lists, since the replay reads them one by one.

    Attributes:
        latency_s: of each message.
        move_s: for which it occupies its two ports.
        port: of the sender; -1: nothing is sent.
        other: port of the receiver; the sender's again where both are one.
        ports: number of ports.
    """

    latency_s: list[float]
    move_s: list[float]
    port: list[int]
    other: list[int]
    ports: int

    @classmethod
    def of(
        cls,
        graph: ActionGraph,
        sizes: NDArray[np.float64],
        ranks: int,
        link: Link | Topology | None,
    ) -> _Messages:
        """Return the messages; `sizes` are those of each arc's microbatch."""
        source, destination = graph.rank[graph.before], graph.rank[graph.after]
        latency_s, move_s = np.zeros(len(source)), np.zeros(len(source))
        port, other = np.full(len(source), _NO_PORT), np.full(len(source), _NO_PORT)
        ports = 0
        for each, mask in _links(ranks, link, source, destination):
            latency_s[mask] = each.latency_s.value
            move_s[mask] = (graph.bytes * sizes)[mask] / each.bandwidth_bytes_per_s.value
            first, second, count = _ports(each, link, source[mask], destination[mask])
            port[mask], other[mask] = ports + first, ports + second
            ports += count
        return cls(
            latency_s=latency_s.tolist(),
            move_s=move_s.tolist(),
            port=port.tolist(),
            other=other.tolist(),
            ports=ports,
        )


def _links(
    ranks: int,
    link: Link | Topology | None,
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
) -> Iterator[tuple[Link, NDArray[np.bool_]]]:
    """Yield each link, and which arcs use it; arcs that use none stay on their rank."""
    leaves = source != destination
    if link is None:
        return
    if isinstance(link, Link):
        yield link, leaves
        return
    placed = sum(len(host) for host in link.hosts)
    if placed != ranks:
        raise UsageError(
            f"the schedule is for {ranks} ranks, the hosts have {placed}",
            fix="Make the schedule for the ranks of these hosts",
        )
    host_of = link.host_of()
    crosses = host_of[source] != host_of[destination]
    for each, mask, where in (
        (link.inside, leaves & ~crosses, "inside"),
        (link.across, crosses, "across"),
    ):
        if each is not None:
            yield each, mask
        elif mask.any():
            arc = int(mask.argmax())
            raise UsageError(
                f"the topology has no link between ranks {source[arc]} and {destination[arc]}",
                fix=f"Give the link {where} hosts",
            )


def _ports(
    link: Link,
    place: Link | Topology | None,
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """Return the two ports of each message, and the number of ports that the link has."""
    if link.sharing == "all":
        return np.zeros_like(source), np.zeros_like(source), 1
    if isinstance(place, Topology) and link.sharing != "pair":
        place_of = place.device_of() if link.sharing == "device" else place.host_of()
        source, destination = place_of[source], place_of[destination]
    count = 1 + max(source.max(initial=0), destination.max(initial=0))
    if link.sharing == "pair":
        pairs, pair = np.unique(source * count + destination, return_inverse=True)
        return pair, pair, len(pairs)
    return source, count + destination, 2 * int(count)


@dataclass(kw_only=True, slots=True)
class _Times:
    """Times by number of the action; `count` is the number of actions that were performed."""

    seconds: list[float]
    start_s: list[float]
    end_s: list[float]
    exposed_s: list[float]
    count: int = 0

    @classmethod
    def run(cls, graph: ActionGraph, seconds: list[float], messages: _Messages) -> _Times:
        """Return the times of all actions that can be performed."""
        total = len(seconds)
        times = cls(
            seconds=seconds, start_s=[0.0] * total, end_s=[0.0] * total, exposed_s=[0.0] * total
        )
        waits, first, after = graph.waits(), graph.first, graph.after.tolist()
        ports, others = messages.port, messages.other
        begins = set(graph.begins)
        start_s, end_s = times.start_s, times.end_s
        sent_s = [0.0] * total  # when the data that arrived last, at start_s, were sent
        free_s = [0.0] * messages.ports
        # Ends of actions that have begun. They come out of the heap in the order of time, hence
        # messages enter their links in the order in which they are ready.
        running = [(seconds[number], number) for number, count in enumerate(waits) if count == 0]
        heapq.heapify(running)
        while running:
            now_s, number = heapq.heappop(running)
            times.count += 1
            end_s[number] = now_s
            for arc in range(first[number], first[number + 1]):
                follower, port, arrival_s = after[arc], ports[arc], now_s
                if port != _NO_PORT:
                    other = others[arc]
                    moved_s = max(now_s, free_s[port], free_s[other]) + messages.move_s[arc]
                    free_s[port] = free_s[other] = moved_s
                    arrival_s = moved_s + messages.latency_s[arc]
                if (arrival_s, now_s) > (start_s[follower], sent_s[follower]):
                    start_s[follower], sent_s[follower] = arrival_s, now_s
                waits[follower] -= 1
                if waits[follower] == 0:
                    begin_s = start_s[follower]
                    idle_from_s = 0.0 if follower in begins else end_s[follower - 1]
                    times.exposed_s[follower] = begin_s - max(idle_from_s, sent_s[follower])
                    heapq.heappush(running, (begin_s + seconds[follower], follower))
        return times
