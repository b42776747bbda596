"""Paths that are not valid UTF-8, and a locale that knows ASCII alone: nothing is a traceback."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.launching import SCRIPTS

ODD = os.fsdecode(b"caf\xe9-\xff")  # Latin-1, and a byte that no encoding of names has
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def paceline_bytes(folder, *args, environ):
    """Run the command line; its output may be bytes of any kind."""
    return subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        cwd=folder,
        env={**os.environ, **environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(ASCII, id="ascii"),
        pytest.param({"LC_ALL": "C.UTF-8"}, id="utf-8", marks=pytest.mark.campaign("launchers")),
    ],
)
def test_a_run_of_odd_names_in_an_odd_folder(tmp_path, environ):
    folder = tmp_path / ODD
    folder.mkdir()
    shutil.copy(SCRIPTS / "alone.py", folder / f"{ODD}.py")
    run = f"{ODD}-RUN"
    done = paceline_bytes(folder, "run", "--out", run, f"{ODD}.py", "5", environ=environ)
    assert done.returncode == 0, done.stderr
    for command in (("why", run), ("report", run), ("trace", "stats", run)):
        said = paceline_bytes(folder, *command, environ=environ)
        assert said.returncode == 0, said.stderr
        assert b"Traceback" not in said.stderr
    config = json.loads((folder / run / "config.json").read_text())
    assert config["script"] == f"{ODD}.py"
    assert (folder / run / "report.html").stat().st_size > 1000
    result = json.loads((folder / run / "result.json").read_text())
    assert result["ranks"][0]["steps"] == 5
    failed = paceline_bytes(folder, "run", f"{ODD}-nothing.py", environ=environ)
    assert failed.returncode == 2
    assert b"Traceback" not in failed.stderr


@pytest.mark.campaign("launchers")
def test_a_recorded_command_of_odd_names(tmp_path):
    run = f"{ODD}-RUN"
    command = (sys.executable, SCRIPTS / "alone.py", "5")
    done = paceline_bytes(tmp_path, "record", "--out", run, "--", *command, environ=ASCII)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / run / "result.json").read_text())["ranks"][0]["steps"] == 5
