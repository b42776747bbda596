"""``paceline queue``: jobs on a shared cluster; a module for each subcommand."""

from paceline.cli.queue.group import queue

__all__ = ["queue"]
