"""What `make setup` installs is named exactly, by hash, and nothing is installed that no code uses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("constraints.txt", "constraints-torch.txt", "constraints-cuda.txt")


def plain(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")


def locked(file: str) -> dict[str, list[str]]:
    """The hashes of every package that this file names."""
    text = re.sub(r"^#.*\n", "", (ROOT / file).read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    assert [line for line in lines if not re.match(r"[\w.-]+==\S+ ", line)] == []
    return {plain(line): re.findall(r"--hash=sha256:([0-9a-f]{64})\b", line) for line in lines}


def test_every_locked_package_has_hashes():
    for file in LOCKS:
        assert {name for name, hashes in locked(file).items() if not hashes} == set()


def test_whatever_the_project_asks_for_is_locked_its_build_backend_too():
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"]]
    wanted += [*PROJECT["dependency-groups"]["docs"], *PROJECT["build-system"]["requires"]]
    names = {name for file in LOCKS for name in locked(file)}
    assert {plain(one) for one in wanted} - names == set()
    assert all("==" in one for one in PROJECT["build-system"]["requires"])


def test_the_set_up_takes_nothing_that_has_no_hash():
    """Of the commands that install, only the one for this very project has no lock behind it."""
    installs = [line for line in (ROOT / "Makefile").read_text().splitlines() if "pip install" in line]
    assert len(installs) == 2 and all("--no-deps" in line for line in installs)
    assert "--require-hashes" in installs[0] and installs[1].endswith("--no-build-isolation -e .")


def test_every_dependency_is_imported():
    code = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    names = {plain(one) for one in PROJECT["project"]["dependencies"]}
    assert {n for n in names if not re.search(rf"^\s*(?:import|from) {n}\b", code, re.M)} == set()
