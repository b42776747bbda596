"""Configuration: one dataclass filled from a file, then the environment, then flags.

A key ``ranks`` of section ``run`` is ``ranks`` under ``[run]`` in ``paceline.toml``,
``PACELINE_RUN__RANKS`` in the environment and ``--ranks`` on the command line; the later one wins.
An unknown section or key is an error that names the nearest known one. This is the only module
that reads the environment.

A configuration declares its section itself, beside the code that it configures::

    @dataclass(frozen=True, kw_only=True, slots=True)
    class RunConfig(Configuration):
        section: ClassVar[str] = "run"
        ranks: int | None = None

and is listed in pyproject.toml under the entry points ``paceline.configuration``, so that the
sections of packages that are not imported are known, too. The entry points are read only when a
file or the environment has a section other than the requested one.

A size, a key that ends in ``_bytes``, may have a binary unit: ``chunk_bytes = "1MiB"``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import tomllib
import typing
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from paceline.core.errors import ConfigError
from paceline.core.files import read_text
from paceline.core.record import Record, convert, nearest

if typing.TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "PACELINE_"
QUEUE_PREFIX = "PACELINE_QUEUE_"  # what `paceline queue` tells a job, not a setting
ENTRY_POINTS = "paceline.configuration"
FILE_NAME = "paceline.toml"
_SIZE_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Configuration(Record):
    """A record that is filled from file, environment and flags.

    Attributes:
        section: its table in the file, and its name in the environment.
    """

    __slots__ = ()
    section: ClassVar[str]


C = TypeVar("C", bound=Configuration)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resolved(typing.Generic[C]):
    """A configuration with the provenance (default, file, environment, flag) of each value."""

    config: C
    provenance: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return each value beside its provenance, as ``config.json`` of a run holds them."""
        values = self.config.to_json()
        del values["version"]
        return {
            name: {"value": value, "provenance": self.provenance[name]}
            for name, value in values.items()
        }


def parse_size(text: str, *, where: str = "") -> int:
    """Return the bytes that ``256MiB``, ``1G`` or ``4096`` stands for; 1k is 1,024.

    Raises:
        ConfigError: `text` is not a size; the error names `where`.

    >>> parse_size("256MiB") == 256 << 20, parse_size("1.5k"), parse_size("4096")
    (True, 1536, 4096)
    """
    number = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = number[-1:] if number[-1:].isalpha() else ""
    try:
        return int(float(number.removesuffix(unit)) * _SIZE_UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        fix = "Write bytes, or a number with a binary unit, as 4096 or 256MiB"
        raise ConfigError(f"{text!r} is not a size", where=where, fix=fix) from None


def parse_seconds(text: str, *, where: str = "") -> float:
    """Return the seconds that ``90`` or ``off``, which is 0, stands for.

    Raises:
        ConfigError: `text` is neither; the error names `where`.

    >>> parse_seconds("90"), parse_seconds("off")
    (90.0, 0.0)
    """
    if text.strip().lower() == "off":
        return 0.0
    try:
        return float(text)
    except ValueError:
        fix = "Write seconds, as 90, or off"
        raise ConfigError(f"{text!r} is not a time", where=where, fix=fix) from None


def environment() -> Mapping[str, str]:
    """Return the process's environment."""
    return os.environ


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache folder for Paceline (XDG base directories); it may not exist."""
    environ = environment() if environ is None else environ
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"


def resolve(
    cls: type[C],
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Resolved[C]:
    """Return `cls` filled from default < file < environment < flag.

    Args:
        cls: the configuration.
        flags: values given on the command line; None stands for "not given".
        environ: in place of the process's environment.
        file: TOML to read; by default ``paceline.toml`` in the working directory, if any.

    Raises:
        ConfigError: an unknown key or a value of the wrong type; it names the place.
    """
    section = cls.section
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    values: dict[str, Any] = {}
    provenance = dict.fromkeys(names, "default")

    def put(name: str, value: Any, source: str, where: str) -> None:
        if name not in hints or name not in names:
            raise ConfigError(f"unknown key '{name}'", where=where, fix=nearest(name, names))
        if name.endswith("_bytes") and isinstance(value, str):
            value = parse_size(value, where=where)
        values[name] = convert(value, hints[name], where)
        provenance[name] = source

    for name, value in _file_values(section, file).items():
        put(name, value, "file", f"{file or FILE_NAME} [{section}]")
    environ = environment() if environ is None else environ
    prefix = f"{PREFIX}{section.upper()}__"
    for key in sorted(environ):
        if not key.startswith(PREFIX) or (key.startswith(QUEUE_PREFIX) and "__" not in key):
            continue
        if "__" not in key:
            possible = [f"{prefix}{name.upper()}" for name in names]
            raise ConfigError(
                f"unknown variable '{key}'", where="environment", fix=nearest(key, possible)
            )
        _check_section(key.removeprefix(PREFIX).partition("__")[0].lower(), section, key)
        if key.startswith(prefix):
            name = key.removeprefix(prefix).lower()
            hint = hints.get(name, str)
            put(name, _parse(environ[key], hint), "environment", key)
    for name, value in (flags or {}).items():
        if value is not None:
            put(name, list(value) if isinstance(value, tuple) else value, "flag", f"--{name}")
    return Resolved(config=cls(**values), provenance=provenance)


def _file_values(section: str, file: Path | None) -> dict[str, Any]:
    if file is None:
        file = Path(FILE_NAME)
        if not file.exists():
            return {}
    try:
        tables = tomllib.loads(read_text(file))
    except tomllib.TOMLDecodeError as problem:
        raise ConfigError(
            "not valid TOML", where=str(file), why=str(problem), fix="Correct that line"
        ) from None
    for name in tables:
        _check_section(name, section, str(file))
    table = tables.get(section, {})
    if not isinstance(table, dict):
        raise ConfigError(
            f"'{section}' must be a table", where=str(file), fix=f"Write it as [{section}]"
        )
    return table


@functools.cache  # each process group resolves a configuration; installed packages do not change
def known_sections() -> tuple[str, ...]:
    """Return the sections of all installed configurations, without importing any."""
    return tuple(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS))


def _check_section(name: str, own: str, where: str) -> None:
    if name == own:
        return
    known = known_sections()
    if name not in known:
        fix = nearest(name, {own, *known})
        raise ConfigError(f"unknown section '{name}'", where=where, fix=fix)


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
