"""Owners that lie about their sums, where blocks of answers are opened (`trust = "community"`)."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.node.facts import OpeningVerdict, RoundClosed
from atoll.policy.openings import Terms
from atoll.sim.checkers import InvariantBroken
from atoll.sim.network import NetworkKnobs
from atoll.sim.openings import CUT, PROVEN, UNSHOWN, islands, twist_of
from atoll.sim.scenarios.stage import Stage
from atoll.sim.swarm import SwarmKnobs, peer_name
from atoll.sim.villains import villain
from atoll.sim.world import Node

ROUND_S = 120.0  # virtual time per round beside villains
SHARE = 0.1  # of blocks: parts are small
PROVEN_WITHIN = 6  # rounds after its first lie: shown, said, others shown, said by enough
UNSHOWN_WITHIN = 24  # each of two waits ends after some rounds and ten seconds


def openings(stage: Stage) -> None:
    """As many lying owners as the run withstands, kinds drawn: each is out, and nobody honest is."""
    kinds = sorted({*PROVEN, *UNSHOWN} - {"one_block"})  # that one takes luck: its odds are in specs/openings.md
    tolerated = (stage.peers - 1) // 3
    drawn = [stage.draw.choice(kinds) for _ in range(tolerated)]
    play_openings(stage, dict(zip(stage.draw.sample(range(stage.peers), tolerated), drawn, strict=True)))


def slanderers(stage: Stage) -> None:
    """The villains find everybody guilty: nobody leaves."""
    tolerated = (stage.peers - 1) // 3
    play_openings(stage, dict.fromkeys(stage.draw.sample(range(stage.peers), tolerated), "accuser"))


def opened(stage: Stage) -> None:
    """Nobody lies, but messages are lost and links are slow: nothing is refuted, and nobody leaves."""
    told = play_openings(stage, {}, NetworkKnobs(0.01, 0.3, jitter_s=0.05, loss_rate=0.01))
    if told.findings.keys() - {"withheld", "accepted"}:
        raise InvariantBroken(f"honest owners were found {dict(told.findings)}")


class Told:
    """What honest peers' vertices said of openings, each once, and who left."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.said: set[tuple[PeerId, int, int, PeerId, str]] = set()
        self.left: dict[PeerId, tuple[int, str]] = {}  # who left, after which round first, and how

    @property
    def findings(self) -> Counter[str]:
        return Counter(finding for *_, finding in self.said)

    def watch(self, now: float, node: Node, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        match fact:
            case OpeningVerdict(peer=peer, of=round, part=part, checker=checker, finding=finding):
                self.said.add((peer, round, part, checker, finding))
            case RoundClosed(body=body):
                for member in body.members:
                    if not member.present:
                        self.left.setdefault(member.peer, (body.round, member.standing))
            case _:
                pass


def play_openings(
    stage: Stage,
    kinds: dict[int, str],
    network: NetworkKnobs | None = None,
    share: float = SHARE,
    statistic: str = "mean",
) -> Told:
    stage.quorum = "two-thirds"
    terms = Terms(share, CUT.leaf_bytes)
    settings = replace(stage.settings(), tolerance=0.33, openings=terms, statistic=statistic)
    for kind in kinds.values():
        stage.fault(kind)
    knobs = SwarmKnobs(stage.peers, run=settings, network=network or NetworkKnobs())
    twists = {place: villain(twist_of(kind)) for place, kind in kinds.items()}
    behind = islands({peer_name(place): kind for place, kind in kinds.items()})
    swarm = stage.gather(knobs, villains=twists, island=behind)
    told = Told(stage)
    stage.world.watchers.append(told.watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    for place, kind in kinds.items():
        name = swarm.keys.name(place)
        within = PROVEN_WITHIN if kind in PROVEN else UNSHOWN_WITHIN
        if kind not in (*PROVEN, *UNSHOWN) or kind == "one_block" or stage.rounds <= within:
            continue
        round, how = told.left.get(name, (stage.rounds, "member"))
        if round > within or how != ("expelled" if kind in PROVEN else "away"):
            raise InvariantBroken(f"the {kind} {name} is {how} after round {round}")
    harmed = sorted(told.left.keys() - swarm.checkers.villains)
    if harmed:
        raise InvariantBroken(f"honest {harmed} lost their place")
    return told
