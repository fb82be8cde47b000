"""Sections of run.toml as values, with types, bounds and defaults.

Sections [run] [model] [data] [train] [sync] [consensus] are hashed into genesis and travel with the run; [network]
and [node] stay on this computer. `docs.py` describes the keys, `validate.py` checks combinations of them.

Invariants:
- A `RunConfig` without arguments is a run that works.
- Types and bounds never depend on another key.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from atoll.base.arguments import Count, Peers, Positive, Share, Whole
from atoll.base.limits import APART_ROUNDS_MAX, FACTOR_MOST, PEERS_MAX, UPDATES_KEPT_MAX, WINDOW_MOST_S
from atoll.base.workload import BATCH_MOST, STEPS_MOST
from atoll.crypto.signer import VoteKind
from atoll.peer.settings import ERA_ROUNDS, EraRounds, TopologyName, VoteRounds
from atoll.policy.capability_terms import VALIDATE_EVERY_MAX
from atoll.policy.fault_tolerance import StatisticName
from atoll.policy.presets import Trust

DURATION = {"unit": "duration"}

DURATION_LEAST_S = 0.1  # smallest duration in a config; genesis allows slightly less
Duration = Annotated[float, Meta(ge=DURATION_LEAST_S, le=WINDOW_MOST_S, extra=DURATION)]  # seconds, "30 s" or "2h"
OffOrDuration = Annotated[float, Meta(ge=0, le=WINDOW_MOST_S, extra=DURATION)]
Text = Annotated[str, Meta(max_length=64)]
Group = Annotated[str, Meta(max_length=32, pattern="^[A-Za-z0-9._-]*$")]  # part of a name, behind an @
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]
Device = Annotated[str, Meta(pattern=r"^(cpu|cuda(:[0-9]{1,2})?)$")]


class ConfigSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class RunSection(ConfigSection, frozen=True):
    """What the run is. Travels with the run."""

    name: Text = "run"
    rounds: Whole | None = None
    start_peers: Peers = 1
    min_peers: Peers | None = None
    trust: Trust = "private"
    byzantine_tolerance: Share | None = None
    open_to_all: bool = False
    public: bool = False
    era_rounds: EraRounds = ERA_ROUNDS
    votes: VoteKind = "ed25519"
    audit_rate: Share | None = None
    score_rate: Share = 0.0
    twin_rate: Share = 0.0
    reputation: bool | None = None
    vote_after_rounds: VoteRounds | None = None
    sponsor_rounds: VoteRounds | None = None
    validate_every: Annotated[int, Meta(ge=0, le=VALIDATE_EVERY_MAX)] | None = None
    validate_margin: Annotated[float, Meta(ge=0.01, le=100)] = 0.25
    openings: Share | None = None
    captured_parts: Share | None = None
    sample: Share = 0.0
    sample_peers: Annotated[int, Meta(ge=0, le=PEERS_MAX)] = 0
    first_train: Duration = 180.0
    train_max: Duration = 3600.0
    suspect: Duration = 6.0
    beat: Duration = 2.0


class ModelSection(ConfigSection, frozen=True):
    """What learns. Travels with the run, by name: code never travels."""

    name: str = ""
    weights: str = ""
    lora_rank: Annotated[int, Meta(ge=0, le=1024)] = 0
    only: tuple[str, ...] = ()


class DataSection(ConfigSection, frozen=True):
    """What it learns from. The founder names it. The others fetch it from members, unless it is "stdlib"."""

    source: str = "stdlib"
    column: Text = "text"
    tokenizer: str = ""
    canary: str = ""


class TrainSection(ConfigSection, frozen=True):
    """How it learns. Travels with the run. What is left out is as the recipe has it."""

    recipe: Text = "diloco"
    inner_steps: Count | None = None
    batch: Count | None = None
    seq_len: Count | None = None
    lr: Positive | None = None
    weight_decay: Share | None = None
    clip_norm: Positive | None = None
    warmup_steps: Whole | None = None
    outer_lr: Positive | None = None
    outer_momentum: Share | None = None
    seed: Whole | None = None
    precision: Literal["fp32", "bf16"] = "fp32"
    compile: bool = False
    round_time: OffOrDuration = 0.0
    total_tokens: Bytes = 0
    target_samples: Annotated[int, Meta(ge=0, lt=2**40)] = 0
    adaptive_steps: bool = False
    steps_by_speed: bool = False
    inner_steps_min: Annotated[int, Meta(ge=1, le=STEPS_MOST)] = 1
    adaptive_batching: bool = False
    target_loss: Annotated[float, Meta(ge=0, le=FACTOR_MOST)] = 0.0
    batch_min: Annotated[int, Meta(ge=1, le=BATCH_MOST)] = 1
    batch_max: Annotated[int, Meta(ge=1, le=BATCH_MOST)] = 64


class SyncSection(ConfigSection, frozen=True):
    """How updates travel. Travels with the run."""

    up: str | None = None
    down: str | None = None
    error_feedback: Share | None = None
    overlap: Whole | None = None
    fragments: Count | None = None
    phases: str = ""
    pipeline_depth: Count = 3
    compression_ratio: Share = 0.1
    compression_level: Literal[3, 5, 9] = 3
    topology: TopologyName = "auto"
    statistic: StatisticName | None = None
    quorum: Annotated[int, Meta(ge=0, le=PEERS_MAX)] | None = None
    grace: Whole | None = None
    apart: Literal["wait", "merge", "drop"] = "wait"
    apart_rounds: Annotated[int, Meta(ge=1, le=APART_ROUNDS_MAX)] = 10


class ConsensusSection(ConfigSection, frozen=True):
    """How members agree on every round. Travels with the run, except max_retries."""

    protocol: str = "bft"
    timeout: Duration = 30.0
    timeout_min: Duration = 7.5
    max_retries: Count = 3


class NetworkSection(ConfigSection, frozen=True):
    """How this peer is reached. Stays on this computer. Addresses are multiaddrs: /ip4/192.0.2.7/tcp/7071."""

    listen_addresses: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_addresses: tuple[str, ...] = ()
    upload_bytes_s: Whole = 0
    enable_nat_traversal: bool = False
    enable_relay: bool = False


class KeepSection(ConfigSection, frozen=True):
    """Which older states of the model stay on this disk, to go back to. `coded` travels with the run."""

    newest: Whole = 8
    every_rounds: Count = 20
    updates: Annotated[int, Meta(ge=0, le=UPDATES_KEPT_MAX)] = 0
    bytes_max: Bytes = 10_000_000_000
    coded: Text = ""
    repair_after: Duration = 3600.0


class NodeSection(ConfigSection, frozen=True):
    """This peer. Stays on this computer, except the name and the group."""

    name: Text = ""
    group: Group = ""
    threads: Whole = 0
    device: Device = "cpu"


class RunConfig(ConfigSection, frozen=True):
    run: RunSection = RunSection()
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    sync: SyncSection = SyncSection()
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


def keys() -> list[str]:
    """All keys, in file order."""
    return [f"{section}.{name}" for section, owner in sections() for name in owner.__struct_fields__]


def value_of(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def default_of(key: str) -> Any:
    return value_of(RunConfig(), key)


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
