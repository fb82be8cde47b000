"""`atoll explain CODE`: reference text of an error code, or of a setting.

The texts of errors are the page docs/reference/errors.md; a wheel carries a copy under `shipped`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from textwrap import indent, wrap
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.say import AsJson, say, say_json
from atoll.runtime.shipped_files import shipped_folder

PAGE = "docs/reference/errors.md"
STATUSES = {"UsageError": 2, "NetworkError": 3, "RefusedError": 4, "RunFailedError": 5}
_SECTION = re.compile(r"^### (E-[A-Z]+-\d\d)\n\n(.*?)\n\n```text\n(.*?)\n```$", re.M | re.S)
CAUSE = "likely cause: "
ANY_CAUSE = re.compile(rf"\s*{CAUSE}\{{\w+\}}")
WIDTH = 100  # characters of a line


def explain(
    topic: Annotated[str, Parameter(help="An error code such as E-NET-01, or a setting such as train.lr.")],
    /,
    *,
    json: AsJson = False,
) -> None:
    """Explain an error code (its messages, likely causes, what to try) or a setting of run.toml."""
    from atoll.peer.config.sections import keys

    codes = _codes()
    if (code := topic.upper()) in codes:
        found = codes[code]
    elif topic in keys():
        found = _setting(topic)
    else:
        near = [key for key in keys() if key.partition(".")[2] == topic]
        near = near or difflib.get_close_matches(topic, [*codes, *keys()], 1, 0.6)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(
            "E-ARG-16",
            f"{topic!r} is neither an error code nor a setting{guess}",
            fix="atoll explain E-NET-01, or atoll explain train.lr; atoll config --all lists the settings",
        )
    if json:
        return say_json(found)
    say(found["title"])
    say(indent(found["text"], "  "))


def _codes() -> dict[str, dict[str, Any]]:
    """Reference of every error code: title, exit status and messages."""
    page = shipped_folder() / PAGE
    if not page.exists():
        return {}
    text = page.read_text("utf-8")
    areas = dict(re.findall(r"^## ([A-Z]+): (.*)$", text, re.M))
    found = dict[str, dict[str, Any]]()
    for code, raised, messages in _SECTION.findall(text):
        area = areas[code.split("-")[1]]
        status = next((number for kind, number in STATUSES.items() if f"`{kind}`" in raised), None)
        ends = f"; exit status {status}" if status is not None else ""
        title = f"{code}: {area}{ends}. Parts in braces vary:"
        text = "\n\n".join(_merged(messages.split("\n\n")))
        found[code] = {"code": code, "area": area, "exit": status, "title": title, "text": text}
    return found


def _merged(messages: Sequence[str]) -> list[str]:
    """Messages that say what to try in the same words, and begin alike, as one with all their causes."""
    merged = dict[tuple[str, str], tuple[str, list[str]]]()  # beginning and `try` → longest message, causes
    for message in messages:
        what, *rest = message.splitlines()
        causes = [line for line in rest if CAUSE in line]
        advice = "\n".join(line for line in rest if line not in causes)
        begins = next((b for b, a in merged if a == advice and (what.startswith(b) or b.startswith(what))), what)
        longest, known = merged.pop((begins, advice), (what, []))
        known += [cause for cause in causes if cause not in known]
        merged[min(begins, what, key=len), advice] = max(longest, what, key=len), known
    return [
        "\n".join(filter(None, [what, *_told(causes), advice])) for (_, advice), (what, causes) in merged.items()
    ]


def _told(causes: list[str]) -> list[str]:
    """The causes without those that only a part in braces names, if there are others."""
    return [cause for cause in causes if not ANY_CAUSE.fullmatch(cause)] or causes


def _setting(key: str) -> dict[str, Any]:
    """Reference of a setting: values, default, meaning, and whether it may change in a running run."""
    from atoll.peer.config.render import unit_of, values_text
    from atoll.peer.config.sections import declarations, toml_text, usual_of

    setting = declarations()[key]
    usual, unit = toml_text(usual_of(key)), f" {unit_of(key)}" if unit_of(key) else ""
    values = values_text(key).replace("`", "")
    text = "\n".join(wrap(setting.about, WIDTH, break_on_hyphens=False))
    amend = f"\nA running run changes it by: atoll amend {key}=VALUE" if setting.amend else ""
    title = f"{key}: {values}; default {usual}{unit}"
    return {
        "key": key,
        "values": values,
        "default": usual,
        "unit": unit.strip(),
        "title": title,
        "text": text + amend,
    }
