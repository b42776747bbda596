"""What a step would take if a part of its time were free, or the load were balanced.

Each scenario replays the dependency graph of the recorded steps with other lengths. It says what
the same program would do, in the same order: an upper bound of what can be gained, since nothing is
free, and a frozen one, since a program with more time would not compute differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.record import Record
from paceline.trace.efficiency.graph import rows_by
from paceline.trace.efficiency.replay import Lengths
from paceline.trace.efficiency.timeline import IO_PHASES, phase_timeline

if TYPE_CHECKING:
    from paceline.trace.efficiency.graph import DependencyGraph
    from paceline.trace.efficiency.window import StepWindow

RECORDED = "as recorded"
FREE_COMMUNICATION = "free communication"
BALANCED_LOAD = "perfectly balanced load"
FREE_IO = "free input and checkpoints"
FREE_AND_BALANCED = "free communication and balanced load"
SCENARIOS = (RECORDED, FREE_COMMUNICATION, BALANCED_LOAD, FREE_IO, FREE_AND_BALANCED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScenarioTime(Record):
    """What a step would take in a scenario.

    Attributes:
        scenario: what is changed, for example ``free communication``.
        step_s: mean time of a step in it, seconds.
        shorter: by which share a step is shorter than recorded, 0 to 1.
    """

    scenario: str
    step_s: float
    shorter: float


def scenario_lengths(graph: DependencyGraph, io_ns: np.ndarray) -> list[Lengths]:
    """Return what edges and waits take in each of `SCENARIOS`, in that order.

    Args:
        graph: of some steps.
        io_ns: time of each edge in input and checkpoints, from `edge_io_ns`, shape (edges,).
    """
    edges = graph.edges
    part_ns = edges["part_ns"].astype(np.float64)
    transfer_ns = edges["transfer_ns"].astype(np.float64)
    overhead_ns = graph.overhead_ns.astype(np.float64)
    none_ns = np.zeros_like(overhead_ns)
    balanced_ns = part_ns + _computing_ns(graph) * (_balance(graph) - 1)
    return [
        Lengths(part_ns + transfer_ns, overhead_ns),
        Lengths(part_ns, none_ns),
        Lengths(balanced_ns + transfer_ns, overhead_ns),
        Lengths(part_ns - io_ns + transfer_ns, overhead_ns),
        Lengths(balanced_ns, none_ns),
    ]


def rank_io_ns(graph: DependencyGraph, io_ns: np.ndarray) -> np.ndarray:
    """Return each rank's time in input and checkpoints in the window, shape (traces,)."""
    segments = graph.segments  # each has its own edge, in the same order, before all others
    own_ns = io_ns[: len(segments)]
    return np.bincount(segments["trace"], own_ns, minlength=len(graph.begins) - 1)


def outside_ns(graph: DependencyGraph) -> np.ndarray:
    """Return each rank's time outside communication in the window, shape (traces,)."""
    segments = graph.segments
    lengths_ns = segments["end_ns"] - segments["begin_ns"]
    return np.bincount(segments["trace"], lengths_ns, minlength=len(graph.begins) - 1)


def _balance(graph: DependencyGraph) -> np.ndarray:
    """Return the factor for the computing of each edge, with which all ranks compute equally long.

    Ranks are balanced step by step: a rank that is slow now and then is one that can be balanced.
    """
    segments = graph.segments
    traces = len(graph.begins) - 1
    periods = graph.stop_step - graph.first_step + 1
    lengths_ns = (segments["end_ns"] - segments["begin_ns"]).astype(np.float64)
    place = segments["trace"].astype(np.int64) * periods + segments["period"]
    own_ns = np.bincount(place, lengths_ns, minlength=traces * periods).reshape(traces, periods)
    factors = own_ns.mean(axis=0) / np.where(own_ns > 0, own_ns, 1.0)
    edges = graph.edges
    found = np.ones(len(edges))
    inside = np.flatnonzero(edges["segment"] >= 0)
    found[inside] = factors.ravel()[place[edges["segment"][inside]]]
    return found


def _computing_ns(graph: DependencyGraph) -> np.ndarray:
    """Return the part of each edge in which the rank computes in its segment, shape (edges,).

    What comes before or after a step is that of another step, which these factors are not of.
    """
    edges = graph.edges
    found = np.zeros(len(edges), dtype=np.int64)
    inside = np.flatnonzero(edges["segment"] >= 0)
    segments = graph.segments[edges["segment"][inside]]
    lengths_ns = segments["end_ns"] - segments["begin_ns"]
    found[inside] = np.clip(edges["part_ns"][inside], 0, lengths_ns)
    return found


def edge_io_ns(window: StepWindow, graph: DependencyGraph) -> np.ndarray:
    """Return how long each edge reads input or writes a checkpoint, shape (edges,)."""
    edges = graph.edges
    found = np.zeros(len(edges))
    computing_ns = _computing_ns(graph)
    inside = np.flatnonzero(computing_ns)
    segments = graph.segments[edges["segment"][inside]]
    for trace_index, own in enumerate(rows_by(segments["trace"], len(graph.begins) - 1)):
        timeline = phase_timeline(window, trace_index)
        begins_ns = segments["begin_ns"][own]
        spent_ns = timeline.between_ns(begins_ns, begins_ns + computing_ns[inside[own]])
        found[inside[own]] = spent_ns[:, IO_PHASES].sum(axis=1)
    return found
