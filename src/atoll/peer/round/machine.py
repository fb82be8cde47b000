"""Round state machine: one training round of the local peer, from its plan to its vertex.

Driving contract: pass `Start` first, then messages of this round, timers and finished tasks; `now` is run time.
A persisted statement precedes the sends of it in one list of effects. A closed round does nothing.
PeerFault blames the sender of a message; the round goes on.

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

from collections.abc import Mapping, Set

from msgspec import UNSET

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
from atoll.peer.events import (
    AgreedStateMissing,
    ProposalRejected,
    RollbackStateUnavailable,
    RoundAttemptFailed,
    RoundBegan,
)
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.peer.round.candidate import CandidateVertex, CommitmentCache, opened
from atoll.peer.round.candidates import CandidateVertexTracker
from atoll.peer.round.context import RoundContext
from atoll.peer.round.outcome import adopted, closed_by, left_open, told_by
from atoll.peer.round.owned_results import OwnedResults
from atoll.peer.round.part_exchange import PrefetchedParts, ReducedPartExchange
from atoll.peer.round.proposal import ProposalBuilder
from atoll.peer.round.state_transition import NextStateTasks
from atoll.peer.round.update_sharing import RoundEnvironment, UpdateSharing
from atoll.peer.round.view_timer import ViewTimer
from atoll.peer.tasks import AbandonedRoundSettlement, StateAdvanced, TrainingResult, UpdateEncoded
from atoll.protocol.agreement.events import (
    BodyDecided,
    Equivocation,
    LocalProposerTurnBegan,
    ProposalReceived,
    VertexBodyMissing,
)
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.protocol.allreduce.cross_check import CommitmentsDiffer, FalseOwnerResultProven, OwnerContradicted
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.events import PartResultAccepted, PartsReduced, RowDecodeFailed
from atoll.protocol.allreduce.validation import check_answer
from atoll.wire.codec import decode_body, decode_statement, encode, statement_in
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import VerticesResponse
from atoll.wire.messages.round import (
    PartRequest,
    PartResponse,
    PartResult,
    ProposalMessage,
    ResendRequest,
    RoundMessage,
    TimeoutMessage,
    ViewChangePreVote,
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
        self, ground: RoundContext, notary: StatementSigner, agreement: ConsensusEngine, env: RoundEnvironment
    ) -> None:
        self.ground, self.plan, self.me = ground, ground.plan, notary.me
        self.agreement, self.patience, self.attempt = agreement, AdaptiveTimeout(), 0
        self.sharing = UpdateSharing(ground, notary, agreement.votes, env, self.patience)
        self.update, self.committed = self.sharing.update, self.sharing.committed
        self.reveal, self.repeats, self.misdeeds = self.sharing.reveal, self.sharing.repeats, self.sharing.misdeeds
        self.assembling, self.trains = self.sharing.assembling, self.sharing.trains
        self.views = ViewTimer(self.plan, agreement, self.patience, self.me, env.gone)
        self.parts = ReducedPartExchange(self.plan, self.patience, env.held, env.part_pace, ground.has_pieces)
        self.extension = env.extension(ground, self.me, env.gone)
        self.answers = OwnedResults()
        self.free: int | None = None  # view in which the local peer may propose a new body
        self.next_state = NextStateTasks(ground, self.parts.held)
        self.candidates = CandidateVertexTracker(
            ground, notary, agreement, self.parts, self.next_state, self.sharing
        )
        self.proposal = ProposalBuilder(ground, notary, self.committed, self.next_state, env.reports)
        self.final: Vertex | None = None  # decided vertex, until its state is adopted
        self.adopting = self.closed = False

    @property
    def reduce(self) -> AllReduce | None:
        """All-reduce of this attempt, once its topology is known."""
        return self.sharing.reduce

    @property
    def way(self) -> RoundContext:
        """Context with the topology that callers asked for."""
        return self.sharing.way

    # ---- the table of contents ---------------------------------------------------------------------------

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
                return self.sharing.on_trained(result, now)
            case TaskDone(job, UpdateEncoded() as result) if job == f"{name}/encode":
                return self.sharing.on_encoded(result, now)
            case TaskDone(job, StateAdvanced() as result) if self.next_state.done(job, result.state):
                return self._try_all(now) + self._propose_if_ready(now)
            case TaskFailed(job) if (state := self.next_state.failed(job)) is not None:
                return [self._report(RollbackStateUnavailable(state=state)), *self._go_on_without(now)]
            case TaskDone() | TaskFailed() if (
                effects := self.extension.on_task_done(event, self._is_idle())
            ) is not None:
                return effects
            case TaskDone(job, _) if job == f"{name}/adopt":
                return self._close()
            case TaskFailed(job, why) if job in (f"{name}/train", f"{name}/encode"):
                self.update.training = False
                return self.sharing.skip_round(why, now)
            case TaskFailed(job, why) if job.startswith((f"{name}/advance/", f"{name}/adopt")):
                return self._cannot(why)
            case TaskDone() | TaskFailed():
                return self.reduce.handle(event, now) if self.reduce else []
            case TimerFired(timer) if timer == f"{name}/grace/{self.attempt}":
                return self.sharing.end_grace(now)
            case TimerFired(timer) if timer == f"{name}/train/{self.attempt}":
                return self.sharing.on_training_end(timer, now)
            case TimerFired(timer) if timer == f"{name}/word/{self.attempt}":
                return self.sharing.skip_if_unmade(now)
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
            case PartRequest():
                return self.candidates.give(sender, message, now)
            case PartResponse(digest=digest):
                return self._take_part(digest, event.payload, now)
            case ProposalMessage() | VoteMessage() | TimeoutMessage() | ViewChangePreVote():
                view, effects = self.agreement.view, self.agreement.receive(sender, message)
                return effects + self._pass_view(now) if self.agreement.view > view else effects
            case PartResult(statement=said) if event.payload is None and self._has_requested(said):
                return []  # the all-reduce would request these bytes, too
            case ResendRequest():
                return self.greet(sender) if self.repeats.tells(sender) else []
            case _:
                return self.sharing.receive(sender, message, event, now)

    def _has_requested(self, said: SignedStatement) -> bool:
        """True if the round is decided, and the part of this result is here or was requested."""
        if self.final is None or not self.ground.has_pieces:
            return False
        result = statement_in(said)
        return isinstance(result, OwnerResult) and self.parts.has_requested(result.digest)

    def _spread(self, effects: list[Effect], now: Seconds) -> list[Effect]:
        """Act on the facts that lower components emit, then pass every effect on."""
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            if not isinstance(effect, Emit):
                continue
            match effect.fact:
                case PartResultAccepted():
                    more = self._answer_here(effect.fact, now)
                case RowDecodeFailed():
                    more = self.misdeeds.garbage(effect.fact, self.reduce) if self.reduce is not None else []
                case FalseOwnerResultProven() | OwnerContradicted() | Equivocation():
                    more = self.sharing.report_all(self.misdeeds.proven(effect.fact))
                case CommitmentsDiffer(owner=owner, contributors=names):
                    more = self.committed.show(owner, names)  # the author sent that owner a different commitment
                case PartsReduced():
                    more = self._reduced(now)
                case ProposalReceived():
                    more = self._judge(effect.fact, now)
                case LocalProposerTurnBegan():
                    self.free = effect.fact.view
                    more = self._propose_if_ready(now)
                case VertexBodyMissing():
                    more = self.candidates.ask_for_bodies()
                case BodyDecided():
                    more = self._decide(effect.fact, now)
                case _:
                    more = []
            out += self._spread(more, now)
        return out

    # ---- train -------------------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.attempt = self.plan.attempt_at(now)
        topology, work = self.ground.topology, self.ground.work_of(self.me)
        began = RoundBegan(
            members=tuple(m.peer for m in self.plan.members if m.is_present),
            assembling=self.assembling,
            paused=self.ground.parent.paused is not UNSET,
            topology=topology.name if topology is not None else "",
            why=self.ground.why,
            steps=work.steps,
            batch=work.batch,
        )
        effects: list[Effect] = [self._report(began)]
        if self.attempt > 0:
            effects += self.agreement.close_view(self.views.last_of(self.attempt - 1))
        effects += self.sharing.begin(self.attempt, now)
        return [*effects, *self._begin_attempt(now), *self.agreement.start()]

    def _begin_attempt(self, now: Seconds) -> list[Effect]:
        times = self.sharing.timing.times(self.attempt)
        self.proposal.attempt_begins(self.attempt)
        self.parts.attempt_begins(now)
        self.candidates.attempt_begins(self.attempt)
        self.candidates.forget_old()
        self.answers.attempt_over(self.reduce, self.candidates.needed)
        effects: list[Effect] = [
            SetTimer(f"round/{self.plan.round}/train/{self.attempt}", times.train_until),
            SetTimer(f"round/{self.plan.round}/agree/{self.attempt}", times.agree_until),
            SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S),
        ]
        return effects + self.sharing.begin_attempt(self.attempt, now)

    # ---- results -----------------------------------------------------------------------------------------

    def _answer_here(self, fact: PartResultAccepted, now: Seconds) -> list[Effect]:
        assert self.reduce is not None
        answer = self.reduce.results[fact.part]
        self.parts.held[answer.payload.digest] = answer.payload
        self.patience.part_came(now)
        waited = self.ground.witnesses or self.ground.stands_in(fact.part, fact.owner_index)
        # a vote may have waited for this proof or for this reserve's turn
        return self._try_all(now) if waited else []

    def _reduced(self, now: Seconds) -> list[Effect]:
        assert self.reduce is not None
        # a part that was given up may have been settled in the same event: its own fact comes after this one
        self.parts.held.update({held.payload.digest: held.payload for held in self.reduce.results.values()})
        answers, weighing = self.reduce.results_for_body()
        self.parts.held.update({held.payload.digest: held.payload for held in answers.values()})
        way = self.way if answers else self.ground  # without a commitment the body uses the topology of genesis
        mine = (answers[j].statement if j in answers else None for j in range(len(way.owners)))
        self.proposal.reduced(tuple(mine), weighing)
        self.patience.sharing_ended(now)
        effects: list[Effect] = []
        if (step := self.proposal.step) is not None:
            effects += self.next_state.ask(step, None)  # early: every voter needs this state
            if (back := self.proposal.back(step)) is not None:
                effects += self.next_state.ask(step, back[1])  # or the state of a rollback
        return effects + self._propose_if_ready(now) + self._pass_view(now)

    # ---- agree -------------------------------------------------------------------------------------------

    def _propose_if_ready(self, now: Seconds) -> list[Effect]:
        if self.free is None or self.free != self.agreement.view or self.final is not None:
            return []
        step = self.proposal.step
        if self.agreement.has_proposed(self.free):
            return []
        if step is None:
            return self.committed.seek(self.proposal.lacking)
        back = self.proposal.back(step)
        amend = back[1] if back is not None else None
        state = self.next_state.of(step, amend)
        if state is None:
            return self.next_state.ask(step, amend)
        body = self.proposal.write(state, back, now)
        return self.agreement.propose(self.free, encode(body)) if self.proposal.is_news(body) else []

    def _judge(self, proposal: ProposalReceived, now: Seconds) -> list[Effect]:
        trial = self.candidates.judge(proposal, now)
        if isinstance(trial, ProposalRejected):
            return self._disagree(trial, proposal.view, now)
        trial.view, body = proposal.view, trial.body
        effects = [] if self.ground.witnesses else self._compare_body(body, now)
        for commit, signed in ((decode_statement(s.body, s.signer), s) for s in body.commits):
            effects += (
                self.sharing.check_first_commit(commit, signed, now) if isinstance(commit, Commitment) else []
            )
        if self.reduce is not None and body.attempt == self.attempt:
            for signed in body.parts:
                if signed is not None:
                    effects += self.reduce.check_result(signed, opened(signed), now)
        return effects + self._try(trial, now)

    def _compare_body(self, body: VertexBody, now: Seconds) -> list[Effect]:
        """Compare the body's commitments with those received here: its proposer may have received different
        ones.
        """
        known = self.committed.in_attempt(body.attempt).of
        pairs = [(known[s.signer][1], s) for s in body.commits if s.signer in known]
        return [effect for mine, other in pairs for effect in self.sharing.compare_commits(mine, other, now)]

    def _try(self, trial: CandidateVertex, now: Seconds) -> list[Effect]:
        """Advance one candidate body as far as possible: fetch parts, compute the state, then vote or adopt."""
        if not self.candidates.believes(trial):
            return []
        if not self.candidates.knows(trial):
            if trial.final and self.candidates.lacks_earlier(trial):
                return self._cannot("the state that the run went back to is not here")
            return self.candidates.ask(trial, now)
        if trial.state == trial.body.state:
            return self._adopt(trial) if trial.final else self.agreement.approve(trial.id)
        if trial.final:
            return self._cannot("the local state differs from the agreed one")
        fact = ProposalRejected(proposer=trial.body.proposer, why="its state hash differs from the local one")
        return self._disagree(fact, trial.view, now)

    def _disagree(self, fact: ProposalRejected, view: int, now: Seconds) -> list[Effect]:
        """Reject this view's proposal.

        The local peer will never vote for it, so the view may end before its time.
        """
        self.views.refused = view
        return [self._report(fact), *self._pass_view(now)]

    def _try_all(self, now: Seconds) -> list[Effect]:
        return [effect for trial in self.candidates.waiting for effect in self._try(trial, now)]

    def _try_final(self, now: Seconds) -> list[Effect]:
        """Continue with the decided vertex, which only needs its state."""
        final = self.candidates.final
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
        if digest in self.agreement.missing_bodies:
            return self.agreement.add_body(bytes(payload.data))
        effects = self.reduce.accept_bytes(payload) if self.reduce is not None else []
        if digest not in self.candidates.needed:
            return effects
        if digest not in self.parts.held:
            self.parts.held[digest] = payload
            self.parts.came(digest, now)
            self.patience.progressed(now)
        return effects + self._try_all(now)

    # ---- attempts ----------------------------------------------------------------------------------------

    def _next_attempt(self, now: Seconds) -> list[Effect]:
        if self.final is not None:
            return []
        failed, self.attempt = self.attempt, max(self.attempt + 1, self.views.attempt_due(now))
        effects: list[Effect] = [self._report(RoundAttemptFailed(attempt=failed))]
        effects += [*self.extension.on_attempt_failed(self._is_idle()), *self._begin_attempt(now)]
        return effects + self.agreement.close_view(self.views.last_of(self.attempt - 1))

    def _is_idle(self) -> bool:
        """True if the local update is made, the trainer has no task, and the round's vertex is not known."""
        return self.trains and self.update.ready and not self.update.training and self.final is None

    def settlement_on_leave(self, vertex: Vertex | None) -> AbandonedRoundSettlement | None:
        """What this round counted of the local update, for a peer that continues from a later state.

        None if unneeded.
        """
        if self.ground.apart is None:
            return None
        body = decode_body(vertex.body) if vertex is not None else None
        return left_open(self.me, len(self.update.encoded or ()), body)

    def _pass_view(self, now: Seconds) -> list[Effect]:
        """Close the view if its proposer is gone or its time is over. Closing a view is always safe."""
        if not self.plan.has_clock and self.views.attempt_due(now) > self.attempt:
            return self._next_attempt(now)
        view, busy = self.agreement.view, self.next_state.busy
        begun = self.agreement.is_open or self.next_state.begun(self.proposal.step)
        if not self.views.is_over(self.attempt, self.proposal.ready, busy, begun, now):
            return []
        effects = self.agreement.close_view(view)
        # the next proposer may be gone as well; without a vote of its own the local peer would loop forever
        goes_on = self.agreement.votes and self.agreement.view > view
        return effects + self._pass_view(now) if goes_on else effects

    def _nudge(self, now: Seconds) -> list[Effect]:
        """Retransmit what may be lost. Cheap when nothing is missing, since then nothing is awaited."""
        effects: list[Effect] = [SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S)]
        if self.final is not None:
            in_vain = self.patience.gives_up(now, self.parts.slow_link_s)
            if in_vain and not self.adopting and not self.next_state.goes_back:
                return [*effects, *self._cannot("no member serves the parts of this round")]
            return effects + self._try_final(now)
        effects += self.committed.ask(sorted(self.reveal.withheld))
        if self.plan.may_lie and self.agreement.votes:
            # ahead of the local turn, when missing parts are left out
            effects += self.committed.seek(self.proposal.lacking)
            self.proposal.asked()
        if self.proposal.ready:
            effects += self.agreement.retransmit()
        effects += self.candidates.ask_for_bodies()
        if self.reduce is not None:
            effects += self.reduce.request_again(now)
        effects += self._try_all(now)
        return effects + self._propose_if_ready(now) + self._pass_view(now)

    def poll(self, now: Seconds) -> list[Effect]:
        """Check whether a phase can end, after a peer left or returned or a new report arrived."""
        if self.closed or self.final is not None:
            return []
        effects = self.sharing.poll(now) + self._try_all(now)
        return self._spread(effects + self._propose_if_ready(now) + self._pass_view(now), now)

    def greet(self, peer: PeerId) -> list[Effect]:
        """Resend this attempt's messages to a peer that was away."""
        if self.closed or self.final is not None:
            return []
        return self.sharing.resend_to(peer) + self.agreement.retransmit(peer)

    # ---- keep --------------------------------------------------------------------------------------------

    def accept_vertex(self, vertex: Vertex, now: Seconds, parts: PrefetchedParts | None = None) -> list[Effect]:
        """Accept the round's vertex from another peer; the history has checked its certificate. It always wins."""
        if self.closed or self.final is not None:
            return []
        if parts is not None:
            self.parts.take_over(parts)
        self.agreement.stop()
        return self._spread(self._finish(vertex, now), now)

    def _decide(self, decided: BodyDecided, now: Seconds) -> list[Effect]:
        if self.final is not None:
            return []
        if decided.body is None:
            return self.candidates.ask_for_bodies()
        vertex = Vertex(decided.body, decided.certificate)
        lapses = self.misdeeds.lapses(self.reduce, self.patience, now) if self.reduce is not None else []
        return [*self._tell_listeners(vertex), *self.sharing.report_all(lapses), *self._finish(vertex, now)]

    def heed(self, caught: Accusation, now: Seconds) -> list[Effect]:
        """Check an accusation against local evidence: a peer to which the same owner sent another result can
        prove it.
        """
        said = decode_statement(caught.answer.body, caught.answer.signer)
        if isinstance(said, Commitment) and said.round == self.plan.round and caught.other is not None:
            return self._spread(self.sharing.stop_awaiting(caught.answer.signer, now), now)
        if not isinstance(said, OwnerResult):
            return []
        if self.reduce is None or self.closed or said.round != self.plan.round:
            return []
        check_answer(self.reduce.plan, caught.answer.signer, said)  # any peer can sign an invalid result as its own
        return self._spread(self.reduce.check_result(caught.answer, said, now), now)

    def writers(self, most: int) -> list[PeerId]:
        """The next `most` proposers of this round's vertex, without the local peer; empty once it is decided."""
        if self.final is not None:
            return []
        view = self.agreement.view
        turns = dict.fromkeys(self.agreement.proposer(view + k) for k in range(most))
        return [peer for peer in turns if peer != self.me]

    def _finish(self, vertex: Vertex, now: Seconds) -> list[Effect]:
        self.final, self.sharing.is_decided = vertex, True
        self.patience.decided(now)
        trial = self.candidates.finish(vertex.body)
        return [SetTimer(f"round/{self.plan.round}/nudge", now + NUDGE_S), *self._try(trial, now)]

    def _tell_listeners(self, vertex: Vertex) -> list[Effect]:
        """Send the vertex to observers and members outside the committee; two voters send to each of them."""
        news = VerticesResponse((vertex,), self.plan.round)
        return [Send(p, news) for p in told_by(self.me, self.plan)]

    def _adopt(self, trial: CandidateVertex) -> list[Effect]:
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
        outliers = self.reduce.state.outliers if self.reduce is not None else {}
        closed = closed_by(self.final, body, self.ground, self.assembling, outliers)
        mine = self.update.encoded if self.sharing.env.keeps_rows else None
        self.answers.close(body, self.reduce, mine)
        self.sharing.close()
        self.candidates.close()
        timers = ["nudge", "parts", f"train/{self.attempt}", f"agree/{self.attempt}"]
        timers += [f"grace/{self.attempt}"] if self.sharing.grace.until is not None else []
        cancelled: list[Effect] = [SetTimer(f"round/{self.plan.round}/{t}", None) for t in timers]
        return [*cancelled, self._report(closed)]

    def _cannot(self, why: str) -> list[Effect]:
        if self.final is None or self.closed:
            return []
        self.closed = True
        return [self._report(AgreedStateMissing(vertex=self.final, why=why))]

    # ---- views for other components ----------------------------------------------------------------------

    @property
    def encoded(self) -> tuple[Payload, ...] | None:
        """Parts of the local update, once encoded."""
        return self.update.encoded

    @property
    def commits(self) -> Mapping[int, CommitmentCache]:
        """Commitments by attempt, this one and the next ones."""
        return self.committed.heard

    @property
    def makes_final_state(self) -> bool:
        """True while the state of the decided vertex is made and adopted: its parts are all here."""
        return self.final is not None and not self.closed and (self.next_state.busy or self.adopting)

    @property
    def awaited(self) -> Set[PeerId]:
        """Peers that still owe a commitment to this attempt."""
        return self.committed.awaited

    def _report(self, fact: Fact) -> Emit:
        return self.sharing.report(fact)
