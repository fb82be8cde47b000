"""The pages are short, plain and true: they name only files, headings, commands and options that exist."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parent / "cli")])
from test_fix_texts import problems

from test_tidy import BANNED

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "atoll"
PLACES = ("*.md", "docs/**/*.md", "specs/*.md", "bench/*.md")
PAGES = sorted({str(page.relative_to(ROOT)) for place in PLACES for page in ROOT.glob(place)})
PAGES = [page for page in PAGES if not page.startswith("docs/_build/")]
WRITTEN = [page for page in PAGES if not page.startswith("docs/reference/")]  # by hand
CURRENT = [page for page in PAGES if not page.startswith(("CHANGELOG.md", "docs/lab/"))]  # not of earlier versions
SPECS = [page for page in PAGES if page.startswith("specs/") and page != "specs/README.md"]

WORDS = {  # most words of one page; the first pattern that fits decides
    "README.md": 900,
    "ARCHITECTURE.md": 2500,
    "GLOSSARY.md": 1600,
    "CHANGELOG.md": 3000,
    "SECURITY.md": 900,
    "bench/RESULTS.md": 1500,
    "docs/status.md": 1800,
    "docs/adr/": 300,
    "docs/lab/": 4000,
    "docs/": 900,
}
WORDS_IN_ALL = {"": 60_000, "specs/": 24_000, "docs/how-to/": 8000, "docs/lab/": 8000, "docs/stories/": 2500}
LONG_SENTENCE = 28  # words that nine of ten sentences of a page do not exceed
ADRS = 12

ROOMS = {file.parent.name for file in SOURCES.glob("*/__init__.py")}
FOLDERS = ROOMS | {"src", "tests", "tools", "specs", "docs", "bench", "examples"}
FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.M | re.S)
COMMENT = re.compile(r"<!--.*?-->", re.S)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def code_of(page: str) -> list[str]:
    """What stands between backticks, in a line or in a block; continued lines are joined."""
    text = text_of(page)
    blocks = [re.sub(r"\A.*\n|\n.*\Z", "", block[0]) for block in FENCE.finditer(text)]
    spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    return [code.replace("\\\n", " ") for code in blocks + spans]


def prose_of(text: str) -> str:
    """The text without blocks of code, comments and addresses; code in a line is one word."""
    text = COMMENT.sub("", FENCE.sub("", text))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<?\bhttps?://\S+", "", re.sub(r"`[^`\n]+`", "code", text))


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs and list items; headings, tables and headers of specifications are left out."""
    lines = [re.sub(r"^ *(?:[-*+]|\d+\.) +", "\n\n", line) for line in prose_of(text).splitlines()]
    lines = [line for line in lines if not re.match(r" *(?:#|\||> \*\*|---)", line)]
    found = list[str]()
    for part in re.split(r"\n\s*\n", "\n".join(lines)):
        plain = re.sub(r"\b(e\.g|i\.e|et al|vs|cf|No|Fig|Eq|approx)\.", r"\1", re.sub(r"[*_>]+", "", part))
        found += re.split(r"(?<=[.!?:])[\"')\]]*\s+(?=[\"'(\[]?[A-Z0-9c])", " ".join(plain.split()))
    return [one for one in found if re.search(r"\w", one)]


def words_in(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def anchors_of(page: str) -> list[str]:
    """Anchors of the headings, as code hosts and the site make them."""
    seen, found = Counter[str](), list[str]()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def is_there(place: str) -> bool:
    """A file or folder (perhaps with *), a module without its ending, or a name at the top of a module."""
    if any(any(base.glob(place.rstrip("/"))) or (base / f"{place}.py").exists() for base in (ROOT, SOURCES)):
        return True
    module, _, name = place.rpartition(".")
    file = SOURCES / f"{module}.py"
    return file.exists() and bool(re.search(rf"^(def |class )?{name}\b", file.read_text(), re.M))


@pytest.mark.parametrize("page", [page for page in WRITTEN if not page.startswith("specs/")])
def test_a_page_can_be_read_in_one_go(page: str):
    most = next(words for place, words in WORDS.items() if page == place or page.startswith(place))
    words = len(text_of(page).split())
    assert words <= most, f"{words} words"


@pytest.mark.parametrize("folder", WORDS_IN_ALL)
def test_all_pages_can_be_read_in_a_day(folder: str):
    """Generated pages do not count: they are looked up, not read."""
    sizes = Counter({page: len(text_of(page).split()) for page in WRITTEN if page.startswith(folder)})
    words = sizes.total()
    assert words <= WORDS_IN_ALL[folder], sizes.most_common(10)


@pytest.mark.parametrize("pattern", BANNED)
def test_pages_name_roles(pattern: str):
    """The same words as in docstrings and comments are avoided, at the same rate."""
    texts = {page: prose_of(text_of(page)) for page in WRITTEN}
    flags = 0 if "|my|" in pattern else re.I
    found = Counter({page: len(re.findall(pattern, text, flags)) for page, text in texts.items()})
    words = sum(len(text.split()) for text in texts.values())
    assert found.total() * 1000 <= BANNED[pattern] * words, found.most_common(10)


@pytest.mark.parametrize("page", WRITTEN)
def test_sentences_are_short(page: str):
    lengths = sorted((words_in(one), one) for one in sentences(text_of(page)))
    longest = lengths[int(0.9 * len(lengths)) :]
    is_fine = not longest or longest[0][0] <= LONG_SENTENCE
    assert is_fine, longest


def test_sentences_end_where_a_reader_ends_them():
    text = "# A title\n\nOne, see `a.b c`. Two (Yin et al. 2018) is [a link](x.md). 3 MB\nare three.\n\n- four"
    assert sentences(text + "\n\n| a | table |\n```\ncode. Code.\n```\n") == [
        "One, see code.",
        "Two (Yin et al 2018) is a link.",
        "3 MB are three.",
        "four",
    ]


@pytest.mark.parametrize("page", CURRENT)
def test_every_place_that_a_page_names_exists(page: str):
    """Whatever begins like one of our folders; a place that was moved is found by this test."""
    words = {word for code in code_of(page) for word in re.findall(r"(?<![\w./-])[\w.*-]+/[\w./*-]*", code)}
    places = {word.rstrip(".") for word in words if word.split("/")[0] in FOLDERS}
    assert {place for place in places if not is_there(place)} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_a_heading(page: str):
    broken = list[str]()
    for link, anchor in LINK.findall(re.sub(r"`[^`\n]+`", "", FENCE.sub("", text_of(page)))):
        file = (ROOT / page).parent.joinpath(link).resolve() if link else ROOT / page
        if not file.exists():
            broken.append(link)
        elif anchor and anchor not in anchors_of(str(file.relative_to(ROOT))):
            broken.append(f"{link}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("page", CURRENT)
def test_every_command_that_a_page_names_exists_with_its_options(page: str):
    """In code: `atoll VERB --option`, `make TARGET`, `python bench/NAME.py --option`."""
    lines = [re.sub(r"\s#.*", "", line) for code in code_of(page) for line in code.splitlines()]
    commands = [line for line in lines if re.match(r"(?:\$ )?(?:\w+=\S+ )*(?:atoll|make|python) ", line.strip())]
    targets = re.findall(r"^(\w+):", text_of("Makefile"), re.M)
    unknown = list[str]()
    for command in re.split(r" && | \| |; ", "; ".join(commands)):
        command = re.sub(r"^(?:\$ )?(?:\w+=\S+ )*", "", command.strip())
        unknown += problems(command) if command.startswith("atoll ") else []
        if target := re.match(r"make (\w+)", command):
            unknown += [command] * (target[1] not in targets)
        if bench := re.match(r"python bench/(\w+\.py)(.*)", command):
            known = text_of("bench/form.py") + text_of(f"bench/{bench[1]}")
            options = [word for word in re.findall(r"--[\w-]+", bench[2]) if f'"{word}"' not in known]
            unknown += problems(f"atoll {bench[2].split()[0]} {' '.join(options)}") if options else []
    assert unknown == []


def test_the_code_map_has_every_room_and_no_other():
    section = text_of("ARCHITECTURE.md").split("## Code map")[1].split("\n## ")[0]
    rows = set(re.findall(r"^\| `([\w/]+)/` \|", section, re.M))
    conversations = {f"protocol/{file.parent.name}" for file in SOURCES.glob("protocol/*/__init__.py")}
    missing = (ROOMS - {"protocol"} | conversations) - rows
    assert not missing and all((SOURCES / row).is_dir() for row in rows)


@pytest.mark.parametrize("page", SPECS)
def test_a_specification_begins_with_its_status_messages_and_code(page: str):
    form = r"# .+\n+> \*\*Status\*\*: .+  \n> \*\*Messages\*\*: .+  \n> \*\*Code\*\*: (.*`.+`.*)\n"
    header = re.match(form, text_of(page))
    assert header, f"after the title: {form}"
    assert [place for place in re.findall(r"`([\w./*-]+)`", header[1]) if not is_there(place)] == []


def test_decisions_are_few():
    """A decision that is no longer in force leaves: its successor says why."""
    assert len([page for page in PAGES if page.startswith("docs/adr/") and page[9].isdigit()]) <= ADRS
