"""End of a run at one peer: it stays a moment for linked peers that lack the last round."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from atoll.base.ids import Seconds
from atoll.base.limits import MIB

if TYPE_CHECKING:
    from atoll.runtime.driver import Driver

LINGER_S = 6.0  # after the last round: three heartbeats, in which a laggard requests what it lacks
SERVED_S = 1.0  # without a transfer, after the laggards have the last vertex: they have the state as well


async def see_off(host: Driver, patience_s: Seconds = LINGER_S) -> None:
    """Stay while linked peers lack the last vertex, or load the state from here. Returns at once if none does."""
    if not _laggards(host):
        return
    now = asyncio.get_running_loop().time
    end, served, sent = now() + patience_s, now(), host.bytes_out
    while now() < end and (_laggards(host) or now() - served < SERVED_S):
        await asyncio.sleep(0.05)
        if host.bytes_out - sent > MIB // 16:
            served, sent = now(), host.bytes_out


def _laggards(host: Driver) -> bool:
    """True if a linked peer is not known to have the newest vertex."""
    history, ends = host.machine.history, host.machine.news.ends
    links = host.links.stats().items()
    return history is not None and any(link.up and ends.get(peer, -2) < history.head for peer, link in links)
