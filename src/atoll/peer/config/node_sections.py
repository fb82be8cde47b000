"""Declarations of the [network], [keep] and [node] settings, which belong to one computer."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from atoll.base.arguments import Count, Whole
from atoll.base.limits import UPDATES_KEPT_MAX
from atoll.peer.config.setting import Bytes, ConfigSection, Duration, Setting, Text

# fmt: off
Group = Annotated[str, Meta(max_length=32, pattern="^[A-Za-z0-9._-]*$")]  # part of a name, behind an @
StateMemory = Literal["memory", "disk"]
FeedbackPrecision = Literal["fp32", "bf16"]
Device = Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?)$")]


class NetworkSection(ConfigSection, frozen=True):
    """How this peer is reached. Stays on this computer. Addresses are multiaddrs: /ip4/192.0.2.7/tcp/7071."""

    listen_addresses: Annotated[tuple[str, ...], Setting(
        "Where this peer listens; /tcp/0 takes a free port. The default accepts connections from this computer "
        'only, "/ip4/0.0.0.0/tcp/7071" from other computers, too.', level="first")] = ("/ip4/127.0.0.1/tcp/0",)
    announce_addresses: Annotated[tuple[str, ...], Setting(
        "Addresses for others to dial if they differ from network.listen_addresses: behind a router or a port "
        "mapping.")] = ()
    upload_bytes_s: Annotated[Whole, Setting(
        "Most bytes per second that this peer sends, to all others together; 0: no cap. 2500000 leaves half of a "
        "40 Mbit/s uplink free. Votes and heartbeats count but never wait. An update must leave well within "
        "consensus.timeout.", "bytes/s")] = 0


class KeepSection(ConfigSection, frozen=True):
    """Which older states of the model stay on this disk, to go back to. `coded` travels with the run."""

    newest: Annotated[Whole, Setting(
        "Newest rounds whose states stay on this disk: `atoll checkpoint rollback` can go back to them, and "
        "`atoll checkpoint export` writes them elsewhere. A state takes 8 bytes per parameter; keep.bytes_max "
        "bounds all.", "rounds")] = 8
    every_rounds: Annotated[Count, Setting(
        "Distance of older states that also stay, the newest 64 of them. The farther they reach back, the later "
        "damage may be noticed. `atoll checkpoint list` shows which are here.", "rounds")] = 20
    updates: Annotated[Annotated[int, Meta(ge=0, le=UPDATES_KEPT_MAX)], Setting(
        "Rounds whose encoded updates stay, so that `atoll blame --round` finds the member without which a round "
        "would have been better; 0: none. Each takes the bytes of two updates, or of three or more where owners "
        "check each other: 50 MB per round for 25 million values in int8. Other members need it, too. At most "
        "keep.newest: a round is recomputed from the state before it.", "rounds")] = 0
    bytes_max: Annotated[Bytes, Setting(
        "Most bytes of stored updates, evidence of verdicts (a fourth at most) and older states together. States "
        "are deleted first, oldest first; pieces (keep.coded) are not deleted. The disk "
        "keeps room for two states more. 0 stores the head and what members fetch.", "bytes")] = 10_000_000_000
    coded: Annotated[Text, Setting(
        'Erasure code of older states (specs/pieces.md). "6/10": a state of every keep.every_rounds-th round is '
        "cut into 10 pieces, one per drawn member; any 6 restore it, so 4 members may vanish, and all together "
        "store 10/6 of it. Empty: every member stores whole states. Fixed when the run is founded, with "
        "keep.every_rounds and keep.repair_after. Needs as many voting members as pieces (with fewer, states stay "
        "whole), and pip install pyeclib at each. Where members may lie, leave more to spare: \"3/10\".",
        level="expert", fixed="pieces of older states lie as it says")] = ""
    repair_after: Annotated[Duration, Setting(
        "Absence of a holder of pieces (keep.coded) after which others recreate its pieces, each from as many "
        "bytes as the state has. Longer than a night saves traffic; shorter risks fewer pieces. Large states get "
        "a second more per MiB.", level="expert")] = 3600.0


class NodeSection(ConfigSection, frozen=True):
    """This peer. Stays on this computer, except the name and the group."""

    name: Annotated[Text, Setting(
        "Name of this peer at the others. Empty: the computer's name, followed by the folder's unless that is "
        "atoll-run.")] = ""
    group: Annotated[Group, Setting(
        "Owner of this peer's data, such as a hospital, for run.sample with run.trust = \"private\". Groups get "
        "equally many turns, however many members they have, and so do the members of a group. It follows an @ in "
        "the name, from the first start on. Empty: a group by itself.", level="expert")] = ""
    data: Annotated[str, Setting(
        "Data of this member's own, which it trains on instead of the run's: a path as in data.source, of the same "
        "form. They never leave this computer. A copy in the peer's folder serves later starts; without it the "
        "run's data return. Not in runs whose members check each other on common data: run.trust = \"private\" has "
        'no such checks. If data differ between sites: train.recipe = "fedavg"; where members may lie, '
        "sync.statistic = \"clipped_caf\". Empty: the run's data.", level="expert")] = ""
    state_from: Annotated[str, Setting(
        "Place of published checkpoints (atoll publish) that this peer asks for agreed states before it asks "
        "members: a folder, s3://BUCKET/PREFIX, hf://OWNER/NAME or https://…. What comes is checked against the "
        "digest in the vertex, so the place needs no trust. Empty: only members.", level="expert")] = ""
    threads: Annotated[Whole, Setting(
        "Threads of the trainer; 0: the cores, divided by the peers that run here. Too many cost up to 8 times "
        "the CPU per step.", "threads")] = 0
    device: Annotated[Device, Setting(
        'Where the trainer computes: "cpu", "cuda" (the first GPU), "cuda:1", or "auto": the first GPU if there is '
        "one, else the CPU; atoll.log has which. Untested on a real GPU. Steps of a GPU cannot be audited "
        "(run.audit_rate): no other machine computes the same bits.", level="first")] = "cpu"
    state_memory: Annotated[StateMemory, Setting(
        'Where this peer keeps vectors of the model\'s size, beside its state on disk: "memory", or "disk" for '
        "models that hardly fit. Rounds then take longer.", level="expert")] = "memory"
    feedback_precision: Annotated[FeedbackPrecision, Setting(
        'Precision in which this peer keeps its error feedback from round to round. "bf16" takes 0.4 models less '
        "of memory, and less disk. In runs with replay audits it stays fp32: auditors compute it again.",
        level="expert")] = "fp32"
