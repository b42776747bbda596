"""Measures what needs torch, in a process of its own; `probe` runs one, then two at once.

``python -m paceline.probe.worker SETTINGS`` where SETTINGS is a JSON object; the answer is
one JSON object on stdout. A process of its own keeps torch out of the command line, gives each
measurement fresh thread pools, and can be ended when it hangs.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core.processes import die_with_parent
from paceline.probe.compute import (
    Effort,
    framework_records,
    measure_memory,
    measure_optimizer,
    measure_overheads,
    measure_rates,
    overhead_records,
)
from paceline.probe.gloo import measure_collectives, measure_ddp

if TYPE_CHECKING:
    from collections.abc import Callable


def _measure(
    threads: int, processes: int, settings: dict[str, Any], meet: Callable[[], None]
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    effort = Effort(
        budget_s=settings["budget_s"], rounds=settings["rounds"], quick=settings["quick"], meet=meet
    )
    costs = measure_overheads(effort)
    meet()
    costs.update(measure_optimizer(effort))
    rates = measure_rates(costs, effort, threads=threads, processes=processes)
    meet()
    memory = measure_memory(effort)
    return {
        "threads": threads,
        "processes": processes,
        "rates": [one.to_json() for one in rates],
        "overheads": [one.to_json() for one in overhead_records(costs, threads, processes)],
        "framework_overheads": [
            one.to_json() for one in framework_records(costs, threads, processes)
        ],
        "memory": memory,
    }


def main(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the measurements that `settings` ask for."""
    if settings["cores"]:
        os.sched_setaffinity(0, settings["cores"])
    torch.manual_seed(0)
    ranks = settings["ranks"]
    if ranks == 1:
        configurations = [
            _measure(threads, 1, settings, lambda: None) for threads in settings["threads"]
        ]
        return {"torch": torch.__version__, "configurations": configurations}
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings['meeting']}",
        rank=settings["rank"],
        world_size=ranks,
        timeout=timedelta(seconds=settings["deadline_s"]),
    )
    try:
        configurations = [
            _measure(threads, ranks, settings, dist.barrier) for threads in settings["threads"]
        ]
        torch.set_num_threads(settings["threads"][0])
        collectives = measure_collectives(quick=settings["quick"])
        ddp = measure_ddp(collectives["all_reduce"], quick=settings["quick"])
    finally:
        dist.destroy_process_group()
    return {
        "torch": torch.__version__,
        "configurations": configurations,
        "collectives": collectives,
        "ddp": ddp,
    }


if __name__ == "__main__":
    die_with_parent(json.loads(sys.argv[1])["parent"])
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
    sys.stdout.flush()
