"""How long do a search over plans and a simulation of large jobs take, and how much memory?

- search: all plans of a 175 B transformer on 4,096 devices (512 nodes of Selene), branch and bound;
  and over 1 to 512 nodes at once.
- by class: a step of 100,000 devices, one rank replayed for each class, undisturbed and with a slow
  rank.
- one by one: a step of 1,024 ranks, each replayed, with jitter.

Each in a process of its own, so that the peak of memory is its own.

    python bench/plan_speed.py --json [--quick]
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time

from harness import Report, options, tell

ROUNDS = 3
DEADLINE_S = 300


def model():
    from paceline.perf.transformer import Architecture

    return Architecture(
        name="gpt3-175b", layers=96, hidden=12288, heads=96, vocab=51200, sequence=2048
    )


def search(nodes):
    from paceline.core.machine_file import library_machine
    from paceline.perf.planner import SearchSpace, search_plans

    space = SearchSpace(batch=1536, nodes=nodes, fixed={})
    found = search_plans(library_machine("selene"), model(), space, budget_s=DEADLINE_S)
    return {"compared": found.compared, "priced": found.priced, "left_out": found.left_out,
            "step_s": found.front[0].step_s}  # fmt: skip


def simulated(data, stages, microbatches, by, *, slow=False, jitter=0.0):
    from paceline.core.machine_file import library_machine
    from paceline.core.plan import Mesh, Plan
    from paceline.perf.simulator import Disturbances, SlowRank, simulate

    mesh = Mesh(data=data, tensor=8, pipeline=stages)
    plan = Plan(mesh=mesh, nodes=mesh.world_size // 8, precision="bfloat16",
                microbatches=microbatches, recompute="full", sequence_parallel=True)  # fmt: skip
    disturbances = Disturbances(slow=(SlowRank(rank=3, factor=1.2),) if slow else (), jitter=jitter)
    found = simulate(library_machine("selene"), model(), plan, data * microbatches, disturbances,
                     by=by)  # fmt: skip
    return {"ranks": mesh.world_size, "actors": len(found.actors.ranks),
            "step_s": float(found.step_s[0])}  # fmt: skip


CASES = {
    "search, 4,096 devices": lambda: search((512,)),
    "search, 8 to 4,096 devices": lambda: search(tuple(2**k for k in range(10))),
    "by class": lambda: simulated(1042, 12, 64, "class"),
    "by class, a slow rank": lambda: simulated(1042, 12, 64, "class", slow=True),
    "one by one": lambda: simulated(16, 8, 32, "rank", jitter=0.05),
}


def run(case):
    """Run a case in this process and print its outcome."""
    begin = time.perf_counter()
    found = CASES[case]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**found, "s": time.perf_counter() - begin, "peak_bytes": peak}))


def main():
    asked = options(__doc__, "--case")
    if asked.case:
        run(asked.case[0])
        return
    report = Report("plan_speed", asked.json)
    peaks, compared = [], 0
    seconds = {}
    for case in CASES:
        if asked.quick and "8 to" in case:
            continue
        tell(case)
        times = []
        for _ in range(1 if asked.quick else ROUNDS):
            done = subprocess.run(
                [sys.executable, __file__, "--case", case],
                stdout=subprocess.PIPE, text=True, check=True, timeout=DEADLINE_S,
            )  # fmt: skip
            found = json.loads(done.stdout)
            times.append(found["s"])
            peaks.append(found["peak_bytes"])
        seconds[case] = statistics.median(times)
        compared = max(compared, found.get("compared", 0) if "4,096 devices" in case else 0)
        report.row(case=case, **{**found, "s": seconds[case]})
    report.bar("plans that are compared", compared, 100_000, at_least=True)
    report.bar("search over them, s", seconds["search, 4,096 devices"], 30)
    report.bar("a step of 100,000 devices by class, s", seconds["by class"], 2)
    report.bar("a step of 1,024 ranks one by one, s", seconds["one by one"], 20)
    report.bar("peak memory, GB", max(peaks) / 1e9, 1)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
