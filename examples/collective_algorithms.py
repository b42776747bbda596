"""Collective algorithms as data: prove them, predict which one wins, and run one.

    python examples/collective_algorithms.py --ranks 160 --ranks-per-host 8

Ranks are threads of this process, so that no launcher is needed. Links are those of a typical
cluster, not measured. The last line of output is JSON.
"""

import argparse
import json

import numpy as np

from paceline.collectives.executor import ScheduleExecutor
from paceline.collectives.transports.threads import ThreadGroup
from paceline.core.machine import Device, Link, Machine, Quantity
from paceline.schedules import (
    Topology,
    binomial,
    chain,
    chain_binomial,
    chain_chain,
    check,
    groups_of,
    schedule_s,
    two_level_sharded,
)

CHUNKS = (1, 4, 16, 64, 256)


def sheet(value):
    return Quantity(value=value, source="datasheet")


def typical_machine():
    inside = Link(
        level="shared-memory",
        latency_s=sheet(8e-6),
        bandwidth_bytes_per_s=sheet(10e9),
        sharing="pair",
    )
    across = Link(level="network", latency_s=sheet(3e-6), bandwidth_bytes_per_s=sheet(6e9))
    memory = {"memory_bytes": sheet(12e9), "bandwidth_bytes_per_s": sheet(200e9)}
    gpu = Device(name="gpu", kind="gpu", count=8, cores=0, **memory)
    return Machine(name="typical", devices=(gpu,), links=(inside, across))


def reductions(ranks, hosts):
    """Return schedules of each algorithm, one for each number of chunks."""
    return {
        "binomial": [binomial("reduce", ranks)],
        "chain": [chain("reduce", ranks, chunks=c) for c in CHUNKS],
        "chain-binomial": [chain_binomial("reduce", hosts, chunks=c) for c in CHUNKS],
        "chain-chain": [chain_chain("reduce", hosts, chunks=c) for c in CHUNKS],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=160)
    parser.add_argument("--ranks-per-host", type=int, default=8)
    options = parser.parse_args()
    hosts = groups_of(options.ranks, options.ranks_per_host)
    topology = Topology.of(typical_machine(), hosts)
    sizes = 4.0 ** np.arange(5, 15)

    best_s = {}
    for name, schedules in reductions(options.ranks, hosts).items():
        check(schedules[0])
        best_s[name] = np.min([schedule_s(s, topology, sizes) for s in schedules], axis=0)
    print(f"reduce on {options.ranks} ranks, predicted microseconds")
    print(f"{'bytes':>10}", *(f"{name:>15}" for name in best_s))
    for i, size in enumerate(sizes):
        print(f"{size:10.0f}", *(f"{seconds[i] * 1e6:15.0f}" for seconds in best_s.values()))
    fastest = {int(size): min(best_s, key=lambda n: best_s[n][i]) for i, size in enumerate(sizes)}

    schedule = two_level_sharded(((0, 1), (2, 3)))

    def all_reduce(transport):
        gradient = np.full(1_000_000, transport.rank + 1.0, np.float32)
        ScheduleExecutor(schedule, transport).run(gradient, "average", timeout_s=30)
        return float(gradient[-1])

    print(json.dumps({"fastest": fastest, "averages": ThreadGroup(4).run(all_reduce)}))


if __name__ == "__main__":
    main()
