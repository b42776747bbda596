"""What a launcher makes of ``--budget``: the budget of its node, with a sentence for its user."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core import node
from paceline.core.affinity import (
    allowed_cores,
    core_list,
    parse_core_list,
    threads_of_environment,
)
from paceline.core.files import read_text
from paceline.launch.budget.budget import (
    CpuBudget,
    check_budget,
    cpu_budget,
    without_binding,
)
from paceline.launch.budget.mask import check_mask
from paceline.launch.budget.topology import CpuTopology, read_topology

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.core.plan import Plan
    from paceline.launch.task_placement import TaskPlacement

_ACCELERATORS = ("dev/nvidia0", "dev/kfd")  # device files of CUDA's and ROCm's drivers


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCores:
    """What a budget rests on: read once, passed to pure functions.

    Attributes:
        allowed: hardware threads in the affinity mask.
        total: hardware threads of the node.
        topology: of the node.
        limits: of the control groups.
        accelerator: whether the node has one.
    """

    allowed: tuple[int, ...]
    total: int
    topology: CpuTopology
    limits: node.Limits
    accelerator: bool

    @classmethod
    def read(cls) -> NodeCores:
        """Return those of this process."""
        return cls(
            allowed=allowed_cores(),
            total=os.cpu_count() or 1,
            topology=read_topology(),
            limits=node.read_limits(),
            accelerator=any((node.ROOT / name).exists() for name in _ACCELERATORS),
        )


def node_budget(
    setting: str,
    cores: NodeCores,
    *,
    ranks: int,
    environ: Mapping[str, str],
    plan: Plan | None = None,
    task: TaskPlacement | None = None,
) -> CpuBudget:
    """Return the budget of the ranks that share the cores of this launcher.

    Args:
        setting: ``auto``, ``off``, or the path of a budget in JSON.
        cores: what there is.
        ranks: that share them.
        environ: where OMP_NUM_THREADS set by the user wins, and Slurm's variables stand.
        plan: that the run follows.
        task: this launcher's place among several.

    Raises:
        ConfigError: the file holds no budget of this node.
        StorageError: it cannot be read.
    """
    everything = CpuBudget(
        state="off", allowed=core_list(cores.allowed), source=cores.topology.source
    )
    if setting == "off":
        return replace(everything, why="--budget off: the system places all threads")
    if setting != "auto":
        found = CpuBudget.from_text(read_text(Path(setting)), where=setting)
        return check_budget(found, cores.allowed, ranks, setting)
    own = threads_of_environment(environ)
    if own is not None and plan is None:
        why = f"OMP_NUM_THREADS={own} is yours: threads and cores stay as they are"
        budget = without_binding(everything, ranks, own, why)
        return replace(
            budget, state="own", ranks=tuple(replace(r, loader_nice=0) for r in budget.ranks)
        )
    threads = plan.threads if plan else None
    problem = check_mask(
        len(cores.allowed),
        ranks,
        total=cores.total,
        limits=cores.limits,
        environ=environ,
        task=task,
    )
    if problem is not None and not problem.binds:
        quota = int(cores.limits.cores or 0) // ranks if cores.limits.cores else 1
        budget = without_binding(everything, ranks, threads or max(1, quota), problem.what)
        return replace(budget, fix=problem.fix)
    budget = cpu_budget(
        cores.topology,
        cores.allowed,
        ranks=ranks,
        threads=threads,
        workers=plan.loader_workers or None if plan else None,
        accelerator=cores.accelerator,
    )
    if problem is not None:
        budget = replace(budget, why=problem.what, fix=problem.fix)
    return budget


def budget_words(budget: CpuBudget) -> str:
    """Return what a budget does, in a line.

    >>> budget_words(CpuBudget(state="off", why="--budget off"))
    '--budget off'
    """
    if budget.state != "bound" or not budget.ranks:
        return budget.why
    first = budget.ranks[0]
    count = len(budget.ranks)
    each = len(parse_core_list(first.compute))
    if not each:
        return (
            f"{first.compute_threads} compute threads are more than the cores of each rank: "
            "nothing is bound"
        )
    where = " | ".join(rank.compute for rank in budget.ranks[:_SHOWN])
    where += " | ..." if count > _SHOWN else ""
    words = f"{count} rank{'s' if count > 1 else ''} x {each} core{'s' if each > 1 else ''}"
    words += f" to compute ({where}), {first.compute_threads} thread"
    words += "s each" if first.compute_threads > 1 else " each"
    if first.communication != first.compute:
        words += f"; communication on {first.communication}"
    if first.loader_nice:
        place = "the same cores" if first.loader == first.compute else first.loader
        words += f"; loader workers on {place} at nice {first.loader_nice}"
    else:
        words += f"; loader workers on {first.loader}"
    if budget.server:
        words += f"; servers on {budget.server}"
    return f"{words} (topology: {budget.source})"


_SHOWN = 4  # ranks in a line
