"""run.toml: everything a person may decide about a run and about this peer, in one tree of plain values.

Sections [run] [model] [data] [train] [sync] [consensus] are hashed into genesis and travel with the run; [network]
and [node] stay on this computer. Every field says its unit, why its default, and what it must agree with: the
commented file of `atoll init` and docs/config.md are printed from these very descriptions.
Promises: an unknown key is an error that names the nearest known one; a key whose feature does not exist yet says
"not yet" instead of being ignored. Never reads a file or the environment: `host/config.py` does.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec
from msgspec import Meta

from atoll.base.errors import UsageError
from atoll.base.limits import PEERS_MAX
from atoll.base.units import parse_duration_s

DURATION = {"unit": "duration"}
CHANGE_OF_SCHEDULE = 1000  # rounds over which the learning rate falls when a run has no end


Duration = Annotated[float, Meta(gt=0, extra=DURATION)]  # seconds, or text such as "30 s" and "2h"
Text = Annotated[str, Meta(max_length=64)]
Peers = Annotated[int, Meta(ge=1, le=PEERS_MAX)]
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Codec = Literal["fp32", "int8", "2bit"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Run(Section, frozen=True):
    """What the run is. Travels with the run."""

    name: Text = "run"
    rounds: Whole | None = None
    start_peers: Peers = 1
    min_peers: Peers = 1
    trust: Literal["private", "community"] = "private"
    byzantine_tolerance: Share | None = None
    open_to_all: bool = False
    first_train: Duration = 180.0
    train_max: Duration = 3600.0
    suspect: Duration = 6.0
    beat: Duration = 2.0


class Model(Section, frozen=True):
    """What learns. Travels with the run, by name: code never travels."""

    name: str = ""


class Data(Section, frozen=True):
    """What it learns from. Members that do not have the very same data fetch it from each other."""

    source: str = "stdlib"


class Train(Section, frozen=True):
    """How it learns. Travels with the run. What is left out is as the recipe has it."""

    recipe: Literal["diloco", "demo"] = "diloco"
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
    adaptive_batching: bool = False


class Sync(Section, frozen=True):
    """How updates travel. Travels with the run."""

    up: Codec | None = None
    down: Codec | None = None
    error_feedback: Share | None = None
    pipeline_depth: Count = 3
    compression_ratio: Share = 0.1
    compression_level: Literal[3, 5, 9] = 3


class Consensus(Section, frozen=True):
    """How members agree on every round. Travels with the run, but for max_retries."""

    protocol: str = "bft"
    timeout: Duration = 30.0
    max_retries: Count = 3


class Network(Section, frozen=True):
    """How this peer is reached. Stays on this computer. Addresses are multiaddrs: /ip4/192.0.2.7/tcp/7071."""

    listen_addresses: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_addresses: tuple[str, ...] = ()
    enable_nat_traversal: bool = False
    enable_relay: bool = False


class Node(Section, frozen=True):
    """This peer. Stays on this computer, but for the name."""

    name: Text = ""
    threads: Whole = 0


class Config(Section, frozen=True):
    run: Run = Run()
    model: Model = Model()
    data: Data = Data()
    train: Train = Train()
    sync: Sync = Sync()
    consensus: Consensus = Consensus()
    network: Network = Network()
    node: Node = Node()


ABOUT = {  # unit, why this default, which other key it must agree with
    "run.name": "What people call the run.",
    "run.rounds": (
        "Training rounds until the run is over; 0 goes on until it is stopped. The learning rate falls "
        "over all of them. Left out: as the recipe has it, 30."
    ),
    "run.start_peers": (
        "Voting members needed before the first round trains; 1 starts alone and lets others come. Keep "
        "at or above run.min_peers."
    ),
    "run.min_peers": "Voting members needed for any round to train; below that members only assemble.",
    "run.trust": (
        '"private": members may crash but do not lie, and more than half must be present. "community": up '
        "to a third may lie about what was agreed, and more than two thirds must be present. Averaging "
        "that withstands poisoned updates: not yet."
    ),
    "run.byzantine_tolerance": (
        'Share of members that may lie without splitting the run. Left out: 0 with trust = "private", '
        '0.33 with "community"; the two must agree.'
    ),
    "run.open_to_all": "True: whoever knows an address may join without a ticket.",
    "run.first_train": (
        "How long the first round may train, since nobody's speed is known yet. It ends as soon as "
        "everybody is done, so a large value costs nothing unless somebody hangs."
    ),
    "run.train_max": "A round's training ends here even if steps are left. Keep above run.first_train.",
    "run.suspect": (
        "Silence after which a member is no longer waited for. Keep at or above 3 x run.beat and at or "
        "below a fifth of consensus.timeout."
    ),
    "run.beat": "Heartbeat period. Shorter notices silence sooner and costs more messages.",
    "model.name": (
        "A built-in model. Text: gpt-nano (22 k parameters), gpt-tiny (168 k), gpt-small (1 M), gpt-10m, "
        "gpt-30m, gpt-100m. Images: cnn-mnist (100 k). Left out: as the recipe has it, gpt-tiny."
    ),
    "data.source": (
        '"stdlib": the sources of Python itself, 12 MB, no download. Or a path: a text file, a folder of '
        "text, tokens (.npy, .bin of uint16), MNIST as .npz or as a folder of idx files."
    ),
    "train.recipe": (
        '"diloco": AdamW inside, Nesterov outside, compressed pseudo-gradients (arXiv 2311.08105). '
        '"demo": the same, tuned for `atoll demo`.'
    ),
    "train.inner_steps": (
        "Steps of each peer between two synchronisations. More saves bytes, fewer stay closer to "
        "synchronous training. Recipe: 50."
    ),
    "train.batch": "Samples per step of one peer. Recipe: 4, for two cores.",
    "train.seq_len": "Tokens per sample, at most what the model was built for. Recipe: 64.",
    "train.lr": "Peak learning rate of AdamW. Recipe: 0.004, for models below 1 M parameters; a tenth at 30 M.",
    "train.weight_decay": "Decoupled weight decay of AdamW. Recipe: 0.1.",
    "train.clip_norm": "What a step's gradient norm is clipped to: one bad batch costs no round. Recipe: 1.",
    "train.warmup_steps": (
        "Steps until the learning rate is at its peak. Recipe: 100, at most a tenth of the run."
    ),
    "train.outer_lr": (
        "Outer step size. outer_lr / (1 - outer_momentum) is the effective step: about 2 for 30 to 50 "
        "rounds. Recipe: 1."
    ),
    "train.outer_momentum": "Outer Nesterov momentum. Recipe: 0.5 up to 50 rounds, 0.7 up to 100, then 0.8.",
    "train.seed": "Of the first weights and of the order of the data. Recipe: 0.",
    "train.adaptive_batching": "Let the batch follow the measured speed. Not yet: keep false.",
    "sync.up": 'Codec from a member to the owner of a part. "2bit" relies on error feedback. Recipe: int8.',
    "sync.down": 'Codec of the answer to everybody. "2bit" adds an error that nothing feeds back. Recipe: int8.',
    "sync.error_feedback": "Share of what a codec lost that the next update makes good. Recipe: 1.",
    "sync.pipeline_depth": "Pieces of an update on their way at once. Not yet: the transport decides; keep 3.",
    "sync.compression_ratio": "Share of values that a top-k codec keeps. Not yet: there is none; keep 0.1.",
    "sync.compression_level": (
        "Effort of a byte codec after the tensor codec: 3, 5 or 9. Not yet: there is none; keep 3."
    ),
    "consensus.protocol": (
        '"bft": two phases of signed votes, a rotating proposer, and the quorum that run.trust asks for. '
        '"raft" and "snow": not yet.'
    ),
    "consensus.timeout": (
        "From the end of training until an attempt is given up: a fifth for each of three owners of a "
        "part, the rest for proposal and votes. Every further attempt waits half as long again. A "
        "deadline for trouble: a healthy round never waits for it."
    ),
    "consensus.max_retries": (
        "Failed attempts after which status calls the round troubled. Attempts go on by the clock: giving "
        "up could only split the run."
    ),
    "network.listen_addresses": (
        "Where this peer listens; /tcp/0 picks a free port. The default is reached from this computer "
        "only, /ip4/0.0.0.0/tcp/7071 from everywhere."
    ),
    "network.announce_addresses": (
        "What others are told to dial where it is not what we listen on: behind a router or a port mapping."
    ),
    "network.enable_nat_traversal": "Punch holes through routers. Not yet: keep false.",
    "network.enable_relay": "Reach and be reached through other members. Not yet: keep false.",
    "node.name": "What others call this peer. Left out: the computer's name.",
    "node.threads": (
        "Threads of the trainer; 0: one per core. Several peers on one computer: cores divided by peers, "
        "since too many cost up to 8x CPU per step."
    ),
}

REPLACED = {  # names people know from elsewhere, and what to write here
    "sync_frequency": "train.inner_steps: peers synchronise once per so many steps",
    "initial_peers": "a ticket: atoll join TICKET",
    "bootstrap_peers": "a ticket: atoll join TICKET",
    "learning_rate": "train.lr",
    "local_steps": "train.inner_steps",
    "batch_size": "train.batch",
    "world_size": "run.start_peers",
    "compression": "sync.up and sync.down",
}
NOT_YET: dict[str, str] = {  # key -> why another value than the default is refused
    "train.adaptive_batching": "batches do not follow the measured speed yet",
    "sync.pipeline_depth": "the transport decides how many pieces are on their way",
    "sync.compression_ratio": 'there is no top-k codec; sync.up = "2bit" is the strongest one',
    "sync.compression_level": "no byte codec follows the tensor codec",
    "network.enable_nat_traversal": "give an address that others can dial: network.announce_addresses",
    "network.enable_relay": "give an address that others can dial: network.announce_addresses",
}


def decode_config(tree: Mapping[str, Any]) -> Config:
    """The config of this tree (as tomllib reads it). UsageError that names the key and what to write instead."""
    for path, _ in _leaves(tree):
        _check_known(path)
    try:
        config = msgspec.convert(_in_seconds(tree), Config)
    except msgspec.ValidationError as why:
        text, _, at = str(why).partition(" - at `$.")
        key = at.rstrip("`").split("[")[0]
        raise UsageError(
            "E-CFG-02", f"{key or 'the config'}: {text[0].lower()}{text[1:]}", fix=f"see {key} in docs/config.md"
        ) from None
    _check_made(config)
    _check_sense(config)
    return config


def default_of(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(Config(), section), name)


def keys() -> list[str]:
    """Every key there is, in the order of the file."""
    sections = {f: type(getattr(Config(), f)) for f in Config.__struct_fields__}
    return [f"{section}.{name}" for section, owner in sections.items() for name in owner.__struct_fields__]


# ---- checks ------------------------------------------------------------------------------------------------


def _check_known(path: str) -> None:
    known = keys()
    if path in known:
        return
    name = path.rsplit(".", 1)[-1]
    if name in REPLACED:
        raise UsageError("E-CFG-03", f"{path} is not a key of Atoll", fix=f"write {REPLACED[name]}")
    same = [k for k in known if k.rsplit(".", 1)[-1] == name]
    near = same or difflib.get_close_matches(path, known, 1, 0.6)
    if not near:
        names = {k.rsplit(".", 1)[-1]: k for k in known}
        near = [names[n] for n in difflib.get_close_matches(name, list(names), 1, 0.6)]
    guess = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(
        "E-CFG-01",
        f"unknown key {path}{guess}",
        cause="a slip, or a key of another version",
        fix="docs/config.md has every key",
    )


def _check_made(config: Config) -> None:
    """What does not exist yet is refused, never ignored."""
    for key, why in NOT_YET.items():
        default = default_of(key)
        section, _, name = key.partition(".")
        if getattr(getattr(config, section), name) != default:
            raise UsageError("E-CFG-04", f"{key}: not yet", cause=why, fix=f"leave {key} at {toml_text(default)}")
    protocol = config.consensus.protocol
    if protocol in ("raft", "snow"):
        raise UsageError("E-CFG-04", f'consensus.protocol = "{protocol}": not yet', fix='leave it at "bft"')
    if protocol != "bft":
        raise UsageError(
            "E-CFG-02", f'consensus.protocol: there is no protocol called "{protocol}"', fix='leave it at "bft"'
        )


def _check_sense(config: Config) -> None:
    run, consensus = config.run, config.consensus
    tolerance = run.byzantine_tolerance
    if tolerance is not None and not 0 <= tolerance <= 1 / 3 + 0.004:
        raise UsageError(
            "E-CFG-05",
            f"run.byzantine_tolerance = {tolerance:g} is impossible",
            cause="no agreement survives more than a third of liars (Pease, Shostak, Lamport 1980)",
            fix="write 0 (trust = private) or 0.33 (trust = community)",
        )
    if tolerance is not None and (tolerance > 0) != (run.trust == "community"):
        raise UsageError(
            "E-CFG-05",
            f'run.byzantine_tolerance = {tolerance:g} does not fit run.trust = "{run.trust}"',
            fix=f'write run.trust = "{"community" if tolerance > 0 else "private"}"',
        )
    for small, large, low, high in (
        ("run.min_peers", "run.start_peers", run.min_peers, run.start_peers),
        ("run.first_train", "run.train_max", run.first_train, run.train_max),
        ("3 x run.beat", "run.suspect", 3 * run.beat, run.suspect),
        ("run.suspect", "a fifth of consensus.timeout", run.suspect, consensus.timeout / 5),
    ):
        if low > high:
            raise UsageError(
                "E-CFG-06",
                f"{small} ({low:g}) must not be more than {large} ({high:g})",
                fix=f"lower {small.split(' x ')[-1]} or raise {large.rsplit(' ', 1)[-1]}",
            )


# ---- small words -------------------------------------------------------------------------------------------


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    sections = set(Config.__struct_fields__)
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and (not prefix and name in sections):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _in_seconds(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Durations may be written as text with a unit."""
    out: dict[str, Any] = {}
    for section, values in tree.items():
        if not isinstance(values, Mapping):
            out[section] = values
            continue
        out[section] = {}
        hints = get_type_hints(type(getattr(Config(), section)), include_extras=True)
        for name, value in values.items():
            if isinstance(value, str) and _is_duration(hints[name]):
                try:
                    value = parse_duration_s(value)
                except ValueError as why:
                    raise UsageError("E-CFG-02", f"{section}.{name}: {why}") from None
            out[section][name] = value
    return out


def _is_duration(hint: Any) -> bool:
    return any(isinstance(m, Meta) and m.extra == DURATION for m in get_args(hint)[1:])


def toml_text(value: Any) -> str:
    """A value as one writes it in the file."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case tuple():
            return "[" + ", ".join(toml_text(v) for v in value) + "]"
        case float() if value == int(value):
            return f"{value:.1f}"
        case _:
            return str(value)
