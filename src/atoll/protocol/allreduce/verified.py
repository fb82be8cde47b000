"""A reduce whose owners are not trusted: the first w + 1 of a part all combine it, and I believe none alone.

What `run.py` does with rows and answers happens here too, with these differences. My row goes to all witnesses of a
part; each closes it in the first owner's window, asks the others for rows that it lacks, and signs what it got. The
owner in charge shows its bytes when the others have signed, so that nobody can copy them. What is said about a part
goes to `witness.py`, and its answer is what that settles on. Rows are kept until the attempt ends, and opened to
whoever doubts.
Never passes answers on: who believes nobody needs no messenger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, Event, Payload, Persist, Received, Send, TaskDone, TaskFailed
from atoll.protocol.allreduce.buffers import PartAccumulator, ReceivedResult, StoredRow
from atoll.protocol.allreduce.cross_check import CrossCheck, OwnerLied, loosely
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PartRequest, PartStatementsRequest, ResendRequest
from atoll.wire.messages.statements import Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_of

WORDS_ASKED_MAX = 3  # of one signer about one part, in a large committee: each may be lost


class VerifiedReduce(AllReduce):
    """One peer's side of one attempt whose plan has witnesses. Made by `kinds.reduce_for`."""

    def __init__(self, notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> None:
        super().__init__(notary, plan, around)
        judged = around.judges, around.two_faced
        self.watch = CrossCheck(plan, self.me, loosely(self._row_held), self.commit_of, self.gone, *judged)
        self.mine: dict[int, ReceivedResult] = {}  # what I made of the parts that I watch
        self.absent_known = False  # who of the first owners is not in this attempt
        self.revealed: set[int] = set()  # parts whose bytes I have shown to everybody who lacks them
        self.said = around.said
        self.words_asked: Counter[tuple[int, PeerId]] = Counter()  # (part, whose about it): how often
        self.repeat_asked: set[PeerId] = set()  # who was asked for all its words again, where there are no juries
        self.words_told: Counter[tuple[int, PeerId]] = Counter()  # (part, to whom mine were said again): how often
        self.fetched: Counter[int] = Counter()  # parts whose bytes I asked for: how often

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Received(sender, PartStatementsRequest(part=part)):
                return self._tell_words(sender, part)
            case TaskDone(job, RowsCombined() as result) if job.startswith(self._job("judge/")):
                return self._recomputed(job, result, now)
            case TaskFailed(job) if job.startswith(self._job("judge/")):
                return []  # nobody waits for my judgement but I
            case _:
                return super().handle(event, now)

    # ---- what the round asks -------------------------------------------------------------------------------

    def look_again(self, now: Seconds) -> list[Effect]:
        self._note_absent(now)
        return super().look_again(now)

    def examine(self, signed: SignedStatement, said: OwnerResult, now: Seconds) -> list[Effect]:
        if said.attempt != self.plan.attempt:
            return []
        if not self._in_turn(said):
            self._keep_until_in_turn(signed.signer, signed, said)
            return []
        return self._past_liars(said.part, self.watch.hear(signed, said, None), now)

    def believes(self, answered: OwnerResult) -> bool | None:
        in_turn = answered.attempt == self.plan.attempt and self._in_turn(answered)
        return self.watch.believes(answered) if in_turn else None

    def ask_again(self, now: Seconds) -> list[Effect]:
        """Rows, and words of owners, may have been lost."""
        if not self.started:
            return []
        effects = [e for part in range(self.plan.parts) for e in self._watch_part(part, now, again=True)]
        if now < self.plan.gather_until(0, 1):
            return effects
        if self.plan.juries:
            return [*effects, *self._ask_words(), *self._want_bytes()]
        silent = {owner for part in range(self.plan.parts) for owner in self._unheard(part, -1)} - {self.me}
        for owner in sorted(silent - self.repeat_asked):
            self.repeat_asked.add(owner)
            effects.append(Send(owner, ResendRequest(self.plan.round, self.plan.attempt, self.plan.trace)))
        return effects

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        return self.watch.seconded(answered)

    def made_again(self, answered: OwnerResult) -> bool:
        return self.watch.made_again(answered)

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        found: dict[PeerId, Lapse] = {}
        if self.started:
            late = now >= self.plan.answer_until[0]
            for part in range(self.plan.parts):
                held = self.answers.get(part)
                seen = self.watch.lapses(part, held.answered if held is not None else None, late)
                found |= {peer: why for peer, why in seen.items() if not self.route.excused(part, peer)}
        return found

    def _want_bytes(self) -> list[Effect]:
        """Of answers that I believe and never saw: asked of one who signed them, and then of another."""
        plan, effects = self.plan, list[Effect]()
        for part in range(plan.parts):
            word = self.watch.unseen(part) if part not in self.answers else None
            if word is None:
                continue
            alike = {w.statement.signer for w in self.watch.cases[part].words if w.answered.digest == word.digest}
            holders = [p for p in sorted(alike) if p != self.me and not self.gone(p)]
            if holders:
                self.fetched[part] += 1
                holder = shuffled(word.digest, f"{self.me}/{self.fetched[part]}", holders)[0]
                effects.append(Send(holder, PartRequest(plan.round, plan.attempt, plan.trace, word.digest)))
        return effects

    def take_bytes(self, payload: Payload) -> list[Effect]:
        effects: list[Effect] = []
        for part, case in enumerate(self.watch.cases):
            if part not in self.answers and any(w.answered.digest == payload.digest for w in case.words):
                case.show(payload)
                held = self.watch.settled(part, patient=False)
                effects += self._hold(held) if held is not None else []
        return effects

    # ---- what is otherwise than in a plain reduce ----------------------------------------------------------

    def _look_at(self, part: int, now: Seconds) -> list[Effect]:
        return super()._look_at(part, now) + self._watch_part(part, now)

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.rows or gather.closed or self.me not in self.plan.watchers(part):
            return super()._close_if_due(part, now)
        if now < self.plan.gather_until(0, 1) or part in self.answers or (part, self.me) in self.route.declined:
            return []
        return self._cannot(part, "no row came to me in time", now)

    def _row_goes_to(self, part: int) -> Sequence[PeerId]:
        stands_in = self.route.stand_in_may(part)
        return (
            *self.plan.watchers(part),
            *(super()._row_goes_to(part) if stands_in else [self.route.target(part)]),
        )

    def _late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Rows that have not come after a third of my window: the other owners of this part may have them."""
        gather = self.gathers.get(part)
        if gather is None or gather.closed or self.me not in self.plan.watchers(part):
            return []
        if now < self.plan.gather_until(0, 2):
            return []
        giving = [(peer, self.commit_of(peer)) for peer in self.plan.listeners if peer not in gather.names]
        return self.detours.pull(
            part, [peer for peer, commit in giving if commit is not None and commit.parts > part]
        )

    def _window(self, part: int, gather: PartAccumulator) -> int | None:
        return 0 if gather.owner_index <= self.plan.witnesses else super()._window(part, gather)

    def _forget_rows(self, gather: PartAccumulator) -> None:
        """Not before the attempt ends: whoever doubts an answer may ask for its rows."""

    def _rows_said(self, names: Iterable[PeerId]) -> Digest:
        return rows_of(commit for commit in map(self.commit_of, sorted(names)) if commit is not None)

    def _answer_made(self, held: ReceivedResult, now: Seconds) -> list[Effect]:
        part, effects = held.answered.part, list[Effect]()
        self.mine[part] = held
        if self.route.owner[part] != self.me:
            effects += [self._word_to(peer, held) for peer in self.route.others()]
        heard = self.watch.hear(held.statement, held.answered, held.payload)
        return effects + heard + self._own_up(part, now) + self._watch_part(part, now)

    def _answer_heard(
        self, sender: PeerId, signed: SignedStatement, answered: OwnerResult, payload: Payload | None, now: Seconds
    ) -> list[Effect]:
        part = answered.part
        heard = self.watch.hear(signed, answered, payload)
        return self._past_liars(part, heard + self._own_up(part, now), now)

    def _pass_down(self, held: ReceivedResult) -> list[Send]:
        """But what a reserve answered, to those whose row I have because they do not hear it."""
        part, by = held.answered.part, held.statement.signer
        if not self.plan.stands_in(part, held.answered.owner_index) or self.me == by:
            return []
        return [self._answer_to(peer, held) for peer in sorted(self.route.senders.get(part, ())) if peer != by]

    def _row_to_open(self, part: int, author: PeerId) -> StoredRow | None:
        """Also one that I fetched to judge an answer."""
        row = super()._row_to_open(part, author)
        return row or (self.watch.cases[part].rows.get(author) if 0 <= part < self.plan.parts else None)

    def _answers_for(self, to: PeerId) -> list[Send]:
        others = {part: held for part, held in self.answers.items() if part not in self.mine}
        return [self._word_to(to, held) for held in self.mine.values()] + self._served(others, to)

    def _moments(self) -> list[Seconds]:
        reveals = map(self._reveal_until, range(len(self.plan.answer_until) + bool(self.plan.reserves)))
        return [*super()._moments(), self._absent_at, *reveals]

    # ---- owners that check each other ----------------------------------------------------------------------

    def _watch_part(self, part: int, now: Seconds, again: bool = False) -> list[Effect]:
        """Show what I made of a part, doubt what others made of it, settle on what is true."""
        if not self.started:
            return []
        effects, late = self._reveal_if_due(part, now), now >= self.plan.answer_until[0]
        if self.watch.in_doubt(part):
            waiting = not late and bool(self._unheard(part, -1))
            effects += self.watch.look(part, waiting, again)
        effects += self._speak_for_jury(part, patient=not late)
        if part not in self.answers and (held := self.watch.settled(part, patient=not late)) is not None:
            effects += self._hold(held)
        return effects

    def _note_absent(self, now: Seconds) -> None:
        """Whoever is late has said so by now, also that it gives nothing. A first owner that has not is in the
        round before, or wants to hold us up: its turn is over, and that is all. Later ones not everybody hears."""
        if not self.started or self.absent_known or now < self._absent_at:
            return
        self.absent_known = True
        first = {owner for part in range(self.plan.parts) for owner in self.plan.watchers(part)} - {self.me}
        self.route.absent = frozenset(owner for owner in first if self.commit_of(owner) is None)

    @property
    def _absent_at(self) -> Seconds:
        """Whoever begins late, as after a restart, has heard nobody yet."""
        return max(self.plan.gather_until(0, 2), self.begun_at + self.plan.window_s / 3)

    def _own_up(self, part: int, now: Seconds) -> list[Effect]:
        """Another owner has said that it had rows beside all of mine. They did not come to me in time, and I say
        so, or I would seem to leave them out. What I signed stays true, should that one prove false."""
        held = self.mine.get(part)
        if held is None or self.me not in self.plan.watchers(part) or (part, self.me) in self.route.declined:
            return []
        mine = frozenset(held.answered.contributors)
        larger = (word.names - mine for word in self.watch.cases[part].words if mine < word.names)
        if not any(all(self._row_held(part, name) is None for name in lacked) for lacked in larger):
            return []
        why = "rows that other owners had did not come to me in time"
        return self._say_declined(part, why) + self._decline(part, self.me, now)

    def _unheard(self, part: int, after: int) -> list[PeerId]:
        """Which of the owners after this one, that combine this part too, may still say what they got."""
        spoken, later = self.watch.spoken(part), self.plan.watchers(part)[after + 1 :]
        left = [owner for owner in later if owner not in spoken and not self.route.excused(part, owner)]
        return [owner for owner in left if owner == self.me or not self.gone(owner)]

    def _reveal_if_due(self, part: int, now: Seconds) -> list[Effect]:
        """The bytes, when the witnesses have signed: none of them can copy my answer as its own. Who signed the
        same has made the same bytes, and needs my word alone."""
        held = self.mine.get(part)
        if held is None or part in self.revealed or self.route.owner[part] != self.me:
            return []
        index = held.answered.owner_index
        if index > 0 and part in self.answers:
            return []  # the owners before me were slow, not silent
        if now < self._reveal_until(index) and self._unheard(part, index):
            return []
        self.revealed.add(part)
        made = {
            w.statement.signer for w in self.watch.cases[part].words if w.answered.digest == held.answered.digest
        }
        have = made - self.down.back
        return [
            Send(peer, self._message_of(held)) if peer in have else self._answer_to(peer, held)
            for peer in self.route.others()
        ]

    def _reveal_until(self, owner_index: int) -> Seconds:
        """Halfway between the end of gathering and the end of the window."""
        return (self.plan.gather_until(owner_index, 1) + self.plan.until(owner_index)) / 2

    def _word_to(self, to: PeerId, held: ReceivedResult) -> Send:
        if held.answered.part in self.revealed:
            return self._answer_to(to, held)
        return Send(to, self._message_of(held))

    def _take_opened_row(self, part: int, author: PeerId, row: StoredRow, now: Seconds) -> list[Effect]:
        if self._gather_short_of(part, author) is not None:
            return super()._take_opened_row(part, author, row, now)
        if not self.watch.wants(part, author):
            return []
        return self.opened.came(part, author, row) + self.watch.take(part, author, row)

    def _recomputed(self, job: str, result: RowsCombined, now: Seconds) -> list[Effect]:
        check, part = (int(word) for word in job.rsplit("/", 2)[1:])
        return self._past_liars(part, self.watch.recomputed(part, check, result), now)

    def _past_liars(self, part: int, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Of owners another has the truth; a reserve is alone, and the next one has its turn."""
        liars = [e.fact.peer for e in effects if isinstance(e, Emit) and isinstance(e.fact, OwnerLied)]
        for liar in liars if self.route.stand_in_may(part) else ():
            effects += self._decline(part, liar, now)
        return effects + self._watch_part(part, now)

    # ---- a jury, where not everybody opens rows ------------------------------------------------------------

    def _speak_for_jury(self, part: int, patient: bool) -> list[Effect]:
        """I made a doubted answer again: all go by how many of us say so."""
        plan, name = self.plan, self._said_name(part)
        if not plan.juries or self.me not in plan.juries[part] or part in self.mine or name in self.said:
            return []
        if (answered := self.watch.found(part, patient)) is None:
            return []
        place = len(plan.takers(part)) + plan.juries[part].index(self.me)
        mine = replace(answered, owner_index=place)
        held = self.mine[part] = ReceivedResult(self.notary.sign(mine), mine, self.watch.bytes_of(mine))
        told = [Send(peer, self._message_of(held)) for peer in self.route.others()]
        return [Persist(name, encode(mine)), *told, *self.watch.hear(held.statement, mine, None)]

    def _ask_words(self) -> list[Effect]:
        """Of owners, and of the jury where little is lacking: words may have been lost."""
        plan, effects = self.plan, list[Effect]()
        for part in range(plan.parts):
            if part in self.answers:
                continue
            spoken = self.watch.spoken(part)
            asked = plan.owners(part) + plan.juries[part] if self.watch.nearly(part) else plan.watchers(part)
            for peer in dict.fromkeys((*asked, self.route.owner[part])):
                lost = peer not in spoken and peer != self.me and not self.gone(peer)
                if lost and self.words_asked[part, peer] < WORDS_ASKED_MAX:
                    self.words_asked[part, peer] += 1
                    effects.append(Send(peer, PartStatementsRequest(plan.round, plan.attempt, plan.trace, part)))
        return effects

    def _tell_words(self, to: PeerId, part: int) -> list[Effect]:
        if part not in self.mine or to not in self.plan.hearers or self.words_told[part, to] >= WORDS_ASKED_MAX:
            return []
        self.words_told[part, to] += 1
        return [self._word_to(to, self.mine[part])]
