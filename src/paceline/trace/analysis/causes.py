"""Why a rank was late: its extra time in the late steps, by what its main thread did in it.

The extra time is the rank's mean over these steps minus the other ranks' mean over the same steps.
Input, checkpoints, evaluation, compilation and garbage collection are seen as such. The rest is
split by the counters of the main thread: time on a core is computing; time neither on a core nor
waiting for one is time asleep, in which the thread was blocked, or the whole process stopped. If it
waited for pages of mapped files then, the sleep is input. Threads of a pool compute for the main
thread while it sleeps: so far as they ran longer, the sleep is computing, too.

A thread waits for a core because another process has it, and the longer the more it computes. Of
two ranks with r and s seconds on a core in a step, each of which waited for v and w, the part

    (r - s) (v / r + w / s) / 2     is due to computing longer, and
    (r + s) (v / r - w / s) / 2     to a busier core;

both add up to v - w, and neither depends on which factor is changed first (L. S. Shapley, A value
for n-person games, 1953). The first part counts as what made the rank compute longer.

A rank computes longer because it has more to compute, or because its core is slower: a lower clock,
or another tenant on the core's other hyperthread. The kernel counts both as time on a core; steal
time does not show it either (bench/LOG.md). Work that is the same on all ranks does: the
optimizer's, where ranks train equally many bytes of parameters.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.trace.format.events import PYTHON_CODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.counters import StepCounters
    from paceline.trace.analysis.phases import RankPhases

CAUSES = (
    "data",
    "compute",
    "slow_core",
    "blocked",
    "stopped",
    "not_running",
    "checkpoint",
    "evaluation",
    "compilation",
    "gc",
)
_WAITS = [PHASES.index(name) for name in ("waiting", "transfer")]
# Phases that are causes by themselves.
_SEEN = {
    "data": PHASES.index("input"),
    "checkpoint": PHASES.index("checkpoint"),
    "evaluation": PHASES.index("evaluation"),
    "compilation": PHASES.index("compilation"),
}
_OPTIMIZER = PHASES.index("optimizer")
_BETWEEN = [PHASES.index(name) for name in ("host", "other")]
_REST = [i for i in range(len(PHASES)) if i not in (*_WAITS, *_SEEN.values())]
_FAULTS = (
    1.0  # page faults that wait for storage, more than others in a late step, that explain sleep
)
# Of the delay, that all causes explain at least. In 203 runs of bench/truth.py the time of planted
# causes was 0.9 to 1.5 of the delay, and 0.03 where a rank merely looked late.
_EXPLAINED_SHARE = 1 / 3
_MOST = 0.5  # of the extra time, between phases, and of that at one line
_STOPPED_SHARE = 0.5  # of the late steps, in which the process was stopped


def main_cause(
    i: int,
    ranks: Sequence[RankPhases],
    counters: Sequence[StepCounters],
    late: np.ndarray,
    *,
    starved: bool,
    delay_s: float = 0.0,
) -> str | None:
    """Return the cause to which most of the extra time of rank `i` in the late steps belongs.

    None if the rank had no extra time in any of its phases, or too little to explain its delay:
    what made it look late is not its own. So it is where others wait for a core only after they
    entered a collective, which takes that time off their delay.

    Args:
        i: index of the rank.
        ranks: phases of each rank of the run.
        counters: counters of each rank, in the same order.
        late: the late steps, shape (steps,).
        starved: whether time without a core may be the cause, where the main thread's is known: it
            is not if the delay is what is left without that time.
        delay_s: mean delay in the late steps, seconds.
    """
    seconds, steps = max(
        ((seconds_by_cause(i, ranks, counters, steps), steps) for steps in (late, _before(late))),
        key=lambda found: sum(found[0].values()),
    )
    computing = "compute"
    if _core_is_slow(i, ranks, counters, steps, seconds["compute"]):
        computing = "slow_core"
    seconds[computing] = seconds.pop("compute")
    if all(rank.known for rank in counters):
        if not starved:
            del seconds["not_running"]
        else:
            _move_waits(seconds, computing, *_computing_and_its_waits_s(i, counters, steps))
    if sum(seconds.values()) < _EXPLAINED_SHARE * delay_s:
        return None
    cause = max(seconds, key=lambda cause: seconds[cause])
    return cause if seconds[cause] > 0.0 else None


def place_between_phases(i: int, ranks: Sequence[RankPhases], late: np.ndarray) -> str:
    """Return the line or function between phases at which rank `i` is longer than the others.

    Empty where most of its extra time is in phases, or no line has most of what is between them.

    Args:
        i: index of the rank.
        ranks: phases of each rank of the run.
        late: the late steps, shape (steps,).
    """
    for steps in map(np.flatnonzero, (late, _before(late))):
        rest_s, usual_rest_s = _own_and_others(
            i, [rank.seconds[:, _REST].sum(axis=1) for rank in ranks], steps
        )
        own_s, usual_s = _own_and_others(
            i, [rank.seconds[:, _BETWEEN].sum(axis=1) for rank in ranks], steps
        )
        extra_s = own_s - usual_s
        if extra_s <= 0.0 or extra_s < _MOST * (rest_s - usual_rest_s):
            continue
        usual: Counter[str] = Counter()
        for rank in (*ranks[:i], *ranks[i + 1 :]):
            usual.update({time.name: time.measured_s / (len(ranks) - 1) for time in rank.host})
        excess = {time.name: time.measured_s - usual[time.name] for time in ranks[i].host}
        place = max(excess, key=lambda name: excess[name], default=PYTHON_CODE)
        if place != PYTHON_CODE and excess[place] >= _MOST * extra_s * len(steps):
            return next(time.words for time in ranks[i].host if time.name == place)
    return ""


def _before(late: np.ndarray) -> np.ndarray:
    """Return the steps before late steps: what a rank does after a sync delays the next one."""
    before = np.concatenate([late[1:], [False]])
    return before if before.any() else late


def _move_waits(seconds: dict[str, float], computing: str, longer_s: float, waits_s: float) -> None:
    """Count the wait for a core that computing `longer_s` brings to what made it longer.

    Args:
        seconds: by cause, to be changed.
        computing: the cause of computing that is not garbage collection, which computes, too.
        longer_s: by how much the rank computes longer in a late step.
        waits_s: by how much it waits longer for that.
    """
    waits_s = min(seconds["not_running"], waits_s)
    collecting_s = waits_s * min(1.0, seconds["gc"] / longer_s) if waits_s else 0.0
    seconds["not_running"] -= waits_s
    seconds["gc"] += collecting_s
    seconds[computing] += waits_s - collecting_s


def _computing_and_its_waits_s(
    i: int, counters: Sequence[StepCounters], late: np.ndarray
) -> tuple[float, float]:
    """Return how much longer rank `i` computes in a late step, and waits for a core due to that.

    Zeros if it computes no longer than the other ranks.
    """
    steps = np.flatnonzero(late)
    running_s, usual_s = _own_and_others(i, [rank.running_s for rank in counters], steps)
    waits_s, usual_waits_s = _own_and_others(i, [rank.not_running_s for rank in counters], steps)
    if not running_s > usual_s > 0.0:
        return 0.0, 0.0
    longer_s = running_s - usual_s
    return longer_s, longer_s * (waits_s / running_s + usual_waits_s / usual_s) / 2


def _core_is_slow(
    i: int,
    ranks: Sequence[RankPhases],
    counters: Sequence[StepCounters],
    late: np.ndarray,
    extra_s: float,
) -> bool:
    """Return whether a slower core explains most of the `extra_s` that rank `i` computes per step.

    Ranks that train equally many bytes of parameters do the same work in their optimizers. If that
    takes rank `i` longer by a factor f, a slower core explains the share 1 - 1/f of its other
    computing: nothing at f = 1. A delay within the optimizer itself does not count.
    Medians, because a thread that loses its core within a phase that short is an outlier.
    """
    steps = np.flatnonzero(late)
    own = counters[i]
    peers = [
        ranks[j]
        for j, other in enumerate(counters)
        if j != i and other.trained_bytes == own.trained_bytes
    ]
    if not (own.known and own.trained_bytes and peers):
        return False
    own_s = float(np.median(ranks[i].seconds[steps, _OPTIMIZER]))
    usual_s = float(np.median([np.median(peer.seconds[steps, _OPTIMIZER]) for peer in peers]))
    if not own_s > usual_s > 0.0:
        return False
    elsewhere_s = extra_s - (own_s - usual_s)
    explained_s = (float(own.running_s[steps].mean()) - own_s) * (1 - usual_s / own_s)
    return elsewhere_s > extra_s / 2 and explained_s > elsewhere_s / 2


def seconds_by_cause(
    i: int, ranks: Sequence[RankPhases], counters: Sequence[StepCounters], late: np.ndarray
) -> dict[str, float]:
    """Return the extra seconds of a late step of rank `i` by cause, none of them negative.

    Args:
        i: index of the rank.
        ranks: phases of each rank of the run.
        counters: counters of each rank, in the same order.
        late: the late steps, shape (steps,).
    """
    steps = np.flatnonzero(late)

    def extra(values: Sequence[np.ndarray]) -> float:
        own, others = _own_and_others(i, values, steps)
        return own - others

    gc_s = max(0.0, extra([rank.gc_s for rank in counters]))
    found = {
        **{
            cause: extra([rank.seconds[:, phase] for rank in ranks])
            for cause, phase in _SEEN.items()
        },
        "gc": gc_s,
    }
    rest_s = extra([rank.seconds[:, _REST].sum(axis=1) for rank in ranks]) - gc_s
    if all(rank.known for rank in counters):
        running_s = extra([rank.running_s for rank in counters])
        not_running_s = extra([rank.not_running_s for rank in counters])
        pool_s = extra([rank.running_s for rank in ranks]) - running_s
        asleep_s = rest_s - max(0.0, running_s - gc_s) - max(0.0, not_running_s)
        computing_s = min(max(0.0, asleep_s), max(0.0, pool_s))
        halted = bool(np.mean(counters[i].stop_count[steps] > 0) >= _STOPPED_SHARE)
        pages = extra([rank.major_faults for rank in counters]) >= _FAULTS
        asleep = "stopped" if halted else "data" if pages else "blocked"
        found[asleep] = max(0.0, found.get(asleep, 0.0)) + asleep_s - computing_s
        found["not_running"] = min(rest_s, not_running_s)
        found["compute"] = rest_s - max(0.0, asleep_s - computing_s) - max(0.0, not_running_s)
    else:
        # Counters of the process alone: threads that share a core wait for each other, so the more
        # a rank computes, the longer some of its threads are without a core.
        ran_s = extra([rank.running_s for rank in ranks])
        starved_s = extra([rank.not_running_s for rank in ranks])
        found["not_running"] = min(starved_s, rest_s - max(0.0, ran_s))
        found["compute"] = rest_s - max(0.0, found["not_running"])
    return {cause: max(0.0, seconds) for cause, seconds in found.items()}


def _own_and_others(i: int, values: Sequence[np.ndarray], steps: np.ndarray) -> tuple[float, float]:
    """Return the mean over some steps of rank `i`, and that of the other ranks."""
    means = np.array([value[steps].mean() for value in values])
    return float(means[i]), float(np.delete(means, i).mean())
