"""Twin comparison as a method of review: a referee compares the updates of a guest and its host.

The conversation is that of `verification/update_review.py`; no run has it beside loss scores. The host of the local
member stays in `peer/round/local_update.py`; no peer sends it.
Not responsible for: judging, acting on a comparison; vertices do that.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.peer.events import (
    DifferingRedundantUpdatesFound,
    LocalRedundancyCheckFailed,
    RedundancyVerdictReached,
    RedundantUpdatesCompared,
)
from atoll.peer.round.context import RoundContext
from atoll.peer.tasks import CompareRedundantUpdates, RedundantUpdate
from atoll.peer.verify.interface import Verifier
from atoll.verification.redundant_training.policy import (
    APART_MOST,
    RedundancyCase,
    RedundancyLedger,
    RedundancyVerdict,
)
from atoll.verification.review_ledger import Numbers
from atoll.verification.update_review import ReviewMethod, UpdateReviewMachine
from atoll.wire.messages.statements import BaseStatement, RedundancyReport


class RedundancyReview(ReviewMethod):
    name, pinned, ledger, opens_after = "twins", "twins", RedundancyLedger, 1

    def opened(self, case: RedundancyCase) -> Fact:
        return DifferingRedundantUpdatesFound(peer=case.guest, host=case.host, of=case.round, referees=case.judges)

    def judged(self, verdict: RedundancyVerdict) -> Fact:
        return RedundancyVerdictReached(
            peer=verdict.guest,
            host=verdict.host,
            of=verdict.round,
            opinion=verdict.opinion,
            strayed=verdict.strayed,
            hid=verdict.hid,
        )

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

    def taken(self, case: RedundancyCase, numbers: Numbers, why: str) -> Fact:
        guest, host = numbers
        return RedundantUpdatesCompared(peer=case.guest, of=case.round, apart=(guest, host), why=why)

    def missed(self, author: PeerId, round: int, why: str) -> Fact:
        return LocalRedundancyCheckFailed(peer=author, of=round, why=why)

    def report_of(self, fact: Fact) -> BaseStatement | None:
        return (
            RedundancyReport(fact.of, fact.peer, fact.apart) if isinstance(fact, RedundantUpdatesCompared) else None
        )


REDUNDANT_TRAINING = Verifier(
    "twins",
    lambda settings: (
        RedundancyLedger(settings.twinned_share, settings.round.quorum) if settings.twinned_share else None
    ),
    lambda context: UpdateReviewMachine(context, RedundancyReview()) if context.settings.twinned_share else None,
)
