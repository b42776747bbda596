"""Pipelines: how much of a step the ranks idle, and what a pipeline gains against data parallelism.

- chain: two ranks of one host, a core each, train 16 equal layers in two stages, 8 microbatches:
  Paceline's runtime with 1F1B and fill-drain, and torch.distributed.pipelining's Schedule1F1B, all
  in the same pair of processes; blocks of steps take turns. The bubble is the part of both ranks'
  time in which they compute no forward and no backward pass; beside it stands the bubble of the
  same schedule replayed with the median seconds that the stages' passes took.
- hybrid: two emulated hosts (network namespaces, links of 1 Gbit/s), two ranks and a core each,
  train a transformer of 21 M parameters: on all four ranks data-parallel
  (DistributedDataParallel, the same with a hook that communicates nothing, and Paceline's engine),
  and in two stages, one on each host, of two replicas. The global batch is the same: the one at
  which communication takes a third of the step of the better data-parallel form, found first.
- resnet110: the same for ResNet-110 (1.7 M parameters). Its gain is predicted from the passes of
  the whole model and of each stage, timed on every rank without communication, the schedule
  replayed with the link, and the gradients' bytes; before each round, of which the median counts.
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
HOST_FORMS = ("ddp", "silent", "data", "hybrid")
LAYER_FORMS = ("data", "tensor", "tensor_host")
# global batch; microbatches and schedule of the hybrid form
SHAPES = {
    "hybrid": (16, 4, "zero_bubble"),
    "resnet110": (64, 8, "1f1b"),
    "layers": (16, 1, ""),
}
BLOCKS, WIDTH, WORDS, LENGTH = 12, 384, 256, 64  # of the transformer
WARM, STEPS = 2, 3
MAX_BUBBLE_ERROR = 0.1
MIN_GAIN = 1.3
SHARE_IN_COMMUNICATION = 1 / 3  # of a step of the better data-parallel form
BATCHES = (16, 32)  # at which the share is measured first
SMALLEST, LARGEST = 8, 64
MAX_PREDICTION_ERROR = 0.1


def main():
    given = options(__doc__, "--only", "--rank")
    if given.rank:
        section, rank, folder, rounds, batch, *forms = given.rank
        if int(batch):
            SHAPES[section] = (int(batch), *SHAPES[section][1:])
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
    if why := emulated_hosts.available():
        tell(f"hybrid: not measured: {why}")
        return
    batch = batch_for_share(SHARE_IN_COMMUNICATION)
    report.row(section="hybrid", global_batch=batch)
    found = between_hosts("hybrid", report, quick, batch=batch)
    report.row(section="hybrid", share_of_step_in_communication=share_in_communication(found))
    ratio = min(ratio_of(found, form, "hybrid") for form in ("ddp", "data"))
    report.bar(
        "21 M parameters, 2 hosts: hybrid / the better data parallel",
        ratio,
        MIN_GAIN,
        at_least=True,
    )


def batch_for_share(share):
    """Return the batch at which the better data-parallel form communicates for a share of its step.

    The share falls with the batch, nearly in proportion between two batches that are measured.
    """
    forms = ("ddp", "data", "silent")
    shares = []
    with emulated_hosts.network(2, RATE_BITS_PER_S):
        for batch in BATCHES:
            found = run_ranks("hybrid", forms, rounds=2, hosts=2, ranks_per_host=2, batch=batch)
            shares.append(share_in_communication(found))
            tell(f"hybrid: communication takes {shares[-1]:.0%} of a step at batch {batch}")
    slope = (shares[1] - shares[0]) / (BATCHES[1] - BATCHES[0])
    wanted = BATCHES[0] + (share - shares[0]) / slope if slope < 0 else BATCHES[1]
    unit = 4  # ranks
    return min(LARGEST, max(SMALLEST, unit * round(wanted / unit)))


def share_in_communication(found):
    return 1 - 1 / min(ratio_of(found, form, "silent") for form in ("ddp", "data"))


def resnet110(report, quick):
    found = between_hosts("resnet110", report, quick)
    if found is None:
        return
    gain, predicted = ratio_of(found, "data", "hybrid"), found["predicted"]
    predicted_gain = predicted["data"] / predicted["hybrid"]
    report.row(
        section="resnet110",
        gain=gain,
        predicted_gain=predicted_gain,
        **{f"predicted_{form}_ms": seconds * 1e3 for form, seconds in predicted.items()},
    )
    error = abs(predicted_gain / gain - 1)
    report.bar("ResNet-110: gain, predicted / measured - 1", error, MAX_PREDICTION_ERROR)


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


def between_hosts(section, report, quick, forms=HOST_FORMS, batch=0):
    if why := emulated_hosts.available():
        tell(f"{section}: not measured: {why}")
        return None
    with emulated_hosts.network(2, RATE_BITS_PER_S):
        rounds = 2 if quick else 5
        found = run_ranks(section, forms, rounds=rounds, hosts=2, ranks_per_host=2, batch=batch)
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
    report.row(section="deep", model="ResNet-5000", **schedule_deep(5000, stages=64))


def schedule_deep(depth, stages):
    """Cut a residual net into stages, and check and replay its schedule; return what it took."""
    import pipeline_models
    import torch

    from paceline.schedules.pipeline import (
        check_pipeline,
        one_forward_one_backward,
        partition,
        replay,
        stage_costs,
        stage_edges,
    )
    from paceline.training.pipeline.costs import layer_costs
    from paceline.training.pipeline.graph import capture

    example = torch.zeros(4, 3, 32, 32)
    begin = time.perf_counter()
    captured = capture(pipeline_models.resnet(depth), example)
    costs = layer_costs(captured, example)
    captured_s = time.perf_counter() - begin
    found = partition(costs, stages)
    schedule = one_forward_one_backward(stages, 4 * stages)
    edges = stage_edges(costs.edges, found.cuts)
    check_pipeline(schedule, edges)
    played = replay(schedule, edges, stage_costs(costs, found.cuts))
    return {
        "layers": costs.layers,
        "stages": stages,
        "capture_s": captured_s,
        "cut_and_schedule_s": time.perf_counter() - begin - captured_s,
        "replayed_bubble": played.bubble_share,
    }


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


def run_ranks(section, forms, *, rounds, hosts, ranks_per_host, batch=0):
    """Train a section's forms on all ranks; return what rank 0 measured.

    `batch` is the global one; 0: that of `SHAPES`.
    """
    environ = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1"}
    if hosts > 1:
        environ["GLOO_SOCKET_IFNAME"] = "eth0"
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(hosts * ranks_per_host):
            command = [sys.executable, __file__, "--rank", section, str(rank), folder, str(rounds)]
            command.append(str(batch))
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
    predicted = []
    for number in range(rounds):
        if section == "resnet110":
            predicted.append(predict(section, rank, ranks))
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
    if predicted:
        found["predicted"] = {
            form: statistics.median(said[form] for said in predicted) for form in predicted[0]
        }
    for form in forms:
        if section == "chain" and form != "torch":
            found["bubbles"][form] = bubbles_of(steps[form])
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    steps.clear()
    dist.barrier()
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
        batch, microbatches, order = SHAPES[section]
        replicas = 2 if form == "hybrid" else ranks
        model, inputs, target = workload_between_hosts(section, batch // replicas)
        loss_fn = nn.functional.cross_entropy
        shape = {}
        if form == "hybrid":
            shape = {"partitions": 2, "microbatches": microbatches, "schedule": order}
        elif form in ("ddp", "silent"):
            shape = {"engine": "ddp"}
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    example = inputs if section == "layers" else inputs[:2]
    prepared = prepare(
        model, optimizer, loss_fn=loss_fn, example_inputs=example, alarm=False, **shape
    )

    if form == "silent":
        prepared.model.register_comm_hook(None, keep)

    def run(count):
        for _ in range(count):
            optimizer.zero_grad()
            prepared.forward_backward(inputs, target)
            optimizer.step()

    run.prepared = prepared
    return run


def workload_between_hosts(section, batch):
    """Return a model, and a batch of inputs and targets."""
    import pipeline_models
    import torch

    torch.manual_seed(1)
    if section == "resnet110":
        inputs, target = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
        return pipeline_models.resnet(110), inputs, target
    inputs, target = torch.randint(WORDS, (2, batch, LENGTH))
    return pipeline_models.transformer(BLOCKS, WIDTH, words=WORDS), inputs, target


def keep(_state, bucket):
    """Communicate nothing, as a hook of DistributedDataParallel."""
    import torch

    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def predict(section, rank, ranks):
    """Return the predicted seconds of a step, data-parallel and hybrid; all ranks call it.

    Every rank times passes of the whole model and of its stage, at the same time as the others,
    without communication. A flat all-reduce of n bytes between all ranks takes 2 (R - 1) / R n over
    the link of a host, after the backward pass, since the gradients are less than a bucket; that
    of a stage's replicas, on one host, is not counted.
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    from paceline.core.machine import Link, Quantity
    from paceline.schedules.pipeline import (
        StageCosts,
        StageEdge,
        one_forward_one_backward,
        partition,
        replay,
    )
    from paceline.training.pipeline.computing import ComputeOptions, StageComputing
    from paceline.training.pipeline.costs import layer_costs
    from paceline.training.pipeline.graph import capture
    from paceline.training.pipeline.stages import cut

    batch, microbatches, _ = SHAPES[section]
    loss_fn = nn.functional.cross_entropy

    def slowest(call):
        """Return the median seconds of a call, of the slowest rank of each stage."""
        dist.barrier()
        took = torch.zeros(ranks, dtype=torch.float64)
        took[rank] = seconds_of(call)
        dist.all_reduce(took)
        return [float(part.max()) for part in took.chunk(2)]

    model, inputs, target = workload_between_hosts(section, batch // ranks)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step():
        optimizer.zero_grad()
        loss_fn(model(inputs), target).backward()
        optimizer.step()

    whole_s = max(slowest(step))
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    data_s = whole_s + 2 * (ranks - 1) / ranks * size * 8 / RATE_BITS_PER_S

    size = batch // 2 // microbatches
    inputs, target = inputs[:size], target[:size]
    captured = capture(model, inputs[:2])
    costs = layer_costs(captured, inputs[:2])
    staged = cut(captured, partition(costs, 2).cuts)
    options = ComputeOptions(loss_fn=loss_fn)
    first, last = (StageComputing(stage, options) for stage in staged.stages)
    given = dict.fromkeys(captured.inputs, inputs)
    values = {name: value.detach() for name, value in first.forward(0, given, {}, None).items()}
    optimizer = torch.optim.SGD(staged.stages[2 * rank // ranks].parameters.values(), 1e-4)

    def forward():
        if rank < ranks // 2:
            first.forward(0, given, {}, loss_fn)
        else:
            received = {name: value.clone().requires_grad_() for name, value in values.items()}
            last.forward(0, given, received, lambda outputs: loss_fn(outputs, target))

    def both():
        forward()
        if rank < ranks // 2:
            first.backward(0, {name: [torch.ones_like(v)] for name, v in values.items()})
        else:
            last.backward(0, {})

    def update():
        optimizer.step()
        optimizer.zero_grad()

    forward_s, both_s, update_s = slowest(forward), slowest(both), slowest(update)
    sent = sum(value.nbytes for value in values.values())
    link = Link(
        level="network",
        latency_s=Quantity(value=1e-4, source="datasheet"),
        bandwidth_bytes_per_s=Quantity(value=RATE_BITS_PER_S / 8 / 2, source="datasheet"),
        sharing="node",
    )  # half of it for each of a host's two ranks
    passes = StageCosts(
        forward_s=tuple(forward_s),
        backward_s=tuple(b - f for b, f in zip(both_s, forward_s, strict=True)),
    )
    schedule = one_forward_one_backward(2, microbatches)
    played = replay(schedule, [StageEdge(0, 1, sent)], passes, link)
    return {"data": data_s, "hybrid": played.makespan_s + max(update_s)}


def seconds_of(call):
    """Return the median seconds of a call."""
    found = []
    for _ in range(2 + 5):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[2:])


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
