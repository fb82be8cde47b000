"""A reduce whose rows are weighed by distances between whole updates, though every owner sees one part of them.

What `run.py` does with rows and answers happens here too, in two steps. An owner that has its part's rows first
*compares* them, and signs the products for all who may own a part. Products add up over parts, so every owner that
holds one comparison of each part weighs the rows alike: those that all parts have, nobody else's. Then it combines
its part with these weights, and its answer names the *weighing*, which travels with it. One body holds answers of
one weighing. Below the rows that the rule needs an owner declines, and the part counts for nobody.

A dead owner's comparison stays good: who holds it shows it to the next owner, who combines with it what rows it can
get; rows that died with the owner are left out of that part, and the others' weights are scaled up to the same sum.
Who lacks a comparison weighs as answers say that it hears: as soon as more owners say so than may lie, and any
one when there was time to ask for the comparison. A part that nobody has compared near the end is gone without.
An answer of an owner whose turn has not come waits for it. Owners are believed, with comparisons as with sums.
Never compares a part twice, never combines with weights of its own liking, never a mean instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import fsum
from typing import NamedTuple

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.base.machine import Effect, Event, Payload, Persist, Received, RunTask, Send, TaskDone, TaskFailed
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.buffers import PartAccumulator, ReceivedResult, StoredRow, name_of, shares_left
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import RowsWeighed
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    CompareRows,
    ComputedWeights,
    RowsCompared,
    TaskRow,
    WeighRows,
)
from atoll.protocol.allreduce.validation import SUM_SLACK, check_answer, check_compared, made_with, weighing_flaw
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PartResult, ResendRequest, RowComparison, RowRequest
from atoll.wire.messages.statements import AgreedWeights, OwnerComparison, OwnerResult, SignedStatement
from atoll.wire.weights import RowWeights, mixtures_in, packed_mixtures

Word = tuple[SignedStatement, OwnerComparison]
Early = tuple[PeerId, SignedStatement, OwnerResult, Payload | None]


class WeightRequest(NamedTuple):
    """What I asked the rule about."""

    peers: tuple[PeerId, ...]  # whose rows every part has
    compared: Digest
    without: tuple[int, ...]


WISHES_MAX = 2  # for one row, of everybody who may have it: it may be lost once


class WeightedReduce(AllReduce):
    """One peer's side of one attempt whose plan weighs rows. Made by `kinds.reduce_for`."""

    def __init__(self, notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> None:
        super().__init__(notary, plan, around)
        self.comparing: set[int] = set()  # parts whose rows I compare, or compared
        # compared before a restart: a second comparison would be another word in the same slot, and rows are lost
        self.lost = {part for part in self.gathers if self._compared_name(part) in around.said}
        self.weighings: dict[Digest, AgreedWeights] = {}  # mine, and those that answers name
        self.patient_until: Seconds = 0.0  # for those who compared, since weights are known
        self.since: dict[int, Seconds] = {}  # parts whose rows I want for weights that are known
        self.wished: Counter[tuple[int, PeerId]] = Counter()  # (part, whose row I asked for): how often
        self.words: list[dict[int, Word]] = [{} for _ in range(plan.parts)]  # by owner index
        self.asked_for: WeightRequest | None = None
        self.mine: AgreedWeights | None = None  # what I combine with
        self.named: dict[tuple[int, int], Digest] = {}  # (part, owner index): which of them its answer names
        self.told: set[tuple[int, PeerId]] = set()  # (part, whom I showed a dead owner's comparison)
        self.reminded: set[PeerId] = set()  # whom I asked to say everything again
        self.early: dict[int, Early] = {}  # by part: what an owner answered whose turn has not come
        self.again = False  # in the midst of looking I declined a part, or learned what rows weigh

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, RowComparison(statement=signed)):
                return self._hear_comparison(sender, signed, now)
            case Received(sender, PartResult() as message):
                return self._hear_answer(sender, message, event, now)
            case TaskDone(job, RowsCompared() as result) if job.startswith(self._job("compare/")):
                return self._compared(int(job.rsplit("/", 1)[1]), result, now)
            case TaskDone(job, ComputedWeights(weights=weights)) if job == self._job("weigh/0"):
                return self._weighed(weights, now)
            case TaskFailed(job, why) if job == self._job("weigh/0"):
                return self._refuse(self.gathers, why) + self.look_again(now)
            case _:
                return super().handle(event, now)

    # ---- what the round asks -------------------------------------------------------------------------------

    def look_again(self, now: Seconds) -> list[Effect]:
        if not self.started:
            return []
        self.again, effects = True, list[Effect]()
        while self.again:  # that moved turns, of which others may wait
            self.again = False
            effects += self._hear_early(now) + super().look_again(now) + self._weigh_if_due(now)
        return effects

    def for_body(self) -> tuple[dict[int, ReceivedResult], AgreedWeights | None]:
        """Those with the weighing that most parts were answered with: owners may have died between two."""
        made = Counter(held.answered.rows for held in self.answers.values())
        if not made:
            return {}, None
        name = max(made, key=lambda name: (made[name], name))
        alike = {part: held for part, held in self.answers.items() if held.answered.rows == name}
        return alike, self.weighings[name]

    def resend(self, to: PeerId) -> list[Effect]:
        effects = super().resend(to)
        for words in self.words if to in self.readers else ():
            spoken = [signed for signed, _ in words.values()]
            effects += [self._shown(to, s) for s in spoken if s.signer == self.me or self.gone(s.signer)]
        return effects

    def ask_again(self, now: Seconds) -> list[Effect]:
        """Comparisons and rows may have been lost."""
        if not self.started or self.finished or now < self.plan.gather_until(0, 2):
            return []
        effects: list[Effect] = []
        for part in sorted(self.since):
            if part not in self.answers and not self.gathers[part].closed and self.mine is not None:
                effects += self._wish(part, self._lacking(part, self.mine))
        if self.mine is None and self.gathers:
            unheard = [p for p in range(self.plan.parts) if self._word_of(p) is None and p not in self.missing]
            silent = {self.route.owner[part] for part in unheard} - {self.me} - self.reminded
            self.reminded |= silent
            repeat = ResendRequest(self.plan.round, self.plan.attempt, self.plan.trace)
            effects += [Send(owner, repeat) for owner in sorted(silent)]
        return effects

    # ---- what is otherwise than in a plain reduce ----------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        effects = super()._begin(now)
        if self.lost:
            effects += self._refuse(self.lost, "compared its rows before it restarted, and lost them")
            effects += self.look_again(now)
        return effects

    def _take(
        self, part: int, gather: PartAccumulator, sender: PeerId, held: StoredRow, now: Seconds
    ) -> list[Effect]:
        effects = super()._take(part, gather, sender, held, now)
        return effects + (self.look_again(now) if self.again else [])

    def _look_at(self, part: int, now: Seconds) -> list[Effect]:
        return super()._look_at(part, now) + self._show_comparison(part)

    def _late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Rows that have not come after a third of my window: their authors have them, or other owners."""
        gather = self.gathers.get(part)
        window = self._window(part, gather) if gather is not None else None
        if gather is None or gather.closed or window is None or part in self.comparing or self._word_of(part):
            return []
        if now < self.plan.gather_until(window, 2):
            return []
        giving = [(peer, self.commit_of(peer)) for peer in self.plan.listeners]
        names = [peer for peer, commit in giving if commit is not None and commit.parts > part]
        return self._wish(part, [peer for peer in names if peer not in gather.names])

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.closed or part in self.answers or (part, self.me) in self.route.declined:
            return []
        window = self._window(part, gather)
        if window is None:
            return []
        if self.mine is not None:
            return self._combine_if_due(part, gather, self.mine, window, now)
        return self._compare_if_due(part, gather, window, now) if self._word_of(part) is None else []

    def _rows_said(self, names: Iterable[PeerId]) -> Digest:
        assert self.mine is not None
        return name_of(self.mine)

    def _message_of(self, held: ReceivedResult) -> PartResult:
        return replace(super()._message_of(held), weighing=self.weighings[held.answered.rows])

    def _answer_heard(
        self, sender: PeerId, signed: SignedStatement, answered: OwnerResult, payload: Payload | None, now: Seconds
    ) -> list[Effect]:
        part, index = answered.part, answered.owner_index
        self.route.pass_turn(part, now)
        if index <= self.route.turn[part]:
            return super()._answer_heard(sender, signed, answered, payload, now)
        # held at once it would keep those before it from comparing the part, and so everybody from weighing
        kept = self.early.get(part)
        if kept is None or (index, payload is None) < (kept[2].owner_index, kept[3] is None):
            self.early[part] = sender, signed, answered, payload
        return []

    def _moments(self) -> list[Seconds]:
        moments = [*super()._moments(), self.patient_until, self._given_up_at]
        return moments + [self._rows_until(part, 0.0) for part in self.since]

    # ---- comparing -----------------------------------------------------------------------------------------

    def _compare_if_due(self, part: int, gather: PartAccumulator, window: int, now: Seconds) -> list[Effect]:
        if part in self.comparing or not gather.rows:
            return []
        early = now < self.plan.gather_until(window, 1)
        if early and (self.hearsay.fetches(part) or self.awaits(part, gather.names, gather.below)):
            return []
        if early and (asked := self._await_others_rows(part, gather, now)) is not None:
            return asked
        if len(self.plan.settled(gather.rows)) > WEIGHED_ROWS_MAX:
            return self._refuse([part], f"distances of more than {WEIGHED_ROWS_MAX} rows are too many")
        self.comparing.add(part)
        work = CompareRows(self.plan.round, part, self.plan.shares, _rows(gather, sorted(gather.rows)))
        return [RunTask(self._job(f"compare/{part}"), work)]

    def _compared(self, part: int, result: RowsCompared, now: Seconds) -> list[Effect]:
        plan, gather = self.plan, self.gathers[part]
        effects = self._name_garbage(part, result, gather.rows)
        for peer in result.undecodable:
            gather.rows.pop(peer, None)
        if self._word_of(part) is not None or part in self.answers:
            return effects + self.look_again(now)  # a dead owner's comparison was found meanwhile, and it counts
        if not plan.settled(result.counted):
            return effects + self._refuse([part], "no row of it decodes") + self.look_again(now)
        compared = OwnerComparison(
            plan.round, plan.attempt, part, gather.owner_index, result.counted, result.products
        )
        signed = self.notary.sign(compared)
        # durable before it is sent: a restarted owner must never compare a second time
        effects.append(Persist(self._compared_name(part), encode(compared)))
        effects += [self._shown(peer, signed) for peer in self.readers if peer != self.me]
        self._hold_word(signed, compared)
        return effects + self.look_again(now)

    def _hear_comparison(self, sender: PeerId, signed: SignedStatement, now: Seconds) -> list[Effect]:
        compared = self.notary.open(signed, OwnerComparison, self.vote_key_of(signed.signer))
        if (compared.round, compared.attempt) != (self.plan.round, self.plan.attempt):
            return []
        check_compared(self.plan, signed.signer, compared)
        if compared.owner_index in self.words[compared.part]:
            return []
        self._hold_word(signed, compared)
        return self.look_again(now)

    def _hold_word(self, signed: SignedStatement, compared: OwnerComparison) -> None:
        self.words[compared.part][compared.owner_index] = signed, compared
        # it answers when all parts are compared, which may take until the end
        until = self.patient_until if self.mine is not None else self.plan.answer_until[-1]
        self.route.patience[compared.part, signed.signer] = until

    def _word_of(self, part: int) -> Word | None:
        """The comparison of this part that counts: the first owner's, of those whose turn has come."""
        index = min(self.words[part], default=None)
        return self.words[part][index] if index is not None and index <= self.route.turn[part] else None

    def _show_comparison(self, part: int) -> list[Effect]:
        """Whoever takes over for a dead owner must not compare anew, and tells all who may have missed it."""
        word = self._word_of(part)
        if word is None or part in self.answers:
            return []
        (signed, _), owner = word, self.route.owner[part]
        if owner == signed.signer or not self.gone(signed.signer):
            return []
        wanted = self.readers if owner == self.me else (owner,)
        new = [p for p in wanted if p not in (self.me, signed.signer) and (part, p) not in self.told]
        self.told.update((part, p) for p in new)
        return [self._shown(peer, signed) for peer in new]

    # ---- weighing ------------------------------------------------------------------------------------------

    def _weigh_if_due(self, now: Seconds) -> list[Effect]:
        if self.mine is not None or self.asked_for is not None:
            return []
        lost = self._given_up(now)
        parts = [part for part in range(self.plan.parts) if part not in self.missing]
        if not self.gathers or any(self._word_of(part) is None for part in parts):
            weighing = self._believed(lost, now)
            if weighing is not None:
                self.again = True
                return self._weigh_with(weighing, now)
        parts = [part for part in parts if part not in lost]
        words = [word for word in map(self._word_of, parts) if word is not None]
        if not self.gathers or not parts or len(words) < len(parts):
            return []
        common = frozenset[PeerId].intersection(*(frozenset(c.contributors) for _, c in words))
        peers, settled = tuple(sorted(common)), tuple(self.plan.settled(sorted(common)))
        name = digest(b"".join(signed.body for signed, _ in words))
        without = tuple(part for part in range(self.plan.parts) if part not in parts)
        self.asked_for = WeightRequest(peers, name, without)
        if not settled or not self.plan.enough(settled):
            return self._refuse(self.gathers, self._shortage(len(settled), "in all parts"))
        given = tuple((tuple(self.plan.settled(c.contributors)), c.products) for _, c in words)
        work = WeighRows(self.plan.round, self.plan.statistic, self.plan.liars, settled, given)
        return [RunTask(self._job("weigh/0"), work)]

    def _given_up(self, now: Seconds) -> set[int]:
        """Parts that are gone without: nobody is left to compare them, or too little time."""
        if now < self._given_up_at:
            return set(self.missing)
        return {part for part in range(self.plan.parts) if part in self.missing or self._word_of(part) is None}

    @property
    def _given_up_at(self) -> Seconds:
        """The last owner may compare until a third of its window is left; comparisons are small, and come soon."""
        last = len(self.plan.answer_until) - 1
        return self.plan.gather_until(last, 1) + self.plan.window_s / 12

    def _believed(self, lost: set[int], now: Seconds) -> AgreedWeights | None:
        """Of the weighings that answers name, the one of most owners whose turn has come.

        One owner alone is believed when there was time to ask for the comparison that I lack. It may go without no
        part but those that I give up: I would decline them for it.
        """
        saying: dict[Digest, set[PeerId]] = {}
        for (part, index), name in self.named.items():
            if index <= self.route.turn[part]:
                saying.setdefault(name, set()).add(self.plan.owners(part)[index])
        late = now >= self.plan.gather_until(0, 1)
        for name in sorted(saying, key=lambda name: (-len(saying[name]), name)):
            enough = late or len(saying[name]) > self.plan.liars
            if enough and lost.issuperset(self.weighings[name].without):
                return self.weighings[name]
        return None

    def _weighed(self, weights: RowWeights, now: Seconds) -> list[Effect]:
        asked = self.asked_for
        assert asked is not None
        weighing = self._weighing_of(asked, weights)
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is not None:  # an owner's products were no products: no rule makes sense of them
            return self._refuse(self.gathers, f"what owners say of their rows {flaw}") + self.look_again(now)
        fact = self._report(RowsWeighed(attempt=self.plan.attempt, weighing=weighing))
        return [fact, *self._weigh_with(weighing, now), *self.look_again(now)]

    def _weighing_of(self, asked: WeightRequest, weights: RowWeights) -> AgreedWeights:
        """What the rule answered about the rows of those who are settled, as all say it."""
        peers, settled = asked.peers, self.plan.settled(asked.peers)
        if isinstance(weights, bytes):
            return AgreedWeights(peers, among(peers, settled, weights), asked.compared, asked.without)
        weight_of = dict(zip(settled, influenced(settled, weights, self.plan.influence), strict=True))
        weighed = tuple(weight_of.get(peer, 0.0) for peer in peers)
        return AgreedWeights(peers, weighed, asked.compared, asked.without)

    def _hear_answer(self, sender: PeerId, message: PartResult, event: Event, now: Seconds) -> list[Effect]:
        opened = self._open_answer(sender, message)
        if opened is None:
            return []
        answered, weighing = opened
        slot = answered.part, answered.owner_index
        if self.named.setdefault(slot, answered.rows) != answered.rows:
            return []  # the first word of each owner counts, and nobody fills the memory with others
        self.weighings.setdefault(answered.rows, weighing)
        effects = super().handle(event, now)
        return effects if self.mine is not None or self.asked_for is not None else effects + self.look_again(now)

    def _open_answer(self, sender: PeerId, message: PartResult) -> tuple[OwnerResult, AgreedWeights] | None:
        """Raise PeerFault unless an answer comes with the weighing that its owner signed for. None: not of now."""
        signed, weighing = message.statement, message.weighing
        answered = self.notary.open(signed, OwnerResult, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return None
        check_answer(self.plan, signed.signer, answered)
        if weighing is UNSET or name_of(weighing) != answered.rows:
            raise PeerFault(sender, f"shows an answer for part {answered.part} without what weighed its rows")
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is not None or not made_with(answered, weighing):
            raise PeerFault(signed.signer, f"answered for part {answered.part} and {flaw or 'weighed other rows'}")
        return answered, weighing

    def _hear_early(self, now: Seconds) -> list[Effect]:
        """Answers of owners whose turn has come meanwhile."""
        effects: list[Effect] = []
        for part in sorted(self.early):
            self.route.pass_turn(part, now)
            if self.early[part][2].owner_index <= self.route.turn[part]:
                effects += super()._answer_heard(*self.early.pop(part), now)
        return effects

    def _weigh_with(self, weighing: AgreedWeights, now: Seconds) -> list[Effect]:
        self.mine = weighing
        self.weighings[name_of(weighing)] = weighing
        # whoever compared has another window to combine, and then it is the next one's turn
        self.patient_until = min(now + self.plan.window_s, self.plan.answer_until[-1])
        self.route.patience = dict.fromkeys(self.route.patience, self.patient_until)
        return self._refuse([part for part in self.gathers if part in weighing.without], "nobody compared its rows")

    # ---- combining -----------------------------------------------------------------------------------------

    def _combine_if_due(
        self, part: int, gather: PartAccumulator, weighing: AgreedWeights, window: int, now: Seconds
    ) -> list[Effect]:
        self.since.setdefault(part, now)
        lacking = self._lacking(part, weighing)
        if lacking and now < self._rows_until(part, self.plan.gather_until(window, 1)):
            return []
        here = [peer for peer in weighing.peers if peer in gather.rows]
        weights = shares_left(weighing, here)
        if not self.plan.enough(here):
            return self._refuse([part], self._shortage(len(self.plan.settled(here)), "left"))
        if weights is None:
            return self._refuse([part], "most of what weighs anything died with its owner")
        gather.closed = True
        plan, rows = self.plan, _rows(gather, here)
        work = CombineRows(plan.round, part, plan.shares, rows, False, plan.statistic, plan.liars, weights)
        return [RunTask(self._job(f"own/{part}"), work)]

    def _lacking(self, part: int, weighing: AgreedWeights) -> list[PeerId]:
        """Whose rows that weigh may still come to me."""
        rows = self.gathers[part].rows
        return [p for p in weighing.peers if p not in rows and p != self.me and not self.gone(p)]

    def _rows_until(self, part: int, at_least: Seconds) -> Seconds:
        """Until when I wait for rows whose weights I know: a third of a window, and not past the end."""
        until = max(at_least, self.since[part] + self.plan.window_s / 3)
        return min(until, self.plan.answer_until[-1])

    def _wish(self, part: int, names: Iterable[PeerId]) -> list[Effect]:
        plan, effects = self.plan, list[Effect]()
        for peer in names:
            if peer == self.me or self.wished[part, peer] >= WISHES_MAX:
                continue
            # where a link is broken its author took me for gone, and gave it to the next owner
            holders = {peer, *plan.owners(part)} - {self.me}
            self.wished[part, peer] += 1
            wish = RowRequest(plan.round, plan.attempt, plan.trace, part, peer)
            effects += [Send(holder, wish) for holder in sorted(holders) if not self.gone(holder)]
        return effects

    def _gather_short_of(self, part: int, author: PeerId) -> PartAccumulator | None:
        gather = self.gathers.get(part)
        wished = self.wished[part, author] > 0 and gather is not None and not gather.closed
        return gather if wished else super()._gather_short_of(part, author)

    # ---- small words ---------------------------------------------------------------------------------------

    def _refuse(self, parts: Iterable[int], why: str) -> list[Effect]:
        """I cannot answer for these parts; whoever is in the midst of looking looks once more."""
        effects: list[Effect] = []
        for part in sorted(parts):
            if (part, self.me) not in self.route.declined and part not in self.answers:
                self.route.declined.add((part, self.me))
                self.again = True
                effects += self._say_declined(part, why)
        return effects

    def _shortage(self, rows: int, where: str) -> str:
        least, liars = self.plan.rows_least, self.plan.liars
        return f"{self.plan.statistic} needs {least} rows to withstand {liars} liars, {rows} are {where}"

    def _compared_name(self, part: int) -> str:
        return f"said/{self.plan.round}/{self.plan.attempt}/compared/{part}"

    @cached_property
    def readers(self) -> tuple[PeerId, ...]:
        """Who may have to weigh: all who own a part, also in another's place."""
        return tuple(sorted({owner for tree in self.plan.topology.parts for owner in tree.owners}))

    def _shown(self, to: PeerId, signed: SignedStatement) -> Send:
        return Send(to, RowComparison(self.plan.round, self.plan.attempt, self.plan.trace, signed))


def _rows(gather: PartAccumulator, names: Sequence[PeerId]) -> tuple[TaskRow, ...]:
    held = [(name, gather.rows[name]) for name in names]
    return tuple(TaskRow(name, row.weight, row.payload, (name,)) for name, row in held)


def among(peers: Sequence[PeerId], settled: Sequence[PeerId], mixtures: bytes) -> bytes:
    """Mixtures of the rows of those who are settled, as those of all: newcomers have none, and are in none."""
    place = {peer: index for index, peer in enumerate(peers)}
    mixture_of = dict(zip(settled, mixtures_in(mixtures, len(settled)), strict=True))
    return packed_mixtures([[place[settled[row]] for row in mixture_of.get(peer, ())] for peer in peers])


def influenced(
    peers: Sequence[PeerId], weights: Sequence[float], influence: Mapping[PeerId, int]
) -> Sequence[float]:
    """What rows weigh by their distances, times what their authors' records are worth; of the same sum as before.

    Two products and a quotient per row, and exactly rounded sums: the same bits at every owner.
    """
    if not influence or not all(0 <= weight <= 1 + SUM_SLACK for weight in weights):
        return weights  # these are none: whoever asked finds out
    products = [weight * influence[peer] for peer, weight in zip(peers, weights, strict=True)]
    before, after = fsum(weights), fsum(products)
    return [product * before / after for product in products] if after else weights
