"""Operator commands of a peer: leave, rest, start over, roll back, pause, change settings.

Each makes a report or a vertex from what the peer knows, or raises ValueError with the reason if that would be
wrong. `sign` signs for the recovery identity.

Invariants:
- No command changes anything before a vertex holds its report.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Send, tag_of
from atoll.peer.governance.orders import RollbackGoal, pauses_in, tunes_in, word_bytes
from atoll.peer.governance.settings_change import numbers_in, why_not
from atoll.peer.peer import Peer
from atoll.peer.round.vertex_body import write_recovery
from atoll.peer.run_view import RunView
from atoll.policy.membership import why_not_without
from atoll.policy.plan import QuorumAvailability, quorum
from atoll.protocol.history.chain import recovery_bytes
from atoll.wire.codec import encode
from atoll.wire.messages.history import VerticesRequest
from atoll.wire.messages.statements import (
    ChangeableSettings,
    ChangeSettings,
    LeaveReport,
    PauseOrder,
    RollbackOrder,
)
from atoll.wire.messages.vertex import Vertex

Sign = Callable[[bytes], bytes]


def farewell(peer: Peer, why: str, now: Seconds) -> list[Effect]:
    """Leave on purpose: report it to all members, so that no member waits."""
    peer.participation.leaving = True
    return [] if peer.is_lost else peer.say(LeaveReport(peer.known.history.head + 1, why[:200]), now)


def withdraw(peer: Peer) -> None:
    """Ask for no role from now on: this computer cannot take part in the run."""
    peer.participation.admission.withdrawn = True


def postpone(peer: Peer) -> None:
    """Ask for no role until `seek_role`: whether this computer can take part is not known yet. Not for a member."""
    members = peer.history.head_body.members if peer.history is not None else ()
    peer.participation.admission.postponed = all(m.peer != peer.me for m in members)


def seek_role(peer: Peer, now: Seconds) -> list[Effect]:
    """Ask for the desired role, which was postponed."""
    peer.participation.admission.postponed = False
    return [] if peer.is_lost else peer.participation.seek_admission(now)


def rest(peer: Peer, rounds: int, now: Seconds, at_once: bool = False) -> list[Effect]:
    """Skip training for this many rounds; 0 ends it. `at_once`: from the current round on, without its update."""
    peer.resting.begins(peer.at + (1 if at_once else 2), rounds)
    if peer.is_lost:
        return []
    return [effect for word in peer.resting.words(peer.at + 1) for effect in peer.say(word, now)]


def was_linked(peer: Peer, other: PeerId) -> bool:
    """Whether a connection with this member stood since the local process started."""
    return other in peer.linked or other in peer.heartbeat.unlinked


def turnout(peer: Peer, now: Seconds) -> QuorumAvailability:
    """Which voters of the next vertex are present, as known locally."""
    if peer.is_lost:
        return QuorumAvailability((), (), (), 0)
    known = peer.known
    if peer.round is not None:
        voters, needed = peer.round.plan.committee, peer.round.plan.quorum
    else:
        voters = tuple(m.peer for m in known.roster.members if m.votes)
        needed = quorum(len(voters), known.settings.round.quorum)
    absent = tuple(p for p in voters if p != peer.me and not peer.heartbeat.is_present(p, now))
    anew = known.rekeyed().difference(absent)
    return QuorumAvailability(voters, absent, tuple(p for p in voters if p in anew), needed)


def recover(peer: Peer, sign: Sign, now: Seconds) -> list[Effect]:
    """Start over from the last agreed vertex with the reachable members, after a quorum is gone for good.

    If a quorum is here but era signatures are missing, or their lack blocks the rest of the history, sign eras
    only.
    """
    if not peer.is_lost and peer.known.awaits_signatures:
        known = peer.known
        wish = VerticesRequest(known.history.head + 1)
        return known.vouch_for_eras(sign) + [Send(p, wish) for p in known.roster.within_reach()]
    if peer.is_lost or peer.round is None or peer.at != peer.known.history.head:
        raise ValueError("this peer does not hold the last agreed state; let it catch up first")
    known, there = peer.known, turnout(peer, now)
    if there.here >= there.needed and (vouched := known.vouch_for_eras(sign)):
        return vouched
    linked = {p for p in peer.linked if peer.heartbeat.is_present(p, now)}
    vertex = _new_epoch(known, there, linked, now + peer.heartbeat.offset_s, sign)
    return peer.begin_epoch(vertex, now) + known.vouch_for_eras(sign)


def _new_epoch(
    known: RunView, turnout: QuorumAvailability, linked: Set[PeerId], run_time: Seconds, sign: Sign
) -> Vertex:
    """The vertex that starts a new epoch without the members that are gone; `linked` are the reachable peers."""
    history, me, run = known.history, known.notary.me, known.notary.run
    if turnout.here >= turnout.needed:
        raise ValueError(f"{turnout.here} voters are here, {turnout.needed} needed: the run can go on by itself")
    if not any(m.peer == me and m.votes for m in known.roster.members):
        raise ValueError("this peer has no vote in the last agreed membership")
    # a peer of a large swarm watches few others: one out of sight shall not be part of the next quorum
    here = {*linked} - {*turnout.absent, *turnout.anew} | {me}
    key = known.notary.signer.vote_key
    raw = encode(write_recovery(history.head_body, history.head_id, run, me, here, run_time, key))
    return Vertex(raw, None, sign(recovery_bytes(run, raw)))


def go_back(
    peer: Peer, goal: RollbackGoal, sign: Sign, now: Seconds, without: tuple[PeerId, ...] = ()
) -> list[Effect]:
    """Ask the members to continue from the state after this earlier vertex, without some of the members."""
    known = _as_member(peer)
    if why := why_not_without(without, known.history.head_body.members):
        raise ValueError(f"the rollback order {why}")
    plain = RollbackOrder(
        known.history.head_id, goal.round, goal.id, goal.state, goal.trained, b"", without or UNSET, goal.tuned
    )
    known.pool.goals[goal.id] = goal
    return peer.say(replace(plain, signature=sign(word_bytes(known.notary.run, plain))), now)


def pause(peer: Peer, paused: bool, sign: Sign, now: Seconds) -> list[Effect]:
    """Ask the members to stop training from the next vertex on, or to train again."""
    known = _as_member(peer)
    if paused == (known.history.head_body.paused is not UNSET):
        waits = any(word.paused for _, word in pauses_in(known.pool.said_by(peer.me, tag_of(PauseOrder))))
        soon = " yet: the pause that was asked for begins when the round under way closes" if waits else ""
        raise ValueError("it is paused already" if paused else f"it is not paused{soon}")
    plain = PauseOrder(known.history.head_id, paused, b"")
    return peer.say(replace(plain, signature=sign(word_bytes(known.notary.run, plain))), now)


def tune(peer: Peer, to: ChangeableSettings, sign: Sign, now: Seconds) -> list[Effect]:
    """Ask the members for these settings from the next vertex on, also in a finished run, which may get more
    rounds.
    """
    known = _as_member(peer, also_over=True)
    history, to = known.history, with_waiting(peer, to)
    if why := why_not(known.settings, history.head_body, to):
        raise ValueError(why)
    plain = ChangeSettings(history.head_id, to, b"")
    return peer.say(replace(plain, signature=sign(word_bytes(known.notary.run, plain))), now)


def with_waiting(peer: Peer, to: ChangeableSettings) -> ChangeableSettings:
    """These settings with those requested before that no vertex holds yet.

    A pool keeps one such order per signer, and a vertex with one would void the other.
    """
    mine = [] if peer.is_lost else tunes_in(peer.known.pool.said_by(peer.me, tag_of(ChangeSettings)))
    return replace(mine[0][1].to, **numbers_in(to)) if mine else to


def _as_member(peer: Peer, also_over: bool = False) -> RunView:
    """The run view of a peer that is a present member; ValueError otherwise."""
    mine = None if peer.is_lost else peer.known.roster.mine
    if mine is None or not mine.is_present:
        raise ValueError("this peer is not a member (yet)")
    if peer.over and not also_over:
        raise ValueError("the run is over")
    return peer.known
