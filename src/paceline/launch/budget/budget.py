"""Which of a node's cores are for what: compute, communication, loader workers, servers.

A pure function from the allowed cores, the topology, the number of ranks and what is known of their
threads and loader workers to a `CpuBudget`, a file that can be edited and given back. Ranks that
step together are as fast as the slowest one: all get as many physical cores, on one NUMA node where
that costs no more than a quarter of them, and the rest of the node is for its servers.

Within a rank that computes on its cores::

    physical cores   | compute: main thread + OpenMP ............ | own cores of workers | comm |
    other hardware   | loader workers (at a nice value) ......................... | comm        |
    threads, if any

- The main thread is thread 0 of OpenMP, and runs the backward pass: launch and autograd are inside
  compute. Ranks with an accelerator compute elsewhere: their main thread, which launches kernels,
  and the thread of autograd get a core each, and half of the cores are for loader workers.
- Communication (progress threads of gloo and NCCL) gets a hardware thread, or a core from
  `OWN_COMMUNICATION` cores on.
- Loader workers get the second hardware threads, or cores of their own where there are few workers
  (`LOADER_SHARE`); else they share the cores of compute at the nice value `LOADER_NICE`: they work
  while the rank waits, and do not preempt it when it computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from paceline.core.affinity import NICE_MAX, core_list, parse_core_list
from paceline.core.errors import ConfigError
from paceline.core.record import Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paceline.launch.budget.topology import CpuTopology, PhysicalCore

LOADER_NICE = 5  # a third of the main thread's weight (sched(7)); see bench/LOG.md
OWN_COMMUNICATION = 8  # cores of a rank from which one of them is for communication alone
LOADER_SHARE = 4  # workers get cores of their own where they are at most 1 / 4 of the rank's
LEAST_LOCAL = 0.75  # of an equal share: what a rank may lose to stay on one NUMA node
_SETS = ("compute", "launch", "autograd", "communication", "loader")

BudgetState = Literal["bound", "unbound", "own", "off"]
WaitPolicy = Literal["default", "passive"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankBudget(Record):
    """The cores of one rank: hardware threads in the kernel's list format, as ``0-3,8``.

    An empty set leaves threads where the system puts them.

    Attributes:
        rank: its local rank.
        compute: of OpenMP's threads, the main thread among them.
        compute_threads: of OpenMP; torch's intra-op threads.
        launch: the part of `compute` that the main thread needs.
        autograd: of autograd's threads for accelerators; the CPU's backward pass is the main
            thread's.
        inter_op_threads: of torch's inter-op pool.
        communication: of the threads that make progress for gloo and NCCL.
        loader: of loader workers.
        loader_workers: their number, if it is known.
        loader_nice: what is added to their nice value; above 0 they are batch work (SCHED_BATCH).
        wait_policy: ``passive``: OpenMP's threads sleep while they wait, where others need the
            core; ``default``: they spin for a while first.
    """

    rank: int
    compute: str = ""
    compute_threads: int = 1
    launch: str = ""
    autograd: str = ""
    inter_op_threads: int = 1
    communication: str = ""
    loader: str = ""
    loader_workers: int | None = None
    loader_nice: int = 0
    wait_policy: WaitPolicy = "default"

    def __post_init__(self) -> None:
        for name in _SETS:
            _check_list(getattr(self, name), f"RankBudget: {name}")
        if self.compute_threads < 1 or self.inter_op_threads < 1:
            raise ConfigError(
                f"rank {self.rank} has {self.compute_threads} compute threads and "
                f"{self.inter_op_threads} inter-op threads",
                fix="Give at least 1 of each",
            )
        if not 0 <= self.loader_nice <= NICE_MAX:
            raise ConfigError(
                f"loader_nice of rank {self.rank} is {self.loader_nice}", fix="Give 0 to 19"
            )

    @property
    def cores(self) -> tuple[int, ...]:
        """All hardware threads of the rank's sets, without those that its workers may borrow."""
        own = {core for name in _SETS[:-1] for core in parse_core_list(getattr(self, name))}
        return tuple(sorted(own))


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuBudget(Record):
    """The cores of one node, by what they are for.

    Attributes:
        state: ``bound``; ``unbound``: the cores do not suffice, see `why`; ``own``: the user has
            set threads; ``off``.
        why: a sentence, where it is not ``bound``.
        fix: what to do about it; empty if there is nothing to do.
        allowed: the hardware threads that the launcher may use.
        source: of the topology: ``lstopo``, ``sysfs``, ``none``, or ``file``.
        ranks: of the node, by local rank; empty if nothing is set.
        server: cores that no rank has, for the servers of the node; empty: theirs are the loaders'.
    """

    version: ClassVar[int] = 1
    state: BudgetState
    why: str = ""
    fix: str = ""
    allowed: str = ""
    source: str = "none"
    ranks: tuple[RankBudget, ...] = ()
    server: str = ""

    def __post_init__(self) -> None:
        _check_list(self.allowed, "CpuBudget: allowed")
        _check_list(self.server, "CpuBudget: server")


def _check_list(text: str, where: str) -> None:
    try:
        parse_core_list(text)
    except ValueError:
        raise ConfigError(
            f"{text!r} is no list of cores", where=where, fix="Write it as the kernel does: 0-3,8"
        ) from None


def threads_variables(budget: RankBudget) -> dict[str, str]:
    """Return the environment variables that OpenMP and BLAS libraries read when they are loaded."""
    policy = {"OMP_WAIT_POLICY": "passive"} if budget.wait_policy == "passive" else {}
    return {"OMP_NUM_THREADS": str(budget.compute_threads), **policy}


def cpu_budget(
    topology: CpuTopology,
    allowed: Iterable[int],
    *,
    ranks: int,
    threads: int | None = None,
    workers: int | None = None,
    accelerator: bool = False,
) -> CpuBudget:
    """Return the budget of a node.

    Args:
        topology: of the node.
        allowed: hardware threads that the ranks may use together, at least one.
        ranks: of the node.
        threads: compute threads of each rank, if a plan gives their number.
        workers: loader workers of each rank, if it is known.
        accelerator: whether the ranks compute on one.

    Returns:
        Disjoint cores for each rank; unbound where ranks outnumber cores.
    """
    allowed = sorted(set(allowed))
    assert allowed
    assert ranks >= 1
    topology = topology.restricted(allowed)
    is_split = ranks > len(topology.cores)
    if is_split:
        topology = topology.split()
    everything = CpuBudget(state="bound", allowed=core_list(allowed), source=topology.source)
    if ranks > len(topology.cores):
        return without_binding(
            everything, ranks, threads or 1, f"{ranks} ranks share {_cores(len(allowed))}"
        )
    shares, spare = _divide(topology, ranks)
    if ranks > 1:
        shares = _alike(shares)
    demand = _Demand(threads=threads, workers=workers, accelerator=accelerator, is_split=is_split)
    budgets = tuple(_rank_budget(rank, share, demand) for rank, share in enumerate(shares))
    server = core_list(thread for core in spare for thread in core.threads)
    return replace(everything, ranks=budgets, server=server)


def without_binding(budget: CpuBudget, ranks: int, threads: int, why: str) -> CpuBudget:
    """Return `budget` with so many compute threads for each rank and nothing bound."""
    free = tuple(
        RankBudget(
            rank=rank, compute_threads=threads, loader_nice=LOADER_NICE, wait_policy="passive"
        )
        for rank in range(ranks)
    )
    return replace(budget, state="unbound", why=why, ranks=free, server="")


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"


def _divide(
    topology: CpuTopology, ranks: int
) -> tuple[list[tuple[PhysicalCore, ...]], list[PhysicalCore]]:
    """Return the physical cores of each rank, as many for each, and those that are left."""
    nodes = topology.nodes
    equal = len(topology.cores) // ranks
    local = next(
        (size for size in range(equal, 0, -1) if sum(len(n) // size for n in nodes) >= ranks), 0
    )
    pools = nodes if local >= LEAST_LOCAL * equal else (topology.cores,)
    size = local if pools is nodes else equal
    shares: list[tuple[PhysicalCore, ...]] = []
    spare: list[PhysicalCore] = []
    for pool in pools:
        count = min(len(pool) // size, ranks - len(shares))
        shares += [pool[number * size : (number + 1) * size] for number in range(count)]
        spare += pool[count * size :]
    assert len(shares) == ranks
    return shares, spare


def _alike(shares: Sequence[tuple[PhysicalCore, ...]]) -> list[tuple[PhysicalCore, ...]]:
    """Return the shares with as many hardware threads of each core: all ranks get as much.

    Masks are not always of whole cores. A thread that other cores lack stays idle.
    """
    least = min(len(core.threads) for share in shares for core in share)
    return [
        tuple(replace(core, threads=core.threads[:least]) for core in share) for share in shares
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    threads: int | None
    workers: int | None
    accelerator: bool
    is_split: bool  # each hardware thread counts as a core: neighbours share a core's units


def _rank_budget(rank: int, cores: Sequence[PhysicalCore], demand: _Demand) -> RankBudget:
    """Return what the physical cores of a rank are for."""
    if demand.threads is not None and demand.threads > len(cores):
        return RankBudget(  # more threads than cores of its own: the system spreads them better
            rank=rank,
            compute_threads=demand.threads,
            loader_workers=demand.workers,
            loader_nice=LOADER_NICE,
            wait_policy="passive",
        )
    first = [core.threads[0] for core in cores]
    second = [thread for core in cores for thread in core.threads[1:]]
    if demand.accelerator:
        return _beside_accelerator(rank, first, second, demand)
    communication: list[int] = []
    if second:
        communication = [second.pop()]
    elif len(first) >= OWN_COMMUNICATION and (demand.threads or 0) < len(first):
        communication = [first.pop()]
    loader, nice = second, LOADER_NICE  # a core's hardware threads share its units
    workers = demand.workers
    if not loader and workers and workers * LOADER_SHARE <= len(first):
        loader, first, nice = first[-workers:], first[:-workers], 0
    if demand.threads is not None:
        if demand.threads > len(first):  # the plan's threads come before own cores of workers
            first, loader, nice = [core.threads[0] for core in cores], second, LOADER_NICE
        elif not second and demand.threads < len(first):
            loader, nice = [*first[demand.threads :], *(loader if nice == 0 else [])], 0
        first = first[: demand.threads]
        communication = [core for core in communication if core not in first]
    shares = not loader
    return RankBudget(
        rank=rank,
        compute=core_list(first),
        compute_threads=len(first),
        inter_op_threads=len(first),
        launch=core_list(first[:1]),
        autograd=core_list(first[:1]),
        communication=core_list(communication or first),
        loader=core_list(loader or first),
        loader_workers=workers,
        loader_nice=0 if workers == 0 else LOADER_NICE if demand.is_split else nice,
        wait_policy="passive" if shares and workers and len(first) > 1 else "default",
    )


def _beside_accelerator(
    rank: int, first: list[int], second: list[int], demand: _Demand
) -> RankBudget:
    """Return the budget of a rank that computes on an accelerator: it launches kernels, and loads.

    Kernels are launched by the main thread, and in the backward pass by the one of autograd.
    """
    half = demand.threads or max(1, (len(first) + 1) // 2)
    compute, rest = first[:half], first[half:]
    communication = [second.pop()] if second else compute[2:3]
    loader = rest + second
    return RankBudget(
        rank=rank,
        compute=core_list(compute),
        compute_threads=len(compute),
        inter_op_threads=len(compute),
        launch=core_list(compute[:1]),
        autograd=core_list(compute[1:2] or compute),
        communication=core_list(communication or compute),
        loader=core_list(loader or compute),
        loader_workers=demand.workers,
        loader_nice=0 if rest or demand.workers == 0 else LOADER_NICE,
    )


def check_budget(budget: CpuBudget, allowed: Iterable[int], ranks: int, where: str) -> CpuBudget:
    """Return a budget from a file, checked against this node.

    Raises:
        ConfigError: it names cores that are not allowed, gives a core to two ranks, or is of
            another number of ranks.
    """
    if budget.state == "off":
        return budget
    if [rank.rank for rank in budget.ranks] != list(range(ranks)):
        raise ConfigError(
            f"the budget has {len(budget.ranks)} ranks, this node has {ranks}",
            where=where,
            fix="Give one entry for each local rank, from 0 on",
        )
    allowed = set(allowed)
    owners: dict[int, int] = {}
    for rank in budget.ranks:
        named = {core for name in _SETS for core in parse_core_list(getattr(rank, name))}
        if missing := named - allowed:
            raise ConfigError(
                f"rank {rank.rank} is given cores {core_list(missing)}, which this run may not use",
                where=where,
                why=f"allowed are {core_list(allowed)}",
                fix="Name allowed cores, or start the run on more (Slurm: --cpus-per-task)",
            )
        for core in rank.cores:
            if owners.setdefault(core, rank.rank) != rank.rank:
                raise ConfigError(
                    f"core {core} is given to rank {owners[core]} and to rank {rank.rank}",
                    where=where,
                    fix="Give each rank cores of its own; loader workers alone may share",
                )
    return replace(budget, source="file")
