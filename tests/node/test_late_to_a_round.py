"""A peer that reaches a round after the others: nobody waits for it, and what it dropped is said again to it."""

from __future__ import annotations

from atoll.base.machine import Received, Send
from atoll.node.facts import RoundClosed
from atoll.policy.plan import plan_round
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.wire.messages.round import Committed, Repeat

ME, AHEAD = peer_name(0), peer_name(1)


def test_a_newcomer_owns_no_part_in_its_first_round():
    """Nobody waits for its training, so nobody may wait for its answer. Once, a founder did for minutes."""
    swarm = Swarm(5, SwarmKnobs(peers=2))
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
    """Three rounds ahead of me: I cannot keep that. Once I am there, I ask the speaker, and nobody else, once."""
    swarm = Swarm(1, SwarmKnobs(peers=4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    asked: list[tuple[str, int]] = []
    handle = peer.handle

    def watched(event, now):
        effects = handle(event, now)
        repeats = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Repeat)]
        asked.extend((e.to, e.message.round) for e in repeats)
        return effects

    peer.handle = watched
    for _ in range(3):
        assert peer.handle(Received(AHEAD, Repeat(4, 0, "ahead")), 0.5) == []
    swarm.world.run(60, stop=lambda: swarm.head(ME) >= 6)
    assert asked == [(AHEAD, 4)]


def test_what_was_said_is_said_again_once_and_to_members_only():
    """Asking costs nothing and answering may cost many megabytes."""
    swarm = Swarm(1, SwarmKnobs(peers=4))
    swarm.world.run(0.5)
    peer = swarm.world.nodes[ME].machine
    swarm.world.run(30, stop=lambda: peer.round is not None and peer.round.encoded is not None)
    ask = Repeat(peer.round.plan.round, peer.round.attempt, peer.round.plan.trace)

    def answers(to: str):
        effects = peer.handle(Received(to, ask), swarm.world.now)
        return [e for e in effects if isinstance(e, Send) and isinstance(e.message, Committed) and e.to == to]

    assert len(answers(AHEAD)) == 1
    assert answers(AHEAD) == []
    assert answers("a stranger") == []


def test_after_a_blackout_nobody_waits_for_the_windows_of_owners_to_whom_nothing_comes():
    """All were down until a later attempt, which nobody trains for: each passes after its sharing has begun."""
    swarm = Swarm(1, SwarmKnobs(peers=4))
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
