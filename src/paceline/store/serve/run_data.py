"""Packs that the node servers of a run serve, as a program of the run finds them.

paceline run --data train.pack[:/mnt/train] -- program
    |
    |  on each node a server (run_server.py), and for programs these variables:
    |
    +-- _PACELINE_DATA     for `open_remote`: one line of JSON for each pack
    +-- _PACELINE_MOUNTS   for the library for mounts, of packs with a path to appear at
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import NotFound, UsageError
from paceline.store.posix.mounts import PackMount, parse_mounts
from paceline.store.read.pack import open_packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DATA = "_PACELINE_DATA"  # not PACELINE_: it is no setting of the user's
_FORM = "Write --data PACK, or --data PACK:/path, as train.pack:/data"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunData:
    """A pack that the nodes of a run serve.

    Attributes:
        place: absolute path of the pack's folder, the source.
        point: absolute path below which programs see its samples; empty: nowhere.
        identity: of the pack.
        shard_count: of the pack.
    """

    place: str
    point: str
    identity: str
    shard_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedPack:
    """How a program of a run reaches a pack.

    Attributes:
        place: absolute path of the source.
        local: folder of this node's shards, with the index.
        nodes: addresses of all nodes.
        replicas: copies of each shard.
        token: of the nodes.
        tls: whether what they send is encrypted.
        requests: path of the memory in which this node's server counts what it does.
    """

    place: str
    local: str
    nodes: tuple[str, ...]
    replicas: int
    token: str
    tls: bool
    requests: str


def parse_data(specs: Iterable[str], mounts: Sequence[PackMount]) -> tuple[RunData, ...]:
    """Return what ``PACK`` or ``PACK:/path`` stands for, checked with each other and `mounts`.

    Raises:
        UsageError: paths overlap, or a pack is given twice.
        NotFound: there is no such pack.
        CorruptPack: it is one, and damaged.
    """
    found: list[RunData] = []
    points = [*mounts]
    for spec in specs:
        point = ""
        if spec and Path(spec).exists():  # also of a path with a colon
            path = spec
        else:
            path, colon, _ = spec.rpartition(":")
            if not colon or not path:
                raise NotFound(f"no pack {spec!r}", fix=_FORM)
            mount = parse_mounts([spec])[0]
            point = mount.point
            points.append(mount)
        with open_packed(path, index_only=True) as pack:
            place = os.path.abspath(path)  # noqa: PTH100  # Path.absolute keeps ".."
            identity, shard_count = pack.identity, pack.shard_count
        if any(data.place == place for data in found):
            raise UsageError(f"{path} is given twice", where="--data", fix="Give it once")
        found.append(RunData(place=place, point=point, identity=identity, shard_count=shard_count))
    parse_mounts(f"{mount.place}:{mount.point}" for mount in points)
    return tuple(found)


def variables(packs: Sequence[ServedPack]) -> dict[str, str]:
    """Return the variables by which `open_remote` finds packs; none without packs."""
    if not packs:
        return {}
    return {DATA: "\n".join(json.dumps(asdict(pack)) for pack in packs)}


def served_packs(environ: Mapping[str, str]) -> tuple[ServedPack, ...]:
    """Return the packs that the run of this process serves."""
    lines = environ.get(DATA, "").splitlines()
    fields = [json.loads(line) for line in lines]
    return tuple(ServedPack(**{**found, "nodes": tuple(found["nodes"])}) for found in fields)


def find_served(pack: str | os.PathLike[str], environ: Mapping[str, str]) -> ServedPack:
    """Return how to reach the pack that ``paceline run --data`` got under this path.

    Raises:
        NotFound: this process is in no run that serves it.
    """
    served = served_packs(environ)
    path = os.path.abspath(pack)  # noqa: PTH100  # as above
    for known in served:
        if known.place == path:
            return known
    names = ", ".join(known.place for known in served)
    raise NotFound(
        "no node serves this pack",
        where=path,
        why=f"this run serves {names}" if served else "this is no run with --data",
        fix="Start with: paceline run --data PACK; or give open_remote the addresses of nodes",
    )
