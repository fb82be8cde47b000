"""Colluding poisoners that know every honest row: the agreed result stays within the bound of its statistic.

The bound is checked in every round with equal rows in all parts. Senders of undecodable rows are expelled within
three rounds. Krum and multi-Krum need 2f + 3 decodable rows: among 3f + 1 members they have no result until such
senders are out.
"""

from __future__ import annotations

from math import inf, sqrt
from typing import TYPE_CHECKING

from atoll.base.ids import PeerId
from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.policy.fault_tolerance import DISTANCES, StatisticName, liars_among, members_needed
from atoll.protocol.allreduce.events import RowDecodeFailed
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.statements import OwnerResult

if TYPE_CHECKING:  # torch: most scenarios do without it
    from torch import Tensor

    from atoll.simulation.adversaries.colluding_poisoners import PoisonerGang

ROUND_S = 120.0  # virtual time per round beside villains
TOLERANCE = 0.33
EXPELLED_WITHIN = 3  # rounds until senders of undecodable rows are out; they start with the first
ROUNDING = 1e-4  # of fp32 sums, beside 1
NEAR = 0.75  # greatest share of the way left to learn: a round covers half of it, and is moved a little
STATISTICS: tuple[StatisticName, ...] = ("median", "trimmed_mean", "meamed", *DISTANCES)


def poisoners(stage: ScenarioContext) -> None:
    """A drawn attack by as many members as may lie, against a drawn statistic."""
    from atoll.simulation.adversaries.colluding_poisoners import GANGS

    liars, attack = liars_among(stage.peers, TOLERANCE), stage.draw.choice(GANGS)
    fits: list[StatisticName] = [s for s in STATISTICS if members_needed(s, liars) <= stage.peers]
    play_poisoners(stage, stage.draw.sample(range(stage.peers), liars), attack, stage.draw.choice(fits))


def play_poisoners(
    stage: ScenarioContext, places: list[int], attack: str, statistic: StatisticName
) -> HonestMeanDeviation:
    from atoll.simulation.adversaries.colluding_poisoners import PoisonerGang
    from atoll.training.experiment.adversaries import aggregation_rule

    stage.quorum = "two-thirds"
    for _ in places:
        stage.fault(f"{attack} against {statistic}".replace(",", "").replace(" ", "_"))
    liars = frozenset(peer_name(place) for place in places)
    gang = PoisonerGang(attack, liars, aggregation_rule(statistic, liars_among(stage.peers, TOLERANCE)))
    by_value = statistic not in DISTANCES  # otherwise owners are trusted
    run = stage.settings(statistic=statistic, tolerance=TOLERANCE, witnessed=by_value)
    swarm = stage.gather(SwarmKnobs(stage.peers, run=run), island=gang.islands())
    swarm.checkers.villains = liars
    harm = HonestMeanDeviation(gang, statistic)
    stage.world.watchers.append(harm.watch)
    stage.until_round(stage.rounds - 1, ROUND_S * stage.rounds)
    away = max(island.distance() for island in gang.crowd.values())
    if not harm.rounds or away > NEAR:
        raise InvariantBroken(f"{attack}: {len(harm.rounds)} rounds count, the model is {away:.2f} from its goal")
    late = [peer for peer in sorted(harm.refused) if harm.out.get(peer, stage.rounds) >= EXPELLED_WITHIN]
    if late:
        raise InvariantBroken(f"what {late} sent was refused, and they are no sooner out")
    stage.measured |= {"moved": harm.moved, "moved_a_mean": harm.moved_a_mean, "refused": len(harm.refused)}
    return harm


class HonestMeanDeviation:
    """Distance of each round's result from the mean of the honest rows in it, in units of their spread.

    The spread is the root of the mean squared distance of an honest row from that mean.
    """

    def __init__(self, gang: PoisonerGang, statistic: StatisticName) -> None:
        self.gang = gang
        self.statistic: StatisticName = statistic
        self.rounds: set[int] = set()
        self.moved = self.moved_a_mean = 0.0  # maximum over rounds; the second for a mean of all rows sent
        self.refused: set[PeerId] = set()  # members with rows that are not finite, or absurd
        self.out: dict[PeerId, int] = {}  # member → round of the vertex that expelled it

    def watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.gang.liars:
            return
        match fact:
            case RowDecodeFailed(peer=peer):
                self.refused.add(peer)
                if peer not in self.gang.liars:
                    raise InvariantBroken(f"{peer} is honest, and its row is called garbage")
            case RoundClosed(body=body) if body.parts and body.round not in self.rounds:
                for member in body.members:
                    if member.standing == "expelled":
                        self.out.setdefault(member.peer, body.round)
                if gone := [m.peer for m in body.members if not m.is_present and m.peer not in self.gang.liars]:
                    raise InvariantBroken(f"honest {gone} lost their place")
                self._look(node, fact)
            case _:
                pass

    def _look(self, node: VirtualComputer, closed: RoundClosed) -> None:
        from atoll.simulation.tensors import TensorWorker

        body, island = closed.body, node.island
        assert isinstance(island, TensorWorker)
        signed = [part for part in body.parts if part is not None]
        answers = [decode_statement(part.body, part.signer) for part in signed]
        of = {answer.contributors for answer in answers if isinstance(answer, OwnerResult)}
        if len(signed) < len(body.parts) or len(of) > 1:
            return
        said = self.gang.said[body.round]
        honest = [said[peer] for peer in of.pop() if peer not in self.gang.liars]
        answer_V = self.gang.anchors[body.round] - island.anchor(body.state)
        self.rounds.add(body.round)
        self._hold(body.round, answer_V, honest, [said[peer] for peer in sorted(self.gang.liars & said.keys())])

    def _hold(self, round: int, answer_V: Tensor, honest: list[Tensor], lies: list[Tensor]) -> None:
        mean_V, plain_V = _mean(honest), _mean(honest + lies)
        spread = sqrt(sum(float((row_V - mean_V).square().sum()) for row_V in honest) / len(honest))
        off = float((answer_V - mean_V).norm()) / spread
        off_plain = float((plain_V - mean_V).norm()) / spread
        self.moved = max(self.moved, off)
        self.moved_a_mean = max(self.moved_a_mean, off_plain if off_plain == off_plain else inf)
        apart = max(float((a - b).norm()) for a in honest for b in honest) / spread
        most = bound(self.statistic, len(honest) + len(lies), len(self.gang.liars), apart)
        if not off <= most + ROUNDING:
            raise InvariantBroken(
                f"{self.gang.attack} moved round {round} by {off:.3g} spreads, {most:.3g} are allowed"
            )


def _mean(rows: list[Tensor]) -> Tensor:
    return sum(rows[1:], rows[0]) / len(rows)


def bound(statistic: StatisticName, n: int, f: int, apart: float) -> float:
    """Greatest shift by f liars of n, in spreads.

    √κ of Allouah et al. 2023, Table 1, where that is proven. Otherwise two diameters of the honest rows, `apart`
    spreads each: the limit of the library's own tests of its rules.
    """
    ratio = f / (n - 2 * f)
    kappas = {
        "trimmed_mean": 6 * ratio * (1 + ratio),
        "krum": 6 * (1 + ratio),
        "geometric_median": 4 * (1 + ratio) ** 2,
        "median": 4 * (1 + ratio) ** 2,
    }
    return sqrt(kappas[statistic]) if statistic in kappas else 2 * apart
