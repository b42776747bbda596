"""Whether the ranks that a command will start can be recorded, and what to do if they cannot.

Ranks are recorded through environment variables that every process inherits. They do not reach a
process that somebody else starts (a container's runtime, the other end of ssh), nor an interpreter
that ignores its environment. The error comes before anything starts.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, UsageError
from paceline.launch.program import interpreter_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_CONTAINERS = frozenset(
    (
        *("docker", "podman", "nerdctl", "ctr", "crictl", "kubectl", "oc", "lxc-attach"),
        *("singularity", "apptainer", "shifter", "enroot", "sarus", "ch-run", "systemd-nspawn"),
    )
)
_REMOTE = frozenset(
    ("ssh", "pdsh", "clush", "dsh", "rsh", "mosh", "pssh", "parallel-ssh", "ansible", "ray")
)
_OTHER_USER = frozenset(("sudo", "su", "doas", "runuser"))
# Programs that start the one behind their own options; each takes options with these values.
_WRAPPERS = {
    "env": {"-u", "-C", "-S"},
    "nice": {"-n"},
    "ionice": {"-c", "-n"},
    "taskset": {"-c"},
    "numactl": set[str](),
    "time": {"-o", "-f"},
    "timeout": {"-k", "-s"},
    "stdbuf": {"-i", "-o", "-e"},
    "nohup": set[str](),
    "setsid": set[str](),
    "chrt": set[str](),
    "catchsegv": set[str](),
}
_VALUE = re.compile(r"[0-9.,:x-]+[smhd]?|\w+=.*", re.ASCII)  # a core list, a time, a variable
_IGNORES_ENVIRONMENT = re.compile(r"-[bBdOqsuvxP]*[EIS]")  # of python's one-letter options


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why the ranks of a command cannot be recorded.

    Attributes:
        what: the obstacle.
        why: how it keeps the environment from the ranks.
    """

    what: str
    why: str


def check_recordable(command: Sequence[str], run: Path) -> None:
    """Refuse a command whose ranks cannot be recorded from outside.

    Args:
        command: program and arguments.
        run: folder of the run, for the line that the script can have instead.

    Raises:
        NotFound: there is no such program.
        UsageError: its ranks cannot be recorded; the error has the line for the script.
    """
    if shutil.which(command[0]) is None:
        raise NotFound(
            "no such program",
            where=command[0],
            why="it is not on PATH" if "/" not in command[0] else "",
            fix="Give the command as you would type it: paceline record -- torchrun train.py",
        )
    obstacle = find_obstacle(command)
    if obstacle is None:
        return
    raise UsageError(
        f"{obstacle.what}: its ranks cannot be recorded from outside",
        where=" ".join(command[:4]),
        why=obstacle.why,
        fix="Put this line into the script, before its loop, and start it without paceline record: "
        + script_line(run),
    )


def script_line(run: Path) -> str:
    """Return the line that records a script from inside, into folder `run`."""
    return f"import paceline; paceline.record({str(run)!r})"


def find_obstacle(command: Sequence[str]) -> Obstacle | None:
    """Return why the ranks of a command cannot be recorded; None if nothing speaks against it.

    >>> find_obstacle(["nice", "-n", "5", "docker", "run", "image"]).what
    'docker starts containers'
    >>> find_obstacle(["torchrun", "train.py", "docker"]) is None
    True
    """
    words = list(command)
    while words and (name := Path(words[0]).name) in _WRAPPERS:
        program = _without_options(words[1:], _WRAPPERS[name])
        own = words[1 : len(words) - len(program)]  # not the program's options: it may have a -i
        if name == "env" and {"-i", "-", "--ignore-environment"} & set(own):
            return Obstacle("env -i starts with an empty environment", _NOT_INHERITED)
        words = program
    if not words:
        return None
    name = Path(words[0]).name
    if name in _CONTAINERS:
        return Obstacle(f"{name} starts containers", _NOT_INHERITED)
    if name in _REMOTE:
        return Obstacle(f"{name} starts processes elsewhere", _NOT_INHERITED)
    if name in _OTHER_USER:
        return Obstacle(f"{name} starts processes as another user", _NOT_INHERITED)
    return _interpreter_obstacle(words)


_NOT_INHERITED = "they do not inherit the variables through which Paceline reaches each rank"


def _without_options(words: list[str], with_value: set[str]) -> list[str]:
    """Return what follows a wrapper's options and their values."""
    rest = iter(range(len(words)))
    for index in rest:
        word = words[index]
        if word in with_value:
            next(rest, None)
        elif not word.startswith("-") and not _VALUE.fullmatch(word):
            return words[index:]
    return []


def _interpreter_obstacle(words: list[str]) -> Obstacle | None:
    """Return an obstacle if Python ignores its environment, here or in a first line."""
    if not Path(words[0]).name.startswith("python"):
        words = _shebang(words[0])
        if words and Path(words[0]).name == "env":
            words = _without_options(words[1:], set())
        if not words or not Path(words[0]).name.startswith("python"):
            return None
    for word in words[1:]:
        if not word.startswith("-") or word in ("-c", "-m"):
            return None
        if _IGNORES_ENVIRONMENT.match(word):
            return Obstacle(
                f"{Path(words[0]).name} {word} ignores its environment",
                "-E and -I ignore PYTHONPATH, -S skips sitecustomize",
            )
    return None


def _shebang(program: str) -> list[str]:
    path = shutil.which(program)
    if path is None:
        return []
    try:
        with Path(path).open("rb") as file:
            return interpreter_of(os.read(file.fileno(), 512))
    except OSError:  # executable, but not readable
        return []
