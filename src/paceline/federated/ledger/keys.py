"""Ed25519 keys, by the library `cryptography` (the extra ``ledger``).

A ledger works without it: its blocks are then chained by hashes but not signed, which is said
wherever it matters.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from paceline.core.errors import CorruptData, DestinationExists, Missing, NotFound, storage_errors

if TYPE_CHECKING:
    from pathlib import Path

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_SIGNATURE_DIGITS = 128
_FIX = "Choose a folder that you may write to"


def signatures_available() -> bool:
    """Return whether signatures can be made and checked here."""
    return importlib.util.find_spec("cryptography") is not None


def require_signatures() -> None:
    """See that signatures can be checked here.

    Raises:
        Missing: the library `cryptography` is not installed.
    """
    _ed25519()


class SigningKey:
    """A private key: its file is enough to sign in its owner's name."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        """Wrap a key; use `generate` or `load`."""
        self._private = private
        self.public_key = private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key from the system's random numbers.

        Raises:
            Missing: the library `cryptography` is not installed.
        """
        return cls(_ed25519().Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> SigningKey:
        """Return the key of a seed of 32 bytes: for simulations, whose clients need no secrets."""
        return cls(_ed25519().Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Return the key that `save` wrote.

        Raises:
            NotFound: there is no such file.
            CorruptData: it holds no key.
            Missing: the library `cryptography` is not installed.
        """
        ed25519 = _ed25519()
        if not path.is_file():
            raise NotFound("no such key", where=str(path), fix="Give the file of a private key")
        with storage_errors("cannot read a key", where=path, fix="Make the file readable"):
            text = path.read_bytes()
        try:
            private = ed25519.Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text.decode()))
        except ValueError:
            raise CorruptData(
                "not a private key",
                where=str(path),
                why="it is not 64 hexadecimal digits",
                fix="Give a file that SigningKey.save wrote",
            ) from None
        return cls(private)

    def save(self, path: Path) -> None:
        """Write the private key to a new file that only this user may read.

        Raises:
            DestinationExists: a file is there; a key is never overwritten.
            StorageError: it cannot be written.
        """
        try:
            with storage_errors("cannot write a key", where=path, fix=_FIX):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(descriptor, "w") as file:
                    file.write(self._private.private_bytes_raw().hex())
                    file.flush()
                    os.fsync(file.fileno())
        except OSError as problem:
            if not isinstance(problem.__cause__, FileExistsError):
                raise
            raise DestinationExists(
                "will not overwrite a key", where=str(path), fix="Name a new file"
            ) from None

    def sign(self, text: bytes) -> str:
        """Return the signature of `text`, as 128 hexadecimal digits. The same text has the same."""
        signature: bytes = self._private.sign(text)
        return signature.hex()


def is_signed(public_key: str, signature: str, text: bytes) -> bool:
    """Return whether the owner of a public key signed `text`.

    Args:
        public_key: 64 hexadecimal digits.
        signature: 128 hexadecimal digits.
        text: that was signed.

    Raises:
        Missing: the library `cryptography` is not installed.
    """
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    if len(signature) != _SIGNATURE_DIGITS:  # fromhex would skip white space
        return False
    try:
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), text)
    except (ValueError, InvalidSignature):
        return False
    return True


def _ed25519() -> Any:
    """Return the module of a library that may be missing."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as problem:
        raise Missing(
            "signatures need the library cryptography",
            why=str(problem),
            fix="pip install 'paceline[ledger]', or use the ledger without keys",
        ) from None
    return ed25519
