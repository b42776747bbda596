"""Log records carry the rank; nothing else about logging is ours."""

from __future__ import annotations

import logging


class RankFilter(logging.Filter):
    """Adds ``rank`` to each record, so that one format serves all ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the rank; never drop the record."""
        record.rank = self.rank
        return True


def configure(rank: int, level: int = logging.WARNING) -> None:
    """Send Paceline's log records of this rank to stderr; the root logger stays the user's."""
    handler = logging.StreamHandler()
    handler.addFilter(RankFilter(rank))
    handler.setFormatter(logging.Formatter("paceline: rank %(rank)d: %(message)s"))
    logger = logging.getLogger("paceline")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
