"""What the benchmarks import of Paceline exists: no test runs them, and a rename would go unseen.

A function whose name ends in `_before` runs the code of an earlier commit, and is left out.
"""

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "bench").glob("*.py"))
NEEDS_TORCH = {"Loader", "PackDataset"}  # handed out lazily


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_is_there(path):
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not getattr(node, "name", "").endswith("_before")]
    missing = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "paceline":
            module = importlib.import_module(node.module)
            missing += [
                f"{node.module}.{alias.name}, line {node.lineno}"
                for alias in node.names
                if alias.name not in NEEDS_TORCH
                and not hasattr(module, alias.name)
                and importlib.util.find_spec(f"{node.module}.{alias.name}") is None
            ]
    assert not missing


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_what_a_benchmark_imports_of_the_others_is_there(path):
    """Its command has only its own folder on the path, none of what tests share."""
    missing = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module, wanted = node.module or "", {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            module, wanted = node.names[0].name, set()
        else:
            continue
        if module.split(".")[0] == "support":
            missing.append(f"{module}, line {node.lineno}")
        elif (beside := path.parent / f"{module}.py").is_file():
            missing += [f"{module}.{name}" for name in wanted - defined_in(beside)]
    assert not missing


def defined_in(path):
    """Return the names that a module binds, as far as its text shows them."""
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.ImportFrom, ast.Import)):
            names |= {alias.asname or alias.name for alias in node.names}
    return names
