"""The training loop, written: what `prepare` does not need, but most scripts repeat.

    trainer = Trainer(model, optimizer, nn.functional.cross_entropy)
    for epoch in trainer.fit(loader, epochs=10):
        print(epoch)

It calls `prepare`, and every option of `prepare` is one of the trainer's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from paceline.core.clock import SystemClock
from paceline.core.errors import UsageError
from paceline.training.preparation import prepare
from paceline.training.uneven import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn

    from paceline.core.clock import Clock
    from paceline.core.plan import Plan

_STATE_VERSION = 1
_SHOW_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """What an epoch came to.

    Attributes:
        number: from 1 on.
        loss: mean over the samples of all ranks.
        samples: of all ranks.
        skipped: steps that a gradient which was not finite prevented.
        seconds: that it took on this rank.
    """

    number: int
    loss: float
    samples: int
    skipped: int
    seconds: float

    def __str__(self) -> str:
        skipped = f", {self.skipped} steps skipped" if self.skipped else ""
        rate = self.samples / self.seconds if self.seconds > 0 else 0.0
        return f"epoch {self.number}: loss {self.loss:.4g}, {rate:,.0f} samples/s{skipped}"


class Trainer:
    """Trains a model on all ranks of the process group; every rank makes one.

    Args:
        model: on the device where it trains.
        optimizer: of the model's parameters.
        loss: takes the model's output and the targets; returns the mean over the samples. Where
            layers are divided among ranks, all ranks of a replica have the same batches.
        lr_scheduler: sets learning rates; stepped after each step that was not skipped.
        plan: of `paceline plan`.
        clock: for the seconds of an epoch.
        options: all others of `prepare`: `example_inputs`, `group`, and those of
            `TrainingOptions`, of which `schedule` is the order of a pipeline.

    Attributes:
        epoch: epochs that are over.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        *,
        lr_scheduler: Any = None,
        plan: Plan | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        if hasattr(options.get("schedule"), "step"):
            raise UsageError(
                "schedule is the order of a pipeline",
                where="Trainer(schedule=...)",
                why=f"a {type(options['schedule']).__name__} sets learning rates",
                fix="Give it as lr_scheduler",
            )
        self.prepared = prepare(model, optimizer, plan, loss_fn=loss, **options)
        self.epoch = 0
        self._loss, self._lr_scheduler = loss, lr_scheduler
        self._clock = clock or SystemClock()

    def fit(self, loader: Iterable[Any], *, epochs: int) -> Iterator[Epoch]:
        """Train until `epochs` epochs are over, and yield each; rank 0 says how far it is.

        Args:
            loader: yields pairs of inputs (a tensor, a tuple of positional arguments, or a dict of
                arguments by name) and targets; ranks may have other numbers of them. Its sampler's
                `set_epoch` is called, where it has one.
            epochs: in all, with those of a state that was loaded.

        Raises:
            UsageError: a batch is no pair, or a rank has no batch.
            PacelineError: the gradients are not finite; rank, step and layer are named.
        """
        while self.epoch < epochs:
            set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)
            result = self._train(loader, epochs)
            self.epoch += 1
            yield result

    def _train(self, loader: Iterable[Any], epochs: int) -> Epoch:
        model, optimizer = self.prepared
        steps = self.prepared.before_step
        begin_s = shown_s = self._clock.now_s()
        skipped, size = steps.skipped, _length(loader)
        # [sum of losses, samples] on the device of the loss: reading it would wait for the device.
        total: torch.Tensor | None = None
        model.train()
        for number, batch in enumerate(self.prepared.batches(loader), 1):
            given, wanted = _pair(batch)
            optimizer.zero_grad()
            if self.prepared.is_divided:
                loss = self.prepared.forward_backward(given, wanted)
            else:
                loss = self._loss(self.prepared.outputs(given), wanted)
                loss.backward()
                steps.show_loss(loss)
            optimizer.step()
            if self._lr_scheduler is not None and not steps.is_skipped:
                self._lr_scheduler.step()
            samples = self.prepared.own_samples(samples_of(given))
            own = torch.stack([loss.detach().double() * samples, loss.new_tensor(samples).double()])
            total = own if total is None else total + own
            now_s = self._clock.now_s()
            if self.prepared.ranks.rank == 0 and now_s - shown_s >= _SHOW_S:
                shown_s = now_s
                _show(self.epoch + 1, epochs, number, size, now_s - begin_s)
        if total is None:
            raise UsageError("the loader has no batch", where="Trainer.fit", fix="Check its length")
        if self.prepared.ranks.size > 1:
            dist.all_reduce(total, group=self.prepared.ranks.group)
        loss_sum, count = total.tolist()
        return Epoch(
            number=self.epoch + 1,
            loss=loss_sum / count,
            samples=int(count),
            skipped=steps.skipped - skipped,
            seconds=self._clock.now_s() - begin_s,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return all that is needed to go on; see `Prepared.state_dict`. All ranks call it."""
        state = {
            "version": _STATE_VERSION,
            "epoch": self.epoch,
            "training": self.prepared.state_dict(),
        }
        if self._lr_scheduler is not None:
            state["schedule"] = self._lr_scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken.

        Raises:
            UsageError: the state is of another version, or has no scheduler where one is used.
        """
        if state.get("version") != _STATE_VERSION or (
            self._lr_scheduler is not None and "schedule" not in state
        ):
            raise UsageError(
                f"the state has {sorted(state)}",
                where="Trainer.load_state_dict",
                why="it is of another version, or was saved without an lr_scheduler",
                fix="Make the trainer as when the state was saved",
            )
        self.epoch = int(state["epoch"])
        self.prepared.load_state_dict(state["training"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(state["schedule"])


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, list | tuple) or len(batch) != 2:
        raise UsageError(
            f"a batch is a {type(batch).__name__}, not a pair of inputs and targets",
            where="Trainer.fit",
            fix="Yield (inputs, targets), or write the loop yourself with `prepare`",
        )
    return batch[0], batch[1]


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


def _show(epoch: int, epochs: int, number: int, size: int | None, seconds: float) -> None:
    of, left = "", ""
    if size:
        of, left = f" of {size}", f", {seconds / number * (size - number):.0f} s left"
    sys.stderr.write(f"epoch {epoch} of {epochs}: step {number}{of}{left}\n")
