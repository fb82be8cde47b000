"""What members that exchange in pairs send, say and agree on, as bytes: rows, and the roll of what each holds.

Promises: one way to write a roll, so that equal rolls have one name; bytes of strangers are checked before anything
is made of them. Never looks into a state: names only. Specification: specs/pairs.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.base.limits import STATE_KEPT_ROUNDS

MAGIC = b"atoll/roll/1\0"
LENGTH_BYTES = 8  # of the length of a row's update, before it
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Buffer = bytes | bytearray | memoryview


class Entry(msgspec.Struct, frozen=True, array_like=True):
    peer: PeerId
    state: Digest  # blob id of what it holds
    since: Count  # `round` of the roll that first named it


class Roll(msgspec.Struct, frozen=True, array_like=True):
    """How far the run has come, and what each member holds; the blob that a vertex's `state` names."""

    round: Count
    steps: Count
    samples: Count
    tokens: Count
    states: tuple[Entry, ...]  # peers rise

    def of(self, peer: PeerId) -> Digest | None:
        return next((entry.state for entry in self.states if entry.peer == peer), None)

    def newly_of(self, peer: PeerId) -> Digest | None:
        """What it made in the very round that left this roll."""
        return next((e.state for e in self.states if e.peer == peer and e.since == self.round), None)

    def next(
        self, made: Mapping[PeerId, Digest], trainers: Sequence[PeerId], *, steps: int, samples: int, tokens: int
    ) -> Roll:
        """The roll after a round in which these members made these states, and which adds so much."""
        round, held = self.round + 1, {entry.peer: entry for entry in self.states}
        held |= {peer: Entry(peer, state, round) for peer, state in made.items()}
        kept = set(trainers) | {e.peer for e in held.values() if round - e.since <= STATE_KEPT_ROUNDS}
        states = tuple(held[peer] for peer in sorted(held.keys() & kept))
        return Roll(round, self.steps + steps, self.samples + samples, self.tokens + tokens, states)


def is_roll(data: Buffer) -> bool:
    """Else it is the state that a run begins with."""
    return bytes(data[: len(MAGIC)]) == MAGIC


def roll_bytes(roll: Roll) -> bytes:
    return MAGIC + msgspec.msgpack.encode(roll)


_ROLL = msgspec.msgpack.Decoder(Roll)


def roll_from_bytes(data: Buffer) -> Roll:
    """PeerFault unless these are the canonical bytes of a roll."""
    try:
        roll = _ROLL.decode(bytes(data[len(MAGIC) :]))
    except UNREADABLE as why:
        raise PeerFault("", f"not a roll of what members hold: {why}") from None
    peers = [entry.peer for entry in roll.states]
    if roll_bytes(roll) != bytes(data) or peers != sorted(set(peers)):
        raise PeerFault("", "the roll is not in canonical form")
    if any(len(entry.state) != DIGEST_BYTES for entry in roll.states):
        raise PeerFault("", "the roll names a state by no digest")
    return roll


def state_named(answer: Buffer) -> Digest:
    """The state that a member says it made. PeerFault if that is no name."""
    if len(answer) != DIGEST_BYTES:
        raise PeerFault("", f"a state is named by {DIGEST_BYTES} bytes, not {len(answer)}")
    return Digest(bytes(answer))


def row_bytes(wire: Buffer, anchor: Buffer) -> bytes:
    """A member's update as its codec encodes it, and its anchor in fp32."""
    return b"".join((len(wire).to_bytes(LENGTH_BYTES, "little"), wire, anchor))


def row_parts(row: Buffer, anchor_bytes: int) -> tuple[memoryview, memoryview]:
    """(update, anchor) of a row. PeerFault if it has not this length."""
    view = memoryview(row).cast("B")
    size = int.from_bytes(view[:LENGTH_BYTES], "little")
    if len(view) != LENGTH_BYTES + size + anchor_bytes:
        raise PeerFault("", f"a row of {len(view)} bytes is no update and {anchor_bytes} bytes of anchor")
    return view[LENGTH_BYTES : LENGTH_BYTES + size], view[LENGTH_BYTES + size :]
