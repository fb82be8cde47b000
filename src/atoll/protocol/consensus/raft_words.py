"""What Raft's voters say to each other, what they tell their hosts, and what they must remember.

Values only; `raft` decides. The messages are its own and not on the wire yet.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import PeerId
from atoll.base.machine import Fact, Message

# ---- what voters say to each other ---------------------------------------------------------------------------


class Entry(msgspec.Struct, frozen=True, array_like=True):
    term: int
    command: bytes  # empty: the mark that a leader sets when its term begins (section 6.4)


class RequestVote(Message, frozen=True):
    """Would you elect me in this term (`pre`), or: elect me. `transfer`: the leader itself asked me to (3.10)."""

    term: int
    last_index: int
    last_term: int
    pre: bool
    transfer: bool = False


class Ballot(Message, frozen=True):
    term: int  # the term asked for if granted, else my own
    pre: bool
    granted: bool


class Append(Message, frozen=True):
    term: int
    previous: int  # index of the entry before `entries`
    previous_term: int
    entries: tuple[Entry, ...]
    commit: int


class Appended(Message, frozen=True):
    term: int
    fits: bool
    upto: int  # fits: my log equals yours up to here; else: try from here


class Install(Message, frozen=True):
    """My log no longer reaches back to where yours ends: take this instead (section 5.2)."""

    term: int
    index: int
    index_term: int
    marker: bytes


class TakeOver(Message, frozen=True):
    """Stand for election now, without asking first (section 3.10)."""

    term: int


# ---- facts ---------------------------------------------------------------------------------------------------


class Elected(Fact, frozen=True, kw_only=True):
    phase = "raft"
    term: int


class SteppedDown(Fact, frozen=True, kw_only=True):
    phase = "raft"
    term: int
    why: str


class Committed(Fact, frozen=True, kw_only=True):
    """The command at this index is final. A host acts on it as on a Send: once the Keeps before it are durable."""

    phase = "raft"
    index: int
    term: int
    command: bytes


class Restored(Fact, frozen=True, kw_only=True):
    """All up to this index is final and summed up by the marker: go on from there."""

    phase = "raft"
    index: int
    marker: bytes


# ---- what is durable -----------------------------------------------------------------------------------------


class Meta(msgspec.Struct, frozen=True, array_like=True):
    term: int = 0
    voted_for: PeerId = PeerId("")


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    index: int = 0
    term: int = 0
    marker: bytes = b""
