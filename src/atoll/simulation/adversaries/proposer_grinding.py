"""Proposer grinding: colluding proposers try bodies until the vertex draws a friend as next proposer and audits
none.

Bodies differ in their time by a microsecond each, which no voter can object to. Everything else is honest, so a
member that stays proposer need not be convicted of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.peer.settings import RunSettings
from atoll.policy.plan import plan_round
from atoll.simulation.adversaries.byzantine import ByzantineMember, Twist
from atoll.verification.replay_audit.policy import drawn_segment
from atoll.wire.codec import encode, statement_in, vertex_id
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import VertexBody

TRIES = (
    # most bodies; a third of thirteen needs one in three for the next proposer, and one in 2.4 to avoid audits at
    # rate 0.2
    256
)
STEP_S = 1e-6


def keeper(friends: Collection[PeerId]) -> Twist:
    """Replace the body writer of the honest peer inside at its first message of a round."""

    def keep(villain: ByzantineMember, send: Send) -> list[Effect]:
        round = villain.peer.round
        if round is not None and "write" not in vars(round.proposal):
            vars(round.proposal)["write"] = _chosen(round.proposal.write, villain.peer.settings, friends)
        return [send]

    return keep


def _chosen(
    write: Callable[..., VertexBody], settings: RunSettings, friends: Collection[PeerId]
) -> Callable[..., VertexBody]:
    def chosen(*args: Any) -> VertexBody:
        body, best = write(*args), (False, -len(friends) - 1)
        found = body
        for tried in range(TRIES):
            other = replace(body, time_s=body.time_s + tried * STEP_S)
            worth = _worth(other, settings, friends)
            if worth > best:
                found, best = other, worth
            if best == (True, 0):
                break
        return found

    return chosen


def _worth(body: VertexBody, settings: RunSettings, friends: Collection[PeerId]) -> tuple[bool, int]:
    """(whether a friend proposes next, minus the number of audited friends)."""
    id = vertex_id(encode(body))
    claims = {signed.signer: statement_in(signed) for signed in body.commits if signed.signer in friends}
    audited = sum(
        isinstance(claim, Commitment) and drawn_segment(id, peer, claim.steps, settings.audited_share) is not None
        for peer, claim in claims.items()
    )
    return plan_round(id, body, settings.round).turns()[0] in friends, -audited
