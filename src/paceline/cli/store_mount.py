"""``paceline store mount`` and ``unmount``: a pack as a file system of the kernel."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.store.posix.fuse import FuseMount


@click.command(
    "mount",
    epilog="Example: paceline store mount train.pack:/data -- busybox ls -l /data",
)
@click.option("--threads", type=click.IntRange(1, 64), help="That serve the kernel.  [default: 4]")
@click.option("--dry-run", is_flag=True, help="Check all; mount nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object once it is mounted.")
@click.argument("mount", metavar="PACK:/PATH")
@click.argument("program", metavar="[-- PROGRAM [ARGS]...]", nargs=-1, type=click.UNPROCESSED)
def mount_pack(
    threads: int | None, dry_run: bool, as_json: bool, mount: str, program: tuple[str, ...]
) -> None:
    """Mount PACK at the empty folder /PATH, for all programs: static and setuid ones, too.

    With PROGRAM, until it ends, and exits as it does; else until Ctrl-C, SIGTERM or unmount. Needs
    FUSE, and root or fusermount3. It is slower than exec (docs/guides/posix.md).
    """
    from paceline.core.errors import UsageError
    from paceline.store.posix import fuse
    from paceline.store.posix.mounts import parse_mounts
    from paceline.store.posix.serving import serve_mount

    if as_json and program and not dry_run:
        raise UsageError(
            "stdout is the program's", fix="Give --json without PROGRAM, or with --dry-run"
        )
    (parsed,) = parse_mounts([mount])
    threads = threads or fuse.THREADS
    fields = {"pack": parsed.place, "point": parsed.point, "threads": threads, "dry_run": dry_run}

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def say_ready(_: FuseMount) -> None:
        if as_json:
            print(json.dumps({"version": 1, **fields, "pid": os.getpid()}), flush=True)
        elif not program:
            print(f"mounted {parsed.place} at {parsed.point}; Ctrl-C ends it", flush=True)

    if dry_run:
        fuse.check_point(parsed.point, tell=tell, dry_run=True)
        fuse.check_system()
        if as_json:
            print(json.dumps({"version": 1, **fields}))
        else:
            print(f"would mount {parsed.place} at {parsed.point}")
        return
    sys.exit(serve_mount(parsed, program, threads=threads, on_ready=say_ready, tell=tell))


@click.command("unmount", epilog="Example: paceline store unmount /data")
@click.option("--lazy", is_flag=True, help="Also while files are open: they stay readable.")
@click.option("--dry-run", is_flag=True, help="Say what would be unmounted; do nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
@click.argument("point", metavar="PATH")
def unmount_pack(lazy: bool, dry_run: bool, as_json: bool, point: str) -> None:
    """Take the mount of a pack at PATH away; its server ends.

    Also one whose server was killed.
    """
    from paceline.store.posix import fuse

    pack = fuse.unmount_pack(point, lazy=lazy, dry_run=dry_run)
    if as_json:
        fields = {"pack": pack, "point": os.path.abspath(point), "dry_run": dry_run}  # noqa: PTH100
        print(json.dumps({"version": 1, **fields}))
    else:
        print(f"{'would unmount' if dry_run else 'unmounted'} {pack} at {point}")
