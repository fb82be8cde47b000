"""Distance weighting: rows weigh by distances between whole updates, though each owner sees one part of them.

Owners work in two steps. An owner with all rows of its part first *compares* them, and signs the inner products for
all peers that may own a part. Products add up over parts. So each owner with one comparison of every part computes
the same weights, for the rows that all parts have. Then it combines its part with these weights. Its result names
them by digest, and they travel with it. One vertex body holds results of one weighting. If fewer rows are left than
the rule needs, the owner declines the part.

If an owner dies, its comparison stays valid: each holder shows it to the next owner. That owner combines the rows
that it can get; rows that died with the owner are left out of the part, and the other weights are scaled up to the
same sum. A peer that lacks a comparison adopts the weights that results name: at once if more owners name them than
may lie, from any owner when there was time to request the comparison. A part that no owner has compared near the
end is given up. A result of an owner before its turn is kept until its turn. Owners are trusted with comparisons as
with sums.

Invariants:
- An owner compares a part at most once, also across restarts.
- An owner combines with agreed weights only, never with its own choice and never with a plain mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import fsum
from typing import NamedTuple

from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.base.machine import Effect, Event, Persist, Received, RunTask, Send, TaskDone, TaskFailed
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.attempt import AttemptState
from atoll.protocol.allreduce.buffers import (
    PartRowCollector,
    ReceivedResult,
    RemotePartResult,
    weights_digest,
    weights_left_of,
)
from atoll.protocol.allreduce.events import RowWeightsComputed
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.strategies import RowWeighting, StrategyEngineActions, window_in_turn
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputedWeights,
    ComputeRowProducts,
    ProductsComputed,
    TaskRow,
    WeighRows,
)
from atoll.protocol.allreduce.validation import SUM_SLACK, check_compared, fits_weights, weighing_flaw
from atoll.wire.codec import encode
from atoll.wire.messages.round import PartResult, PartRowProducts, ResendRequest, RowRequest
from atoll.wire.messages.statements import AgreedWeights, OwnerResult, RowInnerProducts, SignedStatement
from atoll.wire.weights import RowWeights, mixtures_in, packed_mixtures

ROW_REQUESTS_MAX = 2  # per row, to all peers that may have it: a row may be lost once

SignedComparison = tuple[SignedStatement, RowInnerProducts]


class WeightRequest(NamedTuple):
    """The input of one run of the rule."""

    peers: tuple[PeerId, ...]  # authors with a row in every part
    compared: Digest
    without: tuple[int, ...]


class DistanceWeighting(RowWeighting):
    """Weighting for a plan that weighs rows; one peer's side of one attempt."""

    def __init__(self, state: AttemptState, calls: StrategyEngineActions) -> None:
        self.state, self.calls, self.me, self.route = state, calls, state.me, state.route
        self.changed = False  # during a review a part was declined, or weights became known
        self.agreed: AgreedWeights | None = None  # the weights that the local peer combines with
        self._asked_for: WeightRequest | None = None
        self._comparing: set[int] = set()  # parts that the local peer compares, or has compared
        # parts compared before a restart: the rows are lost, and a second comparison would contradict the first
        said = state.environment.durable_keys
        self._lost = {part for part in state.gathers if self._comparison_key(part) in said}
        # by part, then by owner index
        self._comparisons: list[dict[int, SignedComparison]] = [{} for _ in range(self.plan.parts)]
        self._shown: set[tuple[int, PeerId]] = set()  # (part, recipient of a dead owner's comparison)
        self._patient_until: Seconds = 0.0  # deadline of owners that compared, since the weights are known
        self._wanted_since: dict[int, Seconds] = {}  # parts with rows awaited for known weights
        self._requests: Counter[tuple[int, PeerId]] = Counter()  # row requests, by part and author
        self._named: dict[tuple[int, int], Digest] = {}  # (part, owner index) -> weights that its result names
        self._reminded: set[PeerId] = set()  # owners asked once to send everything again
        self._early: dict[int, RemotePartResult] = {}  # by part, the result of an owner before its turn

    @property
    def plan(self) -> ReducePlan:
        """The agreed plan, with the windows of this peer."""
        return self.state.plan

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None:
        match event:
            case Received(_, PartRowProducts(statement=signed)):
                return self._receive_comparison(signed, now)
            case TaskDone(job, ProductsComputed() as result) if job.startswith(self.state.job("compare/")):
                return self._finish_comparison(int(job.rsplit("/", 1)[1]), result, now)
            case TaskDone(job, ComputedWeights() as found) if job == self.state.job("weigh/0"):
                return self._finish_weights(found, now)
            case TaskFailed(job, why) if job == self.state.job("weigh/0"):
                return self._decline_parts(self.state.gathers, why) + self.calls.review(now)
            case _:
                return None

    # ---- reviews -------------------------------------------------------------------------------------------

    def begin(self, now: Seconds) -> list[Effect]:
        if not self._lost:
            return []
        declined = self._decline_parts(self._lost, "its rows were compared before a restart, and lost")
        return declined + self.calls.review(now)

    def before_review(self, now: Seconds) -> list[Effect]:
        """Accept results of owners that are in turn now."""
        self.changed, effects = False, list[Effect]()
        for part in sorted(self._early):
            self.route.pass_turn(part, now)
            if self._early[part].answered.owner_index <= self.route.turn[part]:
                effects += self.calls.accept(self._early.pop(part), now)
        return effects

    def review_part(self, part: int) -> list[Effect]:
        """Show a dead owner's comparison to the owner that takes over, which then shows it to all owners."""
        found = self._comparison_of(part)
        if found is None or part in self.state.answers:
            return []
        (signed, _), owner = found, self.route.owner[part]
        if owner == signed.signer or not self.state.gone(signed.signer):
            return []
        wanted = self._comparing_peers if owner == self.me else (owner,)
        new = [p for p in wanted if p not in (self.me, signed.signer) and (part, p) not in self._shown]
        self._shown.update((part, p) for p in new)
        return [self._show(peer, signed) for peer in new]

    def after_review(self, now: Seconds) -> list[Effect]:
        """Compute or adopt weights, if all comparisons are here."""
        if self.agreed is not None or self._asked_for is not None:
            return []
        lost = self._parts_given_up(now)
        parts = [part for part in range(self.plan.parts) if part not in self.state.missing]
        if not self.state.gathers or any(self._comparison_of(part) is None for part in parts):
            weighing = self._adoptable(lost, now)
            if weighing is not None:
                self.changed = True
                return self._weigh_with(weighing, now)
        parts = [part for part in parts if part not in lost]
        found = [one for one in map(self._comparison_of, parts) if one is not None]
        if not self.state.gathers or not parts or len(found) < len(parts):
            return []
        common = frozenset[PeerId].intersection(*(frozenset(c.contributors) for _, c in found))
        peers, settled = tuple(sorted(common)), tuple(self.plan.with_weight(sorted(common)))
        name = digest(b"".join(signed.body for signed, _ in found))
        without = tuple(part for part in range(self.plan.parts) if part not in parts)
        self._asked_for = WeightRequest(peers, name, without)
        if not settled or not self.plan.is_enough(settled):
            return self._decline_parts(self.state.gathers, self._shortage(len(settled), "in all parts"))
        given = tuple((tuple(self.plan.with_weight(c.contributors)), c.products) for _, c in found)
        work = WeighRows(self.plan.round, self.plan.statistic, self.plan.liars, settled, given)
        return [RunTask(self.state.job("weigh/0"), work)]

    def moments(self) -> Iterable[Seconds]:
        waits = [self._rows_until(part, 0.0) for part in self._wanted_since]
        return [self._patient_until, self._given_up_at, *waits]

    def request_again(self, now: Seconds) -> list[Effect]:
        """Request comparisons and rows, which may have been lost."""
        if not self.state.started or self.state.finished or now < self.plan.gather_until(0, 2):
            return []
        effects: list[Effect] = []
        for part in sorted(self._wanted_since):
            is_open = part not in self.state.answers and not self.state.gathers[part].closed
            if is_open and self.agreed is not None:
                effects += self._request_rows(part, self._lacking(part, self.agreed))
        if self.agreed is None and self.state.gathers:
            parts = [p for p in range(self.plan.parts) if p not in self.state.missing]
            silent = {self.route.owner[part] for part in parts if self._comparison_of(part) is None}
            silent -= {self.me} | self._reminded
            self._reminded |= silent
            repeat = ResendRequest(self.plan.round, self.plan.attempt, self.plan.trace)
            effects += [Send(owner, repeat) for owner in sorted(silent)]
        return effects

    def resend(self, to: PeerId) -> list[Effect]:
        effects: list[Effect] = []
        for found in self._comparisons if to in self._comparing_peers else ():
            signed = [one for one, _ in found.values()]
            effects += [self._show(to, s) for s in signed if s.signer == self.me or self.state.gone(s.signer)]
        return effects

    # ---- comparisons ---------------------------------------------------------------------------------------

    def late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Request rows that have not come after a third of the window, from their authors and other owners."""
        gather = self.state.gathers.get(part)
        window = window_in_turn(self.state, part, gather) if gather is not None else None
        if gather is None or gather.closed or window is None:
            return []
        if part in self._comparing or self._comparison_of(part) or now < self.plan.gather_until(window, 2):
            return []
        giving = [(peer, self.state.commit_of(peer)) for peer in self.plan.recipients]
        names = [peer for peer, commit in giving if commit is not None and commit.parts > part]
        return self._request_rows(part, [peer for peer in names if peer not in gather.names])

    def has_requested(self, part: int, author: PeerId) -> bool:
        return self._requests[part, author] > 0

    def close_part(self, part: int, gather: PartRowCollector, window: int, now: Seconds) -> list[Effect]:
        """Compare the rows of a part; once weights are agreed, combine them."""
        if (part, self.me) in self.route.declined:
            return []
        if self.agreed is not None:
            return self._combine_if_due(part, gather, self.agreed, window, now)
        if self._comparison_of(part) is not None or part in self._comparing or not gather.rows:
            return []
        waiting = self.calls.await_rows(part, gather, window, now)
        if waiting is not None:
            return waiting
        if len(self.plan.with_weight(gather.rows)) > WEIGHED_ROWS_MAX:
            return self._decline_parts([part], f"distances of more than {WEIGHED_ROWS_MAX} rows are too many")
        self._comparing.add(part)
        work = ComputeRowProducts(self.plan.round, part, self.plan.shares, _task_rows(gather, sorted(gather.rows)))
        return [RunTask(self.state.job(f"compare/{part}"), work)]

    def _finish_comparison(self, part: int, result: ProductsComputed, now: Seconds) -> list[Effect]:
        plan, gather = self.plan, self.state.gathers[part]
        effects = self.state.note_undecodable(part, result, gather.rows)
        for peer in result.undecodable:
            gather.rows.pop(peer, None)
        if self._comparison_of(part) is not None or part in self.state.answers:
            return effects + self.calls.review(now)  # a dead owner's comparison arrived meanwhile, and counts
        if not plan.with_weight(result.counted):
            return effects + self._decline_parts([part], "no row of it decodes") + self.calls.review(now)
        compared = RowInnerProducts(
            plan.round, plan.attempt, part, gather.owner_index, result.counted, result.products
        )
        signed = self.state.notary.sign(compared)
        # durable before it is sent: a restarted owner must never compare a second time
        effects.append(Persist(self._comparison_key(part), encode(compared)))
        effects += [self._show(peer, signed) for peer in self._comparing_peers if peer != self.me]
        self._hold_comparison(signed, compared)
        return effects + self.calls.review(now)

    def _receive_comparison(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        vote_key = self.state.environment.vote_key_of(signed.signer)
        compared = self.state.notary.open(signed, RowInnerProducts, vote_key)
        if (compared.round, compared.attempt) != (self.plan.round, self.plan.attempt):
            return []
        check_compared(self.plan, signed.signer, compared)
        if compared.owner_index in self._comparisons[compared.part]:
            return []
        self._hold_comparison(signed, compared)
        return self.calls.review(now)

    def _hold_comparison(self, signed: SignedStatement, compared: RowInnerProducts) -> None:
        self._comparisons[compared.part][compared.owner_index] = signed, compared
        # the owner answers when all parts are compared, which may take until the end
        until = self._patient_until if self.agreed is not None else self.plan.answer_until[-1]
        self.route.patience[compared.part, signed.signer] = until

    def _comparison_of(self, part: int) -> SignedComparison | None:
        """The comparison that counts for this part: that of the first owner which is in turn or before."""
        found = self._comparisons[part]
        index = min(found, default=None)
        return found[index] if index is not None and index <= self.route.turn[part] else None

    # ---- weights -------------------------------------------------------------------------------------------

    def _parts_given_up(self, now: Seconds) -> set[int]:
        """Parts without a result: no owner is left to compare them, or too little time."""
        if now < self._given_up_at:
            return set(self.state.missing)
        parts = range(self.plan.parts)
        return {part for part in parts if part in self.state.missing or self._comparison_of(part) is None}

    @property
    def _given_up_at(self) -> Seconds:
        """A twelfth of a window after the last owner's deadline to compare: comparisons are small and fast."""
        last = len(self.plan.answer_until) - 1
        return self.plan.gather_until(last, 1) + self.plan.window_s / 12

    def _adoptable(self, lost: set[int], now: Seconds) -> AgreedWeights | None:
        """Of the weights that results name, those of most owners that are in turn or before.

        One owner is enough when there was time to request the missing comparison. The weights may leave out only
        parts that the local peer gives up as well: it declines these parts.
        """
        signers: dict[Digest, set[PeerId]] = {}
        for (part, index), name in self._named.items():
            if index <= self.route.turn[part]:
                signers.setdefault(name, set()).add(self.plan.owners(part)[index])
        late = now >= self.plan.gather_until(0, 1)
        for name in sorted(signers, key=lambda name: (-len(signers[name]), name)):
            enough = late or len(signers[name]) > self.plan.liars
            if enough and lost.issuperset(self.state.weighings[name].without):
                return self.state.weighings[name]
        return None

    def _finish_weights(self, found: ComputedWeights, now: Seconds) -> list[Effect]:
        asked = self._asked_for
        assert asked is not None
        weighing = self._weights_for_all(asked, found.weights)
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is not None:  # an owner's products were no inner products: no rule makes sense of them
            why = f"the owners' comparisons are invalid: the weighting {flaw}"
            return self._decline_parts(self.state.gathers, why) + self.calls.review(now)
        self.state.outliers[weighing.compared] = found.outliers
        fact = self.state.report(RowWeightsComputed(attempt=self.plan.attempt, weighing=weighing))
        return [fact, *self._weigh_with(weighing, now), *self.calls.review(now)]

    def _weights_for_all(self, asked: WeightRequest, weights: RowWeights) -> AgreedWeights:
        """The rule's result for settled authors, as weights for all authors: a newcomer's row weighs nothing."""
        peers, settled = asked.peers, self.plan.with_weight(asked.peers)
        if isinstance(weights, bytes):
            return AgreedWeights(peers, among(peers, settled, weights), asked.compared, asked.without)
        weight_of = dict(zip(settled, apply_influence(settled, weights, self.plan.influence), strict=True))
        weighed = tuple(weight_of.get(peer, 0.0) for peer in peers)
        return AgreedWeights(peers, weighed, asked.compared, asked.without)

    def _weigh_with(self, weighing: AgreedWeights, now: Seconds) -> list[Effect]:
        self.agreed = weighing
        self.state.weighings[weights_digest(weighing)] = weighing
        # an owner that compared has one more window to combine, and then it is the next owner's turn
        self._patient_until = min(now + self.plan.window_s, self.plan.answer_until[-1])
        self.route.patience = dict.fromkeys(self.route.patience, self._patient_until)
        unweighed = [part for part in self.state.gathers if part in weighing.without]
        return self._decline_parts(unweighed, "no owner compared its rows")

    # ---- results -------------------------------------------------------------------------------------------

    def weights_digest(self) -> Digest | None:
        assert self.agreed is not None
        return weights_digest(self.agreed)

    def admit_result(self, sender: PeerId, message: PartResult, answered: OwnerResult) -> bool:
        """Raise PeerFault unless the result comes with the weights that its owner signed for."""
        signer, weighing, part = message.statement.signer, message.weighing, answered.part
        if weighing is UNSET or weights_digest(weighing) != answered.rows:
            raise PeerFault(sender, f"sent a result of part {part} without the weights that it names")
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is not None or not fits_weights(answered, weighing):
            raise PeerFault(
                signer,
                f"answered for part {part} with invalid weights: it {flaw or 'combined rows without weights'}",
            )
        if self._named.setdefault((part, answered.owner_index), answered.rows) != answered.rows:
            return False  # the first result of each owner counts: further ones would only fill memory
        self.state.weighings.setdefault(answered.rows, weighing)
        return True

    def after_result(self, now: Seconds) -> list[Effect]:
        return self.calls.review(now) if self.agreed is None and self._asked_for is None else []

    def defers_result(self, heard: RemotePartResult, now: Seconds) -> bool:
        """Keep a result before its signer's turn.

        If it were accepted at once, the owners before would not compare the part, and no owner could weigh.
        """
        part, index = heard.answered.part, heard.answered.owner_index
        self.route.pass_turn(part, now)
        if index <= self.route.turn[part]:
            return False
        kept = self._early.get(part)
        if kept is None or (index, heard.payload is None) < (kept.answered.owner_index, kept.payload is None):
            self._early[part] = heard
        return True

    def results_for_body(
        self, answers: dict[int, ReceivedResult]
    ) -> tuple[dict[int, ReceivedResult], AgreedWeights | None]:
        """The results with the weights that most parts name: owners may have died between two weightings."""
        made = Counter(held.result.rows for held in answers.values())
        if not made:
            return {}, None
        name = max(made, key=lambda name: (made[name], name))
        alike = {part: held for part, held in answers.items() if held.result.rows == name}
        return alike, self.state.weighings[name]

    # ---- combining -----------------------------------------------------------------------------------------

    def _combine_if_due(
        self, part: int, gather: PartRowCollector, weighing: AgreedWeights, window: int, now: Seconds
    ) -> list[Effect]:
        self._wanted_since.setdefault(part, now)
        lacking = self._lacking(part, weighing)
        if lacking and now < self._rows_until(part, self.plan.gather_until(window, 1)):
            return []
        here = [peer for peer in weighing.peers if peer in gather.rows]
        weights = weights_left_of(weighing, here)
        if not self.plan.is_enough(here):
            return self._decline_parts([part], self._shortage(len(self.plan.with_weight(here)), "left"))
        if weights is None:
            return self._decline_parts([part], "rows with half of the weight or more died with an owner")
        gather.closed = True
        plan, rows = self.plan, _task_rows(gather, here)
        work = CombineRows(plan.round, part, plan.shares, rows, False, plan.statistic, plan.liars, weights)
        return [RunTask(self.state.job(f"own/{part}"), work)]

    def _lacking(self, part: int, weighing: AgreedWeights) -> list[PeerId]:
        """Authors of weighed rows that may still come."""
        rows = self.state.gathers[part].rows
        return [p for p in weighing.peers if p not in rows and p != self.me and not self.state.gone(p)]

    def _rows_until(self, part: int, at_least: Seconds) -> Seconds:
        """The deadline for rows with known weights: a third of a window, and not past the end."""
        until = max(at_least, self._wanted_since[part] + self.plan.window_s / 3)
        return min(until, self.plan.answer_until[-1])

    def _request_rows(self, part: int, authors: Iterable[PeerId]) -> list[Effect]:
        plan, effects = self.plan, list[Effect]()
        for author in authors:
            if author == self.me or self._requests[part, author] >= ROW_REQUESTS_MAX:
                continue
            # over a broken link the author took the local peer for gone, and sent its row to the next owner
            holders = {author, *plan.owners(part)} - {self.me}
            self._requests[part, author] += 1
            request = RowRequest(plan.round, plan.attempt, plan.trace, part, author)
            effects += [Send(holder, request) for holder in sorted(holders) if not self.state.gone(holder)]
        return effects

    # ---- declining, and names ------------------------------------------------------------------------------

    def _decline_parts(self, parts: Iterable[int], why: str) -> list[Effect]:
        """Decline parts without a review: the caller reviews, or the review in progress runs once more."""
        effects: list[Effect] = []
        for part in sorted(parts):
            if (part, self.me) not in self.route.declined and part not in self.state.answers:
                self.route.declined.add((part, self.me))
                self.changed = True
                effects += self.state.announce_decline(part, why)
        return effects

    def _shortage(self, rows: int, where: str) -> str:
        least, liars = self.plan.rows_least, self.plan.liars
        return f"{self.plan.statistic} needs {least} rows to withstand {liars} liars, {rows} are {where}"

    def _comparison_key(self, part: int) -> str:
        """Storage key of the own comparison of a part."""
        return f"said/{self.plan.round}/{self.plan.attempt}/compared/{part}"

    @cached_property
    def _comparing_peers(self) -> tuple[PeerId, ...]:
        """Peers that may have to weigh: all owners of any part, also in another owner's place."""
        return tuple(sorted({owner for tree in self.plan.topology.parts for owner in tree.owners}))

    def _show(self, to: PeerId, signed: SignedStatement) -> Send:
        return Send(to, PartRowProducts(self.plan.round, self.plan.attempt, self.plan.trace, signed))


def _task_rows(gather: PartRowCollector, names: Sequence[PeerId]) -> tuple[TaskRow, ...]:
    held = [(name, gather.rows[name]) for name in names]
    return tuple(TaskRow(name, row.weight, row.payload, (name,)) for name, row in held)


def among(peers: Sequence[PeerId], settled: Sequence[PeerId], mixtures: bytes) -> bytes:
    """Mixtures of settled authors' rows, as mixtures of all rows: newcomers have none, and are in none."""
    place = {peer: index for index, peer in enumerate(peers)}
    mixture_of = dict(zip(settled, mixtures_in(mixtures, len(settled)), strict=True))
    return packed_mixtures([[place[settled[row]] for row in mixture_of.get(peer, ())] for peer in peers])


def apply_influence(
    peers: Sequence[PeerId], weights: Sequence[float], influence: Mapping[PeerId, int]
) -> Sequence[float]:
    """Weights by distance times the influence of the authors' records, scaled to the same sum as before.

    Two products and one quotient per row, and exactly rounded sums: the same bits at every owner.
    """
    if not influence or not all(0 <= weight <= 1 + SUM_SLACK for weight in weights):
        return weights  # invalid weights: the caller finds the flaw
    products = [weight * influence[peer] for peer, weight in zip(peers, weights, strict=True)]
    before, after = fsum(weights), fsum(products)
    return [product * before / after for product in products] if after else weights
