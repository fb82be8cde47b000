"""Simulated workers for redundant training: each update names the samples behind it.

skipper     takes half of the steps that it reports
stale       sends an old update again
elsewhere   learns from samples that it was not assigned
slanderer   finds every update far from the expected one
praiser     finds every update near
mute        compares none
forger      reveals a secret that it did not draw by
Also refuser and joker of `replay_audits`, which show nothing, or something else.
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
from atoll.peer.tasks import (
    CompareRedundantUpdates,
    RedundantUpdate,
    RedundantUpdateDistances,
    TrainingResult,
    TrainRound,
)
from atoll.simulation.adversaries.byzantine import ByzantineMember, Twist
from atoll.simulation.worker import UpdateExhibit, VirtualWorker, WorkerKnobs
from atoll.verification.redundant_training.policy import APART_MOST, MILLION
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import RowContribution, UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment, SealedDraw

CHEATING = ("skipper", "stale", "elsewhere")  # kinds with updates from other samples than the assigned ones
HIDING = ("refuser", "joker")
LYING = ("slanderer", "praiser", "mute")


def forge(villain: ByzantineMember, send: Send) -> list[Effect]:
    if not isinstance(send.message, UpdateCommitmentMessage | RowContribution):
        return [send]
    signed = send.message.statement
    said = decode_statement(signed.body, signed.signer)
    if signed.signer != villain.peer.me or not isinstance(said, Commitment) or said.draws is None:
        return [send]
    if not said.draws.revealed:
        return [send]
    draws = SealedDraw(bytes(32), said.draws.sealed)
    return [replace(send, message=replace(send.message, statement=villain.notary.sign(replace(said, claim=draws))))]


FORGER: dict[str, Twist] = {"forger": forge}

_SHOWN = msgspec.msgpack.Decoder(UpdateExhibit)


class RedundancyVirtualWorker(VirtualWorker):
    kind = ""
    learned: dict[int, str]  # round → member that the samples belong to, if they are another member's

    def takes_s(self, work: Any) -> Seconds:
        if isinstance(work, CompareRedundantUpdates):
            return sum(row.steps for row in work.rows) * self.knobs.step_s
        return super().takes_s(work)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handlers |= {
            TrainRound: self._train_noted,
            CompareRedundantUpdates: self._compare,
        }

    def _train_noted(self, work: TrainRound) -> TrainingResult:
        self.learned[work.round] = self.kind if self.kind in CHEATING else str(work.shard)
        return self._train(work)

    def data_behind(self, round: int) -> str:
        return self.learned[round]

    def _compare(self, work: CompareRedundantUpdates) -> RedundantUpdateDistances:
        self.states.view(work.before)  # raises MissingStateError
        if self.kind == "mute":
            raise RuntimeError("this referee does not want to look")
        if self.kind in LYING:
            return RedundantUpdateDistances((0, 0) if self.kind == "praiser" else (MILLION, MILLION))
        guest, host = (self._learned(row) for row in work.rows)
        if not guest or not host:
            return RedundantUpdateDistances(
                (0 if guest else APART_MOST, 0 if host else APART_MOST), "another update"
            )
        if guest == host:
            return RedundantUpdateDistances((0, 0))
        wanted = str(work.shard)
        return RedundantUpdateDistances((0 if guest == wanted else MILLION, 0 if host == wanted else MILLION))

    def _learned(self, row: RedundantUpdate) -> str:
        """What its author learned from; empty if this is not the update that it committed to."""
        try:
            shown = _SHOWN.decode(self.blobs[row.blob])
        except msgspec.DecodeError:
            return ""
        return shown.learned if merkle_root(shown.parts) == row.root else ""


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, WorkerKnobs, Random], VirtualWorker]:
    """What stands behind each peer of a swarm with redundant training: honest trainers, except for these kinds."""

    def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
        island = RedundancyVirtualWorker(me, knobs, draw)
        island.kind, island.learned = kinds.get(me, ""), {}
        return island

    return make
