"""Names that people try for commands, and what they mean: one step from guess to command."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAME = {
    "run": "launch train torchrun",
    "why": "explain analyze analyse diagnose",
    "report": "show view summary",
    "plan": "predict estimate",
    "probe": "bench benchmark measure",
    "characterize": "characterise sweep scale",
    "doctor": "check env info",
    "fed": "federated federation federate",
    "trace compare": "compare diff",
    "trace export": "export convert",
    "trace stats": "stats",
    "trace efficiency": "efficiency",
    "queue submit": "submit sbatch",
    "queue cancel": "cancel scancel",
    "queue ls": "jobs ps squeue",
    "store exec": "exec",
    "store extract": "extract unpack",
    "store mount": "mount",
    "store repair": "repair",
    "store unmount": "unmount umount",
    "store verify": "verify",
    "fed ledger": "ledger",
    "--version": "version",
}
_SAME_IN_GROUPS = {
    "queue": {
        "ls": "list jobs status ps",
        "submit": "add run",
        "cancel": "rm remove delete kill stop",
        "serve": "start daemon",
        "why": "show info logs explain",
    },
    "store": {
        "ls": "list dir",
        "stat": "info show",
        "verify": "check",
        "extract": "unpack",
        "unmount": "umount",
    },
    "trace": {
        "compare": "diff",
        "export": "convert",
        "stats": "summary info show",
    },
}
# Names with several meanings: the answer to each of them.
QUESTIONS = {
    "status": "Of a run: paceline report RUN. Of a queue: paceline queue ls. Of the data on this "
    "node: paceline store status.",
    "logs": "Of a run: what its ranks printed went to the terminal, and paceline why RUN says what "
    "became of it. Of a job in a queue: paceline queue why JOB.",
    "log": "Of a run: paceline why RUN. Of a job in a queue: paceline queue why JOB.",
    "ls": "Jobs: paceline queue ls. Samples of a pack: paceline store ls PACK.",
    "list": "Jobs: paceline queue ls. Samples of a pack: paceline store ls PACK.",
    "stop": "A job of a queue: paceline queue cancel JOB. A run: Ctrl-C, or SIGTERM to paceline.",
    "kill": "A job of a queue: paceline queue cancel JOB. A run: Ctrl-C, or SIGTERM to paceline.",
    "simulate": "A queue: paceline queue simulate. A federation: paceline fed simulate. Ranks that "
    "are not there: paceline plan --simulate.",
    "serve": "Jobs: paceline queue serve. Data: paceline store serve.",
    "profile": "paceline run records by itself; --profile-steps N adds operators and kernels.",
    "optimize": "What would help a run: paceline why RUN --remedies. Values to try in it: paceline "
    "run --tune.",
    "tune": "paceline run --tune tries two values in the running job.",
}


def _aliases() -> dict[tuple[str, ...], tuple[str, ...]]:
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for meant, names in _SAME.items():
        for name in names.split():
            found[name,] = tuple(meant.split())
    for group, verbs in _SAME_IN_GROUPS.items():
        for meant, names in verbs.items():
            for name in names.split():
                found[group, name] = (group, meant)
    return found


ALIASES = _aliases()


def meant_by(words: Sequence[str]) -> list[str]:
    """Return a command line with the name of the command that is meant.

    >>> meant_by(["compare", "A", "B"]), meant_by(["queue", "list"]), meant_by(["help", "run"])
    (['trace', 'compare', 'A', 'B'], ['queue', 'ls'], ['run', '--help'])

    Raises:
        UsageError: several are meant by that name.
    """
    words = list(words)
    if words[:1] == ["help"]:
        return [*meant_by(words[1:]), "--help"]
    for count in (2, 1):
        if (meant := ALIASES.get(tuple(words[:count]))) is not None:
            return [*meant, *words[count:]]
    if words and words[0] in QUESTIONS:
        raise UsageError(f"there is no command '{words[0]}'", fix=QUESTIONS[words[0]])
    return words
