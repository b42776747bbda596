"""What the servers of a run's packs did: ``RUN/data/``, which the launchers write."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.record import Record

DATA_FOLDER = "data"  # of the run


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport(Record):
    """What became of a pack on one node. Reads of programs are those of files below a mount.

    Attributes:
        node: the server's address.
        pack: folder of the source.
        source_bytes: read from the source: by copies, for programs, and by them.
        peer_bytes: that programs here got from other nodes; copies between nodes not counted.
        sent_bytes: to other nodes.
        local_reads: of programs here, from shards of this node.
        local_bytes: in these.
        remote_reads: of programs here, by the node's server.
        program_source_bytes: of `source_bytes`, read for programs after waiting in vain for a copy.
        copied_bytes: of shards, from other nodes.
        read_s: that programs spent in reads, summed over their threads.
        shard_count: of the pack.
        held_shards: of these, on this node in the end.
        peak_queue: most requests of programs that waited at a time.
        peak_copies: most shards that were still to be copied at a time.
        server_starts: 1, and one more for each time the server was started again.
    """

    node: str
    pack: str
    source_bytes: int
    peer_bytes: int
    sent_bytes: int
    local_reads: int = 0
    local_bytes: int = 0
    remote_reads: int = 0
    program_source_bytes: int = 0
    copied_bytes: int = 0
    read_s: float = 0.0
    shard_count: int = 0
    held_shards: int = 0
    peak_queue: int = 0
    peak_copies: int = 0
    server_starts: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes that programs on this node read."""
        return self.local_bytes + self.peer_bytes + self.program_source_bytes

    @property
    def hit_share(self) -> float:
        """Share of the programs' bytes that came from shards of this node; 1 without reads."""
        return self.local_bytes / self.read_bytes if self.read_bytes else 1.0
