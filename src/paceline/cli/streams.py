"""Lets every letter of a message reach a terminal or file, and no control character a terminal.

What commands print has names, messages and logs of others in it. Control characters among them
could rename the window, fill the clipboard or hide a line; on a terminal they are written out, but
for colours. What moves the cursor goes to `terminal`: bars of progress, which have nothing of
others in them.
"""

from __future__ import annotations

import codecs
import io
import re
import sys
from typing import TextIO

# Colours; and what is no text: control characters but line breaks and tabs, and what turns the
# direction of writing.
_CODES = re.compile(
    r"\x1b\[[0-9;]*m|[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)

_HANDLER = "paceline.ascii"
# As wide as what they stand for, where a table is aligned by them.
_ASCII = {"µ": "u", "─": "-", "≤": "<", "→": ">"}


def accept_any_text() -> None:
    """Have stdout and stderr write letters that their encoding lacks in ASCII, instead of failing.

    On a terminal they write control characters out. A locale may be ASCII; and no encoding has a
    letter for a byte of a path that is not UTF-8. Call it once, before anything is written.
    """
    codecs.register_error(_HANDLER, _in_ascii)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)
            if stream.isatty():
                setattr(sys, name, _Visible(stream))


def terminal() -> TextIO:
    """Return stderr for what moves the cursor; print nothing there that is not our own."""
    stream = sys.stderr
    return stream.below if isinstance(stream, _Visible) else stream


class _Visible(io.TextIOWrapper):
    """Writes to the same file as a stream, with control characters written out."""

    def __init__(self, below: io.TextIOWrapper) -> None:
        super().__init__(
            below.buffer, below.encoding, below.errors, line_buffering=below.line_buffering
        )
        self.below = below  # kept open, and asked for by `terminal`

    def write(self, text: str) -> int:
        return super().write(_CODES.sub(_shown, text))


def _shown(code: re.Match[str]) -> str:
    return code[0] if len(code[0]) > 1 else repr(code[0])[1:-1]


def _in_ascii(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    shown = "".join(_ASCII.get(letter) or ascii(letter)[1:-1] for letter in text)
    return shown, problem.end
