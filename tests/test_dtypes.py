"""New tensors say their dtype: in loops of somebody's own, torch's default is somebody's own, too.

Models are excepted: they are built in processes of our own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "atoll"
MAKERS = {"zeros", "ones", "empty", "full", "rand", "randn"}


def without_dtype(tree: ast.Module) -> Iterator[int]:
    """Lines that make a tensor of torch's default dtype."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        match call.func:
            case ast.Attribute(ast.Name("torch"), made) if made in MAKERS:
                if all(word.arg != "dtype" for word in call.keywords):
                    yield call.lineno


def test_no_tensor_has_the_dtype_of_the_day():
    files = (file for file in SOURCES.rglob("*.py") if "models" not in file.parts)
    assert [f"{file}:{line}" for file in files for line in without_dtype(ast.parse(file.read_text()))] == []


def test_the_search_finds_them():
    made = "x = torch.zeros(3)\ny = torch.zeros(3, dtype=torch.float32)\nz = torch.zeros_like(x)\n"
    assert list(without_dtype(ast.parse(made))) == [1]
