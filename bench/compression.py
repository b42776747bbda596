"""What does compressing gradients save on the wire, and what does it cost in accuracy?

Wire: 2 and 4 emulated hosts (network namespaces) with links of 1 Gbit/s train the residual CNN of
step_time.py (11 M parameters, batch 4 per rank) with DistributedDataParallel on gloo, in each form:

    none       a hook that communicates nothing: no form can be faster
    dense      DDP's own all-reduce
    dgc        Deep Gradient Compression, 0.1 % of the entries, float32 values
    dgc 16     the same with bfloat16 values
    half       bfloat16 values, dense
    powersgd   torch's PowerSGD, rank 1

Bytes are those that the interface of a host sends (headers and acknowledgements included), of the
host that sends most. `dgc, 2 x 2 ranks` is the hierarchical form: dense inside a host.

Accuracy: a CNN (0.2 M parameters) on Fashion-MNIST, 2 ranks, equal epochs, dense against dgc (four
stages of warm-up in the first two) and PowerSGD, all with one learning rate.

Decision: what the cost model says on shared memory and over 1 Gbit/s, measured there.

    python bench/compression.py --json [--quick] [--data DIR]      DIR: with fashion-mnist/
"""

from __future__ import annotations

import gzip
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
from harness import Report, options, tell

from paceline.core.allocator import KEEP

RATE_BITS_PER_S = 1e9
STEPS, WARM = 3, 3
TRAIN_RANKS, TRAIN_BATCH, RATE = 2, 32, 0.03
EPOCHS, WARM_EPOCHS = 15, 2
EPOCHS_OF_PAPER = 90  # on ImageNet, of which 4 warm up
DEADLINE_S = 1500
FORMS = ("none", "dense", "dgc", "dgc 16", "half", "powersgd")


def main():
    given = options(__doc__, "--rank", "--data", "--only", "--seeds")
    if given.rank:
        return run_rank(json.loads(given.rank[0]))
    report = Report("compression", given.json)
    only = given.only or ("exact", "wire", "accuracy")
    if "exact" in only:
        exact(report)
        selection(report)
    why = emulated_hosts.available()
    if "wire" in only and why:
        tell(f"wire: not measured: {why}")
    elif "wire" in only:
        wire(report, given.quick)
    data = Path(given.data[0]) / "fashion-mnist" if given.data else None
    if "accuracy" in only and data is not None:
        accuracy(report, data, given.quick, int(given.seeds[0]) if given.seeds else 3)
    elif "accuracy" in only:
        tell("accuracy: not measured: give --data")
    return report.print()


# --- exactness -----------------------------------------------------------------------------------


def exact(report):
    """Nothing is lost, bit by bit; at density 1 without masking it is momentum SGD."""
    import torch

    from paceline.training.compression import DeepGradientCompression, DensitySchedule, DGCOptions

    torch.manual_seed(0)
    lost = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        compressor = DeepGradientCompression(DGCOptions(momentum=0.0, value_dtype=dtype))
        before = torch.zeros(300, 1000)
        for _ in range(5):
            gradient = torch.randn(300, 1000)
            accumulated = before + gradient
            compressor.reduce([("w", gradient)])
            compressor.end_step()
            before = compressor.state_dict()["residual"]["w"].view(300, 1000).clone()
            lost = max(lost, float((accumulated - (gradient + before)).abs().max()))
    report.bar("accumulated - (sent + residual), largest", lost, 0.0)
    every = DensitySchedule(density=1.0)
    compressor = DeepGradientCompression(DGCOptions(density=every, mask_momentum=False))
    plain, ours = (torch.nn.Parameter(torch.ones(300, 100)) for _ in range(2))
    optimizers = torch.optim.SGD([plain], 0.1, momentum=0.9), torch.optim.SGD([ours], 0.1)
    for _ in range(20):
        plain.grad = torch.randn_like(plain)
        ours.grad = plain.grad.clone()
        compressor.reduce([("w", ours.grad)])
        for optimizer in optimizers:
            optimizer.step()
    error = float(((plain - ours).norm() / plain.norm()).detach())
    report.bar("density 1 without masking against momentum SGD, relative", error, 1e-6)


def selection(report):
    """Seconds of accumulation and selection of 11 M elements: native, and torch operators."""
    import torch

    from paceline.training.compression.selection import (
        Accumulation,
        accumulate_and_select,
        sample_of,
        select_with_torch,
        wanted_count,
    )

    torch.set_num_threads(1)
    count, density = 11_173_962, 0.001
    gradient, velocity, residual = torch.randn(3, count).unbind()
    how, times = Accumulation(momentum=0.9), {}
    for name, select in (("native", accumulate_and_select), ("torch", select_with_torch)):
        for number in range(6):
            options = {"wanted": wanted_count(count, density), "how": how}
            options |= {"sample": sample_of(count, density, "layer", number)}
            begin = time.perf_counter()
            select(gradient, velocity, residual, **options)
            if number:
                times.setdefault(name, []).append(time.perf_counter() - begin)
    begin = time.perf_counter()
    velocity.mul_(0.9).add_(gradient)
    residual.add_(velocity)
    accumulate_s = time.perf_counter() - begin
    native, plain = (statistics.median(times[name]) for name in ("native", "torch"))
    report.row(what="selection", native_s=native, torch_s=plain, accumulation_alone_s=accumulate_s)
    report.bar("selection: torch operators / native", plain / native, 2.0, at_least=True)


# --- wire ----------------------------------------------------------------------------------------


def wire(report, quick):
    network = emulated_hosts.network(4, RATE_BITS_PER_S)
    with network, tempfile.TemporaryDirectory() as folder:
        jobs = {(2, 1): FORMS, (4, 1): ("dense", "dgc", "dgc 16"), (2, 2): ("dense", "dgc")}
        found = {}
        for (hosts, per_host), forms in jobs.items():
            job = {"what": "wire", "hosts": hosts, "per_host": per_host, "forms": forms}
            job |= {"rounds": 3 if quick or hosts * per_host > 2 else 9}
            job |= {"stages": not quick and (hosts, per_host) == (2, 1)}
            found[hosts, per_host] = start(job, Path(folder), emulated=True)
        shared = start({"what": "decide", "hosts": 1, "per_host": 2}, Path(folder))
    for (hosts, per_host), by_form in found.items():
        place = f"{hosts} hosts" if per_host == 1 else f"{hosts} x {per_host} ranks"
        for form, measured in by_form["forms"].items():
            report.row(where=place, form=form, **measured)
        # Ranks of a host share its interface: two levels of dense all-reduce send as two hosts do.
        dense_bytes = found[hosts, 1]["forms"]["dense"]["bytes"]
        for form in by_form["forms"]:
            if form.startswith("dgc"):
                ratio = dense_bytes / by_form["forms"][form]["bytes"]
                name = f"{form}, {place}: bytes sent, dense / compressed"
                report.bar(name, ratio, 270, at_least=True)
    two = found[2, 1]
    steps = two["forms"]
    both = zip(steps["dense"]["seconds"], steps["dgc"]["seconds"], strict=True)
    ratio = statistics.median(dense / dgc for dense, dgc in both)
    bound = steps["dense"]["step_s"] / steps["none"]["step_s"]
    reason = f"without any communication {bound:.2f}"
    report.bar("dgc, 2 hosts: step, dense / compressed", ratio, 3.0, at_least=True, reason=reason)
    if two["stages"]:
        warm = sum(two["stages"].values())
        rest = EPOCHS_OF_PAPER - len(two["stages"])
        mean = (warm + rest * steps["dgc"]["bytes"]) / EPOCHS_OF_PAPER
        report.row(where="2 hosts", form="dgc", stages_bytes=two["stages"])
        total = steps["dense"]["bytes"] / mean
        report.row(where="2 hosts", form="dgc with 4 of 90 epochs of warm-up", reduction=total)
    report.row(where="shared memory", decision=shared["text"])
    report.row(where="1 Gbit/s", decision=two["decision"]["text"])
    report.bar("compression on shared memory", float(shared["pays"]), 0.0)
    report.bar("compression over 1 Gbit/s", float(two["decision"]["pays"]), 1.0, at_least=True)


def start(job, folder, *, emulated=False):
    """Run the ranks of a job; return what rank 0 found."""
    ranks = job["hosts"] * job["per_host"]
    own = Path(tempfile.mkdtemp(dir=folder))
    network = {"GLOO_SOCKET_IFNAME": "eth0" if emulated else "lo"}
    environ = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1", **network}
    started = []
    for rank in range(ranks):
        place = emulated_hosts.inside(rank // job["per_host"]) if emulated else []
        text = json.dumps({**job, "rank": rank, "ranks": ranks, "folder": str(own)})
        command = [*place, sys.executable, __file__, "--rank", text]
        started.append(subprocess.Popen(command, env=environ))
    try:
        codes = [process.wait(timeout=DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    return json.loads((own / "found.json").read_text())


# --- one rank ------------------------------------------------------------------------------------


def run_rank(job):
    import torch
    import torch.distributed as dist

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[job["rank"] % len(cores)]})
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    folder = Path(job["folder"])
    dist.init_process_group(
        "paceline" if job["what"] == "decide" else "gloo",
        store=dist.FileStore(str(folder / "store"), job["ranks"]),
        rank=job["rank"],
        world_size=job["ranks"],
        timeout=timedelta(seconds=300),
    )
    found = {"wire": wire_rank, "decide": decide_rank, "train": train_rank}[job["what"]](job)
    dist.barrier()
    dist.destroy_process_group()
    if job["rank"] == 0:
        (folder / "found.json").write_text(json.dumps(found))
    return 0


def decide_rank(_job):
    from paceline.training.compression import measure

    found = measure(11_173_962)
    return {"pays": found.pays, "text": str(found)}


def wire_rank(job):
    from paceline.training.compression import DensitySchedule

    forms = measured(job, {form: (form, 0.001) for form in job["forms"]}, job["rounds"])
    stages = {}
    if job["stages"]:
        schedule = DensitySchedule(steps_per_stage=1)
        densities = [schedule.at(stage) for stage in range(schedule.stages)]
        found = measured(job, {f"{density:.4f}": ("dgc", density) for density in densities}, 1)
        stages = {name: values["bytes"] for name, values in found.items()}
    decision = decide_rank(job) if job["per_host"] == 1 else {}
    return {"forms": forms, "stages": stages, "decision": decision}


def measured(job, forms, rounds):
    """Return of each form the seconds of a step by round, and the bytes that a host sends in it.

    Blocks of steps of the forms take turns; a block counts with its slowest rank.
    """
    import torch
    import torch.distributed as dist

    steps = {name: steps_of(job, *form) for name, form in forms.items()}
    for run in steps.values():
        run(WARM)
    found = {name: {"seconds": [], "bytes": 0.0} for name in forms}
    for _ in range(rounds):
        for name, run in steps.items():
            dist.barrier()
            before, begin = sent_bytes(), time.perf_counter()
            run(STEPS)
            took = (time.perf_counter() - begin) / STEPS
            dist.barrier()  # behind it, all that was sent has left
            sent = (sent_bytes() - before) / STEPS
            mine = torch.tensor([took, sent], dtype=torch.float64)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            found[name]["seconds"].append(float(mine[0]))
            found[name]["bytes"] = max(found[name]["bytes"], float(mine[1]))
    for name, values in found.items():
        values["step_s"] = statistics.median(values["seconds"])
        if job["rank"] == 0:
            tell(f"  {name}: {values['step_s']:.3f} s, {values['bytes']:,.0f} bytes")
    return found


def steps_of(job, form, density):
    """Return what trains some steps of a model in a form."""
    import step_time
    import torch
    import torch.distributed as dist

    make, given, loss_of = step_time.workload("cnn", job["rank"])
    model = step_time.wrapped(make(), dist.group.WORLD, form == "none")
    per_host = job["per_host"]
    hosts = [list(range(h * per_host, (h + 1) * per_host)) for h in range(job["hosts"])]
    compress(model, form, density=density, hosts=hosts)
    optimizer = torch.optim.SGD(model.parameters(), 0.001)

    def run(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model(given)).backward()
            optimizer.step()

    return run


def sent_bytes():
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def compress(model, form, *, density, hosts=None, stage_steps=0, momentum=0.9):
    """Register the hook of a form; return the momentum that is left to the optimizer."""
    import torch

    from paceline.training.compression import (
        DeepGradientCompression,
        DensitySchedule,
        DGCOptions,
        HalfCompression,
        register_hook,
        register_powersgd,
    )

    if form.startswith("dgc"):
        schedule = DensitySchedule(density=density, steps_per_stage=stage_steps)
        dtype = torch.bfloat16 if form == "dgc 16" else torch.float32
        own = DGCOptions(density=schedule, momentum=momentum, value_dtype=dtype)
        register_hook(model, DeepGradientCompression(own, hosts=hosts))
        return 0.0
    if form == "half":
        register_hook(model, HalfCompression())
    if form == "powersgd":
        register_powersgd(model, rank=1, dense_steps=2)
    return momentum


# --- accuracy ------------------------------------------------------------------------------------


def accuracy(report, data, quick, seeds):
    epochs, seeds = (1, 1) if quick else (EPOCHS, seeds)
    job = {"what": "train", "hosts": 1, "per_host": TRAIN_RANKS, "data": str(data)}
    job |= {"epochs": epochs, "forms": ("dense", "dgc", "powersgd")}
    scores = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for form, score in start({**job, "seed": seed}, Path(folder)).items():
                scores.setdefault(form, []).append(score)
    for form, own in scores.items():
        report.row(
            what="Fashion-MNIST", form=form, epochs=epochs, accuracy=statistics.mean(own), seeds=own
        )
    if quick:  # one epoch is the warm-up
        return
    lost = statistics.mean(scores["dense"]) - statistics.mean(scores["dgc"])
    report.bar("dgc: accuracy lost, points", 100 * lost, 0.5)


def train_rank(job):
    import torch

    images = {name: read_idx(Path(job["data"]), name) for name in ("train", "t10k")}
    given, labels = images["train"]
    return {
        form: train(job, form, torch.from_numpy(given), torch.from_numpy(labels), images["t10k"])
        for form in job["forms"]
    }


def train(job, form, images, labels, test):
    """Return the accuracy on the test set after the last epoch."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(job["seed"])
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    model = DistributedDataParallel(model)
    rank, ranks, epochs = job["rank"], job["ranks"], job["epochs"]
    steps = len(images) // (TRAIN_BATCH * ranks)
    stage = WARM_EPOCHS * steps // 4
    momentum = compress(model, form, density=0.001, stage_steps=stage)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=momentum)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps * epochs)
    random = torch.Generator().manual_seed(job["seed"])
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=random)[rank::ranks]
        for step in range(steps):
            batch = order[step * TRAIN_BATCH : (step + 1) * TRAIN_BATCH]
            optimizer.zero_grad()
            loss_of(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            scheduler.step()
        if rank == 0:
            tell(f"  {form}, seed {job['seed']}, epoch {epoch}: {score(model.module, test):.4f}")
    return score(model.module, test)


def score(model, test):
    import torch

    with torch.no_grad():
        found = model(torch.from_numpy(test[0])).argmax(1)
    return float((found == torch.from_numpy(test[1])).float().mean())


def read_idx(folder, name):
    """Return images (count, 1, 28, 28), normalized, and labels."""
    import numpy as np

    def read(kind, head):
        path = next(iter(sorted(folder.glob(f"{name}-{kind}*"))))
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        return np.frombuffer(data, np.uint8, offset=head)

    images = read("images", 16).reshape(-1, 1, 28, 28).astype(np.float32) / 255
    return (images - 0.286) / 0.353, read("labels", 8).astype(np.int64)


if __name__ == "__main__":
    sys.exit(main())
