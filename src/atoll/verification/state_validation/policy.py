"""Is an agreed state fit to go on from? Who looks at it, and what their words mean: all from agreed vertices.

Vertices draw validators for the states that they agree on; these measure a loss on held-out data and sign it. A
state is bad if more of them than may lie found it above a bound that follows the least loss of the rounds before,
and good if as many found it below. While the newest verdict is "bad" the run is to go back to the newest good
state. Promises: the same at every peer that holds the same vertices, in whole numbers; the first word of a
validator counts; so many liars as a run is built for neither force a return nor prevent one. Bounded by its window.
Never asks anybody, never measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.draw import shuffled
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import VALIDATION_OPEN, VALIDATION_ROUNDS
from atoll.policy.ledger import Ledger
from atoll.policy.plan import QuorumRule
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import ChangedNumbers, RollbackOrder, ValidationReport
from atoll.wire.messages.vertex import VertexBody

NAT = 1_000_000  # losses travel in millionths
ALL = 1_000_000  # so do shares of right answers
LOSS_MOST = 10**9 * NAT  # what is not finite, or larger, is said as this
MARGIN_LEAST = NAT // 10  # of a nat: a quarter of a loss near zero would be noise
COOL_ROUNDS = 4  # from a return to the next demand, doubled for each further return in the window
LASTING = 16  # rounds for which a demand stands: a quorum that cannot get the state shall not try for ever
HELD_MAX = 4  # candidates after the last good one that are kept: one of them may come to be it
VALIDATE_EVERY_MAX = VALIDATION_ROUNDS // 8  # training rounds: the window shall hold a few candidates
SETS_MAX = 2  # held-out data, and canary data

Opinion = Literal["open", "good", "bad"]
Losses = tuple[int, ...]


class ValidationRule(msgspec.Struct, frozen=True):
    """How a run validates; fixed in genesis."""

    every: Annotated[int, msgspec.Meta(ge=1, le=VALIDATE_EVERY_MAX)] = 1  # training rounds
    margin_percent: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 25  # above the least loss so far
    sets: Annotated[int, msgspec.Meta(ge=1, le=SETS_MAX)] = 1  # of data, a loss each


def fixed_point(loss: float) -> int:
    """A loss in nats as it travels: 2.5 is 2 500 000."""
    if not isfinite(loss) or loss * NAT >= LOSS_MOST:
        return LOSS_MOST
    return max(0, round(loss * NAT))


def fixed_share(right: float) -> int:
    """A share of right answers as it travels; what is no number is none of them."""
    return round(max(0.0, min(right, 1.0)) * ALL) if isfinite(right) else 0


def voices(voters: int, rule: QuorumRule) -> int:
    """Validators that decide: more than may lie, and two where there are two, since one machine may be broken."""
    return max(1 + ((voters - 1) // 3 if rule == "two-thirds" else 0), min(2, voters))


@dataclass
class ValidatedState:
    """A state that was agreed on, who was drawn to look at it, and what they said."""

    round: int
    vertex: Digest
    state: Digest
    trained: int
    validators: tuple[PeerId, ...]
    needed: int
    said: dict[PeerId, Losses] = field(default_factory=dict[PeerId, Losses])
    right: dict[PeerId, Losses] = field(default_factory=dict[PeerId, Losses])  # of those who counted answers, too
    heard: int = -2  # the round whose vertex held the last word of it
    bounds: Losses | None = None  # None: there is nothing to compare with
    opinion: Opinion = "open"
    tuned: ChangedNumbers | UnsetType = UNSET  # numbers that held from its vertex on

    @property
    def values(self) -> Losses | None:
        """Per set, the loss that this state counts as; None while too few have spoken."""
        if len(self.said) < self.needed:
            return None
        return tuple(sorted(losses)[self.needed - 1] for losses in zip(*self.said.values(), strict=True))

    @property
    def accuracy(self) -> Losses | None:
        """Per set, the share of right answers that this state counts as: as `values`, seen from above. No verdict
        goes by it."""
        if len(self.right) < self.needed:
            return None
        return tuple(sorted(shares)[-self.needed] for shares in zip(*self.right.values(), strict=True))

    def judge(self, bounds: Losses | None) -> None:
        """Against these bounds. A loss that is none is above all of them."""
        highest = bounds or (LOSS_MOST,) * SETS_MAX
        against = sum(
            any(loss > most or loss == LOSS_MOST for loss, most in zip(said, highest, strict=False))
            for said in self.said.values()
        )
        bad, good = against >= self.needed, len(self.said) - against >= self.needed
        self.bounds, self.opinion = bounds, "bad" if bad else "good" if good else "open"


class ValidationLedger(Ledger[ValidationReport]):
    """The candidates of recent rounds; forgets those that leave the window."""

    report, duty = ValidationReport, "validate states"

    def __init__(self, rule: ValidationRule | None, quorum: QuorumRule) -> None:
        self.rule = rule
        self.quorum: QuorumRule = quorum
        self.candidates: dict[int, ValidatedState] = {}  # by round, oldest first
        self.returns: list[int] = []  # rounds that validators sent back
        self.head, self.head_id = -2, ZERO_DIGEST
        self.lost = -2  # the newest round whose vertex is not here: what was drawn up to it is taken at its word

    def follow(self, head: int, ids: Mapping[int, Digest], bodies: Mapping[int, VertexBody]) -> None:
        """Take in all vertices up to the head that are at hand."""
        if self.rule is None or head <= self.head:
            return
        for round in range(max(self.head + 1, head - VALIDATION_ROUNDS), head + 1):
            self.head = round - 1  # words in a vertex were judged by the one before
            if round in bodies:
                self._take_in(round, ids[round], bodies[round], self.rule)
        self.head, self.head_id = head, ids.get(head, ZERO_DIGEST)
        oldest = head - VALIDATION_ROUNDS
        self.candidates = {round: c for round, c in self.candidates.items() if round > oldest}
        self.returns = [round for round in self.returns if round > oldest]
        self._judge(self.rule)

    def lose(self, round: int) -> None:
        """The vertex of this round is lost, or is not the one that was agreed on: nothing is known of whom it and
        those before it drew, and of what was said of them."""
        self.lost = round
        self.candidates = {r: c for r, c in self.candidates.items() if r > round}

    def _take_in(self, round: int, vertex: Digest, body: VertexBody, rule: ValidationRule) -> None:
        back: RollbackOrder | None = None
        for by, said in _words(body):
            if isinstance(said, RollbackOrder):
                back = said
            elif self.problem(by, said) is None and said.round in self.candidates:
                candidate = self.candidates[said.round]
                candidate.said[by], candidate.heard = said.losses, round
                if not isinstance(said.right, UnsetType):
                    candidate.right[by] = said.right
        if back is not None:  # what came after belongs to a past that was left
            self.candidates = {r: c for r, c in self.candidates.items() if r <= back.round}
            self.returns += [round] * (not back.signature)
        elif body.trained % rule.every == 0 and (body.parts or not body.trained):
            self.candidates[round] = self._candidate(round, vertex, body)

    def _candidate(self, round: int, vertex: Digest, body: VertexBody) -> ValidatedState:
        needed = voices(sum(m.votes for m in body.members), self.quorum)
        able = [m.peer for m in body.members if m.votes and m.standing == "member"]
        drawn = tuple(shuffled(vertex, "validators", able)[: 2 * needed - 1])
        return ValidatedState(round, vertex, body.state, body.trained, drawn, needed, tuned=body.tuned)

    def _judge(self, rule: ValidationRule) -> None:
        """Each against the least value of those before it."""
        least: Losses | None = None
        for candidate in self.candidates.values():
            candidate.judge(None if least is None else tuple(low + _margin(low, rule) for low in least))
            values = candidate.values
            if values is not None:
                least = values if least is None else tuple(map(min, least, values))

    def problem(self, by: PeerId, report: ValidationReport) -> str | None:
        """None if this may stand in the next vertex."""
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
    def good(self) -> ValidatedState | None:
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
        """The first head after which a return may be demanded."""
        return self.returns[-1] + COOL_ROUNDS * 2 ** (len(self.returns) - 1) if self.returns else -1

    def needed_states(self) -> tuple[Digest, ...]:
        """The state that would be gone back to, and those that may come to be it."""
        target = self.good
        later = [c.state for c in self.candidates.values() if target is None or c.round > target.round]
        states = [target.state] if target is not None else []
        return tuple(dict.fromkeys([*states, *later[-HELD_MAX:]]))


def _margin(low: int, rule: ValidationRule) -> int:
    return max(low * rule.margin_percent // 100, MARGIN_LEAST)


def _words(body: VertexBody) -> Iterator[tuple[PeerId, RollbackOrder | ValidationReport]]:
    """What a vertex holds of this, each with its bringer."""
    for signed in body.reports:
        if b"Validated" not in signed.body and b"Amend" not in signed.body:  # tags: most reports are not opened
            continue
        statement = statement_in(signed)
        if isinstance(statement, RollbackOrder | ValidationReport):
            yield signed.signer, statement
