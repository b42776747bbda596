"""A rank follows its budget: cores, threads, loader workers, progress threads of communication.

::

    follow(budget)            before torch is loaded: the affinity mask, OpenMP's variables
      torch is loaded         numbers of threads that the script sets have the last word
      its DataLoader is       each worker process is placed as soon as it is started
      torch.distributed is    so are the threads that init_process_group starts

torch is not loaded here: each change is made when the script loads the module that it is about.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.affinity import (
    LOADER_CORES_VARIABLE,
    LOADER_NICE_VARIABLE,
    SERVER_CORES_VARIABLE,
    bind_threads,
    parse_core_list,
    place_loader_workers,
    thread_ids,
)
from paceline.core.config import environment
from paceline.core.foreign_cpu import cpu_use
from paceline.core.on_import import on_import
from paceline.launch.budget.budget import RankBudget, threads_variables

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.core.foreign_cpu import CpuUse

_LOG = logging.getLogger(__name__)
# Threads that come later than the process group, by the beginning of their names.
_PROGRESS_NAMES = ("NCCL", "nccl", "pt_nccl", "pt_gloo", "gloo")
_AUTOGRAD_NAME = "pt_autograd"
# Of a rank's cores that other processes use: above it loader workers keep their priority, since a
# lower one would leave them next to nothing, and the rank would wait for data (bench/LOG.md).
_MOST_FOREIGN = 0.25
_LEAST_SPAN_S = 0.2  # which foreign_cpu resolves to a tenth of a core


def follow(budget: RankBudget, server: str) -> None:
    """Bind this process to the cores of its budget, and see to it that torch's threads follow.

    Args:
        budget: of this rank.
        server: cores of the node's servers that the rank may start; empty: anywhere.
    """
    rank = _RankThreads(budget)
    for name, value in threads_variables(budget).items():
        os.environ[name] = value
    os.environ[LOADER_CORES_VARIABLE] = budget.loader
    os.environ[LOADER_NICE_VARIABLE] = str(budget.loader_nice)
    os.environ[SERVER_CORES_VARIABLE] = server
    if rank.compute:
        os.sched_setaffinity(0, rank.compute)
    rank.begin = cpu_use()
    on_import("torch", rank.respect_own_threads)
    on_import("torch.utils.data.dataloader", rank.place_workers)
    on_import("torch.distributed.distributed_c10d", rank.place_progress)


class _RankThreads:
    """The threads of this rank, and what its script says of them.

    Attributes:
        budget: of this rank.
        compute: cores of the main thread and OpenMP's.
        free: cores that the rank had before.
        inter_op: who has set torch's number of inter-op threads, which it takes once.
        begin: CPU time on the rank's cores when it began; None if the system does not say.
    """

    def __init__(self, budget: RankBudget) -> None:
        self.budget = budget
        self.compute = parse_core_list(budget.compute)
        self.free = tuple(os.sched_getaffinity(0))
        self.inter_op = ""
        self.begin: CpuUse | None = None
        self._process = os.getpid()
        self._set_inter_op: Callable[[int], None] = lambda _: None

    def respect_own_threads(self, torch: Any) -> None:
        """Let a script that sets its threads have them, on all cores if its own do not suffice."""
        original, self._set_inter_op = torch.set_num_threads, torch.set_num_interop_threads

        @functools.wraps(original)
        def set_num_threads(threads: int) -> None:
            original(threads)
            # Loaders set those of their own processes and threads.
            is_main = threading.current_thread() is threading.main_thread()
            if is_main and os.getpid() == self._process and threads != self.budget.compute_threads:
                self._leave_alone(threads)

        @functools.wraps(self._set_inter_op)
        def set_num_interop_threads(threads: int) -> None:
            if self.inter_op == "budget":
                _LOG.warning(
                    "torch has %d inter-op threads, as budgeted: it takes their number once",
                    self.budget.inter_op_threads,
                )
                return
            self._set_inter_op(threads)
            self.inter_op = "script"

        torch.set_num_threads = set_num_threads
        torch.set_num_interop_threads = set_num_interop_threads

    def _leave_alone(self, threads: int) -> None:
        words = "its cores stay as they are"
        if self.compute and threads > len(self.compute):
            bind_threads(self.free)
            words = f"it has {len(self.compute)} of its own, and is bound to none any more"
        if environment().get("LOCAL_RANK", "0") == "0":
            _LOG.warning(
                "the script sets %d compute threads in place of the budget's %d: %s",
                threads,
                self.budget.compute_threads,
                words,
            )

    def _size_inter_op_pool(self) -> None:
        """Set the number of torch's inter-op threads; a script does it before it comes this far."""
        if self.inter_op:
            return
        try:
            self._set_inter_op(self.budget.inter_op_threads)
            self.inter_op = "budget"
        except RuntimeError:  # the pool is at work already
            self.inter_op = "torch"

    def place_workers(self, dataloader: Any) -> None:
        """Give the worker processes of torch's DataLoader their cores and priority."""
        iterator = getattr(dataloader, "_MultiProcessingDataLoaderIter", None)
        if iterator is None:  # a torch that has another one
            return
        original = iterator.__init__

        @functools.wraps(original)
        def start(iterating: Any, *args: Any, **kwargs: Any) -> None:
            original(iterating, *args, **kwargs)
            self._heed_others()
            workers = getattr(iterating, "_workers", ())
            place_loader_workers(environment(), [worker.pid for worker in workers if worker.pid])
            self._size_inter_op_pool()
            self._place_late_threads()

        iterator.__init__ = start

    def place_progress(self, distributed: Any) -> None:
        """Give the threads that a process group starts the cores of communication."""
        original = distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            before = thread_ids()
            result = original(*args, **kwargs)
            bind_threads(parse_core_list(self.budget.communication), thread_ids() - before)
            self._size_inter_op_pool()
            self._heed_others()
            return result

        distributed.init_process_group = init_process_group

    def _heed_others(self) -> None:
        """Let loader workers keep their priority where other processes use the rank's cores."""
        begin, now = self.begin, cpu_use()
        if begin is None or now is None or now.at_s - begin.at_s < _LEAST_SPAN_S:
            return
        self.begin = None  # once: later the rank's own workers would count as others
        cores = len(self.compute or self.free)
        foreign = now.foreign_cores(begin)
        if self.budget.loader_nice and foreign > _MOST_FOREIGN * cores:
            os.environ[LOADER_NICE_VARIABLE] = "0"
            _LOG.warning(
                "other processes use %.1f of this rank's %d cores: its loader workers keep their "
                "priority",
                foreign,
                cores,
            )

    def _place_late_threads(self) -> None:
        """Place what started after the process group: NCCL's progress, autograd's threads."""
        names = {thread: _name(thread) for thread in thread_ids()}
        progress = [thread for thread, name in names.items() if name.startswith(_PROGRESS_NAMES)]
        backward = [thread for thread, name in names.items() if name.startswith(_AUTOGRAD_NAME)]
        bind_threads(parse_core_list(self.budget.communication), progress)
        bind_threads(parse_core_list(self.budget.autograd), backward)


def _name(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text(errors="replace").strip()
    except OSError:  # it has ended
        return ""
