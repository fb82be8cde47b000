"""Pause or resume a run on the owner's request: sends the order and waits for the vertex.

The reply reports whether a vertex holds the order yet. A pause never interrupts the round under way.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from atoll.base.errors import RefusedError
from atoll.base.ids import Seconds, names_of
from atoll.base.units import history_round_text
from atoll.crypto.digest import digest

if TYPE_CHECKING:  # the driver imports torch, and this file is read by light verbs
    from atoll.runtime.driver import Driver


async def pause_run(host: Driver, paused: bool, wait_s: Seconds) -> dict[str, Any]:
    """Send the order to the members and wait up to `wait_s` for the vertex that holds it. Raises RefusedError."""
    verb = "pause" if paused else "resume"
    try:
        host.pause(paused)
    except ValueError as why:
        raise RefusedError("E-RUN-26", f"the run cannot {verb}: {why}", fix="atoll status") from None
    history = host.machine.history
    assert history is not None  # a member has one
    until = time.monotonic() + wait_s
    while not (agreed := (history.head_body.paused is not UNSET) == paused) and time.monotonic() < until:
        await host.next_round(until - time.monotonic())
    return {"agreed": agreed, "paused": paused, "round": history.head, "trained": history.head_body.trained}


def pause_told(host: Driver) -> str | None:
    """Text with the member that paused the run, the round, and the command to resume; None if not paused."""
    history = host.machine.history
    if history is None or history.head_body.paused is UNSET:
        return None
    names = names_of((m.peer, m.name) for m in history.head_body.members)
    owners = {*map(digest, history.authority.identities)}
    who = next((names[m.peer] for m in history.head_body.members if m.identity in owners), "a former member")
    where = "" if host.may_recover else " in the founder's folder"
    paused = history.head_body.paused
    since = history.bodies.get(paused)  # the newest are in memory
    after = history_round_text(paused, since.trained if since is not None else None)
    return (
        f"paused since {after} by {who}, the founder: members stay, "
        f"training stops; it goes on with `atoll resume`{where}"
    )
