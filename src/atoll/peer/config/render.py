"""Renderers of run.toml: the commented file of `atoll init`, and docs/config.md."""

from __future__ import annotations

from textwrap import wrap

from atoll.peer.config.docs import ABOUT, RECIPE, REPLACED
from atoll.peer.config.sections import ConfigSection, default_of, sections, toml_text
from atoll.policy.compatibility import FEATURES, conflicts_among
from atoll.policy.fault_tolerance import peers_for_one_liar
from atoll.policy.presets import PRESETS, TrustPreset, looked_every

LINE = 92  # characters of a comment line


def commented_toml() -> str:
    """A run.toml with every key at its default, commented out, and its description above it."""
    lines = [
        "# Settings of a run. A line that begins with # shows the default; remove the # to change it.",
        "# Order: defaults, this file, environment (ATOLL_TRAIN__LR=0.002), atoll up --set train.lr=0.003.",
    ]
    for section, owner in sections():
        lines += ["", f"[{section}]  # {_first_line(owner)}"]
        for name in owner.__struct_fields__:
            key = f"{section}.{name}"
            lines += [f"# {text}" for text in wrap(ABOUT[key], LINE, break_on_hyphens=False)]
            lines.append(f"#{name} = {toml_text(RECIPE.get(key, default_of(key)))}")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# run.toml

`atoll init` writes this page as a commented file. Values come from, in this order: defaults, the file, the
environment (`ATOLL_TRAIN__LR=0.002`), and `atoll up --set train.lr=0.003`. An unknown key is an error; so is a
key for a missing feature, unless it has its default. Durations are seconds, or text with a
unit: `250ms`, `30s`, `15min`, `2h`, `7d`. Sections up to [consensus] and keep.coded become part of the run's
genesis: afterwards only the founder's `atoll amend` changes some numbers of them (specs/tuning.md). [network], the
rest of [keep] and [node] belong to one computer and may differ at every start.

A default *in italics* comes from the recipe `diloco` (with `train.recipe = "demo"` it is the demo's) or from
`run.trust = "private"`."""


def reference() -> str:
    """The text of docs/config.md: every key with its default, its unit and reason."""
    lines = [INTRODUCTION]
    for section, owner in sections():
        lines += ["", f"## [{section}]", "", _first_line(owner), "", "| key | default | meaning |", "|---|---|---|"]
        for name in owner.__struct_fields__:
            key = f"{section}.{name}"
            shown = f"*{toml_text(RECIPE[key])}*" if key in RECIPE else f"`{toml_text(default_of(key))}`"
            lines.append(f"| `{name}` | {shown} | {ABOUT[key]} |")
    lines += ["", *_presets()]
    lines += ["", "## Names from elsewhere", "", "| there | here |", "|---|---|"]
    lines += [f"| `{name}` | {here} |" for name, here in REPLACED.items()]
    return "\n".join(lines) + "\n"


def _presets() -> list[str]:
    lines = ["## What run.trust stands for", "", "Where these keys are left out.", ""]
    lines += ["| | " + " | ".join(f'`"{trust}"`' for trust in PRESETS) + " |", "|---|" + "---|" * len(PRESETS)]
    rows = {
        "votes that agree": [preset.quorum for preset in PRESETS.values()],
        "`run.byzantine_tolerance`": [f"{preset.tolerance:g}" for preset in PRESETS.values()],
        "`sync.statistic`": [_statistics(preset) for preset in PRESETS.values()],
        "`run.audit_rate`": [f"{preset.audit_rate:g}" for preset in PRESETS.values()],
        "`run.reputation`": [toml_text(preset.reputation) for preset in PRESETS.values()],
        "`run.vote_after_rounds`": [f"{preset.vote_after_rounds}" for preset in PRESETS.values()],
        "`run.sponsor_rounds`": [f"{preset.sponsor_rounds}" for preset in PRESETS.values()],
        "`run.openings`": [f"{preset.openings:g}" for preset in PRESETS.values()],
        "`run.captured_parts`": [f"{preset.captured:g}" for preset in PRESETS.values()],
        "`run.validate_every`": [_looks(preset) for preset in PRESETS.values()],
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


def _first_line(owner: type[ConfigSection]) -> str:
    return (owner.__doc__ or "").strip().split("\n")[0]
