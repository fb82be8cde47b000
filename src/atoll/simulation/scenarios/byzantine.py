"""Lying voters, as many as the two-thirds rule withstands; no honest peer is harmed, and rounds go on."""

from __future__ import annotations

from atoll.base.ids import PeerId
from atoll.simulation.adversaries.byzantine import KINDS, replay, villain
from atoll.simulation.adversaries.commit_after_peek import PEEKERS, never_counted
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs

ROUND_S = 120.0  # virtual time per round beside villains: some attempts fail because of them
MAKERS = {kind: villain(kind) for kind in KINDS} | PEEKERS
CALM_ROUNDS = 3  # rounds in which all members must stay


def liars(stage: ScenarioContext) -> None:
    """Kinds and places of the villains are drawn. Honest peers reach every round and keep their votes, and no
    peeker counts.
    """
    stage.quorum = "two-thirds"
    tolerated, places = stage.tolerated, stage.draw_places()
    kinds = stage.draw.sample(sorted(MAKERS), tolerated) if tolerated <= len(MAKERS) else sorted(MAKERS)
    play_liars(stage, {place: kinds[k % len(kinds)] for k, place in enumerate(places)})


def play_liars(stage: ScenarioContext, kinds: dict[int, str]) -> None:
    """`kinds`: place → kind of villain."""
    for kind in kinds.values():
        stage.fault(kind)
    swarm = stage.gather(villains={place: MAKERS[kind] for place, kind in kinds.items()})
    peeking = {swarm.keys.name(place) for place, kind in kinds.items() if kind in PEEKERS}
    stage.world.watchers.append(never_counted(peeking))
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    if harmed := _without_votes(stage):
        raise InvariantBroken(f"honest {harmed} lost their votes to villains")


def replayers(stage: ScenarioContext) -> None:
    """Members leave and return, or lose their disks and sign with new keys, while a third repeat all old reports.

    Once a vertex contains a member's standing, no old report changes it.
    """
    stage.quorum = "two-thirds"
    tolerated = (stage.peers - 1) // 3
    knobs = SwarmKnobs(stage.peers, run=stage.settings(era_rounds=0))  # villains sign no eras, and others are away
    makers = {}
    for place in range(stage.peers - tolerated, stage.peers):
        makers[place] = villain(replay)
    swarm = stage.gather(knobs, makers)
    stage.until_round(1)
    for index in range(stage.rounds // 8):
        who = swarm.founders[index]
        stage.fault("leave")
        stage.world.leave(who)
        stage.world.run(stage.world.now + stage.draw.uniform(2.0, 6.0))
        stage.world.start(who)
        _demand_votes(stage, who)
        stage.fault("lost disk")
        swarm.lose_disk(index, via=swarm.founders[index - 1])
        _demand_votes(stage, who)


def _demand_votes(stage: ScenarioContext, who: PeerId) -> None:
    """Require votes of all honest members, soon and for some rounds."""
    stage.until(lambda: not _without_votes(stage), ROUND_S, f"{who} did not get its vote back")
    settled = stage.newest.head if stage.newest is not None else 0
    stage.until_round(settled + CALM_ROUNDS, ROUND_S * CALM_ROUNDS)
    if harmed := _without_votes(stage):
        raise InvariantBroken(f"honest {harmed} lost their votes to old words")


def _without_votes(stage: ScenarioContext) -> list[PeerId]:
    """Honest peers without a vote under their current key, by the newest vertex."""
    keys = {m.peer: m.vote_key for m in stage.newest.head_body.members if m.votes} if stage.newest else {}
    peers = [n.machine for n in stage.swarm.honest if n.machine is not None]
    return [peer.me for peer in peers if keys.get(peer.me) != peer.notary.signer.vote_key]
