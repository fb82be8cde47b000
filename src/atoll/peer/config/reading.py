"""Decoder of run.toml: from the tree that tomllib returns to a `RunConfig`.

Invariants:
- An unknown key is an error that names the nearest known one, or the equivalent of another system's name.
- An error about a value uses plain words, not type names.
Not responsible for: reading files and environment (`runtime/config.py`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from math import isfinite
from typing import Any, cast, get_args

import msgspec
from msgspec import Meta

from atoll.base.errors import UsageError
from atoll.base.units import parse_duration_s
from atoll.peer.config.other_keys import OTHER_KEYS
from atoll.peer.config.sections import RunConfig, declarations, keys, toml_text, type_hints, value_of
from atoll.peer.config.setting import DURATION
from atoll.peer.config.validate import demand_sense

IN_WORDS = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false", "array": "a list"}
ALL_KEYS = "atoll config --all prints every key"


def decode_config(tree: Mapping[str, Any]) -> RunConfig:
    """The config of this tree (as tomllib reads it). UsageError that names the key and what to write instead."""
    config = decode_values(tree)
    demand_sense(config)
    return config


def decode_values(tree: Mapping[str, Any]) -> RunConfig:
    """The same without checks of combinations."""
    for path in paths_in(tree):
        _check_known(path)
    try:
        config = msgspec.convert(_in_seconds(tree), RunConfig)
    except msgspec.ValidationError as why:
        text, _, at = str(why).partition(" - at `$.")
        key = at.rstrip("`").split("[")[0]
        for theirs, ours in IN_WORDS.items():
            text = text.replace(f"`{theirs}`", ours).replace(f"`{theirs} | null`", ours)
        if given := _given(tree, key):
            text = text.partition(", got ")[0]  # the value says more than its type
        told = f"{key or 'the config'}: {text[0].lower()}{text[1:]}{given}{_nearest(tree, key)}"
        raise UsageError("E-CFG-02", told, fix=_mend(key)) from None
    for key in keys():
        value = value_of(config, key)
        if isinstance(value, float) and not isfinite(value):
            raise UsageError("E-CFG-02", f"{key}: expected a finite number", fix=_mend(key))
    return config


def paths_in(tree: Mapping[str, Any]) -> Iterator[str]:
    """Dotted paths of all values."""
    for section, value in tree.items():
        table = _as_table(value)
        yield from [section] if table is None else (f"{section}.{name}" for name in table)


def choices_of(key: str) -> list[str | int]:
    """Values of a key that takes one of several; empty for other keys."""
    base = get_args(type_hints()[key])[0]
    return [word for choice in (base, *get_args(base)) for word in get_args(choice) if isinstance(word, str | int)]


def _given(tree: Mapping[str, Any], key: str) -> str:
    """The refused value, cut to fit a line; empty if there is none or it is a table."""
    section, _, name = key.partition(".")
    table = _as_table(tree.get(section))
    value = table.get(name) if table is not None else None
    if isinstance(value, bool):
        return f", not {toml_text(value)}"
    return f", not {value!r:.60}" if isinstance(value, str | int | float) else ""


def _nearest(tree: Mapping[str, Any], key: str) -> str:
    """A hint at the nearest allowed value, for a key with several."""
    if key not in keys():
        return ""
    section, _, name = key.partition(".")
    value, words = tree[section][name], [word for word in choices_of(key) if isinstance(word, str)]
    near = difflib.get_close_matches(value, words, 1, 0.6) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _check_known(path: str) -> None:
    known = keys()
    if path in known:
        return
    name = path.rsplit(".", 1)[-1]
    if name.lower() in OTHER_KEYS:
        raise UsageError("E-CFG-03", f"{path} is not a key of Atoll", fix=OTHER_KEYS[name.lower()])
    same = [k for k in known if k.rsplit(".", 1)[-1] == name]
    near = same or _similar(name, [k for k in known if k.partition(".")[0] == path.partition(".")[0]])
    near = near or _similar(name, known)
    guess = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        "E-CFG-01", f"unknown key {path}{guess}", cause="a typo, or a key of another version", fix=ALL_KEYS
    )


def _similar(name: str, known: Collection[str]) -> list[str]:
    """The key whose name after the section is nearest to this one; empty if none is near."""
    names = {k.rsplit(".", 1)[-1]: k for k in known}
    return [names[n] for n in difflib.get_close_matches(name, list(names), 1, 0.6)]


def _in_seconds(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with durations in seconds; they may be text with a unit."""
    out = dict[str, Any]()
    for section, value in tree.items():
        table = _as_table(value)
        out[section] = value if table is None else {k: _seconds(f"{section}.{k}", v) for k, v in table.items()}
    return out


def _seconds(key: str, value: object) -> object:
    if not isinstance(value, str) or not is_duration(key):
        return value
    try:
        return parse_duration_s(value)
    except ValueError as why:
        raise UsageError("E-CFG-02", f"{key}: {why}", fix=_mend(key)) from None


def _mend(key: str) -> str:
    if key not in keys():
        return ALL_KEYS
    choices = ", ".join(map(toml_text, choices_of(key)))
    if choices:
        return f"choose one of {choices}"
    about = declarations()[key].about.partition(". ")[0].rstrip(".")  # a first sentence stands alone
    return f"write another value. {key} is: {about} (all of it: atoll config --all)"


def is_duration(key: str) -> bool:
    return any(isinstance(m, Meta) and m.extra == DURATION for m in type_hints()[key].__metadata__)


def _as_table(value: object) -> Mapping[str, Any] | None:
    """A section of the file, or None for a plain value."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
