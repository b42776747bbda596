"""Rebalances the ranks of an unchanged script: `paceline run --rebalance`.

Imports torch: a rank's worker imports this module with importlib, after it has set its threads and
cores. What meets the script::

    BatchSampler.__iter__       batches of the ranks' shares        (batches)
    BatchSamplerShard.__iter__  the same, of accelerate             (batches)
    Loader.__iter__             the same, of the store's loader     (batches)
    DataLoader's __next__       counts batches, exchanges windows   (exchange, controller)
    torch.autograd.backward     weighs gradients                    (gradients)
    Optimizer.step              times of the steps                  (stopwatch)

The loader whose batch came last before a backward pass is the one that trains; others, as for
evaluation, keep their batches. Everything that ranks must agree on happens at a batch of that
loader, of which each gets equally many.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import BatchSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from paceline.core.errors import DeadlineExceeded
from paceline.core.on_import import on_import
from paceline.runs.balance import SlowNode, SlowNodes
from paceline.trace.collectors.hook_registry import HookRegistry
from paceline.training.balance.batches import (
    ACCELERATE,
    BalancedLoader,
    BalancedPass,
    BatchPlace,
    Shares,
    is_shard,
    store_pass,
    why_not_balanced,
    why_not_store,
)
from paceline.training.balance.controller import Controller, RankWindow
from paceline.training.balance.exchange import GlooExchange
from paceline.training.balance.gradients import WeighedBackward, adds_samples_up
from paceline.training.balance.log import BalanceLog
from paceline.training.balance.stopwatch import BusyTimes, DeviceMark, Stopwatch
from paceline.training.uneven import Weight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from paceline.runs.balance import BalanceAction
    from paceline.training.balance.controller import BalanceRules
    from paceline.training.balance.exchange import WindowExchange

_LOG = logging.getLogger(__name__)

_LEAST_STEPS = 3  # measured, before a window ends
_SEVERAL = 3  # steps that take batches of several loaders, to be sure that it is no evaluation
_PATIENCE = 20  # backward passes without a loader that can be rebalanced, before that is said
_MEMORY_SHARE = 0.9  # of a GPU, that a larger share may fill

# Why a rank takes no part; the numbers go from rank to rank.
_REFUSALS = {
    1: "the loss is a sum over samples, whose gradients would need other weights: use their mean",
    2: "the loop takes batches ahead of their use, so that the samples of a step are not known",
    3: "a step takes batches of several loaders",
    4: "the loader delivers batches out of order (in_order=False)",
}


class ScriptBalance:
    """Rebalancing in one rank; used by the thread that trains.

    Args:
        run: the run's folder, in which rank 0 writes.
        weights: of the ranks' shares from the start; empty: equal, until they are measured.
        rules: when shares change.
        make_exchange: makes what gathers the ranks' windows; called when all ranks are there.

    Attributes:
        hooks: in torch. They can be taken out and put back between epochs, on all ranks, as long as
            shares are equal.
    """

    def __init__(
        self,
        run: Path,
        *,
        weights: Sequence[float] = (),
        rules: BalanceRules | None = None,
        make_exchange: Callable[[], WindowExchange] = GlooExchange,
    ) -> None:
        self._run = run
        self._weights = tuple(weights)
        self._rules = rules
        self._make_exchange = make_exchange
        self.hooks = HookRegistry()
        self._thread = threading.get_ident()
        self._stopwatch = Stopwatch()
        self._loaders: weakref.WeakKeyDictionary[Any, BalancedLoader] = weakref.WeakKeyDictionary()
        self._store_passes: weakref.WeakKeyDictionary[Any, BalancedPass] = (
            weakref.WeakKeyDictionary()
        )
        self._divided_by_shards: weakref.WeakSet[BatchSampler] = weakref.WeakSet()
        self._training: BalancedLoader | None = None
        self._has_ended = False  # an epoch of the loader that trains
        self._last: BalancedPass | None = None  # whose batch the script got last
        self._since_backward: set[int] = set()  # loaders whose batches came since then, by id
        self._several = 0
        self._controller: Controller | None = None  # of the loader that trains
        self._controllers: weakref.WeakKeyDictionary[BalancedLoader, Controller] = (
            weakref.WeakKeyDictionary()
        )
        self._exchange: WindowExchange | None = None
        self._in_flight: BalancedPass | None = None  # whose batch started the exchange
        self._step = 0
        self._generations: set[int] = set()  # of the shares in this window
        self._refusal = 0
        self._is_off = False
        self._passes = 0
        self._why_not = "no DataLoader has delivered a batch"
        self._log: BalanceLog | None = None

    def install(self) -> None:
        """Put the hooks in place."""
        self._replace(BatchSampler, "__iter__", self._iterate)
        of_shards = functools.partial(self._attempt, "accelerate's loaders")
        on_import(ACCELERATE, self._replace_shard, of_shards)
        of_store = functools.partial(self._attempt, "the store's loaders")
        on_import("paceline.store.feed.loader", self._replace_store, of_store)
        self._replace(_BaseDataLoaderIter, "__next__", self._next)
        if hasattr(DistributedDataParallel, "_sync_buffers"):
            self._replace(DistributedDataParallel, "_sync_buffers", self._timed)
        backward = WeighedBackward(self._begin, self._stopwatch.gradients_ready, self._end)
        backward.install(self.hooks)
        self.hooks.add(lambda: register_optimizer_step_pre_hook(self._before_optimizer).remove)

    def _replace_shard(self, module: ModuleType) -> None:
        self._replace(module.BatchSamplerShard, "__iter__", self._iterate)

    def _replace_store(self, module: ModuleType) -> None:
        self._replace(module.Loader, "__iter__", self._iterate_store)
        self._replace(module.LoaderIterator, "__next__", self._next)

    def _attempt(self, whose: str, action: Callable[..., None], module: object) -> None:
        """Put hooks in place in a module; the script goes on without them if that fails."""
        try:
            action(module)
        except Exception as problem:  # noqa: BLE001  # it may have changed in any way
            self._say(f"batches of {whose} are not divided: {problem}")

    def close(self) -> None:
        """Write what is left to write; shares end with the process."""
        if self._log is not None:
            self._log.close()

    def _replace(self, owner: type, attribute: str, call: Callable[..., Any]) -> None:
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        self.hooks.replace(owner, attribute, replaced)

    # --- batches ----------------------------------------------------------------------------------

    def _iterate(
        self, original: Callable[[Any], Iterator[list[Any]]], sampler: Any
    ) -> Iterator[list[Any]]:
        """Return the batches of an epoch of a loader."""
        if threading.get_ident() != self._thread:
            return original(sampler)
        if sampler in self._divided_by_shards:
            return original(sampler)
        if is_shard(sampler):
            self._divided_by_shards.add(sampler.batch_sampler)
        loader = self._begin_epoch(sampler, why_not_balanced, BalancedLoader.of)
        return original(sampler) if loader is None else loader.batches(sampler, original)

    def _iterate_store(self, original: Callable[[Any], Any], loader: Any) -> Any:
        """Return the rest of an epoch of the store's loader."""
        if threading.get_ident() != self._thread:
            return original(loader)
        balanced = self._begin_epoch(loader, why_not_store, BalancedLoader.of_store)
        if balanced is None:
            return original(loader)
        batches = store_pass(balanced, loader)
        loader.part_of_batch = batches.draw
        iterator = original(loader)
        if loader.part_of_batch is None:
            self._why_not = "one process reads for all ranks of the node (node_reader)"
        else:
            self._store_passes[iterator] = batches
        return iterator

    def _begin_epoch(
        self, divided: Any, why_not: Callable[[Any], str], make: Callable[[Any], BalancedLoader]
    ) -> BalancedLoader | None:
        """Return the shares of what divides samples; None if its batches stay as they are."""
        loader = self._loaders.get(divided)
        if loader is None:
            self._why_not = why_not(divided)
            if self._why_not or dist.get_world_size() == 1:
                return None
            loader = self._loaders[divided] = make(divided)
        if loader is self._training:
            self._finish()
        return loader

    def _next(self, original: Callable[[Any], Any], iterator: Any) -> Any:
        """Return the next batch of a loader."""
        batches = self._store_passes.get(iterator) or getattr(iterator, "_sampler_iter", None)
        if threading.get_ident() != self._thread or not isinstance(batches, BalancedPass):
            return original(iterator)
        trains = batches.loader is self._training
        if trains:
            self._finish()
        begin_s = time.perf_counter()
        try:
            batch = original(iterator)
        except StopIteration:
            batches.has_ended = True
            self._has_ended = self._has_ended or trains
            raise
        batches.delivered += 1
        if not getattr(iterator, "_in_order", True):
            self._refuse(4)
        self._last = batches
        self._since_backward.add(id(batches.loader))
        if trains:
            self._delivered(batches, time.perf_counter() - begin_s)
        return batch

    def _delivered(self, batches: BalancedPass, waited_s: float) -> None:
        """Count a batch of the loader that trains, and start an exchange at every few."""
        self._step += 1
        self._has_ended = False
        self._stopwatch.got_batch(waited_s)
        assert self._controller is not None
        if self._step % self._controller.every == 0 and not self._is_off:
            self._start(batches)
        self._generations.add(batches.current().generation)

    # --- backward ---------------------------------------------------------------------------------

    def _begin(self, roots: tuple[torch.Tensor, ...]) -> float:
        """Return the weight of a backward pass."""
        self._passes += 1
        last = self._last
        if last is None:
            if self._passes == _PATIENCE:
                self._say(f"nothing is rebalanced: {self._why_not}")
            return 1.0
        is_first = bool(self._since_backward)
        if is_first:
            self._several = self._several + 1 if len(self._since_backward) > 1 else 0
            if self._several >= _SEVERAL:
                self._refuse(3)
        if is_first and last.loader is not self._training and self._may_adopt():
            self._adopt(last, roots)
        return 1.0 if Weight.in_process else last.current().weight(last.loader.rank)

    def _end(self) -> None:
        self._since_backward.clear()

    def _may_adopt(self) -> bool:
        return self._training is None or self._has_ended

    def _adopt(self, batches: BalancedPass, roots: tuple[torch.Tensor, ...]) -> None:
        """Take a loader for the one that trains; shares of one before it hold on for it."""
        loader = batches.loader
        weights: Sequence[float] = self._weights
        if self._controller is not None and len(set(self._controller.samples)) > 1:
            weights = self._controller.samples
        if weights and len(weights) != loader.ranks:
            self._say(f"{len(weights)} shares are given, and {loader.ranks} ranks train")
            weights = ()
        if batches.used > 0:
            self._refuse(2)
        samples = batches.loader.batch
        if any(adds_samples_up(root, samples) for root in roots):
            self._refuse(1)
        if roots[0].is_cuda:  # pragma: no cover - needs a GPU
            self._stopwatch.make_mark = DeviceMark
        self._training, self._has_ended = loader, False
        self._controller = self._controllers.get(loader) or Controller(
            loader.batch, loader.ranks, self._rules, weights=weights
        )
        self._controllers[loader] = self._controller
        self._generations = {batches.current().generation}
        self._stopwatch.restart()
        self._stopwatch.got_batch(0.0)
        self._step += 1
        if loader.rank == 0 and self._log is None:
            self._log = BalanceLog(self._run)

    def _before_optimizer(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._stopwatch.before_optimizer()

    def _timed(self, original: Callable[..., Any], *args: Any) -> Any:
        """Exchange buffers in a forward pass; on a CPU that waits for rank 0."""
        begin_s = time.perf_counter()
        try:
            return original(*args)
        finally:
            if self._stopwatch.make_mark is not DeviceMark:
                self._stopwatch.waited(time.perf_counter() - begin_s)

    # --- exchange ---------------------------------------------------------------------------------

    def _start(self, batches: BalancedPass) -> None:
        """Give the other ranks what this rank measured."""
        if self._exchange is None:
            try:
                self._exchange = self._make_exchange()
            except RuntimeError as problem:
                self._say(f"nothing is rebalanced: the ranks cannot exchange times: {problem}")
                self._is_off = True
                return
        measured = self._stopwatch.measured()
        generation = next(iter(self._generations)) if len(self._generations) == 1 else -1
        place = batches.place()
        samples = self._samples_of(batches, generation)
        most = _room_for(samples) if self._stopwatch.make_mark is DeviceMark else 1 << 30
        self._exchange.start([self._refusal, generation, samples, most, *place, *measured])
        self._in_flight = batches
        if measured.steps >= _LEAST_STEPS:
            self._stopwatch.restart()
            self._generations = set()

    def _samples_of(self, batches: BalancedPass, generation: int) -> int:
        controller = self._controller
        assert controller is not None
        own: int = controller.samples[batches.loader.rank]
        return own if generation == controller.generation else batches.loader.batch

    def _finish(self) -> None:
        """Take what all ranks measured, if they exchange it, and do what follows."""
        if self._in_flight is None:
            return
        batches, self._in_flight = self._in_flight, None
        assert self._exchange is not None
        try:
            rows = self._exchange.finish()
        except DeadlineExceeded as problem:
            self._say(f"shares stay as they are: {problem}")
            self._is_off = True
            return
        for rank, row in enumerate(rows):
            if row[0]:
                self._is_off = True
                self._say(f"nothing is rebalanced: {_REFUSALS[int(row[0])]} (rank {rank})")
                return
        if batches.loader is not self._training or len({row[4] for row in rows}) > 1:
            return
        assert self._controller is not None
        place = BatchPlace(int(rows[0][4]), max(int(row[5]) for row in rows))
        actions = self._controller.decide([_window(row) for row in rows], self._step)
        if any(action.new_samples for action in actions):
            shares = Shares(self._controller.generation, self._controller.samples)
            batches.loader.put_in_force(shares, place)
        if self._log is not None:
            self._report(self._log, actions, self._step + place.number - batches.used)

    def _report(self, log: BalanceLog, actions: Sequence[BalanceAction], from_step: int) -> None:
        """Write actions and slow nodes, on rank 0."""
        log.add(_placed(action, from_step) if action.new_samples else action for action in actions)
        assert self._controller is not None
        assert self._exchange is not None
        nodes = [
            SlowNode(
                host=self._exchange.host(rank),
                rank=rank,
                ratio=slow.ratio,
                cause=slow.cause,
                since_step=slow.since_step,
            )
            for rank, slow in sorted(self._controller.persistent.items())
        ]
        log.slow_nodes(SlowNodes(nodes=tuple(nodes)))

    def _refuse(self, number: int) -> None:
        self._refusal = self._refusal or number

    def _say(self, line: str) -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            _LOG.warning("rebalancing: %s", line)


def _window(row: Sequence[float]) -> RankWindow:
    """Return what a rank sent, see `ScriptBalance._start`."""
    _, generation, samples, most, _, _, *figures = row
    measured = BusyTimes(int(figures[0]), *figures[1:])
    return RankWindow(
        steps=measured.steps,
        generation=int(generation),
        samples=int(samples),
        most=int(most),
        **{name: getattr(measured, name) for name in BusyTimes._fields if name != "steps"},
    )


def _placed(action: BalanceAction, from_step: int) -> BalanceAction:
    return dataclasses.replace(action, from_step=from_step)


def _room_for(samples: int) -> int:  # pragma: no cover - needs a GPU
    """Return the samples of a batch that the GPU has memory for, in proportion to what is used."""
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    peak = max(1, torch.cuda.max_memory_allocated(device))
    return max(samples, int(samples * _MEMORY_SHARE * total / peak))
