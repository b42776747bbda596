"""Frozen dataclasses to JSON and back: how Machine, Workload, Plan and Estimate are stored.

A record is a frozen, keyword-only, slotted dataclass whose fields are numbers, strings, booleans,
None, other records, tuples of these, named tuples (rows of a long table, which JSON has as lists),
or dicts from strings to these. `to_json` writes it with the ``version`` of its class; `from_json`
refuses an unknown key, so that a misspelt key is an error that names the place instead of a value
silently lost.

Records grow older. When a class changes so that a file of yesterday no longer describes it, its
``version`` rises by one and `upgrade` learns the step from the version before; `from_json` takes as
many steps as a file needs. A file of a newer version is refused. A record inside another one is
written without its version while that is 1, and is upgraded by its own class::

    machine.json (Machine 1)           {"version": 1, "links": [{"level": ...}]}
      Machine.upgrade(data, 1)      -> Machine 2, its links still of version 1
        Link.upgrade(data, 1)       -> Link 2, for each link

A new field with a default needs no new version: older files stay readable without a step.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import types
import typing
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from paceline import __version__
from paceline.core.errors import ConfigError, NewerFormat

T = TypeVar("T", bound="Record")


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """Base of the types that everyone passes; subclasses become frozen dataclasses."""

    __slots__ = ()
    version: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data, with the version of this record's format."""
        return {"version": self.version, **_plain_fields(self)}

    def to_text(self) -> str:
        """Return `to_json` as indented text that ends with a newline."""
        return json.dumps(self.to_json(), indent=1) + "\n"

    def digest(self) -> str:
        """Return the digest that identifies this record's content; see the function `digest`."""
        return digest(self.to_json())

    @classmethod
    def from_json(cls, data: object, *, where: str = "") -> Self:
        """Return the record that `data` describes.

        Args:
            data: what `to_json` returned, perhaps through a file.
            where: names the source in errors, for example a path.

        Raises:
            ConfigError: a key is unknown or missing, a value has the wrong type, or an older
                version's data cannot be upgraded.
            NewerFormat: the data is of a later version than this program reads.
        """
        where = where or cls.__name__
        if not isinstance(data, dict):
            raise ConfigError(
                f"{cls.__name__} must be a JSON object", where=where, fix="Write it as {...}"
            )
        return _build(cls, _upgraded(cls, data, where), where)

    @classmethod
    def upgrade(cls, data: dict[str, Any], from_version: int) -> dict[str, Any]:
        """Return `data` of version `from_version` as version `from_version` + 1 has it.

        A subclass whose version rises overrides this, one step for each version, oldest first.
        Records inside `data` are still as they were written: their own classes upgrade them.

        Args:
            data: fields by name, without ``version``; may be changed.
            from_version: 1 or more, less than the class's version.
        """
        return data

    @classmethod
    def from_text(cls, text: str, *, where: str = "") -> Self:
        """Return the record that JSON `text` describes; errors as in `from_json`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as problem:
            raise ConfigError(
                "not valid JSON", where=where, why=str(problem), fix="Repair it at that line"
            ) from None
        return cls.from_json(data, where=where)


def digest(data: object) -> str:
    """Return the digest of JSON `data`: SHA-256 of its text, keys sorted, without white space.

    >>> digest({"b": 1, "a": [2]}) == digest({"a": [2], "b": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return a hint for an unknown `name`: the nearest known names."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    if close:
        return "Did you mean " + " or ".join(f"'{name}'" for name in close) + "?"
    return "Known: " + ", ".join(sorted(known))


def _upgraded(cls: type[T], data: dict[str, Any], where: str) -> dict[str, Any]:
    """Return `data` without its version, as the current version of `cls` has it."""
    fields = dict(data)
    version = fields.pop("version", 1)
    if type(version) is not int or version < 1:
        raise ConfigError(
            f"the version of {cls.__name__} must be an integer of at least 1, got {version!r}",
            where=where,
            fix=f"Write the version of the format: 1 to {cls.version}",
        )
    if version > cls.version:
        raise NewerFormat(
            f"{cls.__name__} has format version {version}",
            where=where,
            why=f"Paceline {__version__} reads versions 1 to {cls.version}",
            fix="Use the Paceline that wrote it, or a newer Paceline",
        )
    for older in range(version, cls.version):
        try:
            fields = cls.upgrade(fields, older)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as problem:
            raise ConfigError(
                f"{cls.__name__} of version {older} cannot be read as version {older + 1}",
                where=where,
                why=f"{type(problem).__name__}: {problem}",
                fix="Restore the file as it was written",
            ) from problem
    return fields


def _plain_fields(record: Any) -> dict[str, Any]:
    return {f.name: _plain(getattr(record, f.name)) for f in dataclasses.fields(record)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        version = getattr(value, "version", 1)
        return {**({"version": version} if version > 1 else {}), **_plain_fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _build(cls: type[T], data: dict[str, Any], where: str) -> T:
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]  # subclasses are dataclasses
    for key in data:
        if key not in fields:
            raise ConfigError(f"unknown key '{key}'", where=where, fix=nearest(key, fields))
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = convert(data[name], hints[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"key '{name}' is missing", where=where, fix="Add it")
    try:
        return cls(**values)
    except ConfigError as problem:  # the class does not know the file: add it
        raise type(problem)(problem.what, where=where, why=problem.why, fix=problem.fix) from None


def convert(value: Any, hint: Any, where: str) -> Any:
    """Return JSON `value` as the annotated type `hint`.

    Raises:
        ConfigError: it is not of that type; the message names `where`.
    """
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, typing.get_args(hint), where)
    if origin is tuple and isinstance(value, list):
        item = typing.get_args(hint)[0]
        return tuple(convert(entry, item, f"{where}[{i}]") for i, entry in enumerate(value))
    if isinstance(value, list) and (fields := _row_fields(hint)):
        return _convert_row(value, hint, fields, where)
    if origin is dict and isinstance(value, dict):
        item = typing.get_args(hint)[1]
        return {key: convert(entry, item, f"{where}.{key}") for key, entry in value.items()}
    if origin is typing.Literal:
        return _convert_literal(value, typing.get_args(hint), where)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        record = typing.cast("type[Record]", hint)
        return _build(record, _upgraded(record, value, where), where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(hint, type) and isinstance(value, hint) and type(value) in (hint, type(None)):
        return value
    name = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise ConfigError(f"{value!r} is not {name}", where=where, fix="Give a value of that type")


def _convert_literal(value: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if value in allowed:
        return value
    raise ConfigError(
        f"{value!r} is not one of {', '.join(map(repr, allowed))}",
        where=where,
        fix=nearest(str(value), [str(choice) for choice in allowed]),
    )


@functools.cache
def _row_fields(hint: Any) -> dict[str, Any]:
    """Return the types of a named tuple's fields by name; empty for any other type."""
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return typing.get_type_hints(hint)
    return {}


def _convert_row(value: list[Any], hint: Any, fields: dict[str, Any], where: str) -> Any:
    if len(value) != len(fields):
        raise ConfigError(
            f"{value!r} has {len(value)} values",
            where=where,
            fix=f"Give {len(fields)}: {', '.join(fields)}",
        )
    items = zip(value, fields.items(), strict=True)
    return hint(*(convert(item, kind, f"{where}.{name}") for item, (name, kind) in items))


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problem: ConfigError | None = None
    for option in options:
        if option is type(None):
            continue  # a value other than None is checked against the other types
        try:
            return convert(value, option, where)
        except ConfigError as refusal:
            problem = refusal
    assert problem is not None
    raise problem
