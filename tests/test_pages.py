"""The pages that lead through the code name only files, commands and options that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from atoll.cli.main import app

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "atoll"
PAGES = ["README.md", "SECURITY.md", "ARCHITECTURE.md", "GLOSSARY.md", "bench/RESULTS.md"]
PAGES += [
    str(page.relative_to(ROOT))
    for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md"), *ROOT.glob("specs/*.md")])
]
ROOMS = {file.parent.name for file in SOURCES.glob("*/__init__.py")}
FOLDERS = ROOMS | {"src", "tests", "specs", "docs", "bench", "examples"}


def code_of(page: str) -> list[str]:
    """What stands between backticks, in a line or in a block."""
    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    return blocks + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def is_there(place: str) -> bool:
    """A file or folder (perhaps with *), a module without its ending, or a name at the top of a module."""
    if any(any(base.glob(place.rstrip("/"))) or (base / f"{place}.py").exists() for base in (ROOT, SOURCES)):
        return True
    module, _, name = place.rpartition(".")
    file = SOURCES / f"{module}.py"
    return file.exists() and bool(re.search(rf"^(def |class )?{name}\b", file.read_text(), re.M))


@pytest.mark.parametrize("page", PAGES)
def test_every_place_that_a_page_names_exists(page: str):
    """Whatever begins like one of our folders, and every link; a place that was moved is found by this test."""
    words = {word for code in code_of(page) for word in re.findall(r"(?<![\w./-])[\w.*-]+/[\w./*-]*", code)}
    places = {word.rstrip(".") for word in words if word.split("/")[0] in FOLDERS}
    assert {place for place in places if not is_there(place)} == set()
    links = re.findall(r"\]\((?!\w+://)([^)#]+)", (ROOT / page).read_text())
    assert {link for link in links if not (ROOT / page).parent.joinpath(link).exists()} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_heading_that_a_link_leads_to_exists(page: str):
    text = (ROOT / page).read_text()
    for link, anchor in re.findall(r"\]\((?!\w+://)([^)#]*)#([^)]+)\)", text):
        other = (ROOT / page).parent.joinpath(link).read_text() if link else text
        headings = [re.sub(r"[^\w\- ]", "", line.lower()) for line in re.findall(r"^#+ (.+)$", other, re.M)]
        assert anchor in [heading.strip().replace(" ", "-") for heading in headings], (link, anchor)


def test_the_code_map_has_every_room_and_no_other():
    section = (ROOT / "ARCHITECTURE.md").read_text().split("## Code map")[1].split("\n## ")[0]
    rows = set(re.findall(r"^\| `([\w/]+)/` \|", section, re.M))
    conversations = {f"protocol/{file.parent.name}" for file in SOURCES.glob("protocol/*/__init__.py")}
    missing = (ROOMS - {"protocol"} | conversations) - rows
    assert not missing and all((SOURCES / row).is_dir() for row in rows)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_a_page_names_exists(page: str):
    code = "\n".join(code_of(page))
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
    assert {verb for verb in re.findall(r"(?:^|\$ |&& )atoll ([a-z]+)", code, re.M) if verb not in app} == set()
    assert set(re.findall(r"^make (\w+)", code, re.M)) <= set(targets)


def test_every_option_in_the_commands_of_the_results_is_one_of_its_bench():
    commands = [code.partition("bench/")[2] for code in code_of("bench/RESULTS.md") if "python bench/" in code]
    form = (ROOT / "bench" / "form.py").read_text()
    assert len(commands) > 15
    for command in commands:
        bench, *words = command.split()
        known = form + (ROOT / "bench" / bench).read_text()
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in known] == [], command
