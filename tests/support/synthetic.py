"""Runs as arrays, for tests of the statistics: step times with a node's noise, and a culprit.

No trace is written: what the analysis would make of one is made directly, so that hundreds of runs
take seconds. Noise is what was seen on shared nodes: a heavy tail in each step, a slow wandering,
and bursts in which another process takes a core of one rank.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.trace.analysis.blame import find_stragglers
from paceline.trace.analysis.counters import StepCounters
from paceline.trace.analysis.phases import RankPhases

BASE_S = 0.010  # of a step: half of it computing, half waiting for a device
OPTIMIZER_S = 0.02 * BASE_S
PHASE_OF = {
    "data": "input",
    "optimizer": "optimizer",
    "checkpoint": "checkpoint",
    "evaluation": "evaluation",
    "compilation": "compilation",
    "gc": "host",
    "blocked": "other",
}


@dataclasses.dataclass(frozen=True)
class Culprit:
    """One rank slowed by `seconds` in each step, for a cause.

    With the cause `slow_core` all computing takes longer, so also the optimizer, by the same
    factor; with `optimizer` the rank computes longer in the optimizer alone.
    """

    rank: int
    cause: str
    seconds: np.ndarray


@dataclasses.dataclass(frozen=True)
class Noise:
    """What disturbs all ranks alike.

    Attributes:
        level: mean of the heavy-tailed extra time of a step, as a share of the step.
        wander: standard deviation of a slow wandering, as a share of the step.
        bursts: share of the time in which another process takes a core of some rank.
        explained: whether the kernel's counters show the time without a core.
    """

    level: float = 0.03
    wander: float = 0.01
    bursts: float = 0.0
    explained: bool = True


def stragglers(random, ranks, steps, noise=None, culprits=(), rules=None):
    """Return the stragglers that the analysis finds in a made-up run."""
    return find_stragglers(*made_up_run(random, ranks, steps, noise or Noise(), culprits), rules)


def made_up_run(random, ranks, steps, noise, culprits=()):
    """Return phases, counters and skew of a run."""
    shape = (ranks, steps)
    busy = BASE_S / 2 * (1 + noise.level * random.standard_t(3, shape).clip(-1, 10) / 2)
    busy += BASE_S * noise.level * random.exponential(1.0, shape)
    busy += BASE_S * noise.wander * _wandering(random, shape)
    asleep = np.full(shape, BASE_S / 2)
    starved = _bursts(random, shape, noise.bursts) + BASE_S * 0.01 * random.exponential(1, shape)
    extra = {name: np.zeros(shape) for name in PHASES}
    ran, without, gc_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    stops = np.zeros(shape, dtype=np.int64)
    slower = np.ones(shape)
    for culprit in culprits:
        i, seconds = culprit.rank, culprit.seconds
        extra[PHASE_OF.get(culprit.cause, "forward")][i] += seconds
        if culprit.cause in ("compute", "slow_core", "optimizer", "gc"):
            ran[i] += seconds
        if culprit.cause == "slow_core":
            slower[i] += seconds / busy[i]
        if culprit.cause == "not_running":
            without[i] += seconds
        if culprit.cause == "gc":
            gc_s[i] += seconds
        if culprit.cause == "stopped":
            stops[i] += seconds > 0
    work = busy + asleep + starved + sum(extra.values())
    optimizer = OPTIMIZER_S * slower * random.uniform(0.95, 1.05, shape)
    step_s = np.broadcast_to(work.max(axis=0) + BASE_S / 10, shape)
    phases, counters = [], []
    for i in range(ranks):
        seconds = np.stack([extra[name][i] for name in PHASES], axis=1)
        seconds[:, PHASES.index("forward")] += busy[i] + asleep[i] + starved[i] - optimizer[i]
        seconds[:, PHASES.index("optimizer")] += optimizer[i]
        seconds[:, PHASES.index("waiting")] = work.max(axis=0) - work[i]
        seconds[:, PHASES.index("transfer")] = BASE_S / 10
        running_s = busy[i] + ran[i]
        starved_s = (starved[i] if noise.explained else np.zeros(steps)) + without[i]
        phases.append(
            RankPhases(
                rank=i,
                seconds=seconds,
                step_s=step_s[i],
                running_s=running_s,
                not_running_s=starved_s,
                recorded=np.ones(steps, dtype=bool),
            )
        )
        counters.append(
            StepCounters(
                running_s=running_s,
                not_running_s=starved_s,
                gc_s=gc_s[i],
                stop_count=stops[i],
                major_faults=np.zeros(steps),
                known=True,
                trained_bytes=1 << 20,
            )
        )
    return phases, counters, work - work.min(axis=0)


def planted_seconds(random, shape, slow, steps, period=10):
    """Return the seconds by which a culprit is slowed in each step, `slow` of a step on average."""
    mean_s, extra = slow * BASE_S, np.zeros(steps)
    if shape == "persistent":
        extra[:] = mean_s
    elif shape == "window":
        length = steps // 3 + int(random.integers(steps // 3))
        first = int(random.integers(steps - length))
        extra[first : first + length] = mean_s
    elif shape == "periodic":
        extra[int(random.integers(period)) :: period] = mean_s * period
    elif shape == "drifting":
        extra[:] = 2 * mean_s * np.arange(steps) / steps
    elif shape == "recurring":
        every = int(random.integers(40, 91))
        length = max(10, round(every * random.uniform(0.25, 0.55)))
        for step in range(int(random.integers(every - length)), steps, every):
            extra[step : step + length] = mean_s * every / length
    else:
        step = int(random.integers(3, 20))
        while step < steps - 6:
            length = int(random.integers(2, 7))
            extra[step : step + length] = 1.0
            step += length + int(random.integers(8, 25))
        extra *= mean_s / extra.mean()
    return extra


def _wandering(random, shape):
    """Return noise with a memory of about ten steps, of standard deviation 1."""
    steps = random.normal(0, np.sqrt(1 - 0.9**2), shape)
    result = np.empty(shape)
    now = random.normal(0, 1, shape[0])
    for step in range(shape[1]):
        now = 0.9 * now + steps[:, step]
        result[:, step] = now
    return result


def _bursts(random, shape, share):
    """Return time without a core: another process takes half a core of some rank for a while."""
    result = np.zeros(shape)
    step = 0
    while share and step < shape[1]:
        length = int(random.integers(5, 25))
        rank = int(random.integers(shape[0]))
        result[rank, step : step + length] = (
            BASE_S / 3 * random.random(result[rank, step : step + length].shape)
        )
        step += length + int(random.exponential(length * (1 - share) / share)) + 1
    return result
