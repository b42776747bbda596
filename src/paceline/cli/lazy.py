"""A click group whose subcommands are imported only when they are called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """A group that knows its subcommands by name and a line of help.

    A subcommand is the object of its own name in a module of its own name, so that ``--help`` takes
    no longer than the import of click.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, str], package: str, **kwargs: Any) -> None:
        """Make the group.

        Args:
            *args: of `click.Group`.
            verbs: help by subcommand, in the order in which a new user needs them.
            package: that holds the modules.
            **kwargs: of `click.Group`.
        """
        super().__init__(*args, **kwargs)
        self._verbs = verbs
        self._package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the subcommands in the order in which a new user needs them."""
        return list(self._verbs)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the subcommand; None if there is no such subcommand."""
        if cmd_name not in self._verbs:
            if cmd_name.isidentifier():
                from paceline.core.record import nearest  # here: --help has no use for it

                ctx.fail(f"No such command '{cmd_name}'. {nearest(cmd_name, self._verbs)}")
            return None
        command = getattr(importlib.import_module(f"{self._package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of subcommands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._verbs.items()))
