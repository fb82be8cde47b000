"""Leave-one-out question: a past round without each of its contributors, from agreed vertices.

    asked      rows of the round's results, and peers that may have them
    work       the task for the rows that are here
    notable    peers with a larger effect by their absence than others

Only the rows come from other peers, and each is checked against a commitment in the vertex. Not responsible for:
verdicts. Notable is a measurement of one round, without effect on the run (specs/blame.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import median

from msgspec import UNSET

from atoll.base.errors import RunFailedError
from atoll.base.ids import PeerId
from atoll.base.machine import Effect
from atoll.base.units import history_round_text
from atoll.features.attribution.row_archive import Place, RowArchive, RowLocation, commits_in
from atoll.peer.governance.orders import amend_of
from atoll.peer.governance.settings_change import plan_after
from atoll.peer.peer import Peer
from atoll.peer.round.candidate import opened, step_of
from atoll.peer.round.context import RoundContext, context_after
from atoll.peer.tasks import LeaveOneOut, LeaveOneOutResult, PartRows
from atoll.protocol.allreduce.buffers import weights_of
from atoll.wire.messages.statements import OwnerResult
from atoll.wire.messages.vertex import VertexBody

# share of the loss: the most was 0.021 in sixty rounds of four honest peers with few samples each
OF_THE_LOSS = 0.05
OF_THE_ROUND = 0.5  # share of the change of the loss by the whole round
OF_THE_OTHERS = 2.0  # multiple of the median gain from the absence of the others


@dataclass(frozen=True)
class ReplayableRound:
    """A round that can be replayed, if its rows are found."""

    ground: RoundContext
    body: VertexBody
    answers: tuple[OwnerResult | None, ...]
    weights: Mapping[PeerId, int]

    def sources(self, me: PeerId) -> dict[Place, tuple[PeerId, ...]]:
        """Peers that may have each row, the likeliest first."""
        here = {m.peer for m in self.ground.plan.members if m.is_present} - {me}
        found: dict[Place, tuple[PeerId, ...]] = {}
        for part, (answer, signed) in enumerate(zip(self.answers, self.body.parts, strict=True)):
            if answer is None or signed is None:
                continue
            for peer in answer.contributors:
                likely = dict.fromkeys((signed.signer, peer, *self.ground.owners[part]))
                found[part, peer] = tuple(source for source in likely if source in here)
        return found

    @property
    def summed_on_the_way(self) -> str:
        """The topology, if rows went up it through other members: each of them rounds its result."""
        topology = self.ground.topology
        return topology.name if topology is not None and not topology.is_direct else ""

    def work(self, here: Mapping[Place, RowLocation]) -> LeaveOneOut:
        """The replay with the rows that are here; a part with a missing row counts for no member."""
        ground, plan = self.ground, self.ground.plan
        step = step_of(self.body.parts, list(commits_in(self.body).values()), plan)
        return LeaveOneOut(
            round=plan.round,
            before=ground.parent.state,
            state=self.body.state,
            shares=ground.shares,
            parts=tuple(self._rows_of(part, answer, here) for part, answer in enumerate(self.answers)),
            statistic=ground.trust.statistic,
            liars=ground.liars,
            steps=step.steps,
            samples=step.samples,
            shards=len(plan.trainers),
            batch=plan.batch,
        )

    def _rows_of(self, part: int, answer: OwnerResult | None, here: Mapping[Place, RowLocation]) -> PartRows | None:
        if answer is None or any((part, peer) not in here for peer in answer.contributors):
            return None
        rows = tuple((p, self.weights[p], here[part, p].blob) for p in answer.contributors)
        weighing = self.body.weighing
        if weighing is UNSET:
            return PartRows(rows)
        return PartRows(rows, weights_of(weighing, answer.contributors))


def question_of(peer: Peer, round: int) -> ReplayableRound:
    """The leave-one-out task for a round, which its rows are needed for. ValueError if it cannot be replayed."""
    if peer.is_lost:
        raise ValueError("this peer does not know the run yet")
    settings, history = peer.settings, peer.known.history
    body, parent = history.bodies.get(round), history.bodies.get(round - 1)
    head = history.ids.get(round - 1)
    if body is None or parent is None or head is None:
        oldest = min((r for r in history.bodies if r - 1 in history.bodies), default=0)  # genesis is always there
        raise ValueError(f"this peer has the history rounds {oldest} to {history.head} in memory")
    if amend_of(body) is not None:
        raise ValueError("that round went back to an earlier state, and no update moved anything")
    if not any(body.parts):
        raise ValueError("no update was counted in that round")
    plan = plan_after(settings, head, parent)
    ground = context_after(settings, plan, parent, peer.known.pool.recent(), history.notary.run)
    answers = tuple(None if signed is None else opened(signed) for signed in body.parts)
    weights = {peer: commit.weight for peer, commit in commits_in(body).items()}
    return ReplayableRound(ground, body, answers, weights)


def gather_rows(peer: Peer, round: int) -> list[Effect]:
    """Download the archived rows of this round; `AttributionRowsGathered` reports the outcome."""
    asked = question_of(peer, round)
    return _archive_of(peer).gather(asked.body, asked.sources(peer.me))


def archived_rows(peer: Peer) -> Mapping[int, Mapping[Place, RowLocation]]:
    """Rows on this disk, by round; the peer knows its run."""
    return _archive_of(peer).here


def _archive_of(peer: Peer) -> RowArchive:
    archive = peer.verifiers.find(RowArchive)
    assert archive is not None
    return archive


def notable(found: LeaveOneOutResult) -> tuple[PeerId, ...]:
    """Peers without which the model would have been better by more than the round or most others' absence
    explains."""
    if not isfinite(found.before):
        return ()
    gains = {one.peer: _gain(found.whole, one.loss) for one in found.without if one.loss is not None}
    least = max(OF_THE_LOSS * found.before, OF_THE_ROUND * abs(found.whole - found.before))
    if not isfinite(found.whole):
        least = 0.0  # a peer that ruined the loss made the effect of all else unknown
    return tuple(peer for peer, gain in gains.items() if gain > max(least, OF_THE_OTHERS * _usual(peer, gains)))


def _gain(whole: float, without: float) -> float:
    """Decrease of the loss; infinite if only the peer's absence leaves a finite loss."""
    if not isfinite(without):
        return 0.0
    return whole - without if isfinite(whole) else float("inf")


def _usual(peer: PeerId, gains: Mapping[PeerId, float]) -> float:
    """Harmful absences gain nothing: where one peer poisons, this holds for all others."""
    others = [max(0.0, gain) for other, gain in gains.items() if other != peer]
    return median(others) if others else float("inf")


def state_lacking(round: int, trained: int | None = None) -> RunFailedError:
    return RunFailedError(
        "E-BLM-05",
        f"the state that {history_round_text(round, trained)} began with is not on this disk",
        cause="a peer keeps the states of its newest rounds (keep.newest, keep.updates, keep.bytes_max), and has "
        "none of rounds that ended without it",
        fix="ask another member, or about a later round: atoll checkpoint list",
    )
