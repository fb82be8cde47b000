"""What people ask of a peer, made into a word for its members or into a vertex; refused, with the reason, where it
would be wrong.

Pure functions of what the peer knows; `sign` is the recovery identity's. Never says anything: the peer does.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.node.amend import Goal, amend_bytes
from atoll.node.body import write_recovery
from atoll.node.known import Known
from atoll.policy.members import why_not_without
from atoll.policy.plan import RoundPlan, Turnout, quorum
from atoll.protocol.dag.history import recovery_bytes
from atoll.wire.codec import encode
from atoll.wire.messages.statements import Amend
from atoll.wire.messages.vertex import Vertex

Sign = Callable[[bytes], bytes]


def turnout_of(known: Known, plan: RoundPlan | None, here: Callable[[PeerId], bool]) -> Turnout:
    """Whether those who decide on the next vertex are here, as far as I can know. `plan` is the round's, if there
    is one."""
    if plan is not None:
        voters, needed = plan.committee, plan.quorum
    else:
        voters = tuple(m.peer for m in known.roster.members if m.votes)
        needed = quorum(len(voters), known.settings.round.quorum)
    absent = tuple(p for p in voters if p != known.notary.me and not here(p))
    anew = known.rekeyed().difference(absent)
    return Turnout(voters, absent, tuple(p for p in voters if p in anew), needed)


def new_epoch(known: Known, turnout: Turnout, linked: Set[PeerId], run_time: Seconds, sign: Sign) -> Vertex:
    """The vertex by which the run goes on without those who are gone; `linked` is who is here."""
    history, me, run = known.history, known.notary.me, known.notary.run
    if turnout.here >= turnout.needed:
        raise ValueError(f"{turnout.here} voters are here, {turnout.needed} needed: the run can go on by itself")
    if not any(m.peer == me and m.votes for m in known.roster.members):
        raise ValueError("this peer has no vote in the last agreed membership")
    # in a large swarm I watch a few: who is out of sight shall not be counted on in the next quorum
    here = {*linked} - {*turnout.absent, *turnout.anew} | {me}
    raw = encode(write_recovery(history.head_body, history.head_id, run, me, here, run_time))
    return Vertex(raw, None, sign(recovery_bytes(run, raw)))


def way_back(known: Known | None, over: bool, goal: Goal, without: tuple[PeerId, ...], sign: Sign) -> Amend:
    """The word that asks to go on from what this earlier vertex of our chain left behind, without these members."""
    mine = known.roster.mine if known is not None else None
    if known is None or mine is None or not mine.present:
        raise ValueError("this peer is not a member (yet)")
    if over:
        raise ValueError("the run is over")
    if known.settings.paired:
        raise ValueError("its members have models of their own, and no earlier one that all of them held")
    if why := why_not_without(without, known.history.head_body.members):
        raise ValueError(f"its word {why}")
    plain = Amend(known.history.head_id, goal.round, goal.id, goal.state, goal.trained, b"", without or UNSET)
    return replace(plain, signature=sign(amend_bytes(known.notary.run, plain)))
