"""Why a job waits, in one or two sentences with numbers.

The answer comes from the state alone, so it is the same in the simulator and in an executor. The
first sentence says what is missing of devices now, the second what the policy puts before the job::

    can never run     its class or its request does not fit the cluster at all
    lost devices      it would fit if nodes that are lost came back
    devices           fewer are free than it needs, or none
    one node          as many are free, but spread over nodes
    free              devices are free, the policy keeps them for others or waits
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline.core.errors import NotFound
from paceline.report.units import plural
from paceline.scheduler.policies.fitting import allowed_types, never_fits
from paceline.scheduler.policies.rounds import Rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.scheduler.decide import Policy
    from paceline.scheduler.state.state import JobState, State


@runtime_checkable
class Explains(Protocol):
    """A policy that can say what it puts before a waiting job."""

    def explain(self, state: State, job: JobState) -> str:
        """Return a sentence without its full stop, in lower case; empty if there is nothing."""


def why(state: State, policy: Policy, name: str) -> str:
    """Return why a job waits, or where it runs.

    Args:
        state: may be read only.
        policy: that decides; what it puts before the job is said if it is one that `Explains`.
        name: of the job.

    Raises:
        NotFound: no such job waits or runs.
    """
    job = state.job(name)
    if job is None:
        raise NotFound(
            f"no job '{name}' waits or runs",
            fix="Ask for one that is in the queue and has not ended",
        )
    if job.slot is not None:
        return _where(state, job)
    never = never_fits(state, job.job)
    if never:
        return _sentence(f"it can never run: {never}")
    inner = policy
    while isinstance(inner, Rounds):
        inner = inner.policy
    behind = inner.explain(state, job) if isinstance(inner, Explains) else ""
    if isinstance(policy, Rounds):
        behind = "; ".join(filter(None, [behind, _round(state, policy)]))
    stopped = f"it was stopped: {job.reason}" if job.reason else ""
    return " ".join(_sentence(text) for text in (_missing(state, job), stopped, behind) if text)


def _where(state: State, job: JobState) -> str:
    assert job.slot is not None
    others = [other.name for other in job.neighbours]
    share = f", {job.slot.share:.0%} of each device for each job" if others else ""
    shared = f", together with {', '.join(others)}{share}" if others else ""
    return f"It runs on {job.slot.placement.describe()}{shared}."


def _missing(state: State, job: JobState) -> str:
    """Return what the free devices lack."""
    inventory, fewest = state.inventory, job.job.limits[0]
    asked = plural(fewest if job.job.elastic else job.job.devices, "device")
    kinds = allowed_types(state, job.job)
    usable = {kind: inventory.usable[kind] for kind in kinds}
    if max(usable.values()) < fewest:
        return f"it needs {asked} of one type; {_lost(state, kinds)} lost, {_list(usable)} left"
    free = {kind: inventory.free[kind] for kind in kinds}
    if max(free.values()) < fewest:
        holders = {
            name
            for slot in state.slots.values()
            if slot.shape.device_type in kinds
            for name in slot.jobs
        }
        return (
            f"it needs {asked} of one type; {_list(free)} free, the rest held by "
            f"{plural(len(holders), 'job')}"
        )
    largest = {kind: inventory.largest_free(kind) for kind in kinds}
    sizes = {kind: inventory.largest_node[kind] for kind in kinds}
    if max(largest.values()) < fewest <= max(sizes.values()):
        return (
            f"it needs {asked}; {_list(free)} free, but at most {_list(largest)} of them in one "
            "node"
        )
    return f"it needs {asked}; {_list(free)} free"


def _lost(state: State, kinds: Sequence[str]) -> str:
    """Return how many nodes, and devices of other nodes, are lost."""
    inventory = state.inventory
    of_kinds = [i for i, node in enumerate(inventory.nodes) if node.device_type in kinds]
    nodes = sum(1 for index in of_kinds if index in inventory.lost)
    devices = sum(inventory.lost_bits[i].bit_count() for i in of_kinds if i not in inventory.lost)
    if not devices:
        return plural(nodes, "node")
    return ", ".join([*([plural(nodes, "node")] if nodes else []), plural(devices, "device")])


def _round(state: State, policy: Rounds) -> str:
    wake_s = policy.wake_s(state)
    if wake_s is None:
        return ""
    return f"the next round begins in {wake_s - state.now_s:.0f} s"


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."
