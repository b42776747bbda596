"""The CPU budget of a run: which of a node's cores are for what, and how its ranks follow it.

::

    topology    the node: cores, hardware threads, caches, NUMA nodes
    mask        what Slurm, mpirun and control groups leave of it, and whether that suffices
    budget      pure: topology, ranks, plan -> sets of cores and numbers of threads
    choice      what the launcher makes of ``--budget``
    apply       what each rank does with its part
    bandwidth   what cannot be divided: the path to memory

docs/guides/cpu-budget.md says what users see of it.
"""

from paceline.launch.budget.bandwidth import MemoryContention, memory_contention
from paceline.launch.budget.budget import CpuBudget, RankBudget, cpu_budget
from paceline.launch.budget.choice import NodeCores, budget_words, node_budget
from paceline.launch.budget.topology import CpuTopology, read_topology

__all__ = [
    "CpuBudget",
    "CpuTopology",
    "MemoryContention",
    "NodeCores",
    "RankBudget",
    "budget_words",
    "cpu_budget",
    "memory_contention",
    "node_budget",
    "read_topology",
]
