"""Options of a loader, and what it counts; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal, get_args

from paceline.core.config import Configuration, resolve
from paceline.core.errors import UsageError
from paceline.store.feed.crops import ImageCrop
from paceline.store.feed.order import Shuffle
from paceline.store.feed.sampler import LastBatch

NAMES_KEPT = 1000  # of skipped samples


NodeReader = Literal["auto", "on", "off"]
Pace = Literal["auto", "on", "off"]

MAX_PIXELS = 89_478_485  # Pillow's own limit, above which it warns


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderConfig(Configuration):
    """What loaders do where a script does not say; options of `paceline run` set it for ranks.

    Changes speed: `node_reader` and `pace`, as in `LoaderOptions`; `read_turns`.

    Attributes:
        node_reader: whether one process of each node reads.
        read_turns: whether the readers of several nodes take turns (docs/guides/node-reader.md);
            ``auto``: on file systems that nodes share.
        pace: whether batches are made in the parts of a step that leave cores free.
    """

    section: ClassVar[str] = "loader"
    node_reader: NodeReader = "auto"
    read_turns: Literal["auto", "on", "off"] = "auto"
    pace: Pace = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """Options of a loader other than the pack and the batch size.

    Attributes:
        seed: seed of the order; all ranks and restarts give the same.
        shuffle: ``global``, ``block`` or ``none`` (`SampleOrder`).
        block_samples: B of ``block`` (`SampleOrder`).
        window_blocks: W of ``block`` (`SampleOrder`).
        last: ``pad``, ``drop`` or ``join`` (`RankBatches`).
        decode: ``image`` turns each sample into its pixels, a uint8 tensor of shape (3, height,
            width) in torch's memory format channels_last, before `transform` sees it; a
            `RandomCrop` or `CenterCrop` into a part of these pixels, resized to one size. None
            leaves the bytes. Without `transform` and `collate`, images of one size are decoded
            into the memory of the batch.
        max_pixels: larger images are refused by their header, which may claim any size; each pixel
            takes up to 9 bytes while it is decoded.
        on_corrupt: ``raise``, or ``skip``: leave damaged samples, and those that cannot be decoded,
            out of their batches and count them. The batch is then smaller, and everything else
            stays as it is: batch counts, positions and other ranks. A rank's share of a batch of
            which no sample is left is an error even so.
        numbers: deliver (samples, labels, sample numbers) rather than (samples, labels).
        workers: number of threads or processes; None: the number of cores that this process may use
            minus torch's own threads (minus one, if a GPU computes), at least 1.
        worker_kind: ``thread``, or ``process`` for transforms that hold the GIL for long.
        start_method: start method of processes: ``fork``, ``forkserver`` or ``spawn``; None is
            torch's default.
        batches_ahead: maximum number of prefetched batches. Read-ahead from storage is requested
            for four times as many.
        bytes_ahead: maximum bytes of prefetched batches, and of those requested from storage; for
            worker processes the mean size of a stored sample is used.
        pin_memory: deliver page-locked tensors; None: if there is a GPU.
        timeout_s: longest wait for a worker; then an error is raised.
        node_reader: one process of each node reads for all ranks of it, in the order of storage,
            and ranks get views of shared memory: ``auto`` where several ranks share a node and the
            data are larger than half the memory that they may use, ``on`` or ``off``; None: as the
            configuration says (`LoaderConfig`), which is ``auto`` by default.
        pace: ``on`` begins to make a batch while the loop communicates or updates parameters,
            rather than as the loop takes one, unless stock is low; ``off`` as soon as there is
            room; ``auto`` is ``on`` without a GPU; None: as the configuration says
            (`LoaderConfig`), ``auto`` by default (docs/guides/pacing.md).

    Raises:
        UsageError: a value is none of these.
    """

    # changes results
    seed: int = 0
    shuffle: Shuffle = "global"
    block_samples: int = 64
    window_blocks: int = 64
    last: LastBatch = "pad"
    decode: Literal["image"] | ImageCrop | None = None
    max_pixels: int = MAX_PIXELS
    on_corrupt: Literal["raise", "skip"] = "raise"
    numbers: bool = False
    # changes speed
    workers: int | None = None
    worker_kind: Literal["thread", "process"] = "thread"
    start_method: str | None = None
    batches_ahead: int = 4
    bytes_ahead: int = 256 << 20
    pin_memory: bool | None = None
    timeout_s: float = 120.0
    node_reader: NodeReader | None = None
    pace: Pace | None = None

    def __post_init__(self) -> None:
        choices = {
            "shuffle": get_args(Shuffle),
            "last": get_args(LastBatch),
            "on_corrupt": ("raise", "skip"),
            "worker_kind": ("thread", "process"),
            "node_reader": (None, *get_args(NodeReader)),
            "pace": (None, *get_args(Pace)),
            "start_method": (None, "fork", "forkserver", "spawn"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name} is {getattr(self, name)!r}",
                    fix=f"Choose from {', '.join(map(str, allowed))}",
                )
        if self.decode not in ("image", None) and not isinstance(self.decode, ImageCrop):
            raise UsageError(
                f"decode is {self.decode!r}",
                fix="Choose from image, None, RandomCrop(size), CenterCrop(size)",
            )
        for name in ("batches_ahead", "bytes_ahead", "max_pixels", "timeout_s", "workers"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} is {value}", fix=f"Give more than 0 for {name}")

    @property
    def uses_node_reader(self) -> NodeReader:
        """Whether one process of the node reads: as given, or as configured."""
        return self.node_reader or resolve(LoaderConfig).config.node_reader

    @property
    def uses_pace(self) -> Pace:
        """Whether refills are paced: as given, or as configured."""
        return self.pace or resolve(LoaderConfig).config.pace


@dataclass(slots=True)
class StageTimes:
    """Seconds that the workers of a loader spent by stage, summed over workers.

    Workers overlap with each other and with the loop, so the sum may exceed the time of the loop;
    what is of interest are the shares.

    Attributes:
        read_s: waiting for storage, and copying samples into the batch.
        verify_s: computing the checksums of samples that were not verified before.
        decode_s: decoding images, with cropping and resizing.
        transform_s: in the user's transform.
        collate_s: joining samples to a batch.
    """

    read_s: float = 0.0
    verify_s: float = 0.0
    decode_s: float = 0.0
    transform_s: float = 0.0
    collate_s: float = 0.0

    def add(self, other: StageTimes) -> None:
        """Add another batch's seconds."""
        for stage in fields(self):
            name = stage.name
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class LoaderStats:
    """What a loader has delivered on this rank since it was made."""

    batches: int = 0
    samples: int = 0
    bytes: int = 0  # as stored in the pack, before decoding
    waited_s: float = 0.0  # that the loop spent in the loader
    read_by_node: int = 0  # batches that came from the node's reader
    stages: StageTimes = field(default_factory=StageTimes)  # of delivered batches
    skipped: int = 0  # damaged samples left out (on_corrupt="skip")
    skipped_names: list[str] = field(default_factory=list)  # the first 1,000
