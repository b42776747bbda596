"""What is a script, a module or another program, and what is none of them."""

import doctest

import pytest

from paceline.core.errors import NotFound, UsageError
from paceline.launch import nodes, program
from paceline.launch.program import Program, ProgramKind, find_program


def test_examples():
    assert doctest.testmod(program).failed == 0
    assert doctest.testmod(nodes).failed == 0


@pytest.mark.parametrize(
    ("name", "content", "mode", "kind"),
    [
        ("train.py", b"print()", 0o644, ProgramKind.SCRIPT),
        ("train.py", b"#!/bin/sh\n", 0o755, ProgramKind.SCRIPT),  # torchrun runs it, too
        ("train", b"print()", 0o644, ProgramKind.SCRIPT),
        ("train", b"#!/usr/bin/env python3\n", 0o755, ProgramKind.SCRIPT),
        ("train", b"#!/opt/env/bin/python3.12 -u\n", 0o755, ProgramKind.SCRIPT),
        ("train", b"#!/bin/bash\npython train.py\n", 0o755, ProgramKind.EXECUTABLE),
        ("train", b"\x7fELF\x02\x01\x01\0", 0o755, ProgramKind.EXECUTABLE),
    ],
)
def test_the_kind_of_a_file(tmp_path, name, content, mode, kind):
    path = tmp_path / name
    path.write_bytes(content)
    path.chmod(mode)
    assert find_program(str(path), is_module=False) == Program(kind, str(path))


def test_a_word_is_looked_for_on_the_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = find_program("sh", is_module=False)
    assert found.kind is ProgramKind.EXECUTABLE
    assert found.name.endswith("/sh")


def test_a_file_that_is_neither_python_nor_executable_is_refused(tmp_path):
    (tmp_path / "run.sh").write_bytes(b"#!/bin/bash\n")
    with pytest.raises(UsageError) as caught:
        find_program(str(tmp_path / "run.sh"), is_module=False)
    assert "chmod +x" in caught.value.fix


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match="no such script"):
        find_program("nothing.py", is_module=False)
    with pytest.raises(NotFound, match="directory"):
        find_program(str(tmp_path), is_module=False)
    with pytest.raises(NotFound, match="no module named 'nothing'"):
        find_program("nothing.train", is_module=True)


def test_a_module_is_found_in_the_working_directory_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise SystemExit")
    found = find_program("own.deep.train", is_module=True)
    assert (found.kind, found.stem) == (ProgramKind.MODULE, "train")


@pytest.mark.parametrize("text", ["", ":29400", "node0:", "node0:http", "node0:70000", "a:b:c"])
def test_an_endpoint_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="not an address"):
        nodes.parse_endpoint(text)


@pytest.mark.parametrize("text", ["1:4", "two", "", ":"])
def test_a_number_of_nodes_that_is_none_is_refused(text):
    with pytest.raises(UsageError, match="not a number of nodes"):
        nodes.parse_nnodes(text)
    assert nodes.parse_nnodes("2:2") == nodes.parse_nnodes("2") == 2
