"""``paceline store``: inspect packs, extract samples, verify packs, repair packs; exec, mount."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.cli.store_exec import exec_program
from paceline.cli.store_mount import mount_pack, unmount_pack
from paceline.cli.store_nodes import TOKEN_HELP, fit_nodes, node_status
from paceline.cli.streams import terminal
from paceline.report.units import format_bytes, format_rate, plural

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.core.errors import CorruptPack
    from paceline.store import Pack
    from paceline.store.care.findings import RepairReport
    from paceline.store.read.describe import FolderStat, PackStat, SampleStat

_JSON_HELP = "Print one JSON object on stdout."
_UNVERIFIED = "; not verified: paceline store verify reads it once and keeps the checksums"


@click.group(epilog="Example: paceline store ls train.pack")
def store() -> None:
    """Inspect packs, extract samples, verify packs, repair packs.

    PACK may also be data in place: an LMDB database, tar archives, TFRecord files or a folder. An
    index is then made beside it, once. They cannot be repaired.
    """


store.add_command(exec_program)
store.add_command(mount_pack)
store.add_command(unmount_pack)
store.add_command(fit_nodes)
store.add_command(node_status)


@store.command(epilog="Example: paceline store stat train.pack cats/0001.jpg")
@click.argument("path", metavar="PACK")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def stat(path: str, name: str | None, as_json: bool) -> None:
    """Print statistics of PACK, of a sample or of a folder.

    NAME is a sample, whose location is printed, or a folder. Reads only the index.
    """
    from paceline.store import open_pack
    from paceline.store.read.describe import FolderStat, describe_name, describe_pack

    with open_pack(path, index_only=True) as pack:
        if name is None:
            pack_stat = describe_pack(pack)
            _print_record(pack_stat) if as_json else _print_pack_stat(pack_stat)
            return
        name_stat = describe_name(pack, name)
    if as_json:
        _print_record(name_stat)
    elif isinstance(name_stat, FolderStat):
        _print_folder_stat(name_stat)
    else:
        _print_sample_stat(name_stat)


@store.command(epilog="Example: paceline store ls train.pack cats")
@click.argument("path", metavar="PACK")
@click.argument("folder", metavar="[FOLDER]", default="")
@click.option("-r", "--recursive", is_flag=True, help="Also list all sub-folders, at any depth.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def ls(path: str, folder: str, recursive: bool, as_json: bool) -> None:
    """List the samples and folders in PACK, or in a FOLDER of PACK.

    Lists bytes, label and name of each sample; names of folders end in a slash. Takes time
    proportional to the listing, not to the pack.
    """
    from paceline.store import open_pack

    with open_pack(path, index_only=True) as pack:
        labels = pack.labels
        if as_json:
            _print_listing(pack, path, folder, recursive=recursive)
            return
        samples = folders = size = 0
        for name, entry in _listed(pack, folder, recursive=recursive):
            if entry.is_folder:
                folders += 1
                print(f"{'-':>12} {'-':>6} {_safe(name)}/")
            else:
                samples += 1
                size += entry.size
                print(f"{entry.size:>12} {labels[entry.number]:>6} {_safe(name)}")
        print(
            f"{plural(samples, 'sample')}, {format_bytes(size)}, {plural(folders, 'folder')}; "
            f"the pack: {plural(len(pack), 'sample')} in {plural(len(pack.class_names), 'class')}, "
            f"{plural(pack.shard_count, 'shard')}{'' if pack.is_verified else _UNVERIFIED}",
            file=sys.stderr,
        )


@store.command(epilog="Example: paceline store cat train.pack cats/0001.jpg > cat.jpg")
@click.argument("path", metavar="PACK")
@click.argument("name", metavar="NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with base64 in it.")
def cat(path: str, name: str, as_json: bool) -> None:
    """Write the verified bytes of the sample NAME of PACK to stdout."""
    from paceline.store import open_pack

    with open_pack(path) as pack:
        body = pack.read(pack.find(name))
    if as_json:
        import base64

        fields = {"path": path, "name": _text(name), "bytes": len(body)}
        _print_json({**fields, "base64": base64.b64encode(body).decode()})
        return
    sys.stdout.buffer.write(body)
    sys.stdout.buffer.flush()


@store.command(epilog="Example: paceline store extract train.pack cats-only cats")
@click.argument("path", metavar="PACK")
@click.argument("destination", metavar="DEST")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--no-space-check",
    is_flag=True,
    help="Extract even if the files do not fit: for a file system that compresses.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be written; write nothing.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def extract(
    path: str,
    destination: str,
    names: tuple[str, ...],
    no_space_check: bool,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write samples of PACK as files below the new folder DEST.

    NAME is a sample, or a folder for all samples below it; without NAME, all samples are written.
    Permissions and times are restored. If killed, DEST either does not exist or is complete.
    """
    from paceline.store import open_pack
    from paceline.store.read.extract import extract as extract_samples

    with open_pack(path) as pack:
        summary = extract_samples(
            pack,
            destination,
            names,
            dry_run=dry_run,
            check_space=not no_space_check,
            on_progress=_progress("extracted", "samples"),
        )
    if as_json:
        _print_record(summary)
        return
    print(
        f"{'would extract' if dry_run else 'extracted'} {plural(summary.sample_count, 'sample')}, "
        f"{format_bytes(summary.sample_bytes)}, in {plural(summary.folder_count, 'folder')}"
    )


@store.command(epilog="Example: paceline store verify train.pack --shards")
@click.argument("path", metavar="PACK")
@click.option(
    "--shards",
    is_flag=True,
    help="Also compare the SHA-256 of each shard and parity file with that in the index.",
)
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def verify(path: str, shards: bool, as_json: bool) -> None:
    """Read all of PACK and name every damaged sample.

    Exits with status 4 if there is damage. With --shards every byte is checked, also between
    samples and in parity files. Of data in place that have no checksums yet, such as LMDB and tar,
    it computes and keeps them: from then on samples are compared with what they were at this time.
    """
    from paceline.store import add_checksums, open_pack
    from paceline.store.care.damage import verify_files

    damaged = []
    checked = 0
    wrong: list[CorruptPack] = []
    with open_pack(path) as pack:
        is_new = not pack.is_verified  # nothing to compare with: what is there now is kept
        if is_new:
            add_checksums(pack, _progress("read", "samples"))
        else:
            for problem in pack.verify(_progress("verified", "samples")):
                damaged.append(problem)
                if not as_json:
                    print(f"{problem.what} ({problem.where}): {problem.why}", file=sys.stderr)
        sample_count, byte_count = len(pack), int(pack.index.lengths.sum())
        if shards and not pack.is_in_place:
            checked, wrong = verify_files(path, _progress("compared", "files"))
        side_file = pack.side_file
    for problem in wrong if not as_json else ():
        print(f"{problem.what} ({problem.where}): {problem.why}", file=sys.stderr)
    errors = [*damaged, *wrong]
    if as_json:
        fields = {"path": path, "sample_count": sample_count, "sample_bytes": byte_count}
        fields |= {"file_count": checked, "ok": not errors, "checksums_added": is_new}
        _print_json({**fields, "damaged": [problem.to_json()["error"] for problem in errors]})
    elif not errors:
        files = f" and {plural(checked, 'file')}" if shards else ""
        outcome = f"read; their checksums are kept in {side_file}" if is_new else "all intact"
        print(f"{plural(sample_count, 'sample')}, {format_bytes(byte_count)}{files}: {outcome}")
        if shards and not checked:
            whose = "data in place" if side_file else "a pack of format version 1"
            print(f"{whose}: there are no digests of files", file=sys.stderr)
    else:
        files = f", {len(wrong):,} of {checked:,} files" if shards else ""
        print(f"{len(damaged):,} of {sample_count:,} samples{files} are damaged", file=sys.stderr)
        print(f"  fix: {errors[0].fix}", file=sys.stderr)
    if errors:
        sys.exit(errors[0].exit_code)


@store.command(epilog="Example: paceline store repair train.pack --source imagenet/train")
@click.argument("path", metavar="PACK")
@click.option("--source", metavar="FOLDER", help="The folder that was packed.")
@click.option(
    "--replica", metavar="PACK", help="A copy of the pack; it may be damaged in other places."
)
@click.option("--dry-run", is_flag=True, help="Print what would be repaired; write nothing.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def repair(
    path: str, source: str | None, replica: str | None, dry_run: bool, as_json: bool
) -> None:
    """Repair PACK: samples, shards, parity files, the index.

    Restores damaged bytes and missing or truncated files, and removes stale files. Bytes come from
    the folder that was packed, from a copy of the pack, or from its parity files, and are written
    only if they match their checksum. Exits with status 4 if something cannot be repaired.
    """
    from paceline.core.errors import CorruptPack
    from paceline.store.care.repair import repair_pack

    report = repair_pack(
        path,
        source=source,
        replica=replica,
        dry_run=dry_run,
        on_progress=_progress("examined", "shards"),
    )
    if as_json:
        _print_json({**report.to_json(), "ok": report.ok})
    else:
        would = "would be " if dry_run else ""
        for finding in report.repaired:
            print(
                f"{finding.what} ({finding.file}): {finding.why}; "
                f"{would}recovered from {_origin(finding.recovered_from)}"
            )
        for name in report.stale_files:
            print(f"{name}: stale, it belongs to no version of the pack; {would}removed")
        for finding in report.lost:
            print(
                f"{finding.what} ({finding.file}): {finding.why}; cannot be repaired",
                file=sys.stderr,
            )
        print(_repair_words(report))
        if report.lost:
            print("  fix: give --source FOLDER or --replica COPY", file=sys.stderr)
    if report.lost:
        sys.exit(CorruptPack.exit_code)


@store.command(epilog="Example: paceline store serve train.pack --listen 127.0.0.1:7420")
@click.argument("path", metavar="PACK")
@click.option("--listen", default="127.0.0.1:0", help="ADDRESS:PORT; port 0: any free one.")
@click.option("--peers", default="", help="HOST:PORT of the other nodes, separated by commas.")
@click.option("--local", type=click.Path(path_type=Path), help="Folder for this node's shards.")
@click.option("--replicas", default=1, help="Copies of each shard; the same on all nodes.")
@click.option("--token-file", type=click.Path(path_type=Path), help=TOKEN_HELP)
@click.option("--tls", is_flag=True, help="Encrypt what nodes send; the same on all nodes.")
@click.option(
    "--everywhere",
    multiple=True,
    metavar="PATTERN",
    help="All nodes hold the samples whose names match, such as 'val/*'; the same on all nodes.",
)
@click.option("--stage-rate", default=0.0, help="Most bytes/s read of PACK; 0: no limit.")
@click.option("--threads", default=1, help="Threads that send.")
@click.option("--json", "as_json", is_flag=True, help=_JSON_HELP)
def serve(
    path: str,
    listen: str,
    peers: str,
    local: Path | None,
    replicas: int,
    token_file: Path | None,
    everywhere: tuple[str, ...],
    stage_rate: float,
    threads: int,
    *,
    tls: bool,
    as_json: bool,
) -> None:
    """Serve shards of PACK to other nodes, until interrupted.

    Without --local all shards are served from where PACK lies. With it, this node copies its share
    of the shards there, in the background, and serves those. --listen is the name by which peers
    and clients know this node. Only who has the token is answered: that of --token-file, or by
    default yours, which all of your processes have.
    With --tls, what nodes send is encrypted with a key that follows from that secret.
    """
    from paceline.core.token import find_token
    from paceline.store.serve.card import NodeAddress
    from paceline.store.serve.node import NodeOptions, StoreNode

    options = NodeOptions(
        listen=NodeAddress.parse(listen),
        peers=tuple(NodeAddress.parse(peer) for peer in peers.split(",") if peer),
        local=local,
        replicas=replicas,
        token=find_token(token_file),
        tls=tls,
        everywhere=everywhere,
        source_bytes_per_s=stage_rate,
        threads=threads,
    )
    with StoreNode(path, options) as node:
        node.start()
        if as_json:
            _print_json({"node": node.name, "pack": node.pack.identity})
        else:
            print(f"serving {_safe(path)} at {node.name}")
        sys.stdout.flush()
        while not node.wait(3600.0):
            pass


def _origin(recovered_from: str) -> str:
    killed_append = "the file that the killed append had written"
    return killed_append if recovered_from == "append" else recovered_from


def _repair_words(report: RepairReport) -> str:
    repaired, lost, stale = map(len, (report.repaired, report.lost, report.stale_files))
    if not repaired and not lost:
        return "the pack is intact" + (f"; {stale:,} stale files" if stale else "")
    return f"{repaired:,} repaired, {lost:,} not, {stale:,} stale files"


def _listed(pack: Pack, folder: str, *, recursive: bool) -> Iterator[tuple[str, Any]]:
    """Yield the path within the pack and the entry of all that is to be listed."""
    for at, entries in pack.walk(folder):
        for entry in entries:
            yield (f"{at}/{entry.name}" if at else entry.name), entry
        if not recursive:
            return


def _print_listing(pack: Pack, path: str, folder: str, *, recursive: bool) -> None:
    samples, folders = [], []
    for name, entry in _listed(pack, folder, recursive=recursive):
        if entry.is_folder:
            folders.append(_text(name))
        else:
            label = int(pack.labels[entry.number])
            fields = {"name": _text(name), "bytes": entry.size, "label": label}
            samples.append({**fields, "mode": entry.mode, "mtime_ns": entry.mtime_ns})
    _print_json(
        {
            "path": path,
            "folder": _text(folder.strip("/")),
            "recursive": recursive,
            "sample_count": len(samples),
            "sample_bytes": sum(sample["bytes"] for sample in samples),
            "shard_count": pack.shard_count,
            "is_verified": pack.is_verified,
            "class_names": [_text(name) for name in pack.class_names],
            "folder_names": folders,
            "samples": samples,
        }
    )


def _print_pack_stat(stat: PackStat) -> None:

    codecs = ", ".join(f"{name}: {count:,}" for name, count in stat.codecs.items())
    parity = "none"
    if stat.parity_count:
        parity = (
            f"{stat.parity_count:,} files, {format_bytes(stat.parity_bytes)}, "
            f"one for every {stat.parity_group} shards"
        )
    in_place = "" if stat.kind == "pack" else f" of {stat.kind} data in place"
    rows = {
        "format": f"version {stat.format_version}{in_place}",
        "identity": stat.identity,
        "samples": f"{stat.sample_count:,} in {plural(stat.class_count, 'class')} and "
        f"{plural(stat.folder_count, 'folder')}; {stat.chunked_count:,} larger than a shard",
        "bytes": f"{format_bytes(stat.sample_bytes)}, stored as "
        f"{format_bytes(stat.stored_bytes)} (capacity factor {stat.capacity_factor:.2f})",
        "codecs": codecs or "none",
        "decoding": _decoding(stat),
        "shards": f"{stat.shard_count:,}, {format_bytes(stat.shard_bytes)}, "
        + ("with digests" if stat.has_shard_digests else "without digests"),
        "parity": parity,
        "index": format_bytes(stat.index_bytes),
        "checksums": "of all samples" if stat.is_verified else f"none yet{_UNVERIFIED}",
    }
    _print_rows(rows)


def _decoding(stat: PackStat) -> str:
    if not stat.decode_bytes_per_s:
        return "nothing is compressed" if set(stat.codecs) <= {"none"} else "not measured"
    dictionary = f", with a dictionary of {format_bytes(stat.dictionary_bytes)}"
    return f"{format_rate(stat.decode_bytes_per_s)} on one thread, measured" + (
        dictionary if stat.dictionary_bytes else ""
    )


def _print_sample_stat(stat: SampleStat) -> None:
    import datetime

    written = datetime.datetime.fromtimestamp(stat.mtime_ns / 1e9, datetime.UTC)
    rows = {
        "sample": f"{stat.sample:,} {_safe(stat.name)}",
        "bytes": f"{stat.bytes:,}",
        "class": f"{stat.label} {_safe(stat.class_name)}" if stat.label >= 0 else "none",
        "mode": f"{stat.mode:o}",
        "written": written.isoformat(timespec="seconds"),
    }
    for k, extent in enumerate(stat.extents):
        rows[f"extent {k}" if len(stat.extents) > 1 else "lies in"] = (
            f"{_safe(extent.shard)} at {extent.offset:,}: {extent.stored_bytes:,} bytes, "
            f"codec {extent.codec}, checksum {extent.checksum or 'not known yet'}"
        )
    _print_rows(rows)


def _print_folder_stat(stat: FolderStat) -> None:

    folders = f"{stat.folder_count:,} below it"
    samples = f"{stat.sample_count:,}, {format_bytes(stat.sample_bytes)}"
    _print_rows({"folder": _safe(stat.name), "folders": folders, "samples": samples})


def _print_rows(rows: dict[str, str]) -> None:
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        print(f"{name:>{width}}  {value}")


def _progress(did: str, what: str) -> Callable[[int, int], None] | None:
    """Return what shows progress on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        end = "\n" if done == total else ""
        print(f"\r{did} {done:,} of {total:,} {what}", end=end, file=terminal(), flush=True)

    return show


def _print_record(record: Any) -> None:
    _print_json(_texts(record.to_json()))


def _texts(value: Any) -> Any:
    """Return plain JSON data in which every string is one that JSON can hold."""
    if isinstance(value, dict):
        return {key: _texts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_texts(item) for item in value]
    return _text(value) if isinstance(value, str) else value


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
    escaped = "".join(_escaped(character) for character in name)
    return escaped.encode(encoding, "backslashreplace").decode(encoding)


def _escaped(character: str) -> str:
    if 0xDC80 <= ord(character) <= 0xDCFF:  # how os.fsdecode returns a byte that is not UTF-8
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable() and character != "\\":
        return character
    return character.encode("unicode_escape").decode()
