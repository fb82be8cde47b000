"""Reachability of a run for a peer that does not know it yet: what is tried, why it fails, and when to give up.

The command line and the peer of a user's loop report through it alike.

Not responsible for: dialing (runtime/driver.py), the reasons of failed dials (runtime/network/dialer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from atoll.base.errors import NetworkError
from atoll.base.ids import Seconds
from atoll.runtime.network.dialer import NO_LISTENER

JOIN_S = 60.0  # without a reply until then, the ticket's addresses are not reachable from here
REFUSED_S = 10.0  # the same while each address refuses: no process listens there
STILL_TRYING_S = 8.0  # between two lines of a peer that no member has answered yet


class JoinProgress:
    """Progress of `host` towards its run; `notice` is called with lines for people, `routine` with the usual."""

    def __init__(
        self, host: Any, notice: Callable[[str], None], routine: Callable[[str], None] | None = None
    ) -> None:
        self._host, self._notice, self._routine = host, notice, routine or notice
        self._reasons: dict[str, str] = {}  # address -> newest reason why it cannot be reached
        self._refused: set[str] = set()  # addresses at which no process listens, by the newest dial
        self._cause = ""  # of the newest reason

    def entry(self, entry: Mapping[str, Any]) -> None:
        """Report each new reason of a failed dial."""
        if entry["fact"] != "Unreachable":
            return
        address, why, cause = entry["address"], entry["why"], entry["cause"]
        if self._reasons.get(address) != why:
            state = "no connection yet" if self._is_known else "not joined yet"
            self._notice(f"{state}: {why}" + (f" ({cause})" if cause else ""))
        self._reasons[address], self._cause = why, cause
        (self._refused.add if entry["code"] == NO_LISTENER else self._refused.discard)(address)

    async def failure(self) -> NetworkError | None:
        """Wait until the run is known, then None; or the error once no member has answered in time."""
        if self._is_known:
            return None
        self._routine(f"trying {', '.join(address for address, _ in self._host.bootstrap)} …")
        clock = asyncio.get_running_loop().time
        began = clock()
        while (left_s := began + self._patience_s - clock()) > 0:
            await asyncio.sleep(min(STILL_TRYING_S, left_s))
            if self._is_known:
                return None
            if clock() - began < self._patience_s:
                self._notice(f"still trying: no member has answered for {clock() - began:.0f} s")
        patience_s = self._patience_s
        reasons, cause = "; ".join(self._reasons.values()), self._cause
        if self._host.machine.linked:
            reasons = cause = ""  # they are of earlier dials
        return NetworkError(
            "E-NET-01",
            f"no member of this run answered within {patience_s:.0f} s" + (f": {reasons}" if reasons else ""),
            cause=cause or "a member's process is there, but does not answer",
            fix="start the peer that made the ticket (atoll up in its folder, with --stay if its run is over), or "
            "ask another member for one (atoll invite); if it runs, let it announce an address that you can reach: "
            "atoll up --announce /ip4/…/tcp/…",
        )

    @property
    def _patience_s(self) -> Seconds:
        addresses = {address for address, _ in self._host.bootstrap} | self._reasons.keys()
        is_gone = addresses and addresses == self._refused and not self._host.machine.linked
        return REFUSED_S if is_gone else JOIN_S

    @property
    def _is_known(self) -> bool:
        return self._host.machine.history is not None
