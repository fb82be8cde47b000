"""What whoever looks at an exhibit is to do: a piece of work, out of vertices alone.

The same for an auditor that a vertex drew and for a reader who opens the history years later: whose round or answer
it is, what was drawn, what it was told to do, what it committed to before. Nothing of it comes from the peer that
is looked at, nor from whoever accused it. Never looks into a blob.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.ids import Digest, PeerId
from atoll.peer.governance.settings_change import plan_after
from atoll.peer.round.context import RoundContext, ground_after
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeOpening, JudgeReplay, JudgeRow
from atoll.policy.membership import RECENT, RecentVertices
from atoll.protocol.history.chain import VertexChain
from atoll.verification.replay_audit.policy import AuditCase
from atoll.verification.sum_check.policy import SumCheckCase
from atoll.verification.sum_check.tasks import judge_opening
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement
from atoll.wire.messages.vertex import VertexBody


def work_for(
    case: AuditCase | SumCheckCase, blob: Digest, history: VertexChain, settings: RunSettings
) -> JudgeReplay | JudgeOpening | None:
    """What the peer was to do, and has to show in this blob. None if vertices are missing that might say so, or the
    peer said too little. `settings` are genesis'."""
    ground = ground_of(case.round, history, settings)
    if ground is None:
        return None
    if isinstance(case, SumCheckCase):
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


def row_work(commit: Commitment, peer: PeerId, history: VertexChain, settings: RunSettings) -> JudgeRow | None:
    """What a row of this commitment has to be; what is shown of it is still to be filled in. None if vertices are
    missing that might say so, or nobody can be held to it."""
    ground = ground_of(commit.round, history, settings)
    if ground is None or ground.topology is None or not ground.plan.may_lie:
        return None
    trains = any(m.peer == peer for m in ground.plan.trainers)
    if not trains or not commit.parts or not one_branch(commit.round, history):
        return None
    return JudgeRow(commit.round, ground.parent.trained, ground.shares)


def one_branch(round: int, history: VertexChain) -> bool:
    """No epoch began lately, as far as vertices here say: all of them. A commitment names a round and no epoch, and
    a member that a recovery counted in may have been on the other branch still, where parts were cut otherwise."""
    bodies = [history.bodies.get(r) for r in range(max(-1, round - RECENT), round)]
    return None not in bodies and len({body.epoch for body in bodies if body is not None}) == 1


def ground_of(round: int, history: VertexChain, settings: RunSettings) -> RoundContext | None:
    """What this round stood on, but for reports; None if the vertex before it is not here."""
    parent, head = history.bodies.get(round - 1), history.ids.get(round - 1)
    if parent is None or head is None:
        return None
    plan = plan_after(settings, head, parent)
    return ground_after(settings, plan, parent, RecentVertices({}), history.notary.run)


def keys_of(round: int, history: VertexChain) -> dict[PeerId, bytes]:
    """Under which members signed in this round; nobody's if the vertex before it is not here."""
    parent = history.bodies.get(round - 1)
    return {m.peer: m.vote_key for m in parent.members} if parent is not None else {}


def twice_promised(
    case: AuditCase | SumCheckCase, others: Sequence[SignedStatement], history: VertexChain
) -> list[tuple[SignedStatement, SignedStatement]]:
    """Commitments that an exhibit rests on and that the vertex does not hold count if their authors signed them,
    who then promised twice. PeerFault if one did not."""
    keys, body = keys_of(case.round, history), history.bodies.get(case.round)
    for signed in others:
        history.notary.open(signed, Commitment, keys.get(signed.signer))
    held = {signed.signer: signed for signed in body.commits} if body is not None else {}
    return [(held[s.signer], s) for s in others if s.signer in held and held[s.signer].body != s.body]


def _last_claim(case: AuditCase, history: VertexChain) -> tuple[Digest | None, bool] | None:
    """Of the last of its rounds that a vertex counts, if there is one; and whether every part of it has it.

    None if vertices are missing that might say so.
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
