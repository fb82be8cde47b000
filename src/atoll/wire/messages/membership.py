"""Messages about who is here: heartbeats, joins, farewells, suspicions."""

from __future__ import annotations

from atoll.base.ids import Digest, Seconds
from atoll.base.machine import Message
from atoll.wire.messages.statements import Signed


class Beat(Message, frozen=True):
    """Are you there, and what time is it? `sent_s` comes back unchanged."""

    sent_s: Seconds  # sender's local clock
    head: int  # the last round that the sender saw closed


class BeatBack(Message, frozen=True):
    sent_s: Seconds
    clock_s: Seconds  # the answerer's run time
    head: int


class MemberReport(Message, frozen=True):
    """A Join, Ready, Leave, Suspect or Invite for the next vertex; passed on once to every member."""

    statement: Signed


class JoinRefused(Message, frozen=True):
    """Why a join was turned down, with the stable error code that people can look up."""

    code: str
    what: str
    fix: str


class Hello(Message, frozen=True):
    """First words on a connection: which run, and how far I have seen it."""

    run: Digest
    head: int
