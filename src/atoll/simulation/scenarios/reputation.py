"""Members with different records: every vertex keeps their scores, all agree on them, and villains weigh little."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.base.limits import AUDIT_ROUNDS, SCORE_ONE
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.policy.reputation import FLOOR, influence_of, scores_of, tier_of
from atoll.simulation.adversaries.byzantine import villain
from atoll.simulation.adversaries.low_reputation import KINDS, islands
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.vertex import VertexBody

ROUND_S = 120.0  # virtual time per round beside villains
AUDITED_SHARE = 0.1  # audited share of rounds, with every other seed
SAYING = {"equivocator": villain("equivocator"), "withholder": villain("withholder")}  # kinds that lie in messages
TO_COME, TO_GO, TO_RETURN = 8, 10, 18  # rounds in which a newcomer joins, a founder leaves and returns


def reputation(stage: ScenarioContext) -> None:
    """Idlers, boasters, flappers, cheats, silent owners and equivocators, as many as may lie, of drawn kinds.

    Also a newcomer, and a founder that leaves and returns. In the end all honest members are worth more than the
    villains.
    """
    tolerated = (stage.peers - 1) // 3
    audited = bool(stage.seed % 2)
    usable = [kind for kind in (*KINDS, *SAYING) if audited or kind != "cheat"]
    kinds = [stage.draw.choice(usable) for _ in range(tolerated)]
    places = stage.draw.sample(range(stage.peers - 1), tolerated)  # the last founder leaves
    play_records(stage, dict(zip(places, kinds, strict=True)), audited)


class ReputationReports:
    """Scores in vertices, each read when the first honest peer closes it."""

    def __init__(self, villains: frozenset[PeerId]) -> None:
        self.villains = villains
        self.history: dict[PeerId, list[int]] = {}
        self.standing: dict[PeerId, str] = {}
        self.seen: set[int] = set()
        self.share_most = 0.0  # greatest share of all influence that villains ever had together

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed) and fact.body.round not in self.seen:
            self.seen.add(fact.body.round)
            self._look(fact.body)

    def _look(self, body: VertexBody) -> None:
        if body.reputation is UNSET or len(body.reputation) != len(body.members):
            raise InvariantBroken(f"round {body.round} does not say what every member is worth")
        scores = scores_of(body)
        for m in body.members:
            before = self.history.get(m.peer)
            if not FLOOR <= scores[m.peer] <= SCORE_ONE:
                raise InvariantBroken(f"{m.peer} is worth {scores[m.peer]} after round {body.round}")
            if before is None and body.round > 0 and scores[m.peer] != FLOOR:
                raise InvariantBroken(f"newcomer {m.peer} begins with {scores[m.peer]}")
            was = self.standing.get(m.peer, "member")
            if before and was != "member" and scores[m.peer] > before[-1]:
                raise InvariantBroken(f"{m.peer} gained while it was {was}")
            if m.standing == "expelled" and scores[m.peer] != FLOOR:
                raise InvariantBroken(f"{m.peer} was expelled and is worth {scores[m.peer]}")
            self.history.setdefault(m.peer, []).append(scores[m.peer])
            self.standing[m.peer] = m.standing
        self._weigh(body, scores)

    def _weigh(self, body: VertexBody, scores: dict[PeerId, int]) -> None:
        weighs = influence_of(
            {m.peer: scores[m.peer] for m in body.members if m.may_train and m.standing == "member"}
        )
        total, among = sum(weighs.values()), sum(peer in self.villains for peer in weighs)
        theirs = sum(weight for peer, weight in weighs.items() if peer in self.villains)
        if 2 * len(weighs) * max(weighs.values(), default=0) > 3 * max(1, len(weighs) == 1) * total > 0:
            raise InvariantBroken(f"a member weighs more than 3 / (2n) after round {body.round}")
        if 2 * len(weighs) * theirs > 3 * among * total or 2 * theirs >= total > 0:
            raise InvariantBroken(f"villains weigh {theirs} of {total} after round {body.round}")
        self.share_most = max(self.share_most, theirs / total if total else 0.0)


def play_records(
    stage: ScenarioContext, kinds: dict[int, str], audited: bool, **settings: Any
) -> ReputationReports:
    """Villains of these kinds at these places. The last founder is honest, leaves and returns; a stranger joins."""
    stage.quorum = "two-thirds"
    for kind in kinds.values():
        stage.fault(kind)
    more = {"audit_rate": AUDITED_SHARE} if audited else {}
    run = stage.settings(reputation=True, **more, **settings)
    twists = {place: SAYING[kind] for place, kind in kinds.items() if kind in SAYING}
    behind = islands({peer_name(place): kind for place, kind in kinds.items()}, audited)
    swarm = stage.gather(SwarmKnobs(stage.peers, run=run), villains=twists, island=behind)
    names = {swarm.keys.name(place): kind for place, kind in kinds.items()}
    records = ReputationReports(frozenset(names))
    stage.world.watchers.append(records.watch)
    leaver, host = swarm.founders[-1], next(p for p in swarm.founders if p not in names)
    others = [p for p in swarm.founders if p != leaver and names.get(p) not in SAYING]
    expelled = [p for p, kind in names.items() if kind in ("cheat", "equivocator")]
    staying = [p for p in others if p not in expelled]
    stage.until_round(TO_COME, ROUND_S * stage.rounds, staying)
    newcomer = swarm.join(stage.peers, via=host)
    stage.until_round(TO_GO, ROUND_S * stage.rounds, staying)
    stage.world.leave(leaver)
    stage.until_round(TO_RETURN, ROUND_S * stage.rounds, staying)
    left_with = records.history[leaver][-1]
    stage.world.start(leaver)
    stage.until_round(max(swarm.head(p) for p in staying) + 2, ROUND_S * stage.rounds, staying)
    if records.standing[leaver] != "away" and records.history[leaver][-1] > _after_good_rounds(left_with, 2):
        raise InvariantBroken(f"{leaver} left with {left_with} and is back with {records.history[leaver][-1]}")
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds, staying)
    _judge(records, names, [p for p in staying if p not in names], newcomer, audited, stage.rounds)
    return records


def _after_good_rounds(score: int, rounds: int) -> int:
    for _ in range(rounds):
        score += -(-(SCORE_ONE - score) // 16)
    return score


def _judge(
    records: ReputationReports,
    names: dict[PeerId, str],
    honest: list[PeerId],
    newcomer: PeerId,
    audited: bool,
    rounds: int,
) -> None:
    worth = {peer: history[-1] for peer, history in records.history.items()}
    least = min(worth[peer] for peer in honest)
    if rounds >= 30 and tier_of(least) == "probation":
        raise InvariantBroken(f"an honest member is worth {least} after {rounds} rounds")
    if worth[newcomer] > least and not audited:
        raise InvariantBroken(f"newcomer {newcomer} is worth {worth[newcomer]}, a founder {least}")
    for peer, kind in names.items():
        if kind == "cheat" and rounds > AUDIT_ROUNDS and worth[peer] != FLOOR:
            raise InvariantBroken(f"the {kind} {peer} is worth {worth[peer]}")
        if kind in ("idler", "boaster", "flapper") and not audited and tier_of(worth[peer]) != "probation":
            raise InvariantBroken(f"the {kind} {peer} is worth {worth[peer]}")
        if kind == "withholder" and not audited and tier_of(worth[peer]) == "trusted":
            raise InvariantBroken(f"the {kind} {peer} is worth {worth[peer]}")
