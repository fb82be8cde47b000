"""Rollback of a run to an earlier state on the owner's request: checks the state and waits for the vertex.

Invariants: an order is signed only if its state is on this disk, byte for byte, so that one peer can serve it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from atoll.base.errors import PeerFault, RefusedError, RunFailedError, UsageError
from atoll.base.ids import PeerId, Seconds, one_line
from atoll.base.units import history_round_text
from atoll.peer.governance.orders import RollbackGoal, amend_of, goal_of
from atoll.peer.governance.settings_change import in_words, numbers_in
from atoll.peer.tasks import CheckStateStored
from atoll.verification.state_validation.statistics import refusals
from atoll.wire.codec import decode_body, decode_vertex, vertex_id

if TYPE_CHECKING:  # the driver imports torch, and this file is read by light verbs
    from atoll.runtime.storage.store import PeerStore
    from atoll.runtime.training_peer import TrainingPeer

SHOWN = 12  # rounds named in a refusal


async def roll_back(host: TrainingPeer, round: int, wait_s: Seconds, without: Sequence[str] = ()) -> dict[str, Any]:
    """Order the members to go on from this round's state without the named ones, and wait for the vertex.

    Raises AtollError.
    """
    goal = await asyncio.to_thread(_goal, host.store, round)
    history = host.machine.history
    if goal is None or history is None or round > history.head:
        newest = history_round_text(history.head, history.head_body.trained) if history is not None else "genesis"
        raise UsageError(
            "E-CHK-01",
            f"{history_round_text(round, None)} is not in {host.folder}",
            cause=f"the newest here is {newest}",
            fix="atoll checkpoint list",
        )
    names = tuple(sorted({_member(host, name) for name in without}))
    await _demand(host, goal, wait_s)
    said_after, tuned = history.head, history.head_body.tuned
    try:
        host.go_back(goal, names)
    except ValueError as why:
        raise RefusedError("E-CHK-11", f"the run cannot go back: {why}", fix="atoll status") from None
    bodies = [history.bodies[r] for r in sorted(history.bodies)]
    refused = any(round in one.refused for one in refusals(bodies))
    until = time.monotonic() + wait_s
    while (closed := _carried(host, said_after, goal)) is None and time.monotonic() < until:
        await host.next_round(until - time.monotonic())
    return {
        "agreed": closed is not None,
        "round": closed,
        "back_to": goal.round,
        "state": goal.state.hex(),
        "trained": goal.trained,
        "refused": refused,  # validators rolled back behind it before
        "without": list(names),
        "numbers": goal.tuned != tuned,  # numbers changed since are rolled back, too
        "undone": in_words(numbers_in(tuned.to)) if goal.tuned != tuned and tuned is not UNSET else "",
    }


def _member(host: TrainingPeer, named: str) -> PeerId:
    """Id of a member, by its name or the start of its id."""
    assert host.machine.history is not None
    members = [m for m in host.machine.history.head_body.members if m.standing != "expelled"]
    found = [m.peer for m in members if m.name == named] or [m.peer for m in members if m.peer.startswith(named)]
    if len(found) == 1 and found[0] != host.me:
        return found[0]
    what = f"{one_line(named)!r} names {len(found)} members"
    raise UsageError(
        "E-CHK-14",
        "this peer cannot send itself away" if found == [host.me] else what,
        cause="atoll peers lists their names and ids",
        fix="--without with a name that one member has, or the beginning of its id",
    )


async def _demand(host: TrainingPeer, goal: RollbackGoal, wait_s: Seconds) -> None:
    """The state is here and is what was agreed on; out of pieces, if it lies in some. Errors name what is."""
    was_here, where = host.store.has_blob(goal.state), history_round_text(goal.round, goal.trained)
    if await host.island.run(CheckStateStored(goal.state)):
        return
    if host.lies_in_pieces(goal.state):
        if await host.restore_state(goal.state, wait_s) and await host.island.run(CheckStateStored(goal.state)):
            return
        raise RunFailedError(
            "E-CHK-13",
            f"the state of {where} is coded in pieces and could not be rebuilt yet",
            cause="too few of their holders are here, or it takes longer than this command waits",
            fix=f"atoll checkpoint rollback {goal.round} again in a minute; atoll peers says who is here",
        )
    here = await asyncio.to_thread(rounds_here, host.store)
    nearest = max((r for r in here if r <= goal.round), default=here[0] if here else None)
    instead = f"atoll checkpoint rollback {nearest}" if nearest is not None else "atoll checkpoint list"
    if was_here:
        raise RunFailedError(
            "E-CHK-05",
            f"the state of {where} is not what was agreed on; it was set aside",
            cause="this disk lost or changed bytes",
            fix=instead,
        )
    names = ", ".join(map(str, here[-SHOWN:]))
    kept = "a peer keeps the newest states and some older ones (keep.newest, keep.every_rounds)"
    raise UsageError(
        "E-CHK-03",
        f"the state of {where} is not in {host.folder}",
        cause=f"{kept}; " + (f"here are those of history rounds {names}" if here else "none is here"),
        fix=instead,
    )


def _goal(store: PeerStore, round: int) -> RollbackGoal | None:
    data = store.value("genesis" if round == -1 else f"vertex/{round}")
    if data is None:
        return None
    try:
        raw = decode_vertex(data).body
        return goal_of(decode_body(raw), vertex_id(raw))
    except PeerFault as fault:
        raise RunFailedError(
            "E-CHK-02",
            f"the vertex of {history_round_text(round, None)} cannot be read: {fault.what}",
            cause="this disk or a copy of this folder lost or changed bytes",
            fix=f"atoll verify {store.folder}",
        ) from fault


def rounds_here(store: PeerStore) -> list[int]:
    """Rounds with a readable vertex and their state in this folder, oldest first."""
    genesis, here = store.value("genesis"), list[int]()
    for data in ([genesis] if genesis else []) + store.vertices():
        with suppress(PeerFault):
            body = decode_body(decode_vertex(data).body)
            here += [body.round] if store.has_blob(body.state) else []
    return here


def _carried(host: TrainingPeer, after: int, goal: RollbackGoal) -> int | None:
    """The round after `after` that rolled back to `goal`; None if there is none yet."""
    history = host.machine.history
    assert history is not None
    for round in range(after + 1, min(host.machine.at, history.head) + 1):
        body = history.bodies.get(round)
        back = amend_of(body) if body is not None else None
        if back is not None and back.back_to == goal.id:
            return round
    return None
