"""`atoll blame`: rounds after which the loss rose, and the members that contributed to them.

    atoll blame RUN              offline, from the history: losses as each peer reported them of its own data,
                                 and the rounds with kept updates
    atoll blame RUN --metric validation
                                 the same for the losses that validators measured on held-out data
    atoll blame RUN --round R    measured: the round recomputed without each contributor, by the local peer if one
                                 is running, else from this folder alone

The first two report what vertices contain. The third is a measurement on kept updates (specs/blame.md). None of
them is proof against a member. Imports torch only for the third without a running peer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from atoll.base.errors import NetworkError, UsageError
from atoll.base.units import HISTORY_ROUND, history_round_text, spans_of, spans_text
from atoll.cli.display.progress import busy
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.runtime.storage.stored_history import kept_in, read_vertex

if TYPE_CHECKING:
    from atoll.wire.messages.vertex import VertexBody

CANNOT = "each peer reports the loss of its own data; the effect of one kept update: atoll blame --round"
MEASURED_BY_FEW = (
    "losses are those behind the verdict of the drawn validators; a mean of updates has no single culprit"
)
ROUNDS = "rounds are those of the history, as atoll checkpoint list shows them"
MEASURED = "a measurement of one round on the held-out data of the run: no proof of bad intent"


def blame(
    run: Dir = None,
    *,
    metric: Annotated[
        Literal["loss", "validation"],
        Parameter(help="The loss of each peer's own data, or that of held-out data, where validators measured it."),
    ] = "loss",
    round: Annotated[
        int | None,
        Parameter(
            help=f"Recompute this round without each contributor in turn, from kept updates: {HISTORY_ROUND}."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """List members with unusual losses and those that counted before a rise; with --round, the effect of each
    update.
    """
    folder = folder_of(run)
    if round is not None:
        return _without_each(folder, round, json)
    if metric == "validation":
        return _by_validation(folder, json)
    _by_loss(folder, json)


def _by_validation(folder: Path, json: bool) -> None:
    """Report from the history, offline, what validators measured."""
    from msgspec.structs import asdict

    from atoll.peer.settings import settings_of_run
    from atoll.verification.state_validation.policy import ValidationLedger
    from atoll.verification.state_validation.statistics import blame_by_validation, refusals
    from atoll.wire.codec import vertex_id

    with kept_in(folder) as kept:
        settings = settings_of_run(read_vertex(kept, folder, -1)[1])
        read = {r: read_vertex(kept, folder, r) for r in (-1, *kept.rounds)}
    if settings.validated is None:
        raise UsageError(
            "E-BLM-08",
            "this run has no validators: its model was not measured on held-out data",
            cause="run.validate_every was 0 when it was founded, and genesis fixes that",
            fix="atoll blame --metric loss; in the next run: atoll up --set run.validate_every=1",
        )
    bodies = {r: body for r, (_, body) in read.items()}
    trained = {r: body.trained for r, body in bodies.items()}
    ids = {r: vertex_id(vertex.body) for r, (vertex, _) in read.items()}
    peers, judged = blame_by_validation(bodies, ids, ValidationLedger(settings.validated, settings.round.quorum))
    refused = refusals(bodies.values())
    if json:
        told = {"peers": peers, "judged": judged, "refused": refused}
        say_json({"metric": "validation"} | {k: [asdict(one) for one in v] for k, v in told.items()})
        return
    say("  how the loss on held-out data changed when a peer's update was among those since, and when it was not")
    say(f"  {ROUNDS}")
    for p in peers:
        worst = f"{_signed(p.worst)} in round {p.worst_round}" if p.worst is not None else "-"
        say(f"  {p.name:<16} {p.rounds:>6} times  worst {worst:<24}  {_signed(p.rise)} / {_signed(p.rise_without)}")
    for j in judged:
        since = f" ({_signed(j.by)} after updates of {', '.join(j.counted)})" if j.by is not None else ""
        right = f", right {', '.join(f'{one:.1%}' for one in j.accuracy)}" if j.accuracy else ""
        where = history_round_text(j.round, trained.get(j.round))
        say(f"  {where}: {j.opinion:<4}  {', '.join(map(_loss, j.losses))}{right}{since}")
    for r in refused:
        back, left = history_round_text(r.back_to, trained.get(r.back_to)), ", ".join(map(str, r.refused))
        say(f"  history round {r.round}: back to {back}; rounds {left} are left")
    say(f"  {MEASURED_BY_FEW}" if judged else "  no validator has reported yet: atoll status")


def _by_loss(folder: Path, json: bool) -> None:
    """Report from the history, offline, what members reported."""
    from msgspec.structs import asdict

    from atoll.features.attribution.statistics import blame_by_loss
    from atoll.verification.state_validation.statistics import refusals

    with kept_in(folder) as kept:
        trained = dict[int, int]()

        def bodies() -> Iterator[VertexBody]:
            for r in kept.rounds:
                body = read_vertex(kept, folder, r)[1]
                trained[r] = body.trained
                yield body

        (peers, jumps), refused = blame_by_loss(bodies()), refusals(bodies())
        updates = list(kept.updates)
    if not peers:
        raise UsageError(
            "E-BLM-01",
            f"no update was counted yet in {folder}",
            cause="the run is still assembling members, or this folder has not caught up",
            fix="atoll status",
        )
    if json:
        found = [asdict(p) for p in peers]
        told = {"jumps": [asdict(j) for j in jumps], "refused": [asdict(r) for r in refused], "updates": updates}
        say_json({"metric": "loss", "peers": found} | told | {"cannot_tell": CANNOT})
        return
    say("  loss above the others' in the same rounds; how theirs changed after it counted, and after it did not")
    say(f"  {ROUNDS}")
    for p in peers:
        worst = f"{_signed(p.worst)} in round {p.worst_round}" if p.worst is not None else "-"
        change = f"{_signed(p.rise)} / {_signed(p.rise_without)}"
        say(f"  {p.name:<16} {p.rounds:>6} rounds  {_signed(p.excess):>9}  worst {worst:<24}  {change}")
    for j in jumps:
        where = history_round_text(j.round, trained.get(j.round))
        say(f"  {where}: loss rose by {j.by:.4f} after updates of {', '.join(j.counted)}")
    names = {p.peer: p.name for p in peers}
    for r in refused:
        rounds, who = ", ".join(map(str, r.refused)), ", ".join(names.get(p, p) for p in r.contributors)
        back = history_round_text(r.back_to, trained.get(r.back_to))
        say(f"  history round {r.round}: the model was bad, back to {back}; in rounds {rounds} counted {who}")
    say(f"  {CANNOT}")
    if updates:
        spans = spans_text(spans_of(updates))
        say(f"  updates are kept here of history rounds {spans}: atoll blame --round {updates[-1]}")
    else:
        say("  no updates are kept here: write keep.updates into run.toml and start this peer again")


def _without_each(folder: Path, round: int, json: bool) -> None:
    """Have the local peer recompute the round without each contributor; if none is running, do it here."""
    from atoll.runtime.control.socket import send_request

    try:
        told = send_request(folder, "blame", round=round)
    except NetworkError as why:
        if why.code != "E-DOOR-01" or not (folder / "kept.sqlite").exists():
            raise
        with busy("recomputing the round without each contributor"):
            told = _replayed_here(folder, round)
    if json:
        say_json(told | {"cannot_tell": MEASURED})
        return
    where = history_round_text(round, told["trained"])
    say(f"  {where}: loss on held-out data {_loss(told['before'])} before it, {_loss(told['loss'])} after it")
    for p in told["peers"]:
        change = p["why"] or f"{_loss(p['loss'])}  ({_signed(p['change'])})"
        say(f"  {'!' if p['notable'] else ' '} without {p['name']:<16}  {change}")
    for row in told["gone"]:
        say(f"  gone: part {row['part']} of the update of {row['name']}")
    say(f"  {_made_again(told)}; {MEASURED}")
    if not any(p["notable"] for p in told["peers"]):
        say("  no member stands out")


def _replayed_here(folder: Path, round: int) -> dict[str, Any]:
    """The same from this folder alone; imports torch."""
    import asyncio

    from atoll.runtime.offline_attribution import blame_offline

    return asyncio.run(blame_offline(folder, round))


def _made_again(told: dict[str, Any]) -> str:
    """Agreement between the recomputed state and the agreed one, for people."""
    if told["exact"]:
        return "recomputed, it is exactly the agreed state"
    if parts := told["parts_left_out"]:
        return f"recomputed without parts {', '.join(map(str, parts))}, which are missing here"
    if (topology := told["summed_on_the_way"]) != "":
        return f"recomputed it is not bit for bit the same, since rows were summed on the way ({topology})"
    return "recomputed it differs from the agreed state: read this with care"


def _loss(value: float | None) -> str:
    return f"{value:.4f}" if value is not None else "not finite"


def _signed(value: float | None) -> str:
    return f"{value:+.4f}" if value is not None else "-"
