"""`paceline run` with real ranks: what it leaves, what it changes, and what it says on failure."""

import json
import os
import signal
import sys

import pytest
from support import forking
from support.launching import EXAMPLES, SCRIPTS, Launched, await_true, last_json, paceline

from paceline.core.allocator import KEEP
from paceline.core.breakdown import PHASES
from paceline.core.errors import PacelineError
from paceline.runs.folder import CONFIG_VERSION, RunFolder, RunState
from paceline.trace.format.files import read_status, trace_name
from paceline.trace.merge import load_run

DIGITS = EXAMPLES / "ddp_digits.py"
TRAIN = SCRIPTS / "train.py"
BIN = os.path.dirname(sys.executable)  # noqa: PTH120  # beside it stand torchrun and mpiexec


def steps_of(run, ranks=2):
    """Return how far each rank of a run in progress is; 0 before its trace is there."""
    found = []
    for rank in range(ranks):
        try:
            found.append(read_status(run / "trace" / trace_name(rank)).step)
        except PacelineError:
            found.append(0)
    return found


# --- an ordinary script, unchanged ---------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    return paceline(folder, "run", "-n", 2, "--out", "RUN", DIGITS, "--epochs", 5)


def test_the_result_is_as_designed(digits):
    assert digits.code == 0, digits.err
    result = json.loads((digits.folder / "RUN" / "result.json").read_text())
    assert result["version"] == 1
    assert result["kind"] == "run"
    assert result["exit_code"] == 0
    assert result["world_size"] == 2
    assert result["failure"] is None
    assert 0 < result["step_time_s"] < result["loop_wall_s"]
    assert set(result) == {
        *("version", "kind", "exit_code", "world_size", "step_time_s", "loop_wall_s"),
        *("ranks", "straggler", "failure", "stragglers", "shifts", "step_rule", "nan", "balance"),
    }
    for number, rank in enumerate(result["ranks"]):
        assert rank["rank"] == number
        assert rank["steps"] == 5 * 23
        assert rank["peak_memory_bytes"] > 100 << 20
        assert rank["dropped_count"] == 0
        assert [phase["name"] for phase in rank["phases"]] == list(PHASES)
    assert RunFolder(digits.folder / "RUN").read_result().ranks[1].steps == 115


def test_phases_explain_the_loop(digits):
    for rank in RunFolder(digits.folder / "RUN").read_result().ranks:
        explained = sum(phase.measured_s for phase in rank.phases if phase.name != "other")
        assert explained >= 0.97 * rank.loop_wall_s
        assert sum(phase.measured_s for phase in rank.phases) == pytest.approx(rank.loop_wall_s)


def test_the_weights_are_those_of_plain_torchrun(digits, tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    plain = forking.run(
        [*torchrun, "--nproc-per-node", "2", str(DIGITS), "--epochs", "5"],
        modules=forking.TORCH,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert last_json(digits.out) == last_json(plain.stdout)
    assert len(last_json(digits.out)["weights_sha256"]) == 64


def test_the_scripts_output_is_on_stdout_and_ours_on_stderr(digits):
    assert len(digits.out.splitlines()) == 1
    lines = digits.err.splitlines()
    assert lines[0].startswith("paceline run:")
    assert lines[-2].startswith("2 ranks, 115 steps, median ")
    assert lines[-1] == "next: paceline why RUN, paceline report RUN"


def test_the_folder_holds_what_the_design_lists(digits):
    run = digits.folder / "RUN"
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    assert names == [
        *("budget.json", "config.json", "machine.json", "result.json"),
        *("trace/rank-00000.trace", "trace/rank-00001.trace", "versions.json"),
    ]
    versions = json.loads((run / "versions.json").read_text())
    assert versions["version"] == 1
    assert versions["torch"].startswith("2.")


def test_a_good_run_leaves_nothing_behind(digits):
    digits.assert_nothing_left()


def test_the_ranks_inherit_the_allocator_that_the_start_of_the_run_names(tmp_path):
    script = tmp_path / "variables.py"
    script.write_text(
        "import json, os\n"
        "names = [name for name in os.environ if name.startswith('MALLOC_')]\n"
        "print(json.dumps({name: os.environ[name] for name in names}))\n"
    )
    unset = dict.fromkeys(KEEP, "")  # whatever the tests themselves run under
    done = paceline(tmp_path, "run", "--no-record", "--out", "RUN", script, env=unset)
    assert done.code == 0, done.err
    assert last_json(done.out) == KEEP
    assert "paceline run: allocator keep (" in done.err
    config = json.loads((tmp_path / "RUN" / "config.json").read_text())
    assert config["allocator"] == {"in_effect": "keep", "variables": KEEP}


# --- configuration, and what is refused before anything starts -------------------------------


@pytest.fixture
def hello(tmp_path):
    path = tmp_path / "hello.py"
    path.write_text("import sys; sys.stdout.write(f'hello {sys.argv[1:]}\\n')\n")
    return path


def test_each_value_is_written_with_its_provenance(tmp_path, hello):
    (tmp_path / "paceline.toml").write_text("[run]\nranks = 7\nbudget = 'off'\n")
    environ = {"PACELINE_RUN__RANKS": "2"}
    one_core = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    done = paceline(
        tmp_path,
        *("run", "--no-record", "--json", "--allocator", "system", "--out", "RUN"),
        *(hello, "--", "--out", "of the script"),
        env=environ,
        prefix=one_core,
    )
    assert done.code == 0, done.err
    config = json.loads((tmp_path / "RUN" / "config.json").read_text())
    assert config["version"] == 2
    values = config["values"]
    assert values["ranks"] == {"value": 2, "provenance": "environment"}
    assert values["record"] == {"value": False, "provenance": "flag"}
    assert values["budget"] == {"value": "off", "provenance": "file"}
    assert values["heartbeat_timeout_s"] == {"value": 60.0, "provenance": "default"}
    assert values["allocator"] == {"value": "system", "provenance": "flag"}
    assert config["allocator"] == {"in_effect": "system", "variables": {}}
    assert config["script"] == str(hello)
    assert config["args"] == ["--", "--out", "of the script"]
    assert config["world_size"] == 2
    # --no-record: no traces, but a result.
    assert list((tmp_path / "RUN" / "trace").iterdir()) == []
    # --json: one object on stdout; what the script prints goes to stderr.
    result = json.loads(done.out)
    assert result == json.loads((tmp_path / "RUN" / "result.json").read_text())
    assert result["ranks"] == []
    assert done.err.count("hello ['--', '--out', 'of the script']") == 2
    # Without traces nobody can say why; how it ended is said all the same.
    assert done.err.splitlines()[-1] == "2 ranks, no step recorded; folder: RUN"
    # More ranks than cores: a warning, no more.
    assert "warning: 2 ranks share 1 cores" in done.err


def test_a_misspelt_verb_is_told_its_nearest(tmp_path):
    done = paceline(tmp_path, "rnu", "script.py")
    assert done.code == 2
    assert "Did you mean 'run'?" in done.err


def test_a_missing_script_is_misuse(tmp_path):
    done = paceline(tmp_path, "run", "--json", "nothing.py")
    assert done.code == 2
    error = json.loads(done.out)["error"]
    assert error["code"] == "NotFound"
    assert error["where"] == "nothing.py"
    assert not list(tmp_path.glob("paceline-runs"))


def test_a_folder_that_is_not_empty_stays_untouched(tmp_path, hello):
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "mine.txt").write_text("precious")
    done = paceline(tmp_path, "run", "--out", "RUN", hello)
    assert done.code == 2
    assert "not empty" in done.err
    assert "--out" in done.err
    assert [path.name for path in (tmp_path / "RUN").iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, hello):
    (tmp_path / "file").write_text("")
    done = paceline(tmp_path, "run", "--out", "file/RUN", hello)
    assert done.code == 1
    assert "cannot make the run's folder" in done.err


@pytest.mark.parametrize(
    ("arguments", "environ", "said"),
    [
        (("-n", "0"), {}, "got 0"),
        (("-n", "x"), {}, "not a valid integer"),
        (("--rank", "2"), {}, "'--ranks'"),
        (("tests",), {}, "no such script"),
        ((".",), {}, "SCRIPT is a directory"),
        ((), {"PACELINE_RUN_RANKS": "2"}, "'PACELINE_RUN__RANKS'"),
        ((), {"PACELINE_RUN__RNAKS": "2"}, "'ranks'"),
        ((), {"PACELINE_RUN__RANKS": "two"}, "PACELINE_RUN__RANKS"),
        (("--machine", "none.json"), {}, "none.json"),
        (("--plan", "none.json"), {}, "none.json"),
    ],
)
def test_misuse_is_told_before_anything_is_written(tmp_path, hello, arguments, environ, said):
    done = paceline(tmp_path, "run", "--out", "RUN", *arguments, hello, env=environ)
    assert done.code == 2
    assert said in done.err
    assert not (tmp_path / "RUN").exists()


def test_a_dry_run_says_what_and_where_and_writes_nothing(tmp_path, hello):
    done = paceline(tmp_path, "run", "--dry-run", "-n", 2, hello)
    assert done.code == 0
    assert "world size 2, writing paceline-runs/hello-" in done.err
    done = paceline(
        tmp_path, "run", "--dry-run", "--json", "-n", 2, "--no-bind", hello, "--epochs", 1
    )
    intended = json.loads(done.out)
    assert (intended["dry_run"], intended["version"]) == (True, CONFIG_VERSION)
    assert intended["folder"].startswith("paceline-runs/hello-")
    assert (intended["script"], intended["args"]) == (str(hello), ["--epochs", "1"])
    assert intended["world_size"] == 2
    assert intended["values"]["budget"] == {"value": "off", "provenance": "flag"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hello.py"]


# --- scripts that fail -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raised(tmp_path_factory):
    folder = tmp_path_factory.mktemp("raised")
    return paceline(
        folder, "run", "--json", "-n", "2", "--out", "RUN", TRAIN, "--fail", "1", "3", "raise"
    )


def test_the_rank_that_raised_first_is_told_first(raised):
    assert raised.code == 1
    told = raised.err[raised.err.index("Traceback") :]
    assert "ValueError: the loss is not finite" in told.split("\n\n")[0]
    assert raised.err.index("rank 1:") < raised.err.index("Traceback")
    error = json.loads(raised.out)["error"]
    assert error["code"] == "ScriptFailed"
    assert error["what"] == "rank 1 failed first, in step 3 (backward)"
    assert error["why"] == "ValueError('the loss is not finite')"


def test_a_failed_run_keeps_its_result(raised):
    failure = json.loads((raised.folder / "RUN" / "result.json").read_text())["failure"]
    assert failure == {
        "rank": 1,
        "signal": "",
        "step": 3,
        "phase": "backward",
        "error": "ValueError('the loss is not finite')",
        "child": "",
    }
    assert min(len(rank.events) for rank in load_run(raised.folder / "RUN").ranks) > 0
    raised.assert_nothing_left()


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    how = [
        "--steps",
        "40",
        "--workers",
        "2",
        "--sharing",
        "file_system",
        "--fail",
        "1",
        "17",
        "SIGKILL",
    ]
    return paceline(folder, "run", "-n", "2", "--out", "RUN", TRAIN, *how)


def test_a_killed_rank_is_named_with_signal_step_and_phase(killed):
    assert killed.code == 5, killed.err
    assert "error: rank 1 was killed by SIGKILL\n  where: step 17, phase backward\n" in killed.err
    assert "Traceback" not in killed.err  # of rank 0, which only lost its peer
    result = RunFolder(killed.folder / "RUN").read_result()
    assert result.exit_code == 5
    assert result.failure.rank == 1
    assert (result.failure.signal, result.failure.step) == ("SIGKILL", 17)
    assert result.failure.phase == "backward"


def test_a_killed_worker_is_the_cause_whatever_its_rank_and_the_others_raise(tmp_path):
    """Torch raises in the loop, or a connection breaks, or a collective of another rank does."""
    options = ("--workers", 2, "--fail-at-sample", 1, 100, "SIGKILL")
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", TRAIN, *options)
    assert done.code == 5
    assert "error: a loader worker of rank 1 was killed by SIGKILL\n" in done.err
    done.assert_nothing_left()
    failure = RunFolder(tmp_path / "RUN").read_result().failure
    assert (failure.rank, failure.signal, failure.child) == (1, "SIGKILL", "a loader worker")


def test_tensors_of_unlike_length_on_gloo_are_named_with_their_bytes(tmp_path):
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", TRAIN, "--longer-on-rank-1")
    assert done.code == 1
    assert "error: the ranks gave unlike tensors to a collective" in done.err
    assert "rank 0 gave 4,000 bytes of float32 and rank 1 gave 6,000 bytes of float32" in done.err


def test_an_exception_of_a_worker_is_told_in_one_line(tmp_path):
    options = ("--workers", 1, "--fail-at-sample", 0, 60, "raise")
    done = paceline(tmp_path, "run", "--out", "RUN", TRAIN, *options)
    assert done.code == 1
    why = "    why: ValueError: the loss is not finite (in DataLoader worker process 0)\n"
    assert why in done.err
    assert "Original Traceback" in done.err.partition("error: rank 0 failed first")[0]


def test_a_killed_rank_leaves_no_process_shared_memory_or_file(killed):
    """Its loader's workers, and the tensors that they shared, go with it."""
    killed.assert_nothing_left()


def test_the_trace_of_a_killed_rank_is_readable(killed):
    ranks = load_run(killed.folder / "RUN").ranks
    assert [entry.rank for entry in ranks] == [0, 1]
    assert not ranks[1].complete


def test_a_rank_that_leaves_early_is_the_culprit_and_not_its_victim(tmp_path):
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", SCRIPTS / "leaves.py")
    assert done.code == 1, done.err
    assert "rank 1 left with exit code 0 while rank 0 still needed it" in done.err
    failure = RunFolder(tmp_path / "RUN").read_result().failure
    assert (failure.rank, failure.step, failure.signal) == (1, 7, "")
    why = paceline(tmp_path, "why", "RUN")
    assert why.out.startswith(
        "Rank 1 left with exit code 0 while rank 0 still needed it, in step 7"
    )


@pytest.mark.campaign("e2e")
def test_a_rank_that_somebody_terminates_is_named(tmp_path):
    done = paceline(
        tmp_path,
        "run",
        "-n",
        "2",
        "--out",
        "RUN",
        TRAIN,
        *["--deaf", "--fail", "1", "5", "SIGABRT"],
    )
    assert done.code == 5
    assert "rank 1 was killed by SIGABRT" in done.err
    assert "native code crashed" in done.err
    done.assert_nothing_left()


# --- stopped from outside ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "whom", ["launcher", pytest.param("all", marks=pytest.mark.campaign("e2e"))]
)
def test_ctrl_c_stops_all_ranks_and_keeps_the_traces(tmp_path, whom):
    arguments = ("run", "-n", 2, "--out", "RUN", TRAIN, "--steps", 10**6)
    with Launched(tmp_path, *arguments, own_group=True) as running:
        await_true(lambda: min(steps_of(tmp_path / "RUN")) >= 5, "five steps")
        if whom == "launcher":
            running.process.send_signal(signal.SIGINT)
        else:  # as a terminal does
            os.killpg(running.process.pid, signal.SIGINT)
        running.wait()
    assert running.code == 130, running.err
    assert "stopped by SIGINT" in running.err
    assert "paceline report RUN" in running.err
    running.assert_nothing_left()
    assert all(rank.status.step >= 5 for rank in load_run(tmp_path / "RUN").ranks)
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result.exit_code == 130
    assert result.failure is None
    assert all(rank.steps >= 1 for rank in result.ranks)


@pytest.mark.campaign("e2e")
def test_a_job_in_the_background_of_a_shell_keeps_its_traces_when_it_is_stopped(tmp_path):
    """The shell has it ignore SIGINT; a batch system has no terminal."""
    background = ("setsid", "sh", "-c", "trap '' INT; exec \"$@\"", "sh")
    arguments = ("run", "-n", 2, "--out", "RUN", TRAIN, "--steps", 10**6)
    with Launched(tmp_path, *arguments, prefix=background) as running:
        await_true(lambda: min(steps_of(tmp_path / "RUN")) >= 5, "five steps")
        running.process.send_signal(signal.SIGTERM)
        running.wait()
    assert running.code == 130, running.err
    assert all(rank.status.closed for rank in load_run(tmp_path / "RUN").ranks)
    running.assert_nothing_left()


def test_a_killed_launcher_takes_its_ranks_along(tmp_path):
    arguments = ("run", "-n", 2, "--out", "RUN", TRAIN, "--steps", 10**6)
    with Launched(tmp_path, *arguments) as running:
        await_true(lambda: min(steps_of(tmp_path / "RUN")) >= 1, "the first step")
        assert RunFolder(tmp_path / "RUN").state() is RunState.RUNNING
        running.process.kill()
        await_true(lambda: not running.running(), "the ranks to end")
        assert running.wait().code == -signal.SIGKILL
    assert RunFolder(tmp_path / "RUN").state() is RunState.LAUNCHER_KILLED
    for command in (("why", "RUN"), ("trace", "stats", "RUN"), ("report", "RUN")):
        said = paceline(tmp_path, *command)
        assert "its launcher was killed" in said.out.replace("\n", " "), said.out + said.err
    state = json.loads(paceline(tmp_path, "why", "RUN", "--json").out)["state"]
    assert state == "launcher killed"


# --- workers and launchers of other kinds --------------------------------------------------------


def test_workers_that_are_spawned_find_the_scripts_classes(tmp_path):
    done = paceline(tmp_path, "run", "--out", "RUN", TRAIN, "--workers", 1, "--context", "spawn")
    assert done.code == 0, done.err
    assert last_json(done.out) == {"backend": "gloo", "main": "__main__"}
    assert RunFolder(tmp_path / "RUN").read_result().ranks[0].steps == 20
    done.assert_nothing_left()


def test_under_mpirun_each_task_is_a_rank(tmp_path):
    mpirun = (f"{BIN}/mpiexec", "-n", "2")
    done = paceline(tmp_path, "run", "--out", "RUN", TRAIN, prefix=mpirun)
    assert done.code == 0, done.err
    assert last_json(done.out)["backend"] == "gloo"
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result.world_size == 2
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 20), (1, 20)]
    done.assert_nothing_left()


def test_under_mpirun_another_world_size_is_refused(tmp_path, hello):
    mpirun = (f"{BIN}/mpiexec", "-n", "2")
    done = paceline(tmp_path, "run", "-n", 3, "--out", "RUN", hello, prefix=mpirun)
    assert done.code == 2
    assert "3 ranks were asked for, but this mpich step has 2" in done.err
    assert not (tmp_path / "RUN").exists()
    unnamed = paceline(tmp_path, "run", hello, prefix=mpirun)
    assert unnamed.code == 2
    assert "Name it with --out" in unnamed.err


@pytest.mark.campaign("mpi")
def test_under_mpirun_a_rank_that_raises_ends_the_run(tmp_path):
    mpirun = (f"{BIN}/mpiexec", "-n", "2")
    done = paceline(
        tmp_path, "run", "--out", "RUN", TRAIN, "--fail", "1", "3", "raise", prefix=mpirun
    )
    assert done.code == 1
    assert "ValueError: the loss is not finite" in done.err
    assert (
        RunFolder(tmp_path / "RUN").read_result().failure.error
        == "ValueError('the loss is not finite')"
    )
    done.assert_nothing_left()
