"""Reachability of a run: what a joiner tries, why it fails, when to give up; and which members a pause waits for.

The command line and the peer of a user's loop report through it alike.

Not responsible for: dialing (runtime/driver.py), the reasons of failed dials (runtime/network/dialer.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.base.errors import NetworkError
from atoll.base.ids import PeerId, Seconds, one_line
from atoll.peer import operator_commands
from atoll.peer.governance.settings_change import settings_after
from atoll.policy.plan import QuorumAvailability, QuorumRule, quorum
from atoll.runtime.event_log import NO_ANSWER
from atoll.runtime.network.dialer import NO_LISTENER
from atoll.runtime.storage.stored_history import is_run_of_loops

JOIN_S = 60.0  # without a reply until then, the ticket's addresses are not reachable from here
REFUSED_S = 10.0  # the same while each address refuses: no process listens there
NAMED_MAX = 6  # names of missing members in one line
NAMED_CHARACTERS_MAX = 24  # characters per name there
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


def why_paused(host: Any, may_recover: bool, has_authority: bool) -> str | None:
    """Why the members cannot agree now, for people; None if enough voters are here.

    `may_recover`: this peer can start over without them; `has_authority`: some peer can.
    """
    machine = host.machine
    there = operator_commands.turnout(machine, host.clock.now())
    recover = "atoll recover" if may_recover else "atoll recover in the founder's folder" if has_authority else ""
    loops = is_run_of_loops(machine.settings.learning)
    text = paused_text(there, host.progress.name_of, machine.settings.round.quorum, recover, loops)
    if text is None:
        return None
    body = machine.history.head_body
    others = [m.peer for m in body.members if m.peer != host.me]
    if there.anew or not others or any(operator_commands.was_linked(machine, peer) for peer in others):
        return text
    rounds = settings_after(machine.settings, body).rounds
    return unanswered_text(body.trained, rounds, recover if may_recover else "", loops)


def unanswered_text(trained: int, rounds: int, recover: str, loops: bool = False) -> str:
    """What a member reads that came back and has had no link with another one yet. `loops`: see `paused_text`."""
    of = f" of {rounds}" if rounds else ""
    back = (
        "start its program again, or to run `atoll up --stay` in its folder if the run is over there"
        if loops
        else "run `atoll up --stay` in its folder"
    )
    text = (
        f"{NO_ANSWER}: the run may be over, or paused until members are back; the last agreed round here is "
        f"{trained}{of}; atoll status and atoll export work here without them; to go on, ask another member to "
        f"{back}; this peer keeps trying"
    )
    return text + (f"; if what they had is gone for good: {recover}" if recover else "")


def paused_text(
    turnout: QuorumAvailability,
    name_of: Callable[[PeerId], str],
    rule: QuorumRule,
    recover: str,
    loops: bool = False,
) -> str | None:
    """Why no agreement is possible and what helps, for one member; None if a quorum is here.

    `loops`: members train in programs of their own, which `atoll up` cannot start.
    """
    if turnout.here >= turnout.needed:
        return None
    names, lacking = [name_of(peer) for peer in turnout.absent], turnout.needed - turnout.here
    text = f"paused: {turnout.here} of {len(turnout.voters)} voters are here, {turnout.needed} are needed"
    if len(names) >= lacking:
        some = f"{lacking} of " if lacking < len(names) else ""
        is_one = lacking == len(names) == 1
        where = "its folder" if is_one else "their folders"
        are = "is" if lacking == 1 else "are"
        back = f"atoll up in {where}, with --stay if the run is over there"
        if loops:
            program = "its program" if is_one else "their programs"
            back = f"start {program} again, or atoll up --stay in {where} if the run is over there"
        text += f"; it goes on once {some}{_listed(names, NAMED_MAX)} {are} back ({back})"
    if anew := [name_of(peer) for peer in turnout.anew]:
        what = "signs with a new key" if len(anew) == 1 else "sign with new keys"
        text += f"; {_listed(anew, NAMED_MAX // 2)} {what}, which only a vertex can take in"
    text += f"; if what they had is gone for good: {recover}" if recover else ""
    spare = next(n for n in range(2, 5) if quorum(n, rule) < n)
    alone = 1 < len(turnout.voters) == turnout.needed
    return text + (f"; with {spare} members one may be away" if alone else "")


def _listed(names: Sequence[str], most: int) -> str:
    """The first `most` names, shortened so that the text around them fits."""
    more = len(names) - most
    return ", ".join(one_line(name, NAMED_CHARACTERS_MAX) for name in names[:most]) + (
        f" and {more} others" if more > 0 else ""
    )
