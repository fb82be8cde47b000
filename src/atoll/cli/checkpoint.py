"""`atoll checkpoint list, show, export`: agreed states of a run, from its vertices. Offline.

Reads a peer's folder as `atoll verify` does, without verification, while the peer runs or after it ended. Shows
which states are still in the folder: a peer keeps the newest ones. `export` writes one state elsewhere, complete
and checked against the agreed digest, or nothing. Never changes the folder; only `export --hf` imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter
from msgspec import UnsetType

from atoll.base.errors import PeerFault, UsageError
from atoll.base.ids import Digest, PeerId, names_of
from atoll.base.units import (
    HISTORY_ROUND,
    bytes_text,
    counted_text,
    history_round_text,
    seconds_text,
    spans_of,
    spans_text,
)
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.cli.stored.run import agreed_state, write_model
from atoll.cli.stored_vertices import validated
from atoll.runtime.storage.stored_history import kept_in, read_vertex

if TYPE_CHECKING:
    from atoll.peer.verify.chain import StoredHistory
    from atoll.wire.messages.vertex import Member

LISTED = 17  # newest rounds shown, 20 lines with the three above them; --all and --json have every one

checkpoint = cyclopts.App(
    name="checkpoint",
    help="The agreed states of a run: list, show, export, pull from members, or go back to one.",
    help_format="plaintext",
)


@checkpoint.command(name="list")
def listing(
    run: Dir = None,
    *,
    all: Annotated[bool, Parameter(negative="", help=f"Every round, not only the newest {LISTED}.")] = False,
    json: AsJson = False,
) -> None:
    """List the agreed rounds, one line each: rounds trained, time, loss, contributors, state, and size if it is
    here.

    Rounds that only admit members have a number as well: `trained` is the count of `atoll up` and `atoll status`,
    while commands take the number. `counted`: members whose updates counted, of those that train. The first line
    lists the rounds that the run can go back to from here; a mark shows where it went back.
    """
    from atoll.features.archive.machine import placed_rounds

    folder = folder_of(run)
    with kept_in(folder) as kept:
        rounds = [-1, *kept.rounds]
        begin = _row(kept, folder, -1)["time_s"]
        rows = [_row_with_findings(kept, folder, r) for r in (rounds if all or json else rounds[-LISTED:])]
        placed = placed_rounds(kept.pieces)
        blobs = {path.name for path in (folder / "blobs").glob("*")}
        here = [] if json else [r for r in rounds if read_vertex(kept, folder, r)[1].state.hex() in blobs]
    if json:
        say_json([row | {"in_pieces": row["round"] in placed} for row in rows] if placed else rows)
        return
    if placed:
        say(f"  lie in pieces at the members: history rounds {spans_text(spans_of(placed))}")
    say(f"  the run can go back from here to history rounds {spans_text(spans_of(here)) or 'none'}")
    say("  round: its number in the history, for commands; trained: rounds that trained until then, as in status")
    say(f"  {'round':>6}  {'trained':>7}  {'after':>12}  {'loss':>8}  {'counted':>9}  {'state':<8}  {'size':>9}")
    for row in rows:
        size = bytes_text(row["size_bytes"]) if row["size_bytes"] is not None else "-"
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else "-"
        after = seconds_text(row["time_s"] - begin)
        counted = (
            f"{len(row['contributors'])} of {row['trainers']}" if row["contributors"] or row["missing"] else "-"
        )
        back = f"  back to history round {row['back_to']}" if row["back_to"] is not None else ""
        back += "".join(f"  + {who}, {late_text(late)}" for who, late in row["late"].items())
        back += f"  | another branch begins here: epoch {row['branch']['epoch']}" if row["branch"] else ""
        back += f"  validated: {validated_text(row)}" if "validated" in row else ""
        at = f"  {row['round']:>6}  {row['trained']:>7}  {after:>12}"
        say(f"{at}  {loss:>8}  {counted:>9}  {row['state'][:8]}  {size:>9}{back}")


@checkpoint.command
def show(
    round: Annotated[int, Parameter(help=f"The round to show: {HISTORY_ROUND}; -1 is genesis.")],
    /,
    run: Dir = None,
    *,
    json: AsJson = False,
) -> None:
    """Show everything that a round's vertex contains: ids, time, loss, contributors and their shares, absent
    members, state.
    """
    folder = folder_of(run)
    with kept_in(folder) as kept:
        _check_round(kept, folder, round)
        row = _row_with_findings(kept, folder, round)
        begin_s = _row(kept, folder, -1)["time_s"]
    if json:
        say_json(row)
        return
    after = seconds_text(row["time_s"] - begin_s)
    said = "genesis" if round == -1 else f"history round {round}, agreed {after} after genesis"
    say(f"{said}, {counted_text(row['trained'], 'round')} trained")
    for name, words in _lines(row):
        say(f"  {name:<10} {words}")


def _lines(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Lines of a row as (label, text), without what has its usual value."""
    from atoll.policy.data.positions import positions_text

    if row["contributors"]:
        loss = "not reported" if row["loss"] is None else f"{row['loss']:.4f}"
        yield "loss", f"{loss} over {row['steps']:,} steps and {row['samples']:,} samples"
    if row["contributors"] or row["missing"]:
        missing = f"; missing: {', '.join(row['missing'])}" if row["missing"] else ""
        yield "counted", (", ".join(row["contributors"]) or "nobody") + missing
    elif row["round"] >= 0:
        yield "counted", "none: members only assembled"
    if row["parts_missing"]:
        yield "unanswered", f"{row['parts_missing']} parts, which are in no member's result"
    if row["weighed"]:
        yield "weighed", ", ".join(f"{who} {weight:.4f}" for who, weight in row["weighed"].items())
    for who, late in row["late"].items():
        yield "late", f"{who}, {late_text(late)}"
    votes = f"{row['votes']} of {row['voters']} voters" if row["votes"] else "no votes: signed by its founder"
    failed = f", after {row['attempt']} attempts that failed" if row["attempt"] else ""
    epoch = f", epoch {row['epoch']}" if row["epoch"] else ""
    yield "agreed", f"{votes}, proposed by {row['proposer']}{failed}{epoch}"
    if row["back_to"] is not None:
        yield "went back", f"to {history_round_text(row['back_to'], row['trained'])}"
    if row["branch"]:
        branch = row["branch"]
        yield "branch", f"another one begins here: {branch['vertex']}, epoch {branch['epoch']}, by {branch['by']}"
    if "validated" in row:
        yield "validated", validated_text(row)
    if row["data"]:
        yield "data", positions_text(row["data"])
    yield "state", row["state"]
    size = row["size_bytes"]
    yield "size", f"{bytes_text(size)}, in this folder" if size is not None else "not in this folder any more"
    yield "vertex", row["vertex"]
    if row["round"] >= 0:
        yield "parent", row["parent"]


@checkpoint.command
def export(
    round: Annotated[int, Parameter(help=f"The state to write: {HISTORY_ROUND}; -1 is genesis.")],
    to: Annotated[
        Path, Parameter(help="The file (safetensors) or, with --hf, the folder to write; it must not exist yet.")
    ],
    /,
    run: Dir = None,
    *,
    hf: Annotated[
        bool,
        Parameter(negative="", help="A model folder as Hugging Face has it: tensors by name, config, model card."),
    ] = False,
    state: Annotated[
        bool,
        Parameter(negative="", help="The shared state instead: anchor, outer momentum and counters, for Atoll."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Write the agreed model of a round by tensor name, checked byte for byte. It must still be in this folder."""
    from atoll.runtime.storage.atomic_files import map_path, write_durably

    folder = folder_of(run)
    with kept_in(folder) as kept:
        _check_round(kept, folder, round)
        body, genesis = read_vertex(kept, folder, round)[1], read_vertex(kept, folder, -1)[1]
        here = [r for r in kept.rounds if _blob(folder, read_vertex(kept, folder, r)[1].state).exists()]
    if not _blob(folder, body.state).exists():
        raise UsageError(
            "E-CHK-03",
            f"the state of {history_round_text(round, body.trained)} is not in {folder} any more",
            cause="a peer keeps the newest states; "
            + (f"here: history rounds {spans_text(spans_of(here))}" if here else "none is here"),
            fix=f"atoll checkpoint list {folder}; members may have it, whole or in pieces: "
            f"atoll checkpoint pull --dir {folder} --round {round} --to MODEL",
        )
    if to.exists():
        raise UsageError(
            "E-CHK-04", f"{to} exists already", cause="nothing is overwritten", fix="name another file"
        )
    source = agreed_state(folder, body)
    if hf:
        from atoll.cli.hub import what_is, write_model_folder

        with kept_in(folder) as kept:
            files = write_model_folder(kept, folder, round, map_path(source), to)
        size = sum(file.stat().st_size for file in files)
        what = what_is(files)
    elif state:
        write_durably(to, (map_path(source),), exported=True)
        size, what = to.stat().st_size, "state"
    else:
        size, what = write_model(source, genesis, to)[1], "model"
    if json:
        say_json(
            {
                "round": round,
                "trained": body.trained,
                "state": body.state.hex(),
                "file": str(to),
                "size_bytes": size,
            }
        )
        return
    where = history_round_text(round, body.trained)
    say(f"  the {what} of {where} is in {to}: {body.state.hex()[:8]}, {bytes_text(size)}")


def late_text(late: dict[str, int]) -> str:
    """Text about the work that a member did apart from the run and a vertex included."""
    return f"{late['steps']} steps apart since history round {late['since']}"


def validated_text(row: dict[str, Any]) -> str:
    """Loss and accuracy of a state on held-out data, as its validators measured them."""
    found = row["validated"].items()
    return ", ".join(f"{of} {value:.1%}" if "accuracy" in of else f"{of} {value:.4f}" for of, value in found)


def _blob(folder: Path, name: Digest) -> Path:
    return folder / "blobs" / name.hex()


def _check_round(kept: StoredHistory, folder: Path, round: int) -> None:
    if round != -1 and round not in set(kept.rounds):
        newest = max(kept.rounds, default=-1)
        newest_trained = read_vertex(kept, folder, newest)[1].trained
        raise UsageError(
            "E-CHK-01",
            f"{history_round_text(round, None)} is not in {folder}",
            cause=f"the newest here is {history_round_text(newest, newest_trained)}",
            fix=f"atoll checkpoint list {folder}",
        )


def _row_with_findings(kept: StoredHistory, folder: Path, round: int) -> dict[str, Any]:
    """`_row`, and what later vertices report of the state on held-out data, if validators measured it."""
    found = validated(kept, folder, round)
    return _row(kept, folder, round) | ({"validated": found} if found else {})


def _row(kept: StoredHistory, folder: Path, round: int) -> dict[str, Any]:
    """Content of a round's vertex, unverified. Times are seconds of run time."""
    from atoll.peer.governance.orders import amend_of
    from atoll.policy.contributions import late_of
    from atoll.policy.data.positions import positions_told
    from atoll.wire.codec import vertex_id

    vertex, body = read_vertex(kept, folder, round)
    planned = body  # the members that the round was planned with: those of the vertex before, if that is here
    if round - 1 == -1 or round - 1 in kept.rounds:
        planned = read_vertex(kept, folder, round - 1)[1]
    names = names_of((m.peer, m.name) for m in (*planned.members, *body.members))
    voters = {m.peer for m in planned.members if m.votes}
    counted = {signed.signer for signed in body.commits}
    back = amend_of(body)

    weighing = body.weighing
    weighed = () if isinstance(weighing, UnsetType) else zip(weighing.peers, weighing.shares, strict=True)

    def named(peers: set[PeerId]) -> list[str]:
        return sorted(names.get(p, p) for p in peers)

    return {
        "round": body.round,
        "vertex": vertex_id(vertex.body).hex(),
        "parent": body.parent.hex(),
        "time_s": body.time_s,
        "trained": body.trained,
        "epoch": body.epoch,
        "attempt": body.attempt,
        "proposer": names.get(body.proposer, body.proposer),
        "loss": body.metrics.reported_loss,
        "steps": body.metrics.steps,
        "samples": body.metrics.samples,
        "voters": len(voters),
        "trainers": len(could_train(planned.members, counted)),
        "contributors": named(counted),
        # a round that only assembles members has no absentees
        "missing": named(voters - counted) if body.parts else [],
        "weighed": {names.get(p, p): weight for p, weight in weighed},  # only where distances weigh rows
        "late": {names.get(p, p): {"since": late.since, "steps": late.steps} for p, late in late_of(body).items()},
        "parts_missing": sum(part is None for part in body.parts),
        "votes": len(vertex.certificate.votes) if vertex.certificate is not None else 0,
        "back_to": back.round if back is not None else None,
        "branch": _branch(kept, round),  # branch that begins at this round
        "data": positions_told(body),
        "state": body.state.hex(),
        "size_bytes": _size_of(_blob(folder, body.state)),
    }


def could_train(members: Iterable[Member], counted: set[PeerId]) -> set[PeerId]:
    """Peers with a possible update in the round: voters, clients beside them, and every contributor."""
    return {m.peer for m in members if m.may_train} | counted


def _branch(kept: StoredHistory, round: int) -> dict[str, Any]:
    """Another vertex that closed this round, as this folder keeps it, unverified; empty if there is none."""
    from atoll.wire.codec import decode_body, decode_vertex, vertex_id

    data = kept.branch(round)
    try:
        vertex = decode_vertex(data) if data is not None else None
        return (
            {}
            if vertex is None
            else {
                "vertex": vertex_id(vertex.body).hex(),
                "epoch": decode_body(vertex.body).epoch,
                "by": "recovery" if vertex.certificate is None else "votes",
            }
        )
    except PeerFault:
        return {}  # reported by `atoll verify`


def _size_of(blob: Path) -> int | None:
    """Size in bytes; None if the blob is not in this folder (any more)."""
    try:
        return blob.stat().st_size
    except FileNotFoundError:
        return None
