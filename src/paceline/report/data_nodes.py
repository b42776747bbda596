"""A run whose nodes serve its data: where programs' bytes came from, and whether they came in time.

    supply   what the run's readers get in a second in which they do nothing but read
    demand   what the loop takes in a second in which it does not wait for data

    headroom = supply / demand
             = readers * (loop_s - input_s) / read_s      bytes on both sides cancel

With a headroom below 1 the loop waits for data however far ahead its workers read; with more, what
it waits for is something else: decoding, or workers that are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError, CorruptData
from paceline.core.files import read_text
from paceline.core.record import Record
from paceline.report.units import format_bytes, format_share, plural
from paceline.runs.data_report import DATA_FOLDER, DataReport

if TYPE_CHECKING:
    from paceline.core.breakdown import Breakdown
    from paceline.runs.folder import RunFolder

_WAITS = 0.1  # of the loop: the least share of waiting that is called a bottleneck


@dataclass(frozen=True, kw_only=True, slots=True)
class DataUse(Record):
    """What all nodes of a run did with its data.

    Attributes:
        nodes: of each pack and node, by pack and address.
        headroom: supply over demand; None if no program read files of a mount in a loop.
        input_share: of the loop, spent waiting for data, 0 to 1.
    """

    nodes: tuple[DataReport, ...]
    headroom: float | None
    input_share: float

    @property
    def read_bytes(self) -> int:
        """Bytes that programs read."""
        return sum(node.read_bytes for node in self.nodes)

    @property
    def is_bottleneck(self) -> bool:
        """Whether the loop waited for bytes that could not come any faster."""
        return self.headroom is not None and self.headroom < 1 and self.input_share >= _WAITS


def data_use(
    folder: RunFolder, total: Breakdown, ranks: int, loader_workers: int | None
) -> DataUse | None:
    """Return what became of the data of a run; None if no node served any.

    Args:
        folder: of the run.
        total: seconds of the loop by phase, the mean over ranks.
        ranks: that read.
        loader_workers: of each rank's loader, which read in its place; None: not known.

    Raises:
        CorruptData: a server's report cannot be read.
    """
    nodes = read_reports(folder)
    if not nodes:
        return None
    read_s = sum(node.read_s for node in nodes)
    busy_s = total.total_s - total.input
    readers = ranks * max(1, loader_workers or 1)
    return DataUse(
        nodes=nodes,
        headroom=readers * busy_s / read_s if read_s > 0 and busy_s > 0 else None,
        input_share=total.input / total.total_s if total.total_s > 0 else 0.0,
    )


def read_reports(folder: RunFolder) -> tuple[DataReport, ...]:
    """Return what the servers of a run reported, by pack and address.

    Raises:
        CorruptData: a report cannot be read.
    """
    found = []
    for path in sorted(folder.file(DATA_FOLDER).glob("*.json")):
        try:
            found.append(DataReport.from_text(read_text(path), where=str(path)))
        except ConfigError as problem:
            raise CorruptData(
                "the report of a data server cannot be read",
                where=str(path),
                why=problem.what,
                fix="Move it away to do without it",
            ) from problem
    return tuple(sorted(found, key=lambda node: (node.pack, node.node)))


def data_words(use: DataUse | None) -> str:
    """Return where the bytes came from, and the headroom, in a sentence or two; empty without."""
    if use is None or not use.read_bytes:
        return ""
    local, peers, source = (
        sum(getattr(node, name) for node in use.nodes) / use.read_bytes
        for name in ("local_bytes", "peer_bytes", "program_source_bytes")
    )
    where = [f"{format_share(local)} lay on their node"]
    where += [f"{format_share(peers)} came from other nodes"] if peers else []
    where += [f"{format_share(source)} from the source"] if source else []
    words = f"Of {format_bytes(use.read_bytes)} that programs read from nodes, {', '.join(where)}."
    if use.headroom is None:
        return words
    supply = f"supply was {use.headroom:.2g} times the demand"
    if not use.is_bottleneck:
        return f"{words} Headroom of the data: {supply}."
    return (
        f"{words} Data was the bottleneck: {supply}, and the loop waited "
        f"{format_share(use.input_share)} of its time for it. More copies on the nodes "
        "(--data-replicas), or larger local storage, would bring more of it from the node itself."
    )


def node_rows(use: DataUse) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of nodes; the first two columns are names."""
    several = len({node.pack for node in use.nodes}) > 1
    heads = ["node", "address", "shards", "hits", "reads", "local", "from nodes", "from source"]
    heads += ["copied in", "sent", "queue", "starts"]
    rows = [
        [
            f"{number}",
            f"{node.node} {node.pack.rpartition('/')[2]}" if several else node.node,
            f"{node.held_shards:,} of {node.shard_count:,}",
            format_share(node.hit_share),
            f"{node.local_reads + node.remote_reads:,}",
            format_bytes(node.local_bytes),
            format_bytes(node.peer_bytes),
            format_bytes(node.source_bytes),
            format_bytes(node.copied_bytes),
            format_bytes(node.sent_bytes),
            f"{node.peak_queue:,}",
            f"{node.server_starts:,}",
        ]
        for number, node in enumerate(use.nodes)
    ]
    return heads, rows


def node_note(use: DataUse) -> str:
    """Return how the table is read."""
    return (
        f"What the data servers of {plural(len(use.nodes), 'node')} did. Hits are the share of "
        "the programs' bytes that lay on their node; from source are all bytes that left the "
        "shared file system; copied in are shards that came from other nodes; queue is the most "
        "requests that waited at a time; starts above 1 are servers that were killed and started "
        "again."
    )
