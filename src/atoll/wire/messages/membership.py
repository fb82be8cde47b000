"""Messages about who is here: heartbeats, joins, farewells, suspicions."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Message
from atoll.wire.messages.statements import SignedStatement
from atoll.wire.ticket import REDEMPTION_BYTES

RefusalCode = Literal["E-JOIN-01", "E-JOIN-02", "E-JOIN-03", "E-JOIN-04", "E-JOIN-05", "E-JOIN-06"]


class Ping(Message, frozen=True, tag="Beat"):
    """Are you there, and what time is it? `sent_s` comes back unchanged."""

    sent_s: Seconds  # sender's local clock
    head: int  # the last round that the sender saw closed


class PingReply(Message, frozen=True, tag="BeatBack"):
    sent_s: Seconds
    clock_s: Seconds  # the answerer's run time
    head: int


class MemberReport(Message, frozen=True, tag="MemberReport"):
    """A Join, Ready, Leave, Suspect or Invite for the next vertex; passed on once to every member."""

    statement: SignedStatement


class JoinRefused(Message, frozen=True, tag="JoinRefused"):
    """Why a join, or a reader without a ticket, is turned down. The receiver has its own text for each code."""

    code: RefusalCode


class Hello(Message, frozen=True, tag="Hello"):
    """First words on a connection: the run, the sender's newest round, and the ticket that it joins or reads with.

    `head` is -2 to a peer that may not read. `admission` is a redemption; empty: no ticket.
    """

    run: Digest
    head: int
    admission: Annotated[bytes, msgspec.Meta(max_length=REDEMPTION_BYTES)] = b""
