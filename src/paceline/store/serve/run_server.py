"""The server of one pack on one node of a run. Started with ``-m`` by the launcher.

The launcher gives it a listening socket, the memory of requests and a lock as descriptors, and one
line of JSON (`ServerSpec`) on stdin, when all nodes are there. It serves until its stdin ends: with
the launcher, however that ends. Then it says in one line of JSON on stdout what it read and
sent (`ServerReport`). Signals that stop a job are the launcher's to handle: other nodes may still
read from here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import select
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.errors import PacelineError
from paceline.core.record import Record
from paceline.native import RangeRequests
from paceline.store.serve.card import NodeAddress
from paceline.store.serve.node import NodeOptions
from paceline.store.serve.requests import RequestService, SharingNode

_BEAT_S = 1.0
_IGNORED = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    """What a server of a run has to know.

    Attributes:
        pack: folder of the source.
        name: address by which the other nodes reach this one.
        peers: those of the other nodes.
        listener: descriptor of the listening socket.
        listen: the numeric address that it listens at.
        requests: descriptor of the memory of requests.
        local: folder for this node's shards.
        is_temporary: whether it is to be removed in the end.
        replicas: copies of each shard.
        token: of all nodes.
        source_bytes_per_s: limit for reading from the source; 0: none.
    """

    pack: str
    name: str
    peers: tuple[str, ...]
    listener: int
    listen: str
    requests: int
    local: str
    is_temporary: bool
    replicas: int
    token: str
    source_bytes_per_s: float

    def to_line(self) -> bytes:
        """Return it as it travels."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """Return what `to_line` wrote."""
        fields: dict[str, Any] = json.loads(line)
        return cls(**{**fields, "peers": tuple(fields["peers"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerReport(Record):
    """What a server did in a run.

    Attributes:
        node: its address.
        pack: folder of the source.
        source_bytes: read from the source, by copies and for programs.
        peer_bytes: that programs here got from other nodes; copies between nodes not counted.
        sent_bytes: to other nodes.
    """

    node: str
    pack: str
    source_bytes: int
    peer_bytes: int
    sent_bytes: int


def main() -> int:
    """Serve until stdin ends; return the exit code."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.buffer.readline()
    if not line:  # the run ended before it began
        return 0
    spec = ServerSpec.from_line(line)
    logging.basicConfig(format=f"paceline: data server {spec.name}: %(message)s")
    try:
        report = _serve(spec)
    except PacelineError as problem:
        sys.stderr.write(f"paceline: data server {spec.name}: {problem}\n")
        return problem.exit_code
    finally:
        if spec.is_temporary:
            shutil.rmtree(spec.local, ignore_errors=True)
    sys.stdout.write(report.to_text())
    sys.stdout.flush()
    return 0


def _serve(spec: ServerSpec) -> ServerReport:
    requests = RangeRequests.map(spec.requests)
    options = NodeOptions(
        listen=NodeAddress.parse(spec.listen),
        name=spec.name,
        listener=spec.listener,
        peers=tuple(NodeAddress.parse(peer) for peer in spec.peers),
        local=Path(spec.local),
        replicas=spec.replicas,
        token=spec.token,
        source_bytes_per_s=spec.source_bytes_per_s,
    )
    with SharingNode(spec.pack, options, requests) as node:
        node.start()
        service = RequestService(node, requests)
        service.start()
        while not select.select([sys.stdin], [], [], _BEAT_S)[0]:
            service.beat()
        service.close()
        return ServerReport(
            node=spec.name,
            pack=spec.pack,
            source_bytes=node.source_bytes + service.counts.source_bytes,
            peer_bytes=service.counts.peer_bytes,
            sent_bytes=node.stats().bytes,
        )


if __name__ == "__main__":
    sys.exit(main())
