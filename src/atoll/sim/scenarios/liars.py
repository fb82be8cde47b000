"""Voters that lie, as many as the two-thirds rule withstands; nobody honest is harmed, and rounds go on."""

from __future__ import annotations

from atoll.sim.checkers import InvariantBroken
from atoll.sim.scenarios.stage import Stage
from atoll.sim.villains import KINDS, villain

ROUND_S = 120.0  # virtual time per round beside villains: some attempts are lost to them


def liars(stage: Stage) -> None:
    """Kinds and places of the villains are drawn; the honest reach every round and keep their votes."""
    stage.quorum = "two-thirds"
    tolerated = (stage.peers - 1) // 3
    places = stage.draw.sample(range(stage.peers), tolerated)
    kinds = stage.draw.sample(sorted(KINDS), tolerated) if tolerated <= len(KINDS) else sorted(KINDS)
    makers = {}
    for k, place in enumerate(places):
        kind = kinds[k % len(kinds)]
        stage.fault(kind)
        makers[place] = villain(kind)
    swarm = stage.gather(villains=makers)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    newest = stage.newest
    voting = {m.peer for m in newest.head_body.members if m.votes} if newest else set()
    harmed = [n.name for n in swarm.honest if n.name not in voting]
    if harmed:
        raise InvariantBroken(f"honest {harmed} lost their votes to villains")
