"""Reads the Workload of a JSON file: one of its own, or that of a plan file.

So a model that was captured where torch is, is predicted where it is not.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.plan_file import PlanFile
from paceline.core.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path


def read_workload(path: Path) -> Workload:
    """Return the Workload at `path`.

    Raises:
        NotFound, StorageError, CorruptData: there is no such file, or it cannot be read.
        ConfigError: it is neither a Workload nor a plan file with one.
    """
    text, where = read_text(path), str(path)
    try:
        data = json.loads(text)
    except json.JSONDecodeError:
        return Workload.from_text(text, where=where)  # says where the JSON ends
    if not isinstance(data, dict) or "plan" not in data:
        return Workload.from_json(data, where=where)
    workload = PlanFile.from_json(data, where=where).workload
    if workload is None:
        raise ConfigError(
            "this plan file has no workload",
            where=where,
            fix="Give a file that `paceline plan --out` wrote, or FILE.py:FUNCTION",
        )
    return workload
