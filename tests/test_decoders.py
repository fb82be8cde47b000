"""Decoders of typed values are made when their module is imported, not where they are used.

msgspec puts the tables of a Struct where other threads find them before they are filled: where two threads are the
first to read types that share one, the second follows a null pointer, and the process ends with signal 11.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "atoll"


def made_late(tree: ast.Module) -> Iterator[int]:
    """Lines inside functions that make a decoder, or have `decode` make one."""
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name == "Decoder" or (name == "decode" and any(word.arg == "type" for word in call.keywords)):
                yield call.lineno


def test_no_function_makes_a_decoder_of_a_type():
    late = [f"{file}:{line}" for file in SOURCES.rglob("*.py") for line in made_late(ast.parse(file.read_text()))]
    assert late == []


def test_the_search_finds_both_ways():
    made = "def f():\n    m.decode(b'', type=int)\nasync def g():\n    m.Decoder(int)\nX = m.Decoder(int)\n"
    assert list(made_late(ast.parse(made))) == [2, 4]
