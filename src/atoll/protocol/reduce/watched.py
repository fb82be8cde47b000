"""A reduce whose owners are not trusted: the first f + 1 of a part all combine it, and I believe none alone.

What `run.py` does with rows and answers happens here too, with these differences. My row goes to all witnesses of a
part; each closes it in the first owner's window, asks the others for rows that it lacks, and signs what it got. The
owner in charge shows its bytes when the others have signed, so that nobody can copy them. What is said about a part
goes to `witness.py`, and its answer is what that settles on. Rows are kept until the attempt ends, and opened to
whoever doubts. Where rows are weighed besides, `watched_weighed.py` goes on from here.
Never passes answers on: who believes nobody needs no messenger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Done, Effect, Event, Failed, Payload, Send
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.rows import AnswerHeld, Gather, Held
from atoll.protocol.reduce.run import Reduce
from atoll.protocol.reduce.surroundings import Surroundings
from atoll.protocol.reduce.witness import Witnesses
from atoll.protocol.reduce.work import Combined
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Repeat
from atoll.wire.messages.statements import Answered, Compared, Lapse, Signed, Weighing
from atoll.wire.opening import rows_of


class WatchedReduce(Reduce):
    """One peer's side of one attempt whose plan has witnesses. Made by `kinds.reduce_for`."""

    def __init__(self, notary: Notary, plan: ReducePlan, around: Surroundings) -> None:
        super().__init__(notary, plan, around)
        judged = around.judges, around.two_faced
        self.watch = Witnesses(plan, self.me, self._row_held, self.commit_of, self.gone, *judged)
        self.mine: dict[int, AnswerHeld] = {}  # what I made of the parts that I watch
        self.revealed: set[int] = set()  # parts whose bytes I have shown to everybody

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Done(job, Combined() as result) if job.startswith(self._job("judge/")):
                return self._recomputed(job, result, now)
            case Failed(job) if job.startswith(self._job("judge/")):
                return []  # nobody waits for my judgement but I
            case _:
                return super().handle(event, now)

    # ---- what the round asks -------------------------------------------------------------------------------

    def examine(
        self, signed: Signed, said: Answered | Compared, now: Seconds, weighing: Weighing | None = None
    ) -> list[Effect]:
        if said.attempt != self.plan.attempt or isinstance(said, Compared):
            return []
        return self.watch.hear(signed, said, None) + self._watch_part(said.part, now)

    def believes(self, answered: Answered) -> bool | None:
        return self.watch.believes(answered) if answered.attempt == self.plan.attempt else None

    def ask_again(self, now: Seconds) -> list[Effect]:
        """Rows, and words of owners, may have been lost."""
        if not self.started:
            return []
        effects = [e for part in range(self.plan.parts) for e in self._watch_part(part, now, again=True)]
        if now < self.plan.gather_until(0, 1):
            return effects
        silent = {owner for part in range(self.plan.parts) for owner in self._unheard(part, -1)} - {self.me}
        for owner in sorted(silent - {who for _, who in self.asked}):
            self.asked.update((part, owner) for part in range(self.plan.parts))
            effects.append(Send(owner, Repeat(self.plan.round, self.plan.attempt, self.plan.trace)))
        return effects

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        found: dict[PeerId, Lapse] = {}
        if self.started:
            late = now >= self._answers_by
            for part in range(self.plan.parts):
                held = self.answers.get(part)
                declined = {who for where, who in self.route.declined if where == part}
                seen = self.watch.lapses(part, held.answered if held is not None else None, late)
                found |= {peer: why for peer, why in seen.items() if peer not in declined}
        return found

    # ---- what is otherwise than in a plain reduce ----------------------------------------------------------

    @property
    def _answers_by(self) -> Seconds:
        """When an owner that has not answered is late."""
        return self.plan.answer_until[0]

    def _look_at(self, part: int, now: Seconds) -> list[Effect]:
        return super()._look_at(part, now) + self._watch_part(part, now)

    def _row_goes_to(self, part: int) -> Sequence[PeerId]:
        return (*self.plan.watchers(part), self.route.target(part))

    def _late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Rows that have not come after a third of my window: the other owners of this part may have them."""
        gather = self.gathers.get(part)
        if gather is None or gather.closed or self.me not in self.plan.watchers(part):
            return []
        if now < self.plan.gather_until(0, 2):
            return []
        giving = [(peer, self.commit_of(peer)) for peer in self.plan.listeners if peer not in gather.names]
        return self._pull(part, [peer for peer, commit in giving if commit is not None and commit.parts > part])

    def _window(self, part: int, gather: Gather) -> int | None:
        return 0 if gather.owner_index <= self.plan.witnesses else super()._window(part, gather)

    def _forget_rows(self, gather: Gather) -> None:
        """Not before the attempt ends: whoever doubts an answer may ask for its rows."""

    def _rows_said(self, names: Iterable[PeerId]) -> Digest:
        return self._committed_by(names)

    def _committed_by(self, names: Iterable[PeerId]) -> Digest:
        return rows_of(commit for commit in map(self.commit_of, sorted(names)) if commit is not None)

    def _answer_made(self, held: AnswerHeld, now: Seconds) -> list[Effect]:
        part, effects = held.answered.part, list[Effect]()
        self.mine[part] = held
        if self.route.owner[part] != self.me:
            effects += [self._word_to(peer, held) for peer in self.plan.listeners if peer != self.me]
        heard = self.watch.hear(held.statement, held.answered, held.payload)
        return effects + heard + self._watch_part(part, now)

    def _answer_heard(
        self, sender: PeerId, signed: Signed, answered: Answered, payload: Payload | None, now: Seconds
    ) -> list[Effect]:
        return self.watch.hear(signed, answered, payload) + self._watch_part(answered.part, now)

    def _pass_down(self, held: AnswerHeld) -> list[Send]:
        return []

    def _answers_for(self, to: PeerId) -> list[Send]:
        others = {part: held for part, held in self.answers.items() if part not in self.mine}
        return [self._word_to(to, held) for held in self.mine.values()] + self._served(others, to)

    def _moments(self) -> list[Seconds]:
        return super()._moments() + [self._reveal_until(i) for i in range(len(self.plan.answer_until))]

    # ---- owners that check each other ----------------------------------------------------------------------

    def _watch_part(self, part: int, now: Seconds, again: bool = False) -> list[Effect]:
        """Show what I made of a part, doubt what others made of it, settle on what is true."""
        if not self.started:
            return []
        effects, late = self._reveal_if_due(part, now), now >= self._answers_by
        if self.watch.in_doubt(part):
            waiting = not late and bool(self._unheard(part, -1))
            effects += self.watch.look(part, waiting, again)
        if part not in self.answers and (held := self.watch.settled(part, patient=not late)) is not None:
            effects += self._hold(held)
        return effects

    def _unheard(self, part: int, after: int) -> list[PeerId]:
        """Which of the owners after this one, that combine this part too, may still say what they got."""
        over = self.watch.spoken(part) | {who for where, who in self.route.declined if where == part}
        left = [owner for owner in self.plan.watchers(part)[after + 1 :] if owner not in over]
        return [owner for owner in left if owner == self.me or not self.gone(owner)]

    def _reveal_if_due(self, part: int, now: Seconds) -> list[Effect]:
        """Everybody gets the bytes when the witnesses have signed: none of them can copy my answer as its own."""
        held = self.mine.get(part)
        if held is None or part in self.revealed or self.route.owner[part] != self.me:
            return []
        index = held.answered.owner_index
        if index > 0 and part in self.answers:
            return []  # the owners before me were slow, not silent
        if now < self._reveal_until(index) and self._unheard(part, index):
            return []
        self.revealed.add(part)
        return [self._answer_to(peer, held) for peer in self.plan.listeners if peer != self.me]

    def _reveal_until(self, owner_index: int) -> Seconds:
        """Halfway between the end of gathering and the end of the window."""
        return (self.plan.gather_until(owner_index, 1) + self.plan.answer_until[owner_index]) / 2

    def _word_to(self, to: PeerId, held: AnswerHeld) -> Send:
        if held.answered.part in self.revealed:
            return self._answer_to(to, held)
        return Send(to, self._message_of(held))

    def _take_opened_row(self, part: int, author: PeerId, row: Held, now: Seconds) -> list[Effect]:
        if self._gather_short_of(part, author) is not None:
            return super()._take_opened_row(part, author, row, now)
        return self.watch.take(part, author, row) if self.watch.wants(part, author) else []

    def _recomputed(self, job: str, result: Combined, now: Seconds) -> list[Effect]:
        check, part = (int(word) for word in job.rsplit("/", 2)[1:])
        return self.watch.recomputed(part, check, result) + self._watch_part(part, now)
