"""Queues for the scheduler's tests: random jobs, and a driver that checks every decision.

The driver plays events against a policy through `decide` as an executor would, keeps a model of its
own of which device belongs to which jobs, and compares it with the state after every instant.
"""

import math
from collections import Counter

from paceline.scheduler.cluster import Cluster, Node
from paceline.scheduler.decide import decide
from paceline.scheduler.events import (
    Cancelled,
    Ended,
    Measured,
    NodeBack,
    NodeLost,
    Preempt,
    Refuse,
    Start,
    Stopped,
    Submitted,
    Timer,
)
from paceline.scheduler.job import Job
from paceline.scheduler.policies.fitting import never_fits
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import PairKey, PairTable
from paceline.scheduler.state.state import State

CLUSTERS = {
    "flat": Cluster.of_text("4x4"),
    "odd": Cluster(
        nodes=tuple(
            Node(name=f"n{index}", device_type="gpu", devices=3, memory_bytes=16 << 30)
            for index in range(3)
        )
    ),
    "types": Cluster(
        nodes=tuple(
            Node(name=f"{kind}-{index}", device_type=kind, devices=devices, memory_bytes=gib << 30)
            for kind, devices, gib in (("v100", 4, 32), ("k80", 8, 12))
            for index in range(2)
        )
    ),
    "switches": Cluster.of_text("8x2", switch_nodes=2),
}
PROFILES = ("compute", "input", "exchange")
_KEPT = {  # what the first keeps beside the second; some pairs pay, one does not fit
    ("compute", "compute"): 0.45,
    ("compute", "input"): 0.8,
    ("input", "compute"): 0.75,
    ("input", "input"): 0.55,
    ("exchange", "input"): 0.7,
    ("input", "exchange"): 0.6,
    ("exchange", "compute"): 0.5,
    ("compute", "exchange"): 0.4,
}


def rate_model(cluster):
    """Return rates of three classes that scale and share differently, on the cluster's types."""
    kinds = list(cluster.device_counts())
    alone, spread = {}, {}
    for index, name in enumerate(PROFILES):
        power = 0.9 - 0.2 * index
        alone[name] = {
            kind: {devices: devices**power / (1 + 2 * k) for devices in (1, 2, 4, 8, 16)}
            for k, kind in enumerate(kinds)
        }
        spread[name] = {(kind, d): 0.9 - 0.2 * index for kind in kinds for d in range(2, 17)}
    profiles = {name: Profile(alone=alone[name], spread=spread[name]) for name in PROFILES}
    factors = {
        PairKey(kind, devices, *pair): kept
        for pair, kept in _KEPT.items()
        for kind in kinds
        for devices in range(1, 17)
    }
    return RateModel(profiles, PairTable(factors))


def random_job(rng, name, at_s, cluster, *, work=True):
    """Return a job of a random class and size; a few can never run."""
    kinds = list(cluster.device_counts())
    devices = int(
        rng.choice([1, 1, 1, 2, 2, 3, 4, 8, 64], p=[0.2, 0.2, 0.2, 0.1, 0.1, 0.05, 0.1, 0.04, 0.01])
    )
    elastic = rng.random() < 0.4
    return Job(
        name=name,
        submitted_s=at_s,
        devices=devices,
        min_devices=int(rng.integers(1, devices + 1)) if elastic else 0,
        max_devices=devices + int(rng.integers(0, 4)) if elastic else 0,
        device_types=(str(rng.choice(kinds)),) if rng.random() < 0.2 else (),
        profile=str(rng.choice(PROFILES)),
        work=float(rng.integers(1, 5000)) if work else None,
        restart_s=float(rng.choice([0, 30])),
        preemptible=bool(rng.random() < 0.9),
        shares=bool(rng.random() < 0.8),
        memory_bytes=int(rng.choice([0, 4, 10, 20], p=[0.4, 0.3, 0.29, 0.01])) << 30,
    )


class Driver:
    """Plays events against a policy, and checks the state against a model after each."""

    def __init__(self, policy, cluster):
        self.policy, self.cluster = policy, cluster
        self.state = State(cluster, rate_model(cluster))
        self.nodes = {node.name: node for node in cluster.nodes}
        self.lost = set()
        self.placed = {}  # by job: set of (node, device)
        self.shares = {}  # of devices, by job that started in this instant, in order
        self.alive = {}  # jobs that were submitted and neither ended nor left
        self.instants = []
        self.decisions = []
        self.now_s = 0.0
        self.submitted = 0

    @property
    def running(self):
        return sorted(self.placed)

    def play(self, *events):
        self.instants.append(events)
        for event in events:
            match event:
                case Ended(name=name) | Cancelled(name=name):
                    self.placed.pop(name, None)
                    self.alive.pop(name, None)
                case Stopped(name=name):
                    self.placed.pop(name, None)
                case Submitted(job=job):
                    self.alive[job.name] = job
                case NodeLost(node=node):
                    self.lost.add(node)
                case NodeBack(node=node):
                    self.lost.discard(node)
        decisions = decide(self.policy, self.state, events)
        self.shares.clear()
        for decision in decisions:
            self._follow(decision.action)
        self.decisions.extend(decisions)
        self.check()

    def submit(self, rng, *, work=True):
        job = random_job(rng, f"j{self.submitted}", self.now_s, self.cluster, work=work)
        self.submitted += 1
        self.play(Submitted(at_s=self.now_s, job=job))

    def lose(self, node):
        held = [name for name, devices in self.placed.items() if node in dict(devices)]
        stopped = [Stopped(at_s=self.now_s, name=n, reason="its node was lost") for n in held]
        self.play(*stopped, NodeLost(at_s=self.now_s, node=node))

    def restore(self, node):
        self.play(NodeBack(at_s=self.now_s, node=node))

    def end(self, name):
        self.play(Ended(at_s=self.now_s, name=name))

    def cancel(self, name):
        self.play(Cancelled(at_s=self.now_s, name=name))

    def stop(self, name):
        self.play(Stopped(at_s=self.now_s, name=name, work_done=0.0, reason="its rank died"))

    def measure(self, name, factor):
        job = self.state.running[name]
        done, rate = job.work_done_at(self.now_s), job.rate * factor
        self.play(Measured(at_s=self.now_s, name=name, work_done=done, rate=rate))

    def wait(self, seconds):
        """Let time pass, up to the moment at which the policy wants to be asked."""
        wake_s = self.policy.wake_s(self.state)
        later_s = self.now_s + seconds
        if wake_s is not None and wake_s <= later_s:
            assert wake_s > self.now_s or wake_s <= self.state.now_s
            self.now_s = max(self.now_s, wake_s)
            self.play(Timer(at_s=self.now_s))
        else:
            self.now_s = later_s

    def random_event(self, rng):
        """Play an event of a random kind."""
        waiting = [name for name in self.alive if name not in self.placed]
        # The queue neither runs dry nor grows without bounds.
        kind = rng.choice(
            ["submit", "end", "cancel", "node", "measure", "wait", "stop"],
            p=[0.34, 0.26, 0.03, 0.05, 0.08, 0.22, 0.02],
        )
        if kind == "submit" and len(waiting) < 12:
            self.submit(rng)
        elif kind == "node":
            node = str(rng.choice(sorted(self.nodes)))
            if node in self.lost:
                self.restore(node)
            elif len(self.lost) < len(self.nodes) - 1:
                self.lose(node)
        elif kind == "cancel" and self.alive:
            self.cancel(str(rng.choice(sorted(self.alive))))
        elif kind in ("end", "measure", "stop") and self.placed:
            name = str(rng.choice(self.running))
            if kind == "measure":
                self.measure(name, float(rng.uniform(0.3, 1.2)))
            else:
                (self.end if kind == "end" else self.stop)(name)
        else:
            self.wait(float(rng.exponential(300)))

    def check(self):
        """Compare the state with the model."""
        taken = {}
        for name, devices in self.placed.items():
            assert name in self.alive
            assert len(set(devices)) == len(devices)
            for node, device in devices:
                assert node not in self.lost, f"{name} runs on lost node {node}"
                assert 0 <= device < self.nodes[node].devices
                taken.setdefault((node, device), set()).add(name)
        for (node, _), group in taken.items():  # jobs that share a device share all of theirs
            jobs = [self.alive[name] for name in group]
            assert len(jobs) == 1 or all(job.shares for job in jobs)
            memory_bytes = self.nodes[node].memory_bytes
            assert not memory_bytes or sum(job.memory_bytes for job in jobs) <= memory_bytes
            (devices,) = {frozenset(self.placed[name]) for name in group}
            assert all(taken[device] == group for device in devices)
            # Who starts alone and is joined in the same instant keeps the limit of its start.
            *_, last = [1 / len(group), *(s for n, s in self.shares.items() if n in group)]
            assert last == 1 / len(group)
        state = self.state
        assert set(state.running) == set(self.placed)
        assert set(state.waiting) == set(self.alive) - set(self.placed), "a job was lost"
        free = Counter()
        for index, node in enumerate(self.cluster.nodes):
            bits = state.inventory.free_bits[index]
            for device in range(node.devices):
                is_free = node.name not in self.lost and (node.name, device) not in taken
                assert bool(bits >> device & 1) == is_free
                free[node.device_type] += is_free
        assert dict(free) == state.inventory.free

    def replayed(self, policy):
        """Return the decisions of another policy object on the same events."""
        state = State(self.cluster, rate_model(self.cluster))
        return [d for events in self.instants for d in decide(policy, state, events)]

    def _follow(self, action):
        name = action.name
        match action:
            case Start(placement=placement):
                assert name in self.alive
                assert name not in self.placed
                self.placed[name] = [(p.node, d) for p in placement.parts for d in p.devices]
                self.shares[name] = placement.share
                job = self.alive[name]
                low, high = job.limits
                assert low <= placement.devices <= high
                kinds = {self.nodes[part.node].device_type for part in placement.parts}
                assert len(kinds) == 1
                assert not job.device_types or kinds <= set(job.device_types)
                assert action.reason
            case Preempt():
                self.shares.pop(name, None)
                assert self.alive[name].preemptible, f"{name} must not be preempted"
                assert action.reason
                del self.placed[name]
            case Refuse(reason=reason):
                assert reason == never_fits(self.state, self.alive[name])
                assert reason
                del self.alive[name]
        # While actions are under way, no device may be promised to jobs that do not share it.
        assert all(math.isfinite(job.counted_s) for job in self.state.running.values())
