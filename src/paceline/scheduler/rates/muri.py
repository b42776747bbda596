"""What jobs of a group keep of their rates in Muri's simulator, to the letter of its formula.

A step has three stages: input (storage and CPU), device, network. Jobs of a group run in lockstep:
a cycle has four slots, and the job at position k has its input in slots k and k + 1, its device
stage in slot k + 2 and its network stage in slot k + 3, all modulo 4. A slot ends as soon as every
stage in it has ended; an input may end anywhere in its two slots::

    slot         0        1        2        3        0 ...
    job 0        input . . . . .   device   network  input ...
    job 1        network  input . . . . .   device   network ...

The period is that of the best order of the jobs; two jobs may also take turns in halves, one with
its input while the other is in its device and network stages. Each size of group is slowed by a
factor that its authors measured, a job alone by 1.5 %::

    kept = step of the job alone / (period x slowdown of the group's size)

Two inputs may share one slot wholly, so that this formula lets jobs overlap on a resource that they
both need. `bounded` takes a period of at least the busiest stage's sum over the jobs instead.
Source: Y. Zhao et al., Multi-Resource Interleaving for Deep Learning Training (Muri), SIGCOMM 2022;
its simulator, github.com/Rivendile/Muri at 4e69a78, simulator/matching.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape

Stages: TypeAlias = tuple[float, float, float]  # seconds of input, device, network in one step

SLOTS = 4
ALONE = 1.015  # a step of a job alone, relative to its measured time
SLOWDOWN = {2: 1.33 / ALONE, 3: 1.5 / ALONE, 4: 1.37 / ALONE}
_AGREE = 1e-3  # two periods in a row that differ by less are the cycle's


@dataclass(frozen=True, slots=True)
class LockstepSharing:
    """Jobs of a group that do one step each in a period; see the module.

    Attributes:
        stages: seconds of the stages of a step, by profile.
        step_s: seconds of a step alone, `ALONE` included, by profile.
        most: jobs on one set of devices.
        bounded: no resource is used by two jobs at once.
        interference: by how much longer a period is than the formula has it.
    """

    stages: Mapping[str, Stages]
    step_s: Mapping[str, float]
    most: int = SLOTS
    bounded: bool = False
    interference: float = 0.0

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return the share of its rate that a job keeps in the group."""
        if not neighbours:
            return 1.0
        if len(neighbours) >= self.most:
            return 0.0
        group = tuple(sorted(self.stages[member.profile] for member in (job, *neighbours)))
        period = period_s(group)
        if self.bounded:
            period = max(period, *map(math.fsum, zip(*group, strict=True)))
        period *= SLOWDOWN[len(group)] * (1 + self.interference)
        return self.step_s[job.profile] / period


@lru_cache(maxsize=1 << 16)
def period_s(group: tuple[Stages, ...]) -> float:
    """Return the seconds in which every job of a group does one step, in their best order.

    Args:
        group: stages of 2 to 4 jobs.
    """
    best = min(_cycle_s(order) for order in itertools.permutations(group))
    if len(group) == 2:
        (input_0, *rest_0), (input_1, *rest_1) = group
        best = min(best, max(input_0, sum(rest_1)) + max(input_1, sum(rest_0)))
    return best


def _cycle_s(order: Sequence[Stages]) -> float:
    """Return the seconds of a cycle once it repeats itself, from the ends of two cycles' slots."""
    ends = [0.0]
    for slot in range(2 * SLOTS):
        end = 0.0
        for position, (input_s, device_s, network_s) in enumerate(order):
            match (slot - position) % SLOTS:
                case 1 if slot:
                    end = max(end, ends[slot - 1] + input_s)
                case 2:
                    end = max(end, ends[slot] + device_s)
                case 3:
                    end = max(end, ends[slot] + network_s)
        ends.append(end)
        if slot >= SLOTS:
            cycle, before = end - ends[slot - 3], ends[slot] - ends[slot - 4]
            if math.isclose(cycle, before, rel_tol=_AGREE) and cycle > 0:
                return cycle
    return ends[-1] - ends[-1 - SLOTS]
