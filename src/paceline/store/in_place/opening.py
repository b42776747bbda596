"""Opens a data set: a pack, or data in place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.store.in_place.find import find_data
from paceline.store.in_place.side_file import open_data
from paceline.store.read.pack import Pack, read_options

if TYPE_CHECKING:
    import os


def open_pack(
    path: str | os.PathLike[str],
    *,
    verify: str = "first",
    threads: int | None = None,
    direct: bool = False,
    index_only: bool = False,
    allow_truncated: bool = False,
) -> Pack:
    """Open the data set at `path`: a pack, or data in place, of which an index is made once.

    Of a pack its index is verified and, unless `index_only`, every shard's length. A large index is
    not read for this: each 64 KiB of it are verified when they are first used. Data in place
    are LMDB databases, uncompressed tar archives (WebDataset shards), TFRecord files and folders of
    files. Their index lies beside them (``x.mdb.pace``), or in the user's cache folder, and is made
    again when they were changed (docs/guides/in-place.md).

    Args:
        path: the pack's folder; or an LMDB file or its folder, a tar archive, a pattern or folder
            of archives (``train-{000..147}.tar``), a TFRecord file, pattern or folder of them, or
            any other folder of files.
        verify: when to verify checksums. `first`: when bytes may have come from storage, but not
            for pages that this process has verified and that have been in its memory ever since;
            `always`: on every read; `never`: only for compressed samples. Samples of data in
            place may have no checksums yet: see `Pack.is_verified`.
        threads: number of threads that share the work of a large batch; by default the number of
            cores that this process may use, at most 8, or with `direct` always 8.
        direct: read past the page cache (O_DIRECT), for data sets that are larger than memory.
        index_only: open no shard: names, lengths and locations can be read, samples cannot.
        allow_truncated: read a TFRecord file that ends amid a record, since its writer was killed,
            to the record before it; a warning says how much is left out.

    Raises:
        NotFound: there is no data set at `path`.
        CorruptPack: the index is damaged, a shard is missing or truncated, or packing has not
            finished.
        CorruptData: the data in place are damaged.
        UsageError: a newer Paceline wrote it, there is no such policy, `threads` is below 1, or
            the data cannot be read in place.
        StorageError: a file cannot be opened.
        DataChanged: data in place are written to all the time.
        DeadlineExceeded: another process indexes the data, and has not finished for hours.
    """
    options = read_options(verify=verify, threads=threads, direct=direct, index_only=index_only)
    data = find_data(path, allow_truncated=allow_truncated)
    if data is not None:
        return open_data(data, options)
    pack = Pack(path, options)
    len(pack)  # opens it
    return pack
