"""All-reduce of one attempt of one round: parts go to their owners, come back combined, once, for everybody.

Runs any topology. Everyone sends part j of its own update up the tree of part j: to its parent, or straight to
the first owner. A parent waits for what is below it and hands on one row for all. The owner combines what has
arrived when everybody it expects is in it, at the latest by its sub-deadline, and answers with the result and the
list of contributors; answers go down the same tree. A silent parent is left out: its children send to the owner.
A silent owner's part is answered by the next owner in the plan; if none answers in time the part is reported
missing. Never waits for one peer, never counts anybody twice, never looks into a payload.

Rows that overlap (a child sent again what its dead parent had handed on already) cannot both be in: the larger
ones count. Rows combined on the way cannot be held against a commitment, so parents are for members that trust
each other. Reveal follows commitment: nothing is sent before the sharing begins, when all are heard.

Where not even owners are trusted (`plan.witnesses`), several of them combine each part, and what they say is judged
by `witness.py` before it stands as an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
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
from atoll.protocol.reduce.rows import AnswerHeld, Gather, Held, Update, rows_of
from atoll.protocol.reduce.witness import Witnesses
from atoll.protocol.reduce.work import Combine, Combined, Row
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Answer, Contribution, Declined, Handed, Repeat, RowBytes, WantPart, WantRow
from atoll.wire.messages.statements import Answered, Commit, Lapse, Signed

OPENED_MAX = 2  # times that one row is opened to one peer: it may be lost once
ONWARD = -1  # where an owner's index would stand: for a peer that hands it on


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


class NoAnswer(Fact, frozen=True, kw_only=True):
    """I own this part and cannot answer for it: somebody else may, else it counts for nobody."""

    phase = "share"
    part: int
    why: str


class Reduce:
    """One peer's side of one attempt. `commit_of` says what a peer committed to, or None."""

    def __init__(
        self,
        notary: Notary,
        plan: ReducePlan,
        vote_key_of: Callable[[PeerId], bytes | None],
        commit_of: Callable[[PeerId], Commit | None],
        awaits: Callable[[int, Container[PeerId], Iterable[PeerId] | None], bool],
        gone: Callable[[PeerId], bool],
        said: Container[str] = (),
        filled: Callable[[], int | None] = lambda: None,
        judges: bool = False,
        two_faced: Container[PeerId] = (),
    ) -> None:
        """`awaits(part, names, among)`: may somebody of `among` (None: anybody) still come who is not in `names`?

        `filled()`: how many parts, the first ones, the longest update has; None while that cannot be known.
        `judges`: I vote, so I believe no single owner where there are witnesses. `two_faced`: who committed twice.
        """
        self.notary, self.plan, self.me = notary, plan, notary.me
        self.vote_key_of, self.commit_of = vote_key_of, commit_of
        self.awaits, self.gone, self.filled = awaits, gone, filled
        self.update: Update | None = None
        self.gathers: dict[int, Gather] = {}  # parts that I may have to answer for
        self.relays: dict[int, Gather] = {}  # parts in which others' rows come through me
        for part, tree in enumerate(plan.topology.parts):
            if self.me in tree.owners:
                # answered before a restart, and the bytes are lost: silence, the next owner answers
                closed = self._said_name(part) in said
                self.gathers[part] = Gather(tree.owners.index(self.me), closed=closed)
            below = tree.below(self.me) if self.me != tree.owners[0] else frozenset[PeerId]()
            if below:
                self.relays[part] = Gather(ONWARD, below | {self.me})
        self.turn = [0] * plan.parts  # owner index that I currently look to, per part
        self.declined: set[tuple[int, PeerId]] = set()  # (part, who cannot combine it)
        self.sent: set[tuple[int, PeerId]] = set()  # (part, to whom my row of it went)
        self.asked: set[tuple[int, PeerId]] = set()  # (part, whom I asked for an answer that somebody gone owes me)
        self.shown: set[tuple[int, PeerId]] = set()  # (part, next owner) whom I told that I hold the answer
        self.senders: dict[int, set[PeerId]] = {}  # whose rows came to me: they know best whom they need
        self.given: set[tuple[int, PeerId]] = set()  # (part, to whom I sent its answer)
        self.heard: dict[int, dict[PeerId, Signed]] = {}  # parts that others say they hold the answer of
        self.fetching: dict[int, PeerId] = {}  # from whom
        self.answers: dict[int, AnswerHeld] = {}
        self.missing: set[int] = set()
        self.started = self.finished = False
        self.watch: Witnesses | None = None
        if plan.witnesses:
            self.watch = Witnesses(plan, self.me, self._row_held, commit_of, gone, judges, two_faced)
        self.mine: dict[int, AnswerHeld] = {}  # what I made of the parts that I watch
        self.revealed: set[int] = set()  # parts whose bytes I have shown to everybody
        self.pulled: set[tuple[int, PeerId]] = set()  # (part, whose row I asked the other owners for)
        self.opened: Counter[tuple[int, PeerId, PeerId]] = Counter()  # (part, whose row, to whom): how often

    # ---- events --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start():
                return self._begin(now)
            case Received(sender, Contribution() as message, Payload() as payload):
                return self._collect(sender, message, payload, now)
            case Received(sender, Handed() as message, Payload() as payload):
                return self._collect_handed(sender, message, payload, now)
            case Received(sender, Declined(part=part)):
                return self._decline(part, sender, now)
            case Received(sender, Answer() as message, Payload() as payload):
                return self._learn(sender, message, payload, now)
            case Received(sender, Answer() as message):
                return self._hear_of(sender, message, now)
            case Received(sender, WantRow() as message):
                return self._open_row(sender, message)
            case Received(sender, RowBytes() as message, Payload() as payload):
                return self._take_opened(sender, message, payload, now)
            case TimerFired(name) if name == self._timer():
                return self.look_again(now)
            case Done(job, Combined() as result) if job.startswith(self._job("own/")):
                return self._answer(int(job.rsplit("/", 1)[1]), result, now)
            case Done(job, Combined() as result) if job.startswith(self._job("on/")):
                return self._combined_onward(int(job.rsplit("/", 1)[1]), result, now)
            case Done(job, Combined() as result) if job.startswith(self._job("judge/")):
                return self._recomputed(job, result, now)
            case Failed(job) if job.startswith(self._job("judge/")):
                return []  # nobody waits for my judgement but I
            case Failed(job, why) if job.startswith(self._job("")):
                return self._cannot(int(job.rsplit("/", 1)[1]), why, now)
            case _:
                return []  # another attempt, or not for this room

    def contribute(self, update: Update, now: Seconds) -> list[Effect]:
        """My update is encoded and committed; before this call only other peers' rows can be gathered."""
        self.update = update
        return self.look_again(now)

    def look_again(self, now: Seconds) -> list[Effect]:
        """Somebody committed, fell silent, or a deadline passed: see what can be sent or closed now."""
        if not self.started:
            return []
        effects: list[Effect] = []
        filled = self.filled()
        if filled is not None:  # nobody has anything for the parts behind: nobody sends, owns or waits for them
            self.missing.update(range(filled, self.plan.parts))
        for part in range(self.plan.parts):
            effects += self._pass_turn(part, now)
            if part in self.answers:
                effects += self._show_next_owner(part)
            elif part not in self.missing:
                effects += self._fetch_heard(part)
                effects += self._contribute_part(part)
                effects += self._pull_rows(part, now)
                effects += self._hand_on_if_due(part, now)
                effects += self._close_if_due(part, now)
                effects += self._ask_past_the_gone(part)
            effects += self._watch_part(part, now)
        # only after what is due was done: a word that comes in the instant of a deadline must not push it away
        return [*effects, *self._finish_if_over(), *self._set_timer(now)]

    def resend(self, to: PeerId) -> list[Effect]:
        """This peer came back, or came late: give it what it may have missed."""
        effects: list[Effect] = [self._word_to(to, held) for held in self.mine.values()]
        for part, held in self.answers.items():
            if part not in self.mine and self._serves(part, held.statement.signer, to):
                effects.append(self._answer_to(to, held))
        for part, target in sorted(self.sent):
            if target == to and part not in self.answers and part not in self.missing:
                effects += self._row_to(part, to)
        return effects

    # ---- sending my parts ----------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.started = True
        return self.look_again(now)

    def _pass_turn(self, part: int, now: Seconds) -> list[Effect]:
        owners = self.plan.owners(part)
        while self.turn[part] < len(owners):
            index = self.turn[part]
            late = now >= self.plan.answer_until[index]
            lost = owners[index] != self.me and self.gone(owners[index])
            if not late and not lost and (part, owners[index]) not in self.declined:
                break
            self.turn[part] += 1
        if self.turn[part] == len(owners) and part not in self.answers and part not in self.missing:
            self.missing.add(part)
            return [self._report(PartMissing(attempt=self.plan.attempt, part=part))]
        return []

    def _contribute_part(self, part: int) -> list[Effect]:
        """My own row, up the tree; through my own hands if others' rows come through me too."""
        if self.update is None or part in self.missing or part >= len(self.update.parts):
            return []
        relay = self.relays.get(part)
        if relay is None or (part, self.me) in self.declined:
            watchers = self.plan.watchers(part) if self.watch is not None else ()
            return [e for owner in watchers for e in self._send_row(part, owner)] + self._send_row(part)
        if not relay.closed:
            relay.add(self.me, self._my_row(part))
        return []  # it goes with the others' rows

    def _send_row(self, part: int, to: PeerId | None = None) -> list[Effect]:
        if part in self.missing:
            return []
        target = to or self._target(part)
        if (part, target) in self.sent:
            return []
        self.sent.add((part, target))
        if target == self.me:
            relay = self.relays.get(part)
            row = relay.done if relay is not None and relay.done is not None else self._my_row(part)
            self.gathers[part].add(self.me, row)
            return []
        return self._row_to(part, target)

    def _row_to(self, part: int, to: PeerId) -> list[Effect]:
        plan, relay = self.plan, self.relays.get(part)
        owners = plan.owners(part)
        index = owners.index(to) if to in owners and self._above(part, self.me) != to else ONWARD
        if relay is not None and relay.done is not None:
            done = relay.done
            names = tuple(sorted(done.names))
            handed = Handed(plan.round, plan.attempt, plan.trace, part, index, done.weight, names)
            return [Send(to, handed, Lane.BULK, done.payload)]
        if self.update is None or part >= len(self.update.parts):
            return []
        path = merkle_path(self.update.digests, part)
        message = Contribution(plan.round, plan.attempt, plan.trace, part, index, path, self.update.statement)
        return [Send(to, message, Lane.BULK, self.update.parts[part])]

    def _my_row(self, part: int) -> Held:
        assert self.update is not None
        commit = self.commit_of(self.me)
        assert commit is not None
        path = merkle_path(self.update.digests, part)
        return Held(frozenset((self.me,)), commit.weight, self.update.parts[part], path, self.update.statement)

    def _target(self, part: int) -> PeerId:
        """Whoever hands my row on, or the owner whose turn it is."""
        above = self._above(part, self.me)
        return above if above is not None else self._owner_now(part)

    def _above(self, part: int, peer: PeerId) -> PeerId | None:
        """The nearest above a peer that is there to hand its row on; None: it deals with the owner."""
        parents = self.plan.topology.parts[part].parents
        above = parents.get(peer)
        while above is not None and ((above != self.me and self.gone(above)) or (part, above) in self.declined):
            above = parents.get(above)
        return above

    # ---- handing on what comes through me ------------------------------------------------------------------

    def _hand_on_if_due(self, part: int, now: Seconds) -> list[Effect]:
        relay = self.relays.get(part)
        if relay is None:
            return []
        if relay.closed:
            return self._send_row(part) if relay.done is not None else []
        if not relay.rows or (now < self._gather_until(0, 2) and self.awaits(part, relay.names, relay.below)):
            return []
        relay.closed = True
        return self._combine(part, relay, "on", onward=True)

    def _combined_onward(self, part: int, result: Combined, now: Seconds) -> list[Effect]:
        relay = self.relays[part]
        effects = self._name_garbage(part, result)
        if result.payload is None:
            return effects + self._cannot(part, result.why, now)
        counted = [relay.rows[sender] for sender in result.counted]
        names = frozenset(name for held in counted for name in held.names)
        relay.done = Held(names, sum(held.weight for held in counted), result.payload)
        relay.rows.clear()
        return [*effects, *self.look_again(now)]

    def _combine(self, part: int, gather: Gather, job: str, onward: bool = False) -> list[Effect]:
        chosen = gather.chosen().items()
        rows = tuple(Row(sender, held.weight, held.payload, tuple(sorted(held.names))) for sender, held in chosen)
        shares = tuple(tree.share for tree in self.plan.topology.parts)
        plan = self.plan
        work = Combine(plan.round, part, shares, rows, onward, plan.statistic, plan.liars)
        return [Ask(self._job(f"{job}/{part}"), work)]

    def _cannot(self, part: int, why: str, now: Seconds) -> list[Effect]:
        """I cannot combine this part: nobody shall wait for me."""
        plan = self.plan
        word = Declined(plan.round, plan.attempt, plan.trace, part)
        told: list[Effect] = [self._report(NoAnswer(part=part, why=why))]
        told += [Send(peer, word) for peer in plan.listeners if peer != self.me]
        return told + self._decline(part, self.me, now)

    def _decline(self, part: int, who: PeerId, now: Seconds) -> list[Effect]:
        if not 0 <= part < self.plan.parts:
            raise PeerFault(who, f"declined part {part}, which the plan does not have")
        if (part, who) in self.declined:
            return []
        self.declined.add((part, who))
        return self.look_again(now)

    # ---- answering for the parts I own ---------------------------------------------------------------------

    def _collect(self, sender: PeerId, message: Contribution, payload: Payload, now: Seconds) -> list[Effect]:
        commit = self.commit_of(sender)
        gather = self._gather_for(message.part, message.owner_index)
        if commit is None or gather is None:
            return self._answer_already(message.part, sender)  # not committed, not mine, or closed
        said = message.statement
        if said.signer != sender or self.notary.open(said, Commit, self.vote_key_of(sender)) != commit:
            # it goes with the row when others ask me for it
            raise PeerFault(sender, f"part {message.part} comes with another commitment than I heard", said.body)
        if not merkle_holds(commit.root, payload.digest, message.part, commit.parts, message.path):
            raise PeerFault(sender, f"part {message.part} is not what it committed to", message.statement.body)
        row = Held(frozenset((sender,)), commit.weight, payload, message.path, message.statement)
        return self._take(message.part, gather, sender, row, now)

    def _collect_handed(self, sender: PeerId, message: Handed, payload: Payload, now: Seconds) -> list[Effect]:
        gather = self._gather_for(message.part, message.owner_index)
        if gather is None:
            return self._answer_already(message.part, sender)
        names = frozenset(message.contributors)
        below = self.plan.topology.parts[message.part].below(sender)
        once = len(names) == len(message.contributors) > 0
        if not below or not once or not names <= below | {sender}:
            # without anybody below it, a sender would dress its own row up as a sum, which no commitment can judge
            raise PeerFault(sender, f"handed on rows of part {message.part} that do not come through it")
        commits = [self.commit_of(name) for name in names]
        known = [commit.weight for commit in commits if commit is not None]
        if message.weight < 0 or (len(known) == len(names) and sum(known) != message.weight):
            raise PeerFault(sender, f"weighs part {message.part} by {message.weight}, not as its contributors do")
        return self._take(message.part, gather, sender, Held(names, message.weight, payload), now)

    def _gather_for(self, part: int, owner_index: int) -> Gather | None:
        gather = self.relays.get(part) if owner_index == ONWARD else self.gathers.get(part)
        if gather is None or gather.owner_index != owner_index or gather.closed or part in self.answers:
            return None
        return gather

    def _answer_already(self, part: int, to: PeerId) -> list[Effect]:
        """It turned to me because another owner is gone, and I hold what that one answered."""
        if not 0 <= part < self.plan.parts:
            return []
        held = self.answers.get(part)
        if held is None:
            # closed, and not answered yet: it may have noticed a death before me, and gets the answer from me
            self.senders.setdefault(part, set()).add(to)
            return []
        return [] if (part, to) in self.given else [self._answer_to(to, held)]

    def _take(self, part: int, gather: Gather, sender: PeerId, held: Held, now: Seconds) -> list[Effect]:
        gather.add(sender, held)
        self.senders.setdefault(part, set()).add(sender)
        if not self.started:
            return []
        return self._hand_on_if_due(part, now) + self._close_if_due(part, now)

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.closed:
            return []
        watches = self.watch is not None and gather.owner_index <= self.plan.witnesses
        if not watches and self.turn[part] != gather.owner_index:
            return []
        early = now < self._gather_until(0 if watches else gather.owner_index, 1)
        coming = part in self.fetching or self.awaits(part, gather.names, gather.below)
        if part in self.answers or not gather.rows or (early and coming):
            return []
        gather.closed = True
        return self._combine(part, gather, "own")

    def _gather_until(self, owner_index: int, thirds: int) -> Seconds:
        """An owner gathers for two thirds of its window, who hands on for one third; the rest is for the way."""
        until = self.plan.answer_until
        window = until[1] - until[0] if len(until) > 1 else 6.0
        return until[owner_index] - thirds * window / 3

    def _name_garbage(self, part: int, result: Combined) -> list[Effect]:
        return [self._report(Garbage(peer=peer, part=part)) for peer in result.undecodable]

    def _answer(self, part: int, result: Combined, now: Seconds) -> list[Effect]:
        gather, plan = self.gathers[part], self.plan
        rows = dict(gather.rows)
        if self.watch is None:  # whoever doubts an answer may ask for its rows
            gather.rows.clear()  # an update's worth of memory, wanted for the next parts
        effects = self._name_garbage(part, result)
        if result.payload is None:
            return effects + self._cannot(part, result.why, now)
        payload = result.payload
        names = {name for sender in result.counted for name in rows[sender].names}
        commits = [commit for commit in map(self.commit_of, sorted(names)) if commit is not None]
        answered = Answered(
            plan.round,
            plan.attempt,
            part,
            gather.owner_index,
            payload.digest,
            payload.size_bytes,
            tuple(sorted(names)),
            ZERO_DIGEST if self.watch is None else rows_of(commits),
        )
        held = AnswerHeld(self.notary.sign(answered), answered, payload)
        # durable before it is sent: a restarted owner must never give a second, different answer
        effects.append(Keep(self._said_name(part), encode(answered)))
        if self.watch is None:
            return effects + self._hold(held)
        self.mine[part] = held
        if self._owner_now(part) != self.me:
            effects += [self._word_to(peer, held) for peer in plan.listeners if peer != self.me]
        return effects + self.watch.hear(held.statement, answered, payload) + self._watch_part(part, now)

    def _answer_to(self, to: PeerId, held: AnswerHeld) -> Send:
        plan = self.plan
        self.given.add((held.answered.part, to))
        return Send(to, Answer(plan.round, plan.attempt, plan.trace, held.statement), Lane.BULK, held.payload)

    def _pass_down(self, held: AnswerHeld) -> Iterator[Send]:
        part, owner = held.answered.part, held.statement.signer
        for peer in self._within_reach(part, owner):
            if self._serves(part, owner, peer):
                yield self._answer_to(peer, held)

    def _within_reach(self, part: int, owner: PeerId) -> Sequence[PeerId]:
        """All that I may have to serve: most peers are in charge of nothing and have nobody below them."""
        if self.me in (owner, self._owner_now(part)):
            return self.plan.listeners
        below = (self.relays[part].below if part in self.relays else None) or frozenset()
        below |= self.senders.get(part, set())
        return [peer for peer in self.plan.listeners if peer in below] if below else ()

    def _serves(self, part: int, owner: PeerId, peer: PeerId) -> bool:
        """I give the answer to those whose rows come through me; the owner in charge, to all without a parent."""
        if peer in (self.me, owner):
            return False
        above = self._above(part, peer)
        in_charge = self.me in (owner, self._owner_now(part))
        return above == self.me or (above is None and in_charge) or peer in self.senders.get(part, ())

    def _owner_now(self, part: int) -> PeerId:
        owners = self.plan.owners(part)
        return owners[min(self.turn[part], len(owners) - 1)]

    def _ask_past_the_gone(self, part: int) -> list[Effect]:
        """The answer was to come through somebody who is gone: who is next above shall send it to me."""
        owner = self._owner_now(part)
        parent, above = self.plan.topology.parts[part].parents.get(self.me), self._above(part, self.me)
        source = above or owner
        if parent in (None, above) or source == self.me or (part, source) in self.asked:
            return []
        self.asked.add((part, source))
        return [Send(source, Repeat(self.plan.round, self.plan.attempt, self.plan.trace))]

    # ---- an owner that died while it answered --------------------------------------------------------------

    def _show_next_owner(self, part: int) -> list[Effect]:
        """I hold what a dead owner answered: whoever takes over need not wait for my row, and can have it."""
        held, owner = self.answers[part], self._owner_now(part)
        if owner in (self.me, held.statement.signer) or (part, owner) in self.shown:
            return []
        self.shown.add((part, owner))
        return [Send(owner, Answer(self.plan.round, self.plan.attempt, self.plan.trace, held.statement))]

    def _hear_of(self, sender: PeerId, message: Answer, now: Seconds) -> list[Effect]:
        signed = message.statement
        answered = self.notary.open(signed, Answered, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return []
        self.check_answer(signed.signer, answered)
        if self.watch is not None:
            return self.watch.hear(signed, answered, None) + self._watch_part(answered.part, now)
        if answered.part in self.answers:
            return []
        self.heard.setdefault(answered.part, {}).setdefault(sender, signed)
        return self._fetch_heard(answered.part)

    def _fetch_heard(self, part: int) -> list[Effect]:
        """The bytes of an answer that somebody says it holds, from one of them after the other."""
        if part in self.fetching and not self.gone(self.fetching[part]):
            return []
        self.fetching.pop(part, None)
        for holder, signed in sorted(self.heard.get(part, {}).items()):
            if not self.gone(holder):
                self.fetching[part] = holder
                answered = decode_statement(signed.body, signed.signer)
                assert isinstance(answered, Answered)
                return [
                    Send(holder, WantPart(self.plan.round, self.plan.attempt, self.plan.trace, answered.digest))
                ]
        return []

    def take_bytes(self, payload: Payload) -> list[Effect]:
        """Combined bytes that came for the asking; not mine if they belong to no answer I heard of."""
        for part, holder in self.fetching.items():
            signed = self.heard[part][holder]
            answered = decode_statement(signed.body, signed.signer)
            assert isinstance(answered, Answered)
            if answered.digest == payload.digest and part not in self.answers:
                return self._hold(AnswerHeld(signed, answered, payload))
        return []

    # ---- owners that check each other ----------------------------------------------------------------------

    def examine(self, signed: Signed, answered: Answered, now: Seconds) -> list[Effect]:
        """An answer of this attempt that stands in a proposal, or that somebody calls a lie."""
        if self.watch is None or answered.attempt != self.plan.attempt:
            return []
        return self.watch.hear(signed, answered, None) + self._watch_part(answered.part, now)

    def believes(self, answered: Answered) -> bool | None:
        """May I vote for this answer? None: not yet."""
        if self.watch is None:
            return True
        return self.watch.believes(answered) if answered.attempt == self.plan.attempt else None

    def ask_again(self, now: Seconds) -> list[Effect]:
        """Rows that were asked for may have been lost."""
        if self.watch is None or not self.started:
            return []
        effects = [e for part in range(self.plan.parts) for e in self._watch_part(part, now, again=True)]
        if now < self._gather_until(0, 1):
            return effects
        silent = {owner for part in range(self.plan.parts) for owner in self._unheard(part, -1)} - {self.me}
        for owner in sorted(silent - {who for _, who in self.asked}):
            self.asked.update((part, owner) for part in range(self.plan.parts))
            effects.append(Send(owner, Repeat(self.plan.round, self.plan.attempt, self.plan.trace)))
        return effects

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        """Owners that failed this attempt, as I saw it, in ways that cannot be proven."""
        found: dict[PeerId, Lapse] = {}
        if self.watch is not None and self.started:
            late = now >= self.plan.answer_until[0]
            for part in range(self.plan.parts):
                held = self.answers.get(part)
                declined = {who for where, who in self.declined if where == part}
                seen = self.watch.lapses(part, held.answered if held is not None else None, late)
                found |= {peer: why for peer, why in seen.items() if peer not in declined}
        return found

    def _watch_part(self, part: int, now: Seconds, again: bool = False) -> list[Effect]:
        """Show what I made of a part, doubt what others made of it, settle on what is true."""
        if self.watch is None or not self.started:
            return []
        late = now >= self.plan.answer_until[0]
        waiting = not late and bool(self._unheard(part, -1))
        effects = self._reveal_if_due(part, now) + self.watch.look(part, waiting, again)
        if part not in self.answers and (held := self.watch.settled(part, patient=not late)) is not None:
            effects += self._hold(held)
        return effects

    def _unheard(self, part: int, after: int) -> list[PeerId]:
        """Which of the owners after this one, that combine this part too, may still say what they got."""
        assert self.watch is not None
        over = self.watch.spoken(part) | {who for where, who in self.declined if where == part}
        left = [owner for owner in self.plan.watchers(part)[after + 1 :] if owner not in over]
        return [owner for owner in left if owner == self.me or not self.gone(owner)]

    def _reveal_if_due(self, part: int, now: Seconds) -> list[Effect]:
        """Everybody gets the bytes when the witnesses have signed: none of them can copy my answer as its own."""
        held = self.mine.get(part)
        if held is None or part in self.revealed or self._owner_now(part) != self.me:
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
        return (self._gather_until(owner_index, 1) + self.plan.answer_until[owner_index]) / 2

    def _word_to(self, to: PeerId, held: AnswerHeld) -> Send:
        if held.answered.part in self.revealed:
            return self._answer_to(to, held)
        return Send(to, Answer(self.plan.round, self.plan.attempt, self.plan.trace, held.statement))

    def _pull_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Rows that have not come after a third of my window: the other owners of this part may have them."""
        gather = self.gathers.get(part)
        watchers = self.plan.watchers(part) if self.watch is not None else ()
        if gather is None or gather.closed or self.me not in watchers or now < self._gather_until(0, 2):
            return []
        effects: list[Effect] = []
        for peer in self.plan.listeners:
            commit = self.commit_of(peer)
            if commit is None or commit.parts <= part or peer in gather.names or (part, peer) in self.pulled:
                continue
            self.pulled.add((part, peer))
            wish = WantRow(self.plan.round, self.plan.attempt, self.plan.trace, part, peer)
            effects += [Send(owner, wish) for owner in watchers if owner != self.me and not self.gone(owner)]
        return effects

    def _open_row(self, sender: PeerId, wish: WantRow) -> list[Effect]:
        slot = (wish.part, wish.peer, sender)
        if not self.started or sender not in self.plan.listeners or self.opened[slot] >= OPENED_MAX:
            return []
        row = self._row_held(wish.part, wish.peer)
        if row is None or row.statement is None:
            return []
        self.opened[slot] += 1
        message = RowBytes(self.plan.round, self.plan.attempt, self.plan.trace, wish.part, row.path, row.statement)
        return [Send(sender, message, Lane.BULK, row.payload)]

    def _row_held(self, part: int, peer: PeerId) -> Held | None:
        if peer == self.me:
            mine = self.update is not None and 0 <= part < len(self.update.parts)
            return self._my_row(part) if mine else None
        gather = self.gathers.get(part)
        return gather.rows.get(peer) if gather is not None else None

    def _take_opened(self, sender: PeerId, message: RowBytes, payload: Payload, now: Seconds) -> list[Effect]:
        author, part = message.statement.signer, message.part
        commit = self.commit_of(author)
        if self.watch is None or commit is None or not 0 <= part < self.plan.parts:
            return []
        if self.notary.open(message.statement, Commit, self.vote_key_of(author)) != commit:
            return []  # it committed twice, and the one who opens its row heard the other word
        if not merkle_holds(commit.root, payload.digest, part, commit.parts, message.path):
            raise PeerFault(sender, f"opened a row of part {part} that {author} did not commit to")
        row = Held(frozenset((author,)), commit.weight, payload, message.path, message.statement)
        gather = self.gathers.get(part)
        if (part, author) in self.pulled and gather is not None and not gather.closed:
            return self._take(part, gather, author, row, now)
        return self.watch.take(part, author, row) if self.watch.wants(part, author) else []

    def _recomputed(self, job: str, result: Combined, now: Seconds) -> list[Effect]:
        assert self.watch is not None
        check, part = (int(word) for word in job.rsplit("/", 2)[1:])
        return self.watch.recomputed(part, check, result) + self._watch_part(part, now)

    # ---- what comes back -----------------------------------------------------------------------------------

    def _learn(self, sender: PeerId, message: Answer, payload: Payload, now: Seconds) -> list[Effect]:
        signed = message.statement
        answered = self.notary.open(signed, Answered, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return []
        self.check_answer(signed.signer, answered)
        if payload.digest != answered.digest or payload.size_bytes != answered.size_bytes:
            raise PeerFault(sender, f"bytes of part {answered.part} are not the ones its owner signed", signed.body)
        if self.watch is not None:
            return self.watch.hear(signed, answered, payload) + self._watch_part(answered.part, now)
        if answered.part in self.answers:
            return []
        return self._hold(AnswerHeld(signed, answered, payload))

    def check_answer(self, owner: PeerId, answered: Answered) -> None:
        """Raise PeerFault unless this owner may say this about this part."""
        part, index = answered.part, answered.owner_index
        if not (0 <= part < self.plan.parts and 0 <= index < len(self.plan.owners(part))):
            raise PeerFault(owner, f"answered for part {part} as owner {index}, which the plan does not have")
        if self.plan.owners(part)[index] != owner:
            raise PeerFault(owner, f"answered for part {part}, which it does not own")
        names = answered.contributors
        rising = names == tuple(sorted(names)) and len(set(names)) == len(names)  # sorting what is sorted is quick
        if not names or not rising or not set(self.plan.listeners).issuperset(names):
            raise PeerFault(owner, f"lists contributors of part {part} that cannot be")
        if not self.plan.enough(names):
            raise PeerFault(owner, f"combined {len(names)} rows of part {part}, {self.plan.rows_least} are needed")

    def _hold(self, held: AnswerHeld) -> list[Effect]:
        answered = held.answered
        self.answers[answered.part] = held
        self.fetching.pop(answered.part, None)
        self.missing.discard(answered.part)  # late, but here: the proposer may still count it
        fact = PartAnswered(
            attempt=answered.attempt,
            part=answered.part,
            owner_index=answered.owner_index,
            owner=held.statement.signer,
            digest=answered.digest,
            contributors=answered.contributors,
        )
        down = self._pass_down(held) if self.watch is None else ()  # who believes nobody needs no messenger
        return [self._report(fact), *down, *self._finish_if_over()]

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
        until = self.plan.answer_until
        moments = [*until, *(self._gather_until(i, 1) for i in range(len(until))), self._gather_until(0, 2)]
        if self.watch is not None:
            moments += [self._reveal_until(i) for i in range(len(until))]
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
