"""The source tree stays readable: limits on names, words, sizes and import circles. Exceptions may only shrink."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import pytest

SOURCES = Path(__file__).parents[1] / "src" / "atoll"
FILES_PER_FOLDER, LINES_PER_FILE, LINES_PER_FUNCTION = 25, 600, 70  # lines with the docstring
POSITIONAL, OF_A_CONSTRUCTOR = 7, 8
ONE_WORD, WEAK = 0.25, 0.12  # shares of all class names
WEAK_WORDS = {
    "Value",
    "Data",
    "Info",
    "Object",
    "Item",
    "State",
    "Manager",
    "Helper",
    "Thing",
    "Handler",
    "Context",
}
BANNED = {  # per 1,000 words of docstrings and comments
    r"\b(?:whoever|whom|whose)\b": 0.3,
    r"\b(?:nobody|somebody|everybody|anybody)\b": 0.3,
    r"\b(?:I|my|mine)\b": 0.3,
    r"\b(?:whichever|the one that|the one who|of those that|no one)\b": 0.3,  # synonyms that only dodge the list
}
EXCEPTIONS = {  # place -> reason; at most ten
    "cli/pull.py:pull": "options of one command",
    "cli/simulate.py:simulate": "options of one command",
    "runtime/event_log.py:_see": "one case per fact, until facts fold themselves",
    "runtime/training_spec.py:founding_blobs": "terms of a new run, checked in order",
    "simulation/tensors.py:__init__": "knobs of one virtual worker",
    "verification/replay_audit/judge.py:judge_update": "all that one audit depends on",
    "verification/replay_audit/replay_judge.py:assigned": "all that an assignment depends on",
    "runtime/worker/capabilities.py": "names the worker's type, which imports it",
    "training/experiment/plots.py": "names the type of the results that it draws",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def trees() -> dict[str, ast.Module]:
    return {str(p.relative_to(SOURCES)): ast.parse(p.read_text()) for p in sorted(SOURCES.rglob("*.py"))}


def definitions(kind: type | tuple[type, ...]) -> Iterator[tuple[str, ast.AST]]:
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kind):
                yield path, node


def class_names() -> list[str]:
    return [node.name for _, node in definitions(ast.ClassDef) if isinstance(node, ast.ClassDef)]


def beyond(found: dict[str, int]) -> dict[str, int]:
    return {place: size for place, size in found.items() if place not in EXCEPTIONS}


def test_no_two_classes_share_a_name():
    assert [name for name, count in Counter(class_names()).items() if count > 1] == []


def test_class_names_say_what_the_class_is():
    """A bare word or a weak suffix says little to a reader who sees the name in a stack trace."""
    words = [re.findall(r"[A-Z][a-z0-9]*", name) for name in class_names()]
    assert sum(len(parts) == 1 for parts in words) <= ONE_WORD * len(words)
    assert sum(len(parts) == 2 and parts[1] in WEAK_WORDS for parts in words) <= WEAK * len(words)


@cache
def prose() -> list[tuple[str, str]]:
    found = list[tuple[str, str]]()
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((path, ast.get_docstring(node) or ""))
        for token in tokenize.generate_tokens(io.StringIO((SOURCES / path).read_text()).readline):
            if token.type == tokenize.COMMENT:
                found.append((path, token.string))
    return found


@pytest.mark.parametrize("pattern", BANNED)
def test_docstrings_and_comments_name_roles(pattern: str):
    """A component or a role is the subject of a sentence; these words hide it."""
    found, words = Counter[str](), 0
    for path, text in prose():
        words += len(text.split())
        found[path] += len(re.findall(pattern, text, 0 if "|my|" in pattern else re.I))
    assert found.total() * 1000 <= BANNED[pattern] * words, found.most_common(10)


def test_folders_and_files_are_small():
    folders = Counter(str(Path(path).parent) for path in trees())
    assert beyond({f: n for f, n in folders.items() if n > FILES_PER_FOLDER}) == {}
    lines = {path: len((SOURCES / path).read_text().splitlines()) for path in trees()}
    assert beyond({path: n for path, n in lines.items() if n > LINES_PER_FILE}) == {}


def test_functions_are_small():
    """The limit on complexity is ruff's (C901)."""
    lines, arguments = {}, {}
    for path, node in definitions((ast.FunctionDef, ast.AsyncFunctionDef)):
        assert isinstance(node, Function) and node.end_lineno is not None
        names = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
        is_constructor = node.name == "__init__"
        count = len(names) + (len(node.args.kwonlyargs) if is_constructor else 0)
        lines[f"{path}:{node.name}"] = node.end_lineno - node.lineno + 1
        if count > (OF_A_CONSTRUCTOR if is_constructor else POSITIONAL):
            arguments[f"{path}:{node.name}"] = count
    assert beyond({place: n for place, n in lines.items() if n > LINES_PER_FUNCTION}) == {}
    assert beyond(arguments) == {}


def test_no_modules_import_each_other_in_a_circle():
    """Imports for type checking count, too: a circle of types is a circle of ideas."""
    graph = grimp.build_graph("atoll", exclude_type_checking_imports=False)
    circles, seen = [], set[str]()
    for module in sorted(graph.modules):
        if module in seen:
            continue
        circle = graph.find_upstream_modules(module) & graph.find_downstream_modules(module)
        seen |= circle
        places = {name.removeprefix("atoll.").replace(".", "/") + ".py" for name in circle | {module}}
        if circle and not (len(places) == 2 and places & set(EXCEPTIONS)):
            circles.append(sorted(places))
    assert circles == []


def test_the_list_of_exceptions_only_shrinks():
    known = {str(Path(p).parent) for p in trees()} | set(trees())
    assert len(EXCEPTIONS) <= 10 and all(reason for reason in EXCEPTIONS.values())
    assert {place.split(":")[0] for place in EXCEPTIONS} <= known
