"""skeleton"""
from __future__ import annotations
from typing import Any
Path = Any
def make_path(store: Any, rank: int, ranks: tuple[int, ...], timeout: Any) -> Path | None:
    return None
