"""Ticket check by members: whether a joining peer's redemption holds for one of the agreed tickets of a run.

`policy/membership.py` (`admissible`) calls it at the proposer and at every voter.
Not responsible for: the bytes of tickets and redemptions (`wire/ticket.py`), tickets that resume a session
(`crypto/session_tickets.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.wire.messages.statements import JoinRequest
from atoll.wire.messages.vertex import IssuedTicketRecord, Member
from atoll.wire.ticket import redeemed_ticket, redemption_holds

NO_TICKET = "its ticket is used up, revoked or unknown here"
TICKET_EXPIRED = "its ticket has expired"


def ticket_problem(
    admission: bytes, joiner: PeerId, tickets: Sequence[IssuedTicketRecord], run: Digest, wall_s: Seconds | None
) -> str | None:
    """None if this redemption holds for one of these agreed tickets, else why not. `wall_s` as for `admissible`."""
    ticket = ticket_of(admission, tickets)
    if ticket is None or ticket.uses_left < 1:
        return NO_TICKET
    if wall_s is not None and ticket.expires_s < wall_s:
        return TICKET_EXPIRED
    if not redemption_holds(admission, ticket.key, run, joiner):
        return "its proof of holding the ticket does not fit"
    return None


def ticket_of(admission: bytes, tickets: Sequence[IssuedTicketRecord]) -> IssuedTicketRecord | None:
    return next((t for t in tickets if t.ticket == redeemed_ticket(admission)), None)


def needs_ticket(before: Member | None, join: JoinRequest) -> bool:
    """Whether a join needs a ticket: strangers do, and members that want another role than before."""
    return before is None or ("trainer" if before.role == "apprentice" else before.role) != join.role
