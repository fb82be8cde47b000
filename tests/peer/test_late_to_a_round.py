"""A peer that reaches a round late: no member waits for it, and messages that it dropped are resent to it."""

from __future__ import annotations

import pytest

from atoll.base.machine import Fact, Received, Send
from atoll.peer.events import AgreedStateMissing, RoundClosed
from atoll.peer.settings import RunSettings
from atoll.policy.plan import RoundSettings, plan_round
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.wire.messages.round import ResendRequest, UpdateCommitmentMessage

ME, AHEAD = peer_name(0), peer_name(1)


def test_a_newcomer_owns_no_part_in_its_first_round():
    """No member waits for its training, so none may wait for its result. Once, a founder did for minutes."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=2))
    first_rounds: list[RoundClosed] = []

    def watch(_now, node, fact):
        if isinstance(fact, RoundClosed) and any(m.standing == "new" for m in fact.body.members):
            first_rounds.append(fact)

    swarm.world.watchers.append(watch)
    swarm.world.run(2)
    swarm.join(2, via=peer_name(0))
    swarm.world.run(30)
    assert first_rounds
    for fact in first_rounds:
        plan = plan_round(fact.id, fact.body, swarm.knobs.run.round)
        assert set(plan.owners) == {peer_name(0), peer_name(1)}


def test_words_too_early_to_be_remembered_are_asked_for_when_their_round_begins():
    """Three rounds ahead is too early to store. When the round begins, only the sender is asked, once."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    asked: list[tuple[str, int]] = []
    handle = peer.handle

    def watched(event, now):
        effects = handle(event, now)
        repeats = [e for e in effects if isinstance(e, Send) and isinstance(e.message, ResendRequest)]
        asked.extend((e.to, e.message.round) for e in repeats)
        return effects

    peer.handle = watched
    for _ in range(3):
        assert peer.handle(Received(AHEAD, ResendRequest(4, 0, "ahead")), 0.5) == []
    swarm.world.run(60, stop=lambda: swarm.head(ME) >= 6)
    assert asked == [(AHEAD, 4)]


def test_what_was_said_is_said_again_once_and_to_members_only():
    """Asking costs nothing and answering may cost many megabytes."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    swarm.world.run(30, stop=lambda: peer.round is not None and peer.round.encoded is not None)
    ask = ResendRequest(peer.round.plan.round, peer.round.attempt, peer.round.plan.trace)

    def answers(to: str):
        effects = peer.handle(Received(to, ask), swarm.world.now)
        return [
            e
            for e in effects
            if isinstance(e, Send) and isinstance(e.message, UpdateCommitmentMessage) and e.to == to
        ]

    assert len(answers(AHEAD)) == 1
    assert answers(AHEAD) == []
    assert answers("a stranger") == []


def test_after_a_blackout_nobody_waits_for_the_windows_of_owners_to_whom_nothing_comes():
    """All were down until a later attempt, without training: each passes after its sharing has begun."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4))
    swarm.world.run(60, stop=lambda: min(swarm.heads()) >= 3)
    names = list(swarm.world.nodes)
    for name in names:
        swarm.world.crash(name)
    swarm.world.run(swarm.world.now + 60)
    for name in names:
        swarm.world.start(name)
    before, back = max(swarm.heads()), swarm.world.now
    swarm.world.run(back + 200, stop=lambda: min(swarm.heads()) > before)
    assert swarm.world.now - back < 5.0


@pytest.mark.parametrize(
    ("hop_s", "step_s"), [(0.1, 0.2), (0.3, 0.02)], ids=["short rounds", "shorter than a trip"]
)
def test_a_newcomer_is_in_soon_however_fast_the_others_go_on(hop_s: float, step_s: float):
    """While a state travels to it the members drop what came next, before they knew of it: it does not wait for
    that.

    The surprises: all once waited with it, since it had its vote by then, and where rounds are shorter than a round
    trip it restarted with a newer state again and again, and never got in.
    """
    run = RunSettings(open_to_all=True, round=RoundSettings(inner_steps=1, first_train_s=10))
    swarm = VirtualSwarm(1, SwarmKnobs(3, NetworkKnobs(0.002, 0.004, jitter_s=0.0), WorkerKnobs(step_s), run=run))
    world, far, ada = swarm.world, peer_name(3), peer_name(0)
    gave_up: list[Fact] = []
    world.watchers.append(
        lambda _now, _node, fact: gave_up.append(fact) if isinstance(fact, AgreedStateMissing) else None
    )
    world.run(2)
    for name in swarm.founders:
        world.network.latency[name, far] = world.network.latency[far, name] = hop_s
    swarm.join(3, via=ada)

    def is_in() -> bool:
        members = world.nodes[ada].machine.history.head_body.members
        return swarm.head(far) >= 0 and any(m.peer == far and m.standing == "member" for m in members)

    world.run(30, stop=is_in)
    before = swarm.head(ada)
    world.run(world.now + 4)
    assert is_in() and world.now < 14 and not gave_up
    assert swarm.head(far) > before  # and takes part
