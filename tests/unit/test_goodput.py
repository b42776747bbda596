"""Goodput of trainings: worked examples of Pollux's simulator, and time that ends with each epoch.

The numbers are the simulator's: rows of its tables around a batch size, and what its code makes of
them. tests/integration/test_pollux_setting.py compares the whole tables.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest

from paceline.scheduler.cluster import Cluster
from paceline.scheduler.job import Job
from paceline.scheduler.placement import Shape
from paceline.scheduler.policies.fifo import Fifo
from paceline.scheduler.rates.goodput import (
    BatchLimits,
    BatchSplit,
    GoodputRates,
    GradientNoise,
    Training,
)
from paceline.scheduler.rates.step_times import StepTime, StepTimes
from paceline.scheduler.simulate.engine import Simulation, World
from paceline.scheduler.simulate.metrics import alone_times_s

CIFAR10 = BatchLimits(initial=128, largest=4096, local_least=32, local_most=1024)
BERT = BatchLimits(initial=12, largest=384, local_least=4, local_most=12)
NCF = BatchLimits(initial=256, largest=32768, local_least=32, local_most=32768)
YOLOV3 = BatchLimits(initial=8, largest=512, local_least=4, local_most=8)
DEEPSPEECH2 = BatchLimits(initial=20, largest=640, local_least=10, local_most=80)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A fixed batch size on a placement; `noise` is (q, v) by batch size."""

    limits: BatchLimits
    batch: int
    per_node: tuple[int, ...]
    rows: tuple[tuple[float, float, float], ...]
    noise: dict[int, tuple[float, float]]
    split: tuple[int, int]
    rate: float


EXAMPLES = {
    "cifar10, two whole nodes": Example(
        limits=CIFAR10,
        batch=2048,
        per_node=(4, 4),
        rows=((182, 0.224549, 0.083034), (257, 0.260411, 0.059469)),
        noise={128: (1, 1), 2048: (0.023809, 3.3287)},
        split=(256, 0),
        rate=55.6286,
    ),
    "cifar10, first epoch": Example(
        limits=CIFAR10,
        batch=2048,
        per_node=(2,),
        rows=((1024, 0.837972, 0.0),),
        noise={128: (1, 1), 2048: (10.733, 5.486)},
        split=(1024, 0),
        rate=1.74748,
    ),
    "bert, 32 passes on one device": Example(
        limits=BERT,
        batch=384,
        per_node=(1,),
        rows=((12, 0.921516, 0.013696),),
        noise={12: (1, 1), 384: (4.3032e10, 4.5869e13)},
        split=(12, 31),
        rate=1.06993,
    ),
    "bert, between batch sizes": Example(
        limits=BERT,
        batch=300,
        per_node=(4, 2),
        rows=((8, 2.371287, 1.732043), (11, 2.391726, 1.596846)),
        noise={
            12: (1, 1),
            192: (1.5436505807720557e13, 6.297044699056960e15),
            384: (6.509198881259403e12, 6.086044601707605e15),
        },
        split=(10, 4),
        rate=4.48569,
    ),
    "yolov3, cut to the largest batch": Example(
        limits=YOLOV3,
        batch=512,
        per_node=(4, 4, 4, 4, 4),
        rows=((6, 1.346086, 0.815700),),
        noise={8: (1, 1), 480: (251.98, 20769)},
        split=(6, 3),
        rate=11.965,
    ),
    "ncf, two passes on one device": Example(
        limits=NCF,
        batch=32768,
        per_node=(1,),
        rows=((16384, 0.014969, 0.000339),),
        noise={256: (1, 1), 32768: (0.0, 1.0)},
        split=(16384, 1),
        rate=128 / 0.029599,
    ),
    "deepspeech2, a batch that is rounded up": Example(
        limits=DEEPSPEECH2,
        batch=320,
        per_node=(1,) * 6,
        rows=((54, 1.765781, 0.224026),),
        noise={20: (1, 1), 324: (6.690e-8, 2.698e-4)},
        split=(54, 0),
        rate=16.139 / 1.765781,
    ),
}


def training(example, **changes):
    sizes = sorted(example.noise)
    q, v = np.array([example.noise[size] for size in sizes]).T[:, :, None]
    rows = [StepTime(*row) for row in example.rows]
    made = Training(
        limits=example.limits,
        noise=GradientNoise(batch_sizes=np.array(sizes, float), squared_norm=q, variance=v),
        epoch_ends=(1000.0,),
        step_times=StepTimes({example.per_node: rows}, {}),
        batch=example.batch,
    )
    return replace(made, **changes)


@pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
def test_worked_examples_of_the_simulator(example):
    splits, goodput = training(example).goodput(example.per_node)
    assert splits == [example.split]
    assert goodput[0, 0] == pytest.approx(example.rate, rel=1e-4)


def test_a_step_gains_its_batch_where_noise_dominates_and_nothing_without_noise():
    noise = GradientNoise(
        batch_sizes=np.array([8.0, 64.0]),
        squared_norm=np.array([[1.0, 0.0, 2.0]] * 2),
        variance=np.array([[0.0, 1.0, 2.0]] * 2),
    )
    assert noise.gain(np.array([8.0, 32.0])) == pytest.approx(np.array([[1, 1, 1], [1, 4, 1.6]]))


def test_a_batch_too_small_for_the_devices_cannot_run():
    assert CIFAR10.split(128, 4) == BatchSplit(32, 0)
    assert CIFAR10.split(128, 5) is None
    fixed = training(EXAMPLES["cifar10, two whole nodes"], batch=128)
    rates = GoodputRates({"cifar10": fixed})
    assert rates.alone(Job(name="a", profile="cifar10"), Shape("gpu", (4, 4), 1)) == 0
    assert CIFAR10.most_devices(128) == 4
    assert CIFAR10.most_devices(None) == 128


def test_an_adaptive_training_takes_the_best_batch_size_of_each_epoch():
    # Epoch 0 has no noise, so that the initial batch is best; in epoch 1 noise is all there is.
    noise = GradientNoise(
        batch_sizes=np.array([128.0, 4096.0]),
        squared_norm=np.array([[1.0, 0.0]] * 2),
        variance=np.array([[0.0, 1.0]] * 2),
    )
    rows = [StepTime(32, 0.2, 0.1), StepTime(1024, 0.4, 0.1)]
    adaptive = Training(
        limits=CIFAR10,
        noise=noise,
        epoch_ends=(10.0, 30.0),
        step_times=StepTimes({(4,): rows}, {}),
    )
    rates = GoodputRates({"cifar10": adaptive})
    job, shape = Job(name="a", profile="cifar10"), Shape("gpu", (4,), 0)
    assert rates.alone(job, shape, 0.0) == pytest.approx(1 / 0.2)
    assert rates.alone(job, shape, 9.9) == pytest.approx(1 / 0.2)
    assert rates.alone(job, shape, 10.0) == pytest.approx(32 / 0.4)
    assert rates.alone(job, shape, 30.0) == pytest.approx(32 / 0.4)
    for other in (32, 100, 500, 1024):  # no fixed batch size is better in an epoch
        fixed = GoodputRates({"cifar10": replace(adaptive, batch=4 * other)})
        for done in (0.0, 20.0):
            assert fixed.alone(job, shape, done) <= rates.alone(job, shape, done) * (1 + 1e-9)
    # The rest of an epoch that a sum of seconds x rates leaves is none.
    at = (0.0, 9.99, 10.0 * (1 - 1e-12), 10.0, 29.0, 30.0 * (1 - 1e-12), 30.0)
    ends = (10.0, 10.0, 30.0, 30.0, 30.0, math.inf, math.inf)
    assert tuple(rates.constant_until(job, done) for done in at) == ends


def test_trainings_share_no_devices_and_what_was_not_measured_cannot_run():
    rates = GoodputRates({"bert": training(EXAMPLES["bert, between batch sizes"])})
    job, shape = Job(name="a", profile="bert", devices=6), Shape("gpu", (4, 2), 1)
    assert rates.alone(job, shape) == pytest.approx(4.48569, rel=1e-4)
    assert rates.kept(job, [], shape) == 1
    assert rates.kept(job, [job], shape) == 0
    assert rates.alone(job, Shape("gpu", (4,), 0)) == 0
    unknown = replace(job, profile="gpt")
    assert rates.alone(unknown, shape) == 0
    assert rates.constant_until(unknown, 0.0) == math.inf


def test_orders_of_a_shape_count_equally_and_more_nodes_are_interpolated():
    def row(step_s):
        return [StepTime(10, step_s, step_s / 2), StepTime(20, 2 * step_s, step_s)]

    times = StepTimes(
        {(1, 2, 4): row(1.0), (1, 4, 2): row(3.0), (4, 4, 4, 4): row(4.0), (1, 1, 1, 1): row(8.0)},
        {(8, 8): row(10.0), (8, 32): row(6.0)},
    )
    local = np.array([10.0, 15.0, 20.0])
    assert times.interpolate((4, 2, 1), local)[0] == pytest.approx([2, 3, 4])
    assert times.interpolate((4, 2, 1), local)[1] == pytest.approx([1, 1.5, 2])
    assert times.interpolate((4,) * 8, local)[0] == pytest.approx([6, 9, 12])
    # Half way between 4 and 8 nodes, at 4 and at 2.5 devices for each node.
    assert times.interpolate((4,) * 6, local)[0] == pytest.approx([5, 7.5, 10])
    assert times.interpolate((4, 4, 4, 1, 1, 1), local)[0] == pytest.approx([7, 10.5, 14])
    assert np.isnan(times.interpolate((4,) * 9, local)).all()
    assert np.isnan(times.interpolate((4, 2, 1), np.array([9.0, 21.0]))).all()


def epochs(count, work, rate):
    """A training on one device that does `work` in each epoch at `rate`, doubled in each next."""
    noise = GradientNoise(
        batch_sizes=np.array([1.0, 1024.0]),
        squared_norm=np.ones((2, count)),
        variance=np.zeros((2, count)),
    )
    return Training(
        limits=BatchLimits(initial=1, largest=1024, local_least=1, local_most=1),
        noise=noise,
        epoch_ends=tuple(work * (epoch + 1) for epoch in range(count)),
        step_times=StepTimes({(1,): [StepTime(1, 1 / rate, 0.0)]}, {}),
        batch=1,
    )


@pytest.mark.parametrize("submitted_s", [0.0, 1e7 + 0.3])
def test_a_simulated_training_ends_after_the_seconds_of_its_epochs(submitted_s):
    # Thirds cannot be added up exactly: an epoch must end although a rest is left of it.
    training = epochs(7, 1 / 3, 7 / 3)
    job = Job(
        name="a",
        submitted_s=submitted_s,
        profile="a",
        work=training.epoch_ends[-1],
        start_s=30.0,
    )
    rates, cluster = GoodputRates({"a": training}), Cluster.of_text("1x1")
    simulation = Simulation(World(jobs=[job], cluster=cluster, rates=rates), Fifo(), rates)
    for _ in range(8):  # the submission and seven epochs
        simulation.step()
    assert not simulation.jobs_left
    took_s = simulation.outcome.jobs["a"].ended_s - submitted_s
    assert took_s == pytest.approx(31.0, abs=1e-6)
    assert alone_times_s([job], cluster, rates) == pytest.approx(31.0)


def test_the_bound_of_a_training_alone_is_the_sum_of_its_best_epochs():
    # Epoch 0 is fastest on one device, epoch 1 on two.
    noise = GradientNoise(
        batch_sizes=np.array([8.0, 16.0]),
        squared_norm=np.array([[1.0, 0.0]] * 2),
        variance=np.array([[0.0, 1.0]] * 2),
    )
    times = StepTimes({(1,): [StepTime(8, 1.0, 0.0)], (2,): [StepTime(8, 1.25, 0.0)]}, {})
    adaptive = Training(
        limits=BatchLimits(initial=8, largest=16, local_least=8, local_most=8),
        noise=noise,
        epoch_ends=(10.0, 30.0),
        step_times=times,
    )
    rates, cluster = GoodputRates({"a": adaptive}), Cluster.of_text("1x2")
    job = Job(name="a", min_devices=1, max_devices=2, profile="a", work=30.0, start_s=5.0)
    assert alone_times_s([job], cluster, rates) == pytest.approx(5 + 10 / 1.0 + 20 / (2 / 1.25))
