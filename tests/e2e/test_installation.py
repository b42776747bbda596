"""Installed into an environment of one's own, beside a torch that is there: wheel and sdist."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TRAIN = ROOT / "tests" / "integration" / "scripts" / "train.py"
DEADLINE_S = 600


def run(*command, cwd, **environ):
    """Run a command; return its stdout."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind, folder):
    """Return the file that the build backend makes; no network is needed."""
    program = (
        "import os, sys; from scikit_build_core import build\n"
        f"print(build.build_{kind}(sys.argv[1]))"
    )
    name = run(sys.executable, "-c", program, folder, cwd=ROOT).splitlines()[-1]
    return folder / name


def environment_beside_torch(folder):
    """Make an environment that finds the torch of this one, but not its Paceline."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    (site,) = folder.glob("lib/python*/site-packages")
    hidden = {"paceline", "_editable_skbc_paceline.py", "_editable_skbc_paceline.pth"}
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry.name not in hidden and not entry.name.startswith("paceline-"):
            (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


@pytest.mark.campaign("launchers")
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_paceline_records_two_ranks(tmp_path, kind):
    made = build(kind, tmp_path)
    python = environment_beside_torch(tmp_path / "environment")
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "-q")
    run(*pip, "install", *options, made, cwd=tmp_path)
    place = run(python, "-c", "import paceline; print(paceline.__file__)", cwd=tmp_path)
    assert str(tmp_path) in place
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    answer = run(
        *(python, "-m", "paceline", "run", "--json", "-n", 2, TRAIN), cwd=tmp_path, **environ
    )
    assert [rank["steps"] for rank in json.loads(answer)["ranks"]] == [20, 20]
    # The library for mounts came with it, and is found.
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.txt").write_text("meow")
    paceline = (python, "-m", "paceline")
    run(*paceline, "pack", "files", "files.pack", cwd=tmp_path, **environ)
    words = ("--mount", "files.pack:/mounted", "--", "cat", "/mounted/x.txt")
    assert run(*paceline, "store", "exec", *words, cwd=tmp_path, **environ) == "meow"
    command = (python, "-m", "torch.distributed.run", "--nproc-per-node", 2, TRAIN)
    answer = run(
        *(python, "-m", "paceline", "record", "--json", "--", *command), cwd=tmp_path, **environ
    )
    assert [rank["steps"] for rank in json.loads(answer)["ranks"]] == [20, 20]
