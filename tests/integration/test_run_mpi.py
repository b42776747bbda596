"""Ranks as tasks that others start: mpirun's, and tasks started by hand with Open MPI's names."""

import json
import os
import signal
import sys
import uuid

import pytest
from launching import SCRIPTS, Launched, await_true, paceline

from paceline.core.errors import PacelineError
from paceline.runs.result import load_result
from paceline.trace.files import read_status, trace_name
from paceline.trace.merge import load_run

pytestmark = pytest.mark.campaign("mpi")

TRAIN = SCRIPTS / "train.py"
MPIEXEC = (f"{os.path.dirname(sys.executable)}/mpiexec", "-n", "2")  # noqa: PTH120  # as it is
CORES = """
import os, time, torch.distributed as dist
dist.init_process_group("gloo")
for rank in range(2):
    dist.barrier()
    if rank == dist.get_rank():
        print(*sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"], flush=True)
dist.barrier()
"""


def tasks(folder, *args, prefixes=((), ())):
    """Start two tasks as Open MPI does."""
    name = uuid.uuid4().hex
    started = []
    for rank, prefix in enumerate(prefixes):
        environ = {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": name,
        }
        command = ("run", "--out", "RUN", *args)
        started.append(
            Launched(folder, *command, prefix=prefix, env=environ, threads=0, own_group=True)
        )
    return started


def step_of(run, rank):
    try:
        return read_status(run / "trace" / trace_name(rank)).step
    except PacelineError:
        return 0


def test_a_killed_rank_is_named_with_signal_and_step(tmp_path):
    how = ("--steps", 40, "--fail", 1, 17, "SIGKILL")
    done = paceline(tmp_path, "run", "--out", "RUN", TRAIN, *how, prefix=MPIEXEC)
    assert done.code == 5, done.err
    assert "rank 1 was killed by SIGKILL\n  where: step 17, in backward" in done.err
    assert "failed first" not in done.err
    result = load_result(tmp_path / "RUN")
    assert result.exit_code == 5
    failure = result.failure
    assert (failure.rank, failure.signal, failure.step) == (1, "SIGKILL", 17)
    assert not (tmp_path / "RUN" / "meeting").exists()
    done.assert_nothing_left()


def test_a_rank_killed_after_rank_0_is_done_is_no_success(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, threading\n"
        "if os.environ['RANK'] == '1':\n"
        "    done, never = 'RUN/meeting/rank-00000.exit', threading.Event()\n"
        "    while not os.path.exists(done):\n"
        "        never.wait(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = paceline(tmp_path, "run", "--out", "RUN", script, prefix=MPIEXEC)
    assert done.code == 5, done.err
    assert load_result(tmp_path / "RUN").failure.rank == 1


def test_ranks_that_do_not_notice_are_stopped(tmp_path):
    """No collective breaks under rank 0, which would otherwise run for ever."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "if os.environ['RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "signal.signal(signal.SIGINT, lambda *_: None)\n"
        "while True:\n"
        "    signal.pause()\n"
    )
    done = paceline(tmp_path, "run", "--out", "RUN", script, prefix=MPIEXEC)
    assert done.code == 5, done.err
    assert "rank 1 was killed by SIGSEGV" in done.err
    done.assert_nothing_left()


def test_a_taken_folder_is_refused_by_all_tasks(tmp_path):
    first = paceline(tmp_path, "run", "--out", "RUN", TRAIN, prefix=MPIEXEC)
    assert first.code == 0, first.err
    run = tmp_path / "RUN"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert sorted(one.name for one in run.iterdir()) == [
        *("config.json", "machine.json", "result.json", "trace", "versions.json")
    ]
    for task in [one.wait() for one in tasks(tmp_path, TRAIN)]:
        assert task.code == 2, task.err
        assert "not empty" in task.err
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_stop_signal_stops_all_and_keeps_the_traces(tmp_path, name):
    started = tasks(tmp_path, TRAIN, "--steps", 10**6)
    run = tmp_path / "RUN"
    await_true(lambda: min(step_of(run, 0), step_of(run, 1)) >= 5, "five steps")
    for task in started:
        task.process.send_signal(getattr(signal, name))
    for task in [one.wait() for one in started]:
        assert task.code == 130, task.err
        assert f"stopped by {name}" in task.err
        task.assert_nothing_left()
    result = load_result(run)
    assert (result.exit_code, result.failure) == (130, None)
    assert all(one.status.step >= 5 for one in load_run(run).ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_task_stops_the_others_too(tmp_path, rank):
    started = tasks(tmp_path, TRAIN, "--steps", 10**6)
    run = tmp_path / "RUN"
    await_true(lambda: min(step_of(run, 0), step_of(run, 1)) >= 1, "the first step")
    started[rank].process.terminate()
    assert [one.wait().code for one in started] == [130, 130]
    assert load_result(run).exit_code == 130


def test_a_signal_before_all_are_here(tmp_path):
    environ = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    zero = Launched(
        tmp_path, "run", "--out", "RUN", TRAIN, env={**environ, "OMPI_COMM_WORLD_RANK": "0"}
    )
    await_true((tmp_path / "RUN/meeting/rank-00000.hello").exists, "rank 0 to wait for rank 1")
    zero.process.terminate()
    assert zero.wait().code == 130
    assert load_result(tmp_path / "RUN").exit_code == 130
    zero.assert_nothing_left()


def test_a_signal_while_the_others_are_awaited(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nwhile os.environ['RANK'] == '1':\n    signal.pause()\n")
    started = tasks(tmp_path, script)
    await_true((tmp_path / "RUN/meeting/rank-00000.exit").exists, "rank 0's end")
    started[0].process.terminate()
    assert [one.wait().code for one in started] == [130, 130]


def test_tasks_that_share_their_cores_divide_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CORES)
    started = tasks(tmp_path, script)
    cores = sorted(os.sched_getaffinity(0))
    told = [list(map(int, one.wait().out.split())) for one in started]
    if len(cores) < 2:
        assert [one[-1] for one in told] == [1, 1]
        return
    assert sorted(told[0][:-1] + told[1][:-1]) == cores
    assert [one[-1] for one in told] == [len(told[0]) - 1, len(told[1]) - 1]


def test_tasks_that_are_bound_stay_where_they_are(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CORES)
    cores = sorted(os.sched_getaffinity(0))
    mine = (cores[-1], cores[0])  # not as we would divide them
    bound = [("taskset", "-c", str(core)) for core in mine]
    told = [one.wait().out.split() for one in tasks(tmp_path, script, prefixes=bound)]
    if len(cores) > 1:
        assert told == [[str(core), "1"] for core in mine]


def test_all_tasks_tell_the_same_error(tmp_path):
    for task in [one.wait() for one in tasks(tmp_path, "--json", TRAIN, "--fail", 1, 3, "SIGKILL")]:
        assert task.code == 5
        assert json.loads(task.out)["error"]["what"] == "rank 1 was killed by SIGKILL"
