"""The ``paceline`` command: finds the subcommand, turns errors into messages and exit codes.

A subcommand's module is imported when the subcommand is called, and imports its package inside its
function, so that ``--help`` takes no longer than the import of click.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys

import click

import paceline
from paceline.cli.lazy import LazyGroup
from paceline.cli.other_names import meant_by
from paceline.cli.streams import accept_any_text
from paceline.core.errors import PacelineError, StorageError

VERBS = {
    "demo": "See the whole loop on handwritten digits, in about a minute.",
    "doctor": "Check whether this machine is fit for training, and say what to fix.",
    "pack": "Pack a folder of samples into one checksummed data set.",
    "store": "Read and serve packs "
    "(ls, cat, stat, extract, exec, mount, unmount, verify, repair, serve, fit, status).",
    "probe": "Measure this machine.",
    "plan": "Predict step time and memory of a model on this machine.",
    "calibrate": "Correct the figures of a machine file by a run.",
    "run": "Run a PyTorch script on several ranks and record where its time goes.",
    "record": "Record the ranks that torchrun, accelerate or another launcher starts.",
    "why": "Say which rank was late in a run, and why.",
    "characterize": "Sweep a program's settings: how it scales here, and which of them pay.",
    "report": "Report a run: verdict, time by phase, skew, prediction against measurement.",
    "queue": "Share devices between jobs: run a queue (serve), or play one (simulate).",
    "fed": "Train on data that stays with its owners (run, simulate, ledger).",
    "trace": "Summarise and export a run's traces (stats, export).",
    "torture": "Inject faults into packs and ledgers on your disk; check that all are detected.",
}


@click.group(
    cls=LazyGroup,
    verbs=VERBS,
    package="paceline.cli",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: paceline demo. Exit codes: docs/reference/exit-codes.md",
)
@click.version_option(paceline.__version__, "-V", "--version", prog_name="paceline")
def app() -> None:
    """Measure, predict and fix what holds distributed deep learning back."""


def main() -> None:
    """Run the command line and exit with its code (docs/reference/exit-codes.md)."""
    accept_any_text()
    try:
        sys.argv[1:] = meant_by(sys.argv[1:])
        code = app.main(prog_name="paceline", standalone_mode=False)
        sys.stdout.flush()  # at interpreter exit a failure could not be reported
    except PacelineError as error:
        _explain(error, _wants_json(sys.argv[1:]))
        code = error.exit_code
    except click.ClickException as error:
        if _wants_json(sys.argv[1:]):
            fix = "See --help"
            _print_json({"code": "UsageError", "what": error.format_message(), "fix": fix})
        else:
            error.show()
        code = 2
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        code = 130
    except BrokenPipeError:  # the reader of our output has seen enough
        _drop_stdout()
        code = 1
    except OSError as problem:
        if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_stdout()
        full = StorageError(
            "cannot write",
            where=str(problem.filename or "standard output"),
            why=problem.strerror or "",
            fix="Free space, or send the output elsewhere",
        )
        _explain(full, wants_json=False)
        code = full.exit_code
    sys.exit(code or 0)


def _drop_stdout() -> None:
    """Discard what stdout still buffers: flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _wants_json(argv: list[str]) -> bool:
    """Return whether ``--json`` was given to Paceline, not to the program after it."""
    if not argv or argv[0] not in ("run", "record", "characterize"):
        return "--json" in (argv[: argv.index("--")] if "--" in argv else argv)
    command = getattr(importlib.import_module(f"paceline.cli.{argv[0]}"), argv[0])
    takes_value = {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option) and not parameter.is_flag
        for name in parameter.opts
    }
    rest = iter(argv[1:])
    for word in rest:
        if word == "--json":
            return True
        if word in takes_value:
            next(rest, None)
        elif not word.startswith("-"):
            break
    return False


def _print_json(fields: dict[str, str]) -> None:
    import json  # here: most commands print none

    empty = {"code": "", "what": "", "where": "", "why": "", "fix": ""}
    click.echo(json.dumps({"error": {**empty, **fields}}))


def _explain(error: PacelineError, wants_json: bool) -> None:
    if wants_json:
        import json

        click.echo(json.dumps(error.to_json()))
        return
    style = {"fg": "red", "bold": True}
    click.echo(click.style("error: ", **style) + error.what, err=True)  # type: ignore[arg-type]  # click types style loosely
    for label, text in (("where", error.where), ("why", error.why), ("fix", error.fix)):
        if text:
            click.echo(f"  {label:>5}: {text}", err=True)
