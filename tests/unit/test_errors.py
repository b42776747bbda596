"""Each error ends a command with its code, is its nearest built-in, and tells all it knows."""

import inspect
import re

import pytest

from paceline.core import errors
from paceline.core.errors import PacelineError

CLASSES = [
    one
    for _, one in inspect.getmembers(errors, inspect.isclass)
    if issubclass(one, PacelineError) and one is not PacelineError
]
LINE = re.compile(r"\+-- (\w+)(?: \((\w+)\))?\s+(\d+)?")
TREE = {
    name: (base, code) for name, base, code in LINE.findall(errors.__doc__)
}  # as the docstring draws it


def drawn_parent(name):
    lines = errors.__doc__.splitlines()
    at = next(i for i, one in enumerate(lines) if re.search(rf"\+-- {name}\b", one))
    depth = lines[at].index("+--")
    above = (LINE.search(line) for line in reversed(lines[:at]) if "+--" in line)
    for match in above:
        if match.start() < depth:
            return match.group(1)
    return "PacelineError"


def test_the_docstring_draws_every_class():
    assert set(TREE) == {error.__name__ for error in CLASSES}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda error: error.__name__)
def test_code_parent_and_built_in_are_as_drawn(cls):
    base, code = TREE[cls.__name__]
    assert cls.exit_code == int(code)
    assert drawn_parent(cls.__name__) in {base.__name__ for base in cls.__bases__}
    built_ins = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    if base:
        assert base in {parent.__name__ for parent in cls.__bases__}
    assert built_ins[0] not in (Exception, BaseException), "the nearest built-in is none"
    assert cls.__doc__


@pytest.mark.parametrize("cls", [PacelineError, *CLASSES], ids=lambda error: error.__name__)
def test_json_and_text_carry_what_where_why_fix(cls):
    error = cls("it broke", where="rank 3", why="too hot", fix="Cool it")
    assert error.to_json() == {
        "error": {
            "code": cls.__name__,
            "what": "it broke",
            "where": "rank 3",
            "why": "too hot",
            "fix": "Cool it",
        }
    }
    assert str(error) == "it broke (rank 3): too hot. Cool it"
    assert str(cls("it broke")) == "it broke"
    assert error.args == ("it broke",)


@pytest.mark.parametrize(
    ("what", "where", "why", "text"),
    [
        ("rank 1 is gone", "rank 1", "", "rank 1 is gone"),
        (
            "rank 1 is gone",
            "rank 1; global ranks: 1 is 3",
            "",
            "rank 1 is gone (global ranks: 1 is 3)",
        ),
        ("unusable since", "rank 1", "rank 1 is gone", "unusable since: rank 1 is gone"),
        ("rank 10 is gone", "rank 1", "", "rank 10 is gone (rank 1)"),
    ],
)
def test_the_text_does_not_repeat_the_rank_that_it_begins_with(what, where, why, text):
    error = PacelineError(what, where=where, why=why)
    assert str(error) == text
    assert error.to_json()["error"]["where"] == where


def test_errors_of_the_system_are_translated_once():
    with (
        pytest.raises(errors.StorageError) as caught,
        errors.storage_errors("cannot write", where="/data", fix="Free space"),
    ):
        raise OSError(28, "No space left on device")
    assert str(caught.value) == "cannot write (/data): No space left on device. Free space"
    assert isinstance(caught.value.__cause__, OSError)
    with (
        pytest.raises(errors.NotFound, match="mine"),
        errors.storage_errors("cannot write", where="/data", fix="Free space"),
    ):
        raise errors.NotFound("mine")  # an OSError too, but one of ours
    with (
        pytest.raises(errors.NotFound, match="gone: 2"),
        errors.os_errors_as(lambda problem: errors.NotFound(f"gone: {problem.errno}")),
    ):
        raise FileNotFoundError(2, "No such file")
    assert errors.reason(OSError("no errno")) == "no errno"
