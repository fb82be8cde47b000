"""All-reduce of one attempt of one round: parts go to their owners, come back combined, once, for everybody.

Everyone sends part j of its own update to the first owner of part j; the owner combines what has arrived when
everybody it expects has spoken, at the latest by its sub-deadline, and answers with the result and the list of
contributors. A silent owner's part is answered by the next owner in the plan; if none answers in time the part
is reported missing. Never waits for one peer, never counts anybody twice, never looks into a payload.

Reveal follows commitment: I send nothing to an owner that has not committed itself while commitments are open.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Ask,
    Done,
    Effect,
    Event,
    Fact,
    Failed,
    Keep,
    Lane,
    Payload,
    Received,
    Report,
    Send,
    SetTimer,
    Start,
    TimerFired,
)
from atoll.keys.digest import merkle_holds, merkle_path
from atoll.protocol.reduce.plan import ReducePlan
from atoll.protocol.reduce.work import Combine, Combined, Row
from atoll.wire.codec import encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Answer, Contribution
from atoll.wire.messages.statements import Answered, Commit, Signed


class PartAnswered(Fact, frozen=True, kw_only=True):
    """The combined bytes of a part are here."""

    phase = "share"
    attempt: int
    part: int
    owner_index: int
    owner: PeerId
    digest: Digest
    contributors: tuple[PeerId, ...]


class PartMissing(Fact, frozen=True, kw_only=True):
    """No owner in the plan answered in time."""

    phase = "share"
    attempt: int
    part: int


class Reduced(Fact, frozen=True, kw_only=True):
    """Every part is answered or missing."""

    phase = "share"
    attempt: int


class Garbage(Fact, frozen=True, kw_only=True):
    """This peer's committed bytes do not decode; it does not count."""

    phase = "share"
    peer: PeerId
    part: int


@dataclass(frozen=True)
class Update:
    """My own encoded update: one payload per part, and my signed commitment to exactly these."""

    statement: Signed
    parts: tuple[Payload, ...]

    @property
    def digests(self) -> tuple[Digest, ...]:
        return tuple(p.digest for p in self.parts)


@dataclass
class Gather:
    """What an owner holds of one part that it is in charge of."""

    owner_index: int
    rows: dict[PeerId, Payload] = field(default_factory=dict[PeerId, Payload])
    closed: bool = False  # its rows are being combined, or were


@dataclass(frozen=True)
class AnswerHeld:
    statement: Signed
    answered: Answered
    payload: Payload


class Reduce:
    """One peer's side of one attempt. `commit_of` says what a peer committed to, or None."""

    def __init__(
        self,
        notary: Notary,
        plan: ReducePlan,
        vote_key_of: Callable[[PeerId], bytes | None],
        commit_of: Callable[[PeerId], Commit | None],
        awaits: Callable[[Iterable[PeerId]], bool],
        gone: Callable[[PeerId], bool],
        said: Container[str] = (),
    ) -> None:
        self.notary, self.plan, self.me = notary, plan, notary.me
        self.vote_key_of, self.commit_of = vote_key_of, commit_of
        self.awaits, self.gone = awaits, gone  # is somebody missing from these rows who may still come; who is gone
        self.update: Update | None = None
        self.gathers: dict[int, Gather] = {}  # parts that I may have to answer for
        for part, owners in enumerate(plan.owners):
            if self.me in owners:
                # answered before a restart, and the bytes are lost: silence, the next owner answers
                closed = self._said_name(part) in said
                self.gathers[part] = Gather(owners.index(self.me), closed=closed)
        self.turn = [0] * plan.parts  # owner index that I currently look to, per part
        self.sent: set[tuple[int, int]] = set()  # (part, owner index) to which my contribution went
        self.answers: dict[int, AnswerHeld] = {}
        self.missing: set[int] = set()
        self.started = self.finished = False

    # ---- events --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start():
                return self._begin(now)
            case Received(sender, Contribution() as message, Payload() as payload):
                return self._collect(sender, message, payload, now)
            case Received(sender, Answer() as message, Payload() as payload):
                return self._learn(sender, message, payload)
            case TimerFired(name) if name == self._timer():
                return self.look_again(now)
            case Done(job, Combined() as result) if job.startswith(self._job("")):
                return self._answer(int(job.rsplit("/", 1)[1]), result)
            case Failed(job, _) if job.startswith(self._job("")):
                return []  # I cannot combine: my turn passes, the next owner answers
            case _:
                return []  # another attempt, or not for this room

    def contribute(self, update: Update, now: Seconds) -> list[Effect]:
        """My update is encoded and committed; before this call only other peers' rows can be gathered."""
        self.update = update
        return self.look_again(now)

    def look_again(self, now: Seconds) -> list[Effect]:
        """Somebody committed, fell silent, or a deadline passed: see what can be sent or closed now."""
        if not self.started or self.finished:
            return []
        effects: list[Effect] = []
        for part in range(self.plan.parts):
            if part not in self.answers and part not in self.missing:
                effects += self._pass_turn(part, now)
                effects += self._contribute_part(part)
                effects += self._close_if_due(part, now)
        # only after what is due was done: a word that comes in the instant of a deadline must not push it away
        return [*effects, *self._finish_if_over(), *self._set_timer(now)]

    def resend(self, to: PeerId) -> list[Effect]:
        """This peer came back: give it what it may have missed."""
        effects: list[Effect] = []
        for part, held in self.answers.items():
            if held.answered.owner_index < len(self.plan.owners[part]) and held.statement.signer == self.me:
                effects.append(self._answer_to(to, held))
        for part, index in sorted(self.sent):
            if self.plan.owners[part][index] == to and part not in self.answers:
                effects += self._contribution(part, index, to)
        return effects

    # ---- sending my parts ----------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.started = True
        return self.look_again(now)

    def _pass_turn(self, part: int, now: Seconds) -> list[Effect]:
        owners = self.plan.owners[part]
        while self.turn[part] < len(owners):
            index = self.turn[part]
            late = now >= self.plan.answer_until[index]
            if not late and (owners[index] == self.me or not self.gone(owners[index])):
                break
            self.turn[part] += 1
        if self.turn[part] == len(owners):
            self.missing.add(part)
            return [self._report(PartMissing(attempt=self.plan.attempt, part=part))]
        return []

    def _contribute_part(self, part: int) -> list[Effect]:
        if self.update is None or part in self.missing:
            return []
        index = self.turn[part]
        owner = self.plan.owners[part][index]
        if (part, index) in self.sent:
            return []
        self.sent.add((part, index))
        if owner == self.me:
            self.gathers[part].rows.setdefault(self.me, self.update.parts[part])
            return []
        return self._contribution(part, index, owner)

    def _contribution(self, part: int, index: int, owner: PeerId) -> list[Effect]:
        assert self.update is not None
        path = merkle_path(self.update.digests, part)
        plan = self.plan
        message = Contribution(plan.round, plan.attempt, plan.trace, part, index, path, self.update.statement)
        return [Send(owner, message, Lane.BULK, self.update.parts[part])]

    # ---- answering for the parts I own ---------------------------------------------------------------------

    def _collect(self, sender: PeerId, message: Contribution, payload: Payload, now: Seconds) -> list[Effect]:
        commit = self.commit_of(sender)
        gather = self.gathers.get(message.part)
        if commit is None or gather is None or message.owner_index != gather.owner_index or gather.closed:
            return []  # not committed, not mine, or closed
        if not merkle_holds(commit.root, payload.digest, message.part, self.plan.parts, message.path):
            raise PeerFault(sender, f"part {message.part} is not what it committed to", message.statement.body)
        gather.rows.setdefault(sender, payload)  # the first word counts
        return self._close_if_due(message.part, now) if self.started else []

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.closed or part in self.answers or self.turn[part] != gather.owner_index:
            return []
        if not gather.rows or (now < self._gather_until(gather.owner_index) and self.awaits(gather.rows)):
            return []
        gather.closed = True
        rows: list[Row] = []
        for peer in sorted(gather.rows):
            commit = self.commit_of(peer)
            assert commit is not None
            rows.append(Row(peer, commit.weight, gather.rows[peer]))
        return [Ask(self._job(str(part)), Combine(self.plan.round, part, self.plan.parts, tuple(rows)))]

    def _gather_until(self, owner_index: int) -> Seconds:
        """An owner gathers for the first two thirds of its window; the rest is for the way back."""
        until = self.plan.answer_until
        window = until[1] - until[0] if len(until) > 1 else 6.0
        return until[owner_index] - window / 3

    def _answer(self, part: int, result: Combined) -> list[Effect]:
        gather, plan = self.gathers[part], self.plan
        effects: list[Effect] = [self._report(Garbage(peer=peer, part=part)) for peer in result.undecodable]
        if result.payload is None:
            return effects
        payload = result.payload
        answered = Answered(
            plan.round,
            plan.attempt,
            part,
            gather.owner_index,
            payload.digest,
            payload.size_bytes,
            tuple(sorted(result.counted)),
        )
        held = AnswerHeld(self.notary.sign(answered), answered, payload)
        # durable before it is sent: a restarted owner must never give a second, different answer
        effects.append(Keep(self._said_name(part), encode(answered)))
        effects += [self._answer_to(peer, held) for peer in plan.listeners if peer != self.me]
        return effects + self._hold(held)

    def _answer_to(self, to: PeerId, held: AnswerHeld) -> Send:
        plan = self.plan
        return Send(to, Answer(plan.round, plan.attempt, plan.trace, held.statement), Lane.BULK, held.payload)

    # ---- what comes back -----------------------------------------------------------------------------------

    def _learn(self, sender: PeerId, message: Answer, payload: Payload) -> list[Effect]:
        signed = message.statement
        answered = self.notary.open(signed, Answered, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return []
        self.check_answer(signed.signer, answered)
        if payload.digest != answered.digest or payload.size_bytes != answered.size_bytes:
            raise PeerFault(sender, f"bytes of part {answered.part} are not the ones its owner signed", signed.body)
        if answered.part in self.answers:
            return []
        return self._hold(AnswerHeld(signed, answered, payload))

    def check_answer(self, owner: PeerId, answered: Answered) -> None:
        """Raise PeerFault unless this owner may say this about this part."""
        part, index = answered.part, answered.owner_index
        if not (0 <= part < self.plan.parts and 0 <= index < len(self.plan.owners[part])):
            raise PeerFault(owner, f"answered for part {part} as owner {index}, which the plan does not have")
        if self.plan.owners[part][index] != owner:
            raise PeerFault(owner, f"answered for part {part}, which it does not own")
        names = answered.contributors
        if not names or list(names) != sorted(set(names)) or not set(names) <= set(self.plan.listeners):
            raise PeerFault(owner, f"lists contributors of part {part} that cannot be")

    def _hold(self, held: AnswerHeld) -> list[Effect]:
        answered = held.answered
        self.answers[answered.part] = held
        self.missing.discard(answered.part)  # late, but here: the proposer may still count it
        fact = PartAnswered(
            attempt=answered.attempt,
            part=answered.part,
            owner_index=answered.owner_index,
            owner=held.statement.signer,
            digest=answered.digest,
            contributors=answered.contributors,
        )
        return [self._report(fact), *self._finish_if_over()]

    def _finish_if_over(self) -> list[Effect]:
        if self.finished or len(self.answers.keys() | self.missing) < self.plan.parts:
            return []
        self.finished = True
        return [SetTimer(self._timer(), None), self._report(Reduced(attempt=self.plan.attempt))]

    # ---- small words ---------------------------------------------------------------------------------------

    def _set_timer(self, now: Seconds) -> list[Effect]:
        """Wake up at the next moment at which time alone can change something."""
        if self.finished or not self.started:
            return []
        moments = [*self.plan.answer_until, *(self._gather_until(i) for i in range(len(self.plan.answer_until)))]
        ahead = [m for m in moments if m > now]
        return [SetTimer(self._timer(), min(ahead))] if ahead else []

    def _said_name(self, part: int) -> str:
        return f"said/{self.plan.round}/{self.plan.attempt}/answer/{part}"

    def _timer(self) -> str:
        return f"reduce/{self.plan.round}/{self.plan.attempt}"

    def _job(self, part: str) -> str:
        return f"combine/{self.plan.round}/{self.plan.attempt}/{part}"

    def _report(self, fact: Fact) -> Report:
        return Report(replace(fact, round=self.plan.round, trace=self.plan.trace))
