"""Reference page of facts (docs/reference/events.md), written from their types.

Usage: python tools/event_reference.py
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from msgspec.json import schema_components

import atoll
from atoll.base.machine import Fact, tag_of
from atoll.runtime.event_log import EVENTS_VERSION, LEFT_OUT, SECRET_FACTS

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "events.md"
COMMON = ("type", "round", "trace")
HEAD = f"""# Facts

Schema version: {EVENTS_VERSION}. It grows when a field is changed or removed, and stays when one is added.

A fact is one thing that a peer observed. `facts.jsonl` holds one line of JSON for each: `at` (seconds, by the
peer's clock), `fact` (the name below), `phase`, `round`, `trace` (start of the id of the vertex before the round)
and the fields of the table. `GenesisKnown` and the first line of a rotated file also have the `schema` version.

- Bytes are hexadecimal, and unset fields (`?`) may lack.
- Lines leave out {{left_out}}.
- `RoundClosed` has numbers of its body instead: `trained`, `state`, `loss`, `steps`, `samples`, `attempt`,
  `proposer`, `time_s`.
- Never written: {{secret}}.

This page is generated: `python tools/event_reference.py` writes it anew.

| fact | phase | fields | meaning |
|---|---|---|---|
"""


def page_text() -> str:
    """The page for the facts of this version."""
    for module in walk_packages(atoll.__path__, "atoll."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    kinds = sorted((kind for kind in _subclasses(Fact) if kind.__module__.startswith("atoll.")), key=tag_of)
    refs, parts = schema_components(kinds)
    rows = [_row(kind, parts[ref["$ref"].rpartition("/")[2]]) for kind, ref in zip(kinds, refs, strict=True)]
    left_out = ", ".join(f"`{name}`" for name in sorted(LEFT_OUT))
    secret = ", ".join(f"`{name}`" for name in sorted(map(tag_of, SECRET_FACTS)))
    return HEAD.format(left_out=left_out, secret=secret) + "".join(rows)


def _subclasses(kind: type[Fact]) -> set[type[Fact]]:
    found = set(kind.__subclasses__())
    return found.union(*map(_subclasses, found))


def _row(kind: type[Fact], schema: dict[str, Any]) -> str:
    meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("|", "\\|")
    needed = schema.get("required", ())
    fields = [
        f"`{name}{'' if name in needed else '?'}` {_type_text(part)}"
        for name, part in schema["properties"].items()
        if name not in COMMON
    ]
    return f"| `{tag_of(kind)}` | {kind.phase} | {', '.join(fields)} | {meaning} |\n"


def _type_text(part: dict[str, Any]) -> str:
    if "$ref" in part:
        return part["$ref"].rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(map(_type_text, part["anyOf"]))
    if "enum" in part:
        return " or ".join(f'"{value}"' for value in part["enum"])
    if "contentEncoding" in part:
        return "bytes"
    if part.get("type") == "array":
        if "prefixItems" in part:
            return f"[{', '.join(map(_type_text, part['prefixItems']))}]"
        return f"[{_type_text(part['items'])}, …]" if part.get("items") else "list"
    if part.get("type") == "object":
        return f"map of {_type_text(part.get('additionalProperties') or {})}"
    return part.get("type", "any")


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page_text())
