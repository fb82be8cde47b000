"""All-reduce of one attempt of one round: parts go to their owners, come back combined, once, for everybody.

Runs any topology. Everyone sends part j of its own update up the tree of part j: to its parent, or straight to
the first owner. A parent waits for what is below it and hands on one row for all. The owner combines what has
arrived when everybody it expects is in it, at the latest by its sub-deadline, and answers with the result and the
list of contributors; answers go down the same tree. A silent parent is left out: its children send to the owner.
A silent owner's part is answered by the next owner in the plan; if none answers in time the part is reported
missing. Never waits for one peer, never counts anybody twice, never looks into a payload.

Rows that overlap (a child sent again what its dead parent had handed on already) cannot both be in: the larger
ones count. Where two do not hear each other and others hear both, what the one would give to the other goes around
that link, and whoever waits for it is told (`Heard`): silence alone does not tell a broken link from a death. Rows
combined on the way cannot be held against a commitment, so parents are for members that trust each other. Reveal
follows commitment: nothing is sent before the sharing begins, when all are heard, and where members may lie no row
to whoever has not said what it gives (`may_see`).

What has its own state stands beside: whose turn it is (`route.py`), what others are asked for because a link broke
(`detours.py`), rows that are opened to who asks (`opened_rows.py`), who has answers from me (`answers_down.py`).

`AllReduce` believes owners. Where they are not trusted, `watched.py` answers a few of its questions otherwise;
where
distances between whole updates weigh the rows, `weighed.py` does. `kinds.reduce_for` makes the one that a plan
asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
    Lane,
    Payload,
    Persist,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
)
from atoll.protocol.allreduce.broadcast import ResultBroadcast
from atoll.protocol.allreduce.buffers import ComputedResult, LocalRow, PartAccumulator, ReceivedResult, StoredRow
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import OwnerFailed, PartAnswered, PartMissing, PartsReduced, RowUndecodable
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.reroute import RowReroute
from atoll.protocol.allreduce.result_recovery import ResultRecovery
from atoll.protocol.allreduce.routing import AttemptRouting
from atoll.protocol.allreduce.row_server import RowServer
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined, RowsCompared, TaskRow
from atoll.protocol.allreduce.validation import check_answer, check_handed, committed_row
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import (
    PartDeclined,
    PartialSum,
    PartResult,
    ReachabilityHint,
    ResendRequest,
    RowContribution,
    RowRequest,
    RowResponse,
)
from atoll.wire.messages.statements import AgreedWeights, Commitment, Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_of

ONWARD = -1  # where an owner's index would stand: for a peer that hands it on


class AllReduce:
    """One peer's side of one attempt."""

    def __init__(self, notary: StatementSigner, plan: ReducePlan, around: ReduceEnvironment) -> None:
        self.notary, self.plan, self.me = notary, plan, notary.me
        self.vote_key_of, self.commit_of = around.vote_key_of, around.commit_of
        self.awaits, self.gone, self.filled, self.unheard = (
            around.awaits,
            around.gone,
            around.filled,
            around.unheard,
        )
        self.may_see, self.refused = around.may_see, around.refused
        self.route, self.hearsay = AttemptRouting(plan, self.me, self.gone), ResultRecovery(plan, self.gone)
        self.detours, self.down = RowReroute(self.me, self.route, around), ResultBroadcast(self.route, self.unheard)
        self.said_before = around.said
        self.update: LocalRow | None = None
        self.my_rows: dict[int, StoredRow] = {}  # of it, for those who ask again and again
        self.gathers: dict[int, PartAccumulator] = {}  # parts that I may have to answer for
        self.opened = RowServer(plan, self.me, self.gathers, self.gone, self.may_see)
        # parts in which others' rows come through me
        self.relays = {part: PartAccumulator(ONWARD, below | {self.me}) for part, below in self.route.below.items()}
        for part in range(plan.parts):
            if self.me in plan.owners(part):
                # answered before a restart, and the bytes are lost: silence, the next owner answers
                closed = self._said_name(part) in around.said
                takes = plan.topology.parts[part].takes
                self.gathers[part] = PartAccumulator(plan.owners(part).index(self.me), takes, closed=closed)
        self.parts_in_turn = self.route.parts_in_turn()
        self.sent: set[tuple[int, PeerId]] = set()  # (part, to whom my row of it went)
        self.answers: dict[int, ReceivedResult] = {}
        # what I answered, by its digest, where the vertex may draw blocks of it, or I keep rows
        self.made: dict[Digest, ComputedResult] = {}
        self.keeps_rows = plan.opened or around.keeps_rows
        self.missing: set[int] = set()
        self.started = self.finished = False
        self.agreed_plan, self.begun_at = plan, 0.0
        self.pace_s: Seconds | None = None  # where members may lie: what the rows of all but the liars took
        self.unread: dict[tuple[int, PeerId], StoredRow] = {}  # that do not decode, until the round looks
        # part -> index of a reserve -> its answer and who showed it, before its turn as I see it
        self.too_early: dict[int, dict[int, tuple[PeerId, SignedStatement, OwnerResult]]] = {}

    # ---- events --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        match event:
            case Start():
                return self._begin(now)
            case Received(sender, RowContribution() as message, Payload() as payload):
                return self._collect(sender, message, payload, now)
            case Received(sender, PartialSum() as message, Payload() as payload):
                return self._collect_handed(sender, message, payload, now)
            case Received(sender, PartDeclined(part=part)):
                return self._decline(part, sender, now)
            case Received(sender, ReachabilityHint(part=part, peer=peer)):
                return self._hear_of(part, peer, sender, now)
            case Received(sender, PartResult() as message, payload):
                return self._hear(sender, message, payload, now)
            case Received(sender, RowRequest(part=part, peer=author)):
                return self._open_row(sender, part, author)
            case Received(sender, RowResponse() as message, Payload() as payload):
                return self._take_opened(sender, message, payload, now)
            case TimerFired(name) if name == self._timer():
                return self.look_again(now)
            case TaskDone(job, RowsCombined() as result) if job.startswith(self._job("own/")):
                return self._answer(int(job.rsplit("/", 1)[1]), result, now)
            case TaskDone(job, RowsCombined() as result) if job.startswith(self._job("on/")):
                return self._combined_onward(int(job.rsplit("/", 1)[1]), result, now)
            case TaskFailed(job, why) if job.startswith(self._job("")):
                return self._cannot(int(job.rsplit("/", 1)[1]), why, now)
            case _:
                return []  # another attempt, or not for this room

    def contribute(self, update: LocalRow, now: Seconds) -> list[Effect]:
        """My update is encoded and committed; before this call only other peers' rows can be gathered."""
        self.update, self.my_rows = update, {}
        self._give_time()
        return self.look_again(now)

    def look_again(self, now: Seconds) -> list[Effect]:
        """Somebody committed, fell silent, or a deadline passed: see what can be sent or closed now."""
        if not self.started:
            return []
        self._note_pace(now)
        effects: list[Effect] = []
        for peer, part, author in self.opened.now_seen():
            effects += self._open_row(peer, part, author)
        filled = self.filled()
        if filled is not None:  # nobody has anything for the parts behind: nobody sends, owns or waits for them
            self.missing.update(range(filled, self.plan.parts))
        for part in self.parts_in_turn:
            effects += self._look_at(part, now)
            effects += self._no_more_too_early(part, now) if part in self.too_early else []
        # only after what is due was done: a word that comes in the instant of a deadline must not push it away
        return [*effects, *self._finish_if_over(), *self._set_timer(now)]

    def resend(self, to: PeerId) -> list[Effect]:
        """This peer came back, or came late: give it what it may have missed."""
        self.down.back.add(to)
        effects: list[Effect] = [*self._answers_for(to)]
        for part, target in sorted(self.sent):
            if target == to and part not in self.answers and part not in self.missing:
                effects += self._row_to(part, to)
        return effects

    def take_bytes(self, payload: Payload) -> list[Effect]:
        """Combined bytes that came for the asking; not mine if they belong to no answer I heard of."""
        held = self.hearsay.completed_by(payload)
        return self._hold(held) if held is not None else []

    # ---- what is otherwise where owners are not trusted (watched.py) or weigh rows (weighed.py) --------------

    def examine(self, signed: SignedStatement, said: OwnerResult, now: Seconds) -> list[Effect]:
        """An answer of this round that stands in a proposal, or that another member calls a lie."""
        return []

    def believes(self, answered: OwnerResult) -> bool | None:
        """May I vote for this answer? None: not yet."""
        return True if self._in_turn(answered) else None

    def ask_again(self, now: Seconds) -> list[Effect]:
        """What I asked for to judge answers may have been lost."""
        return []

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        """Owners that failed this attempt, as I saw it, in ways that cannot be proven."""
        return {}

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        """What others than its owner signed of this answer, where owners watch each other: the very same."""
        return ()

    def made_again(self, answered: OwnerResult) -> bool:
        """Did I make it myself to judge it, of the rows that it names?"""
        return False

    def for_body(self) -> tuple[dict[int, ReceivedResult], AgreedWeights | None]:
        """The answers that may stand in one body, and what weighed the rows of all of them."""
        return self.answers, None

    def _message_of(self, held: ReceivedResult) -> PartResult:
        plan = self.plan
        return PartResult(plan.round, plan.attempt, plan.trace, held.statement)

    def _row_goes_to(self, part: int) -> Sequence[PeerId]:
        """Who gets my own row now, if it has not had it."""
        to, owners, returned = self.route.target(part), self.plan.owners(part), self.route.returned(part)
        if self.route.stand_in_may(part):
            return (to, *self.route.behind_the_unheard(part, self.unheard), *returned)
        if to != self.me or to not in owners or not any(map(self.unheard, owners[: owners.index(to)])):
            return (to, *returned)
        # it is my turn only as I see it: whoever is next has my row for others, and their answer for me
        return (to, *[owner for owner in owners[owners.index(to) + 1 :] if not self.gone(owner)][:1], *returned)

    def _late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Ask others for rows that have not come to me."""
        return []

    def _await_others_rows(self, part: int, gather: PartAccumulator, now: Seconds) -> list[Effect] | None:
        """All rows are here but those behind broken links: ask for these, and wait a little. None: no longer."""
        asked = self.detours.wait(part, gather, now)
        return None if asked is None else [*asked, *self._set_timer(now)]

    def _window(self, part: int, gather: PartAccumulator) -> int | None:
        """The owner index by whose window I gather as an owner of this part; None: it is not my turn."""
        return gather.owner_index if self.route.turn[part] == gather.owner_index else None

    def _stand_in(self, part: int) -> PartAccumulator:
        """Rows of a part that I have as a reserve, of whom there may be many: from when the first one comes."""
        if part not in self.gathers:
            index = self.plan.takers(part).index(self.me)
            self.gathers[part] = PartAccumulator(index, closed=self._said_name(part) in self.said_before)
        return self.gathers[part]

    def _forget_rows(self, gather: PartAccumulator) -> None:
        """They are combined: an update's worth of memory, wanted for the next parts."""
        gather.rows.clear()

    def _rows_said(self, names: Iterable[PeerId]) -> Digest:
        """What my answer says about the commitments it is made of."""
        return ZERO_DIGEST

    def _answer_made(self, held: ReceivedResult, now: Seconds) -> list[Effect]:
        """By me, as an owner, and durable before what is sent from here on."""
        return self._hold(held)

    def _answer_heard(
        self, sender: PeerId, signed: SignedStatement, answered: OwnerResult, payload: Payload | None, now: Seconds
    ) -> list[Effect]:
        """A checked answer, with its bytes or only the word that the sender holds it."""
        if answered.part in self.answers:
            return []
        if payload is None:
            return self.hearsay.note(sender, signed, answered)
        return self._hold(ReceivedResult(signed, answered, payload))

    def _pass_down(self, held: ReceivedResult) -> list[Send]:
        """To all that have an answer from me, as soon as I hold it; not to those who showed me that they do."""
        return [self._answer_to(peer, held) for peer in self.down.below(held, self.hearsay.holders(held.answered))]

    def _answers_for(self, to: PeerId) -> list[Send]:
        """To one that may have missed them."""
        return self._served(self.answers, to)

    def _moments(self) -> list[Seconds]:
        """At which time alone can change something."""
        plan, gather_until = self.plan, self.plan.gather_until
        turns = range(len(plan.answer_until) + bool(plan.reserves))
        thirds = (gather_until(i, 1) for i in turns)
        return [
            *map(plan.until, turns),
            *thirds,
            gather_until(0, 2),
            *self.detours.moments(),
        ]

    # ---- sending my parts ----------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.started, self.begun_at = True, now
        self._give_time()
        # whoever began before me may have asked already
        asked = [e for part, author in [*self.opened.wanted] for e in self._open_wanted(part, author)]
        return asked + self.look_again(now)

    def _give_time(self) -> None:
        """To owners; others' updates are as large as mine."""
        if self.started:
            update_bytes = sum(part.size_bytes for part in self.update.parts) if self.update is not None else 0
            self.plan = self.route.plan = self.agreed_plan.begun(self.begun_at, update_bytes, self.pace_s)

    def _note_pace(self, now: Seconds) -> bool:
        """True in the moment when all but as many as may lie have sent me what I combine as a first owner."""
        if self.pace_s is not None or self.plan.has_clock or not self.plan.distrusts:
            return False
        mine = [part for part, g in self.gathers.items() if g.owner_index == 0 and part not in self.missing]
        if not mine or any(self._rows_not_here(part) > self.plan.liars for part in mine):
            return False  # also for whoever combines nothing
        self.pace_s = now - self.begun_at
        self._give_time()
        return True

    def _rows_not_here(self, part: int) -> int:
        """Of a part of mine: everybody's who has not said that it gives none, heard or not."""
        lacking = [self.commit_of(peer) for peer in self.plan.givers - self.gathers[part].names]
        return sum(commit is None or commit.parts > part for commit in lacking)

    def _look_at(self, part: int, now: Seconds) -> list[Effect]:
        owned = self.route.pass_turn(part, now)
        if owned and self.route.owner[part] == self.me:
            self._stand_in(part)
        if part in self.answers:
            held = self.answers[part]
            return [Send(peer, self._message_of(held)) for peer in self.down.to_show(held)]
        lacking = self._owner_lacks_its_row(part)
        if part in self.missing:
            if lacking is not False or not owned:
                return []
            self.missing.discard(part)  # its owner committed after all
        if not owned or lacking:
            self.missing.add(part)
            return [self._report(PartMissing(attempt=self.plan.attempt, part=part))]
        return [
            *self.hearsay.fetch(part),
            *self._contribute_part(part),
            *self._late_rows(part, now),
            *self._hand_on_if_due(part, now),
            *self._close_if_due(part, now),
            *self._ask_past_the_gone(part),
        ]

    def _owner_lacks_its_row(self, part: int) -> bool | None:
        """Where parts take rows of some only the owner's is one of them: without it nobody need wait. None: they
        take everybody's."""
        if self.plan.topology.parts[part].takes is None:
            return None
        commit = self.commit_of(self.plan.owners(part)[0])
        return commit is None or commit.parts <= part

    def _contribute_part(self, part: int) -> list[Effect]:
        """My own row, up the tree; through my own hands if others' rows come through me too."""
        if self.update is None or part >= len(self.update.parts) or not self._takes(part, self.me):
            return []
        relay = self.relays.get(part)
        if relay is None or (part, self.me) in self.route.declined:
            new = [to for to in self._row_goes_to(part) if (part, to) not in self.sent]
            return [effect for to in new for effect in self._send_row(part, to)]
        if not relay.closed:
            relay.add(self.me, self._my_row(part))
        return []  # it goes with the others' rows

    def _send_row(self, part: int, to: PeerId) -> list[Effect]:
        if part in self.missing or (part, to) in self.sent or not self.may_see(to):
            return []
        self.sent.add((part, to))
        if to != self.me:
            return self._row_to(part, to)
        relay = self.relays.get(part)
        row = relay.done if relay is not None and relay.done is not None else self._my_row(part)
        self._stand_in(part).add(self.me, row)
        return []

    def _row_to(self, part: int, to: PeerId) -> list[Effect]:
        plan, relay = self.plan, self.relays.get(part)
        owners = plan.owners(part) if to in plan.owners(part) else plan.takers(part)
        index = owners.index(to) if to in owners and self.route.above(part, self.me) != to else ONWARD
        if relay is not None and relay.done is not None:
            done = relay.done
            names = tuple(sorted(done.names))
            handed = PartialSum(plan.round, plan.attempt, plan.trace, part, index, done.weight, names)
            return [Send(to, handed, Lane.BULK, done.payload)]
        if self.update is None or part >= len(self.update.parts):
            return []
        path = self.update.path(part)
        message = RowContribution(plan.round, plan.attempt, plan.trace, part, index, path, self.update.statement)
        return [Send(to, message, Lane.BULK, self.update.parts[part])]

    def _takes(self, part: int, peer: PeerId) -> bool:
        takes = self.plan.topology.parts[part].takes
        return takes is None or peer in takes

    def _my_row(self, part: int) -> StoredRow:
        if part not in self.my_rows:
            update, commit = self.update, self.commit_of(self.me)
            assert update is not None and commit is not None
            names, path = frozenset((self.me,)), update.path(part)
            row = StoredRow(names, commit.weight, update.parts[part], path, update.statement)
            self.my_rows[part] = row
        return self.my_rows[part]

    # ---- handing on what comes through me ------------------------------------------------------------------

    def _hand_on_if_due(self, part: int, now: Seconds) -> list[Effect]:
        relay = self.relays.get(part)
        if relay is None:
            return []
        if relay.closed:
            goes_to = self._row_goes_to(part) if relay.done is not None else ()
            return [effect for to in goes_to for effect in self._send_row(part, to)]
        through_me = self.detours.through_me(part)
        if not relay.rows or (now < self.plan.gather_until(0, 2) and self.awaits(part, relay.names, through_me)):
            return []
        relay.closed = True
        return self._combine(part, relay, "on", onward=True)

    def _combined_onward(self, part: int, result: RowsCombined, now: Seconds) -> list[Effect]:
        relay = self.relays[part]
        effects = self._name_garbage(part, result, relay.rows)
        if result.payload is None:
            return effects + self._cannot(part, result.why, now)
        counted = [relay.rows[sender] for sender in result.counted]
        names = frozenset(name for held in counted for name in held.names)
        relay.done = StoredRow(names, sum(held.weight for held in counted), result.payload)
        relay.rows.clear()
        return [*effects, *self.look_again(now)]

    def _combine(self, part: int, gather: PartAccumulator, job: str, onward: bool = False) -> list[Effect]:
        chosen = gather.chosen().items()
        rows = tuple(
            TaskRow(sender, held.weight, held.payload, tuple(sorted(held.names)), held.handed)
            for sender, held in chosen
        )
        plan = self.plan
        work = CombineRows(plan.round, part, plan.shares, rows, onward, plan.statistic, plan.liars)
        return [RunTask(self._job(f"{job}/{part}"), work)]

    def _cannot(self, part: int, why: str, now: Seconds) -> list[Effect]:
        """I cannot combine this part."""
        return self._say_declined(part, why) + self._decline(part, self.me, now)

    def _say_declined(self, part: int, why: str) -> list[Effect]:
        """Nobody shall wait for me."""
        plan = self.plan
        word = PartDeclined(plan.round, plan.attempt, plan.trace, part)
        told = [Send(peer, word) for peer in self.route.others()]
        return [self._report(OwnerFailed(part=part, why=why)), *told]

    def _decline(self, part: int, who: PeerId, now: Seconds) -> list[Effect]:
        if not 0 <= part < self.plan.parts:
            raise PeerFault(who, f"declined part {part}, which the plan does not have")
        if (part, who) in self.route.declined:
            return []
        self.route.declined.add((part, who))
        return self.look_again(now)

    # ---- answering for the parts I own ---------------------------------------------------------------------

    def _collect(self, sender: PeerId, message: RowContribution, payload: Payload, now: Seconds) -> list[Effect]:
        commit = self.commit_of(sender)
        gather = self._gather_for(message.part, message.owner_index)
        if commit is None or gather is None:  # not committed, not mine, or closed
            return self._answer_already(message.part, sender) + self._too_late_to_hand_on(sender, message)
        if not self._takes(message.part, sender):
            raise PeerFault(sender, f"part {message.part} takes no row of its own", message.statement.body)
        said = message.statement
        if said.signer != sender or self.notary.open(said, Commitment, self.vote_key_of(sender)) != commit:
            # it goes with the row when others ask me for it
            raise PeerFault(sender, f"part {message.part} comes with another commitment than I heard", said.body)
        row = committed_row(sender, commit, message, payload)
        if row is None:
            raise PeerFault(sender, f"part {message.part} is not what it committed to", said.body)
        return self._take(message.part, gather, sender, row, now)

    def _collect_handed(self, sender: PeerId, message: PartialSum, payload: Payload, now: Seconds) -> list[Effect]:
        gather = self._gather_for(message.part, message.owner_index)
        if gather is None:
            return self._answer_already(message.part, sender) + self._too_late_to_hand_on(sender, message)
        by = sender if message.by is UNSET else message.by
        if by != sender and (message.part, by) not in self.detours.pulled:
            return []
        check_handed(self.plan, sender, by, message, self.commit_of)
        held = StoredRow(frozenset(message.contributors), message.weight, payload)
        return self._take(message.part, gather, by, held, now)

    def _gather_for(self, part: int, owner_index: int) -> PartAccumulator | None:
        gather = self.relays.get(part) if owner_index == ONWARD else self.gathers.get(part)
        if gather is None and 0 <= part < self.plan.parts and self._is_mine(part, owner_index):
            gather = self._stand_in(part)
        if gather is None or gather.owner_index != owner_index or gather.closed or part in self.answers:
            return None
        return gather

    def _is_mine(self, part: int, owner_index: int) -> bool:
        takers = self.plan.takers(part)
        return 0 <= owner_index < len(takers) and takers[owner_index] == self.me

    def _answer_already(self, part: int, to: PeerId) -> list[Effect]:
        """It turned to me because another owner is gone, and I hold what that one answered."""
        if not 0 <= part < self.plan.parts:
            return []
        held = self.answers.get(part)
        if held is None:
            # closed, and not answered yet: it may have noticed a death before me, and gets the answer from me
            self.route.senders.setdefault(part, set()).add(to)
            return []
        return [] if (part, to) in self.down.given else [self._answer_to(to, held)]

    def _take(
        self, part: int, gather: PartAccumulator, sender: PeerId, held: StoredRow, now: Seconds
    ) -> list[Effect]:
        if sender in self.refused:
            return []
        gather.add(sender, held)
        self.route.senders.setdefault(part, set()).add(sender)
        if not self.started:
            return []
        told: list[Effect] = [Send(peer, self._heard(part, sender)) for peer in self.route.passed(part, sender)]
        told += self._open_wanted(part, sender)
        if self._note_pace(now):
            return told + self.look_again(now)
        return told + self._hand_on_if_due(part, now) + self._close_if_due(part, now)

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.gathers.get(part)
        if gather is None or gather.closed or not gather.rows or part in self.answers:
            return []
        window = self._window(part, gather)
        if window is None:
            return []
        early = now < self.plan.gather_until(window, 1)
        if early and (self.hearsay.fetches(part) or self.awaits(part, gather.names, self._awaited(gather))):
            return self.detours.pull_sums(part, gather)
        if early and (asked := self._await_others_rows(part, gather, now)) is not None:
            return asked
        gather.closed = True
        return self._combine(part, gather, "own")

    def _awaited(self, gather: PartAccumulator) -> Iterable[PeerId] | None:
        """Whose rows of a part of mine may still come. Where it takes those of some, whoever has not committed when
        the sharing begins has none to give."""
        return None if gather.below is None else [p for p in gather.below if self.commit_of(p) is not None]

    def _name_garbage(
        self, part: int, result: RowsCombined | RowsCompared, rows: Mapping[PeerId, StoredRow]
    ) -> list[Effect]:
        self.unread.update({(part, peer): rows[peer] for peer in result.undecodable if peer in rows})
        return [self._report(RowUndecodable(peer=peer, part=part)) for peer in result.undecodable]

    def _answer(self, part: int, result: RowsCombined, now: Seconds) -> list[Effect]:
        gather, plan = self.gathers[part], self.plan
        rows = dict(gather.rows)
        effects = self._name_garbage(part, result, rows)
        if result.payload is None:  # whoever can has them from me
            return effects + self._cannot(part, result.why, now)
        self._forget_rows(gather)
        payload = result.payload
        names = {name for sender in result.counted for name in rows[sender].names}
        answered = OwnerResult(
            plan.round,
            plan.attempt,
            part,
            gather.owner_index,
            payload.digest,
            payload.size_bytes,
            tuple(sorted(names)),
            self._rows_said(names),
            rows_of(c for c in map(self.commit_of, sorted(names)) if c is not None) if plan.opened else UNSET,
        )
        held = ReceivedResult(self.notary.sign(answered), answered, payload)
        if self.keeps_rows:
            made_of = tuple(rows[name] for name in answered.contributors if name in rows)
            self.made[answered.digest] = ComputedResult(answered, payload, made_of)
        # durable before it is sent: a restarted owner must never give a second, different answer
        effects.append(Persist(self._said_name(part), encode(answered)))
        return effects + self._answer_made(held, now)

    def _answer_to(self, to: PeerId, held: ReceivedResult) -> Send:
        self.down.given.add((held.answered.part, to))
        return Send(to, self._message_of(held), Lane.BULK, held.payload)

    def _too_late_to_hand_on(self, sender: PeerId, message: RowContribution | PartialSum) -> list[Effect]:
        """I took it for gone and handed on without it: its row goes past me, or its owner would wait for it."""
        plan, part = self.plan, message.part
        relay = self.relays.get(part) if message.owner_index == ONWARD else None
        if relay is None or not relay.closed or sender in relay.names or part in self.answers:
            return []
        return [Send(sender, PartDeclined(plan.round, plan.attempt, plan.trace, part))]

    def _served(self, answers: Mapping[int, ReceivedResult], to: PeerId) -> list[Send]:
        mine = [h for part, h in answers.items() if self.route.serves(part, h.statement.signer, to)]
        return [self._answer_to(to, held) for held in mine]

    def _ask_past_the_gone(self, part: int) -> list[Effect]:
        """The answer was to come through somebody who is gone."""
        source = None if self.hearsay.fetches(part) else self.down.source(part)
        if source is None:
            return []
        return [Send(source, ResendRequest(self.plan.round, self.plan.attempt, self.plan.trace))]

    # ---- opening rows that I hold --------------------------------------------------------------------------

    def _open_row(self, sender: PeerId, part: int, author: PeerId) -> list[Effect]:
        row = self._row_to_open(part, author) if self.started else None
        return self.opened.ask(sender, part, author, row)

    def _open_wanted(self, part: int, author: PeerId) -> list[Effect]:
        row = self._row_held(part, author)
        return self.opened.came(part, author, row) if row is not None else []

    # ---- around broken links -------------------------------------------------------------------------------

    def _heard(self, part: int, peer: PeerId) -> ReachabilityHint:
        return ReachabilityHint(self.plan.round, self.plan.attempt, self.plan.trace, part, peer)

    def _hear_of(self, part: int, peer: PeerId, sender: PeerId, now: Seconds) -> list[Effect]:
        if not 0 <= part < self.plan.parts or peer not in self.plan.hearers:
            raise PeerFault(sender, f"hears {peer} in part {part}, which the plan does not have")
        if not self.plan.topology.parts[part].parents:
            return []  # every row goes straight to owners, and a liar could make them wait for the dead
        self.detours.there.add((part, peer))
        return self.look_again(now)

    def _take_opened(self, sender: PeerId, message: RowResponse, payload: Payload, now: Seconds) -> list[Effect]:
        author, part = message.statement.signer, message.part
        commit = self.commit_of(author)
        if commit is None or not 0 <= part < self.plan.parts:
            return []
        if self.notary.open(message.statement, Commitment, self.vote_key_of(author)) != commit:
            return []  # it committed twice, and the one who opens its row heard the other word
        row = committed_row(author, commit, message, payload)
        if row is None:
            raise PeerFault(sender, f"opened a row of part {part} that {author} did not commit to")
        return self._take_opened_row(part, author, row, now)

    def _take_opened_row(self, part: int, author: PeerId, row: StoredRow, now: Seconds) -> list[Effect]:
        gather = self._gather_short_of(part, author)
        return self._take(part, gather, author, row, now) if gather is not None else []

    def _gather_short_of(self, part: int, author: PeerId) -> PartAccumulator | None:
        """Where this row goes that I asked others for; None: I did not, or it comes too late."""
        gather = self.gathers.get(part)
        asked = (part, author) in self.detours.pulled
        return gather if asked and gather is not None and not gather.closed else None

    def _row_to_open(self, part: int, author: PeerId) -> StoredRow | None:
        """For whoever asks."""
        return self._row_held(part, author)

    def _row_held(self, part: int, peer: PeerId) -> StoredRow | None:
        if peer == self.me:
            mine = self.update is not None and 0 <= part < len(self.update.parts)
            return self._my_row(part) if mine else None
        gather = self.gathers.get(part)
        return gather.rows.get(peer) if gather is not None else None

    # ---- what comes back -----------------------------------------------------------------------------------

    def _hear(self, sender: PeerId, message: PartResult, payload: Payload | None, now: Seconds) -> list[Effect]:
        signed = message.statement
        answered = self.notary.open(signed, OwnerResult, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return []
        check_answer(self.plan, signed.signer, answered)
        if payload is not None and (payload.digest, payload.size_bytes) != (answered.digest, answered.size_bytes):
            raise PeerFault(sender, f"bytes of part {answered.part} are not the ones its owner signed", signed.body)
        if not self._in_turn(answered):
            self._keep_until_in_turn(sender, signed, answered)
            return []
        return self._answer_heard(sender, signed, answered, payload, now)

    def _in_turn(self, answered: OwnerResult) -> bool:
        """Where members may lie nobody stands in for others that are there, as I see it, nor for an owner that has
        answered, when all windows are over: else not the six that were drawn for a part could answer for it, but
        whoever likes."""
        plan, part, index = self.plan, answered.part, answered.owner_index
        if not plan.may_lie or not plan.stands_in(part, index):
            return True
        held = self.answers.get(part)
        if held and not plan.stands_in(part, held.answered.owner_index) and not self.gone(held.statement.signer):
            return False
        return answered.attempt == plan.attempt and self.route.turn[part] >= index

    def _keep_until_in_turn(self, holder: PeerId, signed: SignedStatement, answered: OwnerResult) -> None:
        """Some notice deaths before others. Its bytes are asked for then, for they could be many: of the reserve
        itself, as soon as it has said so, since others may not have them."""
        words, index = self.too_early.setdefault(answered.part, {}), answered.owner_index
        if index not in words or holder == signed.signer:
            words[index] = holder, signed, answered

    def _no_more_too_early(self, part: int, now: Seconds) -> list[Effect]:
        words, effects = self.too_early[part], list[Effect]()
        due = [words.pop(index) for index in sorted(words) if self._in_turn(words[index][2])]
        for holder, signed, answered in due:  # one may make me look again, and come here
            effects += self._answer_heard(holder, signed, answered, None, now)
        return effects

    def _hold(self, held: ReceivedResult) -> list[Effect]:
        answered = held.answered
        self.answers[answered.part] = held
        self.hearsay.done(answered.part)
        self.missing.discard(answered.part)  # late, but here: the proposer may still count it
        fact = PartAnswered(
            attempt=answered.attempt,
            part=answered.part,
            owner_index=answered.owner_index,
            owner=held.statement.signer,
            digest=answered.digest,
            contributors=answered.contributors,
        )
        return [self._report(fact), *self._pass_down(held), *self._finish_if_over()]

    def _finish_if_over(self) -> list[Effect]:
        if self.finished or len(self.answers.keys() | self.missing) < self.plan.parts:
            return []
        self.finished = True
        return [SetTimer(self._timer(), None), self._report(PartsReduced(attempt=self.plan.attempt))]

    # ---- small words ---------------------------------------------------------------------------------------

    def _set_timer(self, now: Seconds) -> list[Effect]:
        """Wake up at the next moment at which time alone can change something."""
        if self.finished or not self.started:
            return []
        ahead = [moment for moment in self._moments() if moment > now]
        return [SetTimer(self._timer(), min(ahead))] if ahead else []

    def _said_name(self, part: int) -> str:
        return f"said/{self.plan.round}/{self.plan.attempt}/answer/{part}"

    def _timer(self) -> str:
        return f"reduce/{self.plan.round}/{self.plan.attempt}"

    def _job(self, part: str) -> str:
        return f"combine/{self.plan.round}/{self.plan.attempt}/{part}"

    def _report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))
