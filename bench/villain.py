"""The test build of `atoll`: all its verbs, and for `up` and `join` one more option, `--villain KIND`.

    python bench/villain.py join TICKET --dir FOLDER --villain miscounter [--honest-rounds 4] …

With its own keys, in perfect form otherwise, and after so many honest rounds of training:

poison        its update is ten times the way back of what it learnt
huge          its update is a million everywhere
idle          it learns, and its update says that it did not
stale         its update is what it learnt in the round before
miscounter    as owner and as witness of parts it answers with other bytes than the rows make
two_tongued   it answers rightly to every second member, and with other bytes to the rest
mute          it combines its parts and never says a word of it
miscomparer   where distances weigh rows, it signs other products than the rows of its parts have
equivocator   it votes, proposes and commits one way to every second member, and another way to the rest

It says so itself, with facts `Confessed`. Never part of the package, nor reached from it by a variable or an
extra: who installs Atoll installs no villain.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Event, Payload, Send
from atoll.cli.main import main as atoll
from atoll.host import driver, island, mine
from atoll.keys.digest import digest
from atoll.node.peer import Peer
from atoll.sim.villains import equivocate
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import Answer, Comparison, RoundMessage
from atoll.wire.messages.statements import Answered, Compared

BACK = 10.0  # how far, in lengths of the honest update

Poison = Callable[[Tensor, Tensor], Tensor]  # (what it learnt, what it learnt in the round before) -> what it says
POISONS: dict[str, Poison] = {
    "poison": lambda step_N, before_N: -BACK * step_N,
    "huge": lambda step_N, before_N: torch.full_like(step_N, 1e6),
    "idle": lambda step_N, before_N: torch.zeros_like(step_N),
    "stale": lambda step_N, before_N: before_N,
}
KINDS = (*POISONS, "miscounter", "two_tongued", "mute", "miscomparer", "equivocator")


class Liar(Peer):
    """An honest peer behind a mouth that twists what it says."""

    kind: str
    after: int
    lied = -1  # the round of its last lie

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        twisted: list[Effect] = []
        for effect in super().handle(event, now):
            twisted += self._told(effect) if isinstance(effect, Send) else [effect]
        return twisted

    @property
    def peer(self) -> Peer:
        """As the simulator's villains have it."""
        return self

    @property
    def others(self) -> list[PeerId]:
        return [m.peer for m in self.history.head_body.members if m.peer != self.me] if self.history else []

    def _told(self, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, RoundMessage) or self.history is None:
            return [send]
        if self.history.head_body.trained < self.after:
            return [send]
        if self.kind == "equivocator":
            told = equivocate(self, send)
        else:
            told = self._miscompared(send) if self.kind == "miscomparer" else self._misanswered(send)
        if told != [send] and self.lied < message.round:
            self.lied = message.round
            confess(message.round)
        return told

    def _miscompared(self, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, Comparison) or not isinstance(message.products, bytes):
            return [send]
        compared = decode_statement(message.statement.body, message.statement.signer)
        if message.statement.signer != self.me or not isinstance(compared, Compared):
            return [send]
        values = struct.unpack(f"<{len(message.products) // 8}d", message.products)
        lie = struct.pack(f"<{len(values)}d", *(-value for value in values))
        signed = self.notary.sign(replace(compared, products=digest(lie)))
        return [replace(send, message=replace(message, statement=signed, products=lie))]

    def _misanswered(self, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, Answer) or message.statement.signer != self.me:
            return [send]
        if self.kind == "mute":
            return []
        if self.kind == "two_tongued" and send.to in self.others and self.others.index(send.to) % 2:
            return [send]
        answered = decode_statement(message.statement.body, self.me)
        assert isinstance(answered, Answered)
        # a witness shows no bytes: it signs for what the liar in charge would have sent
        name, data = digest(answered.digest), None
        if send.payload is not None:
            data = _other(send.payload.data)
            name = digest(data)
        signed = self.notary.sign(replace(answered, digest=name))
        payload = Payload(name, len(data), data) if data is not None else None
        return [replace(send, message=replace(message, statement=signed), payload=payload)]


def confess(round: int) -> None:
    print(json.dumps({"fact": "Confessed", "round": round}), flush=True)


def _other(data: Any) -> bytes:
    """As many bytes, a few of them different: an answer that decodes, to other values."""
    lie = bytearray(memoryview(data).cast("B"))
    for at in range(len(lie) // 2, len(lie), max(1, len(lie) // 64)):
        lie[at] ^= 0x15
    return bytes(lie)


def poisoned(poison: Poison, honest: Callable[..., Any]) -> Callable[..., Any]:
    """`encode_update` of what this poison makes of what was learnt; before the first round that was nothing."""
    before_N: Tensor | None = None

    def encode(anchor_F: Tensor, x_N: Tensor, *more: Any) -> Any:
        nonlocal before_N
        step_N = x_N - anchor_F
        same = before_N is not None and before_N.shape == step_N.shape  # another fragment was learnt before
        told_N = poison(step_N, before_N if same else torch.zeros_like(step_N))
        before_N = step_N
        return honest(anchor_F, anchor_F + told_N, *more)

    return encode


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # all other words are atoll's own
    parser.add_argument("--villain", choices=KINDS)
    parser.add_argument("--honest-rounds", type=int, default=0)
    lie, words = parser.parse_known_args()
    if lie.villain in POISONS:
        poison_after(lie.honest_rounds, POISONS[lie.villain])
    elif lie.villain is not None:
        Liar.kind, Liar.after = lie.villain, lie.honest_rounds
        driver.Peer = Liar
    atoll(words)


def poison_after(rounds: int, poison: Poison) -> None:
    honest, lie = island.Island._encode, poisoned(poison, mine.encode_update)

    def _encode(self: island.Island, work: Any) -> Any:
        if self.head is None or self.head.round < rounds:
            return honest(self, work)
        confess(work.round)
        mine.encode_update = lie
        return honest(self, work)

    island.Island._encode = _encode


if __name__ == "__main__":
    main()
