"""``paceline pack``: a folder of small files becomes one checksummed data set."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.cli.streams import terminal
from paceline.core.config import parse_size
from paceline.core.errors import ConfigError, Interrupted
from paceline.report.units import format_bytes, format_rate, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.clock import Clock
    from paceline.store import CodecChoice, PackProgress, PackSummary

_LINE_INTERVAL_S = 10.0


def size_bytes(text: str) -> int:
    """Return the bytes that ``256MiB``, ``1G`` or ``4096`` stands for, as in settings."""
    try:
        return parse_size(text)
    except ConfigError as problem:
        raise click.BadParameter(f"{problem.what}; write it as 256MiB or 4096") from None


def rate_bytes_per_s(text: str) -> int:
    """Return the bytes per second that ``200MB/s``, ``1.5GB/s`` or ``4096`` stands for."""
    match = re.fullmatch(r"([0-9.]+)\s*([kMGT]?)(?:B(?:/s)?)?", text.strip())
    try:
        if match is None:
            raise ValueError
        return int(float(match[1]) * 1000 ** " kMGT".index(match[2] or " "))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a rate; write it as 200MB/s") from None


@click.command(
    epilog="Examples: paceline pack imagenet/train /scratch/train.pack; "
    "paceline pack 'shards/train-{000..146}.tar' /scratch/train.pack; "
    "paceline pack train.mdb /scratch/train.pack; "
    "paceline pack --append more /scratch/train.pack"
)
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.argument("destination", metavar="DST")
@click.option(
    "--shard-size",
    type=size_bytes,
    metavar="SIZE",
    help="Maximum size of a shard; larger samples are stored in chunks.  "
    "[default: 256MiB, more for packs of more than 64 GiB]",
)
@click.option(
    "--codec",
    type=click.Choice(["none", "lz4", "zstd", "zstd-dict", "auto"]),
    help="How samples are compressed, each that gets smaller by it; zstd-dict is zstd with a "
    "dictionary of what small samples have in common. auto: what makes the samples smallest and "
    "still feeds --feed-rate.  [default: none]",
)
@click.option("--codec-level", type=int, help="Level of the codec, 1 to 19.  [default: 3]")
@click.option(
    "--shuffle",
    type=click.Choice(["auto", "none", "2", "4", "8"]),
    help="Bytes of the elements of arrays, to compress like bytes of them together; auto reads "
    "them from .npy headers.  [default: auto]",
)
@click.option(
    "--feed-rate",
    "feed_bytes_per_s",
    type=rate_bytes_per_s,
    metavar="RATE",
    help="Bytes of samples that the loop needs in a second, as 200MB/s, for --codec auto.  "
    "[default: what the storage of DST feeds without a codec, measured]",
)
@click.option(
    "--feed",
    type=click.Choice(["async", "sync"]),
    help="Whether samples are read and decoded beside the steps of the loop, or between them, for "
    "--codec auto.  [default: async]",
)
@click.option(
    "--parity",
    type=int,
    metavar="K",
    help="Add a parity file for every K shards, to repair a lost or damaged shard.",
)
@click.option(
    "--symlinks",
    type=click.Choice(["error", "follow", "skip"]),
    help="Refuse symbolic links (the default), pack their targets, or leave them out, with all "
    "that is neither a file nor a folder.",
)
@click.option("--append", is_flag=True, help="Add the samples to the existing pack DST.")
@click.option(
    "--restart",
    is_flag=True,
    default=None,
    help="Discard the shards that a killed `paceline pack` left, instead of resuming.",
)
@click.option(
    "--no-space-check",
    "check_space",
    flag_value=False,
    default=None,
    help="Pack even if the samples do not fit: for a file system that compresses.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be packed; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def pack(
    sources: tuple[str, ...],
    destination: str,
    shard_size: int | None,
    codec: str | None,
    codec_level: int | None,
    shuffle: str | None,
    feed_bytes_per_s: int | None,
    feed: str | None,
    parity: int | None,
    symlinks: str | None,
    append: bool,
    restart: bool | None,
    check_space: bool | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Pack SRC into the new pack DST: a folder, tar archives, an LMDB database, TFRecord files.

    The sub-folders of SRC become the classes; in WebDataset shards, the .cls members name the
    classes. If killed, there is either no DST and perhaps a DST.partial, from which the next
    `paceline pack` resumes, or the complete pack DST.
    """
    from paceline import store
    from paceline.core.clock import SystemClock
    from paceline.core.config import resolve
    from paceline.core.files import free_bytes

    flags = {
        "shard_bytes": shard_size,
        "codec": codec,
        "codec_level": codec_level,
        "shuffle": shuffle,
        "feed_bytes_per_s": feed_bytes_per_s,
        "feed": feed,
        "parity_group": parity,
        "symlinks": symlinks,
        "restart": restart,
        "check_space": check_space,
    }
    options = resolve(store.PackOptions, flags=flags).config
    if append:
        _refuse_beside_append(dry_run=dry_run, parity=parity, restart=restart)
    source = store.find_source(sources)
    if dry_run:
        summary = store.plan_pack(source, destination, options=options)
    else:
        action = store.append if append else store.pack
        with _interrupted(destination, append=append), _progress(SystemClock()) as on_progress:
            summary = action(source, destination, options=options, on_progress=on_progress)
    if not _new_count(summary, append=append):
        print(_nothing_found(summary), file=sys.stderr)
    free = free_bytes(Path(destination).absolute()) if dry_run else None
    if as_json:
        found: dict[str, float | None] = {"free_bytes": free} if dry_run else {}
        found["capacity_factor"] = summary.capacity_factor
        print(json.dumps({**summary.to_json(), **found, "dry_run": dry_run}))
    else:
        _print_summary(summary, dry_run=dry_run, append=append)
        if free is not None:
            _print_space(summary, free)


@contextlib.contextmanager
def _interrupted(destination: str, *, append: bool) -> Iterator[None]:
    """Say what Ctrl-C leaves behind, and how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        partial = Path(destination + ".partial")
        if append or not partial.is_dir():
            raise
        raise Interrupted(
            "packing was interrupted",
            where=str(partial),
            why="the shards that are complete are kept there",
            fix="Run the same command again to resume (--restart to start over)",
        ) from None


def _refuse_beside_append(*, dry_run: bool, parity: int | None, restart: bool | None) -> None:
    from paceline.core.errors import UsageError

    why_not = {
        "--dry-run": (dry_run, "--append has no dry run"),
        "--parity": (parity, "the parity of the pack also holds for new shards"),
        "--restart": (restart, "an append never resumes"),
    }
    for name, (given, why) in why_not.items():
        if given:
            raise UsageError(
                f"--append and {name} exclude each other",
                where="paceline pack",
                why=why,
                fix="Leave one of them out",
            )


def _print_summary(summary: PackSummary, *, dry_run: bool, append: bool) -> None:
    new_count = _new_count(summary, append=append)
    before = f" to {summary.reused_sample_count:,}" if append else ""
    verb = "appended" if append else "packed"
    print(
        f"{'would pack' if dry_run else verb} {plural(new_count, 'sample')}{before} in "
        f"{plural(summary.class_count, 'class')}, {format_bytes(summary.sample_bytes)}, "
        f"into {plural(summary.shard_count, 'shard')} ({format_bytes(summary.pack_bytes)})"
    )
    if summary.elapsed_s > 0 and not append:
        print(_rate(summary))
    if summary.stored_bytes < summary.sample_bytes:
        saved = format_bytes(summary.sample_bytes - summary.stored_bytes)
        print(f"compressed: {saved} less, capacity factor {summary.capacity_factor:.2f}")
    if summary.choice is not None:
        _print_choice(summary.choice)
    print(f"file opens per epoch: {summary.opens_before:,} -> {summary.opens_after:,}")


def _print_choice(choice: CodecChoice) -> None:
    print(f"codec {choice.codec}: {choice.why}")
    for rate in choice.rates:
        fed = f", feeds {format_rate(rate.feed_bytes_per_s)}" if rate.feed_bytes_per_s else ""
        print(
            f"  {rate.codec}: capacity factor {rate.capacity_factor:.2f}, decodes "
            f"{format_rate(rate.decode_bytes_per_s)} on {plural(choice.threads, 'thread')}{fed}"
        )


def _new_count(summary: PackSummary, *, append: bool) -> int:
    """Return how many samples the command packs; an append counts those of the pack as reused."""
    return summary.sample_count - (summary.reused_sample_count if append else 0)


def _nothing_found(summary: PackSummary) -> str:
    return (
        f"warning: nothing was found to pack in {summary.source}: each file in it or below it "
        "becomes a sample, and its sub-folders become the classes; of tar archives, each member "
        "that is a file"
    )


def _print_space(summary: PackSummary, free: int) -> None:
    verdict = "enough" if summary.pack_bytes <= free else "too little"
    needed = format_bytes(summary.pack_bytes)
    print(f"space at the destination: {needed} needed, {format_bytes(free)} free: {verdict}")


def _rate(summary: PackSummary) -> str:
    reused = summary.reused_sample_count
    share = (summary.sample_count - reused) / max(summary.sample_count, 1)
    files_per_s = (summary.sample_count - reused) / summary.elapsed_s
    megabytes_per_s = summary.sample_bytes * share / summary.elapsed_s / 1e6
    text = f"in {summary.elapsed_s:.1f} s: {files_per_s:,.0f} files/s, {megabytes_per_s:,.1f} MB/s"
    if reused:
        text += f"; {reused:,} samples were packed by an earlier `paceline pack`"
    return text


@contextlib.contextmanager
def _progress(clock: Clock) -> Iterator[Callable[[PackProgress], None]]:
    """Yield a callback that shows progress on stderr: a bar on a terminal, else lines."""
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
    with Progress(*columns, console=Console(file=terminal()), transient=True) as bar:
        task = bar.add_task("pack", samples="", total=None)
        shown_s = clock.now_s() - 1

        def show(progress: PackProgress) -> None:
            nonlocal shown_s
            _show_reused(progress)
            if clock.now_s() - shown_s >= 0.1:
                shown_s = clock.now_s()
                total = progress.byte_total or None
                bar.update(
                    task, completed=progress.byte_count, total=total, samples=_samples(progress)
                )

        yield show


def _line_printer(clock: Clock) -> Callable[[PackProgress], None]:
    start_s = shown_s = clock.now_s()

    def show(progress: PackProgress) -> None:
        nonlocal shown_s
        _show_reused(progress)
        now_s = clock.now_s()
        if now_s - shown_s >= _LINE_INTERVAL_S:
            shown_s = now_s
            rate = (progress.byte_count - progress.reused_byte_count) / (now_s - start_s)
            line = f"packing: {_samples(progress)} samples, {format_bytes(progress.byte_count)}"
            if progress.byte_total:
                line += f" of {format_bytes(progress.byte_total)}"
            line += f", {rate / 1e6:,.1f} MB/s"
            if progress.byte_total and rate > 0:
                left_s = (progress.byte_total - progress.byte_count) / rate
                line += f", {_duration(left_s)} left"
            print(line, file=sys.stderr, flush=True)

    return show


def _show_reused(progress: PackProgress) -> None:
    """Print once, on the first report, how many samples a killed `pack` left."""
    if progress.reused_byte_count and progress.byte_count == progress.reused_byte_count:
        print(
            f"resuming after {progress.sample_count:,} samples, "
            f"{format_bytes(progress.byte_count)}, that an earlier `paceline pack` packed "
            "(--restart to start over)",
            file=sys.stderr,
            flush=True,
        )


def _samples(progress: PackProgress) -> str:
    if not progress.sample_total:
        return f"{progress.sample_count:,}"
    return f"{progress.sample_count:,} of {progress.sample_total:,}"


def _duration(seconds: float) -> str:
    """Return a time as people say it.

    >>> _duration(59), _duration(61), _duration(7300)
    ('59 s', '1 min 1 s', '2 h 1 min')
    """
    minutes, rest = divmod(int(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
