"""`paceline record`: ranks that something else has started; and scripts that record themselves."""

import json
import os
import signal
import subprocess
import sys

import pytest
from support.launching import SCRIPTS, Launched, await_true, last_json, paceline

from paceline.core.errors import PacelineError
from paceline.runs.folder import RunFolder, RunState
from paceline.trace.format.files import read_status, trace_name

TRAIN = SCRIPTS / "train.py"
BIN = os.path.dirname(sys.executable)  # noqa: PTH120  # beside it stands torchrun
TORCHRUN = (f"{BIN}/torchrun", "--standalone", "--nproc-per-node", 2)


def record(folder, *command, **options):
    return paceline(folder, "record", "--json", "--out", "RUN", "--", *command, **options)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import os\nos.environ['OWN'] = 'here'\n")
    environ = {"PYTHONPATH": str(folder / "site")}
    workers = ("--workers", 1, "--context", "spawn")
    return record(folder, *TORCHRUN, TRAIN, "--steps", 30, *workers, env=environ)


def test_the_ranks_of_torchrun_are_recorded_and_no_other_process(recorded):
    """Neither torchrun itself nor the loader's workers, which are fresh interpreters here."""
    assert recorded.code == 0, recorded.err
    run = RunFolder(recorded.folder / "RUN")
    assert sorted(path.name for path in run.trace.iterdir()) == [trace_name(0), trace_name(1)]
    assert [(rank.rank, rank.steps) for rank in run.read_result().ranks] == [(0, 30), (1, 30)]
    result = run.read_result()
    assert (result.world_size, run.read_config()["world_size"]) == (2, None)
    started_ns, read_ns = (
        run.file(f"{name}.json").stat().st_mtime_ns for name in ("config", "versions")
    )
    assert started_ns <= read_ns  # config.json was written first, and only then: `newest_run`
    assert run.state() is RunState.FINISHED
    assert all(read_status(run.trace / trace_name(rank)).closed for rank in range(2))
    assert recorded.running() == []  # torchrun leaves empty folders of its own


def test_a_recorded_commands_output_is_the_commands_and_the_result_is_json(recorded):
    assert json.loads(recorded.out) == json.loads(
        (recorded.folder / "RUN" / "result.json").read_text()
    )
    assert '{"backend": "gloo", "main": "__main__"}' in recorded.err
    assert recorded.err.splitlines()[-1] == "next: paceline why RUN, paceline report RUN"


def test_a_script_without_a_process_group_is_rank_0_and_the_users_sitecustomize_runs(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import os\nos.environ['OWN_SITE'] = 'x'\n")
    command = (sys.executable, SCRIPTS / "alone.py", 7)
    environ = {"PYTHONPATH": str(tmp_path / "site")}
    done = paceline(tmp_path, "record", "--out", "RUN", "--", *command, env=environ)
    assert done.code == 0, done.err
    assert done.out == "x True\n"
    (rank,) = RunFolder(tmp_path / "RUN").read_result().ranks
    assert (rank.rank, rank.steps) == (0, 7)


def test_a_command_that_trains_nothing_is_told_what_to_do(tmp_path):
    done = paceline(tmp_path, "record", "--out", "RUN", "--", sys.executable, "-c", "print(1)")
    assert done.code == 0, done.err
    assert "no rank was recorded" in done.err
    assert "paceline.record('RUN')" in done.err


def test_a_command_that_fails_before_it_trains_fails(tmp_path):
    done = record(tmp_path, sys.executable, "-c", "raise SystemExit(7)")
    assert done.code == 1
    error = json.loads(done.out)["error"]
    assert error["what"] == f"{sys.executable} ended with exit code 7"
    assert RunFolder(tmp_path / "RUN").read_result().exit_code == 1


def test_what_cannot_be_recorded_is_refused_before_anything_is_written(tmp_path):
    done = record(tmp_path, sys.executable, "-I", TRAIN)
    assert done.code == 2
    error = json.loads(done.out)["error"]
    assert "-I ignores its environment" in error["what"]
    assert "import paceline; paceline.record('RUN')" in error["fix"]
    assert not (tmp_path / "RUN").exists()


def test_a_script_records_itself(tmp_path):
    """Started by plain python: no launcher writes a result, the trace says all."""
    command = [sys.executable, str(SCRIPTS / "alone.py"), "9", str(tmp_path / "RUN")]
    subprocess.run(command, check=True, cwd=tmp_path, timeout=120, capture_output=True)
    status = read_status(tmp_path / "RUN" / "trace" / trace_name(0))
    assert (status.step, status.closed, status.world_size) == (9, True, 1)
    run = RunFolder(tmp_path / "RUN")
    assert (run.state(), run.state_words()) == (RunState.UNKNOWN, "")
    why = paceline(tmp_path, "why", "RUN")
    assert "One rank took 9 steps" in why.out, why.err
    again = subprocess.run(command, check=False, cwd=tmp_path, timeout=120, capture_output=True)
    assert b"the folder holds another run (" in again.stderr
    assert b"a trace of rank 0, of an earlier run or of another process. Name ano" in again.stderr


@pytest.mark.campaign("launchers")
def test_ranks_that_a_script_forks_are_recorded(tmp_path):
    done = record(tmp_path, sys.executable, SCRIPTS / "forks.py")
    assert done.code == 0, done.err
    result = RunFolder(tmp_path / "RUN").read_result()
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 8), (1, 8)]
    assert all(read_status(tmp_path / "RUN/trace" / trace_name(rank)).closed for rank in range(2))
    assert done.running() == []


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("SIGKILL", 5)])
def test_the_rank_that_failed_first_is_named(tmp_path, how, code):
    done = record(tmp_path, *TORCHRUN, TRAIN, "--steps", 40, "--fail", 1, 9, how)
    assert done.code == code, done.err
    failure = RunFolder(tmp_path / "RUN").read_result().failure
    assert (failure.rank, failure.step, failure.phase) == (1, 9, "backward")
    if how == "raise":
        assert failure.error == "ValueError('the loss is not finite')"
    else:
        assert "ended without closing its trace" in failure.error
    assert done.running() == []


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
def test_a_stopped_or_killed_recorder_leaves_no_ranks_behind(tmp_path, name):
    command = ("record", "--out", "RUN", "--", *TORCHRUN, TRAIN, "--steps", 10**6)

    def steps():
        try:
            return read_status(tmp_path / "RUN" / "trace" / trace_name(1)).step
        except PacelineError:
            return 0

    with Launched(tmp_path, *command) as running:
        await_true(lambda: steps() >= 3, "three steps")
        running.process.send_signal(getattr(signal, name))
        running.wait()
        await_true(lambda: not running.running(), "the ranks to end")
    state = RunFolder(tmp_path / "RUN").state()
    assert state is (RunState.STOPPED if name == "SIGINT" else RunState.LAUNCHER_KILLED)


@pytest.mark.campaign("launchers")
def test_the_weights_below_a_recorded_torchrun_are_those_of_torchrun(tmp_path):
    from support.launching import EXAMPLES

    environ = {"OMP_NUM_THREADS": "1"}
    digits = (EXAMPLES / "ddp_digits.py", "--epochs", 2)
    done = paceline(tmp_path, "record", "--", *TORCHRUN, *digits, env=environ)
    plain = subprocess.run(
        [*map(str, TORCHRUN), *map(str, digits)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert last_json(done.out) == last_json(plain.stdout)
