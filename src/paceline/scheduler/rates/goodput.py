"""Goodput: the steps per second of a data-parallel training, and how much each of them counts.

    rate    = gain / seconds                 work: steps of the initial batch size, M0
    gain    = (v + q) / (v / s + q)          of a step with the batch size M = s M0
    seconds = T + a (T - Y)                  M = n b (a + 1) on n devices

T is the time of a pass over b samples on each device with the exchange of gradients, Y the part of
it that waits for the exchange: a passes accumulate gradients without it, one passes them on. q is
the squared norm of the gradient, v the variance of its estimate from M0 samples; both change from
epoch to epoch. Where noise dominates (v >> q) a step of s times the batch gains s; without noise it
gains 1, and a larger batch is wasted.

With a fixed batch size M is given and b, a follow; an adaptive training takes, for each placement
and epoch, the best of 50 batch sizes. The agent of Pollux takes the best by a throughput model that
it fits online, which comes within 0.4 to 3.4 % of the true best in the mean.

Rates change at the ends of epochs only. Pollux's simulator also rounds the time of each epoch to
whole seconds; here time is continuous. The two agree within 0.6 %, and within 3 % for the fastest
trainings, whose epochs take 4 s.
Source: A. Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning,
OSDI 2021, section 3; batch sizes and splits as in the simulator of its artifact.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.scheduler.rates.step_times import StepTimes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.scheduler.job import Job
    from paceline.scheduler.placement import Shape

_BATCHES = 50  # that an adaptive training tries, in geometric steps
_SLACK = 1e-8  # of divisions before they are rounded up
# Progress within this share of the whole before the end of an epoch has reached it: the simulator
# adds up rate x seconds, and must not wait for a rest that its clock cannot resolve.
_REACHED = 1e-9


class BatchSplit(NamedTuple):
    """How a batch is divided.

    Attributes:
        local: samples on each device in one pass.
        accumulated: passes before the last one, without an exchange of gradients.
    """

    local: int
    accumulated: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Between which batch sizes a training works.

    Attributes:
        initial, largest: samples of a batch; the unit of work is a step of the initial one.
        local_least, local_most: samples on each device in one pass.
    """

    initial: int
    largest: int
    local_least: int
    local_most: int

    def split(self, batch: float, devices: int) -> BatchSplit | None:
        """Return how a batch is divided, in as few passes as fit; None if it is too small.

        The batch may come out a little larger, so that each device has equally many samples.
        """
        per_device = batch / devices
        accumulated = math.ceil(per_device / self.local_most - _SLACK) - 1
        if devices == 1 and batch > self.initial + _SLACK:
            # One device alone estimates the noise from the difference of two passes.
            accumulated = max(accumulated, 1)
        local = math.ceil(per_device / (accumulated + 1) - _SLACK)
        local = min(local, self.largest // (devices * (accumulated + 1)))
        return BatchSplit(local, accumulated) if local >= self.local_least else None

    def most_devices(self, batch: int | None) -> int:
        """Return on how many devices a batch, or the largest one if it is None, can be divided."""
        return (batch or self.largest) // self.local_least


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GradientNoise:
    """Gradient statistics of a training, by batch size and epoch.

    Attributes:
        batch_sizes: that were measured, at least two, ascending, shape (sizes,).
        squared_norm: of the gradient, shape (sizes, epochs).
        variance: of its estimate from a batch of the initial size, shape (sizes, epochs).
    """

    batch_sizes: NDArray[np.float64]
    squared_norm: NDArray[np.float64]
    variance: NDArray[np.float64]

    def gain(self, batches: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the work of a step, shape (batches, epochs), in steps of the first batch size.

        Between measured batch sizes norm and variance are linear.

        Args:
            batches: batch sizes between the first and the last, shape (batches,).
        """
        sizes = self.batch_sizes
        above = np.clip(np.searchsorted(sizes, batches), 1, len(sizes) - 1)
        below = above - 1
        part = ((batches - sizes[below]) / (sizes[above] - sizes[below]))[:, None]
        q, v = (
            (1 - part) * known[below] + part * known[above]
            for known in (self.squared_norm, self.variance)
        )
        scale = (batches / sizes[0])[:, None]
        gain: NDArray[np.float64] = (v + q) / (v / scale + q)
        return gain


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Training:
    """A class of training jobs.

    Attributes:
        limits: of its batch sizes.
        noise: of its gradients; its first batch size is the initial one.
        epoch_ends: work done at the end of each epoch, ascending; the last is all of the work.
        step_times: seconds of its steps.
        batch: fixed batch size; None: the best one at each time.
    """

    limits: BatchLimits
    noise: GradientNoise
    epoch_ends: tuple[float, ...]
    step_times: StepTimes
    batch: int | None = None

    def epoch(self, work_done: float) -> int:
        """Return the epoch in progress, from 0; the number of epochs if all are done."""
        return bisect.bisect_right(self.epoch_ends, work_done + _REACHED * self.epoch_ends[-1])

    def splits(self, devices: int) -> list[BatchSplit]:
        """Return the divisions of batches among which the training chooses."""
        limits = self.limits
        batches: Sequence[float]
        if self.batch is not None:
            batches = [self.batch]
        else:
            first = max(limits.initial, limits.local_least * devices)
            if first > limits.largest:
                return []
            batches = np.geomspace(first, limits.largest, _BATCHES).tolist()
        splits = (limits.split(batch, devices) for batch in batches)
        return list(dict.fromkeys(split for split in splits if split is not None))

    def goodput(self, per_node: tuple[int, ...]) -> tuple[list[BatchSplit], NDArray[np.float64]]:
        """Return the divisions of batches, and their goodput in each epoch.

        Args:
            per_node: number of devices on each node, descending.

        Returns:
            The divisions, and steps of the initial batch size per second, shape (divisions,
            epochs); 0 for a division whose seconds are not known.
        """
        devices = sum(per_node)
        splits = self.splits(devices)
        if not splits:
            return [], np.zeros((0, len(self.epoch_ends)))
        local, accumulated = np.array(splits, float).T
        step_s, sync_s = self.step_times.interpolate(per_node, local)
        seconds = step_s + accumulated * (step_s - sync_s)
        gain = self.noise.gain(devices * local * (accumulated + 1))
        return splits, np.nan_to_num(gain / seconds[:, None], nan=0.0)


class GoodputRates:
    """Rates of training jobs: their goodput alone; devices are never shared.

    The rates are the true ones of each epoch, for all placements: who schedules by them knows what
    a real scheduler has to measure first.
    """

    def __init__(self, trainings: Mapping[str, Training]) -> None:
        """Take trainings by the profiles of their jobs."""
        self.trainings = trainings
        # Rates by epoch: a question costs two lookups and a search of the epoch.
        self._rates: dict[tuple[str, tuple[int, ...]], list[float]] = {}

    def alone(self, job: Job, shape: Shape, work_done: float = 0.0) -> float:
        """Return the goodput in the epoch in progress, 0 if it cannot run; see `Rates.alone`."""
        training = self.trainings.get(job.profile)
        if training is None:
            return 0.0
        key = (job.profile, shape.per_node)
        rates = self._rates.get(key)
        if rates is None:
            _, goodput = training.goodput(shape.per_node)
            rates = self._rates[key] = goodput.max(axis=0, initial=0.0).tolist()
        return rates[min(training.epoch(work_done), len(rates) - 1)]

    @property
    def most_sharing(self) -> int:
        """Return 1: nothing was measured of jobs that share."""
        return 1

    def kept(self, job: Job, neighbours: Sequence[Job], shape: Shape) -> float:
        """Return 0 beside anybody: nothing was measured."""
        return 0.0 if neighbours else 1.0

    def constant_until(self, job: Job, work_done: float) -> float:
        """Return the work done at the end of the epoch in progress."""
        training = self.trainings.get(job.profile)
        if training is None:
            return math.inf
        epoch = training.epoch(work_done)
        return training.epoch_ends[epoch] if epoch < len(training.epoch_ends) else math.inf
