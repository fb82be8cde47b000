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
from textwrap import wrap
from typing import Annotated, Any, Literal, cast, get_args, get_type_hints

import msgspec
from msgspec import Meta

from atoll.base.errors import UsageError
from atoll.base.limits import APART_ROUNDS_MAX, CODED_PIECES_MAX, PEERS_MAX
from atoll.base.units import parse_duration_s
from atoll.node.settings import ERA_ROUNDS, EraRounds, TopologyName
from atoll.policy.pieces import Coded
from atoll.policy.presets import PRESETS, Preset, Trust, statistic_of
from atoll.policy.trust import StatisticName, peers_for_one_liar
from atoll.policy.validation import VALIDATE_EVERY_MAX

DURATION = {"unit": "duration"}
RECIPES = (
    *("diloco", "demo", "local_sgd", "opendiloco", "streaming", "auto", "eager"),
    *("muloco", "fedavg", "sparseloco", "cooperative", "decoupled", "data_parallel", "demo_", "powersgd"),
)
EXPERIMENTS = (  # recipes that real runs cannot do yet; learn/methods has what they are made of
    *("noloco", "sparta", "des_loc", "delayed_nesterov"),
)
CHANGE_OF_SCHEDULE = 1000  # rounds over which the learning rate falls when a run has no end


Duration = Annotated[float, Meta(gt=0, extra=DURATION)]  # seconds, or text such as "30 s" and "2h"
Text = Annotated[str, Meta(max_length=64)]
Peers = Annotated[int, Meta(ge=1, le=PEERS_MAX)]
Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0, lt=2**31)]
Bytes = Annotated[int, Meta(ge=0, lt=2**62)]
Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Run(Section, frozen=True):
    """What the run is. Travels with the run."""

    name: Text = "run"
    rounds: Whole | None = None
    start_peers: Peers = 1
    min_peers: Peers = 1
    trust: Trust = "private"
    byzantine_tolerance: Share | None = None
    open_to_all: bool = False
    era_rounds: EraRounds = ERA_ROUNDS
    audit_rate: Share | None = None
    reputation: bool | None = None
    validate_every: Annotated[int, Meta(ge=0, le=VALIDATE_EVERY_MAX)] = 0
    validate_margin: Annotated[float, Meta(ge=0.01, le=100)] = 0.25
    openings: Share | None = None
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
    canary: str = ""


class Train(Section, frozen=True):
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
    adaptive_batching: bool = False


class Sync(Section, frozen=True):
    """How updates travel. Travels with the run."""

    up: str | None = None
    down: str | None = None
    error_feedback: Share | None = None
    overlap: Whole | None = None
    fragments: Count | None = None
    pipeline_depth: Count = 3
    compression_ratio: Share = 0.1
    compression_level: Literal[3, 5, 9] = 3
    topology: TopologyName = "auto"
    statistic: StatisticName | None = None
    quorum: Annotated[int, Meta(ge=0, le=PEERS_MAX)] | None = None
    grace: Whole | None = None
    apart: Literal["wait", "merge", "drop"] = "wait"
    apart_rounds: Annotated[int, Meta(ge=1, le=APART_ROUNDS_MAX)] = 10


class Consensus(Section, frozen=True):
    """How members agree on every round. Travels with the run, but for max_retries."""

    protocol: str = "bft"
    timeout: Duration = 30.0
    timeout_min: Duration = 7.5
    max_retries: Count = 3


class Network(Section, frozen=True):
    """How this peer is reached. Stays on this computer. Addresses are multiaddrs: /ip4/192.0.2.7/tcp/7071."""

    listen_addresses: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_addresses: tuple[str, ...] = ()
    upload_bytes_s: Whole = 0
    enable_nat_traversal: bool = False
    enable_relay: bool = False


class Keep(Section, frozen=True):
    """Which older states of the model stay on this disk, to go back to. `coded` travels with the run."""

    newest: Whole = 8
    every_rounds: Count = 20
    bytes_max: Bytes = 10_000_000_000
    coded: Text = ""
    repair_after: Duration = 3600.0


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
    keep: Keep = Keep()
    node: Node = Node()


ABOUT = {  # unit, why this default, which other key it must agree with
    "run.name": "What people call the run.",
    "run.rounds": (
        "Training rounds until the run is over; 0 goes on until it is stopped. The learning rate falls "
        "over all of them."
    ),
    "run.start_peers": (
        "Voting members needed before the first round trains; 1 starts alone and lets others come. Keep "
        "at or above run.min_peers."
    ),
    "run.min_peers": "Voting members needed for any round to train; below that members only assemble.",
    "run.trust": (
        '"private": members may crash but do not lie, and more than half must be present. "community": up '
        "to a third may lie about what was agreed, and more than two thirds must be present. Poisoned updates are "
        'for sync.statistic to withstand, and owners of parts are spot-checked (run.openings). "open": several '
        "owners combine every part and sign what they got, doubted parts are opened and recomputed, and proven "
        "liars are expelled. Costs the upload as many times. What it stands for where other keys are left out: "
        "docs/config.md, at the end."
    ),
    "run.byzantine_tolerance": (
        'Share of members that may lie without splitting the run: 0 with trust = "private", 0.33 with '
        '"community" and "open"; the two must agree.'
    ),
    "run.open_to_all": "True: whoever knows an address may join without a ticket.",
    "run.era_rounds": (
        "Rounds after which members sign the history with their long-lived identities (ML-DSA-65), so that "
        "whoever can forge Ed25519 votes some day cannot write another past; 0: never. Nobody waits for it; small "
        "runs also sign when members come and go. 5 kB per member each time."
    ),
    "run.audit_rate": (
        "Share of all rounds of all trainers of which another trainer, drawn by the vertex, takes ten steps again "
        "(specs/audit.md); 0.05 costs 2 to 3 % more work, and where records are kept up to four times that for "
        'members on probation. Left out: 0.02 with run.trust = "community", 0.05 with "open", 0 where the recipe '
        "cannot be audited. Whom enough auditors refute is expelled where run.trust "
        'is "community" or "open", and shown by status where it is "private". For gpt and llama models under '
        "recipes without overlap or fragments; 32 bytes per parameter travel for each audit."
    ),
    "run.reputation": (
        "True: vertices keep a score of every member's record (specs/reputation.md). It decides how often it is "
        "audited, whether it owns parts, and what its rows weigh: after sync.statistic looked for liars, and never "
        "more than half as much again as an equal share. Samples that members claim then move nothing. Left out: "
        'true with run.trust = "community" and "open".'
    ),
    "run.validate_every": (
        "Training rounds after which members look at the agreed model: some, drawn by the vertex, sign its loss on "
        "held-out data, and if more than may lie find it bad, all go back to the last state that was found good "
        "(specs/validation.md). 0: never, the default, since a return costs rounds and the margin is yours to "
        "choose. Costs a validator 128 samples without gradients each time, as much as training on 45; raise it "
        "where a round trains on a few hundred. For built-in models, not for attached loops."
    ),
    "run.validate_margin": (
        "How far above the least loss of the newest 128 rounds a loss is bad, as a share of it, and 0.1 nats at "
        "least. Wide enough for the worst round that you would keep; harm below it is not seen."
    ),
    "run.openings": (
        "Share of every combined part that its owner must open to others after the round, with run.trust = "
        '"community": drawn blocks of all rows, from which the same blocks of the sum are made again. Proven '
        "liars are expelled, who shows nothing is sent away. Left out it is 0.03 there; what that finds: "
        "specs/openings.md. Not with codecs that look beyond a block (topk, randk, dct, compressors ...)."
    ),
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
        "gpt-30m, gpt-100m, llama-tiny, llama-10m, llama-100m. Images: cnn-mnist (100 k), resnet18-mnist and "
        'resnet18-cifar (11 M), vgg11-mnist and vgg11-cifar (9 M). Or any size: "gpt:d=64,l=3,h=4,t=64" (width, '
        'layers, heads, tokens read at once; v=256), "llama:d=64,l=3,h=4,kv=2,t=64" (also f, theta, tie), '
        '"resnet18:c=10,i=3,w=64" (classes, channels, first width), "vgg11:…" alike.'
    ),
    "data.source": (
        '"stdlib": the sources of Python itself, 12 MB, no download. Or a path: a text file, a folder of '
        "text, tokens (.npy, .bin of uint16), MNIST as .npz or as a folder of idx files, "
        "images (PNG, JPEG) in one folder per class."
    ),
    "data.canary": (
        "A path, of the same kinds: data that nobody learns from and that validators look at too "
        "(run.validate_every), with a bound of its own. Text (8 kB at least) or labelled pictures that the model "
        "must not unlearn, and that data.source teaches: the loss of anything else rises while the model learns, "
        "and would send the run back. Travels with the run. Empty: none."
    ),
    "train.recipe": (
        '"diloco": AdamW inside, Nesterov outside, compressed pseudo-gradients (arXiv 2311.08105). '
        '"demo": the same, tuned for `atoll demo`. "local_sgd": no outer momentum. "opendiloco": fp16, 500 steps. '
        '"streaming": four fragments in turn, 4 steps of overlap, 2 bits both ways (arXiv 2501.18512). '
        '"auto": the same '
        "with Muon inside and an outer momentum that settles over the last 0.3 of the run. "
        '"eager": training never waits, a mean is taken in when the next round ends (arXiv 2502.12996). '
        '"muloco": Muon inside, 2 bits both ways (arXiv 2505.23725). '
        "Where members do not trust each other, or rows are "
        "handed on, these three have answers in int8. "
        '"fedavg": SGD inside, plain means (arXiv 1602.05629). '
        '"sparseloco": one value of 64 in 2 bits, rows gathered and clipped, no outer momentum (arXiv 2508.15706). '
        '"cooperative": peers keep half of their own parameters, momentum follows agreement; three at least '
        '(arXiv 1808.07576). "decoupled": rounds wait for a quorum and a grace, four fragments, mean length times '
        'mean direction (arXiv 2604.21428). "data_parallel": the mean gradient of every step in fp32, AdamW on the '
        'agreed parameters. "demo_": DeMo (arXiv 2411.19870), every step the largest cosine waves of the gathered '
        "gradient, the agreed parameters move by the sign of their mean. "
        '"powersgd": every step low-rank factors of the gathered gradient (arXiv 1905.13727), AdamW on the agreed '
        "parameters. These three agree on every single step: for fast links; their train.lr is that of the agreed "
        'step. "sparseloco", "cooperative", "decoupled", "demo_" and "powersgd" need run.trust = "private". '
        "The others of learn/methods run in one process only (atoll.experiment): not yet here."
    ),
    "train.inner_steps": (
        "Steps of each peer between two synchronisations. More saves bytes, fewer stay closer to "
        "synchronous training."
    ),
    "train.batch": "Samples per step of one peer. Small, for two cores.",
    "train.seq_len": "Tokens per sample, at most what the model was built for.",
    "train.lr": (
        "Peak learning rate of AdamW, for models below 1 M parameters; a tenth of it at 30 M. Muon's follows in "
        "proportion; of the recipe fedavg it is that of SGD."
    ),
    "train.weight_decay": "Decoupled weight decay of AdamW.",
    "train.clip_norm": "What a step's gradient norm is clipped to: one bad batch costs no round.",
    "train.warmup_steps": "Steps until the learning rate is at its peak; at most a tenth of the run.",
    "train.outer_lr": (
        "Outer step size. outer_lr / (1 - outer_momentum) is the effective step: about 2 for 30 to 50 rounds."
    ),
    "train.outer_momentum": (
        "Outer Nesterov momentum. With the recipe: 0.5 up to 50 rounds, 0.7 up to 100, then 0.8."
    ),
    "train.seed": "Of the first weights and of the order of the data.",
    "train.adaptive_batching": "Let the batch follow the measured speed. Not yet: keep false.",
    "sync.up": (
        'Codec from a member to the owner of a part: "fp32", "int8", "2bit", "topk+int8+zstd", …; see '
        "specs/codecs.md. Strong ones need error feedback."
    ),
    "sync.down": "Codec of the answer to everybody. What is lost here is lost: nothing feeds it back.",
    "sync.error_feedback": "Share of what a codec lost that the next update makes good.",
    "sync.overlap": (
        "Inner steps that a trainer goes on from its own parameters while a round is agreed; then it waits. What "
        "is agreed is merged when it comes, and these steps are part of the next round. 0 stands still meanwhile. "
        "Enough is the time of an exchange divided by that of a step; 4 of 32 cost 0.5 % of loss. Keep below "
        "train.inner_steps / sync.fragments. Costs the trainer memory for one more copy of the model."
    ),
    "sync.fragments": (
        "Slices of the model that take turns: a round carries one of them and takes train.inner_steps / "
        "sync.fragments steps, a run has run.rounds x sync.fragments rounds, and the last one carries everything. "
        "The bytes are the same, but come in smaller waves: for thin links. It must divide train.inner_steps."
    ),
    "sync.pipeline_depth": "Pieces of an update on their way at once. Not yet: the transport decides; keep 3.",
    "sync.compression_ratio": 'Share of values that "topk" and "randk" keep, unless it is named: "topk:0.05".',
    "sync.compression_level": 'Effort of "zstd", unless it is named ("zstd:9"): 3, 5 or 9.',
    "sync.topology": (
        'How updates are reduced (specs/topologies.md). "auto" is a hierarchy if names say that members are in '
        'several places ("eu/ada", "us/bob"), else what the planner finds cheapest on the links that members '
        'measured and agreed on, and a butterfly until these are known. With trust = "community" rows are never '
        "combined on the way."
    ),
    "sync.statistic": (
        'What the rows of a part become. "mean": weighted by samples, any liar can move it. "median", '
        '"trimmed_mean", "meamed": per value, withstanding run.byzantine_tolerance of the members. "robust" (a '
        'covariance filter, and the one to take), "krum", "multi_krum", "geometric_median", "centred_clipping", '
        '"mda": whole updates are weighed by their distances, which owners of parts add up; one more small message '
        "per part, at most 64 rows. With all of these every row "
        "counts once, whatever number of samples it claims. They need rows that reach owners directly, more than "
        "twice as many as there may be liars (Krum three more than twice), and memory for one decoded MiB of every "
        'row. A part with fewer rows counts for nobody in that round, which the round reports. Left out: "robust" '
        'with run.trust = "community", "trimmed_mean" with "open"; a mean where run.min_peers are too few for it.'
    ),
    "sync.quorum": (
        "Updates after which the others are waited for no longer than sync.grace: whoever still trains hands over "
        "the steps that it has, and what comes too late is part of its next update; a recipe that agrees on every "
        'step drops it. 0 waits for everybody, as long as training may last. Needs run.trust = "private" and a '
        "butterfly or star, since whoever is first decides how long a round is."
    ),
    "sync.grace": (
        "Steps of a median member that the others may be later; a twelfth of an owner's window comes on top, for "
        "words on their way. With sync.quorum only. As long as a step of the slowest, or it may never count."
    ),
    "sync.apart": (
        "What a member does that is cut off from a quorum, once an attempt has failed (specs/apart.md). "
        '"wait": it stands still after sync.overlap steps. "merge": it trains on, and what it did is sent with its '
        "next update when it is back, as one more update in length at the most, at the weight of one. "
        '"drop": it trains on, and these steps are given up then. Not with audits, fragments or the recipes eager '
        "and cooperative."
    ),
    "sync.apart_rounds": (
        "Rounds' worth of steps that such a member takes at most. What it sends is as long for one as for many; "
        "more of them make its direction surer, and staler."
    ),
    "consensus.protocol": (
        'How members agree on a round. "bft": two phases of signed votes, a rotating proposer, and the quorum that '
        'run.trust asks for. "raft": one phase, one hop and half of the votes less, and a leader that stays while '
        "it lives (specs/raft.md); for clusters whose members crash but never lie, so only with "
        'run.trust = "private". Both keep a history that strangers can verify. "snow": not yet.'
    ),
    "consensus.timeout": (
        "From the end of training until an attempt is given up: a fifth for each of three owners of a "
        "part, the rest for proposal and votes. Every further attempt waits half as long again. A "
        "deadline for trouble: a healthy round never waits for it."
    ),
    "consensus.timeout_min": (
        "What consensus.timeout shrinks to, at the least, for the waits in a first attempt where rounds have shown "
        "to be fast: silent owners then cost seconds, not a minute. The default lets lost words be said again, "
        "once a second, before anybody is late. As long as consensus.timeout or longer: it never shrinks."
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
    "network.upload_bytes_s": (
        "Bytes a second that this peer sends at most, to all others together; 0: no cap. 2500000 leaves half of a "
        "40 Mbit/s uplink free. Votes and heartbeats count but never wait; keep it high enough for an update to "
        "leave well within consensus.timeout."
    ),
    "network.enable_nat_traversal": "Punch holes through routers. Not yet: keep false.",
    "network.enable_relay": "Reach and be reached through other members. Not yet: keep false.",
    "keep.newest": (
        "States of so many rounds before the head stay on this disk: `atoll checkpoint rollback` can go back to "
        "them, `export` writes them elsewhere. A state takes 8 bytes per parameter; keep.bytes_max bounds them all."
    ),
    "keep.every_rounds": (
        "Beside those, the state of every so many rounds stays, the newest 64 of them: the farther back, the later "
        "damage may be noticed. `atoll checkpoint list` says which are here."
    ),
    "keep.bytes_max": (
        "Bytes that these older states may take together; the oldest give way first. 0 keeps the head and what the "
        "last minute needed. Pieces come first and are not given up."
    ),
    "keep.coded": (
        'Empty: states of every keep.every_rounds-th round lie whole at every member. "6/10": each is cut into '
        "10 pieces, one per member that the vertex draws, and any 6 make it again, so 4 members may vanish; "
        "nobody holds it whole, all of them together hold 10/6 of it (specs/pieces.md). Fixed when the run is "
        "founded, together with keep.every_rounds and keep.repair_after; needs as many voting members as pieces, "
        "with fewer states stay whole, and pip install 'atoll[coded]' at each. Where members may lie take more to "
        'spare: "3/10".'
    ),
    "keep.repair_after": (
        "Run time for which a holder of pieces may be away before other members make its pieces anew, each out of "
        "as many bytes as the state has. Longer than a night's sleep saves traffic, shorter loses fewer at a time. "
        "Those get a second more for each MiB of a large state."
    ),
    "node.name": "What others call this peer. Empty: the computer's name.",
    "node.threads": (
        "Threads of the trainer; 0: the cores, divided by the peers that run here. Too many cost up to 8x "
        "CPU per step."
    ),
}

RECIPE: dict[str, Any] = {  # what the recipe "diloco" and the trust "private" have where a key is left out
    "run.rounds": 30,
    "run.byzantine_tolerance": 0.0,
    "run.audit_rate": 0.0,
    "run.reputation": False,
    "run.openings": 0.0,
    "model.name": "gpt-tiny",
    "train.inner_steps": 50,
    "train.batch": 4,
    "train.seq_len": 64,
    "train.lr": 4e-3,
    "train.weight_decay": 0.1,
    "train.clip_norm": 1.0,
    "train.warmup_steps": 100,
    "train.outer_lr": 1.0,
    "train.outer_momentum": 0.5,
    "train.seed": 0,
    "sync.up": "int8",
    "sync.down": "int8",
    "sync.error_feedback": 1.0,
    "sync.overlap": 0,
    "sync.fragments": 1,
    "sync.statistic": "mean",
    "sync.quorum": 0,
    "sync.grace": 0,
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
    "network.enable_nat_traversal": "give an address that others can dial: network.announce_addresses",
    "network.enable_relay": "give an address that others can dial: network.announce_addresses",
}


IN_WORDS = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false", "array": "a list"}


def decode_config(tree: Mapping[str, Any]) -> Config:
    """The config of this tree (as tomllib reads it). UsageError that names the key and what to write instead."""
    for path in _leaves(tree):
        _check_known(path)
    try:
        config = msgspec.convert(_in_seconds(tree), Config)
    except msgspec.ValidationError as why:
        text, _, at = str(why).partition(" - at `$.")
        key = at.rstrip("`").split("[")[0]
        for theirs, ours in IN_WORDS.items():
            text = text.replace(f"`{theirs}`", ours).replace(f"`{theirs} | null`", ours)
        told = f"{key or 'the config'}: {text[0].lower()}{text[1:]}"
        raise UsageError("E-CFG-02", told, fix=ABOUT.get(key, "docs/config.md has every key")) from None
    _check_made(config)
    _check_sense(config)
    return config


def default_of(key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(Config(), section), name)


def keys() -> list[str]:
    """Every key there is, in the order of the file."""
    return [f"{section}.{name}" for section, owner in _sections() for name in owner.__struct_fields__]


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
    recipe = config.train.recipe
    if recipe in EXPERIMENTS:
        raise UsageError(
            "E-CFG-04",
            f'train.recipe = "{recipe}": not yet',
            cause="it runs in one process so far: atoll.experiment",
            fix=f"choose one of {', '.join(RECIPES)}",
        )
    if recipe not in RECIPES:
        raise UsageError(
            "E-CFG-02", f'train.recipe: no recipe is called "{recipe}"', fix=f"choose one of {', '.join(RECIPES)}"
        )
    protocol = config.consensus.protocol
    if protocol == "snow":
        raise UsageError(
            "E-CFG-04",
            'consensus.protocol = "snow": not yet',
            cause="a preference decides nothing for good (specs/raft.md), and nothing in a run asks for one",
            fix='leave it at "bft"',
        )
    if protocol not in ("bft", "raft"):
        raise UsageError(
            "E-CFG-02", f'consensus.protocol: there is no protocol called "{protocol}"', fix='leave it at "bft"'
        )


def tolerance_of(run: Run) -> float:
    """The share of members that may lie, also where only `trust` is written."""
    if run.byzantine_tolerance is not None:
        return run.byzantine_tolerance
    return PRESETS[run.trust].tolerance


def chosen_statistic(config: Config) -> StatisticName:
    """What rows become: as the config says, else as its trust has it, as far as there are members enough."""
    run = config.run
    if config.sync.statistic is not None:
        return config.sync.statistic
    return statistic_of(PRESETS[run.trust], tolerance_of(run), run.min_peers, max(run.start_peers, run.min_peers))


def _check_protocol(config: Config) -> None:
    trust = config.run.trust
    if config.consensus.protocol == "raft" and trust != "private":
        raise UsageError(
            "E-CFG-11",
            f'consensus.protocol = "raft" withstands no liar, and run.trust = "{trust}" expects some',
            cause="a voter that says two things could have two histories agreed on",
            fix='write run.trust = "private", or consensus.protocol = "bft"',
        )


def _check_openings(run: Run) -> None:
    if not run.openings or run.trust == "community":
        return
    because = {
        "private": "members do not lie there, so that nobody would be expelled for what is found",
        "open": "several owners combine every part there, and open the rows whenever they differ",
    }
    raise UsageError(
        "E-CFG-11",
        f'run.openings = {run.openings:g} does nothing with run.trust = "{run.trust}"',
        cause=because[run.trust],
        fix='write run.trust = "community", or leave run.openings out',
    )


def _check_statistic(config: Config) -> None:
    """An order statistic that withstands nobody, or cannot see the rows, would be a mean in disguise."""
    run, name, topology = config.run, config.sync.statistic, config.sync.topology
    if run.trust == "open":
        _check_enough(run, 'run.trust = "open"')
    if name is None or name == "mean":
        return
    if run.trust == "private":
        raise UsageError(
            "E-CFG-11",
            f'sync.statistic = "{name}" withstands liars, and run.trust = "private" says that there are none',
            fix='write run.trust = "community", or sync.statistic = "mean"',
        )
    if topology in ("ring", "tree", "hierarchical"):
        raise UsageError(
            "E-CFG-11",
            f'sync.statistic = "{name}" cannot work with sync.topology = "{topology}"',
            cause="its rows are combined on the way, and a sum of rows can neither be sorted nor compared",
            fix='write sync.topology = "butterfly" (or "star", or "auto")',
        )
    _check_enough(run, f'sync.statistic = "{name}"', name)


def _check_enough(run: Run, what: str, statistic: StatisticName = "mean") -> None:
    least = peers_for_one_liar(tolerance_of(run), statistic)
    if run.min_peers < least:
        raise UsageError(
            "E-CFG-11",
            f"{what} withstands nobody among {run.min_peers} members (run.min_peers)",
            cause=f"at run.byzantine_tolerance = {tolerance_of(run):g} it takes {least} to withstand one liar",
            fix=f"write run.min_peers = {least} and run.start_peers = {least} or more",
        )


def coded_of(keep: Keep) -> Coded | None:
    """How older states are cut, None where they lie whole. UsageError for what is no code."""
    if not keep.coded:
        return None
    k, _, n = keep.coded.partition("/")
    try:
        made = Coded(int(k), int(n), keep.every_rounds, keep.repair_after)
        if 1 <= made.k < made.n <= CODED_PIECES_MAX:
            return made
    except ValueError:
        pass
    raise UsageError(
        "E-CFG-12",
        f'keep.coded = "{keep.coded}" says not how many pieces of how many make a state',
        cause=f"it is K/N with 1 <= K < N <= {CODED_PIECES_MAX}",
        fix='write keep.coded = "6/10", or leave it empty',
    )


def _check_sense(config: Config) -> None:
    coded_of(config.keep)
    run, consensus = config.run, config.consensus
    tolerance = run.byzantine_tolerance
    if tolerance is not None and not 0 <= tolerance <= 1 / 3 + 0.004:
        raise UsageError(
            "E-CFG-05",
            f"run.byzantine_tolerance = {tolerance:g} is impossible",
            cause="no agreement survives more than a third of liars (Pease, Shostak, Lamport 1980)",
            fix="write 0 (trust = private) or 0.33 (trust = community or open)",
        )
    if tolerance and tolerance * PEERS_MAX < 1:
        raise UsageError(
            "E-CFG-05",
            f"run.byzantine_tolerance = {tolerance:g} withstands nobody: not one of {PEERS_MAX} members, the most "
            "that a run has",
            fix="write 0.33, or leave it out",
        )
    if tolerance is not None and (tolerance > 0) == (run.trust == "private"):
        raise UsageError(
            "E-CFG-05",
            f'run.byzantine_tolerance = {tolerance:g} does not fit run.trust = "{run.trust}"',
            fix=f'write run.trust = "{"community" if tolerance > 0 else "private"}"',
        )
    _check_protocol(config)
    _check_statistic(config)
    _check_openings(run)
    used = f"{config.sync.up or ''}+{config.sync.down or ''}"
    for key, words, like in (
        ("sync.compression_ratio", ("topk", "randk"), "topk+int8"),
        ("sync.compression_level", ("zstd",), "int8+zstd"),
    ):
        value = getattr(config.sync, key.removeprefix("sync."))
        if value != default_of(key) and not any(word in used.split("+") for word in words):
            raise UsageError(
                "E-CFG-10",
                f"{key} = {value} changes nothing: no codec of this run asks for it",
                fix=f'write sync.up = "{like}", or leave {key} at {toml_text(default_of(key))}',
            )
    if config.sync.apart == "wait" and config.sync.apart_rounds != default_of("sync.apart_rounds"):
        raise UsageError(
            "E-CFG-10",
            "sync.apart_rounds changes nothing: members of this run that are cut off stand still",
            fix='write sync.apart = "merge", or leave sync.apart_rounds at '
            + toml_text(default_of("sync.apart_rounds")),
        )
    if config.sync.apart != "wait" and run.audit_rate:
        raise UsageError(
            "E-CFG-13",
            f'sync.apart = "{config.sync.apart}" cannot work with run.audit_rate = {run.audit_rate:g}',
            cause="an auditor takes the steps of a round again, and nobody assigned those that are taken apart",
            fix='write run.audit_rate = 0, or sync.apart = "wait"',
        )
    if not run.validate_every and (config.data.canary or run.validate_margin != default_of("run.validate_margin")):
        key = "data.canary" if config.data.canary else "run.validate_margin"
        raise UsageError(
            "E-CFG-10",
            f"{key} changes nothing: members of this run do not look at its model",
            fix=f"write run.validate_every = 1, or leave {key} at {toml_text(default_of(key))}",
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


def _leaves(tree: Mapping[str, Any]) -> Iterator[str]:
    """The dotted path of every value."""
    for section, value in tree.items():
        table = _as_table(value)
        if table is None:
            yield section
        else:
            yield from (f"{section}.{name}" for name in table)


def _in_seconds(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Durations may be written as text with a unit."""
    out: dict[str, Any] = {}
    for section, owner in _sections():
        table = _as_table(tree.get(section, {}))
        if table is None:
            out[section] = tree[section]
            continue
        hints = get_type_hints(owner, include_extras=True)
        out[section] = {k: _seconds(f"{section}.{k}", v, hints[k]) for k, v in table.items()}
    return out


def _seconds(key: str, value: object, hint: object) -> object:
    if not isinstance(value, str) or not _is_duration(hint):
        return value
    try:
        return parse_duration_s(value)
    except ValueError as why:
        raise UsageError("E-CFG-02", f"{key}: {why}", fix=ABOUT[key]) from None


def _is_duration(hint: Any) -> bool:
    return any(isinstance(m, Meta) and m.extra == DURATION for m in get_args(hint)[1:])


def toml_text(value: object) -> str:
    """A value as one writes it in the file."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return f'"{value}"'
        case tuple():
            return "[" + ", ".join(toml_text(v) for v in cast("tuple[object, ...]", value)) + "]"
        case _:
            return str(value)


# ---- for people to read ------------------------------------------------------------------------------------

LINE = 92  # characters of a comment line


def commented_toml() -> str:
    """A run.toml with every key at its default, commented out, and its description above it."""
    lines = [
        "# What a run is made of. A line that begins with # is the default; take the # away to change it.",
        "# Order: defaults, this file, environment (ATOLL_TRAIN__LR=0.002), atoll up --set train.lr=0.003.",
    ]
    for section, owner in _sections():
        lines += ["", f"[{section}]  # {_first_line(owner)}"]
        for name in owner.__struct_fields__:
            key = f"{section}.{name}"
            lines += [f"# {text}" for text in wrap(ABOUT[key], LINE, break_on_hyphens=False)]
            lines.append(f"#{name} = {toml_text(RECIPE.get(key, default_of(key)))}")
    return "\n".join(lines) + "\n"


INTRODUCTION = """# run.toml

`atoll init` writes this page as a commented file. Values come from, in this order: defaults, the file, the
environment (`ATOLL_TRAIN__LR=0.002`), and `atoll up --set train.lr=0.003`. An unknown key is an error; so is a
key whose feature does not exist yet, unless it stands at its default. Durations are seconds, or text with a
unit: `250ms`, `30s`, `15min`, `2h`, `7d`. Sections up to [consensus] become part of the run's genesis and cannot
be changed afterwards, nor can keep.coded; [network], the rest of [keep] and [node] belong to one computer and may
differ at every start.

A default *in italics* comes from the recipe `diloco` (with `train.recipe = "demo"` it is the demo's) or from
`run.trust = "private"`."""


def reference() -> str:
    """docs/config.md: every key, its default, its unit and reason."""
    lines = [INTRODUCTION]
    for section, owner in _sections():
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
        "`run.openings`": [f"{preset.openings:g}" for preset in PRESETS.values()],
        "owners watch each other": ["yes" if preset.witnessed else "no" for preset in PRESETS.values()],
        "withstands": [preset.withstands for preset in PRESETS.values()],
        "does not withstand": [preset.does_not for preset in PRESETS.values()],
    }
    return lines + [f"| {name} | " + " | ".join(row) + " |" for name, row in rows.items()]


def _statistics(preset: Preset) -> str:
    """What is taken, from how many members on."""
    wanted = [f"`{s}` from run.min_peers = {peers_for_one_liar(preset.tolerance, s)}" for s in preset.statistics]
    return ", else ".join([*wanted, "`mean`"])


def _sections() -> list[tuple[str, type[Section]]]:
    return [(name, type(getattr(Config(), name))) for name in Config.__struct_fields__]


def _as_table(value: object) -> Mapping[str, Any] | None:
    """A section of the file, or None for a plain value."""
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None


def _first_line(owner: type[Section]) -> str:
    return (owner.__doc__ or "").strip().split("\n")[0]
