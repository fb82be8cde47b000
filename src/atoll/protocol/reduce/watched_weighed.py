"""A reduce whose rows are weighed by distances, and whose owners are believed neither with products nor with sums.

`watched.py` and `weighed.py` at once. The first w + 1 owners of a part all compare its rows, and sign the digest of
what they got; products have one order of sums, so a lie is a different byte. What is said of the rows goes to one
`Witnesses`, what is said of their sum to another: each believes what more owners signed than may lie, or what it
made again from rows that were opened. Out of one believed comparison of each part everybody who owns or votes
weighs the rows for itself. The owners combine with that, sign it, and show it as watched owners do.

A weighing is judged like the rest: it names the comparisons that it was made of, so whoever holds those makes it
again. An answer is believed only on a weighing that proved true; weights that do not follow are its owner's lie.
Whoever weighs by a comparison that not all owners made alike passes it on, and opens its rows to those who ask:
nobody can show a row to some members alone. What was lost is asked for (`WantWords`) before anybody is doubted.
Never weighs by the word of one owner, never combines rows that were not the ones compared, never a mean instead.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import DIGEST_BYTES, Digest, PeerId, Seconds
from atoll.base.limits import WEIGHED_ROWS_MAX
from atoll.base.machine import Ask, Done, Effect, Event, Failed, Keep, Payload, Received, Send
from atoll.keys.digest import digest
from atoll.protocol.reduce.by_distance import ByDistance
from atoll.protocol.reduce.checks import (
    check_compared,
    check_products,
    made_with,
    products_bytes,
    weighing_flaw,
)
from atoll.protocol.reduce.facts import RowsWeighed
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.rows import AnswerHeld, Gather, Held, name_of, shares_left
from atoll.protocol.reduce.surroundings import Surroundings
from atoll.protocol.reduce.watched import WatchedReduce
from atoll.protocol.reduce.witness import Lied, Question, Witnesses, Word, loosely
from atoll.protocol.reduce.work import Combine, Combined, Compare, Products, Row, Weigh, Weights
from atoll.wire.codec import encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Answer, Comparison, WantRow, WantWords
from atoll.wire.messages.statements import Answered, Compared, Lapse, Signed, Weighing
from atoll.wire.weights import RowWeights

Choice = tuple[Digest | None, ...]  # of each part, what its rows were compared to; None: it goes without

ASKS_MAX = 6  # for one owner's words about one part, and for one row: an attempt is a few windows long
TOLD_MAX = 2 * ASKS_MAX  # times that one peer is told my words about one part


class WatchedWeighedReduce(ByDistance, WatchedReduce):
    """One peer's side of one attempt whose plan weighs rows and has witnesses. Made by `reduce.reduce_for`."""

    def __init__(self, notary: Notary, plan: ReducePlan, around: Surroundings) -> None:
        super().__init__(notary, plan, around)
        own = plan, self.me, loosely(self._row_held), self.commit_of, self.gone
        sums = Question("judge", loosely(self._sum_again), loosely(self._is_true), loosely(self._same_rows))
        self.watch = Witnesses(*own, around.judges, around.two_faced, sums)
        weighs = around.judges or bool(self.gathers)
        rows = Question("recompare", loosely(self._compare_again), None, self.watch.same_rows)
        self.compared = Witnesses(*own, weighs, around.two_faced, rows)
        self.asked_for: Choice | None = None  # what I weigh by
        self.weighing: Weighing | None = None  # what came of it, and what I combine with
        self.chosen: dict[Choice, Weighing | None] = {}  # what the rule said, or is just asked; None: nothing
        self.pending: set[Choice] = set()  # it is asked
        self.choices: list[Choice] = []  # in the order in which it was asked
        self.verdicts: dict[Digest, bool] = {}  # of these, what is known
        self.made_up: set[Digest] = set()  # of these, whose weights follow from nothing
        self.doubtful: set[int] = set()  # parts of which such a weighing names a comparison that nobody made again
        self.in_time: set[int] = set()  # parts of which I believed a comparison before they were given up
        # (part, whose words I asked for, after weights were known): how often
        self.wondered: Counter[tuple[int, PeerId, bool]] = Counter()
        self.told: Counter[tuple[int, PeerId]] = Counter()  # (part, whom I told mine): how often

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, Comparison() as message):
                return self._hear_comparison(sender, message, now)
            case Received(sender, Answer() as message):
                return self._hear_answer(sender, message, event, now)
            case Received(sender, WantWords(part=part)):
                return self._tell_words(sender, part)
            case Done(job, Products() as result) if job.startswith(self._job("compare/")):
                return self._compare_done(int(job.rsplit("/", 1)[1]), result, now)
            case Done(job, Products() as result) if job.startswith(self._job("recompare/")):
                return self._compared_again(job, result, now)
            case Done(job, Weights(weights=weights)) if job.startswith(self._job("weigh/")):
                return self._weighed(self.choices[int(job.rsplit("/", 1)[1])], weights, now)
            case Failed(job) if job.startswith(self._job("recompare/")):
                return []  # nobody waits for my judgement but I
            case Failed(job, why) if job.startswith(self._job("weigh/")):
                mine = self.choices[int(job.rsplit("/", 1)[1])] == self.asked_for  # it stays pending: no verdict
                return (self._refuse(self.gathers, why) if mine else []) + self.look_again(now)
            case _:
                return super().handle(event, now)

    # ---- what the round asks -------------------------------------------------------------------------------

    def look_again(self, now: Seconds) -> list[Effect]:
        if not self.started:
            return []
        self.again, effects = True, list[Effect]()
        while self.again:  # that moved turns, of which others may wait
            self.again = False
            effects += self._judge_weighings(now) + super().look_again(now) + self._weigh_if_due(now)
        return effects

    def for_body(self) -> tuple[dict[int, AnswerHeld], Weighing | None]:
        """The answers of the weighing that most parts were answered with."""
        found: dict[Digest, dict[int, AnswerHeld]] = defaultdict(dict)
        names = {w.answered.rows for case in self.watch.cases for w in case.words}
        for name in sorted(names & self.weighings.keys()):
            for part in range(self.plan.parts):
                if (held := self.watch.settled(part, patient=False, of=name)) is not None:
                    found[name][part] = held
        if not found:
            return {}, None
        name = max(found, key=lambda name: (len(found[name]), name))
        return found[name], self.weighings[name]

    def examine(
        self, signed: Signed, said: Answered | Compared, now: Seconds, weighing: Weighing | None = None
    ) -> list[Effect]:
        if said.attempt != self.plan.attempt:
            return []
        if isinstance(said, Compared):
            check_compared(self.plan, signed.signer, said)
            return self.compared.hear(signed, self._claim(said), None) + self.look_again(now)
        if weighing is not None and name_of(weighing) == said.rows and made_with(said, weighing):
            self.weighings.setdefault(said.rows, weighing)
        return self.watch.hear(signed, said, None) + self.look_again(now)

    def resend(self, to: PeerId) -> list[Effect]:
        mine = (w for part in range(self.plan.parts) for w in self._words(part) if w.statement.signer == self.me)
        return super().resend(to) + [self._shown(to, word) for word in mine]

    def ask_again(self, now: Seconds) -> list[Effect]:
        """Rows and words may have been lost."""
        if not self.started or now < self.plan.gather_until(0, 2):
            return []
        effects = [e for part in range(self.plan.parts) for e in self._watch_part(part, now, again=True)]
        for part in sorted(self.since):
            if part not in self.answers and not self.gathers[part].closed and self.weighing is not None:
                effects += self._wish(part, self._lacking(part, self.weighing))
        window_s, weighed = self.plan.window_s, self.weighing is not None
        since = self.patient_until - 2 * window_s / 3 if weighed else self.plan.gather_until(0, 2)
        times = min(ASKS_MAX, 1 + int(ASKS_MAX * (now - since) / window_s)) if now >= since else 0
        for part, owner in sorted(set(self._unanswered())):
            if owner != self.me and self.wondered[part, owner, weighed] < times:
                self.wondered[part, owner, weighed] += 1
                effects.append(Send(owner, WantWords(self.plan.round, self.plan.attempt, self.plan.trace, part)))
        return effects + self._want_bytes() + self.look_again(now)

    def _unanswered(self) -> Iterator[tuple[int, PeerId]]:
        """(part, owner) whose words I wait for, or who stands on comparisons that I never heard."""
        for part in range(self.plan.parts):
            if self.weighing is None:
                yield from ((part, owner) for owner in self._may_compare(part))
            elif part not in self.answers and part not in self.missing:
                yield from ((part, owner) for owner in self._unheard(part, -1))
        for name, weighing in self.weighings.items():
            if name in self.verdicts:
                continue
            unknown = [p for p, x in enumerate(self._choice_of(weighing)) if x and self._word_named(p, x) is None]
            for signer in self._signers(name):
                yield from ((part, signer) for part in unknown if not self.gone(signer))

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        found: dict[PeerId, Lapse] = {}
        if not self.started:
            return found
        judged = (
            (self.compared, self.plan.answer_until[0]),
            (self.watch, self._answers_by),
        )
        for witnesses, until in judged:
            for part in range(self.plan.parts):
                held = self.answers.get(part) if witnesses is self.watch else witnesses.settled(part, patient=False)
                declined = {who for where, who in self.route.declined if where == part}
                seen = witnesses.lapses(part, held.answered if held is not None else None, now >= until)
                found |= {peer: why for peer, why in seen.items() if peer not in declined}
        return found

    # ---- what is otherwise than where sums alone are watched -----------------------------------------------

    @property
    def _answers_by(self) -> Seconds:
        """Answers are late when a window is over since the rows are weighed."""
        return self.patient_until if self.weighing is not None else self.plan.answer_until[-1]

    def _watch_part(self, part: int, now: Seconds, again: bool = False) -> list[Effect]:
        if not self.started:
            return []
        late = now >= self.plan.answer_until[0]
        waiting = not late and bool(self._may_compare(part))
        wanted = self.weighing is None or part in self.doubtful
        doubts = self.compared.look(part, waiting, again) if wanted else []
        return doubts + super()._watch_part(part, now, again)

    def _unheard(self, part: int, after: int) -> list[PeerId]:
        """Who kept its comparison back will keep its answer back, too."""
        spoken, late = self.compared.spoken(part), self.weighing is not None
        return [owner for owner in super()._unheard(part, after) if not late or owner in spoken]

    def _reveal_until(self, owner_index: int) -> Seconds:
        return self._answers_by - self.plan.window_s / 6

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.closed or part in self.answers or (part, self.me) in self.route.declined:
            return []
        window = self._window(part, gather)
        if window is None:
            return []
        if self.weighing is not None:
            return self._combine_if_due(part, gather, self.weighing, now)
        return self._compare_if_due(part, gather, window, now)

    def _late_rows(self, part: int, now: Seconds) -> list[Effect]:
        return super()._late_rows(part, now) if part not in self.comparing else []

    def _rows_said(self, names: Iterable[PeerId]) -> Digest:
        assert self.weighing is not None
        return name_of(self.weighing)

    def _message_of(self, held: AnswerHeld) -> Answer:
        return replace(super()._message_of(held), weighing=self.weighings.get(held.answered.rows, UNSET))

    def _row_held(self, part: int, peer: PeerId) -> Held | None:
        return super()._row_held(part, peer) or self._row_opened(part, peer)

    def _row_opened(self, part: int, peer: PeerId) -> Held | None:
        return self.compared.cases[part].rows.get(peer) if 0 <= part < self.plan.parts else None

    def _take_opened_row(self, part: int, author: PeerId, row: Held, now: Seconds) -> list[Effect]:
        if self.wished[part, author] and (gather := self.gathers.get(part)) is not None and not gather.closed:
            return self._take(part, gather, author, row, now)
        if self.compared.wants(part, author):
            return self.compared.take(part, author, row)
        return super()._take_opened_row(part, author, row, now)

    def _moments(self) -> list[Seconds]:
        moments = [*super()._moments(), self.patient_until, self._given_up_at, self._rows_known_by]
        return moments + [self._rows_until(part) for part in self.since]

    # ---- comparing -----------------------------------------------------------------------------------------

    def _compare_if_due(self, part: int, gather: Gather, window: int, now: Seconds) -> list[Effect]:
        if part in self.comparing or not gather.rows:
            return []
        if now < self.plan.gather_until(window, 1):
            if self.awaits(part, gather.names, gather.below):
                return []
            if now < self.detours.without_the_gone_at(part, now) and (lacking := self._committed_to(part, gather)):
                return self._wish(part, (peer for peer in lacking if not self.wished[part, peer]))
        if len(self.plan.settled(gather.rows)) > WEIGHED_ROWS_MAX:
            return self._refuse([part], f"distances of more than {WEIGHED_ROWS_MAX} rows are too many")
        return self._compare_rows(part, gather)

    def _committed_to(self, part: int, gather: Gather) -> list[PeerId]:
        """Whose rows there must be that I lack, though their authors are gone for me."""
        known = ((peer, self.commit_of(peer)) for peer in self.plan.listeners if peer not in gather.names)
        return [peer for peer, commit in known if commit is not None and commit.parts > part]

    def _compare_done(self, part: int, result: Products, now: Seconds) -> list[Effect]:
        plan, gather = self.plan, self.gathers[part]
        effects = self._name_garbage(part, result)
        for peer in result.undecodable:
            gather.rows.pop(peer, None)
        if not plan.enough(result.counted):
            few = len(plan.settled(result.counted))
            return effects + self._refuse([part], self._shortage(few, "here")) + self.look_again(now)
        name, rows = digest(result.products), self._committed_by(result.counted)
        compared = Compared(plan.round, plan.attempt, part, gather.owner_index, result.counted, name, rows)
        word = Word(self.notary.sign(compared), self._claim(compared))
        # durable before it is sent: a restarted owner must never compare a second time
        effects.append(Keep(self._compared_name(part), encode(compared)))
        effects += self._note(word, result.products)
        effects += [self._shown(peer, word) for peer in self.route.others()]
        return effects + self.look_again(now)

    def _hear_comparison(self, sender: PeerId, message: Comparison, now: Seconds) -> list[Effect]:
        signed, products = message.statement, message.products
        compared = self.notary.open(signed, Compared, self.vote_key_of(signed.signer))
        if (compared.round, compared.attempt) != (self.plan.round, self.plan.attempt):
            return []
        check_compared(self.plan, signed.signer, compared)
        if products is UNSET or digest(products) != compared.products:
            raise PeerFault(sender, f"shows other products of part {compared.part} than were signed")
        check_products(self.plan, signed.signer, compared, products)
        return self._note(Word(signed, self._claim(compared)), products) + self.look_again(now)

    def _note(self, word: Word, products: bytes) -> list[Effect]:
        part, signer = word.answered.part, word.statement.signer
        self.route.patience[part, signer] = self._answers_by
        payload = Payload(word.answered.digest, len(products), products)
        return self.compared.hear(word.statement, word.answered, payload)

    def _claim(self, compared: Compared) -> Answered:
        """What a comparison says, in the form of an answer whose bytes are the products."""
        c, size = compared, products_bytes(len(self.plan.settled(compared.contributors)))
        assert c.rows is not UNSET
        return Answered(c.round, c.attempt, c.part, c.owner_index, Digest(c.products), size, c.contributors, c.rows)

    def _compare_again(self, said: Answered, rows: tuple[Row, ...]) -> Compare:
        return Compare(self.plan.round, said.part, self.plan.shares, rows)

    def _compared_again(self, job: str, result: Products, now: Seconds) -> list[Effect]:
        check, part = (int(word) for word in job.rsplit("/", 2)[1:])
        made = Payload(digest(result.products), len(result.products), result.products)
        found = Combined(made, result.counted, result.undecodable)
        return self.compared.recomputed(part, check, found) + self.look_again(now)

    def _may_compare(self, part: int) -> list[PeerId]:
        """Which of the owners that compare this part have not spoken, and may."""
        over = self.compared.spoken(part) | {who for where, who in self.route.declined if where == part}
        left = [owner for owner in self.plan.watchers(part) if owner not in over]
        return [owner for owner in left if owner == self.me or not self.gone(owner)]

    # ---- weighing ------------------------------------------------------------------------------------------

    def _weigh_if_due(self, now: Seconds) -> list[Effect]:
        if self.asked_for is not None or not self.compared.judges:
            return []
        choice = self._chosen(now)
        if choice is None or not any(choice):
            return []
        self.asked_for = choice
        effects = self._pass_on(choice)
        if choice not in self.chosen:
            return effects + self._ask_rule(choice)
        return effects if choice in self.pending else effects + self._weigh_with(choice, now)

    def _pass_on(self, choice: Choice) -> list[Effect]:
        """Comparisons that I believe though not all owners made them: whoever heard others shall see them."""
        effects: list[Effect] = []
        for word, _ in self._held(choice):
            words = self.compared.cases[word.answered.part].words
            by = {w.statement.signer for w in words if w.named == word.named}
            if len(by) <= self.plan.witnesses and self.me not in by:
                effects += [self._shown(peer, word) for peer in self.route.others()]
        return effects

    def _chosen(self, now: Seconds) -> Choice | None:
        """What I weigh by: of every part the comparison that stands, or what others weighed by. None: not yet."""
        lost = self._given_up(now)
        late, patient = now >= self.plan.answer_until[0], now < self._rows_known_by
        chosen: list[Digest | None] = []
        for part in range(self.plan.parts):
            held = self.compared.settled(part, patient)
            if part in lost:
                chosen.append(None)
            elif held is None or (not late and self._may_compare(part)):
                return self._chosen_by_others(late)
            else:
                chosen.append(Word(held.statement, held.answered).named)
        return tuple(chosen)

    def _chosen_by_others(self, late: bool) -> Choice | None:
        """A weighing that proved true, if more owners stand on it than may lie, or if I was late to find my own."""
        names = [name for name, true in self.verdicts.items() if true]
        for name in sorted(names, key=lambda name: (-len(self._signers(name)), name)):
            if late or len(self._signers(name)) > max(self.plan.liars, self.plan.witnesses):
                return self._choice_of(self.weighings[name])
        return None

    def _ask_rule(self, choice: Choice) -> list[Effect]:
        """What do these comparisons make the rows weigh?"""
        plan, held = self.plan, self._held(choice)
        settled = tuple(plan.settled(self._common(choice)))
        self.chosen[choice] = None
        self.choices.append(choice)
        if not settled or not plan.enough(settled):
            why = self._shortage(len(settled), "in all parts")
            return self._refuse(self.gathers, why) if choice == self.asked_for else []
        self.pending.add(choice)
        given = tuple((tuple(plan.settled(w.answered.contributors)), products) for w, products in held)
        work = Weigh(plan.round, plan.statistic, plan.liars, settled, given)
        return [Ask(self._job(f"weigh/{len(self.choices) - 1}"), work)]

    def _weighed(self, choice: Choice, weights: RowWeights, now: Seconds) -> list[Effect]:
        self.pending.discard(choice)
        compared = b"".join(name for name in choice if name is not None)
        without = (part for part, name in enumerate(choice) if name is None)
        weighing = self._weighing_of(self._common(choice), weights, compared, without)
        flaw = weighing_flaw(self.plan, weighing)
        if flaw is None:
            self.chosen[choice] = weighing
        if choice != self.asked_for:
            return self.look_again(now)
        if flaw is not None:
            return self._refuse(self.gathers, f"what is true of their rows {flaw}") + self.look_again(now)
        return self._weigh_with(choice, now) + self.look_again(now)

    def _weigh_with(self, choice: Choice, now: Seconds) -> list[Effect]:
        weighing = self.weighing = self.chosen[choice]
        if weighing is None:
            return self._refuse(self.gathers, self._shortage(len(self._common(choice)), "in all parts"))
        self._await_answers(now)
        name = name_of(weighing)
        self.weighings[name], self.verdicts[name], self.again = weighing, True, True
        told = self._report(RowsWeighed(attempt=self.plan.attempt, weighing=weighing))
        gone_without = [part for part in self.gathers if part in weighing.without]
        return [told, *self._refuse(gone_without, "nobody compared its rows")]

    def _given_up(self, now: Seconds) -> set[int]:
        """Parts that are gone without: nobody is left to compare them, or too little time."""
        if now < self._given_up_at:
            here = (p for p in range(self.plan.parts) if p not in self.in_time)
            self.in_time.update(p for p in here if self.compared.settled(p, patient=False) is not None)
            return self.missing - self.in_time
        return set(range(self.plan.parts)) - self.in_time

    @property
    def _rows_known_by(self) -> Seconds:
        """Until when a larger comparison may still prove true, if one owner kept silent for its whole window."""
        return self.plan.answer_until[0] + self.plan.window_s / 2

    # ---- judging weighings ---------------------------------------------------------------------------------

    def _judge_weighings(self, now: Seconds) -> list[Effect]:
        """Of those that answers name: true, if it follows from what I believe; a lie, if from nothing."""
        if not self.compared.judges:
            return []
        effects, lost = list[Effect](), self._given_up(now)
        self.doubtful = set()
        for name, weighing in list(self.weighings.items()):
            if name in self.verdicts:
                continue
            choice = self._choice_of(weighing)
            held = self._held(choice)
            if not held or len(held) < sum(x is not None for x in choice):
                continue  # it is asked for
            beliefs = {w.answered.part: self.compared.believes(w.answered) for w, _ in held}
            self.doubtful.update(part for part, true in beliefs.items() if true is None)
            if False in beliefs.values():
                self.verdicts[name] = False  # the lie is another's
            if not all(beliefs.values()):
                continue  # what is not true of the rows might keep the rule busy for long
            if choice not in self.chosen:
                effects += self._ask_rule(choice)
            if choice in self.pending:
                continue
            if self.chosen[choice] != weighing:
                self.verdicts[name] = False
                self.made_up.add(name)
                effects += self._call_lies(name)
            elif lost.issuperset(weighing.without):
                self.verdicts[name] = self.again = True
        return effects

    def _call_lies(self, name: Digest) -> list[Effect]:
        """Owners that stand on weights which no comparison makes."""
        words = [w for case in self.watch.cases for w in case.words if w.answered.rows == name]
        return [
            self._report(Lied(peer=w.statement.signer, part=w.answered.part, statement=w.statement)) for w in words
        ]

    def _signers(self, name: Digest) -> set[PeerId]:
        """Whose answers stand on this weighing."""
        return {w.statement.signer for case in self.watch.cases for w in case.words if w.answered.rows == name}

    def _hear_answer(self, sender: PeerId, message: Answer, event: Event, now: Seconds) -> list[Effect]:
        opened = self._open_answer(sender, message)
        if opened is None:
            return []
        signed, (answered, weighing) = message.statement, opened
        words = self.watch.cases[answered.part].words
        news = all(w.answered != answered for w in words)
        effects = super().handle(event, now)
        if all(w.answered != answered for w in words):
            return effects  # its owner has said too much: nobody fills the memory with weighings
        self.weighings.setdefault(answered.rows, weighing)
        if news and answered.rows in self.made_up:
            effects.append(self._report(Lied(peer=signed.signer, part=answered.part, statement=signed)))
        return effects + self.look_again(now)

    # ---- combining -----------------------------------------------------------------------------------------

    def _combine_if_due(self, part: int, gather: Gather, weighing: Weighing, now: Seconds) -> list[Effect]:
        self.since.setdefault(part, now)
        if part in weighing.without:
            return []
        if not self._compared_mine(part, weighing):
            return self._refuse([part], "its rows were committed to twice, and mine are not those compared")
        for peer in weighing.peers:
            if peer not in gather.rows and (row := self._row_opened(part, peer)) is not None:
                gather.add(peer, row)
        if self._lacking(part, weighing) and now < self._rows_until(part):
            return []
        return self._combine_weighed(part, gather, weighing)

    def _sum_again(self, said: Answered, rows: tuple[Row, ...]) -> Combine:
        weights = shares_left(self.weighings[said.rows], said.contributors)
        return self._sum_of(said.part, rows, weights or (0.0,) * len(rows))

    def _is_true(self, answered: Answered) -> bool | None:
        return self.verdicts.get(answered.rows)

    def _same_rows(self, answered: Answered) -> bool | None:
        """Was it made of the rows that I know of? It stands on a comparison of these."""
        weighing = self.weighings.get(answered.rows)
        return self._compared_mine(answered.part, weighing) if weighing is not None else None

    def _compared_mine(self, part: int, weighing: Weighing) -> bool | None:
        name = self._choice_of(weighing)[part]
        word = self._word_named(part, name) if name is not None else None
        return self.compared.same_rows(word.answered) if word is not None else None

    def _lacking(self, part: int, weighing: Weighing) -> list[PeerId]:
        """Whose rows that weigh may still come to me, from whomever."""
        rows = self.gathers[part].rows
        return [peer for peer in weighing.peers if peer not in rows and peer != self.me]

    def _rows_until(self, part: int) -> Seconds:
        """Until when I wait for rows whose weights I know."""
        until = max(self.plan.gather_until(0, 1), self.since[part] + self.plan.window_s / 3)
        return min(until, self.plan.answer_until[-1])

    def _wish(self, part: int, names: Iterable[PeerId]) -> list[Effect]:
        plan, effects = self.plan, list[Effect]()
        for peer in names:
            if self.wished[part, peer] < ASKS_MAX:
                self.wished[part, peer] += 1
                wish = WantRow(plan.round, plan.attempt, plan.trace, part, peer)
                holders = [
                    p for p in dict.fromkeys([peer, *plan.owners(part)]) if p != self.me and not self.gone(p)
                ]
                at = self.wished[part, peer]  # two at a time, in turn
                effects += [Send(holders[(at + k) % len(holders)], wish) for k in range(min(2, len(holders)))]
        return effects

    # ---- small words ---------------------------------------------------------------------------------------

    def _choice_of(self, weighing: Weighing) -> Choice:
        at, chosen = 0, list[Digest | None]()
        for part in range(self.plan.parts):
            if part in weighing.without:
                chosen.append(None)
                continue
            chosen.append(Digest(weighing.compared[at : at + DIGEST_BYTES]))
            at += DIGEST_BYTES
        return tuple(chosen)

    def _word_named(self, part: int, name: Digest) -> Word | None:
        """A comparison of this part that says this."""
        return next((w for w in self._words(part) if w.named == name), None)

    def _words(self, part: int) -> list[Word]:
        """Comparisons whose products are here: of an accusation I see the statement alone."""
        case = self.compared.cases[part]
        return [w for w in case.words if w.answered.digest in case.bytes_of]

    def _common(self, choice: Choice) -> tuple[PeerId, ...]:
        """Whose rows every part has."""
        names = (frozenset(word.answered.contributors) for word, _ in self._held(choice))
        return tuple(sorted(frozenset[PeerId].intersection(*names)))

    def _held(self, choice: Choice) -> list[tuple[Word, bytes]]:
        words = [self._word_named(part, name) for part, name in enumerate(choice) if name is not None]
        cases = self.compared.cases
        return [(w, cases[w.answered.part].bytes_of[w.answered.digest].data) for w in words if w is not None]

    def _tell_words(self, to: PeerId, part: int) -> list[Effect]:
        """What I signed about this part, and the comparison that I weigh by."""
        if not 0 <= part < self.plan.parts or to not in self.plan.listeners or self.told[part, to] >= TOLD_MAX:
            return []
        self.told[part, to] += 1
        chosen = self.asked_for[part] if self.asked_for is not None else None
        mine = [w for w in self._words(part) if w.statement.signer == self.me or w.named == chosen]
        one_each = {w.named: w for w in sorted(mine, key=lambda w: w.statement.signer == self.me)}
        effects: list[Effect] = [self._shown(to, word) for word in one_each.values()]
        if (held := self.mine.get(part)) is not None:
            effects.append(Send(to, self._message_of(held)))
        return effects

    def _shown(self, to: PeerId, word: Word) -> Send:
        products = self.compared.cases[word.answered.part].bytes_of[word.answered.digest].data
        plan = self.plan
        return Send(to, Comparison(plan.round, plan.attempt, plan.trace, word.statement, products))
