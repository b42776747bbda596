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

    A locale may be ASCII; and no encoding has a letter for a byte of a path that is not UTF-8. Call
    it once, before anything is written.
    """
    codecs.register_error(_HANDLER, _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _in_ascii(problem: UnicodeError) -> tuple[str, int]:
    if not isinstance(problem, UnicodeEncodeError):
        raise problem
    text = problem.object[problem.start : problem.end]
    shown = "".join(_ASCII.get(letter) or ascii(letter)[1:-1] for letter in text)
    return shown, problem.end
