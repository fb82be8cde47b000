"""Outcome of a round's vertex: what the worker adopts, the event for operators, and which peers receive it.

Pure functions of the vertex, the plan and the local update.

Not responsible for: sending.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.peer.events import RoundClosed
from atoll.peer.round.candidate import CandidateVertex, opened
from atoll.peer.round.context import RoundContext
from atoll.peer.round.local_update import LocalUpdate
from atoll.peer.round.topology_choice import asked_in
from atoll.peer.tasks import AbandonedRoundSettlement, AdoptState, LocalUpdateOutcome
from atoll.policy.contributions import contribution_of, late_of, parts_counted, results_of
from atoll.policy.duplicate_updates import alike_in
from atoll.policy.participation import resting_in
from atoll.policy.plan import RoundPlan
from atoll.wire.codec import vertex_id
from atoll.wire.messages.vertex import Vertex, VertexBody


def adopted(trial: CandidateVertex, ground: RoundContext, update: LocalUpdate) -> AdoptState:
    """The agreed state and how the local update was counted, as a task for the worker."""
    me, body, plan = update.me, trial.body, ground.plan
    counted: tuple[bool, ...] | None = None
    if update.encoded is not None and body.parts:
        counted = tuple(a is not None and me in a.contributors for a in trial.answers)
        if plan.quorum_of_updates is not None and not update.told and not any(counted):
            counted = None  # the quorum began during encoding: the steps stay in the live parameters
    afresh = trial.back is not None
    late = ground.apart is not None and me in late_of(body)
    led = tuple(opened(s).digest for s in body.parts if s is not None and s.signer == me)
    mine = None if afresh else counted
    held = counted_in(me, body)
    return AdoptState(plan.round, trial.id, body.state, mine, held.claim, afresh, late, led, held)


def counted_in(me: PeerId, body: VertexBody) -> LocalUpdateOutcome:
    """How the vertex counts the local update, also one committed to before a restart."""
    mine = contribution_of(body, me)
    if mine is None or mine.commit is None:
        return LocalUpdateOutcome(body.parent)
    return LocalUpdateOutcome(body.parent, mine.root, mine.parts, mine.claim)


def left_open(me: PeerId, parts: int, body: VertexBody | None) -> AbandonedRoundSettlement:
    """How this body counted the local update of `parts` parts for its round; None: unknown."""
    if body is None:
        return AbandonedRoundSettlement((True,) * parts or None, late=True)
    counted = tuple(result is not None and me in result.contributors for result in results_of(body))
    return AbandonedRoundSettlement(
        (counted or (False,) * parts) if parts else None, late_of(body).get(me) is not None
    )


def closed_by(
    vertex: Vertex,
    body: VertexBody,
    ground: RoundContext,
    assembling: bool,
    outliers: Mapping[bytes, tuple[PeerId, ...]],
) -> RoundClosed:
    """The event of a closed round: members counted, counted in part, missing, and with outlying rows."""
    times, parts = parts_counted(results_of(body)), sum(s is not None for s in body.parts)
    counted = set(times)
    partly = {peer for peer in counted if times[peer] < parts}
    trainers = ground.plan.givers - resting_in(body, body.round)
    topology = ground.with_topology(asked_in(body.commits)).topology
    return RoundClosed(
        vertex=vertex,
        body=body,
        id=vertex_id(vertex.body),
        counted=tuple(sorted(counted)),
        partly=tuple(sorted(partly)),
        missing=() if assembling else tuple(sorted(trainers - counted)),
        parts_missing=sum(s is None for s in body.parts),
        topology="" if topology is None else topology.name,
        alike=alike_in(body) if ground.twins is None else (),  # honest twins would be mistaken for copies
        outliers=outliers.get(body.weighing.compared, ()) if body.weighing is not UNSET else (),
    )


def told_by(me: PeerId, plan: RoundPlan) -> list[PeerId]:
    """Members outside the committee to which this voter sends the vertex; two voters send to each."""
    committee = plan.committee
    if me not in committee:
        return []
    mine = committee.index(me)
    others = [m.peer for m in plan.members if m.is_present and m.peer not in set(committee)]
    return [p for k, p in enumerate(others) if mine in (k % len(committee), (k + 1) % len(committee))]
