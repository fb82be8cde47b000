"""An island whose members exchange in pairs: its own state, made of two rows, and the roll of what everybody holds.

    row        my update and my anchor, for my partner
    combined   the rows of my pair become my own next state, durable before its name is said
    rolled     all names of a round become the next roll, which is what members agree on
    held       what I go on from: my own state, else another member's, by the roll

Promises: what is named is on disk; of what I made in a round only what the vertex names becomes mine. Never asks
whether another's state follows from anything: members trust each other. Specification: specs/pairs.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from atoll.base.draw import shuffled
from atoll.base.errors import PeerFault, RunFailedError
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Payload
from atoll.host.arithmetic import Namer, named
from atoll.host.learning import Learning
from atoll.host.shelf import Shelf
from atoll.host.store import Store
from atoll.keys.digest import Buffer
from atoll.learn.combine import gather
from atoll.learn.data import position_after
from atoll.learn.outer import Moment, OuterState, move
from atoll.learn.state import SharedState
from atoll.learn.update import Common, part_bounds, part_codec
from atoll.node.jobs import Advance, OthersStates
from atoll.protocol.reduce.work import Combine, Combined, Row
from atoll.wire.pairs import Roll, is_roll, roll_bytes, roll_from_bytes, row_bytes, row_parts, state_named


@dataclass(frozen=True)
class Held:
    """What to go on from. `mine`: what only I know beside it fits."""

    state: SharedState
    mine: bool


class Paired:
    """`combined`, `rolled`, `held` and `after` belong to the arithmetic thread."""

    def __init__(self, me: PeerId, store: Store, shelf: Shelf) -> None:
        self.me, self._store, self._shelf = me, store, shelf
        self.own: Digest | None = None  # the name of the state that I hold

    def row(self, wire: Buffer, head: SharedState) -> bytes:
        return row_bytes(wire, head.anchor_F.numpy().astype("<f4", copy=False).tobytes())

    def combined(self, work: Combine, learning: Learning, common: Common, name: Namer) -> Combined:
        """My own next state, of the rows of my pair; its counts stay those of the roll that it was made from."""
        recipe, layout, head = learning.recipe, learning.layout, common.state
        floats, inside = layout.floats, layout.parameters
        up = part_codec(recipe.coding.up, common, part_bounds(floats, (1,)), 0)
        wires: list[tuple[int, memoryview]] = []
        anchors: list[Tensor] = []
        counted: list[PeerId] = []
        faulty: list[PeerId] = []
        for row in work.rows:
            try:
                wire, anchor_F = _opened(row, floats)
                if not bool(up.decode(wire, floats).isfinite().all()):
                    raise PeerFault(row.peer, "its update holds values that are not finite")
            except PeerFault:
                faulty.append(row.peer)
                continue
            wires.append((1, wire))
            anchors.append(anchor_F)
            counted.append(row.peer)
        mean_F = gather(wires, floats, up).mean_N
        if self.me not in counted or mean_F is None:
            return Combined(None, tuple(counted), tuple(faulty), "my own row is not among those of my part")
        moment = Moment(head.steps, mean_anchor_P=torch.stack(anchors).mean(0)[:inside])
        anchor_P, after = move(
            recipe.outer, OuterState(head.momentum_P), head.anchor_F[:inside], mean_F[:inside], moment
        )
        buffers = head.anchor_F[inside:] - mean_F[inside:]
        state = replace(head, anchor_F=torch.cat([anchor_P, buffers]), momentum_P=after.momentum_P)
        if not bool(state.anchor_F.isfinite().all()):
            raise RunFailedError("E-RUN-23", "my pair's updates lead to values that are not finite")
        made = self._shelf.put(state, layout)
        return Combined(named(made, name), tuple(counted), tuple(faulty))

    def rolled(self, work: Advance, learning: Learning) -> Digest:
        """The roll after a round with these answers."""
        before, recipe = self._roll(work.before, learning), learning.recipe
        answered = zip(work.states_of, work.parts, strict=True)
        made = {peer: state_named(_bytes(part)) for peer, part in answered if part is not None}
        after = before.next(
            made,
            work.trainers,
            steps=work.steps,
            samples=position_after(before.samples, work.shards, work.steps * recipe.batch) - before.samples,
            tokens=work.samples * recipe.seq_len,
        )
        return self._shelf.put_other(roll_bytes(after))

    def after(self, state: Digest, head: SharedState, learning: Learning) -> tuple[SharedState, bool]:
        """What I hold after a round that left this roll, and whether it is what I made in it; if not, the tensors
        are those of `head`."""
        roll = self._roll(state, learning)
        mine = None if roll.round == head.round else roll.newly_of(self.me)  # in a round without parts it stays
        made = None if mine is None else self._found(mine, learning)  # also by a life before
        return (_at(head, roll), False) if made is None else (_at(made, roll), True)

    def held(self, state: Digest, learning: Learning) -> Held | OthersStates | None:
        """By this roll. None: it is not here itself; `OthersStates`: nothing that it names is."""
        data = self._store.read_blob(state)
        if data is None:
            return None
        if not is_roll(data):  # the run has not trained yet
            first = self._found(state, learning)
            return None if first is None else Held(first, mine=True)
        roll = self._roll(state, learning)
        mine = roll.of(self.me)
        if mine is not None and (found := self._found(mine, learning)) is not None:
            return Held(_at(found, roll), mine=True)
        others = [entry for entry in shuffled(state, self.me, roll.states) if entry.peer != self.me]
        others.sort(key=lambda entry: -entry.since)
        for entry in others:
            if self._store.has_blob(entry.state) and (found := self._found(entry.state, learning)) is not None:
                return Held(_at(found, roll), mine=False)
        return OthersStates(tuple((entry.peer, entry.state) for entry in others))

    def _found(self, name: Digest, learning: Learning) -> SharedState | None:
        found = self._shelf.find(name, learning.layout)
        if found is not None:
            self.own = name
        return found

    def _roll(self, name: Digest, learning: Learning) -> Roll:
        """Of this name; an empty one where it is the state that the run begins with."""
        data = self._store.read_blob(name)
        if data is None:
            raise RunFailedError("E-RUN-02", "the agreed roll is not on this disk")
        if is_roll(data):
            return roll_from_bytes(data)
        first = self._shelf.find(name, learning.layout)
        assert first is not None
        return Roll(first.round, first.steps, first.samples, first.tokens, ())


def _at(state: SharedState, roll: Roll) -> SharedState:
    """The same model, as far in the run as the roll is."""
    return replace(state, round=roll.round, steps=roll.steps, samples=roll.samples, tokens=roll.tokens)


def _opened(row: Row, floats: int) -> tuple[memoryview, Tensor]:
    """(update, anchor (F,)) of a row. PeerFault if it is none."""
    wire, anchor = row_parts(_bytes(row.payload), 4 * floats)
    anchor_F = torch.from_numpy(np.frombuffer(anchor, dtype="<f4").astype(np.float32))
    if not bool(anchor_F.isfinite().all()):
        raise PeerFault(row.peer, "its anchor holds values that are not finite")
    return wire, anchor_F


def _bytes(payload: Payload) -> memoryview:
    return memoryview(payload.data).cast("B")
