"""`atoll plan`: estimated cost of every recipe on your links, before there is a run. Nothing is measured.

Byte counts come from the functions that count them in experiments (`training/experiment/cost_model`). Times of
rounds with owners come from the planner of real rounds (`policy/topology_cost.predict`, a butterfly). With
`--trust open` every part has further owners, to which all rows travel once more. Codec work, agreement (some
latencies per round), checks of members, lost packets and slow peers are left out. Times are therefore a little low,
and serve for comparison.
Imports torch, since codecs know their own sizes and live with tensors; help does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.base.limits import FULL_MESH_MAX, OWNERS_PER_PART
from atoll.base.units import (
    bytes_text,
    count_text,
    counted_text,
    parse_count,
    parse_duration_s,
    parse_rate_bytes_s,
    seconds_text,
)
from atoll.cli.say import AsJson, say, say_json

if TYPE_CHECKING:
    from atoll.training.exchange.layout import ModelLayout
    from atoll.training.experiment.cost_model import SliceTraffic
    from atoll.training.recipe.recipes import Recipe

Trust = Literal["private", "community", "open"]  # as in policy/presets, which help need not import
DEVICE_FLOPS = 1e13
"""Operations per second where nobody says how fast a step is: what a consumer GPU sustains, give or take three
times. A step is 6 of them per parameter and token (Kaplan et al. 2020, section 2.1)."""
STEP_TOKENS = 32_768  # tokens per step of one peer, if only a number of parameters is given
BESIDE = ("streaming", "diloco", "opendiloco")
"""What `auto` is compared with: recipes of the same family, that real runs can do whoever their members are."""
DEADLINE_SHARE = 0.6  # of consensus.timeout, and half of the training: time for an exchange before rows are late
DEADLINE_MARGIN = 1.25  # recommended deadlines over what the estimate needs, which is a little low
STEPS_TRIED = 500  # most steps per round in published runs (DiLoCo, OpenDiLoCo)


@dataclass(frozen=True)
class LinkAssumptions:
    """One kind of link for every peer."""

    peers: int
    up_bytes_s: float
    down_bytes_s: float
    latency_s: float
    trust: Trust = "private"

    @property
    def copies(self) -> int:
        """Owners of a part that receive all its rows: one, and those that repeat its sum where members may lie."""
        from atoll.policy.fault_tolerance import liars_among, witnesses
        from atoll.policy.presets import PRESETS

        preset = PRESETS[self.trust]
        if not preset.witnessed:
            return 1
        liars = liars_among(self.peers, preset.tolerance)
        return 1 + witnesses(min(OWNERS_PER_PART, self.peers), self.peers, liars, preset.captured)


def plan(
    *,
    model: Annotated[str, Parameter(help="A built-in model, or how many parameters: 350M, 1B.")],
    peers: Annotated[int, Parameter(help=f"Members, 2 to {FULL_MESH_MAX}.")],
    uplink: Annotated[str, Parameter(help="What one peer can send: 20Mbit, 2.5MB (per second).")],
    downlink: Annotated[str, Parameter(help="What one peer can receive. Default: as much.")] = "",
    adapters: Annotated[
        str, Parameter(help="Number of exchanged parameters, if the rest is frozen: 4M. Default: all.")
    ] = "",
    lora_rank: Annotated[int, Parameter(help="Rank of a built-in model's adapters, which then travel alone.")] = 0,
    only: Annotated[
        tuple[str, ...],
        Parameter(negative="", help='Patterns of what travels of a built-in model: "head.*". Default: all.'),
    ] = (),
    latency: Annotated[str, Parameter(help="Time of a message from one peer to another. Default: 50ms.")] = "50ms",
    trust: Annotated[
        Trust, Parameter(help="As run.trust: it excludes recipes, and with open adds owners. Default: private.")
    ] = "private",
    step_seconds: Annotated[
        float | None, Parameter(help="Seconds of one training step of one peer. Default: estimated.")
    ] = None,
    tokens_per_s: Annotated[float | None, Parameter(help="Or: tokens per second of one peer.")] = None,
    tokens_per_step: Annotated[
        int | None,
        Parameter(help=f"Of one peer. Default: batch 4 of a built-in model, else {STEP_TOKENS:,}."),
    ] = None,
    json: AsJson = False,
) -> None:
    """Estimate time and bytes per round of every recipe on your links, and recommend one."""
    links = _links(peers, uplink, downlink, latency, trust)
    model, whole, layout, step_tokens = _model(model, lora_rank, only, tokens_per_step)
    layout = _adapters(adapters, layout) if adapters else layout
    step_s, assumed = _step(whole, layout.parameters, step_tokens, step_seconds, tokens_per_s)
    told = planned(layout, links, step_s, step_tokens)
    frozen = {"frozen": whole - layout.parameters} if whole > layout.parameters else {}
    told = {"model": model, "parameters": layout.parameters, **frozen, **told, "step_assumed": assumed}
    if json:
        say_json(told)
    else:
        _say(told)


def planned(layout: ModelLayout, links: LinkAssumptions, step_s: float, step_tokens: int) -> dict[str, Any]:
    """Estimates of every recipe on these links, those that real runs support first, and the recommendation."""
    from atoll.training.recipe.methods import METHODS
    from atoll.training.recipe.recipes import for_real_run

    believed = links.trust == "private"
    recipes = {name: for_real_run(make(), believed=believed) for name, make in METHODS.items()}
    rows = [row_of(name, recipe, layout, links, step_s, step_tokens) for name, recipe in recipes.items()]
    rows.sort(key=lambda row: bool(row["not_yet"]))
    return {
        "peers": links.peers,
        "uplink_bytes_s": links.up_bytes_s,
        "downlink_bytes_s": links.down_bytes_s,
        "latency_s": links.latency_s,
        "trust": links.trust,
        "copies": links.copies,
        "step_s": step_s,
        "step_tokens": step_tokens,
        "recipes": rows,
        "recommended": _recommended(recipes, layout, links, step_s),
    }


def row_of(
    name: str, recipe: Recipe, layout: ModelLayout, links: LinkAssumptions, step_s: float, step_tokens: int
) -> dict[str, Any]:
    """Duration and bytes of a round of this recipe on these links."""
    from atoll.policy.pace import pace
    from atoll.training.experiment.cost_model import forecast
    from atoll.training.recipe.recipes import swarm_problem

    row: dict[str, Any] = {"recipe": name, "not_yet": swarm_problem(recipe) or _trust_problem(recipe, links.trust)}
    try:
        cost = forecast(recipe, layout, links.peers)
    except ValueError as why:
        return row | {"not_yet": str(why), "round_s": None}
    steps, overlap = recipe.schedule.inner_steps, _overlap(recipe)
    exchanges_s = _exchanges_s(recipe, cost.exchanges, links)
    again = sum(_again_bytes(one, links) / one.every for one in cost.exchanges)
    waiting = pace(exchanges_s, steps, step_s)
    overlapped = pace(exchanges_s, steps, step_s, overlap) if overlap else None
    return row | {
        "steps": steps,
        "round_s": (overlapped or waiting).round_s,
        "exchange_s": sum(exchanges_s),
        "utilisation_waiting": waiting.utilisation,
        "utilisation_overlapped": overlapped.utilisation if overlapped else None,
        "up_bytes": cost.up_bytes + again,
        "down_bytes": cost.down_bytes + again,
        "up_bytes_per_token": (cost.up_bytes + again) / (steps * step_tokens),
        "down_bytes_per_token": (cost.down_bytes + again) / (steps * step_tokens),
        "up_ratio": cost.up_ratio and cost.up_ratio * cost.up_bytes / (cost.up_bytes + again),
        "down_ratio": cost.down_ratio and cost.down_ratio * cost.down_bytes / (cost.down_bytes + again),
        "deadlines": deadlines_of(steps / recipe.schedule.fragments, step_s, max(exchanges_s, default=0.0)),
    }


def deadlines_of(turn_steps: float, step_s: float, exchange_s: float) -> dict[str, float]:
    """Settings that a round of this length needs because their defaults are too short, in seconds."""
    from atoll.peer.config.sections import default_of

    training_s = turn_steps * step_s
    needs = {
        "consensus.timeout": (exchange_s - training_s / 2) / DEADLINE_SHARE,
        "run.first_train": training_s + exchange_s,  # no speed is known yet
        "run.train_max": training_s,
    }
    late = {key: need_s for key, need_s in needs.items() if need_s > default_of(key)}
    return {key: 60.0 * ceil(DEADLINE_MARGIN * need_s / 60) for key, need_s in late.items()}


def _trust_problem(recipe: Recipe, trust: Trust) -> str:
    """Why this recipe excludes this trust; empty if it does not."""
    from atoll.training.recipe.reply_formats import has_owner_feedback, needs_reply_format

    needs_trust = needs_reply_format(recipe) or has_owner_feedback(recipe) or recipe.reducer.quorum
    return 'needs run.trust = "private"' if needs_trust and trust != "private" else ""


def _again_bytes(one: SliceTraffic, links: LinkAssumptions) -> float:
    """Bytes of rows for further owners of every part, of an average peer; it hears as many."""
    return (links.copies - 1) * one.row_bytes * (links.peers - 1) / links.peers if one.answer_bytes else 0.0


def _recommended(
    recipes: dict[str, Recipe], layout: ModelLayout, links: LinkAssumptions, step_s: float
) -> dict[str, Any]:
    """Recommendation: `auto` with rounds as long as these links require, and that length for other recipes.

    It is nearest to synchronous training for its bytes (bench/RESULTS.md, "convergence"). Loss falls behind as
    rounds get longer, so rounds are just long enough for nine tenths of the time to be training.
    """
    from atoll.policy.pace import ENOUGH, pace, steps_for
    from atoll.training.experiment.cost_model import forecast
    from atoll.training.recipe.methods import auto
    from atoll.training.recipe.outer import momentum_of

    def exchanged_s(recipe: Recipe) -> list[float]:
        return _exchanges_s(recipe, forecast(recipe, layout, links.peers).exchanges, links)

    exchanges_s = exchanged_s(recipes["auto"])
    usual = recipes["auto"].schedule
    chosen = auto(peers=links.peers, exchange_steps=max(exchanges_s) / step_s)
    steps, overlap = chosen.schedule.inner_steps, usual.overlap
    share = pace(exchanges_s, steps, step_s, overlap).utilisation
    settings: dict[str, Any] = {"train.recipe": "auto", "train.inner_steps": steps}
    if (momentum := momentum_of(chosen.outer)) != momentum_of(recipes["auto"].outer):
        settings["train.outer_momentum"] = momentum
    settings |= deadlines_of(steps / usual.fragments, step_s, max(exchanges_s))
    others: list[str] = []
    for name in BESIDE:
        own = recipes[name].schedule
        needed = steps_for(ENOUGH, exchanged_s(recipes[name]), step_s, own.overlap)
        others.append(f"{name} {max(own.inner_steps, needed)}")
    reason = (
        f"a fragment takes {seconds_text(max(exchanges_s))} to exchange, {overlap} steps of which are hidden, so "
        f"{steps} steps per round keep peers training {share:.0%} of the time, and longer rounds cost loss "
        f"({', '.join(others)} steps)"
    )
    if steps > STEPS_TRIED:
        reason += (
            f". Rounds of more than {STEPS_TRIED} steps are untried: expect a worse loss, or find faster links"
        )
    return {"settings": settings, "utilisation": share, "reason": reason, "steps_tried": steps <= STEPS_TRIED}


def _exchanges_s(recipe: Recipe, exchanges: tuple[SliceTraffic, ...], links: LinkAssumptions) -> list[float]:
    """Seconds of each exchange, spread over the rounds if it is not part of every one."""
    from atoll.policy.pace import simple_exchange_s

    hops = 2 if recipe.reducer.group == "one" else 1
    rates = links.up_bytes_s, links.down_bytes_s
    return [
        (
            _owned_s(one, links, one_owner=recipe.reducer.group == "server")
            if one.answer_bytes and recipe.reducer.group in ("all", "server")
            else simple_exchange_s(one.sent_bytes, one.heard_bytes, *rates, hops, links.latency_s)
        )
        / one.every
        for one in exchanges
    ]


def _owned_s(one: SliceTraffic, links: LinkAssumptions, one_owner: bool) -> float:
    """Seconds for rows to the owners of parts and results back, as the planner of real rounds predicts."""
    from atoll.base.ids import PeerId
    from atoll.policy.topology_cost import AgreedLinks as Agreed
    from atoll.policy.topology_cost import predict
    from atoll.protocol.allreduce.topology import butterfly, star

    names = tuple(PeerId(f"{peer:04}") for peer in range(links.peers))
    latencies = [[links.latency_s] * links.peers] * links.peers
    agreed = Agreed(names, latencies, [links.up_bytes_s] * links.peers, [links.down_bytes_s] * links.peers)
    up_ratio, down_ratio = one.row_bytes / one.dense_bytes, one.answer_bytes / one.dense_bytes
    shape = star(names, b"planner") if one_owner else butterfly(names, b"planner")
    return predict(shape, one.dense_bytes, agreed, links.copies * up_ratio, down_ratio).seconds


def _overlap(recipe: Recipe) -> int:
    """Steps that hide an exchange. Eager and pipelined hide it behind at most one round, since rounds are agreed
    one after the other.
    """
    if recipe.reducer.own == "fresh":
        return recipe.schedule.inner_steps
    return min(recipe.hidden_steps, recipe.schedule.inner_steps)


# ---- what was asked --------------------------------------------------------------------------------------------


def _links(peers: int, uplink: str, downlink: str, latency: str, trust: Trust) -> LinkAssumptions:
    from atoll.policy.fault_tolerance import peers_for_one_liar
    from atoll.policy.presets import PRESETS

    tolerance = PRESETS[trust].tolerance
    if tolerance and peers < (least := peers_for_one_liar(tolerance)):
        raise UsageError(
            "E-PLAN-07",
            f"--trust {trust} withstands no liar among {counted_text(peers, 'member')}",
            cause=f"it takes {least} to withstand one",
            fix=f"--peers {least}, or --trust private if members do not lie",
        )
    if not 2 <= peers <= FULL_MESH_MAX:
        raise UsageError("E-PLAN-01", f"--peers {peers}: 2 to {FULL_MESH_MAX} can be planned", fix="--peers 8")
    try:
        up = parse_rate_bytes_s(uplink)
        return LinkAssumptions(
            peers, up, parse_rate_bytes_s(downlink) if downlink else up, parse_duration_s(latency), trust
        )
    except ValueError as why:
        raise UsageError("E-PLAN-02", str(why), fix="--uplink 20Mbit --latency 50ms") from None


def _model(
    name: str, lora_rank: int, only: tuple[str, ...], step_tokens: int | None
) -> tuple[str, int, ModelLayout, int]:
    """(name, parameters, layout of the exchanged parameters, tokens per step) of a model."""
    from atoll.training.experiment.cost_model import layout_of_size
    from atoll.training.models import MODELS, exchanged_patterns, shape_of, spec_of, with_adapters
    from atoll.training.recipe.methods import METHODS

    if step_tokens is not None and step_tokens < 1:
        raise UsageError("E-PLAN-03", f"--tokens-per-step {step_tokens} is not a step", fix="leave it out")
    try:
        if name in MODELS or ":" in name:
            name = with_adapters(name, lora_rank) if lora_rank else name
            recipe, layout = METHODS["diloco"](name), shape_of(name, exchanged_patterns(name, only))
            return name, shape_of(name).parameters, layout, step_tokens or recipe.batch * recipe.seq_len
        if not name[:1].isdecimal():
            spec_of(name)  # a misspelled name, not a number
        layout = layout_of_size(parse_count(name))
    except ValueError as why:
        raise UsageError("E-PLAN-04", f"--model {name}: {why}", fix="--model 1B, or --model gpt-small") from None
    if lora_rank or only:
        raise UsageError(
            "E-PLAN-06",
            f"--model {name} is a number of parameters: it has no names and no place for adapters",
            fix=f"--model {name} --adapters 20M, or a built-in model",
        )
    return name, layout.parameters, layout, step_tokens or STEP_TOKENS


def _adapters(count: str, model: ModelLayout) -> ModelLayout:
    """Layout of a model of which only this many parameters train."""
    from atoll.training.experiment.cost_model import layout_of_size

    try:
        layout = layout_of_size(parse_count(count))
        if layout.parameters >= model.parameters:
            raise ValueError(f"the model has only {count_text(model.parameters)}")
    except ValueError as why:
        raise UsageError("E-PLAN-06", f"--adapters {count}: {why}", fix="--model 7B --adapters 20M") from None
    return layout


def _step(
    whole: int, trained: int, tokens: int, step_s: float | None, tokens_per_s: float | None
) -> tuple[float, str]:
    """(seconds per step, assumptions about it). A frozen parameter needs no gradient of its own: 4 FLOPs, not 6."""
    if step_s is not None and tokens_per_s is not None:
        raise UsageError("E-PLAN-05", "--step-seconds and --tokens-per-s mean the same", fix="use one of them")
    given = step_s if step_s is not None else tokens_per_s
    if given is None:
        step_s = (4.0 * (whole - trained) + 6.0 * trained) * tokens / DEVICE_FLOPS
        return step_s, f"a device of {DEVICE_FLOPS / 1e12:.0f} TFLOP/s; --tokens-per-s says how fast yours is"
    if not 0 < given < float("inf"):
        raise UsageError("E-PLAN-05", f"a speed of {given:g} trains nothing", fix="--tokens-per-s 3000")
    return (step_s, "") if step_s is not None else (tokens / given, "")


# ---- words -----------------------------------------------------------------------------------------------------


def _say(told: dict[str, Any]) -> None:
    rates = f"{bytes_text(told['uplink_bytes_s'])}/s up, {bytes_text(told['downlink_bytes_s'])}/s down"
    beside = f" exchanged, {count_text(told['frozen'])} frozen" if "frozen" in told else ""
    trust = "" if told["trust"] == "private" else f', run.trust = "{told["trust"]}"'
    trust += f": {told['copies']} owners of every part" if told["copies"] > 1 else ""
    say(f"{count_text(told['parameters'])} parameters{beside}, {told['peers']} peers{trust}, {rates}")
    assumed = f" (assumed: {told['step_assumed']})" if told["step_assumed"] else ""
    say(f"a step: {told['step_tokens']:,} tokens, {seconds_text(told['step_s'])}{assumed}")
    say()
    say(f"  {'recipe':<18}{'steps':>6}{'round':>14}{'trains':>8}{'overlapped':>12}{'up':>10}{'down':>10}"
        f"{'up/token':>11}{'of data parallel, up/down':>28}")  # fmt: skip
    for row in told["recipes"]:
        mark = " " if row["not_yet"] else "*"
        if row["round_s"] is None:
            say(f"{mark} {row['recipe']:<18}{row['not_yet']}")
            continue
        overlapped, up, down = row["utilisation_overlapped"], row["up_ratio"], row["down_ratio"]
        say(
            f"{mark} {row['recipe']:<18}{row['steps']:>6}{seconds_text(row['round_s']):>14}"
            f"{row['utilisation_waiting']:>8.1%}{'-' if overlapped is None else f'{overlapped:.1%}':>12}"
            f"{bytes_text(row['up_bytes']):>10}{bytes_text(row['down_bytes']):>10}"
            f"{bytes_text(row['up_bytes_per_token']):>11}{f'1/{up:,.0f}, 1/{down:,.0f}':>28}"
        )
    say()
    say("* real runs can do it; the others run in one process so far (atoll.experiment), or as they say")
    if late := [row["recipe"] for row in told["recipes"] if not row["not_yet"] and row["deadlines"]]:
        say(f"! longer than the default deadlines (consensus.timeout, run.train_max; --json says how much): "
            f"{', '.join(late)}")  # fmt: skip
    best = told["recommended"]
    written = ", ".join(f'{k} = "{v}"' if isinstance(v, str) else f"{k} = {v}" for k, v in best["settings"].items())
    say(f"recommended: {written}")
    say(f"  {best['reason']}")
