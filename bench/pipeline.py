"""Pipelines: how much of a step the ranks idle, and what a pipeline gains against data parallelism.

- chain: two ranks of one host, a core each, train 16 equal layers in two stages, 8 microbatches:
  Paceline's runtime with 1F1B and fill-drain, and torch.distributed.pipelining's Schedule1F1B, all
  in the same pair of processes; blocks of steps take turns. The bubble is the part of both ranks'
  time in which they compute no forward and no backward pass; beside it stands the bubble of the
  same schedule replayed with the median seconds that the stages' passes took.
- hybrid: two emulated hosts (network namespaces, links of 1 Gbit/s), two ranks and a core each,
  train a residual net of 21 M parameters: on all four ranks data-parallel
  (DistributedDataParallel, and Paceline's engine), and in two stages, one on each host, of two
  replicas. The global batch is the same.
- resnet110: the same for ResNet-110 (1.7 M parameters), whose gain is predicted from one process's
  passes, the schedule replayed with the link, and the gradients' bytes.
- layers: the same hosts and ranks train AlexNet (61 M parameters): data-parallel, its linear layers
  divided among all ranks (tensor_parallel="auto"), and among the ranks of each host.
- deep: one step of ResNet-1001 on two ranks; ResNet-5000 cut into 64 stages and scheduled.

    python bench/pipeline.py --json [--quick] [--only SECTION ...]

hybrid, resnet110 and layers need root and iproute2. `--quick` is the chain alone, with fewer
rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import emulated_hosts
from harness import Report, await_ranks, options, run_sections, tell

from paceline.core.allocator import KEEP

RATE_BITS_PER_S = 1e9
DEADLINE_S = 900
OWN_PIDS = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
CHAIN_LAYERS, CHAIN_WIDTH, CHAIN_BATCH, CHAIN_MICROBATCHES = 16, 512, 2048, 8
CHAIN_FORMS = ("1f1b", "fill_drain", "torch")
HOST_FORMS = ("ddp", "data", "hybrid")
LAYER_FORMS = ("data", "tensor", "tensor_host")
# global batch, microbatches of the hybrid form
SHAPES = {"hybrid": (32, 8), "resnet110": (64, 8), "layers": (16, 1)}
# depth, width, pixels of an image along a side
MODELS = {"hybrid": (56, 80, 16), "resnet110": (110, 16, 32)}
WARM, STEPS = 2, 3
MAX_BUBBLE_ERROR = 0.1
MIN_GAIN, MIN_LAYERS_GAIN = 1.3, 2.0
MAX_PREDICTION_ERROR = 0.1


def main():
    given = options(__doc__, "--only", "--rank")
    if given.rank:
        section, rank, folder, rounds, *forms = given.rank
        return train(section, int(rank), Path(folder), int(rounds), forms)
    report = Report("pipeline", given.json)
    names = given.only or (("chain",) if given.quick else tuple(SECTIONS))
    run_sections(names, lambda name: SECTIONS[name](report, given.quick), report)
    return report.print()


# --- sections ------------------------------------------------------------------------------------


def chain(report, quick):
    found = run_ranks("chain", CHAIN_FORMS, rounds=3 if quick else 9, hosts=1, ranks_per_host=2)
    for form in CHAIN_FORMS:
        report.row(section="chain", form=form, step_ms=median_ms(found, form))
    for form in ("1f1b", "fill_drain"):
        measured, replayed = found["bubbles"][form]
        report.row(section="chain", form=form, bubble=measured, replayed_bubble=replayed)
        error = abs(measured - replayed)
        report.bar(f"{form}: bubble, measured - replayed, of a step", error, MAX_BUBBLE_ERROR)
    ratio = ratio_of(found, "torch", "1f1b")
    report.bar("chain: steps/s / torch.distributed.pipelining", ratio, 1.0, at_least=True)


def hybrid(report, quick):
    found = between_hosts("hybrid", report, quick)
    if found is None:
        return
    ratio = ratio_of(found, "data", "hybrid")
    report.row(
        section="hybrid",
        compared="hybrid / DistributedDataParallel",
        speedup=ratio_of(found, "ddp", "hybrid"),
    )
    report.bar("21 M parameters, 2 hosts: hybrid / data parallel", ratio, MIN_GAIN, at_least=True)


def resnet110(report, quick):
    found = between_hosts("resnet110", report, quick)
    if found is None:
        return
    ratio = ratio_of(found, "data", "hybrid")
    report.row(section="resnet110", gain=ratio)


def layers(report, quick):
    found = between_hosts("layers", report, quick, LAYER_FORMS)
    if found is None:
        return
    for form in LAYER_FORMS[1:]:
        report.row(
            section="layers",
            compared=f"{form} / data",
            speedup=ratio_of(found, "data", form),
            fewer_bytes=found["bytes"]["data"] / found["bytes"][form],
        )
    ratio = ratio_of(found, "data", "tensor")
    name = "AlexNet, 2 hosts: linear layers divided / data parallel"
    report.bar(name, ratio, MIN_LAYERS_GAIN, at_least=True)


def between_hosts(section, report, quick, forms=HOST_FORMS):
    if why := emulated_hosts.available():
        tell(f"{section}: not measured: {why}")
        return None
    with emulated_hosts.network(2, RATE_BITS_PER_S):
        found = run_ranks(section, forms, rounds=2 if quick else 5, hosts=2, ranks_per_host=2)
    for form in forms:
        report.row(
            section=section,
            form=form,
            step_ms=median_ms(found, form),
            megabytes=found["bytes"][form] / 1e6,
        )
    return found


def deep(report, quick):
    found = run_ranks("deep", ("1f1b",), rounds=1, hosts=1, ranks_per_host=2)
    report.row(section="deep", model="ResNet-1001", ranks=2, step_ms=median_ms(found, "1f1b"))


SECTIONS = {
    "chain": chain,
    "hybrid": hybrid,
    "resnet110": resnet110,
    "layers": layers,
    "deep": deep,
}


def median_ms(found, form):
    return statistics.median(found["seconds"][form]) * 1e3


def ratio_of(found, slow, fast):
    """Return the median over rounds of the ratio within a round."""
    pairs = zip(found["seconds"][slow], found["seconds"][fast], strict=True)
    return statistics.median(a / b for a, b in pairs)


# --- the ranks -----------------------------------------------------------------------------------


def run_ranks(section, forms, *, rounds, hosts, ranks_per_host):
    """Train a section's forms on all ranks; return what rank 0 measured."""
    environ = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1"}
    if hosts > 1:
        environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(hosts * ranks_per_host):
            command = [sys.executable, __file__, "--rank", section, str(rank), folder, str(rounds)]
            place = [*emulated_hosts.inside(rank // ranks_per_host), *OWN_PIDS] if hosts > 1 else []
            started.append(subprocess.Popen([*place, *command, *forms], env=environ))
        await_ranks(started, DEADLINE_S)
        return json.loads((Path(folder) / "found.json").read_text())


def train(section, rank, folder, rounds, forms):
    """Train the forms in turn as one rank; rank 0 writes what was measured."""
    import torch
    import torch.distributed as dist

    ranks = 4 if section in SHAPES else 2
    cores = sorted(os.sched_getaffinity(0))
    place = rank // (ranks // 2)  # ranks of a host share its core
    os.sched_setaffinity(0, {cores[place % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=300),
    )
    steps = {form: make_form(section, form, rank, ranks) for form in forms}
    for run in steps.values():
        run(WARM)
    found = {"seconds": {form: [] for form in forms}, "bytes": {}, "bubbles": {}}
    for number in range(rounds):
        for form, run in steps.items():
            dist.barrier()
            before, begin = sent_bytes(section), time.perf_counter()
            run(STEPS)
            took = (time.perf_counter() - begin) / STEPS
            dist.barrier()
            sent = (sent_bytes(section) - before) / STEPS
            measured = torch.tensor([took, sent], dtype=torch.float64)
            dist.all_reduce(measured, dist.ReduceOp.MAX)
            found["seconds"][form].append(float(measured[0]))
            found["bytes"][form] = float(measured[1])
        if rank == 0:
            tell(f"{section}: round {number + 1} of {rounds}")
    for form in forms:
        if section == "chain" and form != "torch":
            found["bubbles"][form] = bubbles_of(steps[form])
    dist.barrier()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()
    return 0


def sent_bytes(section):
    return emulated_hosts.sent_bytes() if section in SHAPES else 0


def make_form(section, form, rank, ranks):
    """Return what trains some steps of a section's model in a form."""
    import pipeline_models
    import torch
    from torch import nn

    from paceline.training import prepare

    torch.manual_seed(1)
    if section == "chain":
        model = pipeline_models.chain(CHAIN_LAYERS, CHAIN_WIDTH)
        inputs, target = torch.randn(2, CHAIN_BATCH, CHAIN_WIDTH)
        loss_fn = nn.functional.mse_loss
        if form == "torch":
            return torch_pipeline(model, inputs, target, loss_fn, rank)
        shape = {"partitions": 2, "microbatches": CHAIN_MICROBATCHES, "schedule": form}
    elif section == "deep":
        model = pipeline_models.resnet(1001)
        inputs, target = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
        loss_fn = nn.functional.cross_entropy
        shape = {"partitions": 2, "microbatches": 4}
    elif section == "layers":
        model = pipeline_models.alexnet()
        samples = SHAPES[section][0] // ranks
        inputs, target = torch.randn(samples, 3, 224, 224), torch.randint(1000, (samples,))
        loss_fn = nn.functional.cross_entropy
        shape = {} if form == "data" else {"tensor_parallel": "auto"}
        if form == "tensor_host":
            shape["tensor_parallel_ranks"] = 2
    else:
        depth, width, side = MODELS[section]
        model = pipeline_models.resnet(depth, width=width)
        batch, microbatches = SHAPES[section]
        replicas = 2 if form == "hybrid" else ranks
        inputs = torch.randn(batch // replicas, 3, side, side)
        target = torch.randint(10, (len(inputs),))
        loss_fn = nn.functional.cross_entropy
        shape = {}
        if form == "hybrid":
            shape = {"partitions": 2, "microbatches": microbatches}
        elif form == "ddp":
            shape = {"engine": "ddp"}
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    example = inputs if section == "layers" else inputs[:2]
    prepared = prepare(
        model, optimizer, loss_fn=loss_fn, example_inputs=example, alarm=False, **shape
    )

    def run(count):
        for _ in range(count):
            optimizer.zero_grad()
            prepared.forward_backward(inputs, target)
            optimizer.step()

    run.prepared = prepared
    return run


def torch_pipeline(model, inputs, target, loss_fn, rank):
    """Return what trains some steps in two equal stages of torch.distributed.pipelining."""
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = CHAIN_LAYERS // 2
    part = model[:half] if rank == 0 else model[half:]
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, CHAIN_MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(part.parameters(), 1e-4)

    def run(count):
        for _ in range(count):
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=target, losses=[])
            optimizer.step()

    return run


def bubbles_of(run):
    """Return the measured bubble of a step, and that of its schedule replayed; all ranks call it.

    Both are the part of the ranks' time, from the first pass's begin to the last one's end, in
    which they compute none.
    """
    import torch.distributed as dist

    from paceline.schedules.pipeline import StageCosts, StageEdge, replay
    from paceline.training.pipeline.computing import StageComputing

    spans = []
    originals = {kind: getattr(StageComputing, kind) for kind in ("forward", "backward")}
    for kind, original in originals.items():
        setattr(StageComputing, kind, timed(original, kind, spans))
    measured, passes = [], []
    for _ in range(5):
        spans.clear()
        dist.barrier()
        run(1)
        every = [None, None]
        dist.all_gather_object(every, list(spans))
        begin = min(span[1] for own in every for span in own)
        end = max(span[2] for own in every for span in own)
        busy = sum(span[2] - span[1] for own in every for span in own)
        measured.append(1 - busy / (2 * (end - begin)))
        passes.append(every)
    costs = {
        kind: tuple(
            statistics.median(
                end - begin for every in passes for k, begin, end in every[stage] if k == kind
            )
            for stage in range(2)
        )
        for kind in ("forward", "backward")
    }
    for kind, original in originals.items():
        setattr(StageComputing, kind, original)
    model = run.prepared.model
    schedule = model.schedule_of(CHAIN_MICROBATCHES)
    edges = (StageEdge(0, 1, 0),)
    played = replay(schedule, edges, StageCosts(**{f"{k}_s": v for k, v in costs.items()}))
    return statistics.median(measured), played.bubble_share


def timed(call, kind, spans):
    def measure(*args, **kwargs):
        begin = time.clock_gettime(time.CLOCK_MONOTONIC)
        result = call(*args, **kwargs)
        spans.append((kind, begin, time.clock_gettime(time.CLOCK_MONOTONIC)))
        return result

    return measure


if __name__ == "__main__":
    sys.exit(main())
