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
