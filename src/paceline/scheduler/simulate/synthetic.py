"""Queues that are drawn, not recorded: trainings on nodes of six devices, as MARBLE's were.

MARBLE's trace is not published. This one has what its abstract states: trainings within one node of
Summit (six V100), whose rate grows less than their devices. All numbers are assumptions::

    class       share  1 device,   rate on 6, relative to 1   devices that users ask for
                       samples/s   (serial, exchange)         1: 10 %, 2: 10 %, 3: 20 %, 6: 60 %
    resnet50     30 %     360       4.3  (0.02, 0.02)
    inception3   20 %     240       3.8  (0.02, 0.03)         work: log-normal, median 1 h on one
    vgg16        20 %     220       2.5  (0.03, 0.08)         device, sigma 0.8
    lstm         20 %     900       2.1  (0.05, 0.10)         arrivals: Poisson
    alexnet      10 %   2,400       1.8  (0.08, 0.12)

serial and exchange are those of `rates.curve.Prior`. Trainings may run on one to six devices, and
two on one device where the resources below suffice. A resized one loses half a minute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from paceline.scheduler.cluster import Cluster, Level, Node
from paceline.scheduler.formats.workload import Queue
from paceline.scheduler.job import Job
from paceline.scheduler.rates.curve import Prior
from paceline.scheduler.rates.model import Profile, RateModel
from paceline.scheduler.rates.sharing import ResourceVectors
from paceline.scheduler.rates.topology import Exchange

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEVICES = 6  # of a node
MEMORY_BYTES = 16 << 30  # of a V100 of Summit
_ASKED, _ASKED_SHARES = (1, 2, 3, 6), (0.1, 0.1, 0.2, 0.6)
_MEDIAN_WORK_S, _SIGMA = 3600.0, 0.8


class TrainingClass(NamedTuple):
    """A class of trainings.

    Attributes:
        share: of the jobs.
        samples_per_s: on one device.
        curve: how the rate grows with devices of one node.
        used: fractions of a device's compute, of its memory bandwidth, and of its share of the
            host, that one training uses alone.
        memory_bytes: on each device.
        message_bytes: of gradients in each step.
        step_s: of one step on one device.
    """

    share: float
    samples_per_s: float
    curve: Prior
    used: tuple[float, float, float]
    memory_bytes: int
    message_bytes: float
    step_s: float


CLASSES: Mapping[str, TrainingClass] = {
    "resnet50": TrainingClass(
        0.3, 360, Prior(0.02, 0.02), (0.75, 0.55, 0.35), 7 << 30, 102e6, 0.18
    ),
    "inception3": TrainingClass(
        0.2, 240, Prior(0.02, 0.03), (0.70, 0.50, 0.30), 8 << 30, 95e6, 0.27
    ),
    "vgg16": TrainingClass(0.2, 220, Prior(0.03, 0.08), (0.85, 0.60, 0.15), 9 << 30, 553e6, 0.29),
    "lstm": TrainingClass(0.2, 900, Prior(0.05, 0.10), (0.35, 0.40, 0.30), 4 << 30, 264e6, 0.07),
    "alexnet": TrainingClass(
        0.1, 2400, Prior(0.08, 0.12), (0.40, 0.30, 0.65), 3 << 30, 244e6, 0.05
    ),
}

# Share of one device's link, by how far it goes: inside a node, and between nodes.
FAST_LEVELS = (  # NVLink 2 inside, two rails of EDR InfiniBand for six devices
    Level(name="nvlink", latency_s=5e-6, bandwidth_bytes_per_s=50e9),
    Level(name="infiniband", latency_s=5e-6, bandwidth_bytes_per_s=23e9),
)
SLOW_LEVELS = (  # PCIe 3 shared by pairs inside, one 10 Gbit/s Ethernet for six devices
    Level(name="pcie", latency_s=1e-5, bandwidth_bytes_per_s=8e9),
    Level(name="ethernet", latency_s=5e-5, bandwidth_bytes_per_s=0.2e9),
)


def summit_cluster(nodes: int = 8, levels: Sequence[Level] = FAST_LEVELS) -> Cluster:
    """Return nodes of six devices below one switch."""
    return Cluster(
        nodes=tuple(
            Node(
                name=f"n{index}",
                device_type="v100",
                devices=DEVICES,
                memory_bytes=MEMORY_BYTES,
                switches=("leaf0",),
            )
            for index in range(nodes)
        ),
        levels=tuple(levels),
    )


def summit_trace(
    seed: int,
    *,
    jobs: int = 200,
    arrival_s: float = 120.0,
    levels: Sequence[Level] = FAST_LEVELS,
) -> Queue:
    """Return a drawn queue of trainings and their rates.

    Args:
        seed: equal seeds give equal queues.
        jobs: how many.
        arrival_s: mean seconds between two submissions.
        levels: links of the cluster.
    """
    rng = np.random.default_rng(seed)
    names = list(CLASSES)
    shares = [CLASSES[name].share for name in names]
    submitted_s = np.cumsum(rng.exponential(arrival_s, jobs))
    drawn = []
    for index in range(jobs):
        profile = names[int(rng.choice(len(names), p=shares))]
        work_s = _MEDIAN_WORK_S * float(np.exp(_SIGMA * rng.standard_normal()))
        drawn.append(
            Job(
                name=f"{index}",
                submitted_s=float(submitted_s[index]),
                devices=int(rng.choice(_ASKED, p=_ASKED_SHARES)),
                min_devices=1,
                max_devices=DEVICES,
                profile=profile,
                work=work_s * CLASSES[profile].samples_per_s,
                memory_bytes=CLASSES[profile].memory_bytes,
                restart_s=30.0,
            )
        )
    return Queue(jobs=tuple(drawn), rates=summit_rates(levels))


def summit_rates(levels: Sequence[Level] = FAST_LEVELS) -> RateModel:
    """Return the rates of the classes."""
    profiles = {
        name: Profile(
            alone={
                "v100": {
                    devices: kind.samples_per_s * kind.curve.speedup(devices)
                    for devices in range(1, DEVICES + 1)
                }
            },
            exchange={"v100": Exchange(kind.message_bytes, kind.step_s)},
        )
        for name, kind in CLASSES.items()
    }
    used = {name: kind.used for name, kind in CLASSES.items()}
    sharing = ResourceVectors(used, {"v100": MEMORY_BYTES})
    return RateModel(profiles, sharing, levels)
