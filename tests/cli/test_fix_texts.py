"""Every `atoll` command in a text of the package exists, with every option that the text gives it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from atoll.cli.main import app

PACKAGE = Path(__file__).parents[2] / "src" / "atoll"
COMMAND = re.compile(r"(?<!of )(?<!that )\batoll ([a-z]+)([^;,:()`\n]*)")
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_every_command_in_an_error_text_exists_with_its_options():
    """All string literals except docstrings: `fix=`, positional fixes, and notices that name a command."""
    unknown = [(place, problem) for place, text in texts() for problem in problems(text)]
    assert unknown == []


def test_unknown_verbs_and_options_are_found():
    assert problems("atoll doctor") == ["atoll doctor"]
    assert problems("atoll checkpoint lists FOLDER; or atoll up --folder X") == [
        "atoll checkpoint lists",
        "atoll up --folder",
    ]
    assert problems("atoll checkpoint pull TICKET --to MODEL, another version of atoll; atoll stop --dir X") == []


def texts() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every string literal; a value inserted into an f-string becomes "X"."""
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        skipped = {
            id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, DEFINITIONS) and ast.get_docstring(n)
        }
        skipped |= {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
        for node in ast.walk(tree):
            if id(node) not in skipped and (text := text_of(node)):
                yield f"{file.relative_to(PACKAGE)}:{node.lineno}", text


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "X" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def problems(text: str) -> list[str]:
    """Commands and options in this text that the command line does not know."""
    unknown = list[str]()
    for verb, rest in COMMAND.findall(text):
        words = [verb, *re.findall(r"^ ([a-z]+)", rest)] if verb == "checkpoint" else [verb]
        command = app
        for word in words:
            if word not in command:
                unknown.append(f"atoll {' '.join(words)}")
                break
            command = command[word]
        else:
            given = re.findall(r"--[a-z][a-z-]*", rest)
            arguments = command.assemble_argument_collection() if command.default_command else ()
            known = {"--help", *(name for argument in arguments for name in argument.names)}
            unknown += [f"atoll {' '.join(words)} {option}" for option in given if option not in known]
    return unknown
