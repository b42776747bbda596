"""Lets every message reach a terminal or file whose encoding lacks a letter of it."""

from __future__ import annotations

import codecs
import io
import sys

_HANDLER = "paceline.ascii"
# As wide as what they stand for, where a table is aligned by them.
_ASCII = {"µ": "u", "─": "-", "≤": "<", "→": ">"}


def accept_any_text() -> None:
    """Have stdout and stderr write letters that their encoding lacks in ASCII, instead of failing.

    Call it once, before anything is written. Streams of UTF-8 stay as they are.
    """
    codecs.register_error(_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_unicode(stream.encoding):
            stream.reconfigure(errors=_HANDLER)


def _is_unicode(encoding: str) -> bool:
    return codecs.lookup(encoding).name.startswith("utf")


def _in_ascii(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    shown = "".join(_ASCII.get(letter) or ascii(letter)[1:-1] for letter in text)
    return shown, problem.end
