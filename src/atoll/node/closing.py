"""What the vertex of a round says to those who were not there: who counted, and who tells it to whom.

Pure functions of the vertex and the plan. Never sends anything.
"""

from __future__ import annotations

from atoll.base.ids import PeerId
from atoll.node.facts import RoundClosed
from atoll.node.ground import Ground
from atoll.node.trial import opened
from atoll.policy.plan import RoundPlan
from atoll.policy.sampling import resting_in
from atoll.wire.codec import vertex_id
from atoll.wire.messages.vertex import Body, Vertex


def closed_by(vertex: Vertex, body: Body, ground: Ground, assembling: bool) -> RoundClosed:
    """In words for people: who counted, who counted in part, and who is missing."""
    listed = [set(opened(s).contributors) for s in body.parts if s is not None]
    counted = set[PeerId]().union(*listed)
    if ground.paired:  # in part: in its partner's state, and not in its own
        partly = counted - {s.signer for s in body.parts if s is not None}
        trainers = {owners[0] for owners in ground.owners}
    else:
        partly = counted - counted.intersection(*listed)
        trainers = ground.plan.givers - resting_in(body, body.round)
    return RoundClosed(
        vertex=vertex,
        body=body,
        id=vertex_id(vertex.body),
        counted=tuple(sorted(counted)),
        partly=tuple(sorted(partly)),
        missing=() if assembling else tuple(sorted(trainers - counted)),
        parts_missing=sum(s is None for s in body.parts),
    )


def told_by(me: PeerId, plan: RoundPlan) -> list[PeerId]:
    """Of the members outside the committee, those whom I tell the vertex: two voters tell each of them."""
    committee = plan.committee
    if me not in committee:
        return []
    mine = committee.index(me)
    others = [m.peer for m in plan.members if m.present and m.peer not in set(committee)]
    return [p for k, p in enumerate(others) if mine in (k % len(committee), (k + 1) % len(committee))]
