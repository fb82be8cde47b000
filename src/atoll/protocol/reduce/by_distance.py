"""What both reduces that weigh rows by distances do alike, whether owners are believed or check each other.

An owner compares its rows once, also across a restart; an answer comes with the weighing that it was made by; rows
that died with an owner are left out, and the others' weights scaled up. Who compares, which comparison counts and
when somebody weighs stands in `weighed.py` and `watched_weighed.py`.
Never compares a part twice, never combines less than most of what weighs, never a mean instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import fsum

from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Ask, Effect
from atoll.protocol.reduce.checks import SUM_SLACK, check_answer, made_with, weighing_flaw
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.rows import Gather, Held, name_of, shares_left
from atoll.protocol.reduce.run import Reduce
from atoll.protocol.reduce.surroundings import Surroundings
from atoll.protocol.reduce.work import Combine, Compare, Row
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Answer
from atoll.wire.messages.statements import Answered, Weighing
from atoll.wire.weights import RowWeights, mixtures_in, packed_mixtures


class ByDistance(Reduce):
    """The half of a reduce that does not ask whom to believe."""

    def __init__(self, notary: Notary, plan: ReducePlan, around: Surroundings) -> None:
        super().__init__(notary, plan, around)
        self.comparing: set[int] = set()  # parts whose rows I compare, or compared
        # compared before a restart: a second comparison would be another word in the same slot, and rows are lost
        self.lost = {part for part in self.gathers if self._compared_name(part) in around.said}
        self.weighings: dict[Digest, Weighing] = {}  # mine, and those that answers name
        self.patient_until: Seconds = 0.0  # for those who compared, since weights are known
        self.since: dict[int, Seconds] = {}  # parts whose rows I want for weights that are known
        self.wished: Counter[tuple[int, PeerId]] = Counter()  # (part, whose row I asked for): how often
        self.again = False  # in the midst of looking I declined a part, or learned what rows weigh

    def _begin(self, now: Seconds) -> list[Effect]:
        effects = super()._begin(now)
        if self.lost:
            effects += self._refuse(self.lost, "compared its rows before it restarted, and lost them")
            effects += self.look_again(now)
        return effects

    def _take(self, part: int, gather: Gather, sender: PeerId, held: Held, now: Seconds) -> list[Effect]:
        effects = super()._take(part, gather, sender, held, now)
        return effects + (self.look_again(now) if self.again else [])

    # ---- comparing and weighing ----------------------------------------------------------------------------

    def _compare_rows(self, part: int, gather: Gather) -> list[Effect]:
        self.comparing.add(part)
        work = Compare(self.plan.round, part, self.plan.shares, _rows(gather, sorted(gather.rows)))
        return [Ask(self._job(f"compare/{part}"), work)]

    @property
    def _given_up_at(self) -> Seconds:
        """The last owner may compare until a third of its window is left; comparisons are small, and come soon."""
        last = len(self.plan.answer_until) - 1
        return self.plan.gather_until(last, 1) + self.plan.window_s / 12

    def _weighing_of(
        self, peers: Sequence[PeerId], weights: RowWeights, compared: bytes, without: Iterable[int]
    ) -> Weighing:
        """What the rule answered about the rows of those who are settled, as all say it."""
        settled = self.plan.settled(peers)
        if isinstance(weights, bytes):
            return Weighing(tuple(peers), among(peers, settled, weights), compared, tuple(without))
        weight_of = dict(zip(settled, influenced(settled, weights, self.plan.influence), strict=True))
        weighed = tuple(weight_of.get(peer, 0.0) for peer in peers)
        return Weighing(tuple(peers), weighed, compared, tuple(without))

    def _await_answers(self, now: Seconds) -> None:
        """Weights are known: whoever compared has another window to combine, and then it is the next one's turn."""
        self.patient_until = min(now + self.plan.window_s, self.plan.answer_until[-1])
        self.route.patience = dict.fromkeys(self.route.patience, self.patient_until)

    def _open_answer(self, sender: PeerId, message: Answer) -> tuple[Answered, Weighing] | None:
        """Raise PeerFault unless an answer comes with the weighing that its owner signed for. None: not of now."""
        signed, weighing = message.statement, message.weighing
        answered = self.notary.open(signed, Answered, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return None
        check_answer(self.plan, signed.signer, answered)
        if weighing is UNSET or name_of(weighing) != answered.rows:
            raise PeerFault(sender, f"shows an answer for part {answered.part} without what weighed its rows")
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is not None or not made_with(answered, weighing):
            raise PeerFault(signed.signer, f"answered for part {answered.part} and {flaw or 'weighed other rows'}")
        return answered, weighing

    # ---- combining -----------------------------------------------------------------------------------------

    def _combine_weighed(self, part: int, gather: Gather, weighing: Weighing) -> list[Effect]:
        """Of the rows that are here."""
        here = [peer for peer in weighing.peers if peer in gather.rows]
        weights = shares_left(weighing, here)
        if not self.plan.enough(here):
            return self._refuse([part], self._shortage(len(self.plan.settled(here)), "left"))
        if weights is None:
            return self._refuse([part], "most of what weighs anything died with its owner")
        gather.closed = True
        return [Ask(self._job(f"own/{part}"), self._sum_of(part, _rows(gather, here), weights))]

    def _sum_of(self, part: int, rows: tuple[Row, ...], weights: RowWeights) -> Combine:
        plan = self.plan
        return Combine(plan.round, part, plan.shares, rows, False, plan.statistic, plan.liars, weights)

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


def _rows(gather: Gather, names: Sequence[PeerId]) -> tuple[Row, ...]:
    held = [(name, gather.rows[name]) for name in names]
    return tuple(Row(name, row.weight, row.payload, (name,)) for name, row in held)


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
