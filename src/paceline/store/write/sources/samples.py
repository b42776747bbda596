"""Samples that a program generates: any iterable of pairs of a name and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.errors import UsageError
from paceline.store.write.sources.source import (
    FolderTree,
    SampleCollector,
    SourceBatch,
    SourceClasses,
    SourceTotals,
    check_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from paceline.store.write.sources.source import OpenSource, Symlinks


@dataclass(frozen=True, slots=True)
class Samples:
    """Pairs of a name and bytes, in any order.

    Names are relative paths; the top-level folders are the classes. The pairs are read once and
    never held, however many there are, so that packing them cannot resume.

    Attributes:
        pairs: any iterable.
        where: names the source in messages.
    """

    pairs: Iterable[tuple[str | bytes, bytes]]
    where: str = "samples"

    @property
    def root(self) -> None:
        """Return nothing: it is no folder."""
        return None

    def open(self, *, symlinks: Symlinks) -> AbstractContextManager[OpenSource]:
        """Open it for one packing."""
        del symlinks  # there are none
        return nullcontext(_OpenSamples(self))


class _OpenSamples:
    """Reads the pairs of `Samples`."""

    resume_key = ""

    def __init__(self, source: Samples) -> None:
        self._pairs = source.pairs
        self._tree = FolderTree()
        self.where = source.where

    def totals(self) -> SourceTotals:
        """Return no totals: they are not known before reading."""
        return SourceTotals()

    def batches(self, large_bytes: int) -> Iterator[SourceBatch]:
        """Yield all samples; one larger than `large_bytes` is a batch of its own."""
        collector = SampleCollector()
        label = self._tree.label
        for text, body in self._pairs:
            name = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
            check_name(name, self.where)
            if not isinstance(body, bytes):
                raise UsageError(
                    f"the body of sample {name!r} is not bytes",
                    where=self.where,
                    why=f"it is a {type(body).__name__}",
                    fix="Yield pairs of a name and bytes",
                )
            if len(body) > large_bytes:
                yield from collector.take()
            if collector.add(name, body, label(name)) or len(body) > large_bytes:
                yield from collector.take()
        yield from collector.take()

    def folders(self) -> list[bytes]:
        """Return all folders, once all batches have been read."""
        return self._tree.folders()

    def classes(self) -> SourceClasses:
        """Return the top-level folders."""
        return self._tree.classes()
