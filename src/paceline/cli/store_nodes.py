"""``paceline store fit`` and ``store status``: packs on the local storage of nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.report.units import format_bytes, plural

if TYPE_CHECKING:
    from paceline.store.serve.fit import StoreFit
    from paceline.store.serve.status import NodeReport

_JSON_HELP = "Print one JSON object on stdout."
TOKEN_HELP = "File with the nodes' secret [default: yours, ~/.config/paceline/token]."


@click.command("fit", epilog="Example: paceline store fit train.pack --nodes 8 --local 56GiB")
@click.argument("path", metavar="PACK")
@click.option("--nodes", type=click.IntRange(1), required=True, help="Number of nodes.")
@click.option("--local", metavar="BYTES", required=True, help="Local storage of each, as 56GiB.")
@click.option("--replicas", default=1, type=click.IntRange(1), help="Copies of each shard.")
@click.option("--everywhere", multiple=True, metavar="PATTERN", help="As for serve.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def fit_nodes(
    path: str, nodes: int, local: str, replicas: int, everywhere: tuple[str, ...], as_json: bool
) -> None:
    """Say whether PACK fits on the local storage of nodes, and what would make it fit.

    For each codec: the local storage that the node with the largest share needs, and the least
    number of nodes. Codecs are measured on some samples. Exits with status 1 if nothing fits.
    """
    from paceline.core.config import parse_size
    from paceline.store import open_pack
    from paceline.store.serve.fit import fit_pack
    from paceline.store.serve.node import shards_of

    with open_pack(path) as pack:
        shards = shards_of(pack, everywhere)
        found = fit_pack(
            pack,
            nodes=nodes,
            local_bytes=parse_size(local, where="--local"),
            replicas=replicas,
            everywhere=shards,
        )
    if as_json:
        print(json.dumps({**found.to_json(), "ok": found.codec is not None}))
    else:
        _print_fit(found)
    if found.codec is None:
        sys.exit(1)


@click.command("status", epilog="Example: paceline store status train.pack --nodes 10.0.0.1:7420")
@click.argument("path", metavar="PACK")
@click.option("--nodes", required=True, help="HOST:PORT of nodes, separated by commas.")
@click.option("--token-file", type=click.Path(path_type=Path), help=TOKEN_HELP)
@click.option("--tls", is_flag=True, help="As the nodes were started.")
@click.option("--wait", "wait_s", default=5.0, help="Seconds to wait for a node's answer.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def node_status(
    path: str, nodes: str, token_file: Path | None, tls: bool, wait_s: float, as_json: bool
) -> None:
    """Print what the nodes that serve PACK hold, have read and sent, and have left to copy.

    PACK is the pack or a folder with its index. One node is enough: nodes name each other. Exits
    with status 5 if a node does not answer.
    """
    from paceline.core.errors import RankLost
    from paceline.core.token import find_token
    from paceline.store.read.pack import open_packed
    from paceline.store.serve.links import tcp_connector
    from paceline.store.serve.status import ask_nodes

    token = find_token(token_file)
    with open_packed(path, index_only=True) as pack:
        connect = tcp_connector(pack.identity, token, tls=tls)
        lengths = [int(length) for length in pack.index.shard_lengths]
    names = [name for name in nodes.split(",") if name]
    reports = ask_nodes(names, connect, wait_s)
    held = set[int]().union(*(report.card.held for report in reports if report.card))
    missing = len(lengths) - len(held)
    if as_json:
        fields = {"shard_count": len(lengths), "shard_bytes": sum(lengths), "unheld": missing}
        records = [report.to_json() for report in reports]
        print(json.dumps({"version": 1, **fields, "nodes": records}))
    else:
        _print_status(reports, len(lengths), missing)
    if any(report.card is None for report in reports):
        sys.exit(RankLost.exit_code)


def _print_fit(found: StoreFit) -> None:
    print(
        f"{format_bytes(found.shard_bytes)} of shards, {plural(found.replicas, 'replica')}, "
        f"on {plural(found.nodes, 'node')} of {format_bytes(found.local_bytes)}"
    )
    print(f"{'codec':>10} {'size':>6} {'per node':>10} {'headroom':>9} {'least nodes':>12}")
    for row in found.codecs:
        least = f"{row.least_nodes:,}" if row.least_nodes else "-"
        share = format_bytes(row.node_bytes)
        print(
            f"{row.codec:>10} {row.size_factor:>6.2f} {share:>10} {row.headroom:>9.2f} {least:>12}"
        )
    if found.codec is not None:
        print(f"fits: {found.codec}")
    elif found.least_nodes:
        print(f"does not fit; the least number of nodes that would do is {found.least_nodes:,}")
    else:
        print("does not fit on any number of such nodes: a shard, or the index, is too large")


def _print_status(reports: list[NodeReport], shard_count: int, missing: int) -> None:
    columns = ("shards", "held", "to copy", "source", "peers", "sent", "reads", "missed", "failed")
    width = max(len(report.node) for report in reports)
    print(" ".join([f"{'node':<{width}}", *(f"{name:>10}" for name in columns)]))
    for report in reports:
        card = report.card
        if card is None:
            print(f"{report.node:<{width}} {report.why}")
            continue
        load = card.load
        cells = [
            f"{len(card.held):,}",
            format_bytes(load.held_bytes),
            f"{load.waiting_shards:,}",
            format_bytes(load.source_bytes),
            format_bytes(load.peer_bytes),
            format_bytes(load.sent_bytes),
            f"{load.reads:,}",
            f"{load.missed:,}",
            f"{load.failed_copies:,}",
        ]
        print(" ".join([f"{report.node:<{width}}", *(f"{cell:>10}" for cell in cells)]))
    served = shard_count - missing
    print(f"{served:,} of {plural(shard_count, 'shard')} are held by a node that answers")
