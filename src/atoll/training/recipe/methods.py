"""Published training methods as recipes: one function each, with its source and its published numbers.

Each lists its pieces in one order: inner, schedule, coding, outer; then merge and reducer if they are not the
default (x becomes the anchor, moved by the mean over all members). If our numbers differ from the paper's, the
docstring gives the reason. The recommended recipe (`auto`) rests on bench/RESULTS.md, "convergence". `METHODS`
lists all by name; `recipes.swarm_problem` returns what real runs cannot do.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, TypedDict, Unpack

from msgspec import UNSET

from atoll.training.recipe.inner import SGD, AdamW, GradientSumOptimizer, Muon, PipelinedGradients
from atoll.training.recipe.merge import MixMerge
from atoll.training.recipe.outer import (
    AVERAGE,
    AgreementNesterov,
    DelayedNesterov,
    GossipNesterov,
    MomentAverage,
    Nesterov,
    Outer,
    RegionalNesterov,
    SignOuter,
    momentum_of,
)
from atoll.training.recipe.recipes import (
    BATCH,
    Recipe,
    UpdateCoding,
    diloco,
    drawn_share,
    fitting_seq_len,
    nesterov_for,
    recipe_for,
)
from atoll.training.recipe.reducer import ReductionSettings
from atoll.training.recipe.schedule import SyncSchedule


class CommonOptions(TypedDict, total=False):
    """Options of every recipe beside its own numbers."""

    batch: int
    seq_len: int | None
    seed: int


class DilocoOptions(CommonOptions, total=False):
    """Options of recipes that are DiLoCo with other numbers."""

    rounds: int
    lr: float


EXACT = UpdateCoding("fp32", "fp32", beta=0.0)  # lossless, so there is nothing to remember


def _every_step(model: str, rounds: int, outer: Outer, **pieces: Any) -> Recipe:
    """A recipe that agrees on the gradient of every step, in fp32 by default, and applies it with `outer`."""
    defaults = {"inner": GradientSumOptimizer(), "coding": EXACT, "schedule": SyncSchedule(1, rounds)}
    return recipe_for(model, outer=outer, **(defaults | pieces))


def data_parallel(
    model: str = "gpt-tiny", *, rounds: int = 1500, lr: float = 4e-3, **setting: Unpack[CommonOptions]
) -> Recipe:
    """Synchronous data parallelism: the mean gradient of every step in fp32, AdamW on the agreed parameters."""
    return _every_step(model, rounds, AdamW(lr=lr), **setting)


def parameter_server(
    model: str = "gpt-tiny", *, rounds: int = 1500, lr: float = 4e-3, **setting: Unpack[CommonOptions]
) -> Recipe:
    """Synchronous parameter server (Li et al., OSDI 2014, with one server): data parallelism through one member.

    Its links carry the bytes of all members. The baseline for all other methods.
    """
    return _every_step(model, rounds, AdamW(lr=lr), reducer=ReductionSettings(group="server"), **setting)


def pipelined(
    model: str = "gpt-tiny",
    *,
    rounds: int = 1500,
    lr: float = 1e-3,
    depth: int = 3,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Pipelined gradients (Pipe-SGD, 1811.03619, algorithm 1): the means of the last three steps are in flight.

    No step waits for the network. Each gradient is of parameters three steps old, which needs a smaller rate
    (bench/RESULTS.md).
    """
    return _every_step(model, rounds, AdamW(lr=lr), inner=PipelinedGradients(depth), **setting)


def local_sgd(
    model: str = "gpt-tiny",
    *,
    inner_steps: int = 50,
    up: str = "fp32",
    down: str = "fp32",
    **setting: Unpack[DilocoOptions],
) -> Recipe:
    """Local SGD (1805.09767) with AdamW inside: parameters are averaged, no outer momentum."""
    return diloco(model, inner_steps=inner_steps, outer_momentum=0.0, up=up, down=down, **setting)


def fedavg(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    lr: float = 0.5,
    epochs: int = 0,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """FedAvg (McMahan et al. 2017, algorithm 1): SGD inside, means weighted by samples. lr is for our byte GPT.

    The paper's C is the `sample` of an experiment or a run. Its E is `epochs`: passes over a member's own data,
    bounded by inner_steps. 0: inner_steps for all members.
    """
    return recipe_for(
        model,
        inner=SGD(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds, epochs=epochs or UNSET),
        coding=EXACT,
        outer=AVERAGE,
        **setting,
    )


def opendiloco(model: str = "gpt-tiny", *, inner_steps: int = 500, **setting: Unpack[DilocoOptions]) -> Recipe:
    """OpenDiLoCo (2407.07852, section 3): DiLoCo with fp16 pseudo-gradients, H = 500, outer (0.7, 0.9)."""
    return diloco(
        model, inner_steps=inner_steps, outer_lr=0.7, outer_momentum=0.9, up="fp16", down="fp16", **setting
    )


def intellect1(model: str = "gpt-tiny", *, inner_steps: int = 100, **setting: Unpack[DilocoOptions]) -> Recipe:
    """INTELLECT-1 (2412.01152): DiLoCo with int8 pseudo-gradients both ways, H = 100, outer (0.7, 0.9).

    Error feedback keeps the rounding error of int8, at no extra traffic.
    """
    return diloco(model, inner_steps=inner_steps, outer_lr=0.7, outer_momentum=0.9, **setting)


def muloco(
    model: str = "gpt-tiny",
    *,
    rounds: int = 50,
    inner_steps: int = 30,
    fragments: int = 1,
    overlap: int = 0,
    lr: float = 4e-3,
    muon_lr: float | None = None,
    floor: float = 0.1,
    beta: float = 0.95,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    settle: float = 0.0,
    up: str = "2bit",
    down: str = "2bit",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """MuLoCo (2505.23725): Muon inside, 2-bit updates under error feedback (0.9–0.95), H = 30.

    The paper's outer (0.8, 0.9) needs more than 50 rounds; ours follows the number of rounds. Results are 2-bit
    too, with error feedback of the owners. Muon's default rate is five times that of AdamW. With fragments and
    overlap it streams like `streaming`.
    """
    return recipe_for(
        model,
        inner=Muon(lr=5 * lr if muon_lr is None else muon_lr, rest=AdamW(lr=lr, floor=floor)),
        schedule=SyncSchedule(inner_steps, rounds, fragments, overlap),
        coding=UpdateCoding(up, down, beta, "remembered"),
        outer=nesterov_for(rounds, outer_lr, outer_momentum, settle=settle),
        merge="delta" if overlap else "replace",
        **setting,
    )


def streaming(
    model: str = "gpt-tiny",
    *,
    rounds: int = 47,
    inner_steps: int = 32,
    fragments: int = 4,
    overlap: int = 4,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    outer_floor: float = 1.0,
    settle: float = 0.0,
    up: str = "2bit",
    down: str = "2bit",
    mix: float | None = None,
    closing: str = "",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Streaming DiLoCo (2501.18512): fragments take turns and are applied `overlap` steps after they were sent.

    The paper uses e3m0 and x <- (x + anchor) / 2 (`up="e3m0", down="e3m0", mix=0.5`), H = 100, outer rate 0.4. We
    keep the steps taken meanwhile (delta merge: +8.7 % loss, mixing +12.9 %) and send 2 bits with error feedback.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds, fragments, overlap, closing=closing),
        coding=UpdateCoding(up, down, answer="remembered"),
        outer=nesterov_for(rounds, outer_lr, outer_momentum, outer_floor, settle),
        merge="delta" if mix is None else MixMerge(mix),
        **setting,
    )


def sparseloco(
    model: str = "gpt-tiny",
    *,
    rounds: int = 50,
    inner_steps: int = 30,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    beta: float = 0.95,
    codec: str = "sparseloco",
    clip: bool = True,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """SparseLoCo (2508.15706): the 64 largest of every 4096 values in 2 bits, error feedback 0.95, no momentum.

    Every member gathers the rows of all members; each row is clipped to the median norm (Covenant 2603.08163). A
    value is sent about once in 64 rounds, so short runs need small rounds and a larger step: inner_steps=4,
    outer_lr=2.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(codec, "fp32", beta, "gathered"),
        outer=Nesterov(lr=outer_lr, momentum=0.0),
        reducer=ReductionSettings(statistic="clipped" if clip else "mean"),
        **setting,
    )


def demo_(
    model: str = "gpt-tiny",
    *,
    rounds: int = 1500,
    lr: float = 1e-3,
    beta: float = 0.999,
    codec: str = "demo",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """DeMo / DisTrO (2411.19870, algorithm 1): every step the largest DCT coefficients of the accumulated gradient.

    32 of 4096 coefficients, beta 0.999. The agreed parameters move by the sign of their mean.
    """
    coding, outer = UpdateCoding(codec, "fp32", beta, "gathered"), SignOuter(lr=lr, warmup_steps=100, floor=0.1)
    return _every_step(model, rounds, outer, coding=coding, **setting)


def noloco(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    lr: float = 4e-3,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.5,
    gamma: float = 0.7,
    up: str = "fp32",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """NoLoCo (2506.10911): random pairs instead of an all-reduce; gamma pulls the anchors together. H = 50."""
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(up, "fp32", 0.0 if up == "fp32" else 1.0, "gathered"),
        outer=GossipNesterov(outer_lr, outer_momentum, gamma),
        reducer=ReductionSettings(group="pair"),
        **setting,
    )


def eager(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    up: str = "int8",
    down: str = "int8",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Eager updates (2502.12996): a round's mean is applied when the next round ends, hidden by a round of
    training.

    A member's own share in it is its newest update. Anchors differ slightly between members until the end.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(up, down),
        outer=nesterov_for(rounds, outer_lr, outer_momentum),
        reducer=ReductionSettings(own="fresh"),
        **setting,
    )


def sparta(
    model: str = "gpt-tiny",
    *,
    rounds: int = 1500,
    lr: float = 4e-3,
    share: float = 0.005,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """SPARTA (openreview stFPf3gzq1): after every step a random 0.5 % of the parameters is averaged, in fp16.

    Members keep their own values of all others, so each value of the agreed state is as old as its last turn. The
    last round averages all values; its result is the mean of the members' parameters.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps=1, rounds=rounds, closing="fp16"),
        coding=drawn_share(share),
        outer=AVERAGE,
        merge="swap",
        **setting,
    )


def des_loc(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    lr: float = 4e-3,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """DES-LOC (2505.22549): parameters are averaged every round, first moments every third, second every sixth.

    The agreed state holds the last of these means, so joiners train with moments that fit.
    """
    schedule = SyncSchedule(inner_steps, rounds, moments=(3, 6))
    return recipe_for(model, inner=AdamW(lr=lr), schedule=schedule, coding=EXACT, outer=MomentAverage(), **setting)


def powersgd(
    model: str = "gpt-tiny",
    *,
    rounds: int = 1500,
    lr: float = 4e-3,
    rank: int = 4,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """PowerSGD (1905.13727): every step low-rank factors of the gradient under error feedback, AdamW outside.

    The paper sums factors in transit, which needs a shared basis and two rounds; here rows are gathered.
    """
    coding = UpdateCoding(f"lowrank:{rank}+fp16", "fp32", 1.0, "gathered")
    return _every_step(model, rounds, AdamW(lr=lr), coding=coding, **setting)


def decoupled(
    model: str = "gpt-tiny",
    *,
    rounds: int = 62,
    inner_steps: int = 24,
    fragments: int = 4,
    overlap: int = 2,
    quorum: int = 1,
    grace: int = 2,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float | None = None,
    up: str = "int4",
    down: str = "int8",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Decoupled DiLoCo (2604.21428): a fragment closes by a quorum and a grace period; RDA of the rows.

    Rows weigh tokens^2 / steps, and the mean is mean norm times mean direction (RDA). H = 24, tau = 2, K = 1, int4.
    The paper has 24 fragments, several of them in flight at once, and takes embeddings by the plain mean. Here
    there are 4, since real runs have one in flight, and every tensor is handled alike (fragments=24 for models of
    as many tensors). In real runs a slow member sends its completed steps when the quorum is reached, and x keeps
    the steps of the overlap.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds, fragments, overlap),
        coding=UpdateCoding(up, down),
        outer=nesterov_for(rounds, outer_lr, outer_momentum),
        reducer=ReductionSettings(quorum=quorum, grace=grace, statistic="radial", weight="tokens"),
        **setting,
    )


def cooperative(
    model: str = "gpt-tiny",
    *,
    rounds: int = 150,
    inner_steps: int = 10,
    alpha: float = 0.5,
    peers_min: int = 3,
    lr: float = 4e-3,
    outer_lr: float = 1.0,
    outer_momentum: float = 0.9,
    up: str = "int8",
    down: str = "int8",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Cooperative SGD (1808.07576): x <- alpha x + (1 - alpha) mean, with at least three members.

    Rows weigh by their members' records: the shares of accepted rows. A run of this recipe keeps records unless
    run.reputation turns them off; an experiment uses the given `records`; without records, rows weigh by samples.
    The momentum follows the agreement of the members' updates (`outer.AgreementNesterov`). Three members cannot
    outvote a liar. To tolerate one takes five members, with Krum 2f + 3, and another recipe, since replies of these
    owners cannot be checked.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(up, down),
        outer=AgreementNesterov(outer_lr, outer_momentum),
        merge=MixMerge(alpha),
        reducer=ReductionSettings(peers_min=peers_min),
        **setting,
    )


def delayed_nesterov(
    model: str = "gpt-tiny",
    *,
    rounds: int = 30,
    inner_steps: int = 50,
    lr: float = 4e-3,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    every: int = 4,
    up: str = "fp32",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """Asynchronous local SGD with delayed Nesterov momentum (2401.09135): each update is applied on arrival.

    Slower members take fewer steps per round (DyLU). Fragile from scratch: see bench/RESULTS.md. In real runs
    updates come in rounds (`recipes.in_swarm`): the first finished member begins the exchange, the others send
    their completed steps, and count by them. `every` is about the number of members.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(up, "fp32", 0.0 if up == "fp32" else 1.0),
        outer=DelayedNesterov(outer_lr, outer_momentum, every),
        reducer=ReductionSettings(group="one"),
        **setting,
    )


def halos(
    model: str = "gpt-tiny",
    *,
    rounds: int = 180,
    inner_steps: int = 8,
    regions: int = 2,
    every: int = 32,
    lr: float = 4e-3,
    up: str = "fp32",
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """HALoS (2506.04531): a server per region applies updates on arrival; one above them merges the regions.

    A region sends its own progress every 32 updates; no member waits for another. H = 8, delayed Nesterov of 0.9
    below and 0.5 above.
    """
    return recipe_for(
        model,
        inner=AdamW(lr=lr),
        schedule=SyncSchedule(inner_steps, rounds),
        coding=UpdateCoding(up, "fp32", 0.0 if up == "fp32" else 1.0),
        outer=RegionalNesterov(regions=regions, every=every),
        reducer=ReductionSettings(group="one"),
        **setting,
    )


def auto(
    model: str = "gpt-tiny",
    *,
    peers: int = 4,
    exchange_steps: float = 0.0,
    tokens: int = 0,
    rounds: int | None = None,
    inner_steps: int | None = None,
    fragments: int = 4,
    overlap: int = 4,
    lr: float = 5e-3,
    outer_momentum: float | None = None,
    **setting: Unpack[CommonOptions],
) -> Recipe:
    """The recommended recipe: Muon inside, 4 overlapping fragments, 2 bits both ways, a momentum that decays to 0.

    It never waits and sends 493 times less than data parallelism. At 4500 steps its loss is 1.5 % above that of
    data parallelism; with AdamW inside (`streaming`) it is 4.1 %. Both momentum and rate matter, since the agreed
    model moves by lr / (1 - momentum): at 4500 steps Muon's 0.02 with 0.7 left 7.1 %, half of this rate with 0.8
    left 2.1 %. With Muon inside a small momentum is also better over many rounds (MuLoCo-1, 2505.23725, has 0.6).
    Muon's rate is 2.4 times that of AdamW: both then move a value about equally far (Moonlight, 2502.16982,
    equation 4, gives 1.6 to 3.2 for matrices of 64 to 256; not measured on larger ones). See bench/RESULTS.md,
    "convergence".
    If loss matters more than bytes, use shorter rounds (28 steps: 1.4 % at 432 times). If members' data differ in
    kind, use `streaming`: of digits sorted by label `auto` learns 80 % in twelve rounds, AdamW inside 95 %.

    Missing numbers follow from the swarm. `peers`: the mean of eight or more is less noisy and takes a momentum of
    0.7 (5.9 % at 578 times after 1500 steps; 0.6: 6.0 %). `exchange_steps`: steps that a peer could train while one
    fragment is exchanged on its links; rounds are as long as needed to train nine tenths of the time (`atoll plan`
    computes both). `tokens` of the whole swarm set the number of rounds; 0: 47 rounds.
    """
    if inner_steps is None:
        waiting = fragments * max(0.0, exchange_steps - overlap)
        inner_steps = fragments * ceil(max(32, 9 * waiting) / fragments)
    if rounds is None:
        sample = fitting_seq_len(model, setting.get("seq_len"))
        a_round = peers * inner_steps * setting.get("batch", BATCH) * sample
        rounds = max(1, round(tokens / a_round)) if tokens else 47
    return muloco(
        model,
        rounds=rounds,
        inner_steps=inner_steps,
        fragments=fragments,
        overlap=overlap,
        lr=lr,
        muon_lr=2.4 * lr,
        beta=1.0,
        outer_momentum=(0.7 if peers >= 8 else 0.5) if outer_momentum is None else outer_momentum,
        settle=0.3,
        **setting,
    )


METHODS: dict[str, Callable[..., Recipe]] = {
    method.__name__: method
    for method in (
        *(parameter_server, pipelined, halos),
        *(auto, data_parallel, local_sgd, fedavg, diloco, opendiloco, intellect1, muloco),
        *(streaming, eager, sparseloco, demo_),
        *(noloco, sparta, des_loc, powersgd, decoupled, cooperative, delayed_nesterov),
    )
}


def method_of(recipe: Recipe) -> str:
    """Name of the published method with the pieces of this recipe, whatever its numbers; else "own recipe"."""
    for name, method in METHODS.items():
        if _pieces(method()) == _pieces(recipe):
            return name
    return "own recipe"


def _pieces(recipe: Recipe) -> tuple[object, ...]:
    schedule = recipe.schedule
    kinds = (
        type(recipe.inner),
        type(recipe.outer),
        momentum_of(recipe.outer) > 0,
        schedule.fragments,
        schedule.overlap,
        bool(schedule.closing),
    )
    return *kinds, recipe.coding.up, recipe.coding.down, recipe.coding.answer, recipe.reducer, recipe.merge
