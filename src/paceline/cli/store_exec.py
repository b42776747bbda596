"""``paceline store exec``: a program with packs mounted."""

from __future__ import annotations

import json
import os
import shlex

import click


@click.command(
    "exec",
    context_settings={"allow_interspersed_args": False},  # what follows PROGRAM is the program's
    epilog="Example: paceline store exec --mount train.pack:/data -- python train.py /data",
)
@click.option(
    "--mount",
    "mounts",
    metavar="PACK:/PATH",
    multiple=True,
    required=True,
    help="Show the samples of PACK as files below /PATH; may be repeated.",
)
@click.option("--only", metavar="PROGRAM", multiple=True, help="Only these programs see mounts.")
@click.option("--not", "never", metavar="PROGRAM", multiple=True, help="These programs do not.")
@click.option("--dry-run", is_flag=True, help="Check all, print the variables; start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --dry-run: print one JSON object.")
@click.argument("program")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def exec_program(
    mounts: tuple[str, ...],
    only: tuple[str, ...],
    never: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    program: str,
    args: tuple[str, ...],
) -> None:
    """Run PROGRAM with ARGS; it sees packs as folders of files that cannot be written.

    Programs that it starts see them too. Exits as PROGRAM does. Static and setuid programs
    cannot: paceline store mount is for them (docs/guides/posix.md).
    """
    from paceline.core.config import environment
    from paceline.store.posix.mounts import parse_mounts, variables
    from paceline.store.posix.programs import command_for

    parsed = parse_mounts(mounts)
    path, words = command_for([program, *args], parsed)
    added = variables(parsed, environment(), only=only, never=never)
    if dry_run:
        if as_json:
            print(json.dumps({"version": 1, "dry_run": True, "program": path, "variables": added}))
            return
        print("\n".join(f"{name}={shlex.quote(value)}" for name, value in added.items()))
        return
    os.execve(path, words, {**environment(), **added})
