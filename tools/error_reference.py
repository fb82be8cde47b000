"""Reference page of errors (docs/reference/errors.md), collected from the source code without running it.

A site is an expression with an error code: a call (`UsageError("E-ARG-04", what, cause=…, fix=…)`), or an entry of
a table of refusals. Variable parts of a text stand in braces; a text with alternatives gives several messages.
Usage: make reference
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import ChainMap, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "errors.md"
CODE = re.compile(r"E-([A-Z]+)-\d\d")
ALTERNATIVES_MAX = 4  # messages of one site; a text with more alternatives is shown as a name in braces

AREAS = {
    "ARG": "arguments of a command",
    "ATT": "own training loop",
    "AUD": "replay audit",
    "BLM": "attribution of a bad round",
    "CFG": "settings",
    "CHK": "checkpoints and rollback",
    "CLK": "clock",
    "DATA": "data",
    "DEMO": "demo",
    "DIR": "a peer's folder",
    "DISK": "disk",
    "DOOR": "control socket of a running peer",
    "EVA": "evaluation of agreed states",
    "EXP": "experiments in one process",
    "INT": "defects of Atoll",
    "JOIN": "admission to a run",
    "KEY": "keys",
    "LOC": "local swarm",
    "NET": "network",
    "PCS": "archive in pieces",
    "PLAN": "cost estimates",
    "PLOT": "plots",
    "PUB": "published checkpoints",
    "RED": "all-reduce",
    "RUN": "a run",
    "SCO": "loss scoring",
    "SIM": "simulation",
    "SYS": "operating system",
    "TKT": "tickets",
    "TRN": "trainer process",
    "USE": "Python API",
    "VAL": "state validation",
    "VER": "verification of a history",
}
STATUSES = {"UsageError": 2, "NetworkError": 3, "RefusedError": 4, "RunFailedError": 5}  # class: exit status
TRAINER = {"crashed": 1, "hung": 2, "memory": 3, "diverged": 4, "refused": 5}  # why of TrainerCommandError: number
# callables and tables without keywords: what their positional values after the code mean
POSITIONAL = {
    "_refuse": ("what", "fix"),
    "HistoryProblem": ("", "", "what", "cause", "fix"),
    "KINDS": ("cause", "fix"),
    "REFUSALS": ("what", "fix"),
}
TEXT = (ast.Constant, ast.JoinedStr, ast.IfExp, ast.BinOp)  # expressions that are read as texts
HEAD = """# Errors

An error has a stable code, what failed, often a likely cause, and what to try. With `--json` a command prints it as
an object on standard error. Parts in braces vary. The class decides the exit status of a command: `UsageError` 2,
`NetworkError` 3, `RefusedError` 4, `RunFailedError` 5. Python code catches `atoll.AtollError` and reads `.code`.

This page is generated from the source code: `make reference` writes it anew.
"""


@dataclass(frozen=True)
class Message:
    """One message of a code, as a command prints it."""

    code: str
    kind: str
    what: str
    cause: str
    fix: str
    place: str

    @property
    def text(self) -> str:
        text = f"{self.code} {self.what}"
        text += f"\n  likely cause: {self.cause}" if self.cause else ""
        return text + (f"\n  try: {self.fix}" if self.fix else "")


class Module:
    """One source file: its tree, and the text that an expression of it can have."""

    def __init__(self, file: Path, constants: dict[str, dict[str, ast.expr]]) -> None:
        """`constants`: values by name in capitals, by module; this module adds its own."""
        self.tree = ast.parse(file.read_text())
        self.place = str(file.relative_to(ROOT))
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.resolving = set[str]()  # names whose assigned texts are being collected
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        name = ".".join(file.relative_to(ROOT / "src").with_suffix("").parts)
        own = constants.setdefault(name, {})
        imported = [node.module for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom) and node.module]
        self.constants = ChainMap(own, *(constants.setdefault(one, {}) for one in imported))
        for node in self.tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
                own[target.id] = value

    def above(self, node: ast.AST, kind: type | tuple[type, ...]) -> ast.AST | None:
        """The nearest expression or statement around this one that is of this kind."""
        while (node := self.parents.get(node)) and not isinstance(node, kind):
            pass
        return node

    def texts(self, node: ast.expr | None) -> list[str]:
        """Every text that the expression can have, at most ALTERNATIVES_MAX."""
        match node:
            case None:
                found = [""]
            case ast.Constant(value=value):
                found = ["" if value is None else f"{value:g}" if isinstance(value, float) else str(value)]
            case ast.JoinedStr(values=values):
                found = self._joined(values)
            case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper() and name in self.constants:
                found = self.texts(self.constants[name])
            case ast.FormattedValue(value=ast.IfExp() as value):
                found = self.texts(value)
            case ast.FormattedValue(value=value):
                found = [_hole(value)]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                found = self._joined([left, right])
            case ast.BoolOp(op=ast.Or(), values=values):
                found = [text for value in values for text in self.texts(value)]
            case ast.IfExp(body=body, orelse=orelse):
                found = [*self.texts(body), *self.texts(orelse)]
            case ast.Name(id=name) if name.isupper() and name in self.constants:
                found = self.texts(self.constants[name])
            case ast.Name():
                found = self._assigned(node) or [_hole(node)]
            case ast.Call(args=args) if len(texts := [one for one in args if isinstance(one, TEXT)]) > 1:
                found = [text for one in texts for text in self.texts(one)]  # a choice between two texts
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                found = self._returned(name) or [_hole(node)]
            case _:
                found = [_hole(node)]
        found = list(dict.fromkeys(found))
        return found if len(found) <= ALTERNATIVES_MAX or node is None else [_hole(node)]

    def _joined(self, parts: list[ast.expr]) -> list[str]:
        return ["".join(texts) for texts in itertools.product(*map(self.texts, parts))]

    def _returned(self, function: str) -> list[str]:
        """Texts that this function of the module returns."""
        nodes = ast.walk(self.functions[function])
        values = [node.value for node in nodes if isinstance(node, ast.Return)]
        return [text for value in values if isinstance(value, TEXT) for text in self.texts(value)]

    def _assigned(self, name: ast.Name) -> list[str]:
        """Texts that the function around assigns to this name."""
        function = self.above(name, (ast.FunctionDef, ast.AsyncFunctionDef))
        values = [
            value
            for node in (ast.walk(function) if function else ())
            if isinstance(node, ast.Assign)
            for target in node.targets
            for one, value in _pairs(target, node.value)
            if isinstance(one, ast.Name) and one.id == name.id
        ]
        if name.id in self.resolving:  # x = f"{x} and more"
            return []
        self.resolving.add(name.id)
        found = [text for value in values if isinstance(value, TEXT) for text in self.texts(value)]
        self.resolving.discard(name.id)
        return found


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _hole(node: ast.AST) -> str:
    """A name in braces for a part that varies."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"{{{name.strip('_')}}}"
        case ast.Subscript(slice=ast.Constant(value=str(name))) | ast.Starred(value=ast.Name(id=name)):
            return f"{{{name}}}"
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(place))):
            return f"{{{name}[{place}]}}"
        case ast.Call(func=ast.Name(id=name)) if name.endswith("_of"):
            return f"{{{name.removesuffix('_of').strip('_')}}}"
        case ast.List(elts=[*_, ast.Starred() as inside, _]) | ast.List(elts=[ast.Starred() as inside, *_]):
            return _hole(inside)
        case ast.Call(func=ast.Attribute(attr="join"), args=[inside]):
            return _hole(inside)
        case ast.GeneratorExp(generators=[ast.comprehension(iter=inside)]):
            return _hole(inside)
        case ast.Call(args=[inside, *_]) | ast.Call(func=ast.Attribute(value=inside)):
            return _hole(inside)
        case (
            ast.Call(func=inside)
            | ast.Subscript(value=inside)
            | ast.Await(value=inside)
            | ast.Starred(value=inside)
        ):
            return _hole(inside)
        case ast.UnaryOp(operand=inside) | ast.BinOp(left=inside) | ast.BoolOp(values=[inside, *_]):
            return _hole(inside)
        case ast.IfExp(body=inside):
            return _hole(inside)
        case _:
            return "{…}"


@cache
def messages() -> list[Message]:
    """Every message of every code, sorted by code."""
    constants = dict[str, dict[str, ast.expr]]()
    modules = [Module(file, constants) for file in sorted((ROOT / "src" / "atoll").rglob("*.py"))]
    found = [message for module in modules for site in _sites(module) for message in _messages(module, *site)]
    return sorted(set(found), key=lambda one: (one.code, one.place, one.text))


Site = tuple[list[str], str, dict[str, ast.expr | None]]


def _sites(module: Module) -> Iterator[Site]:
    """Codes, name of the class or table, and values by field name of every site."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            yield from _call(module, node)
        elif isinstance(node, ast.Dict) and (name := _table_name(module, node)) in POSITIONAL:
            for key, value in zip(node.keys, node.values, strict=True):
                row = [key, *value.elts] if isinstance(value, ast.Tuple) else []
                while row and not _codes(module, row[0]):
                    row.pop(0)  # the key of a table whose rows begin with the code
                if row:
                    yield _codes(module, row[0]), "", dict(zip(POSITIONAL[name], row[1:], strict=False))


def _call(module: Module, node: ast.Call) -> Iterator[Site]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    values = {one.arg: one.value for one in node.keywords if one.arg}
    if name in ("arguments", "checked_options"):
        what, code = node.args
        values = {"what": ast.parse('f"{api}({argument}={value})"', mode="eval").body}
        values["cause"] = ast.parse('f"{argument} must be {kind}"', mode="eval").body
        values["fix"] = ast.parse('f"help({api})"', mode="eval").body
        if isinstance(what, ast.Constant):
            values = {key: _filled(value, str(what.value)) for key, value in values.items()}
            yield _codes(module, code), "UsageError", values
    elif name == "TrainerCommandError" and node.args and isinstance(node.args[0], ast.Constant):
        code = f"E-TRN-{TRAINER[node.args[0].value]:02d}"
        yield [code], "RunFailedError", values | {"what": node.args[1]}
    elif name == "AuthorityRight":
        what = module.constants["ONLY_AUTHORITY"]
        yield _codes(module, node.args[0]), "RefusedError", {"what": what, "fix": node.args[2]}
    elif codes := _codes(module, values.get("code") or (node.args[0] if node.args else None)):
        fields = zip(POSITIONAL.get(name, ("what",)), node.args[1:], strict=False)
        if name == "super" or (
            name == "__init__" and isinstance(owner := module.above(node, ast.ClassDef), ast.ClassDef)
        ):
            name = getattr(owner.bases[0], "id", name)
        if "what" in (values := values | dict(fields)):
            yield codes, name, values


def _filled(value: ast.expr, api: str) -> ast.expr:
    text = ast.unparse(value).replace("{api}", api)
    return ast.parse(text, mode="eval").body


def _table_name(module: Module, node: ast.Dict) -> str:
    parent = module.parents[node]
    target = parent.targets[0] if isinstance(parent, ast.Assign) else getattr(parent, "target", None)
    return getattr(target, "id", "")


def _codes(module: Module, node: ast.expr | None) -> list[str]:
    return [text for text in module.texts(node) if CODE.fullmatch(text)]


def _messages(module: Module, codes: list[str], name: str, values: dict[str, ast.expr | None]) -> Iterator[Message]:
    values.setdefault("what", ast.Name("what"))
    parts = [[_one_line(text) for text in module.texts(values.get(key))] for key in ("what", "cause", "fix")]
    for code, what, cause, fix in itertools.product(codes, *parts):
        yield Message(code, name if name in STATUSES else "", what, cause, fix, module.place)


def _one_line(text: str) -> str:
    return re.sub(r"\{0\.", "{", " ".join(text.split()))  # {0.round}: a template of a table


def page_text() -> str:
    """The page for the errors of this version: one section for each area, one heading for each code."""
    areas = defaultdict[str, dict[str, list[Message]]](lambda: defaultdict(list))
    for message in messages():
        areas[CODE.fullmatch(message.code)[1]][message.code].append(message)
    parts = [HEAD]
    for area, codes in areas.items():
        parts.append(f"\n## {area}: {AREAS[area]}\n")
        for code, found in codes.items():
            kinds = " or ".join(f"`{kind}`" for kind in dict.fromkeys(one.kind for one in found if one.kind))
            places = ", ".join(f"`{place}`" for place in dict.fromkeys(one.place for one in found))
            text = "\n\n".join(dict.fromkeys(one.text for one in found))
            parts.append(f"\n### {code}\n\n{kinds}{' in ' if kinds else 'In '}{places}.\n\n```text\n{text}\n```\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page_text())
