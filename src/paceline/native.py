"""The single door to the compiled module: everything else imports from here.

There is no fallback in Python: an installation without the compiled module is broken, and saying
so at once is kinder than being a hundred times slower.
"""

try:
    from paceline import _native
except ImportError as problem:  # pragma: no cover - needs a broken installation
    raise ImportError(
        f"Paceline's compiled module cannot be loaded ({problem}). "
        "Install the package again with a C++20 compiler at hand: pip install ."
    ) from problem

PACK_FORMAT_VERSION = _native.PACK_FORMAT_VERSION
NameMerger = _native.NameMerger
PackError = _native.PackError
PackReader = _native.PackReader
Recorder = _native.Recorder
crc32c = _native.crc32c
encode = _native.encode
gather = _native.gather
list_folder = _native.list_folder
lower_bounds = _native.lower_bounds
monotonic_ns = _native.monotonic_ns
name_hashes = _native.name_hashes
read_files = _native.read_files
sorted_order = _native.sorted_order
start_writeback = _native.start_writeback
zstd_available = _native.zstd_available
zstd_compress = _native.zstd_compress
zstd_decompress = _native.zstd_decompress

__all__ = [
    "PACK_FORMAT_VERSION",
    "NameMerger",
    "PackError",
    "PackReader",
    "Recorder",
    "crc32c",
    "encode",
    "gather",
    "list_folder",
    "lower_bounds",
    "monotonic_ns",
    "name_hashes",
    "read_files",
    "sorted_order",
    "start_writeback",
    "zstd_available",
    "zstd_compress",
    "zstd_decompress",
]
