"""Twin comparison as a method of review: a referee compares the updates of a guest and its host.

The conversation is that of `verification/update_review.py`. The host of the local member stays in
`peer/round/local_update.py`; no peer sends it.
Not responsible for: judging, acting on a comparison; vertices do that.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import CompareRedundantUpdates, RedundantUpdate
from atoll.verification.redundant_training.policy import APART_MOST, RedundancyCase, RedundancyLedger
from atoll.verification.review_ledger import Numbers
from atoll.verification.update_review import ReviewMethod, review_verifier


class RedundancyReview(ReviewMethod):
    ledger, opens_after = RedundancyLedger, 1

    def task(self, case: RedundancyCase, blobs: Sequence[Digest], ground: RoundContext) -> CompareRedundantUpdates:
        plan = ground.plan
        shard, shards = plan.shard(case.host)
        guest, host = (
            RedundantUpdate(peer, blob, commit.root, min(commit.steps, plan.steps_of(peer)))
            for peer, blob, commit in zip(case.authors, blobs, case.commits, strict=True)
        )
        return CompareRedundantUpdates(
            round=case.round,
            before=ground.parent.state,
            shard=shard,
            shards=shards,
            shares=ground.shares,
            rows=(guest, host),
            batch=plan.batch,
        )

    def not_shown(self, lacking: Sequence[bool]) -> Numbers:
        """A single update gets no report against it: its twin owes the other one."""
        return tuple(APART_MOST if is_lacking else 0 for is_lacking in lacking)


REDUNDANT_TRAINING = review_verifier(
    RedundancyReview(),
    "twins compared",
    "atoll.verification.redundant_training.worker",
    lambda settings: settings.twinned_share,
)
