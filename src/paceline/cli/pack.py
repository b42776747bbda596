"""``paceline pack``: a folder of small files becomes one checked data set."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.clock import Clock
    from paceline.store import PackProgress, PackSummary

_LINE_INTERVAL_S = 10.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def size_bytes(text: str) -> int:
    """Return the bytes that ``256MiB``, ``1G`` or ``4096`` stands for; 1k is 1,024.

    >>> size_bytes("256MiB") == 256 << 20, size_bytes("1.5k"), size_bytes("4096")
    (True, 1536, 4096)
    """
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        raise click.BadParameter(f"{text!r} is not a size; write it as 256MiB or 4096") from None


@click.command(epilog="Example: paceline pack imagenet/train /scratch/train.pack")
@click.argument("source", metavar="SRC")
@click.argument("destination", metavar="DST")
@click.option(
    "--shard-size", type=size_bytes, metavar="SIZE", help="Close a shard before it outgrows this."
)
@click.option(
    "--follow-symlinks",
    is_flag=True,
    default=None,
    help="Pack what symbolic links lead to, instead of refusing them.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be packed; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def pack(
    source: str,
    destination: str,
    shard_size: int | None,
    follow_symlinks: bool | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pack the folder SRC into the new pack DST.

    Sub-folders of SRC become the classes. Killed at any moment, this leaves nothing, a DST.partial
    that the next run replaces, or the whole pack.
    """
    from paceline.core.clock import SystemClock
    from paceline.core.config import resolve
    from paceline.store import PackOptions, pack_folder, plan_pack

    flags = {"shard_bytes": shard_size, "follow_symlinks": follow_symlinks}
    options = resolve(PackOptions, "pack", flags=flags).config
    if dry_run:
        summary = plan_pack(source, destination, options=options)
    else:
        with _progress(SystemClock()) as on_progress:
            summary = pack_folder(source, destination, options=options, on_progress=on_progress)
    if as_json:
        print(json.dumps({**summary.to_json(), "dry_run": dry_run}))
    else:
        _print_summary(summary, dry_run=dry_run)


def _print_summary(summary: PackSummary, *, dry_run: bool) -> None:
    print(
        f"{'would pack' if dry_run else 'packed'} {summary.sample_count:,} samples in "
        f"{summary.class_count:,} classes, {format_bytes(summary.sample_bytes)}, "
        f"into {summary.shard_count:,} shards ({format_bytes(summary.pack_bytes)})"
    )
    if summary.elapsed_s > 0:
        files_per_s = summary.sample_count / summary.elapsed_s
        megabytes_per_s = summary.sample_bytes / summary.elapsed_s / 1e6
        print(
            f"in {summary.elapsed_s:.1f} s: {files_per_s:,.0f} files/s, {megabytes_per_s:,.1f} MB/s"
        )
    print(f"opens per epoch: {summary.sample_count:,} -> {summary.shard_count + 1:,}")


def format_bytes(count: int) -> str:
    """Return `count` bytes as people read them.

    >>> format_bytes(999), format_bytes(1_500_000)
    ('999 bytes', '1.5 MB')
    """
    if count < 1000:
        return f"{count} bytes"
    units = ("kB", "MB", "GB", "TB")
    power = min((len(str(count)) - 1) // 3, len(units))
    return f"{count / 1000**power:.1f} {units[power - 1]}"


@contextlib.contextmanager
def _progress(clock: Clock) -> Iterator[Callable[[PackProgress], None]]:
    """Yield what shows progress on stderr: a bar for people, a line every 10 s for logs."""
    if not sys.stderr.isatty():
        yield _line_printer(clock)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (
        TextColumn("packing {task.fields[samples]}"),
        BarColumn(),
        DownloadColumn(),
        Speed(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("pack", samples="", total=None)
        shown_s = clock.now_s() - 1

        def show(progress: PackProgress) -> None:
            nonlocal shown_s
            if clock.now_s() - shown_s >= 0.1:
                shown_s = clock.now_s()
                samples = f"{progress.sample_count:,}/{progress.sample_total:,}"
                total = progress.byte_total
                bar.update(task, completed=progress.byte_count, total=total, samples=samples)

        yield show


def _line_printer(clock: Clock) -> Callable[[PackProgress], None]:
    shown_s = clock.now_s()

    def show(progress: PackProgress) -> None:
        nonlocal shown_s
        if clock.now_s() - shown_s >= _LINE_INTERVAL_S:
            shown_s = clock.now_s()
            print(
                f"packing: {progress.sample_count:,} of {progress.sample_total:,} samples, "
                f"{format_bytes(progress.byte_count)} of {format_bytes(progress.byte_total)}",
                file=sys.stderr,
                flush=True,
            )

    return show
