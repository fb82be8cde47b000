"""Islands that take each other's samples: what each learned from is a word in what it shows.

skipper     takes half of the steps that it says
stale       sends an old update again
elsewhere   learns from other samples than it was given, whosever they are
slanderer   finds everybody far from what it was to send
praiser     finds everybody near
mute        compares nobody
forger      reveals a secret that is not the one that it drew by
Beside them: refuser and joker of `audits`, who show nothing, or something else.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send
from atoll.crypto.digest import merkle_root
from atoll.peer.tasks import Apart, Exhibited, ShowUpdate, TakeAgain, Train, TwinRow
from atoll.simulation.adversaries.byzantine import Twist, Villain
from atoll.simulation.loss_scoring import Shown
from atoll.simulation.worker import Island, IslandKnobs
from atoll.verification.redundant_training.policy import APART_MOST, MILLION
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import Committed, Contribution
from atoll.wire.messages.statements import Commit, Draws

CHEATING = ("skipper", "stale", "elsewhere")  # whose updates are none of the samples that they were given
HIDING = ("refuser", "joker")
LYING = ("slanderer", "praiser", "mute")


def forge(villain: Villain, send: Send) -> list[Effect]:
    if not isinstance(send.message, Committed | Contribution):
        return [send]
    signed = send.message.statement
    said = decode_statement(signed.body, signed.signer)
    if signed.signer != villain.peer.me or not isinstance(said, Commit) or said.draws is None:
        return [send]
    if not said.draws.revealed:
        return [send]
    draws = Draws(bytes(32), said.draws.sealed)
    return [replace(send, message=replace(send.message, statement=villain.notary.sign(replace(said, claim=draws))))]


FORGER: dict[str, Twist] = {"forger": forge}

_SHOWN = msgspec.msgpack.Decoder(Shown)


class TwinIsland(Island):
    kind = ""
    learned: dict[int, str]  # by round: whose samples, if they are

    def takes_s(self, work: Any) -> Seconds:
        if isinstance(work, TakeAgain):
            return sum(row.steps for row in work.rows) * self.knobs.step_s
        return super().takes_s(work)

    def do(self, work: Any) -> Any:
        match work:
            case Train(round=round):
                self.learned[round] = self.kind if self.kind in CHEATING else str(work.shard)
                return super().do(work)
            case ShowUpdate(round=round):
                if round not in self.encoded:
                    raise RuntimeError(f"nothing is left of round {round}")
                return Exhibited(self._put(msgspec.msgpack.encode(Shown(self.encoded[round], self.learned[round]))))
            case TakeAgain():
                return self._compare(work)
            case _:
                return super().do(work)

    def _compare(self, work: TakeAgain) -> Apart:
        if work.before not in self.blobs:
            raise RuntimeError("the state that the round began with is not here")
        if self.kind == "mute":
            raise RuntimeError("this referee does not want to look")
        if self.kind in LYING:
            return Apart((0, 0) if self.kind == "praiser" else (MILLION, MILLION))
        guest, host = (self._learned(row) for row in work.rows)
        if not guest or not host:
            return Apart((0 if guest else APART_MOST, 0 if host else APART_MOST), "another update")
        if guest == host:
            return Apart((0, 0))
        wanted = str(work.shard)
        return Apart((0 if guest == wanted else MILLION, 0 if host == wanted else MILLION))

    def _learned(self, row: TwinRow) -> str:
        """What its author learned from; empty if this is not the update that it committed to."""
        try:
            shown = _SHOWN.decode(self.blobs[row.blob])
        except msgspec.DecodeError:
            return ""
        return shown.learned if merkle_root(shown.parts) == row.root else ""


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, IslandKnobs, Random], Island]:
    """What stands behind each peer of a swarm with twins: honest trainers, but for these."""

    def make(me: PeerId, knobs: IslandKnobs, draw: Random) -> Island:
        island = TwinIsland(me, knobs, draw)
        island.kind, island.learned = kinds.get(me, ""), {}
        return island

    return make
