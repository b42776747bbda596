"""Every error that Paceline raises tells what to do about it."""

import ast
import inspect
from pathlib import Path

import pytest

import paceline
from paceline.core import errors

SOURCE = Path(paceline.__file__).parent
NAMES = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.PacelineError)
}


def _without_fix(tree):
    """Return the lines that construct an error without a `fix` that says something."""
    lines = []
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        fixes = [keyword.value for keyword in call.keywords if keyword.arg == "fix"]
        passed_on = any(keyword.arg is None for keyword in call.keywords)
        empty = any(isinstance(value, ast.Constant) and not value.value for value in fixes)
        if name in NAMES and not passed_on and (not fixes or empty):
            lines.append(call.lineno)
    return lines


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE))
)
def test_every_error_has_a_fix(path):
    lines = _without_fix(ast.parse(path.read_text()))
    assert not lines, f"an error without fix= in {path.relative_to(SOURCE)}, lines {lines}"


def test_the_check_itself_finds_what_it_looks_for():
    tree = ast.parse(
        "raise NotFound('x', fix='')\nraise errors.NotFound('x')\nNotFound('x', fix='y')"
    )
    assert _without_fix(tree) == [1, 2]
