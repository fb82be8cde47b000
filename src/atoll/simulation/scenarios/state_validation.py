"""Poison under a plain mean, validators that notice, validators that lie: a bad model is left, a good one kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Sequence
from math import inf

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import BadStateRolledBack, StateValidationDecided
from atoll.policy.capability_terms import StateValidationTerms
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ROUND_S, ScenarioContext
from atoll.simulation.swarm import IslandMaker, SwarmKnobs, peer_name
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.simulation.world import VirtualComputer

CALM_ROUNDS = 10  # rounds at the end, by which all damage is found and left
NEAR = 0.2  # share of the way to learn


def _says_nothing(loss: float) -> float:
    raise RuntimeError("this validator does not want to look")


LIES: dict[str, Callable[[float], float] | None] = {  # reported loss of a villain among the validators
    "honest": None,
    "wolf": lambda loss: inf,
    "silent": _says_nothing,
    "flatterer": lambda loss: 0.0,
    "lifter": lambda loss: loss + 0.09,  # as much as no honest validator calls bad
}


def validated(stage: ScenarioContext) -> None:
    """As many villains as the run withstands poison a mean now and then, and lie about the outcome."""
    lie, poison = stage.draw.choice(sorted(LIES)), stage.draw.choice(["scaling", "huge", "sign flip"])
    places = stage.draw_places()
    first = stage.draw.randint(0, 6)
    bouts = {r for at in (first, first + 16) for r in range(at, at + stage.draw.randint(1, 3))}
    rounds = {r for r in bouts if r < stage.rounds - CALM_ROUNDS}
    played = play_validated(stage, places, lie, poison, rounds)
    if poison == "huge" and rounds and not played.returns:
        raise InvariantBroken("the model was ruined and the run did not go back")


def wolves(stage: ScenarioContext) -> None:
    """No poison; the villains find every state as bad as can be. The run never goes back."""
    played = play_validated(stage, stage.draw_places(), stage.draw.choice(["wolf", "flatterer"]), "", ())
    if played.returns:
        raise InvariantBroken(f"liars sent an honest run back: {played.returns}")


class ValidationRecorder:
    """Validation reports of honest peers."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.returns: dict[int, BadStateRolledBack] = {}  # round that went back → its fact
        self.judged: dict[int, StateValidationDecided] = {}  # round of the judged state → last judgment

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        match fact:
            case BadStateRolledBack():
                self.returns[fact.round] = fact
            case StateValidationDecided(of=of):
                self.judged[of] = fact
            case _:
                pass


def islands(places: Sequence[int], lie: str, poison: str, rounds: Container[int]) -> IslandMaker:
    """Workers with real numbers behind every peer; villains at these places."""
    from atoll.simulation.tensors import POISONS, TensorWorker  # torch: most scenarios do without it

    villains = {peer_name(place) for place in places}

    def make(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> VirtualWorker:
        if me not in villains:
            return TensorWorker(me, knobs, draw)
        return TensorWorker(me, knobs, draw, POISONS.get(poison), rounds, says=LIES[lie])

    return make


def play_validated(
    stage: ScenarioContext,
    places: Sequence[int],
    lie: str,
    poison: str,
    rounds: Container[int],
    network: NetworkKnobs | None = None,
    rule: StateValidationTerms | None = None,
) -> ValidationRecorder:
    stage.quorum = "two-thirds"
    stage.fault(f"{lie}{'+' if poison else ''}{poison.replace(' ', '_')}")
    settings = stage.settings(validation=rule or StateValidationTerms())
    knobs = SwarmKnobs(stage.peers, run=settings, network=network or NetworkKnobs())
    swarm = stage.gather(knobs, island=islands(places, lie, poison, rounds))
    swarm.checkers.villains = frozenset(peer_name(place) for place in places)
    played = ValidationRecorder(stage)
    stage.world.watchers.append(played.watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    demand_near(stage)
    return played


def demand_near(stage: ScenarioContext) -> None:
    """Check that honest peers are near the point to learn."""
    from atoll.simulation.tensors import TensorWorker

    islands = [node.island for node in stage.swarm.honest]
    farthest = max(island.distance() for island in islands if isinstance(island, TensorWorker))
    if farthest > NEAR:
        raise InvariantBroken(f"the model is {farthest:.2f} from where it should be")
