"""``paceline torture``: injects faults on this file system, in campaigns of one kind each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from paceline.studies.torture_store import TortureReport


@click.group(epilog="Example: paceline torture store --dir /scratch")
def torture() -> None:
    """Inject faults into packs, packing and ledgers, and count the faults that go undetected."""


def _limit(_context: click.Context, _option: click.Parameter, text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdigit():
        raise click.BadParameter(f"{text!r} is neither a number nor all")
    return int(text)


@torture.command(epilog="Example: paceline torture store --dir /scratch --corruptions 200")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder on the file system to test [default: current directory].",
)
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
@click.option(
    "--seed",
    type=int,
    default=1,
    show_default=True,
    help="Seed for damage and kills; the same seed repeats them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
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
    report = torture_store(folder, options, on_progress=_show if sys.stderr.isatty() else None)
    if as_json:
        click.echo(json.dumps({**report.to_json(), "ok": report.ok}))
    else:
        _print_report(report)
    if not report.ok:
        sys.exit(1)


@torture.command(epilog="Example: paceline torture ledger --dir /scratch --operations 100000")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder on the file system to test [default: current directory].",
)
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
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of the operations.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def ledger(folder: Path, operations: int, kills: int, seed: int, as_json: bool) -> None:
    """Kill the writer of a federation's ledger; compare what is left with a model.

    Tokens must be conserved, no balance negative, every operation done exactly once. All files are
    in a new folder, which is removed. Exits with status 1 after a failure.
    """
    from paceline.federated.ledger.torture.campaign import torture_ledger

    on_progress = _show if sys.stderr.isatty() else None
    report = torture_ledger(
        folder, operations=operations, kills=kills, seed=seed, on_progress=on_progress
    )
    if on_progress:
        on_progress("")
    if as_json:
        click.echo(json.dumps({**report.to_json(), "ok": report.ok}))
    else:
        verdict = "all as expected" if report.ok else f"{report.failure_count:,} FAILED"
        click.echo(
            f"{report.operations:,} operations, {report.kills:,} kills, {report.repeated:,} "
            f"repeated, {report.refused:,} refused in {report.elapsed_s:.1f} s: {verdict}"
        )
        click.echo(
            f"{report.blocks:,} blocks, {report.transactions:,} transactions, {report.postings:,} "
            f"postings, verified in {report.verify_s:.1f} s"
        )
        for failure in report.failures:
            click.echo(f"{'FAILED':>9}  {failure}")
    if not report.ok:
        sys.exit(1)


@torture.command(epilog="Example: paceline torture cluster --dir /scratch --kills 20")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder for the nodes' local storage [default: current directory].",
)
@click.option(
    "--kills", type=click.IntRange(1), default=200, show_default=True, help="Nodes to kill."
)
@click.option(
    "--nodes", type=click.IntRange(2), default=3, show_default=True, help="Nodes that serve."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for data and kills.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
def cluster(folder: Path, kills: int, nodes: int, seed: int, as_json: bool) -> None:
    """Kill the nodes that serve a pack while a client reads: are all bytes right?

    Starts nodes on this machine, two copies of each shard, and kills one at a time. Takes about two
    seconds for each kill. All files are in a new folder, which is removed. Exits with status 1 if a
    read failed, or returned wrong bytes.
    """
    from paceline.studies.torture_cluster import ClusterOptions, torture_cluster

    options = ClusterOptions(kills=kills, nodes=nodes, seed=seed)
    report = torture_cluster(folder, options, on_progress=_show if sys.stderr.isatty() else None)
    if as_json:
        click.echo(json.dumps({**report.to_json(), "ok": report.ok}))
    else:
        print(
            f"{report.kills:,} nodes killed, {report.wiped:,} of them came back without files: "
            f"{report.batches:,} batches read, {report.failed:,} failed, {report.wrong:,} wrong; "
            f"a batch took {report.read_s_p50 * 1e3:.1f} ms, p99 {report.read_s_p99 * 1e3:.1f} ms, "
            f"at most {report.read_s_max * 1e3:.0f} ms"
        )
        for problem in report.problems:
            print(f"   FAILED  {problem}")
    if not report.ok:
        sys.exit(1)


def _show(line: str) -> None:
    click.echo(f"\r\x1b[K{line}", nl=False, err=True)


def _print_report(report: TortureReport) -> None:
    if sys.stderr.isatty():
        _show("")
    print(f"{report.folder} ({report.file_system}), seed {report.seed}")
    for campaign in report.campaigns:
        verdict = (
            f"{campaign.failure_count:,} FAILED" if campaign.failure_count else "all as expected"
        )
        print(f"{campaign.name}: {campaign.cases:,} cases in {campaign.elapsed_s:.1f} s, {verdict}")
        for name, count in campaign.counts.items():
            print(f"{count:>9,}  {name}")
        for failure in campaign.failures:
            print(f"{'FAILED':>9}  {failure}")
