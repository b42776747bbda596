"""Options of packing, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from paceline.core.config import Configuration
from paceline.core.errors import ConfigError
from paceline.core.record import Record
from paceline.native import require_codec
from paceline.store.format.layout import ALIGNMENT, HEADER_BYTES
from paceline.store.write.codec_choice import CANDIDATES, CodecChoice, capacity_factor
from paceline.store.write.sources.source import BATCH_BYTES, Symlinks

if TYPE_CHECKING:
    from paceline.store.write.sources.source import SourceTotals

DEFAULT_SHARD_BYTES = 256 << 20
MAX_SHARD_BYTES = 16 << 30
_SHARDS = 256  # approximate maximum number of shards, unless the size is given
_GROWTH_SHARDS = 64
_CODECS = ("none", "lz4", "zstd", "zstd-dict", "auto")
_SHUFFLES = ("auto", "none", "2", "4", "8")
_FEEDS = ("async", "sync")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions(Configuration):
    """How to pack.

    Changes the pack's files:
        shard_bytes: a shard is closed before it would grow beyond this; a sample that is larger is
            stored in chunks. 0 = 256 MiB, or what keeps a large pack at about 256 shards.
        codec: `lz4`, `zstd` and `zstd-dict`, which is zstd with a dictionary trained on the first
            samples, compress a sample if that saves any bytes. `auto` chooses, of these and none,
            what makes the samples smallest and still feeds a loop at `feed_bytes_per_s`; it
            compresses a sample if that saves at least a tenth. Samples over 64 MiB are not
            compressed.
        codec_level: 1 to 19: the higher, the smaller and the slower to pack. lz4 takes 1 and 2 for
            its fast form, and 12 for more.
        shuffle: bytes of the elements of numeric arrays, whose first bytes are then stored
            together, then all second bytes, where that makes a sample smaller: `2`, `4`, `8`;
            `auto` = as each .npy file says, of other samples none; `none`.
        feed_bytes_per_s: bytes of samples that a loop needs in a second, for `auto`. 0 = as many
            as the storage of the pack feeds without a codec, which is measured.
        feed: how the loop that `auto` chooses for gets its samples: `async`, by a loader that reads
            and decodes beside the steps, or `sync`, between two steps.
        parity_group: shards that one parity file covers: one lost shard of a group can be rebuilt
            from the others. 0 = no parity.
    Changes which samples there are:
        symlinks: `error` = refuse symbolic links, and whatever is neither file nor folder;
            `follow` = pack the targets of links; `skip` = leave both out, and say how many.
    Changes what is refused:
        check_space: refuse to begin where the samples cannot fit. On a file system that compresses
            they may fit even so: then False.
    Changes speed:
        restart: discard the shards that a killed packing left, instead of resuming.
    """

    version: ClassVar[int] = 2
    section: ClassVar[str] = "pack"
    shard_bytes: int = 0
    codec: str = "none"
    codec_level: int = 3
    shuffle: str = "auto"
    feed_bytes_per_s: int = 0
    feed: str = "async"
    parity_group: int = 0
    symlinks: Symlinks = "error"
    check_space: bool = True
    restart: bool = False

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Version 1 had `follow_symlinks`, true or false."""
        assert from_version == 1
        follows = data.pop("follow_symlinks", False)
        return {**data, "symlinks": "follow" if follows else "error"}

    def __post_init__(self) -> None:
        if self.shard_bytes != 0 and self.shard_bytes < 2 * ALIGNMENT:
            raise ConfigError(
                f"a shard size of {self.shard_bytes} B is below the minimum of {2 * ALIGNMENT} B",
                where="shard_bytes (--shard-size)",
                fix=f"Use at least {2 * ALIGNMENT}; hundreds of MiB serve best",
            )
        for value, known, name, where in (
            (self.codec, _CODECS, "codec", "codec (--codec)"),
            (self.symlinks, get_args(Symlinks), "policy", "symlinks (--symlinks)"),
            (self.shuffle, _SHUFFLES, "size of elements", "shuffle (--shuffle)"),
            (self.feed, _FEEDS, "way to feed a loop", "feed (--feed)"),
        ):
            if value not in known:
                raise ConfigError(
                    f"unknown {name} {value!a}", where=where, fix="Use one of " + ", ".join(known)
                )
        if self.feed_bytes_per_s < 0:
            raise ConfigError(
                f"no loop needs {self.feed_bytes_per_s} bytes in a second",
                where="feed_bytes_per_s (--feed-rate)",
                fix="Give the rate that the loop needs, or 0 for what the storage can read",
            )
        if not 1 <= self.codec_level <= 19:
            raise ConfigError(
                f"there is no level {self.codec_level}",
                where="codec_level (--codec-level)",
                fix="Use 1 to 19",
            )
        if self.parity_group < 0 or self.parity_group == 1:
            raise ConfigError(
                f"a parity file covers at least 2 shards, got {self.parity_group}",
                where="parity_group (--parity)",
                why="the parity of one shard is a copy of it",
                fix="Use 2 or more, or 0 for none; 8 costs an eighth of the space",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackSummary(Record):
    """Summary of a packing or a dry run; `elapsed_s` is 0 for a dry run.

    `reused_sample_count` were packed by an earlier `pack` that was killed. `opens_before` and
    `opens_after` are the files that an epoch opens. `choice` says how the new samples are
    compressed, and why; None: they are not.
    """

    source: str
    destination: str
    sample_count: int
    folder_count: int
    class_count: int
    shard_count: int
    sample_bytes: int
    stored_bytes: int
    pack_bytes: int
    opens_before: int
    opens_after: int
    reused_sample_count: int = 0
    elapsed_s: float = 0.0
    dictionary_bytes: int = 0
    choice: CodecChoice | None = None

    @property
    def capacity_factor(self) -> float:
        """How many times as many bytes of samples as without a codec fit into the same space."""
        return capacity_factor(self.sample_bytes, self.stored_bytes + self.dictionary_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackProgress:
    """How far packing has come; a total of 0 is unknown."""

    sample_count: int
    sample_total: int
    byte_count: int
    byte_total: int
    reused_byte_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLimits:
    """How large shards get.

    Attributes:
        shard_bytes: a shard is closed before it would grow beyond this.
        growth_shards: for sources of unknown size, the limit doubles after so many shards; 0 =
            never. So the number of shards grows with the logarithm of the source's bytes.
        max_bytes: the limit is never raised beyond this.
    """

    shard_bytes: int
    growth_shards: int = 0
    max_bytes: int = 16 << 30

    @property
    def large_bytes(self) -> int:
        """The length above which a sample is a batch of its own and is read in chunks."""
        return min(BATCH_BYTES, self.shard_bytes - HEADER_BYTES)

    def limit(self, shard: int) -> int:
        """Return the limit of the `shard`-th shard, in bytes."""
        if not self.growth_shards:
            return self.shard_bytes
        doubled = self.shard_bytes << min(shard // self.growth_shards, 40)
        return max(min(doubled, self.max_bytes), self.shard_bytes)


def shard_limits(totals: SourceTotals, options: PackOptions) -> ShardLimits:
    """Return how large the shards get when a source with these `totals` is packed."""
    if options.shard_bytes:
        return ShardLimits(shard_bytes=options.shard_bytes)
    if not totals.is_exact:
        return ShardLimits(
            shard_bytes=DEFAULT_SHARD_BYTES,
            growth_shards=_GROWTH_SHARDS,
            max_bytes=MAX_SHARD_BYTES,
        )
    wanted = DEFAULT_SHARD_BYTES
    total = totals.byte_count + totals.sample_count * ALIGNMENT // 2
    while wanted * _SHARDS < total and wanted < MAX_SHARD_BYTES:
        wanted *= 2
    return ShardLimits(shard_bytes=wanted)


def check_codec(options: PackOptions) -> None:
    """Refuse a codec that this machine lacks.

    Raises:
        Missing: a library of it is not installed.
    """
    codecs = CANDIDATES if options.codec == "auto" else (options.codec,)
    for codec in codecs:
        require_codec(codec, fix="pack with --codec none")
