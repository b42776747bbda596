"""MPI programs, recorded as they are: C, Fortran and mpi4py, on MPICH and Open MPI."""

import collections
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.launching import paceline
from support.otf2_archives import check_archive

from paceline.launch.mpi import _launcher_interface, mpi_of_command
from paceline.runs.folder import RunFolder
from paceline.trace.analysis import analyse
from paceline.trace.export.otf2 import write_otf2
from paceline.trace.format.events import WAIT_ALL, Kind
from paceline.trace.merge import load_run

PROGRAMS = Path(__file__).parent / "mpi"
BIN = Path(sys.executable).parent
# As root, and with more ranks than cores.
OPEN_MPI = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1"
    for prefix in ("OMPI", "PRTE")
    for suffix in ("", "_CONFIRM")
} | {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
campaign = pytest.mark.campaign("mpi")
# Rank 1 leaves while rank 0 waits for it.
LEAVES = """
#include <mpi.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char** argv) {
  int rank;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 1) exit(3);
  MPI_Barrier(MPI_COMM_WORLD);
  return MPI_Finalize();
}
"""


def open_mpi():
    """Return the folder of Open MPI's programs."""
    mpirun = os.environ.get("OPENMPI_MPIRUN")
    if not mpirun:
        pytest.skip("no Open MPI here")
    return Path(mpirun).parent


@pytest.fixture(params=["mpich", "openmpi"])
def mpi(request):
    """Return the folder of an MPI's programs."""
    return BIN if request.param == "mpich" else open_mpi()


def build(folder, source, bin_folder=BIN, *options, compiler="mpicc"):
    program = folder / Path(source).stem
    command = [bin_folder / compiler, "-O2", *options, PROGRAMS / source, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return program


def run(folder, *command, bin_folder=BIN, ranks=2, env=None, out="RUN"):
    """Record a program under the mpirun of its MPI; return the merged trace."""
    mpirun = (bin_folder / "mpirun", "-n", ranks)
    environ = {**OPEN_MPI, **(env or {})}
    done = paceline(folder, "record", "--mpi", "--out", out, "--", *mpirun, *command, env=environ)
    assert done.code == 0, done.err
    return done, load_run(folder / out)


def bytes_by_pair(trace, tag=None, group="MPI_COMM_WORLD"):
    """Return the bytes that each rank sent to each other one, by (source, destination)."""
    pairs = collections.Counter()
    for message in trace.matches.messages:
        named = trace.matches.groups[message["group"]].name == group
        if message["sends"] and named and tag in (None, message["tag"]):
            pairs[int(trace.ranks[message["trace"]].rank), int(message["peer"])] += int(
                message["amount"]
            )
    return dict(pairs)


def check_ring(trace, ranks, rounds):
    ring = {(rank, (rank + 1) % ranks): 8 * (rank + 1) * rounds for rank in range(ranks)}
    assert bytes_by_pair(trace) == ring
    messages = trace.matches.messages
    assert (messages["partner"] >= 0).all()  # each send has its receive
    received = messages[~messages["sends"]]
    assert (received["amount"] == messages["amount"][received["partner"]]).all()
    assert not trace.matches.mismatch_count


def check_export(trace, folder):
    """Check that tools of others find in the run's OTF2 archive what the trace says."""
    done = write_otf2(trace, folder / "otf2")
    assert done.cautions == ()
    return check_archive(done.path, trace)


def test_a_ring_of_an_mpi_program_is_recorded_exactly(tmp_path):
    program = build(tmp_path, "ring.c")
    plain = subprocess.run(
        [BIN / "mpirun", "-n", "2", program, "12"], capture_output=True, text=True, timeout=60
    )
    done = paceline(tmp_path, "run", "--mpi", "-n", 2, "--out", "RUN", "--", program, 12)
    assert done.code == 0, done.err
    assert done.out.splitlines()[0] == plain.stdout.strip()  # the results are equal
    trace = load_run(tmp_path / "RUN")
    check_ring(trace, 2, 12)
    assert trace.step_rule == "repeated collectives"
    check_export(trace, tmp_path)
    analysis = analyse(trace)
    assert analysis.steps == 12
    operations = {(line.operation, line.group): line.count for line in analysis.traffic}
    assert operations["all_reduce", "MPI_COMM_WORLD"] == 12
    result = RunFolder(tmp_path / "RUN").read_result()
    assert (result.exit_code, result.world_size, len(result.ranks)) == (0, 2, 2)
    assert not any(rank.dropped_count for rank in result.ranks)
    done.assert_nothing_left()


def test_ranks_of_the_users_own_mpirun_are_recorded_exactly(tmp_path):
    """Each task starts one rank, which finds the others as if mpirun had started it directly."""
    program = build(tmp_path, "ring.c")
    mpirun = (BIN / "mpirun", "-n", "2")
    done = paceline(tmp_path, "run", "--out", "RUN", "--", program, 12, prefix=mpirun)
    assert done.code == 0, done.err
    check_ring(load_run(tmp_path / "RUN"), 2, 12)
    result = RunFolder(tmp_path / "RUN").read_result()
    assert (result.exit_code, result.world_size, len(result.ranks)) == (0, 2, 2)
    assert "is not a Python script" not in done.err
    done.assert_nothing_left()


@campaign
def test_four_ranks_of_the_users_own_mpirun(tmp_path, mpi):
    program = build(tmp_path, "ring.c", mpi)
    mpirun = (mpi / "mpirun", "-n", "4")
    words = ("run", "--out", "RUN", "--", program, 12)
    done = paceline(tmp_path, *words, prefix=mpirun, env=OPEN_MPI)
    assert done.code == 0, done.err
    check_ring(load_run(tmp_path / "RUN"), 4, 12)
    done.assert_nothing_left()


@campaign
@pytest.mark.parametrize("flags", [("--mpi",), ()])
def test_a_script_with_mpi4py_within_the_users_own_mpirun(tmp_path, flags):
    """Without --mpi its ranks form one world, too, but the recorder is torch's."""
    words = ("run", *flags, "--out", "RUN", "--", PROGRAMS / "messages.py")
    done = paceline(tmp_path, *words, prefix=(BIN / "mpirun", "-n", "2"))
    assert done.code == 0, done.err
    assert done.out.startswith("sum 1.0\n")
    sent = bytes_by_pair(load_run(tmp_path / "RUN"), tag=7)
    assert sent == ({(0, 1): 8 * 10, (1, 0): 16 * 10} if flags else {})


@campaign
def test_a_rank_that_fails_within_the_users_own_mpirun_is_named(tmp_path, mpi):
    (tmp_path / "leaves.c").write_text(LEAVES)
    command = [mpi / "mpicc", tmp_path / "leaves.c", "-o", tmp_path / "leaves"]
    subprocess.run(command, check=True, timeout=60)
    words = ("run", "--out", "RUN", "--", tmp_path / "leaves")
    done = paceline(tmp_path, *words, prefix=(mpi / "mpirun", "-n", "2"), env=OPEN_MPI)
    assert done.code == 1, done.err
    failure = RunFolder(tmp_path / "RUN").read_result().failure
    assert (failure.rank, failure.error) == (1, "exit code 3")


@campaign
def test_a_rank_that_hangs_within_the_users_own_mpirun_is_named(tmp_path, mpi):
    (tmp_path / "waits.c").write_text(LEAVES.replace("exit(3)", "for (;;) pause()"))
    command = [mpi / "mpicc", tmp_path / "waits.c", "-o", tmp_path / "waits"]
    subprocess.run(command, check=True, timeout=60)
    words = ("run", "--hang-timeout", 2, "--out", "RUN", "--", tmp_path / "waits")
    done = paceline(tmp_path, *words, prefix=(mpi / "mpirun", "-n", "2"), env=OPEN_MPI)
    assert done.code == 5, done.err
    assert "rank 1 hung" in done.err
    hang = json.loads((tmp_path / "RUN" / "hang.json").read_text())
    assert hang["rank"] == 1
    assert done.running() == []


def test_an_mpi_that_is_not_known_is_refused(tmp_path):
    """Before anything starts, with the libraries found."""
    library = tmp_path / "libmpi.so.99"
    compiler = shutil.which("cc") or shutil.which("gcc")
    (tmp_path / "none.c").write_text("int MPI_Init(void *a, void *b) { return !a && !b; }\n")
    (tmp_path / "main.c").write_text(
        "int MPI_Init(void*, void*);\nint main(void) { return MPI_Init(0, 0); }\n"
    )
    for command in (
        [compiler, "-shared", "-fPIC", "-Wl,-soname,libmpi.so.99", "none.c", "-o", library],
        [compiler, "main.c", "-o", "program", library, f"-Wl,-rpath,{tmp_path}"],
    ):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    for verb in (("run", "--mpi", "-n", 2), ("record",)):
        done = paceline(tmp_path, *verb, "--out", "RUN", "--", tmp_path / "program")
        assert done.code == 2, done.err
        assert "the MPI of this program is not known" in done.err
        assert str(library) in done.err
        assert not (tmp_path / "RUN").exists()


def test_a_program_without_mpi_is_refused(tmp_path):
    done = paceline(tmp_path, "run", "--mpi", "-n", 2, "--", "/bin/true")
    assert done.code == 2, done.err
    assert "no MPI was found" in done.err
    assert mpi_of_command(["/bin/true"], required=False) is None


def test_what_is_not_for_mpi_is_refused(tmp_path):
    done = paceline(tmp_path, "run", "--mpi", "--no-bind", "--", "/bin/true")
    assert done.code == 2, done.err
    assert "budget" in done.err


@campaign
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_ring_on_both_mpis(tmp_path, mpi, ranks):
    program = build(tmp_path, "ring.c", mpi)
    done, trace = run(tmp_path, program, 10, bin_folder=mpi, ranks=ranks)
    check_ring(trace, ranks, 10)
    assert trace.step_rule == "repeated collectives"
    halves = {group.members for group in trace.matches.groups if "split" in group.name}
    assert halves == {tuple(range(first, ranks, 2)) for first in range(2)}
    assert "sum" in done.out


@campaign
def test_a_late_rank_is_named(tmp_path, mpi):
    program = build(tmp_path, "ring.c", mpi)
    run(tmp_path, program, 60, 1, 8000, bin_folder=mpi)
    done = paceline(tmp_path, "why", "RUN", "--json")
    assert done.code == 0, done.err
    (straggler, *_) = json.loads(done.out)["stragglers"]
    assert straggler["rank"] == 1
    assert "Rank 1" in paceline(tmp_path, "why", "RUN").out


@campaign
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_kind_of_call(tmp_path, mpi, ranks):
    program = build(tmp_path, "calls.c", mpi)
    _, trace = run(tmp_path, program, tmp_path / "file", bin_folder=mpi, ranks=ranks)
    tags = {1: 16, 2: 8, 3: 24, 4: 8, 5: 12, **({7: 20} if mpi == BIN else {})}
    for tag, size in tags.items():
        ring = {(rank, (rank + 1) % ranks): size for rank in range(ranks)}
        assert bytes_by_pair(trace, tag) == ring, tag
    messages = trace.matches.messages
    world = np.array([group.name == "MPI_COMM_WORLD" for group in trace.matches.groups])
    assert (messages["partner"][world[messages["group"]]] >= 0).all()
    assert not trace.matches.mismatch_count
    names = [group.name for group in trace.matches.groups]
    assert len([name for name in names if "dup" in name]) == 2  # one handle perhaps, two of them
    assert all(len(group.members) == ranks for group in trace.matches.groups if "dup" in group.name)
    (window,) = [name for name in names if "window" in name]
    for tag, size in ((1, 40), (3, 48)):  # put, accumulate
        ring = {(rank, (rank + 1) % ranks): size for rank in range(ranks)}
        assert bytes_by_pair(trace, tag, window) == ring
    counts = collections.Counter()
    for instance in trace.matches.instances:
        assert instance["agrees"]
        counts[trace.matches.operations[instance["operation"]]] += 1
    for operation in ("all_gather", "all_to_all", "reduce_scatter", "gather", "scatter"):
        assert counts[operation] == 2, operation
    assert counts["fence"] == 3
    for rank in trace.ranks:
        moved = {
            rank.names[event["name"]]: int(event["amount"])
            for event in rank.events
            if event["kind"] in (Kind.INPUT, Kind.CHECKPOINT)
        }
        assert moved["MPI_File_write_at_all"] == 64
        assert moved["MPI_File_read_at"] == 32
        assert WAIT_ALL in rank.names
    assert analyse(trace).steps == 1
    assert trace.step_rule == "whole run"
    archive = check_export(trace, tmp_path)
    for events in archive.events.values():
        accesses = [event for event in events if type(event).__name__.startswith("RmaP")]
        assert [event.bytes for event in accesses] == [40]


@campaign
@pytest.mark.parametrize("order", ["before", "behind", "linked"])
def test_another_tool_in_the_process_counts_what_it_counted(tmp_path, mpi, order):
    handles = [] if mpi == BIN else ["-DOPEN_MPI_HANDLES"]
    tool = build(tmp_path, "count_calls.c", mpi, "-shared", "-fPIC", *handles)
    linked = [PROGRAMS / "count_calls.c", *handles] if order == "linked" else []
    program = build(tmp_path, "ring.c", mpi, *linked)
    preloaded = {"LD_PRELOAD": str(tool)} if order != "linked" else {}
    if order == "before":  # a wrapper of the program puts it in front
        script = tmp_path / "program.sh"
        script.write_text(f'#!/bin/sh\nLD_PRELOAD={tool}:$LD_PRELOAD exec {program} "$@"\n')
        script.chmod(0o755)
        preloaded, program = {}, script
    done, trace = run(tmp_path, program, 10, bin_folder=mpi, env=preloaded)
    assert done.err.count("tool: 30 calls") == 2, done.err
    check_ring(trace, 2, 10)


@campaign
def test_mpi4py(tmp_path, mpi):
    env = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(mpi.parent / "lib/libmpi.so.40")}
    env = {} if mpi == BIN else env
    script = PROGRAMS / "messages.py"
    _, trace = run(tmp_path, sys.executable, script, bin_folder=mpi, env=env)
    assert bytes_by_pair(trace, 7) == {(0, 1): 80, (1, 0): 160}
    check_export(trace, tmp_path)
    assert (trace.matches.messages["partner"] >= 0).all()
    if mpi == BIN:
        done = paceline(tmp_path, "run", "--mpi", "-n", 2, "--out", "RUN2", "--", script)
        assert done.code == 0, done.err
        assert bytes_by_pair(load_run(tmp_path / "RUN2"), 7) == {(0, 1): 80, (1, 0): 160}


@pytest.mark.parametrize(
    ("version", "interface"),
    [
        ("mpirun.openmpi (OpenRTE) 4.1.4", "openmpi"),
        ("mpirun (Open MPI) 5.0.11", "openmpi"),
        ("HYDRA build details:", "mpich"),
        ("srun 22.05.8", None),
    ],
)
def test_a_launcher_is_known_by_its_version(tmp_path, version, interface):
    """Debian's Open MPI was not, where another mpirun came before it on the path."""
    launcher = tmp_path / "mpirun"
    launcher.write_text(f"#!/bin/sh\necho '{version}'\n")
    launcher.chmod(0o755)
    assert _launcher_interface(str(launcher)) == interface


@campaign
@pytest.mark.parametrize("family", ["mpich", "openmpi"])
@pytest.mark.parametrize("source", ["ring.f90", "ring_f08.f90"])
def test_fortran(tmp_path, family, source):
    compiler = shutil.which(f"mpif90.{family}")
    if compiler is None:
        pytest.skip("no Fortran compiler of an MPI here")
    program = tmp_path / "ring"
    command = [compiler, "-O2", "-w", "-fallow-argument-mismatch", PROGRAMS / source, "-o", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = paceline(tmp_path, "run", "--mpi", "-n", 2, "--out", "RUN", "--", program, env=OPEN_MPI)
    assert done.code == 0, done.err
    trace = load_run(tmp_path / "RUN")
    check_ring(trace, 2, 10)


@campaign
def test_a_rank_that_dies_leaves_its_trace(tmp_path, mpi):
    (tmp_path / "dies.c").write_text(
        "#include <mpi.h>\n#include <signal.h>\n"
        "int main(int c, char** v) {\n  int rank;\n  MPI_Init(&c, &v);\n"
        "  MPI_Comm_rank(MPI_COMM_WORLD, &rank);\n"
        "  for (int i = 0; i < 1000; ++i) MPI_Barrier(MPI_COMM_WORLD);\n"
        "  if (rank == 1) MPI_Abort(MPI_COMM_WORLD, 3);\n"
        "  MPI_Barrier(MPI_COMM_WORLD);\n  MPI_Finalize();\n}\n"
    )
    program = build(tmp_path, tmp_path / "dies.c", mpi)
    done = paceline(
        tmp_path, "record", "--out", "RUN", "--", mpi / "mpirun", "-n", 2, program, env=OPEN_MPI
    )
    assert done.code != 0
    trace = load_run(tmp_path / "RUN")
    last = next(rank for rank in trace.ranks if rank.rank == 1)
    assert len(last.events_of(Kind.COLLECTIVE)) == 1000
