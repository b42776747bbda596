"""`paceline run` of modules, of programs that are not Python, and of scripts that spawn ranks."""

import json
import sys

import pytest
from support.launching import SCRIPTS, last_json, paceline

from paceline.runs.folder import RunFolder

TRAIN = SCRIPTS / "train.py"
SEES = """
import __main__, os, pickle, sys
from . import helper
class Thing: pass
pickle.loads(pickle.dumps(Thing()))
print([__name__, __package__, __spec__.name, __main__.Thing is Thing, helper.__name__,
       os.path.basename(sys.argv[0]), sys.argv[1:], sys.path[0] == os.getcwd()])
print(sys.argv[0], file=sys.stderr)
"""


def test_a_module_sees_what_python_m_shows_it_and_lines_carry_their_rank(tmp_path):
    package = tmp_path / "own" / "deep"
    package.mkdir(parents=True)
    for name in ("own/__init__.py", "own/deep/__init__.py", "own/deep/helper.py"):
        (tmp_path / name).write_text("")
    (package / "train.py").write_text(SEES)
    options = ("--no-record", "--tag-output", "--out", "RUN", "-n", 2)
    done = paceline(tmp_path, "run", *options, "-m", "own.deep.train", "--out", "-m")
    assert done.code == 0, done.err
    seen = ["__main__", "own.deep", "own.deep.train", True, "own.deep.helper", "train.py"]
    line = f"{[*seen, ['--out', '-m'], True]}"
    assert sorted(done.out.splitlines()) == [f"[0] {line}", f"[1] {line}"]
    assert f"[1] {package / 'train.py'}" in done.err.splitlines()
    config = RunFolder(tmp_path / "RUN").read_config()
    assert (config["script"], config["args"]) == ("own.deep.train", ["--out", "-m"])
    assert config["values"]["tag_output"] == {"value": True, "provenance": "flag"}


def test_a_module_that_does_not_exist_is_misuse(tmp_path):
    done = paceline(tmp_path, "run", "--json", "-m", "nothing.train")
    assert done.code == 2
    assert json.loads(done.out)["error"]["what"] == "no module named 'nothing'"


def test_the_output_of_a_killed_rank_is_kept(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        "print('half a line', end='')\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = paceline(tmp_path, "run", "--no-record", "--tag-output", "-n", 2, script)
    assert done.code == 5, done.err
    assert sorted(done.out.splitlines()) == ["[0] half a line", "[1] half a line"]
    done.assert_nothing_left()


@pytest.mark.campaign("launchers")
def test_a_shell_script_is_started_on_each_rank_and_its_python_is_recorded(tmp_path):
    """A helper that it starts before, with the same rank, is not taken for the rank."""
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/sh\n"
        f"{sys.executable} -c 'import torch' || exit 9\n"
        f'exec {sys.executable} {TRAIN} "$@"\n'
    )
    script.chmod(0o755)
    done = paceline(tmp_path, "run", "-n", 2, "--out", "RUN", "./train.sh", "--steps", 30)
    assert done.code == 0, done.err
    assert last_json(done.out) == {"backend": "gloo", "main": "__main__"}
    assert "train.sh is not a Python script" in done.err
    result = RunFolder(tmp_path / "RUN").read_result()
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 30), (1, 30)]
    assert result.ranks[0].loop_wall_s > 0
    done.assert_nothing_left()


def test_a_container_below_run_is_told_that_nothing_is_recorded(tmp_path):
    """It was announced as a program whose Python processes are recorded, and `why` as the next."""
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    done = paceline(tmp_path, "run", "--out", "RUN", "./docker", "run", "image")
    assert done.code == 0, done.err
    assert "docker starts containers: its ranks are not recorded" in done.err
    assert "paceline.record('RUN')" in done.err
    assert "no rank was recorded" in done.err
    assert "next: paceline why" not in done.err


def test_a_program_that_cannot_be_executed_says_so(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/no/such/shell\n")
    script.chmod(0o755)
    done = paceline(tmp_path, "run", "--out", "RUN", "./train.sh")
    assert done.code == 1
    assert "cannot execute" in done.err
    assert RunFolder(tmp_path / "RUN").read_result().failure.error == "exit code 126"


def test_ranks_that_a_script_spawns_are_recorded(tmp_path):
    """It hung: the ranks inherited a variable that made each a client of the launcher's store."""
    done = paceline(tmp_path, "run", "--out", "RUN", SCRIPTS / "spawns.py", 10)
    assert done.code == 0, done.err
    result = RunFolder(tmp_path / "RUN").read_result()
    assert result.world_size == 2
    assert [(rank.rank, rank.steps) for rank in result.ranks] == [(0, 10), (1, 10)]
    assert sorted(path.name for path in (tmp_path / "RUN" / "trace").iterdir()) == [
        "rank-00000.trace",
        "rank-00001.trace",
    ]
    done.assert_nothing_left()


@pytest.mark.campaign("launchers")
def test_a_spawned_rank_that_raises_is_named(tmp_path):
    done = paceline(tmp_path, "run", "--out", "RUN", SCRIPTS / "spawns.py", 10, "fail")
    assert done.code == 1, done.err
    failure = RunFolder(tmp_path / "RUN").read_result().failure
    assert failure.rank == 1
    assert "the loss is not finite" in failure.error
