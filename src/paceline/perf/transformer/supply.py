"""The supply of samples as a stage beside training: what a step waits for its data.

Each replica reads and prepares its own samples; the ranks of a replica share them. With loader
processes the next batch is made while the step computes, so that a step lasts as long as the slower
of both; without, the loop makes the batch itself::

    prepare = samples of a replica x seconds of one / processes
    read    = samples of a node's replicas x bytes of one / storage's bytes a second to a node
    wait    = max(0, max(prepare, read) - step)     with processes
            = prepare + read                        without
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from paceline.core.machine import Machine, Tier
    from paceline.core.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCost:
    """What it takes to load a sample, as far as the user knows it.

    Attributes:
        bytes: read from the machine's last tier of storage; 0: samples lie in memory.
        seconds: in which one loader process prepares it; 0: nothing is to be done.
    """

    bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.seconds < 0:
            raise UsageError(
                f"a sample of {self.bytes} bytes and {self.seconds:g} s cannot be loaded",
                where="paceline plan --model",
                fix="Give 0 or more of each",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Supply:
    """How fast a replica gets its samples.

    Attributes:
        prepare_s: seconds in which its loader processes prepare the samples of a step.
        read_s: seconds in which storage delivers them.
        runs_beside: whether loader processes work while the step computes.
        source: what it rests on, in words.
    """

    prepare_s: float = 0.0
    read_s: float = 0.0
    runs_beside: bool = False
    source: str = ""

    def wait_s(self, step_s: float) -> float:
        """Return the seconds that a step, which takes `step_s` with its data there, waits."""
        if not self.runs_beside:
            return self.prepare_s + self.read_s
        return max(0.0, max(self.prepare_s, self.read_s) - step_s)


def supply(machine: Machine, plan: Plan, batch: int, sample: SampleCost) -> Supply:
    """Return how fast the replicas of a plan get their samples.

    Args:
        machine: its last tier holds the samples, and its bandwidth is that of each node.
        plan: replicas, nodes, and loader processes of a replica.
        batch: samples of a step over all replicas.
        sample: what one takes.

    Raises:
        UsageError: samples are read from storage and the machine has none, or loader processes have
            nothing to do.
    """
    if plan.loader_workers and not (sample.bytes or sample.seconds):
        raise UsageError(
            "loader processes have nothing to load",
            where=f"paceline plan --loader-workers {plan.loader_workers}",
            fix="Give --sample-seconds, --sample-bytes, or both",
        )
    replicas = plan.mesh.data
    samples = batch / replicas
    prepare_s = samples * sample.seconds / max(1, plan.loader_workers)
    read_s, words = 0.0, []
    if sample.seconds:
        words.append(f"{sample.seconds:g} s a sample, {max(1, plan.loader_workers)} at once")
    if sample.bytes:
        tier = _tier(machine)
        sharing = -(-replicas // plan.nodes)
        read_s = sharing * samples * sample.bytes / tier.bandwidth_bytes_per_s.value
        words.append(f"{tier.name}: {tier.bandwidth_bytes_per_s.source}")
    return Supply(
        prepare_s=prepare_s,
        read_s=read_s,
        runs_beside=plan.loader_workers > 0,
        source="; ".join(words),
    )


def _tier(machine: Machine) -> Tier:
    """Return the storage that all nodes share: the last of the machine's tiers."""
    if not machine.tiers:
        raise UsageError(
            "samples are read from storage, of which the machine has none",
            where=f"{machine.name}: tiers",
            fix="Add a tier to the machine file, or leave --sample-bytes out",
        )
    return machine.tiers[-1]
