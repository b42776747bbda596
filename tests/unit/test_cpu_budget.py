"""What a launcher makes of --budget, by the node, the mask, Slurm, the plan and the user."""

import pytest

from paceline.core.errors import ConfigError
from paceline.core.node import Limits
from paceline.core.plan import Mesh, Plan
from paceline.launch.budget import (
    CpuBudget,
    CpuTopology,
    NodeCores,
    RankBudget,
    budget_words,
    node_budget,
)
from paceline.launch.budget.budget import LOADER_NICE
from paceline.launch.budget.topology import PhysicalCore
from paceline.launch.task_placement import TaskPlacement


def node(packages=2, cores=24, smt=2, *, allowed=None, limit=None, accelerator=False):
    """A node whose hardware thread t of core c is c + t * (its cores)."""
    total = packages * cores
    topology = CpuTopology(
        source="lstopo",
        cores=tuple(
            PhysicalCore(
                package=place // cores,
                node=place // cores,
                cache=place - place % 8,
                threads=tuple(place + thread * total for thread in range(smt)),
            )
            for place in range(total)
        ),
    )
    return NodeCores(
        allowed=tuple(range(total * smt)) if allowed is None else tuple(allowed),
        total=total * smt,
        topology=topology,
        limits=Limits(version=2, cores=limit),
        accelerator=accelerator,
    )


def task(source="slurm", count=4):
    return TaskPlacement(
        source=source,
        task_number=0,
        task_count=count,
        local_task_number=0,
        local_task_count=count,
    )


def auto(cores, ranks, environ=None, **more):
    return node_budget("auto", cores, ranks=ranks, environ=environ or {}, **more)


def test_hardware_threads_beside_compute_are_for_workers_and_communication():
    budget = auto(node(), 2)
    first, second = budget.ranks
    assert (first.compute, first.loader, first.communication) == ("0-23", "48-70", "71")
    assert (second.compute, second.loader, second.communication) == ("24-47", "72-94", "95")
    assert (first.compute_threads, first.loader_nice) == (24, LOADER_NICE)


def test_a_rank_of_many_cores_has_one_for_communication():
    (rank,) = auto(node(packages=1, cores=16, smt=1), 1).ranks
    assert (rank.compute, rank.communication, rank.compute_threads) == ("0-14", "15", 15)
    assert (rank.loader, rank.loader_nice) == ("0-14", LOADER_NICE)  # their number is not known


def test_cores_that_do_not_divide_are_for_the_servers_of_the_node():
    budget = auto(node(packages=1, cores=7, smt=1), 3)
    assert [rank.compute for rank in budget.ranks] == ["0-1", "2-3", "4-5"]
    assert budget.server == "6"


def test_three_ranks_on_two_numa_nodes_stay_on_one_each():
    budget = auto(node(smt=1), 3)
    assert [rank.cores for rank in budget.ranks] == [
        tuple(range(12)), tuple(range(12, 24)), tuple(range(24, 36)),
    ]  # fmt: skip
    assert budget.server == "36-47"


def test_few_workers_of_a_plan_get_cores_of_their_own():
    plan = Plan(mesh=Mesh(data=2), threads=20, loader_workers=3)
    first = auto(node(smt=1), 2, plan=plan).ranks[0]
    assert (first.compute, first.loader, first.loader_nice) == ("0-19", "20-22", 0)
    assert (first.communication, first.loader_workers) == ("23", 3)


def test_a_plan_of_more_threads_than_cores_is_not_bound():
    plan = Plan(mesh=Mesh(data=2), threads=4)
    budget = auto(node(packages=1, cores=4, smt=1), 2, plan=plan)
    assert [rank.compute for rank in budget.ranks] == ["", ""]
    assert budget.ranks[0].compute_threads == 4
    assert budget.ranks[0].wait_policy == "passive"
    assert "nothing is bound" in budget_words(budget)


def test_ranks_with_an_accelerator_launch_on_one_core_and_load_on_half():
    first = auto(node(packages=1, cores=8, smt=1, accelerator=True), 1).ranks[0]
    assert (first.launch, first.autograd, first.communication) == ("0", "1", "2")
    assert (first.compute, first.loader, first.loader_nice) == ("0-3", "4-7", 0)


def test_threads_of_the_user_are_left_alone():
    budget = auto(node(), 2, {"OMP_NUM_THREADS": "3,2"})
    assert budget.state == "own"
    assert budget.ranks[0].compute_threads == 3
    assert budget_words(budget) == (
        "OMP_NUM_THREADS=3 is yours: threads and cores stay as they are"
    )


def test_off_sets_nothing():
    budget = node_budget("off", node(), ranks=2, environ={})
    assert (budget.state, budget.ranks) == ("off", ())


def test_fewer_cores_than_ranks_bind_nothing():
    budget = auto(node(allowed=[5]), 2)
    assert budget.state == "unbound"
    assert budget.why == "2 ranks share 1 core"
    assert [(rank.compute, rank.compute_threads) for rank in budget.ranks] == [("", 1), ("", 1)]
    assert budget.fix == ""  # no Slurm here


def test_a_job_of_one_core_for_all_ranks_is_shown_its_sbatch_line():
    environ = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "1"}
    budget = auto(node(smt=1, allowed=[5]), 4, environ)
    assert budget.state == "unbound"
    assert budget.fix == "#SBATCH --cpus-per-task=48"


def test_tasks_that_share_one_core_are_shown_theirs():
    environ = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4"}
    budget = auto(node(smt=1, allowed=[5]), 4, environ, task=task())
    assert budget.fix == "#SBATCH --cpus-per-task=12, and srun --cpus-per-task=12"


def test_a_step_that_lost_the_cores_of_its_job_is_bound_and_says_so():
    """srun of Slurm 22.05 and later does not take --cpus-per-task from the job."""
    environ = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "48", "SLURM_CPUS_PER_TASK": "12"}
    budget = auto(node(smt=1, allowed=[5]), 1, environ, task=task())
    assert budget.state == "bound"
    assert budget.ranks[0].compute == "5"
    assert "each rank may use 1 core of the 12" in budget.why
    assert budget.fix == "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK, before srun"


def test_mpirun_that_binds_to_a_core_is_shown_its_option():
    budget = auto(node(smt=1, allowed=[5]), 1, {}, task=task("openmpi", 2))
    assert budget.fix == "mpirun --map-by slot:pe=24 --bind-to core"


def test_a_quota_of_time_sizes_threads_and_binds_nothing():
    budget = auto(node(smt=1, limit=6.5), 2)
    assert budget.state == "unbound"
    assert [rank.compute_threads for rank in budget.ranks] == [3, 3]
    assert "a control group allows the time of 6.5 cores on 48" in budget.why


def given_back(tmp_path, budget, cores, ranks):
    path = tmp_path / "budget.json"
    path.write_text(budget.to_text())
    return node_budget(str(path), cores, ranks=ranks, environ={"OMP_NUM_THREADS": "1"})


def test_a_file_decides(tmp_path):
    ranks = (RankBudget(rank=0, compute="3", loader="4-5"), RankBudget(rank=1, compute="6"))
    budget = given_back(tmp_path, CpuBudget(state="bound", ranks=ranks), node(), 2)
    assert budget.ranks == ranks
    assert budget.source == "file"


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ((RankBudget(rank=0, compute="0"),), "has 1 ranks, this node has 2"),
        ((RankBudget(rank=0, compute="0-1"), RankBudget(rank=1, compute="1")), "core 1 is given"),
        ((RankBudget(rank=0, compute="0"), RankBudget(rank=1, loader="200")), "cores 200"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path, ranks, words):
    with pytest.raises(ConfigError, match=words):
        given_back(tmp_path, CpuBudget(state="bound", ranks=ranks), node(), 2)


@pytest.mark.parametrize("wrong", [{"compute": "x"}, {"compute_threads": 0}, {"loader_nice": 20}])
def test_values_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ConfigError):
        RankBudget(rank=0, **wrong)


def test_words_of_a_budget():
    assert budget_words(auto(node(packages=1, cores=2, smt=1), 2)) == (
        "2 ranks x 1 core to compute (0 | 1), 1 thread each; loader workers on the same cores at "
        f"nice {LOADER_NICE} (topology: lstopo)"
    )
