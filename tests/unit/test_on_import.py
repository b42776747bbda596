"""Calls when a module is first imported."""

import importlib
import sys

import pytest

from paceline.core.on_import import on_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return the name of a module that can be imported and has not been."""
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "imported_late"
    sys.modules.pop("imported_late", None)


def test_the_callback_is_called_once_after_the_module_is_executed(module):
    seen = []
    before = len(sys.meta_path)
    on_import(module, lambda loaded: seen.append(loaded.value))
    assert not seen
    importlib.import_module(module)
    importlib.reload(sys.modules[module])
    assert seen == [1]
    assert len(sys.meta_path) == before
    on_import(module, lambda loaded: seen.append(loaded))
    assert seen == [1, sys.modules[module]]


def test_two_callbacks_of_one_module_are_both_called(module):
    seen = []
    on_import(module, lambda _: seen.append("first"))
    on_import(module, lambda _: seen.append("second"))
    importlib.import_module(module)
    assert sorted(seen) == ["first", "second"]


def test_an_import_survives_a_callback_that_is_attempted(module):
    def attempt(callback, loaded):
        with pytest.raises(ZeroDivisionError):
            callback(loaded)

    on_import(module, lambda _: 1 / 0, attempt)
    assert importlib.import_module(module).value == 1
    sys.modules.pop(module)
    on_import(module, lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(module)


def test_a_module_that_does_not_exist_is_not_found():
    on_import("no_such_module_at_all", lambda _: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_at_all"):
        importlib.import_module("no_such_module_at_all")
