"""What a run checks before it starts, and what its summary makes of traces."""

import json

import pytest
from support.traces import data_parallel, write_run

from paceline.core.clock import ManualClock
from paceline.core.config import resolve
from paceline.core.errors import (
    ConfigError,
    DestinationExists,
    Missing,
    NotFound,
    UsageError,
)
from paceline.core.machine import Machine
from paceline.launch import prepare as prepare_module
from paceline.launch import run as run_module
from paceline.launch.failure_report import read_reports, write_report
from paceline.launch.folder import refuse_taken, set_aside
from paceline.launch.options import RunConfig
from paceline.launch.prepare import claim_folder, prepare
from paceline.launch.program import find_program
from paceline.launch.summary import summarize
from paceline.probe.machine_file import known_machine
from paceline.runs.launcher import this_launcher
from paceline.runs.versions import versions

MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
NAMES = ("PMI_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID")


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def ready(script, run=None, **flags):
    program = find_program(str(script), is_module=False)
    return prepare(program, [], resolve(RunConfig, flags=flags), run, ManualClock())


def test_a_job_is_ready(script, tmp_path):
    job = ready(script, tmp_path / "RUN", ranks=1)
    assert job.ranks == 1
    assert job.task is None
    assert job.warnings == ()
    assert not (tmp_path / "RUN").exists()


def test_options_of_several_nodes_are_not_ignored_on_one(script, tmp_path):
    with pytest.raises(UsageError, match="node-rank is 1, nnodes is 1"):
        ready(script, tmp_path / "RUN", node_rank=1)
    assert ready(script, tmp_path / "RUN", node_rank=0).warnings == ()
    job = ready(script, tmp_path / "RUN", rdzv_endpoint="node0", rdzv_id="job")
    (warning,) = job.warnings
    assert "--rdzv-endpoint and --rdzv-id without --nnodes changes nothing" in warning


def test_a_folder_is_chosen_that_is_free(script, tmp_path):
    first = ready(script).run_folder
    assert first.parent.name == "paceline-runs"
    assert first.name.startswith("train-2023")
    first.mkdir(parents=True)
    assert ready(script).run_folder.name == first.name + "-2"
    assert claim_folder(ready(script)).run_folder.name == first.name + "-2"


def test_two_runs_of_one_second_get_folders_of_their_own(script):
    """The name has the second in it, and was checked before the folder was made (B7)."""
    jobs = [ready(script) for _ in range(3)]
    assert len({job.run_folder for job in jobs}) == 1
    runs = [claim_folder(job).run_folder for job in jobs]
    assert [run.name.removeprefix(jobs[0].run_folder.name) for run in runs] == ["", "-2", "-3"]
    assert all((run / "trace").is_dir() for run in runs)


@pytest.mark.parametrize("exists", [False, True])
def test_of_two_runs_only_one_gets_a_folder_that_the_user_named(script, tmp_path, exists):
    if exists:
        (tmp_path / "RUN").mkdir()
    first, second = ready(script, tmp_path / "RUN"), ready(script, tmp_path / "RUN")
    assert claim_folder(first).run_folder == tmp_path / "RUN"
    with pytest.raises(DestinationExists, match="not empty"):
        claim_folder(second)


def test_a_folder_that_rank_0_has_just_made_is_free_for_the_others(tmp_path):
    refuse_taken(tmp_path / "none", 1)
    refuse_taken(tmp_path, 0)
    for folder in ("trace", "rendezvous"):
        (tmp_path / folder).mkdir()
    for name in ("config.json", ".machine.json.7.partial", "rendezvous/root.json"):
        (tmp_path / name).write_text("")
    refuse_taken(tmp_path, 1)
    with pytest.raises(DestinationExists):
        refuse_taken(tmp_path, 0)


@pytest.mark.parametrize("name", ["result.json", "mine.txt", "trace/rank-00000.trace"])
def test_a_folder_of_an_earlier_run_is_refused_by_all(tmp_path, name):
    (tmp_path / "trace").mkdir()
    (tmp_path / name).write_text("")
    for rank in (0, 1):
        with pytest.raises(DestinationExists):
            refuse_taken(tmp_path, rank)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationExists):
        refuse_taken(tmp_path / "file", 1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rendezvous_timeout_s": 0.0}, "rendezvous_timeout_s must be above 0"),
        ({"stop_timeout_s": float("nan")}, "stop_timeout_s must be above 0"),
        ({"heartbeat_interval_s": 40.0}, "at least twice heartbeat_interval_s"),
        ({"heartbeat_timeout_s": 19.0}, "at least twice heartbeat_interval_s"),
    ],
)
def test_deadlines_that_cannot_hold_are_refused(settings, words):
    with pytest.raises(UsageError, match=words):
        RunConfig(**settings)
    longer = RunConfig(heartbeat_interval_s=30.0, heartbeat_timeout_s=600.0)
    assert longer.deadlines.heartbeat_timeout_s == 600.0


def test_what_cannot_be_is_refused(script, tmp_path, monkeypatch):
    with pytest.raises(NotFound):
        ready(tmp_path / "none.py")
    with pytest.raises(UsageError, match="at least 1, got 0"):
        ready(script, ranks=0)
    with pytest.raises(DestinationExists):
        ready(script, script)  # a file
    (tmp_path / "empty").mkdir()
    assert ready(script, tmp_path / "empty").run_folder == tmp_path / "empty"
    monkeypatch.setattr(prepare_module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(Missing) as caught:
        ready(script)
    assert caught.value.exit_code == 3
    assert "pip install" in caught.value.fix


def test_in_a_slurm_step_each_task_is_one_rank(script, tmp_path, monkeypatch):
    for name, value in MPICH.items():
        monkeypatch.setenv(name, value)
    assert ready(script, tmp_path / "RUN").ranks == 2
    with pytest.raises(UsageError, match="3 ranks"):
        ready(script, tmp_path / "RUN", ranks=3)
    with pytest.raises(UsageError, match="no common name"):
        ready(script)


def test_tasks_of_a_named_step_choose_the_same_folder(script, monkeypatch):
    openmpi = {"RANK": "0", "SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    for name, value in openmpi.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    monkeypatch.setenv("PMIX_NAMESPACE", "prterun-1")
    assert str(ready(script).run_folder) == "paceline-runs/train-prterun-1"


def test_more_ranks_than_cores_are_warned_of(script, tmp_path):
    job = ready(script, tmp_path / "RUN", ranks=4096)
    assert len(job.warnings) == 1
    assert job.warnings[0].startswith("4096 ranks share")


def test_the_configuration_counts_ranks(script):
    with pytest.raises(ConfigError):
        ready(script, ranks="2")


def test_a_summary_of_traces(tmp_path):
    run = write_run(tmp_path / "RUN", data_parallel(2, 20))
    result = summarize(run, 2, 0)
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 20), (1, 20)]
    assert result.step_time_s == pytest.approx(0.010)
    assert result.loop_wall_s == pytest.approx(0.2)
    assert result.straggler is None


def test_a_summary_of_nothing(tmp_path):
    result = summarize(tmp_path, 2, 1)
    assert (result.ranks, result.exit_code, result.world_size) == ((), 1, 2)


def test_a_run_whose_ranks_ended_well_is_good_whatever_a_process_of_theirs_raised(
    script, tmp_path, monkeypatch
):
    """A shell script that starts another program when the first fails ended with exit code 1."""
    job = claim_folder(ready(script, tmp_path / "RUN"))
    write_report(RuntimeError("no GPU"), job.run_folder, 0)
    monkeypatch.setattr(run_module, "_run_ranks", lambda *_: ())
    result = run_module.execute(job, machine=known_machine(None), clock=ManualClock())
    assert (result.exit_code, result.failure) == (0, None)


def test_a_syntax_error_of_a_script_is_said_with_its_line(tmp_path):
    (tmp_path / "trace").mkdir()
    try:
        compile("print(\n", "somewhere/syn.py", "exec")
    except SyntaxError as error:
        write_report(error, tmp_path, 0)
    (report,) = read_reports(tmp_path)
    assert report["error"] == "SyntaxError: '(' was never closed (syn.py, line 1)"


CARRIED = """Caught ValueError in DataLoader worker process 3.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
OSError: [Errno 5] broken

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "own.py", line 7, in __getitem__
    raise ValueError("image 333 is corrupt\\nand more")
own.Corrupt: image 333 is corrupt
and more
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError(CARRIED), "own.Corrupt: image 333 is corrupt (in DataLoader worker process 3)"),
        (
            ValueError("\n\n-- Process 1 terminated\n" + CARRIED[46:]),
            "own.Corrupt: image 333 is corrupt",
        ),
        (ValueError("two\nlines"), "ValueError: two"),
        (ValueError("one"), "ValueError('one')"),
    ],
)
def test_an_exception_is_told_in_one_line_and_the_innermost_of_those_it_carries(
    error, line, tmp_path
):
    (tmp_path / "trace").mkdir()
    write_report(error, tmp_path, 0)
    (report,) = read_reports(tmp_path)
    assert report["error"] == line


def test_a_rank_that_is_stopped_while_it_formats_its_traceback_has_a_report(tmp_path, monkeypatch):
    """Its launcher stopped it for the failure of another rank, and it was blamed instead."""
    (tmp_path / "trace").mkdir()
    lost = "[gloo/transport/tcp/pair.cc:537] Connection closed by peer"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("traceback.format_exception", stopped)
        with pytest.raises(KeyboardInterrupt):
            write_report(RuntimeError(lost), tmp_path, 0)
    (report,) = read_reports(tmp_path)
    assert report["traceback"] == f"RuntimeError: {lost}"
    write_report(RuntimeError(lost), tmp_path, 0)
    (whole,) = read_reports(tmp_path)
    assert whole["traceback"].endswith(f"RuntimeError: {lost}\n")


def test_an_earlier_run_is_set_aside_and_nothing_else(tmp_path):
    run = tmp_path / "RUN"
    assert set_aside(run) is None
    run.mkdir()
    assert set_aside(run) is None
    for number in (1, 2):
        (run / "trace").mkdir(parents=True)
        (run / "config.json").write_text(json.dumps({"number": number}))
        assert set_aside(run) == tmp_path / f"RUN.{number}"
        assert json.loads((tmp_path / f"RUN.{number}" / "config.json").read_text()) == {
            "number": number
        }
    run.mkdir()
    (run / "thesis.tex").touch()
    with pytest.raises(DestinationExists, match="exists and is not empty"):
        set_aside(run)


def test_a_run_that_goes_on_is_not_set_aside(tmp_path):
    (tmp_path / "RUN" / "trace").mkdir(parents=True)
    config = {"launcher": this_launcher()}
    (tmp_path / "RUN" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DestinationExists, match="still going on"):
        set_aside(tmp_path / "RUN")
    assert (tmp_path / "RUN" / "config.json").exists()


def test_a_job_that_is_started_again_keeps_its_earlier_attempt(script, tmp_path):
    first = claim_folder(ready(script, tmp_path / "RUN"))
    (first.run_folder / "config.json").write_text("{}")
    with pytest.raises(DestinationExists, match="--again"):
        ready(script, tmp_path / "RUN")
    again = claim_folder(ready(script, tmp_path / "RUN", again=True))
    assert again.run_folder == tmp_path / "RUN"
    assert (tmp_path / "RUN.1" / "config.json").exists()
    with pytest.raises(UsageError, match="--again needs the folder"):
        ready(script, None, again=True)


def test_versions_and_an_unknown_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine = known_machine(None)
    assert machine.devices[0].cores >= 1
    assert "not probed" in machine.missing[0]
    path = tmp_path / "some.json"
    path.write_text(Machine(name="other", devices=()).to_text())
    assert known_machine(path).name == "other"
    with pytest.raises(NotFound):
        known_machine(tmp_path / "none.json")
    assert json.loads(json.dumps(versions()))["version"] == 1
