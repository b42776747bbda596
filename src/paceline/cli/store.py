"""``paceline store``: list, read and verify packs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_JSON_HELP = "Print one JSON object on stdout."


@click.group(epilog="Example: paceline store ls train.pack")
def store() -> None:
    """List, read and verify packs."""


@store.command(epilog="Example: paceline store ls train.pack")
@click.argument("path", metavar="PACK")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def ls(path: str, as_json: bool) -> None:
    """List the samples of PACK: bytes, label and name of each, then the totals."""
    from paceline.cli.pack import format_bytes
    from paceline.store import open_pack

    with open_pack(path) as pack:
        lengths, labels, classes = pack.lengths, pack.labels, pack.class_names
        if as_json:
            samples = [
                {"name": _text(name), "bytes": int(lengths[i]), "label": int(labels[i])}
                for i, name in enumerate(pack.names)
            ]
            fields = {
                "path": path,
                "sample_count": len(pack),
                "sample_bytes": int(lengths.sum()),
                "shard_count": pack.shard_count,
                "class_names": [_text(name) for name in classes],
                "folder_names": [_text(name) for name in pack.folder_names],
                "samples": samples,
            }
            _print_json(fields)
            return
        for i, name in enumerate(pack.names):
            print(f"{lengths[i]:>12} {labels[i]:>6} {_safe(name)}")
        print(
            f"{len(pack):,} samples in {len(classes):,} classes, "
            f"{format_bytes(int(lengths.sum()))}, {pack.shard_count:,} shards",
            file=sys.stderr,
        )


@store.command(epilog="Example: paceline store cat train.pack cats/0001.jpg > cat.jpg")
@click.argument("path", metavar="PACK")
@click.argument("name", metavar="NAME")
def cat(path: str, name: str) -> None:
    """Write the verified bytes of the sample NAME of PACK to stdout."""
    from paceline.store import open_pack

    with open_pack(path) as pack:
        body = pack.read(pack.find(name))
    sys.stdout.buffer.write(body)
    sys.stdout.buffer.flush()


@store.command(epilog="Example: paceline store verify train.pack")
@click.argument("path", metavar="PACK")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def verify(path: str, as_json: bool) -> None:
    """Read all of PACK and name every damaged sample; exit code 4 if there is one."""
    from paceline.cli.pack import format_bytes
    from paceline.core.errors import CorruptPack
    from paceline.store import open_pack

    with open_pack(path) as pack:
        damaged = []
        for problem in pack.verify(_progress() if sys.stderr.isatty() else None):
            damaged.append(problem.to_json()["error"])
            if not as_json:
                print(f"{problem.what} ({problem.where}): {problem.why}", file=sys.stderr)
        byte_count = int(pack.lengths.sum())
        if as_json:
            fields = {"path": path, "sample_count": len(pack), "sample_bytes": byte_count}
            _print_json({**fields, "ok": not damaged, "damaged": damaged})
        elif not damaged:
            print(f"{len(pack):,} samples, {format_bytes(byte_count)}: all whole")
        else:
            print(f"{len(damaged):,} of {len(pack):,} samples are damaged", file=sys.stderr)
    if damaged:
        sys.exit(CorruptPack.exit_code)


def _progress() -> Callable[[int, int], None]:
    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\rverified {done:,} of {total:,} samples", end=end, file=sys.stderr, flush=True)

    return show


def _print_json(fields: dict[str, Any]) -> None:
    print(json.dumps({"version": 1, **fields}))


def _text(name: str) -> str:
    """Return `name` as JSON can hold it: bytes that are not UTF-8 are escaped."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _safe(name: str) -> str:
    r"""Return `name` so that it cannot upset a terminal or an encoder.

    What is not printable or not UTF-8, and the backslash, is escaped: no two names look alike.

    >>> print(_safe("a\nb\\c\udcff"), _safe("plain.png"))
    a\nb\\c\xff plain.png
    """
    encoding = sys.stdout.encoding or "ascii"
    escaped = "".join(_escaped(one) for one in name)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(one: str) -> str:
    if 0xDC80 <= ord(one) <= 0xDCFF:  # how os.fsdecode passes on a byte that is not UTF-8
        return f"\\x{ord(one) - 0xDC00:02x}"
    if one.isprintable() and one != "\\":
        return one
    return one.encode("unicode_escape").decode()
