"""Applies moves.json: moves files, rewrites imports, then dotted and file paths in strings, comments and pages.

Idempotent: a second call finds nothing to do; an interrupted call continues. Needs libcst, which Atoll does not.

Usage: python tools/restructure/apply.py
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, QualifiedNameProvider, QualifiedNameSource

HERE = Path(__file__).parent
RUFF = str(Path(sys.executable).with_name("ruff"))
MOVES: dict[str, str] = json.loads((HERE / "moves.json").read_text())
# docstrings of packages that did not exist before
PACKAGES: dict[str, str] = json.loads((HERE / "packages.json").read_text())
TEXT = {".py", ".md", ".toml", ".cfg", ".json", ".yml", ".yaml", ".sh", ".mjs", ".txt", ""}


def dotted(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {dotted(o): dotted(n) for o, n in MOVES.items() if o.startswith("src/") and o.endswith(".py")}
assert not set(MODULES) & set(MODULES.values()), "a new module has the name of an old one"


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def move_files() -> None:
    for old, new in MOVES.items():
        if Path(old).exists():
            Path(new).parent.mkdir(parents=True, exist_ok=True)
            git("mv", old, new)
    for package, text in PACKAGES.items():
        init = Path(package) / "__init__.py"
        if not init.exists():
            init.parent.mkdir(parents=True, exist_ok=True)
            init.write_text(f'"""{text}"""\n')
            git("add", str(init))
    for folder in ("src", "tests"):
        for empty in sorted(Path(folder).rglob("*"), reverse=True):
            if empty.is_dir() and not [f for f in empty.rglob("*") if f.is_file() and "__pycache__" not in f.parts]:
                subprocess.run(["rm", "-r", str(empty)], check=True)


def name_of(module: cst.BaseExpression | None) -> str:
    if module is None:
        return ""
    if isinstance(module, cst.Name):
        return module.value
    assert isinstance(module, cst.Attribute)
    return f"{name_of(module.value)}.{module.attr.value}"


def expression(name: str) -> cst.Name | cst.Attribute:
    found = cst.parse_expression(name)
    assert isinstance(found, cst.Name | cst.Attribute)
    return found


class Imports(cst.CSTTransformer):
    """Imports of moved modules, and the names that such an import binds."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider,)

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        new = [MODULES.get(name_of(alias.name), name_of(alias.name)) for alias in updated_node.names]
        names = [
            alias.with_changes(name=expression(name)) for alias, name in zip(updated_node.names, new, strict=True)
        ]
        return updated_node.with_changes(names=names)

    def leave_ImportFrom(
        self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom
    ) -> cst.ImportFrom | cst.FlattenSentinel[cst.BaseSmallStatement]:
        module = name_of(updated_node.module)
        if updated_node.relative or isinstance(updated_node.names, cst.ImportStar):
            return updated_node
        places: dict[str, list[cst.ImportAlias]] = {}
        for alias in updated_node.names:
            name = name_of(alias.name)
            moved = MODULES.get(f"{module}.{name}")
            alias = alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)
            if moved is None:
                places.setdefault(MODULES.get(module, module), []).append(alias)
            else:
                parent, _, new = moved.rpartition(".")
                places.setdefault(parent, []).append(alias.with_changes(name=cst.Name(new)))
        if list(places) == [module] and [name_of(a.name) for a in places[module]] == [
            name_of(a.name) for a in updated_node.names
        ]:
            return updated_node
        lines = [
            updated_node.with_changes(module=expression(parent), names=names) for parent, names in places.items()
        ]
        return lines[0] if len(lines) == 1 else cst.FlattenSentinel(lines)

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.Name:
        for found in self.get_metadata(QualifiedNameProvider, original_node, set()):
            moved = MODULES.get(found.name)
            if found.source is QualifiedNameSource.IMPORT and moved is not None:
                old = found.name.rpartition(".")[2]
                if updated_node.value == old:  # not under another name
                    return updated_node.with_changes(value=moved.rpartition(".")[2])
        return updated_node


def rewrite_imports() -> None:
    for path in git("ls-files", "*.py").split():
        source = Path(path).read_text()
        if path.startswith("tools/") or "atoll" not in source:
            continue
        new = MetadataWrapper(cst.parse_module(source)).visit(Imports()).code
        if new != source:
            Path(path).write_text(new)


_DOTTED = re.compile(r"\batoll(?:\.[A-Za-z_]\w*)+")
_PATH = re.compile(r"(?<![\w./-])((?:src/atoll/|tests/)?)((?:[a-z_0-9]+/)+)([A-Za-z_0-9]+\.[a-z]+)?(?![\w/])")
_STEM = re.compile(
    r"(?<![\w./-])((?:base|host|keys|learn|node|policy|protocol|sim|wire)(?:/[a-z_0-9]+)+)(?![\w/-]|\.py|\.md)"
)
FOLDERS = {
    str(Path(o).parent): str(Path(n).parent)
    for o, n in MOVES.items()
    if o.endswith("__init__.py") or (o.startswith("tests/") and o.count("/") == 2)
}


def new_dotted(match: re.Match[str]) -> str:
    words = match[0].split(".")
    for end in range(len(words), 1, -1):
        moved = MODULES.get(".".join(words[:end]))
        if moved is not None:
            return ".".join([moved, *words[end:]])
    return match[0]


def new_path(match: re.Match[str]) -> str:
    prefix, folder, file = match.groups()
    whole = (prefix or "src/atoll/") + folder + (file or "")
    moved = MOVES.get(whole) if file else FOLDERS.get(whole.rstrip("/"))
    if moved is None and file and not prefix:
        moved = None
    if moved is None:
        return match[0]
    return (moved if prefix else moved.removeprefix("src/atoll/")) + ("" if file else "/")


def new_stem(match: re.Match[str]) -> str:
    """`learn/late` or `learn/late.carried`: a module named without its suffix."""
    whole = "src/atoll/" + match[1]
    moved = MOVES.get(whole + ".py", "").removesuffix(".py") or FOLDERS.get(whole)
    return moved.removeprefix("src/atoll/") if moved else match[0]


def wrap_long_lines() -> None:
    """Breaks comments and docstring lines that became too long; code is the formatter's business."""
    command = [RUFF, "check", "--select", "E501", "--output-format", "concise", "."]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    places = [line.split(":")[:2] for line in found.stdout.splitlines() if ": E501 " in line]
    for path, number in sorted(places, key=lambda place: -int(place[1])):
        file, row = Path(path), int(number) - 1
        lines = file.read_text().splitlines(keepends=True)
        line = lines[row].rstrip("\n")
        body = line.lstrip()
        indent = line[: len(line) - len(body)]
        mark = "# " if body.startswith("# ") else ""
        if not mark and "  # " in line:  # a comment behind code goes above it
            code, _, comment = line.rpartition("  # ")
            lines[row] = f"{indent}# {comment}\n{code}\n"
        elif body.startswith('"""') and body.endswith('"""') and len(line) - 3 <= 116:
            lines[row] = f'{line[:-3].rstrip()}\n{indent}"""\n'
        else:
            at = line.rfind(" ", len(indent) + 10, 116)
            lines[row] = f"{line[:at]}\n{indent}{mark}{line[at + 1 :]}\n"
        file.write_text("".join(lines))


def rewrite_texts() -> None:
    for path in git("ls-files").split():
        file = Path(path)
        if path.startswith("tools/restructure/") or file.suffix not in TEXT or not file.is_file():
            continue
        try:
            text = file.read_text()
        except UnicodeDecodeError:
            continue
        new = _STEM.sub(new_stem, _PATH.sub(new_path, _DOTTED.sub(new_dotted, text)))
        if new != text:
            file.write_text(new)


def main() -> None:
    move_files()
    rewrite_imports()
    rewrite_texts()
    for command in ([RUFF, "check", "--select", "I", "--fix", "-q", "."], [RUFF, "format", "-q", "."]):
        subprocess.run(command, check=False)
    wrap_long_lines()


main()
