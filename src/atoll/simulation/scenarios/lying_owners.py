"""Owners that lie about their parts, where owners watch each other (`trust = "open"`)."""

from __future__ import annotations

from itertools import product
from typing import Any, cast

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.adversaries.lying_owners import CROOKS, second_promise
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import LOSSY, ROUND_S, ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import whole_of
from atoll.simulation.world import VirtualComputer, VirtualWorld
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

CAUGHT_WITHIN = 3  # rounds until the signed lie has consequences
NOTICED_WITHIN = 4  # rounds for silence and left-out rows: two to see them twice, one to report, one to agree
PROVEN = ("miscounter", "forger", "two_tongued", "two_promises")


def owners(stage: ScenarioContext) -> None:
    """As many liars as the run withstands, of drawn kinds: each is soon out, and no honest member is."""
    kinds = sorted(set(CROOKS) - {"framer"})
    play_crooks(stage, stage.draw_villains(kinds))


def framers(stage: ScenarioContext) -> None:
    """The liars answer rightly and accuse all others of lying: no honest member leaves."""
    play_crooks(stage, dict.fromkeys(stage.draw_places(), "framer"))


def watched(stage: ScenarioContext, **settings: Any) -> None:
    """No liars, but messages are lost and links are slow: no accusation, no complaint with effect."""
    play_crooks(stage, {}, LOSSY, **settings)


def play_crooks(
    stage: ScenarioContext, crooks: dict[int, str], network: NetworkKnobs | None = None, **settings: Any
) -> None:
    stage.quorum = "two-thirds"
    run = stage.settings(witnessed=True, tolerance=0.33, **settings)
    knobs = SwarmKnobs(stage.peers, run=run, network=network or NetworkKnobs())
    for kind in crooks.values():
        stage.fault(kind)
    swarm = stage.gather(knobs, villains={place: villain(CROOKS[kind]) for place, kind in crooks.items()})
    left: dict[PeerId, int] = {}  # peer → first round after which it was not a member

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            check_sums(stage.world, fact, swarm.checkers.villains)
            for member in fact.body.members:
                if not member.is_present:
                    left.setdefault(member.peer, fact.body.round)

    stage.world.watchers.append(watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    for place, kind in crooks.items():
        name = swarm.keys.name(place)
        within = min(CAUGHT_WITHIN if kind in PROVEN else NOTICED_WITHIN, stage.rounds)
        lied = cast(
            ByzantineMember, stage.world.nodes[name].machine
        ).lied  # a liar that owned no part in that time had no occasion
        if kind != "framer" and lied and left.get(name, within) >= within:
            raise InvariantBroken(f"the {kind} {name} left after round {left.get(name)}")
    harmed = sorted(left.keys() - swarm.checkers.villains)
    if harmed:
        raise InvariantBroken(f"honest {harmed} lost their place")


def check_sums(world: VirtualWorld, closed: RoundClosed, villains: frozenset[PeerId]) -> None:
    """Check that agreed results follow from the rows of their contributors, for every owner."""
    body = closed.body
    for part, signed in enumerate(body.parts):
        if signed is None:
            continue
        answered = decode_statement(signed.body, signed.signer)
        assert isinstance(answered, OwnerResult)
        true = ((p, world.nodes[p].island.encoded[body.round][part]) for p in answered.contributors)
        rows = [(row, second_promise(row)) if p in villains else (row,) for p, row in true]
        if all(answered.digest != whole_of(chosen, body.round, part) for chosen in product(*rows)):
            raise InvariantBroken(
                f"a false answer of {signed.signer} for part {part} was agreed on in {body.round}"
            )
