"""Round state machine: one training round of the local peer, from its plan to its vertex.

    train     inner steps in the trainer process; the network never waits for them
    commit    a signed root over the local encoded parts, sent before any other row is seen
    share     parts go to their owners, combined parts come back; the next owner takes over from a silent one
    agree     a proposer writes the vertex body; every voter recomputes it and votes
    keep      the agreed state becomes the head; what was not counted returns to error feedback

A phase ends when everything the plan expects has arrived or its sender is known to be gone, and at the latest at
its plan time. After an attempt that runs out of time the next one shares the same updates again.

Invariants:
- The machine never waits for one particular peer.
- The round never advances without a certificate and never counts what the vertex does not list.
Not responsible for: choosing the plan (policy/plan.py), what happens between rounds (peer/peer.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
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
from atoll.features.partition_training.machine import PartitionTraining, left_open
from atoll.peer.events import (
    AttemptFailed,
    ProposalRejected,
    ProtocolFault,
    RoundBegan,
    RoundSkipped,
    ShareBegan,
    StateMissing,
    StateUnavailable,
    TrainEnded,
)
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.peer.round.candidate import Candidate, CommitmentCache, LocalMeasurements, opened
from atoll.peer.round.candidates import Candidates
from atoll.peer.round.commit_reveal import UNDER_WAY, CommitRevealGate
from atoll.peer.round.commitments import CommitmentTable, DoubleCommit
from atoll.peer.round.context import RoundContext, size_flaw
from atoll.peer.round.local_update import LocalUpdate
from atoll.peer.round.misbehavior import MisbehaviorReporter
from atoll.peer.round.outcome import adopted, closed_by, told_by
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.round.part_exchange import PartExchange
from atoll.peer.round.proposal import ProposalBuilder
from atoll.peer.round.retransmission import Retransmission
from atoll.peer.round.state_transition import StateTransition
from atoll.peer.round.straggler_grace import StragglerGrace, word_until
from atoll.peer.round.view_timer import ViewTimer
from atoll.peer.tasks import RoundSettlement, StateAdvanced, TrainingResult, UpdateEncoded
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.protocol.agreement.events import BodyDecided, BodyMissing, Equivocation, MayPropose, ProposalReceived
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.protocol.allreduce.buffers import LocalRow
from atoll.protocol.allreduce.cross_check import CommitmentsDiffer, OwnerContradicted, OwnerLied
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import PartAnswered, PartsReduced, RowUndecodable
from atoll.protocol.allreduce.factory import reduce_for
from atoll.protocol.allreduce.validation import check_answer
from atoll.wire.codec import decode_body, decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import VerticesResponse
from atoll.wire.messages.round import (
    CommitAnnouncement,
    CommitRequest,
    PartDeclined,
    PartialSum,
    PartRequest,
    PartResponse,
    PartResult,
    PartStatementsRequest,
    PreVote,
    ProposalMessage,
    ReachabilityHint,
    ResendRequest,
    RoundMessage,
    RowComparison,
    RowContribution,
    RowRequest,
    RowResponse,
    TimeoutMessage,
    VoteMessage,
)
from atoll.wire.messages.statements import (
    Accusation,
    Commitment,
    OwnerResult,
    SignedStatement,
)
from atoll.wire.messages.vertex import Vertex, VertexBody

TICK_S = 0.01  # shortest wait before a timer that fired early fires again; time stamps are rounded
NUDGE_S = 1.0  # seconds between retransmissions while votes or parts are missing


class RoundMachine:
    """State machine of one round. `now` is run time throughout."""

    def __init__(
        self,
        ground: RoundContext,
        notary: StatementSigner,
        agreement: ConsensusEngine,
        gone: Callable[[PeerId], bool],
        unheard: Callable[[PeerId], bool],
        reports: Callable[[], Sequence[SignedStatement]],
        held: dict[Digest, Payload],
        said: dict[str, bytes],
        measured: Callable[[], LocalMeasurements],
        strikes: OwnerStrikes | None = None,
        keeps_rows: bool = False,
    ) -> None:
        self.ground, self.plan, self.notary, self.me = ground, ground.plan, notary, notary.me
        self.timing = ground.plan  # the plan with the windows that the local peer applies
        self.agreement, self.gone, self.unheard = agreement, gone, unheard
        self.patience, self.grace = AdaptiveTimeout(), StragglerGrace()
        self.views = ViewTimer(self.plan, agreement, self.patience, self.me, gone)
        self.parts = PartExchange(self.plan, self.patience, held)
        self.said = said  # statements made durable before a restart: repeated or withheld, never contradicted
        self.misdeeds = MisbehaviorReporter(ground, self.me, agreement.votes, strikes or OwnerStrikes())
        self.assembling = ground.topology is None
        self.trains = not self.assembling and any(m.peer == self.me for m in self.plan.trainers)
        self.committed = CommitmentTable(ground, notary, gone)
        self.reveal = CommitRevealGate(self.plan, self.me, said)
        self.attempt = 0
        self.repeats = Retransmission(self.plan, ground.vote_key_of)
        self.update = LocalUpdate(ground, self.me, measured, notary.secret)
        self.apart = PartitionTraining(ground, self.me, gone)
        # context with the topology that callers asked for; known from the first update's commitment on
        self.way = ground
        self.reduce: AllReduce | None = None  # all-reduce of this attempt, once its topology is known
        self.answers = OwnedResults(self.me, keeps_rows)
        self.free: int | None = None  # view in which the local peer may propose a new body
        self.next_state = StateTransition(ground, self.parts.held)
        self.trials = Candidates(ground, notary, agreement, self.parts, self.next_state, gone)
        self.my_body = ProposalBuilder(ground, notary, self.committed, self.next_state, reports)
        self.final: Vertex | None = None  # decided vertex, until its state is adopted
        self.adopting = self.closed = False

    # ---- the table of contents -----------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if self.closed:
            return []
        return self._spread(self._react(event, now), now)

    def _react(self, event: Event, now: Seconds) -> list[Effect]:
        name = f"round/{self.plan.round}"
        match event:
            case Start():
                return self._begin(now)
            case Received(sender, RoundMessage() as message):
                return self._hear(sender, message, event, now)
            case TaskDone(job, TrainingResult() as result) if job == f"{name}/train":
                return self._trained(result, now)
            case TaskDone(job, UpdateEncoded() as result) if job == f"{name}/encode":
                return self._encoded(result, now)
            case TaskDone(job, StateAdvanced() as result) if self.next_state.done(job, result.state):
                return self._try_all(now) + self._propose_if_ready(now)
            case TaskFailed(job) if (state := self.next_state.failed(job)) is not None:
                return [self._report(StateUnavailable(state=state)), *self._go_on_without(now)]
            case TaskDone(job, TrainingResult() as result) if job == self.apart.job:
                return [self._report(self.apart.took(result)), *self._train_apart()]
            case TaskFailed(job) if job == self.apart.job:
                return self.apart.failed()
            case TaskDone(job, _) if job == f"{name}/adopt":
                return self._close()
            case TaskFailed(job, why) if job in (f"{name}/train", f"{name}/encode"):
                self.update.training = False
                return self._pass(why, now)
            case TaskFailed(job, why) if job.startswith((f"{name}/advance/", f"{name}/adopt")):
                return self._cannot(why)
            case TaskDone() | TaskFailed():
                return self.reduce.handle(event, now) if self.reduce else []
            case TimerFired(timer) if timer == f"{name}/grace/{self.attempt}":
                self.grace.ends(now)
                return self._share_if_due(now)
            case TimerFired(timer) if timer == f"{name}/train/{self.attempt}":
                return self._training_is_over(timer, now)
            case TimerFired(timer) if timer == f"{name}/word/{self.attempt}":
                return self._pass(UNDER_WAY, now) if self._unmade and self.final is None else []
            case TimerFired(timer) if timer == f"{name}/agree/{self.attempt}":
                return self._next_attempt(now)
            case TimerFired(timer) if timer == f"{name}/parts":
                return self._try_all(now)
            case TimerFired(timer) if timer == f"{name}/nudge":
                return self._nudge(now)
            case TimerFired():
                return self.reduce.handle(event, now) if self.reduce else []
            case _:
                return []

    def _hear(self, sender: PeerId, message: RoundMessage, event: Received, now: Seconds) -> list[Effect]:
        match message:
            case CommitAnnouncement():
                heard = self._hear_commit(message.statement, now)
                return heard + self.committed.repeat_to(sender) if message.asks else heard
            case (
                RowContribution() | RowResponse() | PartialSum() | PartDeclined() | PartResult() | RowComparison()
            ) if message.attempt > self.attempt:
                self.repeats.too_early.add(sender)
                return []
            case RowContribution() | RowResponse():
                if message.attempt != self.attempt:
                    return []
                return self._hear_commit(message.statement, now) + self._collect(sender, event, now)
            case (
                PartResult()
                | PartialSum()
                | ReachabilityHint()
                | PartDeclined()
                | RowRequest()
                | RowComparison()
                | PartStatementsRequest()
            ):
                if message.attempt != self.attempt:
                    return []
                if self.reduce is None:
                    if not self.assembling:
                        self.repeats.too_early.add(sender)
                    return []
                if (flaw := size_flaw(self.ground, message)) is not None:
                    raise PeerFault(sender, flaw)
                return self.reduce.handle(event, now)
            case CommitRequest(peer=peer):
                return self.committed.show_one(sender, peer) if message.attempt == self.attempt else []
            case PartRequest():
                return self.trials.give(sender, message, now)
            case PartResponse(digest=digest):
                return self._take_part(digest, event.payload, now)
            case ProposalMessage() | VoteMessage() | TimeoutMessage() | PreVote():
                view, effects = self.agreement.view, self.agreement.receive(sender, message)
                return effects + self._pass_view(now) if self.agreement.view > view else effects
            case ResendRequest():
                return self.greet(sender) if self.repeats.tells(sender) else []
            case _:
                return []

    def _spread(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Act on the facts that lower components emit, then pass every effect on."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            if not isinstance(effect, Emit):
                continue
            match effect.fact:
                case PartAnswered():
                    more = self._answer_here(effect.fact, now)
                case RowUndecodable():
                    more = self.misdeeds.garbage(effect.fact, self.reduce) if self.reduce is not None else []
                case OwnerLied() | OwnerContradicted() | Equivocation():
                    more = self._tell(self.misdeeds.proven(effect.fact))
                case CommitmentsDiffer(owner=owner, contributors=names):
                    more = self.committed.show(owner, names)  # the author sent that owner a different commitment
                case PartsReduced():
                    more = self._reduced(now)
                case ProposalReceived():
                    more = self._judge(effect.fact, now)
                case MayPropose():
                    self.free = effect.fact.view
                    more = self._propose_if_ready(now)
                case BodyMissing():
                    more = self.trials.ask_for_bodies()
                case BodyDecided():
                    more = self._decide(effect.fact, now)
                case _:
                    more = []
            out += self._spread(more, now)
        return out

    # ---- train ---------------------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.attempt, self.timing = self.plan.attempt_at(now), self.plan.begun(now)
        present = tuple(m.peer for m in self.plan.members if m.present)
        topology, why = self.ground.topology, self.ground.why
        name, work = topology.name if topology is not None else "", self.ground.work_of(self.me)
        began = RoundBegan(
            members=present,
            assembling=self.assembling,
            paused=self.ground.parent.paused is not UNSET,
            topology=name,
            why=why,
            steps=work.steps,
            batch=work.batch,
        )
        effects: list[Effect] = [self._report(began)]
        if self.attempt > 0:
            effects += self.agreement.close_view(self.views.last_of(self.attempt - 1))
        if self.trains and not self.update.ready:
            effects += self.update.train(self.timing.times(self.attempt).train_until - now)
        return [*effects, *self._begin_attempt(now), *self.agreement.begin()]

    def _begin_attempt(self, now: Seconds) -> list[Effect]:
        times = self.timing.times(self.attempt)
        self.my_body.attempt_begins(self.attempt)
        self.repeats.attempt_begins(self.attempt)
        self.patience.attempt_begins()
        self.grace.attempt_begins()
        self.parts.attempt_begins(now)
        self._forget_old_parts()
        self.committed.attempt_begins(self.attempt, self.trains)
        self.reveal.attempt_begins(self.attempt)
        effects: list[Effect] = [
            SetTimer(f"round/{self.plan.round}/train/{self.attempt}", times.train_until),
            SetTimer(f"round/{self.plan.round}/agree/{self.attempt}", times.agree_until),
            SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S),
        ]
        self.way, self.reduce = self.ground, None
        self.trials.attempt_begins(self.attempt)
        if self.assembling:
            return effects + self.repeats.ask_the_early()
        effects += self._find_way()
        # encoded too late for the last attempt
        effects += self._encode() if self.update.trained is not None else []
        return effects + self._commit_if_ready(now) + self._share_if_due(now)

    def _find_way(self, begins: bool = False) -> list[Effect]:
        """Start this attempt's all-reduce once its topology is known.

        The topology is the one in genesis. Where callers may choose, it is the one named in the first commitment
        received with an update. A caller that asked for another one is reported; nothing is combined with its row.

        `begins`: the share phase starts now even if no update is known.
        """
        if self.reduce is not None:
            return []
        asked = next((commit.asked for commit, _ in self.committed.now.of.values() if commit.parts), None)
        if asked is None and not begins and self.ground.ways is not None:
            return []
        self.way = self.ground.by(asked or "")
        self.committed.goes_by(asked or "")
        around = ReduceEnvironment(
            self.ground.vote_key_of.get,
            self.committed.reduced_of,
            self.committed.awaits,
            self.gone,
            self.said,
            self.committed.filled,
            self.unheard,
            judges=self.agreement.votes,
            two_faced=self.committed.two_faced,
            may_see=self.reveal.may_see,
            refused=self.committed.refused,
            keeps_rows=self.answers.keeps_rows,
        )
        self.reduce = reduce_for(self.notary, self.way.reduce_plan(self.attempt, self.timing), around)
        self.trials.reduce = self.reduce
        return self.repeats.ask_the_early()

    def _trained(self, trained: TrainingResult, now: Seconds) -> list[Effect]:
        if (why := self.update.takes(trained)) is not None:
            return self._pass(why, now)
        fact = TrainEnded(steps=trained.steps, samples=trained.samples, loss=trained.loss, step_s=trained.step_s)
        return [self._report(fact), *self._encode()]

    def _encode(self) -> list[Effect]:
        """Encode the trained update, unless a quorum has begun to share without it: the next update then carries
        it whole.
        """
        late = self.patience.sharing and self.plan.quorum_of_updates is not None
        return [] if late else self.update.encode()

    def _encoded(self, encoded: UpdateEncoded, now: Seconds) -> list[Effect]:
        if (why := self.update.encodes(encoded)) is not None:
            return self._pass(why, now)
        return self._commit_if_ready(now)

    def _pass(self, why: str, now: Seconds) -> list[Effect]:
        if self.update.passes is not None:
            return []  # skipped already, before training ended
        self.update.passes = why
        return [self._report(RoundSkipped(why=why)), *self._commit_if_ready(now)]

    # ---- commit --------------------------------------------------------------------------------------------

    def _commit_if_ready(self, now: Seconds) -> list[Effect]:
        """Sign the local commitment, once per attempt.

        After sharing has begun without it, only a pass may still be sent, and only if no update is known: when all
        members have passed, no owner waits for rows until the last window ends. Where members may lie, no row has
        been shown to the local peer before it commits, so owners may still take its row.
        """
        name = f"said/{self.plan.round}/{self.attempt}/commit"
        if name in self.said and self.committed.commit_of(self.me) is None:
            return self._repeat_commit(self.said[name], now)
        in_time = self.plan.may_lie and self.final is None
        if self.patience.sharing and not (in_time or self._passes_late()):
            return []
        if not self.update.ready or self.committed.commit_of(self.me) is not None:
            return []
        if (commit := self.reveal.bound(self.update.commit(self.attempt))) is None:
            return []
        signed = self.notary.sign(commit)
        told = self.committed.say(commit, signed)
        others = self._tell(self.committed.other_calls(self.committed.now.giving))
        effects: list[Effect] = [Persist(name, encode(commit)), *others, *told, *self._find_way()]
        mine = self.update.said() if commit.parts else None
        if mine is not None and self.reduce is not None:
            effects += self.reduce.contribute(LocalRow(signed, mine), now)
        return effects + self._awaits_less(now)

    def _passes_late(self) -> bool:
        """True for a pass after a failed attempt with no update known: windows are long and perhaps no member
        trained.
        """
        return self.attempt > 0 and self.update.passes is not None and not self.committed.now.giving

    def _repeat_commit(self, said: bytes, now: Seconds) -> list[Effect]:
        """Repeat the commitment made before a restart. Its rows are lost.

        The others shall not wait for a statement.
        """
        commit = decode_statement(said, self.me)
        assert isinstance(commit, Commitment)
        return self.committed.say(commit, self.notary.sign(commit)) + self._share_if_due(now)

    def _hear_commit(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        match self.committed.hear(signed):
            case Commitment() as commit:
                effects = [*self._tell(self.committed.other_calls([signed.signer])), *self._find_way()]
                effects += self._hold_to_first(commit, signed, now)
                return effects + self._awaits_less(now) if commit.attempt == self.attempt else effects
            case DoubleCommit(first, second):
                return self._compare_commits(first, second, now)
            case None:
                return []

    def _hold_to_first(self, commit: Commitment, signed: SignedStatement, now: Seconds) -> list[Effect]:
        """Refuse the rows of a member that commits to another update in a later attempt: it has seen rows in
        between.
        """
        if (first := self.reveal.contradicted(commit, signed)) is None:
            return []
        self.committed.refused.add(signed.signer)
        return self._compare_commits(first, signed, now)

    def _awaits_less(self, now: Seconds) -> list[Effect]:
        """Re-evaluate the phase after one awaited peer less."""
        if self.patience.sharing and self.reduce is not None:
            return self.reduce.look_again(now)
        return self._share_if_due(now)

    def _compare_commits(self, first: SignedStatement, second: SignedStatement, now: Seconds) -> list[Effect]:
        """Report two different commitments of one peer and stop waiting for it: its rows may fit neither of
        them.
        """
        if first.body == second.body or first.signer in self.committed.two_faced:
            return []
        return self._tell(self.misdeeds.two_words(first, second)) + self._await_no_more(first.signer, now)

    def _await_no_more(self, peer: PeerId, now: Seconds) -> list[Effect]:
        return self._awaits_less(now) if self.committed.waits_no_more(peer) else []

    def _collect(self, sender: PeerId, event: Received, now: Seconds) -> list[Effect]:
        """Pass a row on to the all-reduce. Its commitment counts even if the bytes do not match it."""
        try:
            return self.reduce.handle(event, now) if self.reduce else []
        except PeerFault as fault:
            return [self._report(ProtocolFault(peer=PeerId(fault.who) or sender, what=fault.what))]

    # ---- share ---------------------------------------------------------------------------------------------

    def _share_if_due(self, now: Seconds) -> list[Effect]:
        """Begin sharing once every reachable trainer has committed, or a quorum has and the grace period is
        over.

        At the latest sharing begins at the plan's `train_until`.
        """
        if self.patience.sharing or self.assembling or self.final is not None:
            return []
        late = self.grace.is_over(now) or now >= self.timing.times(self.attempt).train_until
        if not late and any(p == self.me or not self.gone(p) for p in self.committed.awaited):
            return self._hurry(now)
        until, effects = word_until(self.timing, self.attempt, now), list[Effect]()
        if self.plan.may_lie and self._unmade:
            if until <= now:
                return [*self._pass(UNDER_WAY, now), *self._share_if_due(now)]
            effects.append(SetTimer(f"round/{self.plan.round}/word/{self.attempt}", until))
        self.patience.sharing_begins(now)
        known, absent = sorted(self.committed.now.of), sorted(self.committed.awaited)
        fact = ShareBegan(attempt=self.attempt, committed=tuple(known), absent=tuple(absent))
        found = self._find_way(begins=True)
        assert self.reduce is not None
        return [*effects, self._report(fact), *found, *self.reduce.handle(Start({}), now)]

    @property
    def _unmade(self) -> bool:
        return self.update.training and not self.update.ready and self.committed.commit_of(self.me) is None

    def _training_is_over(self, timer: str, now: Seconds) -> list[Effect]:
        """Handle the end of training time.

        The timer may fire early, because the run-time offset changed after it was set. Without a second timer a
        reachable liar that stays silent would be waited for until the attempt ends.
        """
        until, effects = self.timing.times(self.attempt).train_until, self._share_if_due(now)
        early = now < until and not self.patience.sharing
        return [*effects, SetTimer(timer, max(until, now + TICK_S))] if early else effects

    def _hurry(self, now: Seconds) -> list[Effect]:
        """Start the grace period once a quorum of updates is committed, and have the trainer hand over its
        steps.
        """
        if self.plan.quorum_of_updates is None:
            return []
        committed = len(self.committed.now.giving & self.committed.settled)
        if not self.grace.begins(self.timing, self.attempt, committed, now):
            return []
        ends = SetTimer(f"round/{self.plan.round}/grace/{self.attempt}", self.grace.until)
        return [ends, *(self.update.hand_over() if self.trains else [])]

    def _answer_here(self, fact: PartAnswered, now: Seconds) -> list[Effect]:
        assert self.reduce is not None
        answer = self.reduce.answers[fact.part]
        self.parts.held[answer.payload.digest] = answer.payload
        self.patience.part_came(now)
        waited = self.ground.witnesses or self.ground.stands_in(fact.part, fact.owner_index)
        # a vote may have waited for this proof or for this reserve's turn
        return self._try_all(now) if waited else []

    def _reduced(self, now: Seconds) -> list[Effect]:
        assert self.reduce is not None
        # a part that was given up may have been settled in the same event: its own fact comes after this one
        self.parts.held.update({held.payload.digest: held.payload for held in self.reduce.answers.values()})
        answers, weighing = self.reduce.for_body()
        self.parts.held.update({held.payload.digest: held.payload for held in answers.values()})
        way = self.way if answers else self.ground  # without a commitment the body uses the topology of genesis
        mine = (answers[j].statement if j in answers else None for j in range(len(way.owners)))
        self.my_body.reduced(tuple(mine), weighing)
        self.patience.sharing_ended(now)
        effects: list[Effect] = []
        if (step := self.my_body.step) is not None:
            effects += self.next_state.ask(step, None)  # early: every voter needs this state
            if (back := self.my_body.back(step)) is not None:
                effects += self.next_state.ask(step, back[1])  # or the state of a rollback
        return effects + self._propose_if_ready(now) + self._pass_view(now)

    # ---- agree ---------------------------------------------------------------------------------------------

    def _propose_if_ready(self, now: Seconds) -> list[Effect]:
        if self.free is None or self.free != self.agreement.view or self.final is not None:
            return []
        step = self.my_body.step
        if self.agreement.has_proposed(self.free):
            return []
        if step is None:
            return self.committed.seek(self.my_body.lacking)
        back = self.my_body.back(step)
        amend = back[1] if back is not None else None
        state = self.next_state.of(step, amend)
        if state is None:
            return self.next_state.ask(step, amend)
        body = self.my_body.write(state, back, now)
        return self.agreement.propose(self.free, encode(body)) if self.my_body.is_news(body) else []

    def _judge(self, proposal: ProposalReceived, now: Seconds) -> list[Effect]:
        trial = self.trials.judge(proposal, now)
        if isinstance(trial, ProposalRejected):
            return self._disagree(trial, proposal.view, now)
        trial.view, body = proposal.view, trial.body
        effects = [] if self.ground.witnesses else self._compare_body(body, now)
        for commit, signed in ((decode_statement(s.body, s.signer), s) for s in body.commits):
            effects += self._hold_to_first(commit, signed, now) if isinstance(commit, Commitment) else []
        if self.reduce is not None and body.attempt == self.attempt:
            for signed in body.parts:
                if signed is not None:
                    effects += self.reduce.examine(signed, opened(signed), now)
        return effects + self._try(trial, now)

    def _compare_body(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Compare the body's commitments with those received here: its proposer may have received different
        ones.
        """
        known = self.committed.in_attempt(body.attempt).of
        pairs = [(known[s.signer][1], s) for s in body.commits if s.signer in known]
        return [effect for mine, other in pairs for effect in self._compare_commits(mine, other, now)]

    def _try(self, trial: Candidate, now: Seconds) -> list[Effect]:
        """Advance one candidate body as far as possible: fetch parts, compute the state, then vote or adopt."""
        if not self.trials.believes(trial):
            return []
        if not self.trials.knows(trial):
            if trial.final and self.trials.lacks_earlier(trial):
                return self._cannot("the state that the run went back to is not here")
            return self.trials.ask(trial, now)
        if trial.state == trial.body.state:
            return self._adopt(trial) if trial.final else self.agreement.approve(trial.id)
        if trial.final:
            return self._cannot("my state differs from the agreed one")
        fact = ProposalRejected(proposer=trial.body.proposer, why="its state hash is not what I compute")
        return self._disagree(fact, trial.view, now)

    def _disagree(self, fact: ProposalRejected, view: int, now: Seconds) -> list[Effect]:
        """Reject this view's proposal.

        The local peer will never vote for it, so the view may end before its time.
        """
        self.views.refused = view
        return [self._report(fact), *self._pass_view(now)]

    def _try_all(self, now: Seconds) -> list[Effect]:
        return [effect for trial in self.trials.waiting for effect in self._try(trial, now)]

    def _try_final(self, now: Seconds) -> list[Effect]:
        """Continue with the decided vertex, which only needs its state."""
        final = self.trials.final
        return self._try(final, now) if final is not None and not self.adopting else []

    def _go_on_without(self, now: Seconds) -> list[Effect]:
        """Continue without a missing earlier state: propose without the rollback and vote for no body that has
        it.
        """
        return self._try_final(now) + self._propose_if_ready(now)

    def found_state(self, state: Digest, now: Seconds) -> list[Effect]:
        """Continue with an earlier state that was missing and is stored now."""
        if self.closed or not self.next_state.found(state):
            return []
        return self._spread(self._try_all(now) + self._propose_if_ready(now), now)

    def _take_part(self, digest: Digest, payload: Payload | None, now: Seconds) -> list[Effect]:
        if payload is None or payload.digest != digest:
            return []
        if digest in self.agreement.lacking:
            return self.agreement.learn_body(bytes(payload.data))
        effects = self.reduce.take_bytes(payload) if self.reduce is not None else []
        if digest not in self.trials.needed:
            return effects
        if digest not in self.parts.held:
            self.parts.held[digest] = payload
            self.patience.progressed(now)
        return effects + self._try_all(now)

    # ---- attempts ------------------------------------------------------------------------------------------

    def _next_attempt(self, now: Seconds) -> list[Effect]:
        if self.final is not None:
            return []
        failed, self.attempt = self.attempt, max(self.attempt + 1, self.views.attempt_due(now))
        effects: list[Effect] = [self._report(AttemptFailed(attempt=failed))]
        effects += [*self._train_apart(), *self._begin_attempt(now)]
        return effects + self.agreement.close_view(self.views.last_of(self.attempt - 1))

    def _train_apart(self) -> list[Effect]:
        """After a failed attempt: train on alone if too few voters are reachable and the local update is made."""
        made = self.update.ready and not self.update.training
        return self.apart.go_on() if self.trains and made and self.final is None else []

    def left(self, vertex: Vertex | None) -> RoundSettlement | None:
        """What this round counted of the local update, for a peer that continues from a later state.

        None if unneeded.
        """
        if self.ground.apart is None:
            return None
        body = decode_body(vertex.body) if vertex is not None else None
        return left_open(self.me, len(self.update.encoded or ()), body)

    def _forget_old_parts(self) -> None:
        self.trials.forget_old()
        self.answers.attempt_over(self.reduce, self.trials.needed)

    def _pass_view(self, now: Seconds) -> list[Effect]:
        """Close the view if its proposer is gone or its time is over. Closing a view is always safe."""
        if not self.plan.has_clock and self.views.attempt_due(now) > self.attempt:
            return self._next_attempt(now)
        view, busy = self.agreement.view, self.next_state.busy
        begun = self.agreement.is_open or self.next_state.begun(self.my_body.step)
        if not self.views.is_over(self.attempt, self.my_body.ready, busy, begun, now):
            return []
        effects = self.agreement.close_view(view)
        # the next proposer may be gone as well; without a vote of its own the local peer would loop forever
        goes_on = self.agreement.votes and self.agreement.view > view
        return effects + self._pass_view(now) if goes_on else effects

    def _nudge(self, now: Seconds) -> list[Effect]:
        """Retransmit what may be lost. Cheap when nothing is missing, since then nothing is awaited."""
        effects: list[Effect] = [SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S)]
        if self.final is not None:
            if not self.adopting and not self.next_state.goes_back and self.patience.gives_up(now):
                return [*effects, *self._cannot("nobody serves the parts of this round")]
            return effects + self._try_final(now)
        effects += self.committed.ask(sorted(self.reveal.withheld))
        if self.plan.may_lie and self.agreement.votes:
            # ahead of the local turn, when missing parts are left out
            effects += self.committed.seek(self.my_body.lacking)
            self.my_body.asked()
        if self.my_body.ready:
            effects += self.agreement.remind()
        effects += self.trials.ask_for_bodies()
        if self.reduce is not None:
            effects += self.reduce.ask_again(now)
        effects += self._try_all(now)
        return effects + self._propose_if_ready(now) + self._pass_view(now)

    def look_again(self, now: Seconds) -> list[Effect]:
        """Check whether a phase can end, after a peer left or returned or a new report arrived."""
        if self.closed or self.final is not None:
            return []
        effects = self._share_if_due(now)
        if self.patience.sharing and self.reduce is not None:
            effects += self.reduce.look_again(now)
        effects += self._try_all(now)
        return self._spread(effects + self._propose_if_ready(now) + self._pass_view(now), now)

    def greet(self, peer: PeerId) -> list[Effect]:
        """Resend this attempt's messages to a peer that was away."""
        if self.closed or self.final is not None:
            return []
        effects = self.committed.repeat_to(peer)
        if self.reduce is not None and self.patience.sharing:
            effects += self.reduce.resend(peer)
        return effects + self.agreement.remind(peer)

    # ---- keep ----------------------------------------------------------------------------------------------

    def learn(self, vertex: Vertex, now: Seconds) -> list[Effect]:
        """Accept the round's vertex from another peer; the history has checked its certificate. It always wins."""
        if self.closed or self.final is not None:
            return []
        self.agreement.stop()
        return self._spread(self._finish(vertex, now), now)

    def _decide(self, decided: BodyDecided, now: Seconds) -> list[Effect]:
        if self.final is not None:
            return []
        if decided.body is None:
            return self.trials.ask_for_bodies()
        vertex = Vertex(decided.body, decided.certificate)
        lapses = self.misdeeds.lapses(self.reduce, self.patience, now) if self.reduce is not None else []
        return [*self._tell_listeners(vertex), *self._tell(lapses), *self._finish(vertex, now)]

    def heed(self, caught: Accusation, now: Seconds) -> list[Effect]:
        """Check an accusation against local evidence: a peer to which the same owner sent another result can
        prove it.
        """
        said = decode_statement(caught.answer.body, caught.answer.signer)
        if isinstance(said, Commitment) and said.round == self.plan.round and caught.other is not None:
            return self._spread(self._await_no_more(caught.answer.signer, now), now)
        if not isinstance(said, OwnerResult):
            return []
        if self.reduce is None or self.closed or said.round != self.plan.round:
            return []
        check_answer(self.reduce.plan, caught.answer.signer, said)  # any peer can sign an invalid result as its own
        return self._spread(self.reduce.examine(caught.answer, said, now), now)

    def writers(self, most: int) -> list[PeerId]:
        """The next `most` proposers of this round's vertex, without the local peer; empty once it is decided."""
        if self.final is not None:
            return []
        view = self.agreement.view
        turns = dict.fromkeys(self.agreement.proposer(view + k) for k in range(most))
        return [peer for peer in turns if peer != self.me]

    def _finish(self, vertex: Vertex, now: Seconds) -> list[Effect]:
        self.final = vertex
        self.patience.decided(now)
        trial = self.trials.finish(vertex.body)
        return [SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S), *self._try(trial, now)]

    def _tell_listeners(self, vertex: Vertex) -> list[Effect]:
        """Send the vertex to observers and members outside the committee; two voters send to each of them."""
        news = VerticesResponse((vertex,), self.plan.round)
        return [Send(p, news) for p in told_by(self.me, self.plan)]

    def _adopt(self, trial: Candidate) -> list[Effect]:
        if self.adopting:
            return []
        self.adopting = True
        assert self.final is not None
        work = adopted(trial, self.ground, self.update)
        return [
            Persist(f"vertex/{self.plan.round}", encode(self.final)),
            RunTask(f"round/{self.plan.round}/adopt", work),
        ]

    def _close(self) -> list[Effect]:
        assert self.final is not None
        self.closed = True
        body = decode_body(self.final.body)
        closed = closed_by(self.final, body, self.ground, self.assembling)
        self.answers.close(body, self.reduce, self.update.encoded)
        self.reduce, self.update.encoded = None, None  # both hold memory for several updates
        self.trials.close()
        timers = ["nudge", "parts", f"train/{self.attempt}", f"agree/{self.attempt}"]
        timers += [f"grace/{self.attempt}"] if self.grace.until is not None else []
        cancelled: list[Effect] = [SetTimer(f"round/{self.plan.round}/{t}", None) for t in timers]
        return [*cancelled, self._report(closed)]

    def _cannot(self, why: str) -> list[Effect]:
        if self.final is None or self.closed:
            return []
        self.closed = True
        return [self._report(StateMissing(vertex=self.final, why=why))]

    # ---- views for other components --------------------------------------------------------------------------

    @property
    def encoded(self) -> tuple[Payload, ...] | None:
        """Parts of the local update, once encoded."""
        return self.update.encoded

    @property
    def commits(self) -> Mapping[int, CommitmentCache]:
        """Commitments by attempt, this one and the next ones."""
        return self.committed.heard

    @property
    def awaited(self) -> Set[PeerId]:
        """Peers that still owe a commitment to this attempt."""
        return self.committed.awaited

    def _tell(self, facts: Iterable[Fact]) -> list[Effect]:
        return [self._report(fact) for fact in facts]

    def _report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))
