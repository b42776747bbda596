"""What rank 0 writes of rebalancing into the run's folder while the run goes on."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from paceline.core.errors import StorageError
from paceline.core.files import append_lines, commit_text
from paceline.runs.balance import ACTIONS_NAME, SLOW_NODES_NAME, BalanceAction, SlowNodes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_LOG = logging.getLogger(__name__)


class BalanceLog:
    """The two files; a disk that is full costs a warning, not the training.

    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._nodes = SlowNodes()
        self._attempt(append_lines, run / ACTIONS_NAME, ())

    def add(self, actions: Iterable[BalanceAction]) -> None:
        """Write actions."""
        lines = [json.dumps(action.to_json()) for action in actions]
        if lines:
            self._attempt(append_lines, self._run / ACTIONS_NAME, lines)

    def slow_nodes(self, nodes: SlowNodes) -> None:
        """Write which nodes are slow now, if that is news."""
        known = [(node.rank, node.cause) for node in self._nodes.nodes]
        if [(node.rank, node.cause) for node in nodes.nodes] != known:
            self._nodes = nodes
            self._attempt(commit_text, self._run / SLOW_NODES_NAME, nodes.to_text())

    def close(self) -> None:
        """Write the nodes that are slow at the end, with their last figures."""
        if self._nodes.nodes:
            self._attempt(commit_text, self._run / SLOW_NODES_NAME, self._nodes.to_text())

    @staticmethod
    def _attempt(write: object, *args: object) -> None:
        assert callable(write)
        try:
            write(*args)
        except StorageError as problem:
            _LOG.warning("rebalancing is not logged: %s", problem)
