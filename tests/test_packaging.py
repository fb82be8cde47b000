"""What a user without the repository gets: dependencies, advice that works, examples and pages beside the code."""

from __future__ import annotations

import ast
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parent / "cli")])
from test_fix_texts import texts

from atoll.cli.main import main
from atoll.runtime.shipped_files import examples, pages
from test_lock import plain
from test_pages import CURRENT, code_of

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
EXTRAS = PROJECT["project"]["optional-dependencies"]


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    return int(ended.value.code or 0), *capsys.readouterr()


def test_dependencies_and_extras_have_lower_bounds_only():
    """An upper bound or an exact version would fight with what else is in a user's environment."""
    wanted = [*PROJECT["project"]["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    assert [one for one in wanted if not re.fullmatch(r"[\w-]+>=[\d.]+(; .+)?", one)] == []


def test_what_a_text_says_to_install_is_a_dependency_and_never_atoll_itself():
    """The name is not on the package index: `pip install atoll` would run a stranger's code."""
    known = {plain(one) for extra in [PROJECT["project"]["dependencies"], *EXTRAS.values()] for one in extra}
    said = [*texts(), *((page, code) for page in CURRENT for code in code_of(page))]
    install = re.compile(r"(?:pip|pipx|uv tool|uv pip) install (?:-\S+ (?::all: )?)*['\"]?([\w.-]+)")
    named = {(place, plain(word)) for place, text in said for word in install.findall(text) if word != "."}
    assert {name for _, name in named} >= {"matplotlib", "pyarrow", "tokenizers", "pillow", "pyeclib", "torch"}
    assert {(place, name) for place, name in named if name not in known} == set()


def test_the_header_of_an_example_says_how_to_install_what_it_imports():
    """What Atoll itself depends on is there; the rest is named with `pip install`, an extra as such."""
    own = {plain(one).replace("-", "_") for one in PROJECT["project"]["dependencies"]} | {"atoll"}
    come_along = {"tokenizers": "transformers"}  # as dependencies of these
    wanted = set[str]()
    for name, file in examples().items():
        tree = ast.parse(file.read_text())
        nodes = [*ast.walk(tree)]
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
        roots = {one.partition(".")[0] for one in found} - own - sys.stdlib_module_names
        header = ast.get_docstring(tree) or ""
        said = {
            word.replace("-", "_") for line in re.findall(r"`pip install ([^`]+)`", header) for word in line.split()
        }
        assert {come_along.get(root, root) for root in roots} <= said, name
        assert set(re.findall(r"\(extra `(\w+)`\)", header)) <= set(EXTRAS), name
        wanted |= said
    assert {"transformers", "accelerate", "pytorch_lightning", "peft"} <= wanted


def test_a_wheel_has_all_pages_and_examples_in_the_same_places():
    """One source: the build copies them, the repository does not."""
    assert all((ROOT / place).exists() and SHIPPED[place] == f"atoll/shipped/{place}" for place in SHIPPED)
    wanted = [*pages(), *(f"examples/{file.name}" for file in examples().values())]
    assert len(wanted) > 80 and [one for one in wanted if not any(one.startswith(place) for place in SHIPPED)] == []


def test_every_page_that_a_text_sends_to_is_there(capsys: pytest.CaptureFixture[str]):
    """`atoll docs PAGE` of error texts, settings and pages."""
    said = [text for _, text in texts()] + [code for page in CURRENT for code in code_of(page)]
    named = {word.rstrip(".,:") for text in said for word in re.findall(r"atoll docs ([a-z][\w./-]*)", text)}
    named -= {"names"}
    assert {"specs/codecs.md", "config"} <= named
    for page in named:
        assert run("docs", page, capsys=capsys)[0] == 0, page


def test_pages_are_found_by_their_names(capsys: pytest.CaptureFixture[str]):
    status, text, _ = run("docs", "raft", capsys=capsys)
    assert (status, text) == (0, (ROOT / "specs" / "raft.md").read_text())
    assert json.loads(run("docs", "--json", capsys=capsys)[1])["pages"] == pages()
    status, _, error = run("docs", "trust", capsys=capsys)
    assert status == 2 and "docs/explanation/trust.md, specs/trust.md" in error
    status, _, error = run("docs", "specs/rond.md", capsys=capsys)
    assert status == 2 and "try: atoll docs specs/round.md" in error


def test_init_writes_every_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It compiles, and the commands in it name the file that was written, not the repository's folder."""
    monkeypatch.chdir(tmp_path)
    listed = run("init", "--example", "list", capsys=capsys)[1]
    said = "\n".join([text for _, text in texts()] + [code for page in CURRENT for code in code_of(page)])
    assert {"mnist", "list"} <= {*re.findall(r"--example ([a-z]\w+)", said)} <= {"list", *examples()}
    for name in examples():
        assert f"{name} " in listed
        assert run("init", "--example", name, capsys=capsys)[0] == 0
        text = (tmp_path / f"{name}.py").read_text()
        assert compile(text, name, "exec") and "examples/" not in text
    status, _, error = run("init", "--example", "mnist", capsys=capsys)
    assert status == 2 and "try: atoll init mnist.py --example mnist --force" in error
    status, _, error = run("init", "--example", "mnits", capsys=capsys)
    assert status == 2 and "E-ARG-19" in error and "mnist" in error
