"""Published results of large runs, beside what the code that runs here says of the same machines.

Nothing runs at scale. Each figure is predicted by the code that also plans and runs jobs: models
are captured as by `paceline plan` (headline_models.py), priced by `perf.estimate` on a machine of
the library (`perf.described`); gradients are reduced by the schedules that the runtime executes,
stages follow its pipeline schedule, samples come from the store's placement and the loader's order.

What one device reaches is an input: a published throughput of one device, another one than the
result that is predicted, or of the same kind of device. Nothing is fitted to a result. What a
source does not say is named in the row (`missing`), with what was taken instead.

    python bench/headlines.py --json [--quick] [--validation DIR]

`--validation`: a folder with headline_rows.csv; its rows of the same results are shown beside.
"""

import argparse
import csv
import itertools
import math
import sys
import tempfile
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import store_scaling
from harness import Report, tell

from paceline.core.machine import PeakRate
from paceline.core.machine_file import library_machine
from paceline.core.plan import Mesh, Plan
from paceline.perf import divide, estimate
from paceline.perf.described import (
    anchored,
    described,
    peak_share,
    replica_topology,
    with_peak_share,
)
from paceline.schedules import binomial, candidates, groups_of, schedule_s
from paceline.store.feed.node.reader import ReadSettings
from paceline.store.feed.order import SampleOrder
from paceline.training.capture_process import BatchDivision, capture_splits

MODELS = Path(__file__).with_name("headline_models.py")
WITHIN = 0.30
EPOCHS, IMAGES = 90, 1_281_167
QUICK = "--quick" in sys.argv
MOST_TRANSFERS = {True: 100_000, False: 1_000_000}

# Throughputs of one device, which are inputs. `read`: the source was read; `recalled`: it was not.
KEUPER = "Keuper and Pfreundt, arXiv:1609.06870, Table I (read)"
TF_2017 = "tensorflow.org, performance benchmarks, May 2017 (read)"
JOHNSON = "github.com/jcjohnson/cnn-benchmarks (read)"
NNABLA = "github.com/sony/nnabla-examples, imagenet-classification (read)"
HAIKU = "github.com/google-deepmind/dm-haiku, examples/imagenet (read)"
JAIN = "Jain et al., SC19 workshop on deep learning on supercomputers, abstract (read)"


# --- what is common ------------------------------------------------------------------------------


# Samples of a rank, or of a microbatch, that are captured together, as torch loads slowly.
BATCHES = {
    "resnet50": (16, 32, 64),
    "resnet50_half": (16, 32, 192),
    "googlenet": (4, 8, 16, 20, 32, 40, 80),
    "cifar10": (2, 8, 32, 128, 512),
    "resnet1001": (1, 4),
    "resnet110": (1, 4),
}


@cache
def workloads(function, in_stages=False):
    """Return the captured Workload of each batch of one rank, or microbatch of a pipeline."""
    batches = BATCHES[function]
    whole = math.lcm(*batches)
    splits = [BatchDivision(whole // batch, 1 if in_stages else 0) for batch in batches]
    found = capture_splits(f"{MODELS}:{function}", splits, batch=whole)
    return dict(zip(batches, found.splits, strict=True))


def plan_of(machine, nodes, **changes):
    """Return a plan with a rank on each device, or on each CPU node, of so many nodes."""
    device = machine.devices[0]
    per_node = 1 if device.kind == "cpu" else device.count
    settings = {
        "mesh": Mesh(data=nodes * per_node),
        "nodes": nodes,
        "threads": device.cores if device.kind == "cpu" else 1,
        "engine": "allreduce",
        "collectives": "paceline",
    }
    return Plan(**(settings | changes))


def priced(machine, plan):
    """Return the machine with rates and collective costs; --quick compares fewer schedules."""
    return described(machine, plan, most_transfers=MOST_TRANSFERS[QUICK])


def predicted(machine, workload, plan):
    return estimate(priced(machine, plan), workload, plan)


class Claims:
    """Rows and bars of the published results."""

    def __init__(self, report):
        self.report = report
        self.unexplained = []

    def add(self, name, *, published, unit, source, value, right, rests_on, missing, **more):
        """Add a row.

        Args:
            name: of the result.
            published: its value.
            unit: of both values.
            source: of the published one.
            value: what is predicted.
            right: whether sign and order are as published; None: said by a bar of its own.
            rests_on: inputs, with their sources.
            missing: inputs that no source says, with what was taken instead.
            more: further columns.
        """
        error = value / published - 1
        self.report.row(
            result=name, published=published, predicted=value, unit=unit, error=error,
            source=source, rests_on=list(rests_on),
            missing=list(missing), kind="simulated", **more,
        )  # fmt: skip
        if right is not None:
            self.report.bar(f"{name}: sign and order", float(right), 1, at_least=True)
        if abs(error) > WITHIN and not missing:
            self.unexplained.append(name)
        return error


# --- ResNet-50 on ImageNet -----------------------------------------------------------------------


def minutes_to_train(machine, nodes, phases, **changes):
    """Return minutes of 90 epochs, and the estimate of the longest phase's step.

    Args:
        machine: with the rates of its device.
        nodes: of the job.
        phases: (epochs, workload of a rank).
    """
    total_s, last = 0.0, None
    plan = plan_of(machine, nodes, **changes)
    ready = priced(machine, plan)
    for epochs, workload in phases:
        last = estimate(ready, workload, plan)
        steps = epochs * IMAGES / (workload.batch * plan.mesh.data)
        total_s += steps * last.step_time_s
    return total_s / 60, last


def like(machine, peak_flops_per_s, bandwidth_bytes_per_s):
    """Return the machine with a device of the same family, of other size."""
    device = machine.devices[0]
    peak = replace(device.peaks[0].flops_per_s, value=peak_flops_per_s)
    memory = replace(device.bandwidth_bytes_per_s, value=bandwidth_bytes_per_s)
    other = replace(
        device,
        peaks=(PeakRate(dtype="float32", flops_per_s=peak),),
        bandwidth_bytes_per_s=memory,
    )
    return replace(machine, devices=(other, *machine.devices[1:]))


def resnet_on_knl():
    machine = library_machine("stampede2-knl")
    anchor = workloads("googlenet")[32]
    machine = anchored(machine, anchor, 32 / 0.32)
    found = minutes_to_train(machine, 2048, [(EPOCHS, workloads("resnet50")[16])])
    return machine, *found, {
        "published": 20, "source": "You et al., ICPP 2018, arXiv:1709.05011",
        "rests_on": [f"GoogLeNet on one Xeon Phi, 32 images in 0.32 s: {KEUPER}",
                     "batch of 32,768: You et al."],
        "missing": ["the throughput of ResNet-50 on one KNL 7250 with 16 images: that of GoogLeNet "
                    "on a Xeon Phi of unnamed size, of 2016, was taken"],
    }  # fmt: skip


def resnet_on_p40():
    machine = library_machine("p40-cluster")
    pascal = like(machine, 8.873e12, 320e9)
    pascal = anchored(pascal, workloads("resnet50")[16], 16 / 0.1539)
    machine = with_peak_share(machine, peak_share(pascal))
    half = workloads("resnet50_half")[32]
    full = workloads("resnet50")[32]
    # Products run in single precision on this device; gradients are exchanged in half.
    workload = replace(full, layers=tuple(
        replace(layer, parameter_bytes=other.parameter_bytes)
        for layer, other in zip(full.layers, half.layers, strict=True)
    ))  # fmt: skip
    found = minutes_to_train(machine, 256, [(EPOCHS, workload)])
    return machine, *found, {
        "published": 6.6, "source": "Jia et al., arXiv:1807.11205",
        "rests_on": [f"ResNet-50 on a GTX 1080 (Pascal, as the P40), 16 images in 153.9 ms, its "
                     f"share of the peak: {JOHNSON}", "batch of 65,536: Jia et al."],
        "missing": ["the throughput of ResNet-50 on one P40 with 32 images, stored in half "
                    "precision: that of a GTX 1080 in single precision was taken"],
    }  # fmt: skip


def resnet_on_v100():
    library = library_machine("abci")
    half = workloads("resnet50_half")
    phases = [(30, half[16]), (60, half[32])]
    machine = anchored(library, half[32], 2565 / 4)
    later = anchored(library, half[192], EPOCHS * IMAGES / (7.29 * 3600) / 4)
    at_1088 = predicted(machine, half[32], plan_of(machine, 272))
    alone = predicted(machine, half[32], plan_of(machine, 1, mesh=Mesh()))
    return machine, *minutes_to_train(machine, 544, phases), {
        "published": 224 / 60, "source": "Mikami et al., arXiv:1811.05233 v1",
        "rests_on": ["2,565 images/s on 4 V100: Mikami et al., table of throughput (recalled)",
                     "batch of 34,816, then 69,632: Mikami et al."],
        "missing": ["what the 224 s hold beside steps: at the 91.62 % that the authors report for "
                    "1,088 devices, half as many need 180 s for 90 epochs",
                    "the throughput of one device with 16 images: it was taken as with 32",
                    "the epoch at which the batch grows: 30 was taken"],
        "efficiency_at_1088": alone.step_time_s / at_1088.step_time_s,
        "published_efficiency_at_1088": 0.9162,
        "minutes_at_the_throughput_of_2020": minutes_to_train(later, 544, phases)[0],
        "source_of_2020": f"90 epochs in 7.29 h on 4 V100, 192 images a device: {NNABLA}",
    }  # fmt: skip


def resnet_on_tpu():
    machine = library_machine("tpu-v3-pod")
    half = workloads("resnet50_half")
    machine = anchored(machine, half[32], EPOCHS * IMAGES / (130 * 60) / 32)
    found = minutes_to_train(machine, 256, [(EPOCHS, half[16])])
    return machine, *found, {
        "published": 2.2, "source": "Ying et al., arXiv:1811.06992",
        "rests_on": [f"ResNet-50 on 32 cores, 32 images each, in 130 min, with evaluation: {HAIKU}",
                     "batch of 32,768: Ying et al."],
        "missing": ["the throughput of one core with 16 images: that with 32 was taken, as of 90 "
                    "epochs in bfloat16, which its source does not say"],
    }  # fmt: skip


RESNETS = {
    "2,048 KNL": resnet_on_knl,
    "2,048 P40": resnet_on_p40,
    "2,176 V100": resnet_on_v100,
    "1,024 TPU v3": resnet_on_tpu,
}


def resnet(claims):
    times = {}
    for name, run in RESNETS.items():
        begin = time.perf_counter()
        machine, minutes, found, said = run()
        times[name] = minutes, said["published"]
        error = claims.add(
            f"ResNet-50, 90 epochs, {name}", unit="min", value=minutes, right=None, **said,
            share_of_peak=peak_share(machine), step_s=found.step_time_s,
            exposed_communication=found.breakdown.transfer / found.step_time_s,
            collective=found.sources["transfer"], warnings=list(found.warnings),
        )  # fmt: skip
        reason = "" if abs(error) <= WITHIN else "missing: " + "; ".join(said["missing"])
        title = f"ResNet-50, 90 epochs, {name}: time to train, error"
        claims.report.bar(title, abs(error), WITHIN, reason=reason)
        tell(f"  {name}: {time.perf_counter() - begin:.1f} s")
    swapped = [
        f"{one} and {other}"
        for (one, mine), (other, others) in itertools.combinations(times.items(), 2)
        if (mine[0] < others[0]) != (mine[1] < others[1])
    ]
    claims.report.bar(
        "ResNet-50, 90 epochs: pairs of the four results in another order than published",
        len(swapped), 0, reason=", ".join(swapped),
    )  # fmt: skip


# --- S-Caffe -------------------------------------------------------------------------------------


def s_caffe(claims):
    """GoogLeNet on 160 devices over 32, the batch of all devices unchanged; its reduce at 160."""
    machine = library_machine("k80-cluster")
    machine = anchored(machine, workloads("resnet50")[64], 51.9)
    images = {}
    batches = {batch: (batch // 32, batch // 160) for batch in (640, 1280, 2560)}
    captured = workloads("googlenet")
    alone = predicted(machine, captured[32], plan_of(machine, 1, mesh=Mesh()))
    for batch, each in batches.items():
        for nodes, size in zip((2, 10), each, strict=True):
            step = predicted(machine, captured[size], plan_of(machine, nodes))
            images[batch, nodes] = batch / step.step_time_s
    ratios = {batch: images[batch, 10] / images[batch, 2] for batch in batches}
    claims.report.row(
        what="check of the input: GoogLeNet on one GK210, 32 images, images/s",
        predicted=32 / alone.step_time_s, published=32 / 0.36, source=KEUPER, kind="simulated",
    )  # fmt: skip
    claims.add(
        "S-Caffe, GoogLeNet, 160 GPUs over 32", published=2.5, unit="x",
        source="Awan et al., PPoPP 2017, abstract (read)", value=ratios[1280],
        right=all(1 < ratio < 5 for ratio in ratios.values()),
        rests_on=[f"ResNet-50 on one GK210, 64 images, 51.9 images/s: {TF_2017}"],
        missing=["the batch: 1,280 images over all GPUs were taken; `by_batch` has others",
                 "the time that its readers take"],
        by_batch={str(batch): ratio for batch, ratio in ratios.items()},
    )  # fmt: skip
    reduce_at_160(claims, machine)


def reduce_at_160(claims, machine):
    """The runtime's schedules against a binomial tree, for two readings of the node's PCIe."""
    plan = plan_of(machine, 10)
    hosts = groups_of(160, 16)
    sizes = [float(1 << power) for power in range(12, 29, 2)]
    flat, found = binomial("reduce", 160), candidates("reduce", hosts)
    ratios = {}
    for sharing in ("node", "device"):
        topology = replica_topology(priced(machine, plan), plan)
        topology = replace(topology, inside=replace(topology.inside, sharing=sharing))
        seconds = np.array([schedule_s(schedule, topology, sizes) for schedule in found])
        ratios[sharing] = schedule_s(flat, topology, sizes) / seconds.min(axis=0)
    ratio = ratios[machine.links[0].sharing]
    claims.add(
        "S-Caffe, reduce at 160 GPUs over MVAPICH2's", published=2.6, unit="x",
        source="Awan et al., PPoPP 2017, abstract (read)", value=float(ratio.max()),
        right=all(x[-1] > 1 and x[-1] >= x[0] for x in ratios.values()),
        rests_on=["the schedules that the runtime executes, over the links of the machine file"],
        missing=["which of the 16 GPUs of a node share a PCIe link: all, as in the machine file; "
                 "`if_devices_have_links` has the other extreme",
                 "the algorithm of MVAPICH2's reduce: a binomial tree was taken",
                 "what OpenMPI copies over the host (133 x is published)"],
        by_size={str(int(size)): float(x) for size, x in zip(sizes, ratio, strict=True)},
        if_devices_have_links=float(ratios["device"].max()),
    )  # fmt: skip


# --- HyPar-Flow ----------------------------------------------------------------------------------

PER_CORE = 4  # images of a step for each core


def images_per_s(model, machine, nodes, partitions):
    """Return the predicted images/s with a rank on each core, by number of stages."""
    cores = machine.devices[0].cores
    found = {}
    for stages in partitions:
        mesh = Mesh(data=cores * nodes // stages, pipeline=stages)
        if mesh.world_size != cores * nodes:
            continue
        plan = plan_of(
            machine, nodes, mesh=mesh, threads=1, schedule="fill_drain",
            microbatches=PER_CORE * stages if stages > 1 else 0,
        )  # fmt: skip
        captured = workloads(model, in_stages=stages > 1)
        workload = captured[1 if stages > 1 else PER_CORE]
        ready = priced(machine, plan)
        if stages > 1:
            plan = divide(ready, workload, plan)
        step_s = estimate(ready, workload, plan).step_time_s
        found[stages] = PER_CORE * cores * nodes / step_s
        tell(f"  {machine.name}, {nodes} nodes, {stages} stages: {found[stages]:.4g} images/s")
    return found


def hypar_flow(claims):
    """ResNet-1001 in stages that are replicated, on many nodes over one."""
    model = "resnet110" if QUICK else "resnet1001"
    share = frontera_share()
    speedups = {}
    for name, key, nodes, published in (
        ("Stampede2", "stampede2-skx", 128, 110),
        ("Frontera", "frontera", 512, 481),
    ):
        machine = with_peak_share(library_machine(key), share)
        cores = machine.devices[0].cores
        partitions = (1, 2) if QUICK else (1, 2, 4, 8, 16, cores)
        rates = {n: images_per_s(model, machine, n, partitions) for n in (1, nodes)}
        hybrid = {
            n: max(stages for stages in rate if stages > 1 and rate[stages] == best)
            for n, rate in rates.items()
            for best in [max(x for stages, x in rate.items() if stages > 1)]
        }
        speedups[nodes] = rates[nodes][hybrid[nodes]] / rates[1][hybrid[1]]
        claims.add(
            f"HyPar-Flow, ResNet-1001, {nodes} nodes of {name} over one", published=published,
            unit="x", source="Awan et al., ISC 2020, arXiv:1911.05146, abstract (read)",
            value=speedups[nodes], right=1 < speedups[nodes] <= 1.05 * nodes
            and speedups[nodes] == max(speedups.values()),
            rests_on=[f"ResNet-50 on 2,048 nodes of Frontera, 250,000 images/s, its share of the "
                      f"peak: {JAIN}", "a rank on each core"],
            missing=[f"the batch: {PER_CORE} images a core were taken", "partitions: the fastest "
                     "of two or more were taken, on each number of nodes"],
            model=model, partitions={str(n): stages for n, stages in hybrid.items()},
            images_per_s={str(n): {str(s): x for s, x in rate.items()}
                          for n, rate in rates.items()},
            of_data_parallel=rates[nodes][hybrid[nodes]] / rates[nodes][1],
        )  # fmt: skip


@cache
def frontera_share():
    """Return the share of its peaks that a node of Frontera reaches, from a published run."""
    found = anchored(library_machine("frontera"), workloads("resnet50")[64], 250_000 / 2048)
    return peak_share(found)


# --- FanStore ------------------------------------------------------------------------------------


def fanstore(claims):
    """ResNet-50 on 512 nodes that read each other's files, over the same nodes without readers."""
    machine = with_peak_share(library_machine("stampede2-skx"), frontera_share())
    workload = workloads("resnet50")[64]
    with tempfile.TemporaryDirectory() as folder:
        server_s, client_s, _ = store_scaling.measure(Path(folder), quick=True)
    rates, steps = {}, {}
    bytes_per_s = store_scaling.NETWORKS["Omni-Path"]
    for nodes in (1, 2, 64, 512):
        steps[nodes] = predicted(machine, workload, plan_of(machine, nodes)).step_time_s
        if nodes == 1:
            rates[nodes] = 1 / store_scaling.LOCAL_S
            continue
        owners = store_scaling.first_owners(nodes)
        batches = max(12, min(400, (20_000 if QUICK else 40_000) // nodes))
        service = server_s, client_s
        whole, _ = store_scaling.simulate(owners, nodes, batches, service, bytes_per_s)
        rates[nodes] = whole / nodes
    # A node asks for the files of the next batches while it computes.
    images = {n: 64 / max(steps[n], 64 / rates[n]) for n in steps}
    efficiency = {n: images[n] / images[1] for n in images}
    claims.add(
        "FanStore, efficiency of ResNet-50 on 512 nodes", published=0.9, unit="of one node",
        source="Zhang et al., arXiv:1809.10799 (recalled): above 0.9", value=efficiency[512],
        right=0.9 < efficiency[512] <= 1.02 and rates[512] * steps[512] > 64,
        rests_on=["processor times of a server and a client for a file of 107 KB, measured here",
                  "placement and request order of the store", f"as HyPar-Flow's: {JAIN}"],
        missing=["the seconds of a file on a node of Stampede2: those of this host were taken"],
        files_per_s_of_a_node={str(n): rate for n, rate in rates.items()},
        files_per_s_needed=64 / steps[512], by_nodes={str(n): x for n, x in efficiency.items()},
    )  # fmt: skip


# --- LMDBIO --------------------------------------------------------------------------------------

RECORD_BYTES = 3073  # of CIFAR-10: 32 x 32 x 3 and a label
READ_AHEAD_BYTES = 128 << 10  # Linux's read_ahead_kb, for a mapped file


def extents(samples, gap_bytes):
    """Return how many reads the samples of a window take: neighbours are read together."""
    gaps = (np.diff(np.sort(samples)) - 1) * RECORD_BYTES
    return 1 + int((gaps > gap_bytes).sum())


def node_reader_s(tier, batch, nodes):
    """Return the seconds of a step in which the reader of one node reads its ranks' samples."""
    settings = ReadSettings()
    share = batch // nodes
    steps = max(1, min(settings.most_steps, settings.read_bytes // (share * RECORD_BYTES)))
    order = SampleOrder(sample_count=batch * steps, shuffle="none")  # as Caffe reads
    window = [order.samples(np.arange(step * batch, step * batch + share)) for step in range(steps)]
    reads = sum(extents(samples, settings.gap_bytes) for samples in window)
    at_once = 8  # past the page cache
    waits_s = math.ceil(reads / at_once) * tier.open_latency_s.value
    return (waits_s + steps * share * RECORD_BYTES / tier.bandwidth_bytes_per_s.value) / steps


def mapped_walk_s(tier, batch):
    """Return the seconds in which processes walk all records of a step in a mapped file.

    A cursor has no way to leave records out, so that each node touches all pages of the step; a
    process waits for one page fault at a time, which reads ahead by a fixed length. The processes
    of a node wait for the same pages.
    """
    reads = math.ceil(batch * RECORD_BYTES / READ_AHEAD_BYTES)
    wire_s = batch * RECORD_BYTES / tier.bandwidth_bytes_per_s.value
    return reads * tier.open_latency_s.value + wire_s


def lmdbio(claims):
    machine = library_machine("bebop")
    tier, cores = machine.tiers[-1], machine.devices[0].cores
    batch = 2 * 9216
    speedups, parts = {}, {}
    counts = (1, 16, 256) if QUICK else (1, 4, 16, 64, 256)
    each = {nodes: batch // (cores * nodes) for nodes in counts}
    captured = workloads("cifar10")
    for nodes in counts:
        plan = plan_of(machine, nodes, mesh=Mesh(data=cores * nodes), threads=1)
        busy_s = predicted(machine, captured[each[nodes]], plan).step_time_s
        walk_s, read_s = mapped_walk_s(tier, batch), node_reader_s(tier, batch, nodes)
        # Caffe prefetches batches in a thread, as the node's reader does in a process.
        speedups[nodes] = max(busy_s, walk_s) / max(busy_s, read_s)
        parts[nodes] = {"compute": busy_s, "mapped": walk_s, "reader": read_s}
    ordered = [speedups[nodes] for nodes in counts]
    claims.add(
        "LMDBIO, 9,216 cores over LMDB", published=65, unit="x",
        source="Pumma et al., ACM TOPC 6(2), 2019, abstract (read): up to 65", value=speedups[256],
        right=speedups[256] > 1 and ordered == sorted(ordered),
        rests_on=["order and reads of the node's reader; a mapped file that is read ahead by "
                  "128 KiB, one fault at a time", "latency and bandwidth of the file system in the "
                  "machine file (recalled, typical of such file systems)"],
        missing=["the batch: 2 records a core were taken", "the size of records: CIFAR-10's",
                 "the model: Caffe's for CIFAR-10 in place of its AlexNet, at the CPU's prior",
                 "the bandwidth of the file system for all nodes together, and its latency",
                 "what wake-ups of 36 processes a node cost when they fault on one page"],
        by_nodes={str(nodes): value for nodes, value in speedups.items()},
        seconds_at_256_nodes=parts[256],
    )  # fmt: skip


# --- all -----------------------------------------------------------------------------------------


def beside(report, folder):
    """Show the rows of headline_rows.csv that tell of the same systems."""
    path = Path(folder) / "headline_rows.csv" if folder else None
    if path is None or not path.exists():
        report.row(what="headline_rows.csv", skipped="no folder with it was given (--validation)")
        return
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    words = ("S-Caffe", "HyPar-Flow", "You et al.", "Jia et al.", "Mikami")
    for row in rows:
        if any(word in row["source"] for word in words):
            keys = ("source", "seen", "model", "devices", "quantity", "value", "unit")
            report.row(what="published, as listed", **{key: row[key] for key in keys})


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="within a minute, fewer plans")
    parser.add_argument("--validation", help="folder with headline_rows.csv")
    asked = parser.parse_args()
    report = Report("headlines", asked.json)
    claims = Claims(report)
    beside(report, asked.validation)
    sections = {
        "lmdbio": lambda: lmdbio(claims),
        "s_caffe": lambda: s_caffe(claims),
        "hypar_flow": lambda: hypar_flow(claims),
        "fanstore": lambda: fanstore(claims),
        "resnet": lambda: resnet(claims),
    }
    for name, run in sections.items():
        begin = time.perf_counter()
        tell(f"{name}:")
        run()
        tell(f"{name}: {time.perf_counter() - begin:.0f} s")
    missed = claims.unexplained
    report.bar(
        "results off by more than 30 % without a named missing input", len(missed), 0,
        reason=", ".join(missed),
    )  # fmt: skip
    sys.exit(report.print())


if __name__ == "__main__":
    main()
