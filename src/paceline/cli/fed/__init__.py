"""``paceline fed``: federations; a module for each subcommand."""

from paceline.cli.fed.group import fed

__all__ = ["fed"]
