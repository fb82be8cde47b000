"""Declaration of one setting: what a key of run.toml is, beside the type, bounds and default of its field.

    lr: Annotated[Positive | None, Setting("Peak learning rate.", recipe="inner.lr", usual=4e-3)] = None

The configuration page, the commented file, errors, genesis and `atoll amend` derive from these declarations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from atoll.base.limits import WINDOW_MOST_S


class AmendRule(NamedTuple):
    """How `atoll amend` changes a setting: the number of the run that holds it."""

    number: str  # field of ChangeableSettings
    words: str  # text for people
    factor: float = 1.0  # number / setting
    fragments: int = 0  # 1: number = setting x fragments, -1: setting / fragments


@dataclass(frozen=True)
class Setting:
    about: str  # meaning, reason for the default, related keys; its first sentence stands alone
    unit: str = ""
    level: Literal["first", "main", "expert"] = "main"  # first: what most people change
    usual: Any = None  # value of an omitted key with the default recipe and trust, if the field's default is None
    recipe: str = ""  # place of the value in a Recipe, such as inner.lr
    passed: Literal["", "builder", "optimizer"] = ""  # what the recipe takes it with, by the name of the key
    trust: str = ""  # field of TrustPreset with the value of an omitted key
    genesis: str = ""  # place of the value in RunSettings; copied unchanged if the key has a default of its own
    amend: AmendRule | None = None  # None: stays as genesis has it
    fixed: str = ""  # reason why it stays, if it is not the one of its section


DURATION = {"unit": "duration"}
DURATION_LEAST_S = 0.1  # smallest duration in a config; genesis allows slightly less
Duration = Annotated[float, Meta(ge=DURATION_LEAST_S, le=WINDOW_MOST_S, extra=DURATION)]  # seconds, "30 s" or "2h"
OffOrDuration = Annotated[float, Meta(ge=0, le=WINDOW_MOST_S, extra=DURATION)]
Text = Annotated[str, Meta(max_length=64)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]


class ConfigSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    fixed: ClassVar[str] = "it belongs to this computer: write it in run.toml, then run atoll stop and atoll up"
