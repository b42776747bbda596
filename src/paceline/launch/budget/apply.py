"""A rank follows its budget: cores, threads, loader workers, progress threads of communication.

::

    follow(budget)            before torch is loaded: the affinity mask, OpenMP's variables
      watch torch             torch.set_num_threads called by the script: it has the last word
      watch its DataLoader    each worker process, as soon as it is started
      watch torch.distributed the threads that init_process_group starts

torch is not loaded here: each change is made when the script loads the module that it is about.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
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
from paceline.launch.startup.sitecustomize import ModuleWatch

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from paceline.launch.budget.budget import RankBudget

_LOG = logging.getLogger(__name__)
# Threads that NCCL starts at the first collective, by the beginning of their names.
_PROGRESS_NAMES = ("NCCL", "nccl", "pt_nccl", "pt_gloo", "gloo")


def follow(budget: RankBudget, server: str) -> None:
    """Bind this process to the cores of its budget, and see to it that torch's threads follow.

    Args:
        budget: of this rank.
        server: cores of the node's servers that the rank may start; empty: its own.
    """
    free = tuple(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(budget.compute_threads)
    if budget.wait_policy == "passive":
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ[LOADER_CORES_VARIABLE] = budget.loader
    os.environ[LOADER_NICE_VARIABLE] = str(budget.loader_nice)
    if server or budget.compute:
        os.environ[SERVER_CORES_VARIABLE] = server or budget.loader or budget.compute
    if budget.compute:
        os.sched_setaffinity(0, parse_core_list(budget.compute))
    for name, change in (
        ("torch", functools.partial(_respect_own_threads, budget=budget, free=free)),
        ("torch.utils.data.dataloader", functools.partial(_place_workers, budget=budget)),
        ("torch.distributed.distributed_c10d", functools.partial(_place_progress, budget=budget)),
    ):
        _when_loaded(name, change)


def _when_loaded(name: str, change: Callable[[Any], None]) -> None:
    if (module := sys.modules.get(name)) is not None:
        change(module)
    else:
        sys.meta_path.insert(0, ModuleWatch(name, change))


def _respect_own_threads(torch: ModuleType, budget: RankBudget, free: tuple[int, ...]) -> None:
    """Let a script that sets its threads have them, with all cores where its own do not suffice."""
    original = torch.set_num_threads
    rank = os.getpid()

    @functools.wraps(original)
    def set_num_threads(threads: int) -> None:
        original(threads)
        # Loaders set those of their own processes and threads.
        is_script = os.getpid() == rank and threading.current_thread() is threading.main_thread()
        if is_script and threads != budget.compute_threads:
            _leave_alone(threads, budget, free)

    torch.set_num_threads = set_num_threads  # type: ignore[attr-defined]  # its module has it


def _leave_alone(threads: int, budget: RankBudget, free: tuple[int, ...]) -> None:
    cores = len(parse_core_list(budget.compute))
    words = "its cores stay as they are"
    if cores and threads > cores:
        bind_threads(free)
        words = f"it has {cores} of its own, and is bound to none any more"
    if environment().get("LOCAL_RANK", "0") == "0":
        _LOG.warning(
            "the script sets %d compute threads in place of the budget's %d: %s",
            threads,
            budget.compute_threads,
            words,
        )


def _place_workers(module: Any, budget: RankBudget) -> None:
    """Give the worker processes of torch's DataLoader their cores and priority."""
    iterator = getattr(module, "_MultiProcessingDataLoaderIter", None)
    if iterator is None:  # a torch that has another one
        return
    original = iterator.__init__

    @functools.wraps(original)
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        workers = getattr(self, "_workers", ())
        place_loader_workers(environment(), [worker.pid for worker in workers if worker.pid])
        _place_late_progress(budget)

    iterator.__init__ = start


def _place_progress(module: Any, budget: RankBudget) -> None:
    """Give the threads that a process group starts the cores of communication."""
    original = module.init_process_group

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        before = thread_ids()
        result = original(*args, **kwargs)
        bind_threads(parse_core_list(budget.communication), thread_ids() - before)
        return result

    module.init_process_group = init_process_group


def _place_late_progress(budget: RankBudget) -> None:
    """Do the same for those that start at the first collective, and for autograd's."""
    names = {thread: _name(thread) for thread in thread_ids()}
    progress = [thread for thread, name in names.items() if name.startswith(_PROGRESS_NAMES)]
    backward = [thread for thread, name in names.items() if name.startswith("pt_autograd")]
    bind_threads(parse_core_list(budget.communication), progress)
    bind_threads(parse_core_list(budget.autograd), backward)


def _name(thread: int) -> str:
    try:
        with open(f"/proc/self/task/{thread}/comm", encoding="ascii", errors="replace") as file:  # noqa: PTH123  # short
            return file.read().strip()
    except OSError:
        return ""
