"""Finds the MPI that a program uses, and what records it.

    paceline run --mpi -n 4 -- ./program        mpirun of the same MPI, then as
    paceline record -- mpirun -n 4 ./program
                                |
        LD_PRELOAD=libpaceline_mpi_mpich.so  _PACELINE_MPI=RUN/trace
                                |
    program: MPI_Send(...) --> native/mpi: an event of rank-00000.trace --> the next MPI_Send

MPIs differ in what their handles are, so that there is one library for each binary interface
(native/mpi/abi.hpp). Which one a program needs follows from the libraries that it loads: of an
executable the linker knows, of Python it is asked. An MPI that is not known is refused before
anything starts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.core.affinity import allowed_cores
from paceline.core.errors import Missing, NotFound, UsageError
from paceline.launch import file_calls
from paceline.native import mpi_library, preloaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Interface = Literal["mpich", "openmpi", "standard"]

FOLDER = "_PACELINE_MPI"  # not PACELINE_: it is no setting of the user's; native/mpi reads it
_INTERFACES: dict[str, Interface] = {
    "libmpi.so.12": "mpich",  # MPICH, Intel MPI, MVAPICH
    "libmpich.so.12": "mpich",  # Debian's MPICH
    "libmpi_cray.so.12": "mpich",
    "libmpi.so.40": "openmpi",  # versions 4 and 5
    "libmpi_abi.so.0": "standard",  # MPI 5.0
    "libmpi_abi.so.1": "standard",
}
_MPI = re.compile(r"lib(mpi|mpich|mpi_abi|mpi_cray|mpi_gnu\w*|mpt|msmpi|pmpi)\.so(\.\d+)*")
_LAUNCHERS = frozenset(
    ("mpirun", "mpiexec", "orterun", "prterun", "srun", "jsrun", "aprun", "flux")
)
_ELF = b"\x7fELF"
_ASK_S = 60.0
# What Python loads for mpi4py is known once it has: it does not initialise MPI.
_ASK_PYTHON = """
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    print(*{line.split(None, 5)[5].strip() for line in maps if ".so" in line}, sep="\\n")
"""
_KNOWN = "Known are MPICH and its kin (libmpi.so.12), Open MPI 4 and 5 (libmpi.so.40), and the ABI \
of MPI 5 (libmpi_abi.so)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramMpi:
    """The MPI of a program.

    Attributes:
        interface: its binary interface.
        library: path of its library; empty where only its launcher is known.
    """

    interface: Interface
    library: str = ""

    def variables(self, run: Path, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that have each process record itself in folder `run`.

        Args:
            run: the run's folder.
            environ: what the processes get otherwise: other libraries to preload come behind.

        Raises:
            Missing: the library was not installed with Paceline.
        """
        library = mpi_library(self.interface)
        if not library.is_file():
            raise Missing(
                "the library that records MPI is missing",
                where=str(library),
                why="it is built with Paceline on Linux with glibc",
                fix="There, install Paceline again: pip install .",
            )
        return {**preloaded(library, environ), FOLDER: str((run / "trace").absolute())}


def mpi_of_command(command: Sequence[str], *, required: bool) -> ProgramMpi | None:
    """Return the MPI of the program that a command starts; None if it uses none that is seen.

    The program is the first word of the command that is an executable with an MPI. Python is asked
    only if the MPI is `required`: most of its scripts under mpirun train with torch, whose
    collector records them.

    Args:
        command: program and arguments, for example ``mpirun -n 4 ./program``.
        required: it must use one.

    Raises:
        UsageError: its MPI is not known; or it uses none, and must.
    """
    found: list[str] = []
    for word in command:
        path = shutil.which(word)
        if path is None:
            continue
        is_launcher = Path(word).name.partition(".")[0] in _LAUNCHERS
        libraries = [] if is_launcher else _libraries_of(path, ask_python=required)
        found += [library for library in libraries if library not in found]
        known = _known(libraries)
        if known is not None:
            return known
        if libraries:
            raise _unknown(path, libraries)
    if not required:
        return None
    launcher = _launcher_interface(command[0])
    if launcher is None:
        raise UsageError(
            "no MPI was found in this command",
            where=" ".join(command[:4]),
            why="none of its programs loads one: it may be linked into the program itself, whose "
            "calls cannot be seen then",
            fix="Link the program with the shared library of its MPI. " + _KNOWN,
        )
    return ProgramMpi(interface=launcher)


def mpirun_command(program: Sequence[str], ranks: int, *, record_io: bool = True) -> list[str]:
    """Return the command that starts a program on `ranks` ranks, with the mpirun of its own MPI.

    Args:
        program: the program and its arguments.
        ranks: how many processes.
        record_io: whether its calls for files are recorded.

    Raises:
        UsageError: the program uses no MPI, or one that is not known.
        NotFound: there is no mpirun of this MPI.
    """
    mpi = mpi_of_command(program, required=True)
    assert mpi is not None
    for candidate in _mpiruns(mpi):
        path = shutil.which(candidate)
        if path is not None and _launcher_interface(path) in (_kin(mpi.interface), mpi.interface):
            options = ["-n", str(ranks)]
            if mpi.interface == "openmpi":  # passes on no other variables to other nodes
                options += ["-x", "LD_PRELOAD", "-x", FOLDER]
                options += ["-x", file_calls.FOLDER] if record_io else []
                options += ["--oversubscribe"] if ranks > len(allowed_cores()) else []
            return [path, *options, *program]
    raise NotFound(
        "no mpirun of the program's MPI",
        where=mpi.library or program[0],
        why=f"looked for {', '.join(_mpiruns(mpi))}",
        fix="Give the command yourself: paceline record --mpi -- mpirun -n 4 program",
    )


def _kin(interface: Interface) -> Interface:
    """Return the interface of the launcher: MPICH brings the ABI of MPI 5, so far."""
    return "mpich" if interface == "standard" else interface


def _mpiruns(mpi: ProgramMpi) -> list[str]:
    beside = []
    if mpi.library:
        for folder in Path(mpi.library).parents[:-1]:  # not /: Open MPI takes /bin for a prefix
            beside += [str(folder / "bin" / name) for name in ("mpirun", "mpiexec")]
    return [*beside, f"mpirun.{_kin(mpi.interface)}", "mpirun", "mpiexec"]


def _libraries_of(path: str, *, ask_python: bool) -> list[str]:
    """Return the paths of the MPI libraries that an executable loads."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(4)
    except OSError:  # executable, but not readable
        return []
    if head == _ELF:
        libraries = _mpi_lines(_output_of(["ldd", path]))
        if libraries:
            return libraries
    if ask_python and Path(path).name.startswith("python"):
        return _mpi_lines(_output_of([path, "-c", _ASK_PYTHON]))
    return []


def _mpi_lines(text: str) -> list[str]:
    r"""Return what a list of libraries has of MPIs: paths, or names where there is no file.

    >>> _mpi_lines("\tlibmpi.so.12 => /opt/libmpi.so.12 (0x7f)\n\tlibm.so.6 => /libm.so.6 (0x7f)")
    ['/opt/libmpi.so.12']
    """
    found = []
    for line in text.splitlines():
        name, arrow, rest = line.strip().partition(" => ")
        path = (
            rest.partition(" (")[0] if arrow and rest.startswith("/") else name.partition(" (")[0]
        )
        if _MPI.fullmatch(Path(name.partition(" (")[0]).name) or _MPI.fullmatch(Path(path).name):
            found.append(path)
    return found


def _known(libraries: Sequence[str]) -> ProgramMpi | None:
    for library in libraries:
        for name in (Path(library).name, Path(library).resolve().name):
            interface = next((_INTERFACES[key] for key in _INTERFACES if _is(name, key)), None)
            if interface is not None:
                return ProgramMpi(interface=interface, library=library)
    return None


def _is(name: str, soname: str) -> bool:
    """Whether a file's name is that of a library, perhaps with more numbers."""
    return name == soname or name.startswith(f"{soname}.")


def _unknown(path: str, libraries: Sequence[str]) -> UsageError:
    return UsageError(
        "the MPI of this program is not known",
        where=path,
        why=f"it loads {', '.join(libraries)}",
        fix=_KNOWN,
    )


def _launcher_interface(launcher: str) -> Interface | None:
    """Return the MPI that a launcher is of, by what it says of its version."""
    if shutil.which(launcher) is None:
        return None
    text = _output_of([launcher, "--version"])
    if re.search("Open MPI|OpenRTE|prterun", text):  # by its name, Open MPI 4 says either
        return "openmpi"
    return "mpich" if re.search("HYDRA|MPICH|Intel.*MPI|MVAPICH", text) else None


def _output_of(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no ldd, or a launcher that waits for a cluster
        return ""
    return done.stdout + done.stderr
