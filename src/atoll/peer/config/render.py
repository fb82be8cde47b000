"""Renderers of run.toml: the short and the full commented file, and docs/reference/config.md."""

from __future__ import annotations

import re
from textwrap import wrap
from typing import get_args

from msgspec import Meta

from atoll.base.limits import PEERS_MAX
from atoll.peer.config.other_keys import ANSWERS
from atoll.peer.config.reading import choices_of, is_duration
from atoll.peer.config.recipe_names import RECIPES
from atoll.peer.config.sections import declarations, default_of, sections, toml_text, type_hints, usual_of
from atoll.policy.compatibility import FEATURES, conflicts_among
from atoll.policy.fault_tolerance import peers_for_one_liar
from atoll.policy.presets import PRESETS, TrustPreset, looked_every

LINE = 92  # characters of a comment line
PLAIN = {bool: "`true` or `false`", str: "text", tuple: "list of text"}


def first_toml() -> str:
    """A run.toml with the settings that most people change."""
    lines = [
        "# Settings that most people change; atoll config --all prints all of them with their meaning.",
        "# A line that begins with # shows what the recipe has; remove the # to change it.",
    ]
    for section, _ in sections():
        named = {k: s for k, s in declarations().items() if k.startswith(f"{section}.") and s.level == "first"}
        lines += ["", f"[{section}]"] if named else []
        for key, setting in named.items():
            sign = "#" if default_of(key) in (None, "") else ""
            text = f"{sign}{key.partition('.')[2]} = {toml_text(usual_of(key))}"
            lines.append(f"{text:<45} # {setting.about.split('. ')[0].split('; ')[0].rstrip('.')}")
    del lines[2]  # the empty line before the first section
    return "\n".join(lines) + "\n"


def commented_toml() -> str:
    """A run.toml with every key at its default, commented out, and its description above it."""
    lines = [
        "# Settings of a run. A line that begins with # shows the default; remove the # to change it.",
        "# Order: defaults, this file, environment (ATOLL_TRAIN__LR=0.002), atoll up --set train.lr=0.003.",
        "# Pages named in a text, such as specs/round.md: atoll docs specs/round.md.",
    ]
    for section, owner in sections():
        lines += ["", f"[{section}]  # {owner.__doc__}"]
        for name in owner.__struct_fields__:
            key = f"{section}.{name}"
            setting, unit = declarations()[key], f"  # {unit_of(key)}" if unit_of(key) else ""
            text = setting.about + (" `atoll amend` changes it." if setting.amend else "")
            lines += [f"# {line}" for line in wrap(text, LINE, break_on_hyphens=False)]
            lines.append(f"#{name} = {toml_text(usual_of(key))}{unit}")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# Settings of run.toml

`atoll init` writes a short file. `atoll config --all` prints all settings as a commented file.
`atoll config run.toml` prints the settings in effect.

- Values come from, in this order: defaults, the file, the environment (`ATOLL_TRAIN__LR=0.002`), and
  `atoll up --set train.lr=0.003`. An unknown key is an error.
- A duration is a number of seconds, or text with a unit: `250ms`, `30s`, `15min`, `2h`, `7d`.
- [run], [model], [data], [train], [sync], [consensus] and keep.coded become part of the run's genesis. Afterwards
  only the founder's `atoll amend` changes the settings marked **amend** ([tuning](../../specs/tuning.md)).
- [network], [node] and the rest of [keep] belong to one computer and may differ at every start.
- A default *in italics* depends on other settings, mostly `train.recipe` and `run.trust`. It is the one of `diloco`
  and `private`.

This page is generated from `src/atoll/peer/config/`.
"""
PARTS = {
    "first": "## Settings that most people change",
    "main": "## More settings",
    "expert": "## Expert settings\n\nMost runs never need these. Change one only for the reason in its text.",
}
HEAD = ["| key | default | values | meaning |", "|---|---|---|---|"]


def reference() -> str:
    """The text of docs/reference/config.md: every key with its default, its unit and reason."""
    lines = [INTRODUCTION.rstrip()]
    for level, heading in PARTS.items():
        lines += ["", heading]
        lines += [] if level != "first" else ["", *HEAD]
        for section, owner in sections():
            rows = [
                _row(key) for key, s in declarations().items() if key.startswith(f"{section}.") and s.level == level
            ]
            if rows and level == "main":
                lines += ["", f"### [{section}]", "", owner.__doc__ or "", "", *HEAD]
            elif rows and level == "expert":
                lines += ["", f"### Expert: [{section}]", "", *HEAD]
            lines += rows
    lines += ["", *_presets()]
    lines += ["", "## Recipes", "", "Values of `train.recipe`.", "", "| recipe | method |", "|---|---|"]
    lines += [f"| `{name}` | {_linked(method)} |" for name, method in RECIPES.items()]
    lines += ["", "## Keys of other systems", "", "| there | here |", "|---|---|"]
    lines += [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {_linked(here)} |"
        for here, names in ANSWERS.items()
    ]
    return "\n".join(lines) + "\n"


def _row(key: str) -> str:
    setting, usual = declarations()[key], toml_text(usual_of(key))
    derived = default_of(key) is None or setting.usual is not None
    default = (f"*{usual}*" if derived else f"`{usual}`") + f" {unit_of(key)}".rstrip()
    about = _linked(setting.about) + (" **amend**" if setting.amend else "")
    return f"| `{key}` | {default} | {values_text(key)} | {about} |"


def unit_of(key: str) -> str:
    return "s" if is_duration(key) else declarations()[key].unit


def _linked(text: str) -> str:
    """The text with its keys as code, and its specifications as links from docs/reference."""
    text = text.replace("atoll docs config", "the end of this page")
    known = "|".join(re.escape(key) for key in sorted(declarations(), key=len, reverse=True))
    text = re.sub(rf'(?<![\w.])(?:{known})(?!\w)(?: = (?:"[^"]*"|\[[^]]*\]))?', r"`\g<0>`", text)
    return re.sub(r"specs/(\w+)\.md", r"[\1](../../specs/\1.md)", text)


def values_text(key: str) -> str:
    """Values that a key takes, from its type."""
    if choices := [word for word in choices_of(key) if not isinstance(word, bool)]:
        return ", ".join(f"`{toml_text(word)}`" for word in choices)
    hint = get_args(type_hints()[key])[0]
    nested = [hint, *get_args(hint)]
    metas = [m for one in nested for m in getattr(one, "__metadata__", ()) if isinstance(m, Meta)]
    metas += [m for m in type_hints()[key].__metadata__ if isinstance(m, Meta)]
    low = [f"≥ {m.ge:g}" for m in metas if m.ge is not None] + [f"> {m.gt:g}" for m in metas if m.gt is not None]
    high = [f"{m.le:g}" for m in metas if m.le is not None and m.le <= PEERS_MAX]
    if is_duration(key):
        return "duration"
    if low:
        return f"{low[0].removeprefix('≥ ')} to {high[0]}" if high else low[0]
    return next(text for kind, text in PLAIN.items() if kind in map(_origin, nested))


def _origin(hint: object) -> object:
    return getattr(hint, "__origin__", hint)


def _presets() -> list[str]:
    lines = ["## What run.trust stands for", "", "The values of these settings where they are left out.", ""]
    lines += ["| | " + " | ".join(f'`"{trust}"`' for trust in PRESETS) + " |", "|---|" + "---|" * len(PRESETS)]
    rows = {
        f"`{k}`": [toml_text(getattr(p, s.trust)) for p in PRESETS.values()]
        for k, s in declarations().items()
        if s.trust
    }
    rows |= {
        "`sync.statistic`": [_statistics(preset) for preset in PRESETS.values()],
        "`run.validate_every`": [_looks(preset) for preset in PRESETS.values()],
        "votes that agree": [preset.quorum for preset in PRESETS.values()],
        "owners watch each other": ["yes" if preset.witnessed else "no" for preset in PRESETS.values()],
        "withstands": [preset.withstands for preset in PRESETS.values()],
        "does not withstand": [preset.does_not for preset in PRESETS.values()],
    }
    return lines + [f"| {name} | " + " | ".join(row) + " |" for name, row in rows.items()]


def _statistics(preset: TrustPreset) -> str:
    """Statistics of a preset, with the number of members that each needs."""
    wanted = [f"`{s}` from run.start_peers = {peers_for_one_liar(preset.tolerance, s)}" for s in preset.statistics]
    return ", else ".join(wanted) if wanted else "`mean`"


def _looks(preset: TrustPreset) -> str:
    return f"{preset.looked_steps} steps, {looked_every(preset, 1)} rounds at most" if preset.looked_steps else "0"


def compatibility_table() -> str:
    """Pairs of features that exclude each other, as a Markdown table (docs/status.md)."""
    rows = [f"| {c.needer} | {c.remover} | {c.cause} |" for c in conflicts_among(FEATURES)]
    return "\n".join(["| feature | not with | because |", "|---|---|---|", *rows]) + "\n"
