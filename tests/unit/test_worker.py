"""One rank without recording: the script sees what `python script.py` would show it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from paceline.launch.budget import RankBudget


@pytest.fixture
def rank(tmp_path):
    (tmp_path / "RUN" / "trace").mkdir(parents=True)

    def run(body, *args, budget="", env=None, launcher=None, temporary=None):
        script = tmp_path / "scripts" / "script.py"
        script.parent.mkdir(exist_ok=True)
        script.write_text(body)
        place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
        environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        command = [sys.executable, "-m", "paceline.launch.worker", "--run", tmp_path / "RUN"]
        command += ["--launcher", launcher or os.getpid(), "--budget", budget, "--record", "off"]
        command += ["--temporary", temporary] if temporary else []
        command += ["--", script, *args]
        return subprocess.run(
            [str(word) for word in command],
            env={**environ, **place, **(env or {})},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    run.report = lambda: json.loads((tmp_path / "RUN/trace/rank-00001.failure").read_text())
    run.folder = tmp_path
    return run


SEES = """
import os, pickle, sys
class Thing: pass
import __main__
print(__name__, __main__.Thing is Thing, sys.argv[1:], os.path.basename(sys.path[0]), __file__)
pickle.loads(pickle.dumps(Thing()))
print("torch" in sys.modules)
"""


def test_the_script_is_main_with_its_own_arguments(rank):
    done = rank(SEES, "--", "--run", "mine", "--", "-x")
    assert done.returncode == 0, done.stderr
    script = rank.folder / "scripts" / "script.py"
    assert done.stdout.splitlines() == [
        f"__main__ True ['--', '--run', 'mine', '--', '-x'] scripts {script}",
        "False",
    ]


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3),
        ("sys.exit('no data')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError('bad')", 1),
    ],
)
def test_how_a_script_ends_is_the_exit_code(rank, statement, code):
    done = rank(f"import sys\n{statement}\n")
    assert done.returncode == code
    if "no data" in statement:
        assert done.stderr == "no data\n"
    failed = code not in (0, 130)
    assert (rank.folder / "RUN/trace/rank-00001.failure").exists() == failed
    if failed:
        report = rank.report()
        assert report["rank"] == 1
        assert "paceline" not in report["traceback"]  # our own frames are not the user's
        if "exit" in statement:  # python shows no traceback either
            assert report["traceback"] == ""
            assert report["error"] == f"exit code {code}, at line 2"
        else:
            assert statement in report["traceback"]


def test_a_syntax_error_is_a_failure_of_the_script(rank):
    assert rank("def broken(:\n").returncode == 1
    assert "SyntaxError" in rank.report()["error"]


def test_exit_functions_run_and_output_is_flushed(rank):
    done = rank("import atexit; atexit.register(print, 'bye'); print('hello')")
    assert done.stdout == "hello\nbye\n"


def test_threads_are_joined_before_the_end(rank):
    body = """
import threading
release = threading.Event()
threading.Thread(target=lambda: (release.wait(30), print("joined"))).start()
release.set()
"""
    assert rank(body).stdout == "joined\n"


BOUND = "import os; print(sorted(os.sched_getaffinity(0)), os.environ.get('OMP_NUM_THREADS'))"


def test_a_rank_is_bound_to_its_share(rank):
    core = max(os.sched_getaffinity(0))
    budget = RankBudget(rank=1, compute=str(core), loader=str(core))
    done = rank(BOUND, budget=json.dumps(budget.to_json()))
    assert done.stdout == f"[{core}] 1\n"


def test_without_a_budget_nothing_is_bound(rank):
    assert rank(BOUND).stdout == f"{sorted(os.sched_getaffinity(0))} None\n"


def test_a_report_that_cannot_be_written_goes_to_stderr(rank):
    (rank.folder / "RUN/trace/rank-00001.failure").mkdir()
    done = rank("raise ValueError('bad')")
    assert done.returncode == 1
    assert "ValueError: bad" in done.stderr


def test_a_rank_whose_launcher_is_gone_ends_itself(rank):
    """The kernel tells only of a launcher that dies later: an orphan from the start must look."""
    done = rank("open('ran', 'w').close()", launcher=os.getppid())
    assert done.returncode == -signal.SIGKILL
    assert not (rank.folder / "ran").exists()


def test_what_multiprocessing_keeps_in_files_is_in_the_folder_it_was_given(rank):
    body = "from multiprocessing import util; print(util.get_temp_dir())"
    assert rank(body, temporary=rank.folder).stdout == f"{rank.folder}\n"


def test_annotations_stay_objects(rank):
    """The worker's own __future__ is not the script's."""
    assert rank("def f(x: int): pass\nprint(f.__annotations__)").stdout == "{'x': <class 'int'>}\n"
