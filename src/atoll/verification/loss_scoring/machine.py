"""Loss scoring as a method of review: a judge measures how far the loss falls along one drawn update.

The conversation is that of `verification/update_review.py`, in the messages of audits with `update` set.
Not responsible for: judging, acting on a score; vertices do that.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.draw import draw_bytes
from atoll.base.ids import DIGEST_BYTES, Digest
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import ScoreUpdate
from atoll.verification.loss_scoring.policy import ScoreLedger, ScoringCase
from atoll.verification.review_ledger import Numbers
from atoll.verification.update_review import ReviewMethod, review_verifier


class LossScoring(ReviewMethod):
    ledger = ScoreLedger

    def task(self, case: ScoringCase, blobs: Sequence[Digest], ground: RoundContext) -> ScoreUpdate:
        (blob,), (commit,), (peer,), plan = blobs, case.commits, case.authors, ground.plan
        shard, shards = plan.shard(peer)
        return ScoreUpdate(
            blob=blob,
            round=case.round,
            peer=peer,
            before=ground.parent.state,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            steps=min(commit.steps, plan.steps_of(peer)),
            steps_max=plan.steps,
            root=commit.root,
            drawn=Digest(draw_bytes(case.drawn, f"samples of {peer}", DIGEST_BYTES)),
            batch=plan.batch,
        )

    def not_shown(self, lacking: Sequence[bool]) -> Numbers:
        return ()


LOSS_SCORING = review_verifier(
    LossScoring(),
    "updates scored",
    "atoll.verification.loss_scoring.worker",
    lambda settings: settings.scored_share,
)
