"""How fast a loader could deliver, stage by stage, and what a faster one would save.

A loader has stages. Those of its workers follow each other for a batch, while workers load
different batches at the same time; handing a batch over to the loop, and copying it to a device,
happen for one batch of a rank at a time::

    worker 0   | read | decode | collate |  ...
    worker 1        | read | decode | collate |  ...
    loop                                  | copy | step | copy | step | ...

A stage that takes `s` seconds of a batch, in `w` workers, cannot deliver more than `w / s` batches
per second: its ceiling. The lowest ceiling is the stage to make faster; the workers' own ceiling is
`w` over the sum of their stages. Ranks take equally many batches, so that the slowest rank counts
for all. What workers take from each other (cores, a disk) is in the recorded times: ceilings are of
the present number of workers.

The store's loader times read, verify, decode, transform and collate. Of torch's DataLoader it is
seen what the data set does for a batch, reading and decoding together; which part of it are calls
for files is known where these were recorded (`paceline run --record-io`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.breakdown import PHASES
from paceline.core.record import Record
from paceline.trace.format.events import (
    DATALOADER_COUNTERS,
    LOADER_SAMPLES,
    LOADER_STAGES,
    LOADER_WORKERS,
    MAIN,
    NEXT,
    Kind,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.trace.analysis.phases import RankPhases
    from paceline.trace.format.files import RankTrace

_INPUT, _WAITING = PHASES.index("input"), PHASES.index("waiting")
_LEAST_STEPS = 3  # from which on the first step, which starts workers, is left out
# Copies between devices that take a batch along, by the names of their events.
_TO_DEVICE = ("copy to", "copy cuda", "copy copy_")
FETCH = "read and decode"  # a stage of which the parts are not known
READ, DECODE, COLLATE, HAND_OVER, COPY = "read", "decode", "collate", "hand over", "copy"
IN_TURN = frozenset({HAND_OVER, COPY})  # for one batch of a rank at a time, while its loop waits


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderStage(Record):
    """One stage of a loader.

    Attributes:
        stage: read, verify, decode, transform, collate, hand over (to the loop), copy (to a
            device); ``read and decode`` where the two cannot be distinguished.
        seconds: that one worker, or the loop, spends in it for a batch, on the slowest rank.
        at_once: batches of a rank that can be in this stage at one time.
        batches_per_s: its ceiling, of all ranks together.
    """

    stage: str
    seconds: float
    at_once: int
    batches_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderCeiling(Record):
    """What limits a loader, and what that costs the run.

    Batches are those of ranks: in a step of four ranks there are four.

    Attributes:
        loader: its number in the script, from 1.
        source: ``store`` for our own loader, ``torch`` for its DataLoader.
        ranks: that use it.
        workers: of each rank; 0: batches are loaded by the loop itself.
        samples: of a batch, the mean; 0 if not known.
        batches_per_s: that the run took.
        wanted_per_s: batches that it would take from an infinitely fast loader.
        ceiling_per_s: batches that the loader could deliver.
        stages: in the order of a batch.
        slowest: name of the stage with the lowest ceiling.
        step_s: mean time of a step of all ranks, seconds.
        saving_s: by how much a step would be shorter with an infinitely fast loader, seconds.
        off_core: share of reading and decoding in which a worker of a DataLoader did not run: it
            waited for storage, for a lock, or for a core; None if that is not known.
        queued: the part of `off_core` in which it was runnable and had no core; None if the kernel,
            or a trace of before, does not say.
    """

    loader: int
    source: str
    ranks: int
    workers: int
    samples: float
    batches_per_s: float
    wanted_per_s: float
    ceiling_per_s: float
    stages: tuple[LoaderStage, ...]
    slowest: str
    step_s: float
    saving_s: float
    off_core: float | None = None
    queued: float | None = None

    @property
    def shorter(self) -> float:
        """By which share a step would be shorter with an infinitely fast loader."""
        return self.saving_s / self.step_s if self.step_s > 0 else 0.0


def loader_ceiling(
    ranks: Sequence[RankTrace], phases: Sequence[RankPhases], steps: int
) -> LoaderCeiling | None:
    """Return what limits the loader that delivers most batches; None if no loader was seen.

    Args:
        ranks: trace of each rank.
        phases: seconds by step and phase of each of them.
        steps: that all ranks completed.
    """
    first = 1 if steps >= _LEAST_STEPS else 0
    if steps <= first:
        return None
    counts = [_Counts(rank, first, steps) for rank in ranks]
    delivered = {number: [own.batches(number) for own in counts] for number in counts[0].loaders}
    delivered = {number: batches for number, batches in delivered.items() if all(batches)}
    if not delivered:
        return None
    number = max(delivered, key=lambda loader: sum(delivered[loader]))
    batches = delivered[number]
    workers = max(own.workers(number) for own in counts)
    spent_s = [own.stages_s(number) for own in counts]
    stages = [
        _stage(
            stage,
            [own.get(stage, 0.0) / count for own, count in zip(spent_s, batches, strict=True)],
            workers,
        )
        for stage in dict.fromkeys(stage for own in spent_s for stage in own)
    ]
    stages = [stage for stage in stages if stage.seconds > 0]
    if not stages:
        return None
    step_s, saving_s = infinite_loader_s(phases, first, steps)
    taken = sum(own.taken(number) for own in counts)
    taken_per_s = taken / ((steps - first) * step_s)
    return LoaderCeiling(
        loader=number,
        source="torch" if counts[0].is_torch(number) else "store",
        ranks=len(ranks),
        workers=workers,
        samples=sum(own.samples(number) for own in counts) / sum(batches),
        batches_per_s=taken_per_s,
        wanted_per_s=taken_per_s * step_s / max(step_s - saving_s, 1e-9),
        ceiling_per_s=_ceiling(stages, len(ranks)),
        stages=tuple(stages),
        slowest=min(stages, key=lambda stage: stage.batches_per_s).stage,
        step_s=step_s,
        saving_s=saving_s,
        off_core=_mean_share([own.off_core(number) for own in counts]),
        queued=_mean_share([own.queued(number) for own in counts]),
    )


def infinite_loader_s(phases: Sequence[RankPhases], first: int, stop: int) -> tuple[float, float]:
    """Return the mean time of steps, and by how much they are longer than without any input.

    Ranks that wait for each other in a step do what is left in the time of the one that has most
    left. A rank's waiting for others may be for their input, and is not counted as its own work.

    Args:
        phases: of each rank.
        first: of the steps.
        stop: after the last of them.
    """
    seconds = np.array([rank.seconds[first:stop] for rank in phases])
    step_s = np.array([rank.step_s[first:stop] for rank in phases])
    left_s = step_s - seconds[:, :, _INPUT] - seconds[:, :, _WAITING]
    longest_s = step_s.max(axis=0)
    saving_s = np.minimum(seconds[:, :, _INPUT].max(axis=0), longest_s - left_s.max(axis=0))
    return float(longest_s.mean()), float(np.maximum(0.0, saving_s).mean())


def _stage(name: str, seconds: list[float], workers: int) -> LoaderStage:
    """Return a stage of which each rank spends `seconds` on a batch."""
    at_once = 1 if name in IN_TURN else max(1, workers)
    slowest_s = max(seconds)
    ceiling = len(seconds) * at_once / slowest_s if slowest_s > 0 else 0.0
    return LoaderStage(stage=name, seconds=slowest_s, at_once=at_once, batches_per_s=ceiling)


def _mean_share(shares: Sequence[float | None]) -> float | None:
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None


def _ceiling(stages: Sequence[LoaderStage], ranks: int) -> float:
    """Return the batches per second of all stages together, of all ranks."""
    ceilings = []
    for alone in (True, False):
        own = [stage for stage in stages if (stage.stage in IN_TURN) is alone]
        total_s = sum(stage.seconds for stage in own)
        if total_s > 0:
            ceilings.append(ranks * own[0].at_once / total_s)
    return min(ceilings)


class _Counts:
    """The counters of one rank's loaders in some steps."""

    def __init__(self, rank: RankTrace, first: int, stop: int) -> None:
        self._names = {name: number for number, name in enumerate(rank.names)}
        events = rank.events[rank.events["location"] == MAIN]
        self._all = events[events["kind"] == Kind.COUNTER]
        # What the last steps left is recorded after them.
        self._counters = self._all[self._all["step"] >= first]
        inside = events[(events["step"] >= first) & (events["step"] < stop)]
        self._inputs = inside[inside["kind"] == Kind.INPUT]
        copies = inside[inside["kind"] == Kind.COPY]
        named = [self._names[name] for name in _TO_DEVICE if name in self._names]
        copies = copies[np.isin(copies["name"], named)]
        self._copied_s = float((copies["end_ns"] - copies["begin_ns"]).sum() / 1e9)

    @property
    def loaders(self) -> list[int]:
        """Numbers of the loaders that delivered batches."""
        found: set[int] = set()
        for name in (DATALOADER_COUNTERS["batches"], LOADER_SAMPLES):
            found |= set(self._of(name)["tag"].tolist())
        return sorted(found)

    def is_torch(self, loader: int) -> bool:
        return self._sum(DATALOADER_COUNTERS["batches"], loader) > 0

    def batches(self, loader: int) -> int:
        if self.is_torch(loader):
            return self._sum(DATALOADER_COUNTERS["batches"], loader)
        return int((self._of(LOADER_SAMPLES)["tag"] == loader).sum())

    def taken(self, loader: int) -> int:
        """Return the batches that the loop took: it asked once more at the end of each epoch."""
        own = self._inputs[self._inputs["tag"] == loader]
        asked = int((own["name"] == self._names.get(NEXT, -1)).sum())
        return max(0, asked - int((own["name"] != self._names.get(NEXT, -1)).sum()))

    def samples(self, loader: int) -> int:
        torch = self.is_torch(loader)
        return self._sum(DATALOADER_COUNTERS["samples"] if torch else LOADER_SAMPLES, loader)

    def workers(self, loader: int) -> int:
        named = self._all["name"] == self._names.get(LOADER_WORKERS, -1)
        own = self._all[named & (self._all["tag"] == loader)]
        return int(own["amount"].max(initial=0))

    def stages_s(self, loader: int) -> dict[str, float]:
        """Return the seconds of each stage, in the order of a batch."""
        if self.is_torch(loader):
            fetch_s = self._seconds("fetch", loader)
            if DATALOADER_COUNTERS["files"] in self._names:
                read_s = min(fetch_s, self._seconds("files", loader))
                found = {READ: read_s, DECODE: fetch_s - read_s}
            else:
                found = {FETCH: fetch_s}
            found[COLLATE] = self._seconds("collate", loader)
            found[HAND_OVER] = self._seconds("hand_over", loader)
        else:
            found = {stage: self._sum(name, loader) / 1e9 for stage, name in LOADER_STAGES.items()}
        copied_s = self._copied_s / max(1, self.taken(loader)) * self.batches(loader)
        return {**found, COPY: copied_s}

    def off_core(self, loader: int) -> float | None:
        """Return the share of what a data set does in which its worker was on no core."""
        fetch_s = self._seconds("fetch", loader) if self.is_torch(loader) else 0.0
        if not fetch_s:
            return None
        return min(1.0, max(0.0, 1 - self._seconds("core", loader) / fetch_s))

    def queued(self, loader: int) -> float | None:
        """Return the share of what a data set does in which its worker lacked a core."""
        off_core = self.off_core(loader)
        if off_core is None or DATALOADER_COUNTERS["queued"] not in self._names:
            return None
        return min(off_core, self._seconds("queued", loader) / self._seconds("fetch", loader))

    def _seconds(self, stage: str, loader: int) -> float:
        return self._sum(DATALOADER_COUNTERS[stage], loader) / 1e9

    def _of(self, name: str) -> np.ndarray:
        return np.asarray(self._counters[self._counters["name"] == self._names.get(name, -1)])

    def _sum(self, name: str, loader: int) -> int:
        own = self._of(name)
        return int(own["amount"][own["tag"] == loader].sum())
