"""Update sharing of a round: training, commitment and exchange of rows, up to the combined parts.

Driving contract: call `begin` first, `begin_attempt` for each later attempt, then pass messages and tasks.
A commitment is durable before it is sent, and no row is sent before the commitment. Call `close` at the end.

Invariants:
- One update per round, shared again in every attempt until a vertex is agreed.
- No row is combined without its author's commitment.
Not responsible for: proposing, voting, adopting (machine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, Fact, Payload, Persist, Received, SetTimer, Start
from atoll.peer.events import LocalContributionSkipped, LocalTrainingEnded, ProtocolFault, UpdateSharingBegan
from atoll.peer.round.adaptive_timeout import AdaptiveTimeout
from atoll.peer.round.candidate import LocalMeasurements
from atoll.peer.round.commit_reveal import UNDER_WAY, CommitRevealGate
from atoll.peer.round.commitments import CommitmentEquivocation, CommitmentTable
from atoll.peer.round.context import RoundContext, size_flaw
from atoll.peer.round.local_update import LocalUpdate
from atoll.peer.round.misbehavior import MisbehaviorReporter
from atoll.peer.round.part_exchange import PartArrivalTime
from atoll.peer.round.retransmission import RetransmissionRequests
from atoll.peer.round.straggler_grace import StragglerGrace, word_until
from atoll.peer.round_extension import RoundHooks
from atoll.peer.tasks import TrainingResult, UpdateEncoded
from atoll.policy.fault_tolerance import OwnerStrikes
from atoll.protocol.allreduce.buffers import LocalRow
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.factory import build_reduce
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import (
    CommitmentRequest,
    PartialSum,
    PartReductionDeclined,
    PartResult,
    PartRowProducts,
    PartStatementsRequest,
    RoundMessage,
    RowContribution,
    RowRequest,
    RowReroutedHint,
    RowResponse,
    UpdateCommitmentMessage,
)
from atoll.wire.messages.statements import Commitment, SignedStatement

TICK_S = 0.01  # shortest wait before a timer that fired early fires again; time stamps are rounded


@dataclass(frozen=True, kw_only=True)
class RoundEnvironment:
    """What a round uses of its peer."""

    gone: Callable[[PeerId], bool]  # unreachable, or back with another key
    unheard: Callable[[PeerId], bool]  # silent for now
    reports: Callable[[], Sequence[SignedStatement]]  # reports for the next vertex
    held: dict[Digest, Payload]  # combined parts of this round, served after it
    said: dict[str, bytes]  # statements made durable before a restart: repeated or withheld, never contradicted
    measured: Callable[[], LocalMeasurements]
    strikes: OwnerStrikes = field(default_factory=OwnerStrikes)
    part_pace: PartArrivalTime = field(default_factory=PartArrivalTime)
    extension: type[RoundHooks] = RoundHooks
    keeps_rows: bool = False  # a capability uses counted rows after the round


class UpdateSharing:
    """Train, commit and share phases of one round. `now` is run time throughout; `votes`: in this round."""

    def __init__(
        self,
        ground: RoundContext,
        notary: StatementSigner,
        votes: bool,
        env: RoundEnvironment,
        patience: AdaptiveTimeout,
    ) -> None:
        self.ground, self.plan, self.notary, self.me = ground, ground.plan, notary, notary.me
        self.votes, self.env, self.patience = votes, env, patience
        self.timing = ground.plan  # the plan with the windows that the local peer applies
        self.assembling = ground.topology is None
        self.trains = not self.assembling and any(m.peer == self.me for m in self.plan.trainers)
        self.attempt = 0
        self.is_decided = False  # the round's vertex is known
        self.grace = StragglerGrace()
        self.misdeeds = MisbehaviorReporter(ground, self.me, votes, env.strikes)
        self.committed = CommitmentTable(ground, notary, env.gone)
        self.reveal = CommitRevealGate(self.plan, self.me, env.said)
        self.repeats = RetransmissionRequests(self.plan, ground.vote_key_of)
        self.update = LocalUpdate(ground, self.me, env.measured, notary.secret)
        # context with the topology that callers asked for; known from the first update's commitment on
        self.way = ground
        self.reduce: AllReduce | None = None  # all-reduce of this attempt, once its topology is known

    def begin(self, attempt: int, now: Seconds) -> list[Effect]:
        """Start training, if the update of this round is not made yet."""
        self.timing = self.plan.begun(now)
        if not self.trains or self.update.ready:
            return []
        return self.update.train(self.timing.times(attempt).train_until - now)

    def begin_attempt(self, attempt: int, now: Seconds) -> list[Effect]:
        self.attempt, self.way, self.reduce = attempt, self.ground, None
        self.repeats.attempt_begins(attempt)
        self.patience.attempt_begins()
        self.grace.attempt_begins()
        self.committed.attempt_begins(attempt, self.trains)
        self.reveal.attempt_begins(attempt)
        if self.assembling:
            return self.repeats.ask_the_early()
        effects = self._choose_topology()
        # encoded too late for the last attempt
        effects += self._encode() if self.update.trained is not None else []
        return effects + self._commit_if_ready(now) + self.share_if_due(now)

    def close(self) -> None:
        """Release the rows of the round, which take the memory of several updates."""
        self.reduce, self.update.encoded = None, None

    def receive(self, sender: PeerId, message: RoundMessage, event: Received, now: Seconds) -> list[Effect]:
        """Process a message about commitments, rows or results."""
        match message:
            case UpdateCommitmentMessage():
                effects = self._receive_commit(message.statement, now)
                return effects + self.committed.repeat_to(sender) if message.asks else effects
            case (
                RowContribution()
                | RowResponse()
                | PartialSum()
                | PartReductionDeclined()
                | PartResult()
                | PartRowProducts()
            ) if message.attempt > self.attempt:
                self.repeats.too_early.add(sender)
                return []
            case RowContribution() | RowResponse():
                if message.attempt != self.attempt:
                    return []
                return self._receive_commit(message.statement, now) + self._receive_row(sender, event, now)
            case (
                PartResult()
                | PartialSum()
                | RowReroutedHint()
                | PartReductionDeclined()
                | RowRequest()
                | PartRowProducts()
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
            case CommitmentRequest(peer=peer):
                return self.committed.show_one(sender, peer) if message.attempt == self.attempt else []
            case _:
                return []

    def poll(self, now: Seconds) -> list[Effect]:
        """Check whether the phase can end."""
        effects = self.share_if_due(now)
        if self.patience.sharing and self.reduce is not None:
            effects += self.reduce.review(now)
        return effects

    def resend_to(self, peer: PeerId) -> list[Effect]:
        """Resend this attempt's commitment and rows to a peer that was away."""
        effects = self.committed.repeat_to(peer)
        if self.reduce is not None and self.patience.sharing:
            effects += self.reduce.resend(peer)
        return effects

    def end_grace(self, now: Seconds) -> list[Effect]:
        self.grace.ends(now)
        return self.share_if_due(now)

    def skip_if_unmade(self, now: Seconds) -> list[Effect]:
        """Skip the round if training is not over when the others may receive rows only after a commitment."""
        return self.skip_round(UNDER_WAY, now) if self._is_unmade and not self.is_decided else []

    def report(self, fact: Fact) -> Emit:
        return Emit(replace(fact, round=self.plan.round, trace=self.plan.trace))

    def report_all(self, facts: Iterable[Fact]) -> list[Effect]:
        return [self.report(fact) for fact in facts]

    # ---- train -------------------------------------------------------------------------------------------

    def _choose_topology(self, begins: bool = False) -> list[Effect]:
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
        self.way = self.ground.with_topology(asked or "")
        self.committed.goes_by(asked or "")
        around = ReduceEnvironment(
            self.ground.vote_key_of.get,
            self.committed.reduced_of,
            self.committed.awaits,
            self.env.gone,
            self.env.said,
            self.committed.filled,
            self.env.unheard,
            has_vote=self.votes,
            equivocators=self.committed.two_faced,
            can_see_rows=self.reveal.may_receive,
            refused=self.committed.refused,
            keeps_rows=self.env.keeps_rows,
        )
        self.reduce = build_reduce(self.notary, self.way.reduce_plan(self.attempt, self.timing), around)
        return self.repeats.ask_the_early()

    def on_trained(self, trained: TrainingResult, now: Seconds) -> list[Effect]:
        if (why := self.update.takes(trained)) is not None:
            return self.skip_round(why, now)
        fact = LocalTrainingEnded(
            steps=trained.steps, samples=trained.samples, loss=trained.loss, step_s=trained.step_s
        )
        return [self.report(fact), *self._encode()]

    def _encode(self) -> list[Effect]:
        """Encode the trained update, unless a quorum has begun to share without it: the next update then carries
        it whole.
        """
        late = self.patience.sharing and self.plan.quorum_of_updates is not None
        return [] if late else self.update.encode()

    def on_encoded(self, encoded: UpdateEncoded, now: Seconds) -> list[Effect]:
        if (why := self.update.encodes(encoded)) is not None:
            return self.skip_round(why, now)
        return self._commit_if_ready(now)

    def skip_round(self, why: str, now: Seconds) -> list[Effect]:
        if self.update.passes is not None:
            return []  # skipped already, before training ended
        self.update.passes = why
        return [self.report(LocalContributionSkipped(why=why)), *self._commit_if_ready(now)]

    # ---- commit ------------------------------------------------------------------------------------------

    def _commit_if_ready(self, now: Seconds) -> list[Effect]:
        """Sign the local commitment, once per attempt.

        After sharing has begun without it, only a pass may still be sent, and only if no update is known: when all
        members have passed, no owner waits for rows until the last window ends. Where members may lie, no row has
        been shown to the local peer before it commits, so owners may still take its row.
        """
        name = f"said/{self.plan.round}/{self.attempt}/commit"
        if name in self.env.said and self.committed.commit_of(self.me) is None:
            return self._repeat_commit(self.env.said[name], now)
        in_time = self.plan.may_lie and not self.is_decided
        if self.patience.sharing and not (in_time or self._skips_late()):
            return []
        if not self.update.ready or self.committed.commit_of(self.me) is not None:
            return []
        if (commit := self.reveal.bound(self.update.commit(self.attempt))) is None:
            return []
        signed = self.notary.sign(commit)
        told = self.committed.say(commit, signed)
        others = self.report_all(self.committed.other_calls(self.committed.now.giving))
        effects: list[Effect] = [Persist(name, encode(commit)), *others, *told, *self._choose_topology()]
        mine = self.update.said() if commit.parts else None
        if mine is not None and self.reduce is not None:
            effects += self.reduce.contribute(LocalRow(signed, mine), now)
        return effects + self._continue_with_less(now)

    def _skips_late(self) -> bool:
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
        return self.committed.say(commit, self.notary.sign(commit)) + self.share_if_due(now)

    def _receive_commit(self, signed: SignedStatement, now: Seconds) -> list[Effect]:
        match self.committed.hear(signed):
            case Commitment() as commit:
                effects = [*self.report_all(self.committed.other_calls([signed.signer])), *self._choose_topology()]
                effects += self.check_first_commit(commit, signed, now)
                return effects + self._continue_with_less(now) if commit.attempt == self.attempt else effects
            case CommitmentEquivocation(first, second):
                return self.compare_commits(first, second, now)
            case None:
                return []

    def check_first_commit(self, commit: Commitment, signed: SignedStatement, now: Seconds) -> list[Effect]:
        """Refuse the rows of a member that commits to another update in a later attempt: it has seen rows in
        between.
        """
        if (first := self.reveal.contradicted(commit, signed)) is None:
            return []
        self.committed.refused.add(signed.signer)
        return self.compare_commits(first, signed, now)

    def _continue_with_less(self, now: Seconds) -> list[Effect]:
        """Re-evaluate the phase after one awaited peer less."""
        if self.patience.sharing and self.reduce is not None:
            return self.reduce.review(now)
        return self.share_if_due(now)

    def compare_commits(self, first: SignedStatement, second: SignedStatement, now: Seconds) -> list[Effect]:
        """Report two different commitments of one peer and stop waiting for it: its rows may fit neither of
        them.
        """
        if first.body == second.body or first.signer in self.committed.two_faced:
            return []
        return self.report_all(self.misdeeds.two_words(first, second)) + self.stop_awaiting(first.signer, now)

    def stop_awaiting(self, peer: PeerId, now: Seconds) -> list[Effect]:
        return self._continue_with_less(now) if self.committed.waits_no_more(peer) else []

    def _receive_row(self, sender: PeerId, event: Received, now: Seconds) -> list[Effect]:
        """Pass a row on to the all-reduce. Its commitment counts even if the bytes do not match it."""
        try:
            return self.reduce.handle(event, now) if self.reduce else []
        except PeerFault as fault:
            return [self.report(ProtocolFault(peer=PeerId(fault.who) or sender, what=fault.what))]

    # ---- share -------------------------------------------------------------------------------------------

    def share_if_due(self, now: Seconds) -> list[Effect]:
        """Begin sharing once every reachable trainer has committed, or a quorum has and the grace period is
        over.

        At the latest sharing begins at the plan's `train_until`.
        """
        if self.patience.sharing or self.assembling or self.is_decided:
            return []
        late = self.grace.is_over(now) or now >= self.timing.times(self.attempt).train_until
        if not late and any(p == self.me or not self.env.gone(p) for p in self.committed.awaited):
            return self._begin_grace(now)
        until, effects = word_until(self.timing, self.attempt, now), list[Effect]()
        if self.plan.may_lie and self._is_unmade:
            if until <= now:
                return [*self.skip_round(UNDER_WAY, now), *self.share_if_due(now)]
            effects.append(SetTimer(f"round/{self.plan.round}/word/{self.attempt}", until))
        self.patience.sharing_begins(now)
        known, absent = sorted(self.committed.now.of), sorted(self.committed.awaited)
        fact = UpdateSharingBegan(attempt=self.attempt, committed=tuple(known), absent=tuple(absent))
        found = self._choose_topology(begins=True)
        assert self.reduce is not None
        return [*effects, self.report(fact), *found, *self.reduce.handle(Start({}), now)]

    @property
    def _is_unmade(self) -> bool:
        return self.update.training and not self.update.ready and self.committed.commit_of(self.me) is None

    def on_training_end(self, timer: str, now: Seconds) -> list[Effect]:
        """Handle the end of training time.

        The timer may fire early, because the run-time offset changed after it was set. Without a second timer a
        reachable liar that stays silent would be waited for until the attempt ends.
        """
        until, effects = self.timing.times(self.attempt).train_until, self.share_if_due(now)
        early = now < until and not self.patience.sharing
        return [*effects, SetTimer(timer, max(until, now + TICK_S))] if early else effects

    def _begin_grace(self, now: Seconds) -> list[Effect]:
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
