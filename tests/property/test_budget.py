"""The ranks of a node share its cores fairly; who sets OMP_NUM_THREADS has the last word."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.affinity import allowed_cores, core_binding, core_list, parse_core_list
from paceline.launch.budget import CpuBudget, CpuTopology, cpu_budget
from paceline.launch.budget.budget import check_budget
from paceline.launch.budget.topology import PhysicalCore

CORES = st.lists(st.integers(0, 1023), min_size=1, max_size=64, unique=True).map(sorted)


@given(CORES, st.data())
def test_shares_are_disjoint_equal_and_as_large_as_can_be(cores, data):
    ranks = data.draw(st.integers(1, len(cores)))
    shares = [core_binding(cores, rank, ranks, {}) for rank in range(ranks)]
    together = [core for share in shares for core in share.cores]
    each = len(cores) // ranks
    assert together == cores[: each * ranks]  # disjoint, and neighbours stay together
    assert [len(share.cores) for share in shares] == [each] * ranks
    assert [share.threads for share in shares] == [each] * ranks


@given(CORES, st.integers(1, 64), st.integers(1, 4096))
def test_omp_num_threads_wins(cores, ranks, threads):
    mine = core_binding(cores, ranks - 1, ranks, {"OMP_NUM_THREADS": str(threads)})
    assert mine.cores == ()
    assert mine.threads == threads


@pytest.mark.parametrize("text", ["", "0", "-1", "two"])
def test_what_openmp_ignores_is_ignored(text):
    assert core_binding([0, 1], 1, 2, {"OMP_NUM_THREADS": text}).cores == (1,)


def test_threads_by_nesting_level_are_those_of_the_first():
    mine = core_binding([0, 1], 1, 2, {"OMP_NUM_THREADS": "3,2"})
    assert mine.threads == 3
    assert mine.cores == ()


@given(CORES, st.integers(1, 64))
def test_more_ranks_than_cores_share_with_one_thread_each(cores, more):
    ranks = len(cores) + more
    for rank in (0, ranks - 1):
        mine = core_binding(cores, rank, ranks, {})
        assert mine.cores == ()
        assert mine.threads == 1


def test_allowed_cores_are_those_of_the_affinity_mask():
    assert set(allowed_cores()) == os.sched_getaffinity(0)
    assert list(allowed_cores()) == sorted(allowed_cores())


# --- the budget of a node ----------------------------------------------------------------------


@st.composite
def topologies(draw):
    """Nodes of one or more packages, NUMA nodes, caches, and hardware threads, numbered anyhow."""
    packages = draw(st.integers(1, 2))
    nodes = draw(st.integers(1, 2))
    size = draw(st.integers(1, 12))
    smt = draw(st.sampled_from((1, 2, 4)))
    total = packages * nodes * size * smt
    numbers = iter(draw(st.permutations(range(total))))
    cores = []
    for package in range(packages):
        for node in range(nodes):
            for place in range(size):
                threads = tuple(sorted(next(numbers) for _ in range(smt)))
                cores.append(
                    PhysicalCore(
                        package=package,
                        node=package * nodes + node,
                        cache=place // 4,
                        threads=threads,
                    )
                )
    return CpuTopology(source="sysfs", cores=tuple(sorted(cores)))


@st.composite
def budgets(draw):
    """A topology, allowed hardware threads, and the budget of a number of ranks."""
    topology = draw(topologies())
    everything = sorted(thread for core in topology.cores for thread in core.threads)
    allowed = draw(st.one_of(st.just(everything), st.sets(st.sampled_from(everything), min_size=1)))
    asked = {
        "ranks": draw(st.integers(1, 12)),
        "threads": draw(st.none() | st.integers(1, 16)),
        "workers": draw(st.none() | st.integers(0, 8)),
        "accelerator": draw(st.booleans()),
    }
    return topology, sorted(allowed), asked, cpu_budget(topology, allowed, **asked)


SETS = ("compute", "launch", "autograd", "communication", "loader")


def all_cores(rank):
    return {core for name in SETS for core in parse_core_list(getattr(rank, name))}


@given(budgets())
def test_ranks_are_disjoint_and_within_what_is_allowed(made):
    _, allowed, asked, budget = made
    seen = set(parse_core_list(budget.server))
    assert len(budget.ranks) == asked["ranks"]
    for rank in budget.ranks:
        own = all_cores(rank)
        assert not own & seen
        seen |= own
    assert seen <= set(allowed)
    assert (budget.state == "unbound") == (asked["ranks"] > len(allowed))


def test_a_hardware_thread_that_one_core_has_alone_is_no_ranks():
    cores = [PhysicalCore(package=0, node=0, cache=0, threads=(2 * i, 2 * i + 1)) for i in range(4)]
    topology = CpuTopology(source="sysfs", cores=tuple(cores))
    first, second = cpu_budget(topology, [0, 1, 2, 4, 6], ranks=2).ranks
    assert (first.compute, second.compute) == ("0,2", "4,6")
    assert (first.communication, second.communication) == ("0,2", "4,6")
    alone = cpu_budget(topology, [0, 1, 2], ranks=1).ranks[0]
    assert (alone.compute, alone.communication) == ("0,2", "1")


@given(budgets())
def test_all_ranks_get_as_much(made):
    *_, budget = made
    for name in SETS:
        assert len({len(parse_core_list(getattr(rank, name))) for rank in budget.ranks}) == 1
    assert len({rank.compute_threads for rank in budget.ranks}) == 1


@given(budgets())
def test_pools_fit_their_sets(made):
    _, _, asked, budget = made
    for rank in budget.ranks:
        compute = parse_core_list(rank.compute)
        if compute:
            assert rank.compute_threads == len(compute)
            assert set(parse_core_list(rank.launch)) <= set(compute)
            assert rank.loader
            assert rank.communication
        else:
            assert not all_cores(rank)  # nothing is bound by halves
        if asked["threads"] is not None and not asked["accelerator"]:
            assert rank.compute_threads == asked["threads"]


@given(budgets())
def test_workers_that_share_cores_with_compute_give_way(made):
    topology, _, asked, budget = made
    physical = {thread: core for core in topology.cores for thread in core.threads}
    for rank in budget.ranks:
        computing = {physical[core] for core in parse_core_list(rank.compute)}
        loading = {physical[core] for core in parse_core_list(rank.loader)}
        if computing & loading and asked["workers"] != 0 and budget.state == "bound":
            assert rank.loader_nice > 0 or asked["accelerator"]


def test_workers_beside_compute_on_one_core_of_four_threads_give_way():
    cores = [
        PhysicalCore(package=0, node=0, cache=0, threads=tuple(range(4 * k, 4 * k + 4)))
        for k in range(4)
    ]
    topology = CpuTopology(source="sysfs", cores=tuple(cores))
    budget = cpu_budget(topology, range(16), ranks=5, threads=1)
    assert {(rank.compute, rank.loader) for rank in budget.ranks} >= {("0", "1-2"), ("3", "4-5")}
    assert all(rank.loader_nice > 0 for rank in budget.ranks)


@given(topologies(), st.integers(1, 8))
def test_ranks_stay_on_a_numa_node_where_that_costs_little(topology, ranks):
    everything = [thread for core in topology.cores for thread in core.threads]
    budget = cpu_budget(topology, everything, ranks=ranks)
    if ranks > len(topology.cores):
        return
    node_of = {thread: core.node for core in topology.cores for thread in core.threads}
    equal = len(topology.cores) // ranks
    for rank in budget.ranks:
        nodes = {node_of[core] for core in all_cores(rank)}
        local = max(
            size
            for size in range(equal + 1)
            if size == 0 or sum(len(cores) // size for cores in topology.nodes) >= ranks
        )
        assert len(nodes) == 1 or local < 0.75 * equal


@given(topologies(), st.integers(1, 8))
def test_no_allowed_core_is_lost(topology, ranks):
    """Of ranks whose threads no plan limits; their hardware threads are all for something."""
    everything = {thread for core in topology.cores for thread in core.threads}
    budget = cpu_budget(topology, everything, ranks=ranks)
    if budget.state == "bound":
        used = set().union(*map(all_cores, budget.ranks)) | set(parse_core_list(budget.server))
        assert used == everything


@given(budgets())
def test_a_budget_that_is_given_back_passes_its_check(made):
    _, allowed, asked, budget = made
    text = budget.to_text()
    again = check_budget(CpuBudget.from_text(text), allowed, asked["ranks"], "budget.json")
    assert again.ranks == budget.ranks


@given(st.sets(st.integers(0, 300)))
def test_lists_of_cores_round_trip(cores):
    assert set(parse_core_list(core_list(cores))) == cores
