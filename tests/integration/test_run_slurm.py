"""Ranks as tasks of a real Slurm step, over two nodes."""

import importlib.util
import json
import subprocess
import sys

import pytest

spec = importlib.util.spec_from_file_location(
    "slurm", __file__.replace("integration/test_run_slurm", "slurm")
)
slurm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(slurm)

pytestmark = pytest.mark.skipif(not slurm.is_here(), reason="no Slurm here, or not root")


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


def test_another_world_than_the_allocation_is_refused(environ, root, tmp_path):
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
