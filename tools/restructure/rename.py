"""Applies renames.toml: renames classes in source, tests, benches and examples, wherever an import leads to them.

Works before and after the move. Idempotent. Needs libcst (not a dependency of Atoll).

Usage: python tools/restructure/rename.py [PREFIX ...]   only classes of modules (today's names) with these prefixes
"""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider

HERE = Path(__file__).parent
RUFF = str(Path(sys.executable).with_name("ruff"))
MOVES: dict[str, str] = json.loads((HERE / "moves.json").read_text())
TABLE: dict[str, dict[str, str]] = tomllib.loads((HERE / "renames.toml").read_text())
PREFIXES = tuple(sys.argv[1:])


def dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {dotted(o): dotted(n) for o, n in MOVES.items() if o.startswith("src/") and o.endswith(".py")}


def places_of(module: str) -> list[str]:
    old = "atoll." + module
    return [old, MODULES[old]] if old in MODULES else [old]


# qualified name -> (old, new); a package that re-exports a class gives it another qualified name
CLASSES: dict[str, tuple[str, str]] = {
    f"{place}.{old}": (old, new)
    for module, names in TABLE.items()
    if not PREFIXES or module.startswith(PREFIXES)
    for old, new in names.items()
    for place in places_of(module)
}
assert len({new for _, new in CLASSES.values()}) <= len(CLASSES)


def files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout.split()
    return [f for f in listed if not f.startswith("tools/")]


def reexports() -> None:
    """Follows `from module import Class` in the package's own modules, so that importing from there counts, too."""
    import ast

    trees = {}
    for path in files():
        if path.startswith("src/"):
            trees[dotted(path)] = ast.parse(Path(path).read_text())
    grown = True
    while grown:
        grown = False
        for module, tree in trees.items():
            for node in ast.walk(tree):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                for alias in node.names:
                    found = CLASSES.get(f"{node.module}.{alias.name}")
                    here = f"{module}.{alias.asname or alias.name}"
                    if found and not alias.asname and here not in CLASSES:
                        CLASSES[here] = found
                        grown = True


def name_of(node: cst.BaseExpression | None) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{name_of(node.value)}.{node.attr.value}"
    return ""


class Renames(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module  # "" outside the package
        self.in_all = False

    def _new(self, node: cst.CSTNode, old: str) -> str | None:
        for found in self.get_metadata(QualifiedNameProvider, node, set()):
            for name in (found.name, f"{self.module}.{found.name}" if self.module else ""):
                hit = CLASSES.get(name)
                if hit is not None and hit[0] == old:
                    return hit[1]
        return None

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        if isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        module, names = name_of(updated_node.module), []
        for alias in updated_node.names:
            hit = CLASSES.get(f"{module}.{name_of(alias.name)}")
            if hit is not None:
                alias = alias.with_changes(name=cst.Name(hit[1]))
                if alias.asname is not None and name_of(alias.asname.name) == hit[1]:
                    alias = alias.with_changes(asname=None)
            names.append(alias)
        return updated_node.with_changes(names=names)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> cst.ClassDef:
        new = self._new(original_node, original_node.name.value)
        return updated_node.with_changes(name=cst.Name(new)) if new else updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        new = self._new(original_node, original_node.value)
        return updated_node.with_changes(value=new) if new else updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.Attribute:
        new = self._new(original_node, original_node.attr.value)
        return updated_node.with_changes(attr=cst.Name(new)) if new else updated_node

    def visit_Assign(self, node: cst.Assign) -> None:
        self.in_all = any(name_of(t.target) in ("__all__", "_LAZY") for t in node.targets)

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:
        self.in_all = False
        return updated_node

    def leave_SimpleString(self, _: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        text = updated_node.value
        if self.in_all and self.module:
            hit = CLASSES.get(f"{self.module}.{text[1:-1]}")
            return updated_node.with_changes(value=f'"{hit[1]}"') if hit else updated_node
        return updated_node.with_changes(value=_DOTTED.sub(new_dotted, text))

    def leave_FormattedStringText(
        self, original_node: cst.FormattedStringText, updated_node: cst.FormattedStringText
    ) -> cst.FormattedStringText:
        return updated_node.with_changes(value=_DOTTED.sub(new_dotted, updated_node.value))


_DOTTED = re.compile(r"\batoll(?:\.[A-Za-z_]\w*)+")


def new_dotted(match: re.Match[str]) -> str:
    words = match[0].split(".")
    for end in range(len(words), 1, -1):
        hit = CLASSES.get(".".join(words[:end]))
        if hit is not None:
            return ".".join([*words[: end - 1], hit[1], *words[end:]])
    return match[0]


def main() -> None:
    reexports()
    olds = re.compile(r"\b(" + "|".join(sorted({re.escape(o) for o, _ in CLASSES.values()})) + r")\b")
    for path in files():
        source = Path(path).read_text()
        if not olds.search(source):
            continue
        module = dotted(path) if path.startswith("src/") else ""
        new = MetadataWrapper(cst.parse_module(source)).visit(Renames(module)).code
        if new != source:
            Path(path).write_text(new)
    for command in ([RUFF, "check", "--select", "I", "--fix", "-q", "."], [RUFF, "format", "-q", "."]):
        subprocess.run(command, check=False)


main()
