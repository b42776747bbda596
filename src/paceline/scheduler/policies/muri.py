"""Groups of jobs that take turns on resources (Muri).

Jobs of one number of devices are grouped, up to four to a group, on the same devices. A group is
worth its efficiency, and the pairs of the largest efficiency merge first, as long as the jobs need
more devices than there are::

    gamma = sum of all stage times of the group / (resources x period)
    order = work left x devices where all durations are known (SRSF), else attained service

A stage time over the period is the share of its time that a resource works for the job, so that
gamma is, up to the constant number of resources, the sum of the shares of their rates that the jobs
keep: any rate model with sharing can stand in for the stages.

One pass, at every event:

1. candidates: jobs in order; each that finds devices on a draft of the empty cluster brings the
   next ones of its size in, up to four for each place;
2. while the candidates need more devices than there are, merge: a round pairs single jobs, the
   next pairs of pairs, by a matching of large total gamma;
3. groups that run slower together than one after the other are dissolved;
4. groups get devices in the order of their first job; those that find none wait.

The matching is greedy by gamma, then improved by exchanges between two pairs until none gains; Muri
uses Blossom, which is exact.
Source: Y. Zhao et al., Multi-Resource Interleaving for Deep Learning Training, SIGCOMM 2022,
sections 4 and 5; the order of the steps is that of its published simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from paceline.scheduler.policies.fitting import (
    allowed_types,
    memory_suffices,
    refuse_unfit,
    rigid_size,
    time_left_s,
)
from paceline.scheduler.policies.las import attained_service_s
from paceline.scheduler.policies.replan import Draft, Wanted, replan

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paceline.scheduler.events import Action, Event
    from paceline.scheduler.state.state import JobState, State

_Group: TypeAlias = "tuple[JobState, ...]"


@dataclass(frozen=True, slots=True)
class Muri:
    """Groups jobs by how well their stages interleave.

    Attributes:
        most: jobs in a group.
        consolidate: keep jobs within nodes, see `Draft`.
    """

    most: int = 4
    consolidate: bool = True
    name: str = "muri"

    def choose(self, state: State, events: Sequence[Event]) -> Iterator[Action]:
        """Yield what makes the groups of a new pass run."""
        yield from refuse_unfit(state, events)
        order = self._order(state)
        groups = self.groups(state, list(order))
        groups.sort(key=lambda group: min(order[job] for job in group))
        wanted = [
            Wanted(group, rigid_size(state, group[0].job), self._words(state, group))
            for group in groups
        ]
        yield from replan(
            state,
            wanted,
            consolidate=self.consolidate,
            why_stopped="jobs were grouped anew, and its group found no devices or others",
        )

    def wake_s(self, state: State) -> float | None:
        """Return None: only events matter."""
        return None

    def explain(self, state: State, job: JobState) -> str:
        """Return the place of a job in the order, in words."""
        order = self._order(state)
        known = "service left" if _durations_known(state) else "service attained"
        return f"by {known}, it is number {order[job] + 1} of {len(order)}; first groups come first"

    def groups(self, state: State, order: Sequence[JobState]) -> list[_Group]:
        """Return groups of the candidates, in no order.

        Args:
            state: may be read only.
            order: all jobs, by their right to devices.
        """
        classes = self._candidates(state, order)
        capacity = Draft(state).free
        demand = sum(devices * len(jobs) for devices, jobs in classes.items())
        groups: dict[int, list[_Group]] = {
            devices: [(job,) for job in jobs] for devices, jobs in classes.items()
        }
        while demand > capacity:
            before = demand
            for devices in groups:
                pairs = self._match(state, groups[devices])
                for gamma, first, second in pairs:
                    if demand <= capacity or gamma <= 0:
                        break
                    groups[devices].remove(first)
                    groups[devices].remove(second)
                    groups[devices].append(first + second)
                    demand -= devices
            if demand == before:
                break
        return [
            part
            for members in groups.values()
            for group in members
            for part in ([group] if self._total(state, group) >= 1 else [(job,) for job in group])
        ]

    def _order(self, state: State) -> dict[JobState, int]:
        jobs = [*state.running.values(), *state.waiting.values()]
        if _durations_known(state):
            key = {job: time_left_s(state, job) * rigid_size(state, job.job) for job in jobs}
        else:
            key = {job: attained_service_s(job, state.now_s) for job in jobs}
        order = sorted(jobs, key=lambda job: (key[job], job.job.submitted_s))
        return {job: index for index, job in enumerate(order)}

    def _candidates(self, state: State, order: Sequence[JobState]) -> dict[int, list[JobState]]:
        """Return the jobs that may run at all, by their number of devices."""
        draft = Draft(state, consolidate=self.consolidate, stay=False)
        sizes: dict[int, list[JobState]] = {}
        for job in order:
            if job.job.name not in draft.fixed:
                sizes.setdefault(rigid_size(state, job.job), []).append(job)
        places = dict.fromkeys(sizes, 0)
        rank = {job: index for jobs in sizes.values() for index, job in enumerate(jobs)}
        full: set[int] = set()
        for job in order:
            devices = rigid_size(state, job.job)
            if not draft.free:
                break
            if devices in full or job not in rank or rank[job] < places[devices] * self.most:
                continue
            if draft.place(Wanted((job,), devices, "")):
                places[devices] += 1
            elif not job.job.device_types:
                full.add(devices)
        return {devices: jobs[: places[devices] * self.most] for devices, jobs in sizes.items()}

    def _match(self, state: State, nodes: Sequence[_Group]) -> list[tuple[float, _Group, _Group]]:
        """Return pairs of nodes that may merge, best first."""
        gamma = {
            (i, j): self._total(state, nodes[i] + nodes[j])
            for i in range(len(nodes))
            for j in range(i + 1, len(nodes))
            if len(nodes[i]) + len(nodes[j]) <= self.most
        }
        pairs = match(len(nodes), {pair: value for pair, value in gamma.items() if value > 0})
        pairs.sort(key=lambda pair: -gamma[pair])
        return [(gamma[i, j], nodes[i], nodes[j]) for i, j in pairs]

    def _total(self, state: State, group: _Group) -> float:
        """Return the sum of the shares of their rates that jobs keep in a group; 0: they cannot."""
        if len(group) == 1:
            return 1.0
        if not all(job.job.shares for job in group):
            return 0.0
        devices = rigid_size(state, group[0].job)
        best = 0.0
        for kind in allowed_types(state, group[0].job):
            shape = state.inventory.closest(kind, devices)
            if not memory_suffices(state, [job.job for job in group], kind):
                continue
            kept = [
                state.rates.kept(job.job, [other.job for other in group if other is not job], shape)
                for job in group
                if not job.job.device_types or kind in job.job.device_types
            ]
            if len(kept) == len(group) and min(kept) > 0:
                best = max(best, sum(kept))
        return best

    def _words(self, state: State, group: _Group) -> str:
        if len(group) == 1:
            return "alone on its devices"
        return (
            f"{len(group)} jobs that keep {self._total(state, group):.2f} of their rates together"
        )


def match(count: int, weights: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
    """Return pairs of a matching of large total weight: greedy, then improved by exchanges.

    Args:
        count: of nodes.
        weights: of pairs (i, j) with i < j; pairs that are missing cannot be matched.
    """
    partner = [-1] * count
    for (i, j), _ in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        if partner[i] < 0 and partner[j] < 0:
            partner[i], partner[j] = j, i

    def weight(i: int, j: int) -> float:
        if i < 0 or j < 0:
            return 0.0
        return weights.get((i, j) if i < j else (j, i), float("-inf"))

    improved = True
    while improved:
        improved = False
        for a in range(count):
            for b in range(a + 1, count):
                # Nodes a and b exchange their partners; a missing partner leaves a node single.
                c, d = partner[a], partner[b]
                if c == b or (c < 0 and d < 0):
                    continue
                gain = weight(a, d) + weight(b, c) - weight(a, c) - weight(b, d)
                if gain > 1e-12:
                    partner[a], partner[b] = d, c
                    if d >= 0:
                        partner[d] = a
                    if c >= 0:
                        partner[c] = b
                    improved = True
    return [(i, j) for i, j in enumerate(partner) if i < j]


def _durations_known(state: State) -> bool:
    jobs = (*state.running.values(), *state.waiting.values())
    return all(job.job.work is not None for job in jobs)
