"""A virtual peer of a run whose members exchange in pairs: a state of its own, and the roll that all agree on.

A member's state is a few bytes: who it is, the state before, and the digests of the rows that it was made of. Rolls
are the real ones. So who goes on from anything but what it held, or names what it does not hold, is found. Of whom
no roll names a state each life may hold another's: what one of them made counts in the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.keys.digest import digest
from atoll.node.jobs import Adopt, Advance, Advanced, Encode, Encoded, OthersStates, Restore, Restored
from atoll.protocol.reduce.work import Combine, Combined
from atoll.sim.island import BATCH, Island
from atoll.wire.pairs import Roll, is_roll, roll_bytes, roll_from_bytes, state_named


class OwnState(msgspec.Struct, frozen=True, array_like=True):
    """Of one member."""

    of: PeerId
    before: Digest
    rows: tuple[tuple[PeerId, Digest], ...]


_OWN_STATE = msgspec.msgpack.Decoder(OwnState)


@dataclass
class PairedIsland(Island):
    """`own` follows what is durable: a restart asks for it by the roll."""

    own: Digest | None = None
    owns: dict[Digest, set[Digest]] = field(default_factory=dict)  # all that any life held at a head; to check by

    def crash(self) -> None:
        super().crash()
        self.own = None

    def do(self, work: Any) -> Any:
        match work:
            case Encode():
                row = self._part(Encode(work.round, (1,)), 0)
                self.encoded[work.round] = (row.digest,) * work.parts
                return Encoded((row,) * work.parts)
            case Combine():
                return self._made_of_pair(work)
            case Advance():
                return self._rolled(work)
            case Adopt():
                return self._follow(work)
            case Restore():
                return self._held(work)
            case _:
                return super().do(work)

    def roll(self, name: Digest) -> Roll:
        data = self.blobs[name]
        return roll_from_bytes(data) if is_roll(data) else Roll(0, 0, 0, 0, ())

    def _made_of_pair(self, work: Combine) -> Combined:
        done = super()._combine(work)
        if self.me not in done.counted:
            return Combined(None, done.counted, (), "my own row is not among those of my part")
        assert self.own is not None
        rows = tuple((row.peer, row.payload.digest) for row in work.rows)
        name = self._put(msgspec.msgpack.encode(OwnState(self.me, self.own, rows)))
        return Combined(Payload(digest(name), len(name), name), done.counted, ())

    def _rolled(self, work: Advance) -> Advanced:
        answered = zip(work.states_of, work.parts, strict=True)
        made = {peer: state_named(part.data) for peer, part in answered if part is not None}
        samples = work.steps * BATCH * work.shards
        after = self.roll(work.before).next(made, work.trainers, steps=work.steps, samples=samples, tokens=0)
        return Advanced(self._put(roll_bytes(after)))

    def _follow(self, work: Adopt) -> None:
        mine = None if work.state == self.head else self.roll(work.state).newly_of(self.me)
        counts = mine is not None and mine in self.blobs  # also made by a life before
        if counts and mine is not None:
            self._check_made_of(mine)
            self.own = mine
        assert self.own is not None and self.own in self.blobs, "it goes on from what it does not hold"
        self._holds(work.state, self.own)
        super().do(msgspec.structs.replace(work, counted=(True,) if counts else None))

    def _holds(self, head: Digest, own: Digest) -> None:
        self.own = own
        self.needed["own"] = (own,)
        self.owns.setdefault(head, set()).add(own)

    def _check_made_of(self, mine: Digest) -> None:
        state = _OWN_STATE.decode(self.blobs[mine])
        assert self.head is not None
        if state.of != self.me or state.before not in self.owns[self.head] or len(state.rows) > 2:
            self.miscounted.append(f"{self.me} goes on from what was not made of its own: {state}")

    def _held(self, work: Restore) -> Restored | OthersStates | None:
        if work.state not in self.blobs:
            return None
        roll, found = self.roll(work.state), work.state
        if is_roll(self.blobs[work.state]):
            others = [e for e in shuffled(work.state, self.me, roll.states) if e.peer != self.me]
            others.sort(key=lambda entry: -entry.since)
            here = [s for s in (roll.of(self.me), *(e.state for e in others)) if s is not None and s in self.blobs]
            if not here:
                return OthersStates(tuple((entry.peer, entry.state) for entry in others))
            found = here[0]
        self._holds(work.state, found)
        return super().do(work)
