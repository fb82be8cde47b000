"""Simulated workers for loss scoring: each update names the data behind it, and losses fall accordingly.

copycat     sends an update from another member's data, so its own samples gain no more than others do
noise       sends an update without effect
slanderer   scores every update as hollow
praiser     scores every update as useful
mute        scores none
squatter    claims another member's update, and serves none of its bytes
Also refuser and joker of `replay_audits`, which show nothing, or something else.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.base.draw import draw_below
from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send
from atoll.crypto.digest import merkle_root
from atoll.peer.tasks import ScoreResult, ScoreUpdate
from atoll.simulation.adversaries.byzantine import ByzantineMember, Twist
from atoll.simulation.worker import VALIDATION_STEPS, UpdateExhibit, VirtualWorker, WorkerKnobs
from atoll.verification.update_review import UpdateReviewMachine
from atoll.wire.messages.audits import ExhibitResponse
from atoll.wire.messages.history import ChunkResponse, ManifestResponse

ERROR = 20_000  # millionths of a nat: the standard error of every score
OTHERS = 200_000  # loss decrease on any sample by an honest update of another member
HONEST_ERRORS = 5  # own samples gain up to this many standard errors more, and at least one


def squat(villain: ByzantineMember, send: Send) -> list[Effect]:
    match send.message:
        case ExhibitResponse(update=True) as told if scoring := villain.peer.verifiers.find(UpdateReviewMachine):
            seen = [
                row.blob for turn in scoring.turns.values() for row in turn.rows.values() if row.blob is not None
            ]
            return [replace(send, message=replace(told, blob=seen[-1] if seen else None))]
        case ManifestResponse() | ChunkResponse():
            return []
        case _:
            return [send]


SQUATTER: dict[str, Twist] = {"squatter": squat}
SHIRKING = ("copycat", "noise", "refuser", "joker")  # kinds with hollow updates, or updates that are never shown
LYING = ("slanderer", "praiser", "mute")


_SHOWN = msgspec.msgpack.Decoder(UpdateExhibit)


class LossScoringVirtualWorker(VirtualWorker):
    kind = ""

    def takes_s(self, work: Any) -> Seconds:
        return VALIDATION_STEPS * self.knobs.step_s if isinstance(work, ScoreUpdate) else super().takes_s(work)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handlers |= {ScoreUpdate: self._score}

    def data_behind(self, round: int) -> str:
        return self.kind

    def _score(self, work: ScoreUpdate) -> ScoreResult:
        self.states.view(work.before)  # raises MissingStateError
        if self.kind == "mute":
            raise RuntimeError("this scorer does not want to look")
        if self.kind in LYING:
            return ScoreResult((1, 2, 3) if self.kind == "slanderer" else (9 * OTHERS, 0, 0))
        try:
            shown = _SHOWN.decode(self.blobs[work.blob])
        except msgspec.DecodeError:
            return ScoreResult((), "this is no update")
        if merkle_root(shown.parts) != work.root:
            return ScoreResult((), "another update than it committed to")
        own = OTHERS + ERROR * (1 + draw_below(work.drawn, "luck", HONEST_ERRORS))
        if shown.learned == "noise":
            own = -OTHERS
        elif shown.learned == "copycat":
            own = OTHERS + draw_below(work.drawn, "luck", 4 * ERROR) - 2 * ERROR
        return ScoreResult((own, OTHERS, ERROR))


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, WorkerKnobs, Random], VirtualWorker]:
    """Workers of a swarm with loss scoring: honest trainers, except for these kinds."""

    def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
        island = LossScoringVirtualWorker(me, knobs, draw)
        island.kind = kinds.get(me, "")
        return island

    return make
