"""Gives every message, statement, fact and trainer command the name of its class as its tag. Run it once.

Afterwards freeze the golden bytes again (ATOLL_GOLDEN=write pytest tests/wire/test_codec.py), then fix the tests:
sizes of statements grow by some bytes, and digests of simulated runs change.
"""

import re
import subprocess
from pathlib import Path

KEPT_GOLDEN = ("pairs-roll", "pairs-row", "Opening", "UnreadableRow")
KINDS = {"Fact": "fact", "Statement": "statement"}
CLASS = re.compile(r'^class (\w+)\(((?:\w+)(?:\.\w+)?)([^)]*?)tag="(\w+)"', re.M | re.S)


def listed(*below: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", *below], capture_output=True, text=True, check=True)
    return [Path(line) for line in found.stdout.split()]


def main() -> None:
    tags: dict[str, dict[str, str]] = {"fact": {}, "statement": {}, "other": {}}

    def retagged(hit: re.Match[str]) -> str:
        name, base, old = hit[1], hit[2], hit[4]
        if not old[0].isupper() or old == name:  # lower case: names of recipes, which people type
            return hit[0]
        tags[KINDS.get(base, "other")][old] = name
        return hit[0].replace(f'tag="{old}"', f'tag="{name}"')

    for path in listed("src"):
        if path.suffix == ".py":
            path.write_text(CLASS.sub(retagged, path.read_text()))
    facts, statements = tags["fact"], tags["statement"]
    reads_facts = re.compile(r'\bcase "|"fact"|\bfact\b|until_fact|a_trainer_dies\(|until\(|wait\(')
    for path in listed("src", "tests", "bench", "examples"):
        if path.suffix != ".py":
            continue
        lines = [
            re.sub(r'"(\w+)"', lambda m: f'"{facts.get(m[1], m[1])}"', line)
            if reads_facts.search(line) or path.name == "soak_judge.py"
            else line
            for line in path.read_text().split("\n")
        ]
        text = "\n".join(lines)
        pooled = r'((?:said_by|of_kind)\([^"\n]*?|pool\.pool\[)"(\w+)"'
        text = re.sub(pooled, lambda m: f'{m[1]}"{statements.get(m[2], m[2])}"', text)
        path.write_text(re.sub(r'b"(Placed|Amend|Validated)"', lambda m: f'b"{statements.get(m[1], m[1])}"', text))
    for golden in Path("tests/wire/golden").glob("*.hex"):
        if golden.stem not in KEPT_GOLDEN:
            golden.unlink()


main()
