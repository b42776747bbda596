"""What a run starts on each rank: a Python script, a Python module, or any other program."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from paceline.core.errors import NotFound, UsageError

_ELF = b"\x7fELF"
_HEAD_BYTES = 512  # enough for a first line


class ProgramKind(StrEnum):
    """How a program is started; a value of the worker's option ``--kind``."""

    SCRIPT = "script"  # in the worker's own process, as `python script.py`
    MODULE = "module"  # in the worker's own process, as `python -m module`
    EXECUTABLE = "executable"  # as a child of the worker: a binary or a shell script


@dataclass(frozen=True, slots=True)
class Program:
    """A program that exists.

    Attributes:
        kind: how it is started.
        name: path of a script or executable, or the module's name.
    """

    kind: ProgramKind
    name: str

    @property
    def stem(self) -> str:
        """A short name for the run's folder."""
        if self.kind is ProgramKind.MODULE:
            return self.name.rpartition(".")[2]
        return Path(self.name).stem

    @property
    def command(self) -> list[str]:
        """The words that start it by itself, without a worker."""
        if self.kind is ProgramKind.MODULE:
            return [sys.executable, "-m", self.name]
        return [sys.executable, self.name] if self.kind is ProgramKind.SCRIPT else [self.name]


def find_program(name: str, *, is_module: bool) -> Program:
    """Return the program that the user named; a word without a slash is looked for on PATH, too.

    Raises:
        NotFound: there is no such file or module.
        UsageError: the file is neither Python nor may it be executed.
    """
    if is_module:
        return _find_module(name)
    path = Path(name)
    if path.is_file():
        if _is_python(path):
            return Program(ProgramKind.SCRIPT, name)
        if os.access(path, os.X_OK):
            return Program(ProgramKind.EXECUTABLE, str(path.absolute()))
        raise UsageError(
            "SCRIPT is neither Python nor executable",
            where=name,
            why="its first bytes are not those of a Python file",
            fix=f"chmod +x {name}, or give the path of a Python file",
        )
    found = shutil.which(name) if "/" not in name and not path.exists() else None
    if found is not None:
        return Program(ProgramKind.EXECUTABLE, found)
    what = "SCRIPT is a directory" if path.is_dir() else "no such script"
    fix = "Give the path of a Python file or of a program, or a module's name behind -m"
    raise NotFound(what, where=name, fix=fix)


def _find_module(name: str) -> Program:
    top = name.partition(".")[0]
    here = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])  # as `python -m` does
    if here is None and importlib.util.find_spec(top) is None:
        raise NotFound(
            f"no module named {top!r}",
            where=f"-m {name}",
            why="looked in the working directory and where Python keeps its packages",
            fix="Start it from the folder that holds the package, or install it",
        )
    return Program(ProgramKind.MODULE, name)


def _is_python(path: Path) -> bool:
    """Whether a file is a Python script, by its name or its first line."""
    if path.suffix in (".py", ".pyw"):
        return True
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as problem:
        raise NotFound(
            "cannot read SCRIPT",
            where=str(path),
            why=problem.strerror or "",
            fix="Check that you may read it",
        ) from problem
    interpreter = interpreter_of(head)
    if interpreter:
        return any(Path(word).name.startswith("python") for word in interpreter)
    return not head.startswith(_ELF) and b"\0" not in head


def interpreter_of(head: bytes) -> list[str]:
    r"""Return the words of a file's first line that name its interpreter; none without such a line.

    >>> interpreter_of(b"#!/usr/bin/env python3 -I\nimport sys\\n")
    ['/usr/bin/env', 'python3', '-I']
    """
    if not head.startswith(b"#!"):
        return []
    return os.fsdecode(head[2:].split(b"\n", 1)[0]).split()
