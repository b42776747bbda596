"""Would MPI bring files from another node faster than our own link? One reader, one server.

Two ranks of one mpirun on this machine (store_mpi_ranks.py): rank 1 has the shards, rank 0 reads
files of one size, 16 in flight, all from the page cache. The ways take turns in each round:

- mapped: `RemotePack` reads the files of a node on this host; tcp: `RemotePack` over loopback.
- rma: `Get` in a passive epoch (`Lock_all`, `Flush`) from a window over the mapped shard; "rma,
  shared memory": from one of `Allocate_shared` with a copy of the shard. messages: `Isend` and
  `Irecv`.

All compare each file with its checksum. The ranks are neighbours ("one host": MPI may use shared
memory), or are to MPI on two hosts ("two hosts": over its network layer, here TCP over loopback;
there is no InfiniBand here), also with the progress thread of MPICH. A target that does not call
MPI serves a `Get` only if its library does that by itself; if not, it waits in a receive of MPI.
The row says so, and the processor time what it costs; the rows "waiting" have that without any
request.

    python bench/store_mpi.py --json [--quick]

MPICH is that of this environment; Open MPI: `mpirun.openmpi`, or OPENMPI_MPIRUN=PLACE/bin/mpirun.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import Report, options, tell
from store_remote import SIZES, make_pack, process

HERE = Path(__file__).parent
NAMES = ("107 KB", "512 KB", "2 MB")
SET_BYTES = 200 << 20
DEADLINE_S = 300
OURS = {"one host": ("mapped", "tcp"), "two hosts": ("tcp",)}
UCX = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
LIBFABRIC = {"MPIR_CVAR_NOLOCAL": "1", "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
MPICH_VARIABLES = {
    "one host": {},
    "two hosts, UCX": UCX,
    "two hosts, UCX, progress thread": {**UCX, "MPIR_CVAR_ASYNC_PROGRESS": "1"},
    "two hosts, libfabric": LIBFABRIC,
}
OPEN_MPI_VARIABLES = {
    "one host": {},
    "two hosts": {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,tcp"},
}


def libraries():
    """Return each MPI that is here: its mpirun with options, and variables by placement."""
    found = {}
    mpich = Path(sys.executable).with_name("mpiexec.hydra")
    if mpich.exists():
        found["MPICH"] = [mpich], MPICH_VARIABLES
    mpirun = shutil.which("mpirun.openmpi") or os.environ.get("OPENMPI_MPIRUN")
    if mpirun:
        common = {"MPI4PY_MPIABI": "openmpi"}
        library = next(Path(mpirun).absolute().parent.parent.glob("lib*/**/libmpi.so*"), None)
        if library is not None:
            common["MPI4PY_LIBMPI"] = str(library)
        for prefix in ("OMPI", "PRTE"):
            for suffix in ("", "_CONFIRM"):
                common[f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}"] = "1"
        placed = {name: {**common, **more} for name, more in OPEN_MPI_VARIABLES.items()}
        found["Open MPI"] = [mpirun, "--oversubscribe"], placed
    return found


def run_ranks(launcher, variables, asked):
    """Run the two ranks; return what rank 0 found.

    Raises:
        RuntimeError: they failed, or did not end in time.
    """
    command = [*launcher, "-n", "2", sys.executable, HERE / "store_mpi_ranks.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    try:
        done = subprocess.run(
            [*map(str, command), json.dumps(asked)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the ranks did not end within {DEADLINE_S} s") from None
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else ''}")
    return json.loads(done.stdout.splitlines()[-1])


def report_size(report, where, placement, size, found):
    """Report the ways of one size, and whether MPI is the fastest."""
    rates = found["rates"]
    for way, (rate, low, high) in rates.items():
        row = dict(where, size=size, way=way, files_per_s=rate, spread=(high - low) / rate)
        row["cpu_us_per_file"] = found["cpu_us_per_file"][way]
        row["over_tcp"] = rate / rates["tcp"][0]
        row["over_mapped"] = rate / rates["mapped"][0]
        if way in found["serves_outside"]:
            row["target_serves_outside_of_mpi"] = found["serves_outside"][way]
        report.row(**row)
    ours = max(OURS[placement], key=lambda way: rates[way][0])
    best = max(set(rates) - {"mapped", "tcp"}, key=lambda way: rates[way][0])
    ratio = rates[best][0] / rates[ours][0]
    report.row(**where, size=size, wins=ratio > 1, best_of_mpi=best, ours=ours, ratio=ratio)


def measure(report, library, launcher, placement, variables, asked):
    """Run the ranks of one MPI in one placement, and report what they found."""
    where = {"mpi": library, "placement": placement}
    kind = placement.partition(",")[0]
    asked = {**asked, "shares_memory": kind == "one host"}
    tell(f"{library}, {placement}:")
    try:
        found = run_ranks(launcher, variables, asked)
    except RuntimeError as problem:
        report.row(**where, failed=str(problem))
        return
    for size, outcome in found["sizes"].items():
        report_size(report, where, kind, size, outcome)
    waiting = outcome["waiting"]
    report.row(**where, what="waiting, share of a core", **waiting)


def main():
    asked = options(__doc__)
    report = Report("store_mpi", asked.json)
    found = libraries()
    if not found:
        sys.exit("no MPI here: pip install mpi4py mpich")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        sizes = {}
        for size in NAMES[::2] if asked.quick else NAMES:
            place = make_pack(folder, SIZES[size], SET_BYTES)
            serve = (sys.executable, "-m", "paceline", "store", "serve", str(place), "--json")
            server, line = stack.enter_context(process(*serve))
            sizes[size] = {
                "place": str(place),
                "node": json.loads(line)["node"],
                "pid": server.pid,
            }
        job = {
            "sizes": sizes,
            "control": str(folder / "control"),
            "quick": asked.quick,
            "rounds": 2 if asked.quick else 5,
        }
        for library, (launcher, placed) in found.items():
            for placement, variables in placed.items():
                measure(report, library, launcher, placement, variables, job)
    sys.exit(report.print())


if __name__ == "__main__":
    main()
