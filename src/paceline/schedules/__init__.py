"""Collective algorithms as plain data: who sends which chunks to whom, and in which order.

Generators are pure functions to a `Schedule`; `check` proves that it performs its operation;
`schedule_s` predicts how long it takes on a Machine; `paceline.collectives.executor` runs it, for
those who try an algorithm. All read the same data, so prediction and execution cannot differ in
what is sent. The backend of torch.distributed has algorithms of its own, in C++.

    generator                                  operations
    ring, halving_doubling                     all_reduce, reduce_scatter, all_gather
    recursive_doubling                         all_reduce
    binomial, chain,                           reduce, broadcast
      chain_binomial, chain_chain
    two_level_sharded, two_level_leader,       all_reduce
      torus

`fastest` compares all of them by their predicted time.
"""

from paceline.schedules.check import check
from paceline.schedules.choice import candidates, fastest
from paceline.schedules.cost import best_chunks, level_volumes, schedule_s
from paceline.schedules.groups import groups_of
from paceline.schedules.halving import halving_doubling, recursive_doubling
from paceline.schedules.hierarchy import torus, two_level_leader, two_level_sharded
from paceline.schedules.ring import ring
from paceline.schedules.schedule import Schedule, Transfer
from paceline.schedules.topology import Topology
from paceline.schedules.trees import binomial, chain, chain_binomial, chain_chain

__all__ = [
    "Schedule",
    "Topology",
    "Transfer",
    "best_chunks",
    "binomial",
    "candidates",
    "chain",
    "chain_binomial",
    "chain_chain",
    "check",
    "fastest",
    "groups_of",
    "halving_doubling",
    "level_volumes",
    "recursive_doubling",
    "ring",
    "schedule_s",
    "torus",
    "two_level_leader",
    "two_level_sharded",
]
