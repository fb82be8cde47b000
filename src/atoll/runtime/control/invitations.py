"""Invitations on the operator's request: issues, lists and revokes tickets by agreement.

Invariants:
- The reply reports whether a vertex holds the invitation yet.
- Only the issuer has the text of a ticket.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.base.errors import RefusedError, UsageError
from atoll.base.limits import TICKET_MOST_S
from atoll.wire.messages.statements import TicketInvite
from atoll.wire.ticket import issue

if TYPE_CHECKING:  # the driver imports torch, and light commands import this file
    from atoll.runtime.training_peer import TrainingPeer

AGREE_S = 30.0  # wait for the next vertex, which holds an invitation; later, the reply says that it is pending
INVITED_MOST_S = TICKET_MOST_S - 86400.0  # longest ticket; vertices are dated slightly behind the owner's clock


class InviteArguments(msgspec.Struct, frozen=True):
    """Terms of a new ticket, or the ticket to revoke."""

    uses: int = 1
    role: str = "trainer"
    lasts_s: float = 86400.0
    addresses: tuple[str, ...] = ()  # multiaddrs of the ticket; empty: those of the peer
    revoke: str = ""  # a ticket, or the start of its id
    wait_s: float = AGREE_S


async def invite(host: TrainingPeer, given: InviteArguments) -> dict[str, Any]:
    """Issue or revoke a ticket. `agreed` in the reply: a vertex holds it already."""
    history = host.machine.history
    mine = None if history is None else next((m for m in history.head_body.members if m.peer == host.me), None)
    if mine is None or not mine.votes:
        raise RefusedError(
            "E-TKT-09",
            "only voting members can invite",
            cause="this peer is still joining, takes part as an observer, or has not earned its vote yet",
            fix="atoll invite in the folder of a member, or try again in a minute: atoll status",
        )
    revoked = given.revoke
    statement, text = _revocation(host, revoked) if revoked else _invitation(host, given)
    host.invite(statement)
    agreed, until = False, time.monotonic() + given.wait_s
    while not agreed and time.monotonic() < until:
        history = host.machine.history
        tickets = history.head_body.tickets if history else ()
        held = {t.ticket for t in tickets if t.uses_left or not revoked}
        agreed = (statement.ticket in held) != bool(revoked)
        if not agreed:
            await host.next_round(until - time.monotonic())
    return {
        "ticket": text,
        "id": statement.ticket.hex(),
        "role": statement.role,
        "uses": statement.uses,
        "expires_wall_s": int(statement.expires_s),
        "addresses": list(host.addresses),
        "revoked": bool(revoked),
        "agreed": agreed,
    }


def _invitation(host: TrainingPeer, given: InviteArguments) -> tuple[TicketInvite, str]:
    uses, role, lasts_s = given.uses, given.role, given.lasts_s
    if role not in ("trainer", "observer"):
        raise UsageError("E-ARG-03", f"a ticket admits no {role!r}", fix="--role trainer, or --role observer")
    if lasts_s > INVITED_MOST_S:
        raise UsageError(
            "E-ARG-06",
            f"--ttl {lasts_s / 86400:.0f}d is too long: members refuse tickets valid for more than a year",
            fix="atoll invite --ttl 365d",
        )
    expires_s = int(host.clock.now() + lasts_s)
    addresses = given.addresses or tuple(host.addresses)
    ticket = issue(
        host.identity, genesis=host.run_id, role=role, expires_wall_s=expires_s, addresses=addresses, uses=uses
    )
    return TicketInvite(ticket.id, ticket.key, role, uses, float(expires_s)), ticket.text


def list_invitations(host: TrainingPeer) -> list[dict[str, Any]]:
    """Agreed tickets with uses left. Only the issuer has the text of a ticket."""
    history = host.machine.history
    if history is None:
        return []
    tickets = [t for t in history.head_body.tickets if t.uses_left]
    return [
        {"id": t.ticket.hex(), "role": t.role, "uses_left": t.uses_left, "expires_wall_s": int(t.expires_s)}
        for t in tickets
    ]


def _revocation(host: TrainingPeer, text: str) -> tuple[TicketInvite, str]:
    """`text` is a ticket or the start of its id."""
    from atoll.wire.ticket import parse

    wanted = parse(text).id.hex() if ":" in text else text.lower()
    assert host.machine.history is not None
    tickets = host.machine.history.head_body.tickets
    found = [t for t in tickets if t.uses_left and t.ticket.hex().startswith(wanted)]
    if len(wanted) < 8 or len(found) != 1:
        raise RefusedError(
            "E-TKT-11",
            f"{len(found)} tickets of this run are called {wanted!r}",
            cause="it was used up, has expired or was revoked before" if not found else "the id is too short",
            fix="atoll invite --list",
        )
    t = found[0]
    return TicketInvite(t.ticket, t.key, t.role, 0, t.expires_s), ""
