"""State verdicts: drawn validators and the meaning of their reports, from agreed vertices alone.

Vertices draw validators for agreed states; each validator measures a loss on held-out data and signs it. A state is
bad if more validators than may lie found it above a bound that follows the least loss of the rounds before. It is
good if as many found it below. While the newest verdict is "bad" the run must go back to the newest good state.

Invariants:
- Every peer that holds the same vertices gets the same verdicts, in whole numbers.
- The first report of a validator counts.
- As many liars as the run tolerates can neither force a rollback nor prevent one.
- Memory is bounded by the window.
Not responsible for: requesting, measuring.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from msgspec import UNSET, UnsetType

from atoll.base.draw import shuffled
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import VALIDATION_OPEN, VALIDATION_ROUNDS
from atoll.policy.capability_terms import SETS_MAX, StateValidationTerms
from atoll.policy.ledger import CapabilityLedger
from atoll.policy.plan import QuorumRule
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import ChangedSettings, HeldOutLossReport, RollbackOrder
from atoll.wire.messages.vertex import VertexBody

NAT = 1_000_000  # losses travel in millionths
ALL = 1_000_000  # so do shares of correct predictions
LOSS_MOST = 10**9 * NAT  # value of a loss that is larger or not finite
MARGIN_LEAST = NAT // 10  # of a nat: a quarter of a loss near zero would be noise
COOL_ROUNDS = 4  # rounds from a rollback to the next demand, doubled for each further rollback in the window
LASTING = 16  # rounds for which a demand stands: a quorum that cannot get the state must not try for ever
HELD_MAX = 4  # kept candidates after the last good one: one of them may become good

Opinion = Literal["open", "good", "bad"]
Losses = tuple[int, ...]


def fixed_point(loss: float) -> int:
    """A loss in nats in wire units: 2.5 is 2 500 000."""
    if not isfinite(loss) or loss * NAT >= LOSS_MOST:
        return LOSS_MOST
    return max(0, round(loss * NAT))


def fixed_share(right: float) -> int:
    """A share of correct predictions in wire units; not a number is 0."""
    return round(max(0.0, min(right, 1.0)) * ALL) if isfinite(right) else 0


def voices(voters: int, rule: QuorumRule) -> int:
    """Validators that decide: more than may lie, and at least two of two, since one machine may be broken."""
    return max(1 + ((voters - 1) // 3 if rule == "two-thirds" else 0), min(2, voters))


@dataclass
class ValidationCandidate:
    """An agreed state, its drawn validators, and their reports."""

    round: int
    vertex: Digest
    state: Digest
    trained: int
    validators: tuple[PeerId, ...]
    needed: int
    said: dict[PeerId, Losses] = field(default_factory=dict[PeerId, Losses])
    # from validators that counted predictions, too
    right: dict[PeerId, Losses] = field(default_factory=dict[PeerId, Losses])
    heard: int = -2  # round of the vertex with the last report on it
    bounds: Losses | None = None  # None: there is nothing to compare with
    opinion: Opinion = "open"
    tuned: ChangedSettings | UnsetType = UNSET  # changed numbers, valid from its vertex on

    @property
    def values(self) -> Losses | None:
        """Loss of this state per set; None while too few have reported."""
        if len(self.said) < self.needed:
            return None
        return tuple(sorted(losses)[self.needed - 1] for losses in zip(*self.said.values(), strict=True))

    @property
    def accuracy(self) -> Losses | None:
        """Share of correct predictions of this state per set: like `values`, seen from above. No verdict depends on
        it.
        """
        if len(self.right) < self.needed:
            return None
        return tuple(sorted(shares)[-self.needed] for shares in zip(*self.right.values(), strict=True))

    def judge(self, bounds: Losses | None) -> None:
        """Judge against these bounds. A loss that is not a number is above all of them."""
        highest = bounds or (LOSS_MOST,) * SETS_MAX
        against = sum(
            any(loss > most or loss == LOSS_MOST for loss, most in zip(said, highest, strict=False))
            for said in self.said.values()
        )
        bad, good = against >= self.needed, len(self.said) - against >= self.needed
        self.bounds, self.opinion = bounds, "bad" if bad else "good" if good else "open"


class ValidationLedger(CapabilityLedger[HeldOutLossReport]):
    """The candidates of recent rounds; drops those that leave the window."""

    report, duty = HeldOutLossReport, "validate states"

    def __init__(self, rule: StateValidationTerms | None, quorum: QuorumRule) -> None:
        self.rule = rule
        self.quorum: QuorumRule = quorum
        self.candidates: dict[int, ValidationCandidate] = {}  # by round, oldest first
        self.returns: list[int] = []  # rounds that validators rolled back
        self.head, self.head_id = -2, ZERO_DIGEST
        self.lost = -2  # newest round without a vertex here; reports on draws up to it are accepted unchecked

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Apply all available vertices up to the head."""
        if self.rule is None or head <= self.head:
            return
        for round in range(max(self.head + 1, head - VALIDATION_ROUNDS), head + 1):
            self.head = round - 1  # reports in a vertex were judged by the ledger of the vertex before
            if round in bodies:
                self._take_in(round, ids[round], bodies[round], self.rule)
        self.head, self.head_id = head, ids.get(head, ZERO_DIGEST)
        oldest = head - VALIDATION_ROUNDS
        self.candidates = {round: c for round, c in self.candidates.items() if round > oldest}
        self.returns = [round for round in self.returns if round > oldest]
        self._judge(self.rule)

    def lose(self, round: int) -> None:
        """The vertex of this round is lost or is not the agreed one, with its draws, earlier draws and their
        reports.
        """
        self.lost = round
        self.candidates = {r: c for r, c in self.candidates.items() if r > round}

    def _take_in(self, round: int, vertex: Digest, body: VertexBody, rule: StateValidationTerms) -> None:
        back: RollbackOrder | None = None
        for by, said in _words(body):
            if isinstance(said, RollbackOrder):
                back = said
            elif self.problem(by, said) is None and said.round in self.candidates:
                candidate = self.candidates[said.round]
                candidate.said[by], candidate.heard = said.losses, round
                if not isinstance(said.right, UnsetType):
                    candidate.right[by] = said.right
        if back is not None:  # later candidates belong to an abandoned past
            self.candidates = {r: c for r, c in self.candidates.items() if r <= back.round}
            self.returns += [round] * (not back.signature)
        elif body.trained % rule.every == 0 and (body.parts or not body.trained):
            self.candidates[round] = self._candidate(round, vertex, body)

    def _candidate(self, round: int, vertex: Digest, body: VertexBody) -> ValidationCandidate:
        needed = voices(sum(m.votes for m in body.members), self.quorum)
        able = [m.peer for m in body.members if m.votes and m.standing == "member"]
        drawn = tuple(shuffled(vertex, "validators", able)[: 2 * needed - 1])
        return ValidationCandidate(round, vertex, body.state, body.trained, drawn, needed, tuned=body.tuned)

    def _judge(self, rule: StateValidationTerms) -> None:
        """Judge each candidate against the least value of those before it."""
        least: Losses | None = None
        for candidate in self.candidates.values():
            candidate.judge(None if least is None else tuple(low + _margin(low, rule) for low in least))
            values = candidate.values
            if values is not None:
                least = values if least is None else tuple(map(min, least, values))

    def problem(self, by: PeerId, report: HeldOutLossReport) -> str | None:
        """None if this report may stand in the next vertex."""
        candidate = self.candidates.get(report.round)
        if self.head - VALIDATION_OPEN < report.round <= self.lost:
            return None
        if candidate is None:
            return "is of no state that is validated"
        if by not in candidate.validators:
            return "is not by one who was drawn"
        if report.state != candidate.state:
            return "is of another state than was agreed on"
        if self.head - report.round >= VALIDATION_OPEN:
            return "comes too late"
        if by in candidate.said:
            return "was said already"
        sets = self.rule.sets if self.rule is not None else 0
        fits = len(report.losses) == sets and all(0 <= loss <= LOSS_MOST for loss in report.losses)
        if not fits:
            return "holds losses that are none"
        if isinstance(report.right, UnsetType):
            return None
        fits = len(report.right) == sets and all(0 <= one <= ALL for one in report.right)
        return None if fits else "holds shares that are none"

    # ---- what follows --------------------------------------------------------------------------------------

    @property
    def good(self) -> ValidationCandidate | None:
        """The newest state that enough validators found good."""
        return next((c for c in reversed(self.candidates.values()) if c.opinion == "good"), None)

    def demanded(self, head: int) -> RollbackOrder | None:
        """The rollback that the vertex after this head must carry; every proposer writes the same one."""
        target = self.good
        if target is None or head != self.head:
            return None
        refused = [c.heard for c in self.candidates.values() if c.round > target.round and c.opinion == "bad"]
        if not refused:
            return None
        since = max(refused[0], self.cool_until)
        if not since <= self.head < since + LASTING:
            return None
        return RollbackOrder(
            self.head_id, target.round, target.vertex, target.state, target.trained, b"", UNSET, target.tuned
        )

    @property
    def cool_until(self) -> int:
        """The first head after which a rollback may be demanded."""
        return self.returns[-1] + COOL_ROUNDS * 2 ** (len(self.returns) - 1) if self.returns else -1

    def needed_states(self) -> tuple[Digest, ...]:
        """The state of a possible rollback, and states that may become it."""
        target = self.good
        later = [c.state for c in self.candidates.values() if target is None or c.round > target.round]
        states = [target.state] if target is not None else []
        return tuple(dict.fromkeys([*states, *later[-HELD_MAX:]]))


def _margin(low: int, rule: StateValidationTerms) -> int:
    return max(low * rule.margin_percent // 100, MARGIN_LEAST)


def _words(body: VertexBody) -> Iterator[tuple[PeerId, RollbackOrder | HeldOutLossReport]]:
    """Validation messages in a vertex, each with its sender."""
    for signed in body.reports:
        if (
            b"HeldOutLossReport" not in signed.body and b"RollbackOrder" not in signed.body
        ):  # tags; most reports are not opened
            continue
        statement = statement_in(signed)
        if isinstance(statement, RollbackOrder | HeldOutLossReport):
            yield signed.signer, statement
