"""run.toml as one value, and access to its settings by key.

Sections [run] [model] [data] [train] [sync] [consensus] are hashed into genesis and travel with the run; [network]
and [node] stay on this computer. `setting.py` describes a declaration, `validate.py` checks combinations of values.

Invariants:
- A `RunConfig` without arguments is a run that works.
- A setting is declared once, as a field of its section; types and bounds never depend on another key.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast, get_type_hints

import msgspec

from atoll.peer.config.exchange_sections import ConsensusSection, UpdateExchangeSection
from atoll.peer.config.node_sections import KeepSection, NetworkSection, NodeSection
from atoll.peer.config.run_section import RunSection
from atoll.peer.config.setting import ConfigSection, Setting
from atoll.peer.config.training_sections import DataSection, ModelSection, TrainSection
from atoll.policy.presets import PRESETS


class RunConfig(ConfigSection, frozen=True):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    sync: UpdateExchangeSection = UpdateExchangeSection()
    consensus: ConsensusSection = ConsensusSection()
    network: NetworkSection = NetworkSection()
    keep: KeepSection = KeepSection()
    node: NodeSection = NodeSection()


def of_the_run(config: RunConfig) -> RunConfig:
    """The config without the sections of one computer, which may differ at every start."""
    return msgspec.structs.replace(
        config, network=NetworkSection(), keep=KeepSection(coded=config.keep.coded), node=NodeSection()
    )


def sections() -> list[tuple[str, type[ConfigSection]]]:
    """Names and types of the sections, in file order."""
    return [(name, type(getattr(RunConfig(), name))) for name in RunConfig.__struct_fields__]


@cache
def type_hints() -> dict[str, Any]:
    """Annotated types of all keys, in file order."""
    hints = {section: get_type_hints(owner, include_extras=True) for section, owner in sections()}
    return {f"{s}.{name}": hints[s][name] for s, owner in sections() for name in owner.__struct_fields__}


@cache
def declarations() -> dict[str, Setting]:
    """Declarations of all keys, in file order."""
    return {key: hint.__metadata__[-1] for key, hint in type_hints().items()}


def keys() -> list[str]:
    """All keys, in file order."""
    return list(declarations())


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def default_of(key: str) -> Any:
    return value_of(RunConfig(), key)


def usual_of(key: str) -> Any:
    """Value of an omitted key in a run with the default recipe and trust."""
    setting, default = declarations()[key], default_of(key)
    if setting.trust:
        return getattr(PRESETS["private"], setting.trust)
    return default if setting.usual is None else setting.usual


def toml_text(value: object) -> str:
    """A value in TOML syntax."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case tuple():
            return "[" + ", ".join(toml_text(v) for v in cast("tuple[object, ...]", value)) + "]"
        case _:
            return str(value)
