"""End of a run at one peer: it stays a moment for peers that lack the last round.

After the last round it stays for linked peers only. A peer that came back after the end has few links yet.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.base.ids import Seconds
from atoll.base.limits import MIB

if TYPE_CHECKING:
    from atoll.runtime.driver import Driver

LINGER_S = 6.0  # after the last round: three heartbeats, in which a laggard requests what it lacks
SERVED_S = 1.0  # without a transfer, after the laggards have the last vertex: they have the state as well


async def see_off(host: Driver, until: Seconds = 0.0) -> None:
    """Stay while linked peers lack the last vertex, or load the state from here. Returns at once if none does.

    `until`: time of the event loop until which other members may come back for the end.
    """
    now = asyncio.get_running_loop().time
    await _serve_linked(host)
    while now() < until and _has_absent(host):
        await asyncio.sleep(0.05)
        await _serve_linked(host)


async def _serve_linked(host: Driver) -> None:
    """Stay until linked peers have the end, at most `LINGER_S` seconds."""
    if not _laggards(host):
        return
    now = asyncio.get_running_loop().time
    end, served, sent = now() + LINGER_S, now(), host.bytes_out
    while now() < end and (_laggards(host) or now() - served < SERVED_S):
        await asyncio.sleep(0.05)
        if host.bytes_out - sent > MIB // 16:
            served, sent = now(), host.bytes_out


def _laggards(host: Driver) -> bool:
    """True if a linked peer is not known to have the newest vertex."""
    history, ends = host.machine.history, host.machine.news.ends
    links = host.links.stats().items()
    return history is not None and any(link.up and ends.get(peer, -2) < history.head for peer, link in links)


def _has_absent(host: Driver) -> bool:
    """True if a member that may come back has not reported the newest vertex since this peer started."""
    history, ends = host.machine.history, host.machine.news.ends
    return history is not None and any(
        member.standing != "expelled" and member.peer != host.me and ends.get(member.peer, -2) < history.head
        for member in history.head_body.members
    )
