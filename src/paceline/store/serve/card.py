"""What a node says of itself when a client connects, and the words of an address."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import ConfigError, UsageError
from paceline.core.record import Record
from paceline.native import peer_error

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLoad(Record):
    """What a node has done since it was started, and has to do.

    Attributes:
        held_bytes: of the shards that it serves.
        source_bytes: read from the pack's folder.
        peer_bytes: copied from other nodes.
        sent_bytes: of shards, to clients and to other nodes.
        reads: requests for ranges of one shard that were answered.
        ranges: in these.
        missed: requests for shards that it did not hold.
        connections: that were accepted.
        refused_connections: malformed, without the token, too many, or silent.
        waiting_shards: that it has to copy.
        copying_shards: that it copies now.
        failed_copies: that were given up, and are tried again.
    """

    held_bytes: int = 0
    source_bytes: int = 0
    peer_bytes: int = 0
    sent_bytes: int = 0
    reads: int = 0
    ranges: int = 0
    missed: int = 0
    connections: int = 0
    refused_connections: int = 0
    waiting_shards: int = 0
    copying_shards: int = 0
    failed_copies: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCard(Record):
    """What a node is.

    Attributes:
        node: its name.
        host: identifies the running kernel: who has the same one may map the node's files.
        folder: that holds its shards, as a pack.
        held: shards that it serves, ascending.
        peers: names of the other nodes that it has heard and not lost.
        load: what it has done and has to do.
    """

    node: str
    host: str
    folder: str
    held: tuple[int, ...]
    peers: tuple[str, ...] = ()
    load: NodeLoad = NodeLoad()

    def to_bytes(self) -> bytes:
        """Return the card as it travels."""
        return json.dumps(self.to_json(), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes, node: str) -> NodeCard:
        """Return the card that `node` sent.

        Raises:
            RankLost: it is no card.
        """
        try:
            return cls.from_json(json.loads(data), where=node)
        except (ValueError, ConfigError, RecursionError) as problem:
            raise peer_error("protocol", f"its card is not one: {problem}", node) from None


def host_identity() -> str:
    """Return what identifies the running kernel of this machine."""
    return _BOOT_ID.read_text().strip()


def digest(text: str) -> bytes:
    """Return the SHA-256 under which a token or an identity travels."""
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    """Where a node is reached.

    Attributes:
        host: a name or an address; of a node that listens, a numeric address.
        port: 0: any free one, of a node that listens.
    """

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> NodeAddress:
        """Return the address that ``HOST:PORT`` or ``[IPV6]:PORT`` says.

        Raises:
            UsageError: it says none.
        """
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 0xFFFF:
            raise UsageError(
                f"not an address: {text!a}",
                where="address of a node",
                fix="Give HOST:PORT, for example 10.0.0.7:7420",
            )
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
