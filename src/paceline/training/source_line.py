"""Finds the line of a model's code that an error came through, for the message of another error."""

from __future__ import annotations

import linecache
import os
import traceback

import torch

UNKNOWN_LINE = "unknown line"
# As they stand in the names of frames.
_FOLDERS = (os.path.dirname(torch.__file__), os.path.dirname(__file__))  # noqa: PTH120


def source_line(problem: BaseException) -> str:
    """Return file, number and text of the last line that is neither torch's nor Paceline's."""
    frames = traceback.extract_tb(problem.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_FOLDERS, "<"))]
    if not own:
        return UNKNOWN_LINE
    last = own[-1]
    line = linecache.getline(last.filename, last.lineno or 0).strip()
    return f"{last.filename}:{last.lineno}; `{line}`"
