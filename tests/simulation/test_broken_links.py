"""Two members that do not hear each other, while all others hear both: no member's row is lost for long."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.machine import Broadcast, Effect, Event, Fact, Received, Send
from atoll.peer.events import PartOwnerFaultObserved, RoundClosed
from atoll.peer.peer import Peer
from atoll.peer.settings import RunSettings
from atoll.policy.membership import RECENT
from atoll.policy.plan import QuorumRule, RoundSettings
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import WINDOW_MIN_S
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_body
from atoll.wire.messages.round import ProposalMessage, RowResponse

BEFORE, AFTER = 3, 14  # the first rounds are whole; the last ones, too, once the silence has been noticed
PACED = RoundSettings(inner_steps=20, first_train_s=10, window_min_s=WINDOW_MIN_S)
KINDS = {
    "private": {},
    **{name: {"topology": name} for name in ("ring", "tree", "hierarchical", "star")},
    "community": {"tolerance": 0.33, "round": replace(PACED, quorum="two-thirds")},
    "weighed": {"tolerance": 0.33, "round": replace(PACED, quorum="two-thirds"), "statistic": "robust"},
    "open": {"tolerance": 0.33, "round": replace(PACED, quorum="two-thirds"), "witnessed": True},
}


@pytest.mark.parametrize(
    ("kind", "peers", "far"),
    [
        *((kind, 7, 2) for kind in KINDS),
        *(pytest.param(kind, 7, 4, marks=pytest.mark.long) for kind in KINDS),
        pytest.param("private", 12, 4, marks=pytest.mark.long),
    ],
)
def test_what_a_broken_link_keeps_from_an_owner_comes_through_others(kind: str, peers: int, far: int):
    """All of their updates count, in all parts, and rounds are about as long as before.

    Of twelve members neither would watch the other by the plan.
    """
    run = replace(RunSettings(round=PACED), **KINDS[kind])
    swarm = VirtualSwarm(
        2, SwarmKnobs(peers, NetworkKnobs(0.005, 0.02, jitter_s=0.005), WorkerKnobs(update_bytes=400_000), run=run)
    )
    closed: dict[int, tuple[float, RoundClosed]] = {}

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            closed.setdefault(fact.body.round, (now, fact))

    swarm.world.watchers.append(watch)

    def until(round: int) -> None:
        swarm.world.run(swarm.world.now + 600.0, stop=lambda: min(swarm.heads()) >= round)
        assert min(swarm.heads()) >= round

    until(BEFORE)
    one, other = peer_name(1), peer_name(far)
    swarm.world.cut(one, other)
    until(AFTER)
    for round in range(BEFORE + 3, AFTER + 1):
        fact = closed[round][1]
        assert {one, other} <= set(fact.counted) and not fact.partly and not fact.parts_missing, round
    assert {m.standing for m in closed[AFTER][1].body.members} == {"member"} and not swarm.checkers.complaints
    before = closed[BEFORE][0] - closed[BEFORE - 1][0]
    took = [closed[round][0] - closed[round - 1][0] for round in range(BEFORE + 4, AFTER + 1)]
    assert sum(took) < 2.5 * len(took) * before
    if run.round.quorum == "majority":  # no view of a proposer that lacks a member's commitment runs out
        assert max(took) < 3.2 * before


@pytest.mark.parametrize("far", [2, 4])
def test_nobody_seems_to_leave_rows_out_in_the_round_in_which_a_link_breaks(far: int):
    """Neither end hears what the other commits to, and both answer for parts, beside others who heard both."""
    run = replace(RunSettings(round=PACED), **KINDS["open"])
    network = NetworkKnobs(0.005, 0.02, jitter_s=0.005)
    swarm = VirtualSwarm(2, SwarmKnobs(7, network, WorkerKnobs(update_bytes=400_000), run=run))
    failed, closed = list[PartOwnerFaultObserved](), dict[int, RoundClosed]()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, PartOwnerFaultObserved):
            failed.append(fact)
        elif isinstance(fact, RoundClosed):
            closed[fact.round] = fact

    swarm.world.watchers.append(watch)
    swarm.world.run(600.0, stop=lambda: min(swarm.heads()) >= BEFORE)
    swarm.world.cut(peer_name(1), peer_name(far))
    swarm.world.run(swarm.world.now + 600.0, stop=lambda: min(swarm.heads()) >= BEFORE + 2)
    assert not failed
    for round in (BEFORE + 1, BEFORE + 2):
        assert len(closed[round].counted) == 7 and not closed[round].partly and not closed[round].parts_missing


def test_who_proposes_after_another_has_asked_for_words_that_it_lacks(monkeypatch: pytest.MonkeyPatch):
    """Where members may lie an answer that counts a member unheard is left out of a body, but not unasked. The
    first proposer is silent, and no row comes to the second one that would tell it."""
    swarm = VirtualSwarm(
        1,
        SwarmKnobs(
            7,
            NetworkKnobs(0.005, 0.02, jitter_s=0.005),
            WorkerKnobs(update_bytes=400_000),
            run=replace(RunSettings(round=PACED), **KINDS["community"]),
        ),
    )
    one, other = peer_name(1), peer_name(4)
    swarm.world.run(600.0, stop=lambda: min(swarm.heads()) >= BEFORE)
    swarm.world.cut(one, other)
    swarm.world.run(swarm.world.now + 600.0, stop=lambda: min(swarm.heads()) >= BEFORE + 3)
    handle, parts = Peer.handle, list[int]()

    def second(self: Peer, event: Event, now: float) -> list[Effect]:
        if isinstance(event, Received) and isinstance(event.message, RowResponse) and self.me == one:
            return []
        effects = list[Effect]()
        for effect in handle(self, event, now):
            if isinstance(effect, Send | Broadcast) and isinstance(effect.message, ProposalMessage):
                if self.me == one:
                    parts.append(sum(part is not None for part in decode_body(effect.message.body).parts))
                elif not effect.message.timeouts:
                    continue
            effects.append(effect)
        return effects

    monkeypatch.setattr(Peer, "handle", second)
    swarm.world.run(swarm.world.now + 100.0, stop=lambda: bool(parts))
    assert parts[0] == 7


@pytest.mark.parametrize("quorum", ["majority", "two-thirds"])
def test_where_only_one_member_hears_all_others_rounds_go_on(quorum: QuorumRule):
    """Five members, six of ten links gone for good: without certificates that travel no round ends any more."""
    run = RunSettings(round=replace(PACED, quorum=quorum))
    swarm = VirtualSwarm(
        1, SwarmKnobs(5, NetworkKnobs(0.005, 0.02, jitter_s=0.005), WorkerKnobs(update_bytes=400_000), run=run)
    )
    swarm.world.run(600.0, stop=lambda: min(swarm.heads()) >= BEFORE)
    far = [peer_name(i) for i in range(1, 5)]
    for index, one in enumerate(far):
        for other in far[index + 1 :]:
            swarm.world.cut(one, other)
    swarm.world.run(swarm.world.now + 120.0, stop=lambda: min(swarm.heads()) >= AFTER)
    assert min(swarm.heads()) >= AFTER and not swarm.checkers.complaints


def test_whom_some_did_not_hear_for_long_is_let_go_once_it_is_dead():
    """Of four, two do not hear it while the other one does, for longer than a suspicion is good: then it dies."""
    swarm = VirtualSwarm(3, SwarmKnobs(4))
    far, last = peer_name(3), peer_name(2)
    swarm.world.run(300.0, stop=lambda: min(swarm.heads()) >= BEFORE)
    for other in (peer_name(0), peer_name(1)):
        swarm.world.cut(other, far)
    swarm.world.run(900.0, stop=lambda: min(swarm.heads()) >= BEFORE + RECENT + 8)
    history = swarm.world.nodes[last].machine.history

    def standing() -> str:
        return next(m.standing for m in history.head_body.members if m.peer == far)

    assert history.head >= BEFORE + RECENT + 8 and standing() == "member"
    swarm.world.crash(far)
    swarm.world.run(swarm.world.now + 300.0, stop=lambda: standing() == "away")
    assert standing() == "away"
