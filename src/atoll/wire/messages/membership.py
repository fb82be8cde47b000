"""Membership messages: heartbeats, member reports, refusals, greeting."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Message
from atoll.wire.messages.statements import SignedStatement
from atoll.wire.ticket import REDEMPTION_BYTES

RefusalCode = Literal["E-JOIN-01", "E-JOIN-02", "E-JOIN-03", "E-JOIN-04", "E-JOIN-05", "E-JOIN-06"]


class Ping(Message, frozen=True, tag="Ping"):
    """Heartbeat and clock request. The reply returns `sent_s` unchanged."""

    sent_s: Seconds  # sender's local clock
    head: int  # round of the sender's newest vertex


class PingReply(Message, frozen=True, tag="PingReply"):
    """Reply to a Ping."""

    sent_s: Seconds
    clock_s: Seconds  # run time at the replying peer
    head: int


class ReportMessage(Message, frozen=True, tag="ReportMessage"):
    """A signed report for the next vertex, forwarded once to every member."""

    statement: SignedStatement


class JoinRefused(Message, frozen=True, tag="JoinRefused"):
    """Refusal of a join or of a reader without a ticket. The receiver has its own text for each code."""

    code: RefusalCode


class Hello(Message, frozen=True, tag="Hello"):
    """First message on a connection: the run, the sender's newest round, and its ticket for joining or reading.

    `head` is -2 to a peer that may not read. `admission`: ticket redemption; empty: no ticket.
    """

    run: Digest
    head: int
    admission: Annotated[bytes, msgspec.Meta(max_length=REDEMPTION_BYTES)] = b""
