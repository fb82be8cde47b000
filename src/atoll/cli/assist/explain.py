"""`atoll explain CODE`: reference text of an error code, or of a setting.

The texts of errors are the page docs/reference/errors.md; a wheel carries a copy under `shipped`.
"""

from __future__ import annotations

import difflib
import re
from textwrap import indent, wrap
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.say import AsJson, say, say_json
from atoll.runtime.shipped_files import shipped_folder

PAGE = "docs/reference/errors.md"
STATUSES = {"UsageError": 2, "NetworkError": 3, "RefusedError": 4, "RunFailedError": 5}
_SECTION = re.compile(r"^### (E-[A-Z]+-\d\d)\n\n(.*?)\n\n```text\n(.*?)\n```$", re.M | re.S)
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
        near = difflib.get_close_matches(topic, [*codes, *keys()], 1, 0.6)
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
        status = next((number for kind, number in STATUSES.items() if f"`{kind}`" in raised), 1)
        title = f"{code}: {area}; exit status {status}. Parts in braces vary:"
        found[code] = {"code": code, "area": area, "exit": status, "title": title, "text": messages}
    return found


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
