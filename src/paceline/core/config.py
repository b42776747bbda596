"""Configuration: one dataclass filled from a file, then the environment, then flags.

A key ``ranks`` of section ``run`` is ``ranks`` under ``[run]`` in ``paceline.toml``,
``PACELINE_RUN__RANKS`` in the environment and ``--ranks`` on the command line; the later one wins.
An unknown key is an error that names the nearest one. This is the only module that reads the
environment, so everything that can change a run from outside is in this file.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record, convert, nearest

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

R = TypeVar("R", bound=Record)

PREFIX = "PACELINE_"
SECTIONS = ("pack", "run")  # every verb that takes configuration; others are errors
FILE_NAME = "paceline.toml"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(typing.Generic[R]):
    """A configuration with the origin (default, file, environment, flag) of each value."""

    config: R
    origin: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return each value beside its origin, as ``config.json`` of a run holds them."""
        values = self.config.to_json()
        version = values.pop("version")
        return {
            "version": version,
            "values": {
                name: {"value": value, "origin": self.origin[name]}
                for name, value in values.items()
            },
        }


def environment() -> Mapping[str, str]:
    """Return the process's environment."""
    return os.environ


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache folder for Paceline (XDG base directories); it may not exist."""
    environ = environment() if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"


def resolve(
    cls: type[R],
    section: str,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolved[R]:
    """Return `cls` filled from default < file < environment < flag.

    Args:
        cls: the configuration record.
        section: its table in the file and its name in the environment.
        flags: values given on the command line; None stands for "not given".
        environ: in place of the process's environment.
        file: TOML to read; by default ``paceline.toml`` in the working directory, if any.

    Raises:
        ConfigError: an unknown key or a value of the wrong type; it names the place.
    """
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]  # records are dataclasses
    values: dict[str, Any] = {}
    origin = dict.fromkeys(names, "default")

    def put(name: str, value: Any, source: str, where: str) -> None:
        if name not in hints or name not in names:
            raise ConfigError(f"unknown key '{name}'", where=where, fix=nearest(name, names))
        values[name] = convert(value, hints[name], where)
        origin[name] = source

    for name, value in _file_values(section, file).items():
        put(name, value, "file", f"{file or FILE_NAME} [{section}]")
    environ = environment() if environ is None else environ
    prefix = f"{PREFIX}{section.upper()}__"
    for key in sorted(environ):
        if not key.startswith(PREFIX):
            continue
        if "__" not in key:
            possible = [f"{prefix}{one.upper()}" for one in names]
            raise ConfigError(
                f"unknown variable '{key}'", where="environment", fix=nearest(key, possible)
            )
        _check_section(key.removeprefix(PREFIX).partition("__")[0].lower(), key)
        if key.startswith(prefix):
            name = key.removeprefix(prefix).lower()
            hint = hints.get(name, str)
            put(name, _parse(environ[key], hint), "environment", key)
    for name, value in (flags or {}).items():
        if value is not None:
            put(name, list(value) if isinstance(value, tuple) else value, "flag", f"--{name}")
    return Resolved(config=cls(**values), origin=origin)


def _file_values(section: str, file: Path | None) -> dict[str, Any]:
    if file is None:
        file = Path(FILE_NAME)
        if not file.exists():
            return {}
    try:
        tables = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(
            "not valid TOML", where=str(file), why=str(problem), fix="Mend that line"
        ) from None
    for name in tables:
        _check_section(name, str(file))
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"'{section}' must be a table", where=str(file), fix=f"Write it as [{section}]"
        )
    return table


def _check_section(name: str, where: str) -> None:
    if name not in SECTIONS:
        raise ConfigError(f"unknown section '{name}'", where=where, fix=nearest(name, SECTIONS))


def _parse(text: str, hint: Any) -> Any:
    """Return environment `text` as the JSON value that `hint` asks for; text if it is none."""
    options = typing.get_args(hint) or (hint,)
    lowered = text.strip().lower()
    if bool in options and lowered in ("1", "true", "yes", "0", "false", "no"):
        return lowered in ("1", "true", "yes")
    for number in (int, float):
        if number in options:
            try:
                return number(text)
            except ValueError:
                continue
    return text
