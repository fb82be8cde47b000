"""Judgment tasks for exhibits, derived from vertices alone.

A task names the checked peer's round or result, the draw, the assignment and the earlier commitments.
Invariants:
- A drawn auditor and a reader of the history years later derive the same task.
- Nothing in a task comes from the checked peer or from its accuser.
Not responsible for: reading blobs.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest, PeerId
from atoll.peer.governance.settings_change import plan_after
from atoll.peer.round.context import RoundContext, context_after
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeMalformedRow, JudgeReplay, JudgeSumOpening
from atoll.policy.membership import RECENT, RecentVertices
from atoll.protocol.history.chain import VertexChain
from atoll.verification.replay_audit.policy import AuditCase
from atoll.verification.sum_check.policy import SumSpotCheck
from atoll.verification.sum_check.tasks import judge_opening
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement
from atoll.wire.messages.vertex import VertexBody


def work_for(
    case: AuditCase | SumSpotCheck, blob: Digest, history: VertexChain, settings: RunSettings
) -> JudgeReplay | JudgeSumOpening | None:
    """The task for the peer's exhibit in this blob; `settings` are those of genesis.

    None if necessary vertices are missing, or its commitment names no claim.
    """
    ground = ground_of(case.round, history, settings)
    if ground is None:
        return None
    if isinstance(case, SumSpotCheck):
        body = history.bodies.get(case.round)
        return None if body is None else judge_opening(case, blob, body, ground)
    commit, last = case.commit, _last_claim(case, history)
    if commit.claimed is None or last is None:
        return None
    plan = ground.plan
    shard, shards = plan.shard(case.peer)
    return JudgeReplay(
        blob=blob,
        round=case.round,
        peer=case.peer,
        segment=case.segment,
        before=ground.parent.state,
        steps_max=plan.steps_of(case.peer),
        shard=shard,
        shards=shards,
        shares=ground.shares,
        steps=commit.steps,
        root=commit.root,
        claim=commit.claimed,
        last_claim=last[0],
        last_whole=last[1],
        batch=plan.batch,
    )


def row_work(
    commit: Commitment, peer: PeerId, history: VertexChain, settings: RunSettings
) -> JudgeMalformedRow | None:
    """The task for a row of this commitment, still without its evidence.

    None if necessary vertices are missing, or no member can be held to the row.
    """
    ground = ground_of(commit.round, history, settings)
    if ground is None or ground.topology is None or not ground.plan.may_lie:
        return None
    trains = any(m.peer == peer for m in ground.plan.trainers)
    if not trains or not commit.parts or not one_branch(commit.round, history):
        return None
    return JudgeMalformedRow(commit.round, ground.parent.trained, ground.shares)


def one_branch(round: int, history: VertexChain) -> bool:
    """Whether all recent vertices are here and none began an epoch.

    A commitment names a round and no epoch. A member that a recovery counted in may still have been on the other
    branch, with other parts.
    """
    bodies = [history.bodies.get(r) for r in range(max(-1, round - RECENT), round)]
    return None not in bodies and len({body.epoch for body in bodies if body is not None}) == 1


def ground_of(round: int, history: VertexChain, settings: RunSettings) -> RoundContext | None:
    """The round's context without reports; None if the vertex before it is not here."""
    parent, head = history.bodies.get(round - 1), history.ids.get(round - 1)
    if parent is None or head is None:
        return None
    plan = plan_after(settings, head, parent)
    return context_after(settings, plan, parent, RecentVertices({}), history.notary.run)


def keys_of(round: int, history: VertexChain) -> dict[PeerId, bytes]:
    """Keys by which members signed in this round; empty if the vertex before it is not here."""
    parent = history.bodies.get(round - 1)
    return {m.peer: m.vote_key for m in parent.members} if parent is not None else {}


def twice_promised(
    case: AuditCase | SumSpotCheck, others: Sequence[SignedStatement], history: VertexChain
) -> list[tuple[SignedStatement, SignedStatement]]:
    """Signed commitments in an exhibit that differ from the vertex: each author committed twice.

    PeerFault if an author did not sign.
    """
    keys, body = keys_of(case.round, history), history.bodies.get(case.round)
    for signed in others:
        history.notary.open(signed, Commitment, keys.get(signed.signer))
    held = {signed.signer: signed for signed in body.commits} if body is not None else {}
    return [(held[s.signer], s) for s in others if s.signer in held and held[s.signer].body != s.body]


def _last_claim(case: AuditCase, history: VertexChain) -> tuple[Digest | None, bool] | None:
    """The claim of the peer's last counted round, if there is one; and whether every part of that round holds it.

    None if necessary vertices are missing.
    """
    for round in range(case.round - 1, -1, -1):
        body = history.bodies.get(round)
        if body is None:
            return None
        for signed in body.commits:
            if signed.signer != case.peer:
                continue
            commit = statement_in(signed)
            if isinstance(commit, Commitment) and commit.claimed is not None:
                return commit.claimed, _in_all_parts(body, case.peer)
    return None, False


def _in_all_parts(body: VertexBody, peer: PeerId) -> bool:
    answers = [statement_in(signed) if signed is not None else None for signed in body.parts]
    return all(isinstance(a, OwnerResult) and peer in a.contributors for a in answers)
