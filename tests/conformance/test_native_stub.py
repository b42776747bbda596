"""The signatures that the compiled module has are those that mypy is told."""

import ast
import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import paceline
from paceline import native
from paceline.core.errors import CorruptPack, PacelineError, StorageError, UsageError

STUB = Path(paceline.__file__).with_name("_native.pyi")
SCRIPT = Path(__file__).parents[2] / "scripts" / "stub"


def signatures(text):
    return ast.dump(ast.parse(text), indent=1).splitlines()


def test_the_stub_is_what_the_compiled_module_says():
    loader = SourceFileLoader("stub", str(SCRIPT))
    script = importlib.util.module_from_spec(importlib.util.spec_from_loader("stub", loader))
    loader.exec_module(script)
    # Compared as syntax: how ruff breaks lines does not matter.
    assert signatures(STUB.read_text()) == signatures(script.generated()), "run scripts/stub"


def test_the_door_offers_what_it_lists():
    assert len(set(native.__all__)) == len(native.__all__)
    for name in native.__all__:
        assert getattr(native, name) is not None


PROBLEM = {
    "file": b"/data/train.pack/shard-00001.pace",
    "why": "it broke",
    "error": 0,
    "direct": False,
    "sample": 0,
    "shard": 1,
    "name": b"",
    "version": 0,
}


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"kind": "sample", "sample": 3, "name": b"a\xff"}, CorruptPack, "sample 3 'a\\udcff'"),
        ({"kind": "sample"}, CorruptPack, "sample 0 '?'"),
        ({"kind": "corrupt"}, CorruptPack, "the pack is damaged"),
        ({"kind": "version", "version": 9}, UsageError, "format version 9"),
        ({"kind": "version"}, UsageError, "a newer format"),
        ({"kind": "io", "error": 2}, CorruptPack, "a file of the pack is missing"),
        ({"kind": "io", "error": 13}, StorageError, "cannot open the pack"),
        ({"kind": "io", "error": 22, "direct": True}, StorageError, "no O_DIRECT"),
    ],
)
def test_each_error_of_the_core_becomes_one_of_ours(fields, kind, text):
    error = native._pack_error(**{**PROBLEM, **fields})
    assert isinstance(error, PacelineError)
    assert type(error) is kind
    assert text in str(error)
    assert error.where == "/data/train.pack/shard-00001.pace"
    assert error.fix
