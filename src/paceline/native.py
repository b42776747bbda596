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
PackEntry = _native.PackEntry
PackError = _native.PackError
PackReader = _native.PackReader
Recorder = _native.Recorder
crc32c = _native.crc32c
monotonic_ns = _native.monotonic_ns

__all__ = [
    "PACK_FORMAT_VERSION",
    "PackEntry",
    "PackError",
    "PackReader",
    "Recorder",
    "crc32c",
    "monotonic_ns",
]
