"""Ranks of `paceline run` and their loader workers follow the budget of cores."""

import json
import os

import pytest
from support.launching import paceline

# Each rank prints where its threads and those of its loader workers may run.
TRAIN = """
import json, os, sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

class Places(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return os.getpid(), sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)

before = set(os.listdir("/proc/self/task"))
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
progress = set(os.listdir("/proc/self/task")) - before
workers = {}
for batch in DataLoader(Places(), num_workers=2, collate_fn=lambda batch: batch):
    for pid, cores, priority in batch:
        workers[pid] = [cores, priority]
if "threads" in sys.argv:
    torch.set_num_threads(len(sys.argv) + 5)
told = {
    "rank": dist.get_rank(),
    "cores": sorted(os.sched_getaffinity(0)),
    "threads": torch.get_num_threads(),
    "variable": os.environ.get("OMP_NUM_THREADS"),
    # What libraries see that are loaded before the rank follows its budget, as numpy's BLAS is.
    "first": [line for line in open("/proc/self/environ").read().split("\\0") if "OMP_NUM" in line],
    "priority": os.getpriority(os.PRIO_PROCESS, 0),
    "workers": list(workers.values()),
    "progress": [sorted(os.sched_getaffinity(int(thread))) for thread in progress],
}
print(json.dumps(told) + "\\n", end="", flush=True)
dist.destroy_process_group()
"""
ALLOWED = sorted(os.sched_getaffinity(0))
two_cores = pytest.mark.skipif(len(ALLOWED) < 2, reason="one core here")


@pytest.fixture
def train(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # of the test suite's own
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*options, args=(), **more):
        done = paceline(
            tmp_path,
            *("run", "--no-record", "-n", 2, "--out", "RUN", *options),
            *(tmp_path / "train.py", *args),
            threads=None,  # else the suite sets them
            **more,
        )
        assert done.code == 0, done.err
        lines = [json.loads(line) for line in done.out.splitlines() if line.startswith("{")]
        run.err = done.err
        return sorted(lines, key=lambda line: line["rank"])

    run.budget = lambda: json.loads((tmp_path / "RUN/budget.json").read_text())
    run.folder = tmp_path
    return run


@two_cores
def test_two_ranks_with_two_workers_each(train):
    ranks = train()
    budget = train.budget()
    assert budget["state"] == "bound"
    each = len(ALLOWED) // 2
    assert not set(ranks[0]["cores"]) & set(ranks[1]["cores"])
    for rank, own in zip(ranks, budget["ranks"], strict=True):
        assert rank["threads"] == own["compute_threads"] == len(rank["cores"])
        assert rank["variable"] == str(rank["threads"])
        assert rank["first"] == [f"OMP_NUM_THREADS={rank['threads']}"]
        assert len(rank["cores"]) <= each
        assert len(rank["workers"]) == 2
        # On a busy machine they keep theirs, and the run says so.
        busy = "other processes use" in train.err
        nice = {min(19, rank["priority"] + own["loader_nice"])}
        nice |= {rank["priority"]} if busy else set()
        assert {worker[1] for worker in rank["workers"]} <= nice
        assert rank["progress"]
    workers = [{core for worker in rank["workers"] for core in worker[0]} for rank in ranks]
    assert not workers[0] & workers[1]
    assert "paceline run: budget 2 ranks x" in train.err


@two_cores
def test_a_budget_is_edited_and_given_back(train):
    train()
    budget = train.budget()
    first, last = ALLOWED[0], ALLOWED[-1]
    for rank, core in zip(budget["ranks"], (last, first), strict=True):
        rank.update(compute=str(core), compute_threads=2, launch=str(core), autograd=str(core),
                    communication=str(core), loader=f"{first},{last}", loader_nice=3)  # fmt: skip
    (train.folder / "mine.json").write_text(json.dumps(budget))
    (train.folder / "RUN").rename(train.folder / "BEFORE")
    ranks = train("--budget", "mine.json")
    assert [rank["cores"] for rank in ranks] == [[last], [first]]
    assert [rank["threads"] for rank in ranks] == [2, 2]
    assert {tuple(worker[0]) for rank in ranks for worker in rank["workers"]} == {(first, last)}
    assert {tuple(cores) for cores in ranks[0]["progress"]} == {(last,)}


def test_off_leaves_everything_to_the_system(train):
    for rank in train("--no-bind"):
        assert rank["cores"] == ALLOWED
        assert rank["variable"] is None
        assert all(worker == [ALLOWED, rank["priority"]] for worker in rank["workers"])
    assert train.budget()["state"] == "off"


def test_a_user_who_sets_threads_has_them(train):
    for rank in train(env={"OMP_NUM_THREADS": "3"}):
        assert (rank["cores"], rank["variable"]) == (ALLOWED, "3")
        assert all(worker == [ALLOWED, rank["priority"]] for worker in rank["workers"])
    assert "OMP_NUM_THREADS=3 is yours: threads and cores stay as they are" in train.err


@two_cores
def test_a_script_that_sets_threads_has_them_and_says_so(train):
    wanted = 7
    if wanted <= len(ALLOWED) // 2:
        pytest.skip("a rank has as many cores here")
    for rank in train(args=["threads"]):
        assert (rank["cores"], rank["threads"]) == (ALLOWED, wanted)
    assert train.err.count("the script sets 7 compute threads in place of the budget's") == 1


def test_fewer_cores_than_ranks_bind_nothing_and_say_so(train):
    core = str(ALLOWED[0])
    environ = {"SLURM_JOB_ID": "7"}  # of a job's script, which starts this launcher
    ranks = train(prefix=("taskset", "-c", core), env=environ)
    assert [rank["threads"] for rank in ranks] == [1, 1]
    assert train.budget()["state"] == "unbound"
    assert "2 ranks share 1 core. Ask for more: #SBATCH --cpus-per-task=" in train.err


def test_the_two_options_for_one_setting_are_not_given_together(tmp_path):
    done = paceline(tmp_path, "run", "--budget", "off", "--bind", "train.py")
    assert done.code == 2
    assert "--budget and --bind or --no-bind say the same" in done.err
