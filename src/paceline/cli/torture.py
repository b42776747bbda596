"""``paceline torture``: injects faults on this file system, in campaigns of one kind each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import click

from paceline.cli.streams import terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.studies.torture_store import TortureReport

Command = TypeVar("Command", bound="Callable[..., Any]")


class _Report(Protocol):
    """Of a campaign."""

    @property
    def ok(self) -> bool: ...

    def to_json(self) -> dict[str, Any]: ...


@click.group(epilog="Example: paceline torture store --dir /scratch")
def torture() -> None:
    """Inject faults into packs, packing and ledgers, and count the faults that go undetected."""


def _limit(_context: click.Context, _option: click.Parameter, text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise click.BadParameter(f"{text!r} is neither a number nor all")
    return int(text)


def _folder(what: str) -> Callable[[Command], Command]:
    return click.option(
        "--dir",
        "folder",
        type=click.Path(path_type=Path),
        default=Path(),
        help=f"{what} [default: current directory].",
    )


def _seed(what: str) -> Callable[[Command], Command]:
    return click.option("--seed", type=int, default=1, show_default=True, help=what)


_as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


@torture.command(epilog="Example: paceline torture store --dir /scratch --corruptions 200")
@_folder("Folder on the file system to test")
@click.option(
    "--corruptions",
    type=click.IntRange(0),
    default=2000,
    show_default=True,
    help="How often to damage a pack and read it.",
)
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=100,
    show_default=True,
    help="How often to kill packing or appending.",
)
@click.option(
    "--faults",
    callback=_limit,
    metavar="all|N",
    default="all",
    show_default=True,
    help="Fail each system call that changes the disk once (or only the first N).",
)
@_seed("Seed for damage and kills; the same seed repeats them.")
@_as_json
def store(
    folder: Path, corruptions: int, kills: int, faults: int | None, seed: int, as_json: bool
) -> None:
    """Damage packs, kill packing, fail system calls, extract names that lead out of the folder.

    Takes half a minute. All files are in a new folder, which is removed. Exits with status 1 if a
    fault goes undetected.
    """
    from paceline.studies.torture_parts import TortureOptions
    from paceline.studies.torture_store import torture_store

    options = TortureOptions(corruptions=corruptions, kills=kills, fault_limit=faults, seed=seed)
    report = torture_store(folder, options, on_progress=_progress())
    _end(report, _store_lines(report), as_json=as_json)


@torture.command(epilog="Example: paceline torture ledger --dir /scratch --operations 100000")
@_folder("Folder on the file system to test")
@click.option(
    "--operations",
    type=click.IntRange(1),
    default=10_000_000,
    show_default=True,
    help="How many random operations to write.",
)
@click.option(
    "--kills",
    type=click.IntRange(0),
    default=10_000,
    show_default=True,
    help="How often to kill the writer meanwhile.",
)
@_seed("Seed of the operations.")
@_as_json
def ledger(folder: Path, operations: int, kills: int, seed: int, as_json: bool) -> None:
    """Kill the writer of a federation's ledger; compare what is left with a model.

    Tokens must be conserved, no balance negative, every operation done exactly once. All files are
    in a new folder, which is removed. Exits with status 1 after a failure.
    """
    from paceline.federated.ledger.torture.campaign import torture_ledger

    report = torture_ledger(
        folder, operations=operations, kills=kills, seed=seed, on_progress=_progress()
    )
    verdict = "all as expected" if report.ok else f"{report.failure_count:,} FAILED"
    lines = [
        f"{report.operations:,} operations, {report.kills:,} kills, {report.repeated:,} repeated, "
        f"{report.refused:,} refused in {report.elapsed_s:.1f} s: {verdict}",
        f"{report.blocks:,} blocks, {report.transactions:,} transactions, {report.postings:,} "
        f"postings, verified in {report.verify_s:.1f} s",
        *map(_failed, report.failures),
    ]
    _end(report, lines, as_json=as_json)


@torture.command(epilog="Example: paceline torture cluster --dir /scratch --kills 20")
@_folder("Folder for the nodes' local storage")
@click.option(
    "--kills", type=click.IntRange(1), default=200, show_default=True, help="Nodes to kill."
)
@click.option(
    "--nodes", type=click.IntRange(2), default=3, show_default=True, help="Nodes that serve."
)
@_seed("Seed for data and kills.")
@_as_json
def cluster(folder: Path, kills: int, nodes: int, seed: int, as_json: bool) -> None:
    """Kill the nodes that serve a pack while a client reads: are all bytes right?

    Starts nodes on this machine, two copies of each shard, and kills one at a time. Takes about two
    seconds for each kill. All files are in a new folder, which is removed. Exits with status 1 if a
    read failed, or returned wrong bytes.
    """
    from paceline.studies.torture_cluster import ClusterOptions, torture_cluster

    options = ClusterOptions(kills=kills, nodes=nodes, seed=seed)
    report = torture_cluster(folder, options, on_progress=_progress())
    lines = [
        f"{report.kills:,} nodes killed, {report.wiped:,} of them came back without files: "
        f"{report.batches:,} batches read, {report.failed:,} failed, {report.wrong:,} wrong; "
        f"a batch took {report.read_s_p50 * 1e3:.1f} ms, p99 {report.read_s_p99 * 1e3:.1f} ms, "
        f"at most {report.read_s_max * 1e3:.0f} ms",
        *map(_failed, report.problems),
    ]
    _end(report, lines, as_json=as_json)


def _store_lines(report: TortureReport) -> list[str]:
    lines = [f"{report.folder} ({report.file_system}), seed {report.seed}"]
    for campaign in report.campaigns:
        verdict = (
            f"{campaign.failure_count:,} FAILED" if campaign.failure_count else "all as expected"
        )
        lines += [
            f"{campaign.name}: {campaign.cases:,} cases in {campaign.elapsed_s:.1f} s, {verdict}",
            *(f"{count:>9,}  {name}" for name, count in campaign.counts.items()),
            *map(_failed, campaign.failures),
        ]
    return lines


def _failed(what: str) -> str:
    return f"{'FAILED':>9}  {what}"


def _progress() -> Callable[[str], None] | None:
    return _show if sys.stderr.isatty() else None


def _show(line: str) -> None:
    click.echo(f"\r\x1b[K{line}", nl=False, file=terminal())


def _end(report: _Report, lines: Sequence[str], *, as_json: bool) -> None:
    """Print what a campaign found; exit with status 1 if something failed."""
    if sys.stderr.isatty():
        _show("")
    if as_json:
        click.echo(json.dumps({**report.to_json(), "ok": report.ok}))
    else:
        click.echo("\n".join(lines))
    if not report.ok:
        sys.exit(1)
