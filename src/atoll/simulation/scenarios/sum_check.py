"""Owners that lie about their sums, where blocks of results are opened: `trust = "community"`, and `"open"` where
liars own a part by themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import cast

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Fact
from atoll.peer.events import MemberAccused, RoundClosed, SumCheckFindingRecorded
from atoll.policy.capability_terms import SumCheckTerms
from atoll.simulation.adversaries.byzantine import ByzantineMember
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import LOSSY, ScenarioContext
from atoll.simulation.sum_check import CUT, PROVEN, UNSHOWN, LyingOwnerWorker, islands, twist_of
from atoll.simulation.swarm import peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerComplaint, OwnerResult

SHARE = 0.1  # share of opened blocks: parts are small
PROVEN_WITHIN = 6  # rounds after its first lie: shown, reported, shown to others, reported by enough
TOGETHER_WITHIN = 8  # the same, and two for the reports about co-signers
UNSHOWN_WITHIN = 24  # each of two waits ends after some rounds and ten seconds


def openings(stage: ScenarioContext) -> None:
    """As many lying owners as the run withstands, of drawn kinds: each is out, and no honest member is."""
    # finding that kind takes luck: its odds are in specs/openings.md
    kinds = sorted({*PROVEN, *UNSHOWN} - {"one_block"})
    play_openings(stage, stage.draw_villains(kinds))


def slanderers(stage: ScenarioContext) -> None:
    """The villains find every owner guilty: no member leaves."""
    play_openings(stage, dict.fromkeys(stage.draw_places(), "accuser"))


def opened(stage: ScenarioContext) -> None:
    """No liars, but messages are lost and links are slow: nothing is refuted, and no member leaves."""
    told = play_openings(stage, {}, LOSSY)
    if told.findings.keys() - {"withheld", "accepted"}:
        raise InvariantBroken(f"honest owners were found {dict(told.findings)}")


def accomplices(stage: ScenarioContext) -> None:
    """As many as the run withstands lie wherever they own a part by themselves, with equal lies."""
    play_together(stage, dict.fromkeys(stage.draw_places(), "accomplice"))


class SumCheckRecorder:
    """Opening reports in the vertices of honest peers, each once, and departures."""

    def __init__(self, stage: ScenarioContext) -> None:
        self.stage = stage
        self.said: set[tuple[PeerId, int, int, PeerId, str]] = set()
        self.left: dict[PeerId, tuple[int, str]] = {}  # peer → (first round after which it was gone, how)
        # (reporter, accused) about signed results that no peer shows
        self.complained: set[tuple[PeerId, PeerId]] = set()

    @property
    def findings(self) -> Counter[str]:
        return Counter(finding for *_, finding in self.said)

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.stage.swarm.checkers.villains:
            return
        match fact:
            case SumCheckFindingRecorded(peer=peer, of=round, part=part, checker=checker, finding=finding):
                self.said.add((peer, round, part, checker, finding))
            case MemberAccused(peer=peer, statement=OwnerComplaint(why="unopened")):
                self.complained.add((node.name, peer))
            case RoundClosed(body=body):
                for member in body.members:
                    if not member.is_present:
                        self.left.setdefault(member.peer, (body.round, member.standing))
            case _:
                pass


def play_openings(
    stage: ScenarioContext,
    kinds: dict[int, str],
    network: NetworkKnobs | None = None,
    share: float = SHARE,
    statistic: str = "mean",
) -> SumCheckRecorder:
    stage.quorum = "two-thirds"
    terms = SumCheckTerms(share, CUT.leaf_bytes)
    settings = replace(stage.settings(), tolerance=0.33, openings=terms, statistic=statistic)
    told = stage.play_beside(kinds, twist_of, islands, settings, SumCheckRecorder, network)
    swarm = stage.swarm
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


class ColludingOwners:
    """Liars that own parts by themselves: their agreed lies, and the consequences."""

    def __init__(self, stage: ScenarioContext, places: Collection[int]) -> None:
        self.stage, self.told = stage, SumCheckRecorder(stage)
        self.names = {peer_name(place) for place in places}
        self.lied: dict[PeerId, int] = {}  # signer of an agreed wrong result → first round
        self.false: list[tuple[int, int]] = []  # (round, part) of these results
        for name in self.names:
            island = stage.world.nodes[name].island
            assert isinstance(island, LyingOwnerWorker)
            island.captures = partial(self.captured, name)

    def captured(self, name: PeerId, part: int) -> bool:
        """True if liars alone own this part, so that no other peer can notice, as far as `name` knows."""
        machine = self.stage.world.nodes[name].machine
        round = cast("ByzantineMember", machine).peer.round
        return round is not None and round.reduce is not None and self._own(round.reduce.plan.parallel_owners(part))

    def _own(self, owners: Collection[PeerId]) -> bool:
        return self.names.issuperset(owners)

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        self.told.watch(now, node, fact)
        if node.name in self.names or not isinstance(fact, RoundClosed):
            return
        for part, signed in enumerate(fact.body.parts):
            answered = decode_statement(signed.body, signed.signer) if signed is not None else None
            if isinstance(answered, OwnerResult) and any(
                answered.digest in self._false(name) for name in self.names
            ):
                self._agreed(fact.body.round, part, [n for n in self.names if answered.digest in self._false(n)])

    def _false(self, name: PeerId) -> set[Digest]:
        return cast("LyingOwnerWorker", self.stage.world.nodes[name].island).false

    def _agreed(self, round: int, part: int, liars: list[PeerId]) -> None:
        if (round, part) in self.false:
            return
        self.false.append((round, part))
        for name in liars:
            left, how = self.told.left.get(name, (round, ""))
            if how == "expelled" and left < round:  # a member that is away may return
                raise InvariantBroken(f"{name} left, and a lie of its was agreed on in round {round}")
            self.lied.setdefault(name, round)


def play_together(stage: ScenarioContext, kinds: dict[int, str], captured: float = 0.05) -> ColludingOwners:
    """Owners watch each other and results are opened. Liars are found soon, and no other member is."""
    stage.quorum = "two-thirds"
    settings = stage.settings(
        tolerance=0.33,
        statistic="trimmed_mean",
        witnessed=True,
        openings=SumCheckTerms(SHARE, CUT.leaf_bytes),
        captured=captured or UNSET,
    )
    reports = lambda stage: ColludingOwners(stage, kinds)  # noqa: E731
    together = stage.play_beside(kinds, twist_of, islands, settings, reports)
    told = together.told
    if harmed := sorted(told.left.keys() - together.names):
        raise InvariantBroken(f"honest {harmed} lost their place")
    for name, round in together.lied.items():
        kind = kinds[next(place for place in kinds if peer_name(place) == name)]
        left, how = told.left.get(name, (stage.rounds, "member"))
        if kind == "accomplice" and round + TOGETHER_WITHIN < stage.rounds and how != "expelled":
            raise InvariantBroken(f"{name} lied together with others in round {round}, and is {how}")
        if kind == "accomplice" and how == "expelled" and left > round + TOGETHER_WITHIN:
            raise InvariantBroken(f"{name} lied in round {round} and left after round {left}")
    return together
