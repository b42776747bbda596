"""How fast the scheduler decides, and how fast the simulator plays.

    simulated   jobs per second of a drawn queue on 1,024 devices, from submission to the last end:
                rigid jobs under FIFO and under our policy, elastic jobs under our policy; at 0.8
                of the capacity, and at 1.1 of it, where the queue grows without limit
    decisions   10,000 devices, 100,000 jobs submitted, most of them waiting: wall time of each
                decision while 2,000 more events come, and of a full plan; peak memory
    sharing     the same with the five classes of MARBLE's drawn queue, of which some pairs share
                devices

Each part runs in a process of its own. Queues are drawn, seed 1: sizes 1 to 16, work log-normal.

    python bench/scheduler_speed.py --json [--quick]
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import subprocess
import sys
import time

import numpy as np
from harness import Report, options, tell

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.decide import decide
from paceline.scheduler.events import Ended, Submitted
from paceline.scheduler.job import Job
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.policies.paceline import Paceline
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.simulate.engine import Simulation, World
from paceline.scheduler.simulate.synthetic import CLASSES, summit_rates
from paceline.scheduler.state.state import State

SIZES = [1] * 70 + [2] * 10 + [4] * 8 + [8] * 10 + [16] * 2
MEAN_SIZE = sum(SIZES) / len(SIZES)
MEDIAN_S, SIGMA = 3000.0, 1.7
MEAN_S = MEDIAN_S * float(np.exp(SIGMA**2 / 2))
CURVE = {devices: devices**0.8 for devices in (1, 2, 4, 8, 16, 32)}


def main():
    if len(sys.argv) > 1 and sys.argv[1] == "--part":
        print(json.dumps(PARTS[sys.argv[2]](int(sys.argv[3]))))
        return 0
    chosen = options(__doc__)
    report = Report("scheduler_speed", chosen.json)
    rigid, elastic = (4000, 500) if chosen.quick else (50_000, 5000)
    figures = {
        "rigid, fifo": part(report, "fifo", rigid),
        "rigid, paceline": part(report, "rigid", rigid),
        "rigid, paceline, overloaded": part(report, "overloaded", rigid // 5),
        "elastic, paceline": part(report, "elastic", elastic),
    }
    for name, limit in {
        "rigid, fifo": 5000,
        "rigid, paceline": 5000,
        "elastic, paceline": 500,
    }.items():
        report.bar(
            f"simulated jobs per s, {name}", figures[name]["jobs_per_s"], limit, at_least=True
        )
    large = part(report, "decisions", 20_000 if chosen.quick else 100_000)
    report.bar("10,000 devices: decision, p99, ms", large["decision_p99_ms"], 50)
    report.bar("10,000 devices: full plan, s", large["plan_s"], 2)
    report.bar("10,000 devices: memory, MiB", large["memory_mib"], 1024)
    shared = part(report, "sharing", 20_000 if chosen.quick else 100_000)
    report.bar("10,000 devices, jobs share: decision, p99, ms", shared["decision_p99_ms"], 50)
    report.bar("10,000 devices, jobs share: full plan, s", shared["plan_s"], 2)
    return report.print()


def part(report, name, jobs):
    command = [sys.executable, __file__, "--part", name, str(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        tell(done.stderr)
        raise SystemExit(1)
    figures = json.loads(done.stdout)
    report.row(part=name, jobs=jobs, **figures)
    return figures


def drawn_jobs(count, devices, load, *, elastic=False, shares=False):
    """Yield jobs whose work fills a share `load` of the devices."""
    classes = list(CLASSES.items()) if shares else []
    random_state = random.Random(1)
    gap_s = MEAN_S * MEAN_SIZE / (devices * load)
    at_s = 0.0
    for number in range(count):
        at_s += random_state.expovariate(1 / gap_s)
        size = random_state.choice(SIZES)
        seconds = max(10.0, random_state.lognormvariate(np.log(MEDIAN_S), SIGMA))
        if classes:
            profile, training = random_state.choice(classes)
            yield Job(
                name=str(number),
                submitted_s=at_s,
                devices=size,
                profile=profile,
                work=seconds * training.samples_per_s,
                memory_bytes=training.memory_bytes,
                restart_s=30.0,
            )
            continue
        yield Job(
            name=str(number),
            submitted_s=at_s,
            devices=size,
            min_devices=1 if elastic else 0,
            max_devices=2 * size if elastic else 0,
            profile="elastic" if elastic else "",
            work=seconds * (CURVE[size] if elastic else 1),
            restart_s=30.0,
        )


def rates():
    return RateModel({"elastic": Profile(alone={"gpu": CURVE})})


def simulated(policy, count, load, *, elastic=False):
    cluster = Cluster.of_text("128x8", switch_nodes=16)
    jobs = list(drawn_jobs(count, 1024, load, elastic=elastic))
    model = rates()
    world = World(jobs=jobs, cluster=cluster, rates=model)
    simulation = Simulation(world, policy, model, log=False)
    begin_s = time.perf_counter()
    outcome = simulation.run()
    took_s = time.perf_counter() - begin_s
    starts = sum(job.starts for job in outcome.jobs.values())
    return {"jobs_per_s": count / took_s, "took_s": took_s, "starts": starts}


def decisions(count, *, shares=False):
    """Fill 10,000 devices, queue the rest, and time decisions on events that follow."""
    cluster = Cluster.of_text("v100=1250x8", switch_nodes=32)
    policy, state = Paceline(), State(cluster, summit_rates() if shares else rates())
    jobs = list(drawn_jobs(count, 10_000, 1.0, shares=shares))
    decide(policy, state, [Submitted(at_s=0.0, job=job) for job in jobs])
    took_s, plans_s = [], []
    ends = itertools.cycle(list(state.running))
    profile = "lstm" if shares else ""
    for number in range(2000):
        at_s = 1.0 + number
        new = Job(name=f"new {number}", devices=1, work=1e4, profile=profile)
        events = [Submitted(at_s=at_s, job=new)]
        if number % 2:
            events = [Ended(at_s=at_s, name=next(ends))]
        planned_s = policy.planned_s
        begin_s = time.perf_counter()
        decide(policy, state, events)
        (took_s if policy.planned_s == planned_s else plans_s).append(time.perf_counter() - begin_s)
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "waiting": len(state.waiting),
        "running": len(state.running),
        "sharing": sum(len(slot.jobs) > 1 for slot in state.slots.values()),
        "decision_p50_ms": float(np.median(took_s)) * 1e3,
        "decision_p99_ms": float(np.quantile(took_s, 0.99)) * 1e3,
        "plans": len(plans_s),
        "plan_s": float(np.median(plans_s)),
        "plan_max_s": max(plans_s),
        "memory_mib": peak_kib / 1024,
    }


PARTS = {
    "fifo": lambda count: simulated(Fifo(), count, 0.8),
    "rigid": lambda count: simulated(Paceline(), count, 0.8),
    "overloaded": lambda count: simulated(Paceline(), count, 1.1),
    "elastic": lambda count: simulated(Paceline(), count, 0.8, elastic=True),
    "decisions": decisions,
    "sharing": lambda count: decisions(count, shares=True),
}


if __name__ == "__main__":
    sys.exit(main())
