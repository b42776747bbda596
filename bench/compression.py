"""What does compressing gradients save on the wire, and what does it cost in accuracy?

Wire: 2 and 4 emulated hosts (network namespaces) with links of 1 Gbit/s train the residual CNN of
step_time.py (11 M parameters, batch 4 per rank) with DistributedDataParallel on gloo, in each form.
Between 2 hosts with batch 2 and 1 as well: less computing for the same bytes, as on faster devices.

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

The full run takes about half an hour. With `--resume` each measurement is appended to
bench/results/compression.jsonl when it ends, and a run that is started again takes what is there:
stop it at any time, or give it `--minutes M`, after which it starts no further measurement.
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
from harness import Report, await_ranks, options, tell

from paceline.core.allocator import KEEP

RATE_BITS_PER_S = 1e9
STEPS, WARM = 3, 3
TRAIN_RANKS, TRAIN_BATCH, RATE = 2, 32, 0.03
EPOCHS, WARM_EPOCHS = 15, 2
EPOCHS_OF_PAPER = 90  # on ImageNet, of which 4 warm up
DEADLINE_S = 1500
FORMS = ("none", "dense", "dgc", "dgc 16", "half", "powersgd")
TRAINED_FORMS = ("dense", "dgc", "powersgd")
SEEDS = 3
BATCH, SMALLER_BATCHES = 4, (2, 1)
KEPT = Path(__file__).parent / "results" / "compression.jsonl"


def main():
    given = options(
        __doc__,
        *("--rank", "--data", "--only", "--minutes"),
        switches={"--resume": "keep each measurement in a file, and take what is there"},
    )
    if given.rank:
        return run_rank(json.loads(given.rank[0]))
    report = Report("compression", given.json)
    only = given.only or ("exact", "wire", "accuracy")
    end = time.monotonic() + 60 * float(given.minutes[0]) if given.minutes else None
    with tempfile.TemporaryDirectory() as folder:
        jobs = Jobs(Path(folder), KEPT if given.resume else None, end)
        if "exact" in only:
            exact(report)
            selection(report, jobs)
        why = emulated_hosts.available()
        if "wire" in only and why:
            tell(f"wire: not measured: {why}")
        elif "wire" in only:
            wire(report, jobs, given.quick)
        data = Path(given.data[0]) / "fashion-mnist" if given.data else None
        if "accuracy" in only and data is not None:
            accuracy(report, jobs, data, given.quick)
        elif "accuracy" in only:
            tell("accuracy: not measured: give --data")
    return report.print()


class Jobs:
    """Runs jobs on ranks, and keeps what they found in a file.

    Args:
        folder: for stores and results.
        path: of the file; None: nothing is kept.
        end: by time.monotonic, after which no job starts; or None.
    """

    def __init__(self, folder, path, end):
        self.folder, self.path, self.end = folder, path, end
        text = path.read_text() if path is not None and path.exists() else ""
        # A line without its end was being written when the run was killed.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        entries = [json.loads(line) for line in lines]
        self.finished = {json.dumps(entry["job"]): entry["found"] for entry in entries}

    def run(self, job, *, data=None, emulated=False):
        """Return what rank 0 found in a job, now or in an earlier run."""
        return self.keep(job, lambda: self._start({**job, "data": data}, emulated))

    def keep(self, job, measure):
        """Return what `measure` returns of a job, now or in an earlier run."""
        key = json.dumps(job)
        if key not in self.finished:
            if self.end is not None and time.monotonic() > self.end:
                sys.exit(f"stopped after --minutes; {len(self.finished)} measurements are kept")
            begin = time.monotonic()
            found = json.loads(json.dumps(measure()))
            tell(f"  {key}: {time.monotonic() - begin:.0f} s")
            self.finished[key] = found
            if self.path is not None:
                kept = [{"job": json.loads(k), "found": v} for k, v in self.finished.items()]
                self.path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        return self.finished[key]

    def _start(self, job, emulated):
        ranks = job["hosts"] * job["per_host"]
        own = Path(tempfile.mkdtemp(dir=self.folder))
        network = {"GLOO_SOCKET_IFNAME": "eth0" if emulated else "lo"}
        environ = {**os.environ, **KEEP, "OMP_NUM_THREADS": "1", **network}
        started = []
        for rank in range(ranks):
            place = emulated_hosts.inside(rank // job["per_host"]) if emulated else []
            text = json.dumps({**job, "rank": rank, "ranks": ranks, "folder": str(own)})
            command = [*place, sys.executable, __file__, "--rank", text]
            started.append(subprocess.Popen(command, env=environ))
        await_ranks(started, DEADLINE_S)
        return json.loads((own / "found.json").read_text())


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


def selection(report, jobs):
    """Seconds of accumulation and selection of 11 M elements: native, and torch operators."""
    seconds = jobs.keep({"what": "selection"}, selection_seconds)
    report.row(what="selection", **seconds)
    ratio = seconds["torch_s"] / seconds["native_s"]
    report.bar("selection: torch operators / native", ratio, 2.0, at_least=True)


def selection_seconds():
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
    return {"native_s": native, "torch_s": plain, "accumulation_alone_s": accumulate_s}


# --- wire ----------------------------------------------------------------------------------------


def wire(report, jobs, quick):
    places = {(2, 1): FORMS, (4, 1): ("dense", "dgc", "dgc 16"), (2, 2): ("dense", "dgc")}
    found, small = {}, {}
    with emulated_hosts.network(4, RATE_BITS_PER_S):
        for (hosts, per_host), forms in places.items():
            rounds = 3 if quick or hosts * per_host > 2 else 9
            job = {"what": "wire", "hosts": hosts, "per_host": per_host, "forms": forms}
            job |= {"batch": BATCH, "rounds": rounds}
            job |= {"stages": not quick and (hosts, per_host) == (2, 1)}
            found[hosts, per_host] = jobs.run(job, emulated=True)
        for batch in () if quick else SMALLER_BATCHES:
            job = {"what": "wire", "hosts": 2, "per_host": 1, "forms": FORMS}
            job |= {"batch": batch, "rounds": 9, "stages": False}
            small[batch] = jobs.run(job, emulated=True)
    shared = jobs.run({"what": "decide", "hosts": 1, "per_host": 2})
    for (hosts, per_host), by_form in found.items():
        place = f"{hosts} hosts" if per_host == 1 else f"{hosts} x {per_host} ranks"
        for form, measured in by_form["forms"].items():
            report.row(where=place, batch=BATCH, form=form, **measured)
        # Ranks of a host share its interface: two levels of dense all-reduce send as two hosts do.
        dense_bytes = found[hosts, 1]["forms"]["dense"]["bytes"]
        for form in by_form["forms"]:
            if form.startswith("dgc"):
                ratio = dense_bytes / by_form["forms"][form]["bytes"]
                name = f"{form}, {place}: bytes sent, dense / compressed"
                report.bar(name, ratio, 270, at_least=True)
    two = found[2, 1]
    speedup_bar(report, "2 hosts", two["forms"])
    for batch, by_form in small.items():
        for form, measured in by_form["forms"].items():
            report.row(where="2 hosts", batch=batch, form=form, **measured)
        if batch == 1:
            speedup_bar(report, "2 hosts, batch 1", by_form["forms"])
        else:
            ratio, bound = speedup(by_form["forms"])
            report.row(where="2 hosts", batch=batch, form="dgc", faster=ratio, bound=bound)
    steps = two["forms"]
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


def speedup(forms):
    """Return how many times faster steps are with DGC than dense, and without communication."""
    both = zip(forms["dense"]["seconds"], forms["dgc"]["seconds"], strict=True)
    bound = forms["dense"]["step_s"] / forms["none"]["step_s"]
    return statistics.median(dense / dgc for dense, dgc in both), bound


def speedup_bar(report, place, forms):
    ratio, bound = speedup(forms)
    reason = f"without any communication {bound:.2f}"
    name = f"dgc, {place}: step, dense / compressed"
    report.bar(name, ratio, 3.0, at_least=True, reason=reason)


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
    decision = decide_rank(job) if job["per_host"] == 1 and job["batch"] == BATCH else {}
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
            before, begin = emulated_hosts.sent_bytes(), time.perf_counter()
            run(STEPS)
            took = (time.perf_counter() - begin) / STEPS
            dist.barrier()  # behind it, all that was sent has left
            sent = (emulated_hosts.sent_bytes() - before) / STEPS
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

    make, given, loss_of = step_time.workload("cnn", job["rank"], job["batch"])
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


def accuracy(report, jobs, data, quick):
    epochs, seeds = (1, 1) if quick else (EPOCHS, SEEDS)
    curves = {}
    for seed in range(seeds):
        for form in TRAINED_FORMS:
            job = {"what": "train", "hosts": 1, "per_host": TRAIN_RANKS, "form": form}
            job |= {"epochs": epochs, "seed": seed}
            curves.setdefault(form, []).append(jobs.run(job, data=str(data)))
    means = {}
    for form, own in curves.items():
        last = [curve[-1] for curve in own]
        means[form] = statistics.mean(last)
        by_epoch = [statistics.mean(scores) for scores in zip(*own, strict=True)]
        report.row(
            what="Fashion-MNIST",
            form=form,
            epochs=epochs,
            accuracy=means[form],
            seeds=last,
            by_epoch=by_epoch,
        )
    if quick:  # one epoch is the warm-up
        return
    lost = means["dense"] - means["dgc"]
    report.bar("dgc: accuracy lost, points", 100 * lost, 0.5)


def train_rank(job):
    import torch

    images = {name: read_idx(Path(job["data"]), name) for name in ("train", "t10k")}
    given, labels = images["train"]
    return train(
        job, job["form"], torch.from_numpy(given), torch.from_numpy(labels), images["t10k"]
    )


def train(job, form, images, labels, test):
    """Return the accuracy on the test set after each epoch."""
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
    scores = []
    for epoch in range(epochs):
        order = torch.randperm(len(images), generator=random)[rank::ranks]
        for step in range(steps):
            batch = order[step * TRAIN_BATCH : (step + 1) * TRAIN_BATCH]
            optimizer.zero_grad()
            loss_of(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            scheduler.step()
        scores.append(score(model.module, test) if rank == 0 else 0.0)
        if rank == 0:
            tell(f"  {form}, seed {job['seed']}, epoch {epoch}: {scores[-1]:.4f}")
    return scores


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
