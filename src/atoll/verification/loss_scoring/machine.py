"""Loss scoring as a method of review: a judge measures how far the loss falls along one drawn update.

The conversation is that of `verification/update_review.py`, in the messages of audits with `update` set.
Not responsible for: judging, acting on a score; vertices do that.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.draw import draw_bytes
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId
from atoll.base.machine import Fact
from atoll.peer.events import (
    LocalUpdateScoringFailed,
    ScorersDrawnForUpdate,
    UpdateScoreReported,
    UpdateScoringDecided,
)
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import ScoreUpdate
from atoll.peer.verify.interface import Verifier
from atoll.verification.loss_scoring.policy import ScoreLedger, ScoringCase, SettledScore
from atoll.verification.review_ledger import Numbers
from atoll.verification.update_review import ReviewMethod, UpdateReviewMachine
from atoll.wire.messages.statements import BaseStatement, ScoreReport


class LossScoring(ReviewMethod):
    name, pinned, ledger = "score", "scores", ScoreLedger

    def opened(self, case: ScoringCase) -> Fact:
        return ScorersDrawnForUpdate(peer=case.peer, scorers=case.judges)

    def judged(self, verdict: SettledScore) -> Fact:
        return UpdateScoringDecided(
            peer=verdict.peer, of=verdict.round, opinion=verdict.opinion, falls=verdict.falls
        )

    def task(self, case: ScoringCase, blobs: Sequence[Digest], ground: RoundContext) -> ScoreUpdate:
        (blob,), (commit,), plan = blobs, case.commits, ground.plan
        shard, shards = plan.shard(case.peer)
        return ScoreUpdate(
            blob=blob,
            round=case.round,
            peer=case.peer,
            before=ground.parent.state,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            steps=min(commit.steps, plan.steps_of(case.peer)),
            steps_max=plan.steps,
            root=commit.root,
            drawn=Digest(draw_bytes(case.drawn, f"samples of {case.peer}", DIGEST_BYTES)),
            batch=plan.batch,
        )

    def not_shown(self, lacking: Sequence[bool]) -> Numbers:
        return ()

    def taken(self, case: ScoringCase, numbers: Numbers, why: str) -> Fact:
        return UpdateScoreReported(peer=case.peer, of=case.round, falls=numbers, why=why)

    def missed(self, author: PeerId, round: int, why: str) -> Fact:
        return LocalUpdateScoringFailed(peer=author, of=round, why=why)

    def report_of(self, fact: Fact) -> BaseStatement | None:
        return ScoreReport(fact.of, fact.peer, fact.falls) if isinstance(fact, UpdateScoreReported) else None


LOSS_SCORING = Verifier(
    "score",
    lambda settings: ScoreLedger(settings.scored_share, settings.round.quorum) if settings.scored_share else None,
    lambda context: UpdateReviewMachine(context, LossScoring()) if context.settings.scored_share else None,
)
