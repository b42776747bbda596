"""One rank of `plan_choice.py`: trains by several plans in turn.

    python bench/plan_choice_ranks.py TARGET BATCH RANK RANKS STORE PLANS

PLANS is a file with a list of plans of as many ranks. Each line on stdin is ``NUMBER WARM STEPS``:
steps of that plan, some to warm up and others whose seconds are printed. Each plan has a model of
its own, so that plans can take turns. A rank gets from its plan what it gets from ``paceline run
--plan`` (cores, threads, backend of collectives, DDP's buckets), and does what a script or
`paceline.training.prepare` does for one: passes before an update, layers that compute again.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.core.affinity import allowed_cores, bind_threads, planned_cores
from paceline.core.plan import Plan
from paceline.training.capture_process import split_target
from paceline.training.capture_worker import load_function, to_step
from paceline.training.measured.protocol import StepForm
from paceline.training.measured.steps import formed, loss_of
from paceline.training.pipeline.workload import ResizableBatch

MIB = 1 << 20


class Training:
    """A model in training by a plan, on one rank."""

    def __init__(self, function, resizable, batch, plan, rank, cores, group):
        torch.manual_seed(0)
        self.plan, passes = plan, plan.microbatch_count
        own = planned_cores(cores, rank, plan.mesh.data, plan.threads)
        self.cores = own or cores
        form = StepForm(
            threads=plan.threads,
            samples=batch // plan.mesh.data // passes,
            passes=passes,
            recompute=plan.recompute == "full",
        )
        self.step = formed(to_step(function(), "plan_choice"), form, resizable)
        sizes = {}
        if plan.bucket_bytes != Plan().bucket_bytes:
            assert plan.first_bucket_bytes == plan.bucket_bytes
            sizes = {"bucket_cap_mb": plan.bucket_bytes / MIB}
        self.prepare()
        self.module = DistributedDataParallel(self.step.module, process_group=group, **sizes)
        self.optimizer = self.step.optimizer(self.step.module.parameters())

    def prepare(self):
        """Give the process the plan's cores and threads."""
        bind_threads(self.cores)
        torch.set_num_threads(self.plan.threads)

    def run(self):
        """Make a step; return its seconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        count = self.step.accumulation
        for number in range(count):
            last = number == count - 1
            with contextlib.nullcontext() if last else self.module.no_sync():
                loss_of(self.step, self.module).backward()
        self.optimizer.step()
        return time.perf_counter() - begin


def main(target, batch, rank, ranks, store, plans):
    cores = allowed_cores()
    method = f"file://{store}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=ranks)
    groups = {"torch": dist.group.WORLD, "paceline": dist.new_group(backend="paceline")}
    function = load_function(*split_target(target))
    chosen = [Plan.from_json(plan) for plan in json.loads(Path(plans).read_text())]
    resizable = ResizableBatch(to_step(function(), "plan_choice"))
    trainings = [
        Training(function, resizable, batch, plan, rank, cores, groups[plan.collectives])
        for plan in chosen
    ]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        number, warm, steps = map(int, line.split())
        training = trainings[number]
        training.prepare()
        for _ in range(warm):
            training.run()
        dist.barrier()
        print(json.dumps([training.run() for _ in range(steps)]), flush=True)
    os._exit(0)  # torch's teardown of process groups has aborted ranks


if __name__ == "__main__":
    model, *counts, place, file = sys.argv[1:]
    main(model, *map(int, counts), place, file)
