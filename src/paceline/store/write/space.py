"""How much space packing takes, before it begins: a disk that fills up hours later is worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.files import free_bytes, require_space

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.store.write.options import PackOptions
    from paceline.store.write.sources.source import SourceTotals

# Of a sample in the index: its columns, an entry of the name table, and a name of one byte or, at
# most, of so many as are common; the columns wait in files until the index is written. At least:
# where all columns are constant but checksums and name offsets.
_LEAST_SAMPLE_BYTES = 4 + 8 + 16 + 1
_MOST_SAMPLE_BYTES = 2 * (53 + 32 + 256) + 64
_EXPANSION = 10  # of compressed archives: logs and tables; photographs have about 1
_FIX = "or, where the file system compresses, use check_space=False (--no-space-check)"


def require_pack_space(
    path: Path,
    totals: SourceTotals,
    options: PackOptions,
    *,
    beside_bytes: int,
    reused_bytes: int,
    planned_bytes: Callable[[], int] | None = None,
) -> None:
    """Refuse to begin a pack that cannot fit; warn of one that may not.

    Without a codec the samples of a folder are stored byte for byte: so many are needed at least.
    With a codec, and of archives that are not compressed, only an upper bound is known; of
    compressed archives neither, and `_EXPANSION` times their size is taken for the warning. If
    that leaves it open and there is neither codec nor compression, a dry run decides.

    Args:
        path: the destination.
        totals: what the source says of itself.
        options: how to pack.
        beside_bytes: what is written in addition: an old index that is written anew, for example.
        reused_bytes: of an earlier packing, which are there already.
        planned_bytes: returns what the pack will take, exactly but for a codec; None = the source
            cannot be read twice.

    Raises:
        StorageError: there is too little space.
    """
    if not options.check_space:
        return
    samples = totals.byte_count or totals.archive_bytes
    if totals.is_compressed:
        samples *= _EXPANSION
    parity = samples // options.parity_group if options.parity_group else 0
    least = beside_bytes - reused_bytes
    if totals.is_exact:
        least += totals.sample_count * _LEAST_SAMPLE_BYTES
        least += samples + parity if options.codec == "none" else 0
    most = samples + parity + beside_bytes + totals.sample_count * _MOST_SAMPLE_BYTES - reused_bytes
    free = free_bytes(path)
    is_open = free is not None and least <= free < most
    if is_open and planned_bytes and options.codec == "none" and not totals.is_compressed:
        least = max(least, planned_bytes() + beside_bytes - reused_bytes)
    require_space(path, least, most, what="the pack", fix=_FIX)
