"""Ranks as tasks of a real Slurm step, over two nodes."""

import json
import subprocess
import sys

import pytest
from support import slurm
from support.launching import await_true

from paceline.core.errors import PacelineError
from paceline.trace.format.events import Kind
from paceline.trace.format.files import read_trace, trace_name

pytestmark = [
    pytest.mark.campaign("slurm"),
    pytest.mark.skipif(not slurm.is_here(), reason="no Slurm here, or not root"),
]


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield environ


def srun(environ, folder, *args, tasks=2, nodes=1):
    command = ["srun", f"-N{nodes}", f"-n{tasks}", sys.executable, "-m", "paceline", "run", *args]
    return subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize("nodes", [1, 2])
def test_tasks_of_a_step_are_the_ranks(environ, root, tmp_path, nodes):
    script = root / "tests/integration/scripts/collectives.py"
    done = srun(environ, tmp_path, "--out", "run", str(script), "plain", "ddp", nodes=nodes)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"backend": "gloo", "size": 2}
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["world_size"] == 2
    assert [rank["steps"] for rank in result["ranks"]] == [3, 3]


def test_the_folder_is_named_after_the_step(environ, root, tmp_path):
    script = root / "tests/integration/scripts/collectives.py"
    done = srun(environ, tmp_path, str(script), "groups")
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "paceline-runs").iterdir()
    assert run.name.startswith("collectives-slurm-")


def test_another_number_of_ranks_than_of_tasks_is_refused(environ, root, tmp_path):
    script = root / "tests/integration/scripts/collectives.py"
    done = srun(environ, tmp_path, "-n", "4", "--out", "run", str(script), "plain")
    assert done.returncode != 0
    assert "4 ranks were asked for, but this slurm step has 2" in done.stderr
    assert "srun -n 4" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_task_that_raises_ends_the_step(environ, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    raise ValueError('the data are odd')\n"
        "dist.barrier()\n"
    )
    done = srun(environ, tmp_path, "--out", "run", str(script))
    assert done.returncode == 1, done.stderr
    assert "the data are odd" in done.stderr


def test_a_killed_task_is_named_with_signal_and_step(environ, root, tmp_path):
    script = root / "tests/integration/scripts/train.py"
    how = ("--steps", "40", "--fail", "1", "17", "SIGKILL")
    done = srun(environ, tmp_path, "--out", "run", str(script), *how, nodes=2)
    assert done.returncode == 5, done.stderr
    assert "rank 1 was killed by SIGKILL\n  where: step 17, phase backward" in done.stderr
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["exit_code"] == 5
    assert (result["failure"]["rank"], result["failure"]["signal"]) == (1, "SIGKILL")
    assert not (tmp_path / "run/rendezvous").exists()


def test_a_step_that_is_cancelled_keeps_its_traces(environ, root, tmp_path):
    script = root / "tests/integration/scripts/train.py"
    command = [sys.executable, "-m", "paceline", "run", "--out", "run", str(script)]
    step = subprocess.Popen(
        ["srun", "-n2", "--job-name=stop-me", *command, "--steps", str(10**6)],
        env=environ,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    traces = [tmp_path / "run/trace" / trace_name(rank) for rank in range(2)]

    def training():
        try:
            return all(len(read_trace(path).events_of(Kind.STEP)) >= 3 for path in traces)
        except PacelineError:
            return False

    await_true(training, "three steps on disk")  # the signal kills the ranks, too
    subprocess.run(
        ["scancel", "--signal=TERM", "--name=stop-me"], env=environ, check=True, timeout=20
    )
    _, told = step.communicate(timeout=60)
    assert step.returncode == 130, told
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert (result["exit_code"], result["failure"]) == (130, None)
    assert all(rank["steps"] >= 3 for rank in result["ranks"])
