"""Completion times under our scheduling policy, in the settings of published schedulers.

Each peer's own input, cluster and rules, in our simulator; the peer's figures, measured in its own
simulator on the same input, stand beside. One set of parameters of our policy serves all settings.

    Gavel    8 V100, 16 P100, 24 K80; decisions at 360 s rounds only; a start costs nothing; rates
             do not depend on the place; pairs of jobs of equal size may share; rates and work known
    Pollux   16 nodes x 4 GPUs; decisions every 60 s; each start costs 30 s; sizes are elastic; the
             batch size adapts, or is the fixed one of the workload; mean of its workloads
    Muri     8 nodes x 8 GPUs; decisions at each event; up to four jobs of equal size share, by its
             own formula; a start costs what its authors measured; work known or unknown
    MARBLE   a Summit-like queue (6 GPUs a node), seeds 1 to 10: see `summit_trace`

In Gavel's simulator two jobs of a pair end together, at the end of the later one, and its jobs take
whole steps; here they end by themselves. In Muri's, a start is paid by every running job at each
event, which costs its own policy 0.6 h of 23.1; here a job pays when it starts.

    python bench/scheduler_jct.py --json [--quick] --data DIR

DIR holds the traces as shared/sched has them. A setting whose files are absent is not measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from harness import Report, tell

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.formats import gavel
from paceline.scheduler.formats.adaptdl import read_adaptdl
from paceline.scheduler.formats.muri import read_muri
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.policies.choose import make_policies
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.simulate.compare import simulate
from paceline.scheduler.simulate.scenario import Scenario
from paceline.scheduler.simulate.synthetic import (
    FAST_LEVELS,
    SLOW_LEVELS,
    summit_cluster,
    summit_trace,
)

HOUR_S = 3600.0
KNOWN = Scenario()
UNKNOWN = Scenario(durations="unknown")
WRONG = Scenario(durations=2.0, rate_error=0.3)

GAVEL_CLUSTER = "v100=2x4,p100=4x4,k80=3x8"
# hours, from Gavel's simulator: mean completion time, makespan
GAVEL_PEERS = {
    "minimize_makespan": {"gandiva": (9.74, 21.11), "max_min_fairness_perf": (9.91, 19.03)},
    "max_min_fairness": {"gandiva": (4.83, 18.72), "max_min_fairness_perf": (4.06, 17.76)},
}
# seconds, means of the 8 workloads; the fixed batch size is that of Tiresias' and Optimus' runs
POLLUX_PEERS = {True: {"Pollux": 2751.1}, False: {"Tiresias": 4038.2, "Optimus": 5681.9}}
POLLUX_SCENARIOS = {"known": KNOWN, "unknown": UNKNOWN, "wrong by 2x, rates by 30 %": WRONG}
MURI_PEERS = {
    "known": {"Muri-S": 23.12, "SRTF": 53.63},
    "unknown": {"Muri-L": 24.64, "Tiresias": 96.45},
}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="within a minute: Gavel and Muri only")
    default = Path(__file__).resolve().parents[2] / "shared" / "sched"
    parser.add_argument("--data", type=Path, default=default, help="folder of the traces")
    chosen = parser.parse_args()
    report = Report("scheduler_jct", chosen.json)
    measure_gavel(report, chosen.data / "gavel", quick=chosen.quick)
    measure_pollux(report, chosen.data / "adaptdl", quick=chosen.quick)
    measure_muri(report, chosen.data / "muri", quick=chosen.quick)
    measure_marble(report, quick=chosen.quick)
    return report.print()


# --- Gavel ---------------------------------------------------------------------------------------


def measure_gavel(report, data, *, quick):
    outcomes = {}
    for trace, peers in GAVEL_PEERS.items():
        path = data / "traces" / "physical_cluster" / f"{trace}.trace"
        if not path.exists():
            tell(f"not measured: {path} is absent")
            outcomes[trace] = None
            continue
        rates = gavel.read_rates(data / "simulation_throughputs.json", distance=False)
        queue = Queue(gavel.read_jobs(path), rates)
        for policy in ["paceline"] if quick else ["paceline", "las", "srtf", "gandiva"]:
            for words, scenario in {"known": KNOWN, "wrong by 2x, rates by 30 %": WRONG}.items():
                if policy != "paceline" and scenario is not KNOWN:
                    continue
                figures = play(queue, GAVEL_CLUSTER, policy, scenario, round_s=360.0)
                if policy == "paceline" and scenario is KNOWN:
                    outcomes[trace] = figures
                if policy == "las":
                    outcomes[f"{trace} las"] = figures
                row(report, "gavel", trace, policy, words, figures)
        for name, (jct_h, makespan_h) in peers.items():
            report.row(
                setting="gavel",
                trace=trace,
                policy=f"{name} (its simulator)",
                jct_h=jct_h,
                makespan_h=makespan_h,
            )
    static, poisson = outcomes["minimize_makespan"], outcomes["max_min_fairness"]
    bars(report, "Gavel, 100 jobs at time 0", static, 9.7, 19.0)
    bars(report, "Gavel, 96 jobs", poisson, 4.06, 17.8)
    las = outcomes.get("max_min_fairness las")
    if las is not None:
        report.bar(
            "Gavel, 96 jobs: worst finish-time fairness / that of LAS",
            poisson.rho_worst / las.rho_worst,
            1.0,
        )


def bars(report, name, figures, jct_h, makespan_h):
    absent = "" if figures else "the trace is absent"
    jct = figures.jct_mean_s / HOUR_S if figures else None
    makespan = figures.makespan_s / HOUR_S if figures else None
    report.bar(f"{name}: mean completion time, h", jct, jct_h, reason=absent)
    report.bar(f"{name}: makespan, h", makespan, makespan_h, reason=absent)


# --- Pollux --------------------------------------------------------------------------------------


def measure_pollux(report, data, *, quick):
    """Means over the workloads that are there; the peers' are over all eight."""
    workloads = [
        path
        for number in ([6] if quick else range(1, 9))
        if (path := data / "workloads" / f"workload-{number}.csv").exists()
    ]
    limits = {True: 2751.0, False: 3030.0}
    for adaptive, peers in POLLUX_PEERS.items():
        batch = "adaptive batch" if adaptive else "fixed batch"
        means = {}
        for words, scenario in POLLUX_SCENARIOS.items():
            if quick and scenario is not KNOWN:
                continue
            results = [
                play(read_adaptdl(path, adaptive=adaptive), "16x4", "paceline", scenario, 60.0)
                for path in workloads
            ]
            if results:
                means[words] = statistics.mean(result.jct_mean_s for result in results)
                report.row(
                    setting=f"pollux, {batch}",
                    policy="paceline",
                    durations=words,
                    workloads=len(results),
                    jct_s=means[words],
                    by_workload_s=[result.jct_mean_s for result in results],
                    restarts=sum(result.restarts for result in results),
                )
        for name, jct_s in peers.items():
            report.row(setting=f"pollux, {batch}", policy=f"{name} (its simulator)", jct_s=jct_s)
        complete = len(workloads) == 8
        report.bar(
            f"Pollux's 8 workloads, {batch}: mean completion time, s",
            means.get("known") if complete else None,
            limits[adaptive],
            reason="" if complete else f"{len(workloads)} of 8 workloads",
        )


# --- Muri ----------------------------------------------------------------------------------------


def measure_muri(report, data, *, quick):
    path = data / "trace3.csv"
    if not path.exists():
        tell(f"not measured: {path} is absent")
    limits = {"known": 23.1, "unknown": 24.6}
    for durations, scenario in {"known": KNOWN, "unknown": UNKNOWN}.items():
        jct_h = None
        if path.exists():
            for words, changes in variants(quick).items():
                queue = read_muri(path, **changes)
                for policy in ["paceline"] if quick else ["paceline", "muri"]:
                    figures = play(queue, "8x8", policy, scenario)
                    row(report, f"muri, {words}", "trace3", policy, durations, figures)
                    if policy == "paceline" and not changes:
                        jct_h = figures.jct_mean_s / HOUR_S
            for name, hours in MURI_PEERS[durations].items():
                report.row(
                    setting="muri", trace="trace3", policy=f"{name} (its simulator)", jct_h=hours
                )
        reason = "" if jct_h else "the trace is absent"
        report.bar(
            f"Muri trace3, work {durations}: mean completion time, h",
            jct_h,
            limits[durations],
            reason=reason,
        )


def variants(quick):
    if quick:
        return {"its formula": {}}
    return {
        "its formula": {},
        "30 % interference": {"interference": 0.3},
        "no resource used twice at once": {"bounded": True},
    }


# --- MARBLE --------------------------------------------------------------------------------------


def measure_marble(report, *, quick):
    """Gains on drawn queues, seed by seed; where links are slow, and with spread placements."""
    gains = {"marble": [], "marble-share": []}
    for seed in range(1, 4 if quick else 11):
        figures = {
            policy: play_on(summit_trace(seed), summit_cluster(), policy)
            for policy in ("fifo-nodes", "optimus", "marble", "marble-share", "paceline")
        }
        for mode, of_seeds in gains.items():
            gained = {
                "throughput": figures["fifo-nodes"].makespan_s / figures[mode].makespan_s - 1,
                "jct": 1 - figures[mode].jct_mean_s / figures["optimus"].jct_mean_s,
            }
            of_seeds.append(gained)
            report.row(setting="marble", seed=seed, policy=mode, **gained)
        report.row(
            setting="marble",
            seed=seed,
            **{f"{name} jct_h": f.jct_mean_s / HOUR_S for name, f in figures.items()},
            **{f"{name} useful": f.useful for name, f in figures.items()},
        )
    for mode, of_seeds in gains.items():
        for gain, limit in {"throughput": 0.483 / 2, "jct": 0.47 / 2}.items():
            values = [gains_of_seed[gain] for gains_of_seed in of_seeds]
            against = "exclusive FIFO" if gain == "throughput" else "Optimus"
            report.bar(
                f"{mode}: gain in {gain} over {against}, median",
                statistics.median(values),
                limit,
                at_least=True,
            )
            report.bar(f"{mode}: the same, worst seed", min(values), 0.0, at_least=True)
    for name, levels in {"fast links": FAST_LEVELS, "slow links": SLOW_LEVELS}.items():
        rows = {"close together or not": Fifo(), "close together only": Fifo(near=True)}
        for words, policy in rows.items():
            queue, cluster = summit_trace(1, levels=levels), summit_cluster(levels=levels)
            figures = simulate(queue, cluster, policy, KNOWN, log=False).metrics
            report.row(setting=f"marble, {name}, fifo, {words}", jct_h=figures.jct_mean_s / HOUR_S)


def play_on(queue, cluster, policy):
    (chosen,) = make_policies([policy])
    return simulate(queue, cluster, chosen, KNOWN, log=False).metrics


# --- all -----------------------------------------------------------------------------------------


def play(queue, cluster, policy, scenario, round_s=None):
    """Return the figures of a policy, or None if we have no such policy."""
    (chosen,) = make_policies([policy], round_s=round_s)
    return simulate(queue, Cluster.of_text(cluster), chosen, scenario, log=False).metrics


def row(report, setting, trace, policy, durations, figures):
    report.row(
        setting=setting,
        trace=trace,
        policy=policy,
        durations=durations,
        jct_h=figures.jct_mean_s / HOUR_S,
        jct_p99_h=figures.jct_p99_s / HOUR_S,
        makespan_h=figures.makespan_s / HOUR_S,
        rho_worst=figures.rho_worst,
        allocated=figures.allocated,
        useful=figures.useful,
        restarts=figures.restarts,
        jct_bound_h=figures.jct_bound_s / HOUR_S,
    )


if __name__ == "__main__":
    sys.exit(main())
