"""A referee's side of redundant training, with cases set up by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import RunTask, Send
from atoll.crypto.digest import digest
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import PinBlobs
from atoll.peer.verify.interface import VerifierContext
from atoll.verification.redundant_training.machine import RedundancyReview
from atoll.verification.redundant_training.policy import RedundancyCase
from atoll.verification.update_review import UpdateReviewMachine
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

ME = PeerId("me")
SETTINGS = RunSettings(twin_rate=0.5, reputation=True)


def state_of(round: int) -> Digest:
    return digest(b"state %d" % round)


class Referee:
    """Of every pair of round 1, in a run that continues without any update shown."""

    def __init__(self, *pairs: tuple[str, str]) -> None:
        self.names = [PeerId(name) for pair in pairs for name in pair]
        commit = Commitment(1, 0, digest(b"row"), 1, 20, 80, 2.0, 0.1, 80)
        made = (
            RedundancyCase(1, (PeerId(a), PeerId(b)), (commit, commit), (ME,), digest(a.encode())) for a, b in pairs
        )
        self.cases = {case.key: case for case in made}
        ledger = SimpleNamespace(cases=self.cases, settled=())
        recent = SimpleNamespace(ledgers=SimpleNamespace(get=lambda kind: ledger))
        self.history: Any = SimpleNamespace(head=-1, bodies=dict[int, VertexBody](), ids={})
        pool: Any = SimpleNamespace(recent=lambda: recent)
        self.room = UpdateReviewMachine(VerifierContext(ME, SETTINGS, self.history, pool), RedundancyReview())
        self.held: tuple[Digest, ...] = ()

    def goes_on(self, away: tuple[str, ...] = ()) -> set[PeerId]:
        """The peers it asks."""
        round = self.history.head + 1
        members = tuple(
            Member(p, b"key", (), "trainer", "away" if p in away else "member", 0, 0.1, p) for p in self.names
        )
        body = VertexBody(
            digest(b"run"), round, 0, digest(b"parent"), 1.0, ME, (), state_of(round), (), members, (), (), NUMBERS
        )
        self.history.head, self.history.bodies[round] = round, body
        self.history.head_body = replace(body)
        effects = self.room.on_vertex(body, 10.0 * round) if round >= 2 else []
        for effect in effects:
            if isinstance(effect, RunTask) and isinstance(effect.work, PinBlobs):
                self.held = effect.work.blobs
        return {effect.to for effect in effects if isinstance(effect, Send)}


NUMBERS = SwarmRoundMetrics(1.0, 1, 1)


def test_the_state_stays_on_disk_for_pairs_whose_turn_has_not_come():
    referee = Referee(("a", "b"), ("c", "d"), ("e", "f"))
    for _ in range(4):
        referee.goes_on()
    for turn in referee.room.turns.values():
        turn.done = True
    asked = referee.goes_on(away=("a", "b", "c", "d", "e", "f"))
    assert not asked and state_of(0) in referee.held
