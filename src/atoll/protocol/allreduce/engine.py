"""All-reduce engine: runs any reduce topology for one attempt of one round.

Driving contract: create with `factory.reduce_for`, then pass `Start`, messages, timers and finished tasks to
`handle`. Call `contribute` once with the local update, before or after `Start`. Call `review` when a peer
commits, falls silent or returns, and `resend` for a peer that returns. Carry out effects in order: a persisted
value must be durable before later sends. After `PartsReduced` each part is in `results` or in `missing`.

Each member sends part j of its update up the tree of part j, to its parent or to the owner. A parent waits for the
rows below it and hands on one sum. The owner combines the rows when all that it expects are in, at the latest by
its sub-deadline, and sends the result with the list of contributors; results go down the same tree. If a parent is
silent, its children send to the owner. If an owner is silent, the next owner in the plan answers. If no owner
answers in time, the part is reported missing.

Invariants:
- No peer is waited for without end, and no contributor is counted twice: of overlapping rows the larger one counts.
- The engine never looks into a payload.
- Reveal follows commitment: no row leaves before the sharing begins, and if members may lie, no row goes to a peer
  that has not committed (`may_see`).
- Silence alone does not tell a broken link from a death: a row goes around a broken link, and the peer that waits
  for it gets a `RowReroutedHint`.
- Sums cannot be checked against commitments, so relays need members that trust each other.
Not responsible for: the weights of rows, trust in owners, and unmasking (`strategies`); what has state of its own
(routing, row_uplink, reroute, row_server, broadcast, result_recovery, deferred_results).
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import (
    Effect,
    Event,
    Payload,
    Persist,
    Received,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
)
from atoll.protocol.allreduce.attempt import AttemptState
from atoll.protocol.allreduce.buffers import (
    ComputedResult,
    GatheredRow,
    LocalRow,
    PartRowCollector,
    ReceivedResult,
    RemotePartResult,
)
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import PartMissing, PartResultAccepted, PartsReduced
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.row_uplink import RowUplink
from atoll.protocol.allreduce.strategies import (
    NoUnmaskingPhase,
    PlainMean,
    ResultVerification,
    RowWeighting,
    StrategyEngineActions,
    TrustingResultVerification,
    UnmaskingPhase,
    weak_call,
)
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.protocol.allreduce.validation import check_answer, check_handed, committed_row
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import (
    PartialSum,
    PartReductionDeclined,
    PartResult,
    RowContribution,
    RowRequest,
    RowReroutedHint,
    RowResponse,
)
from atoll.wire.messages.statements import AgreedWeights, Commitment, Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_digest


class AllReduce:
    """One peer's side of one attempt. The strategies are given as factories."""

    def __init__(
        self,
        notary: StatementSigner,
        plan: ReducePlan,
        around: ReduceEnvironment,
        weighting: Callable[[AttemptState, StrategyEngineActions], RowWeighting] = PlainMean,
        verification: Callable[
            [AttemptState, StrategyEngineActions], ResultVerification
        ] = TrustingResultVerification,
        unmasking: Callable[[AttemptState, StrategyEngineActions], UnmaskingPhase] = NoUnmaskingPhase,
    ) -> None:
        self.notary, self.me, self.environment = notary, notary.me, around
        self.vote_key_of, self.commit_of = around.vote_key_of, around.commitment_of
        state = self.state = AttemptState(notary, plan, around)
        self.routing, self.reroute, self.recovery, self.broadcast = (
            state.route,
            state.reroute,
            state.recovery,
            state.broadcast,
        )
        self.accumulators, self.results, self.missing = state.gathers, state.answers, state.missing
        self.computed_results, self.undecodable_rows = state.made, state.unread
        calls = StrategyEngineActions(
            review=weak_call(self.review),
            decline=weak_call(self._decline),
            give_up=weak_call(self._give_up),
            await_rows=weak_call(self._await_rows),
            accept=weak_call(self._accept_result),
            hold=weak_call(self._hold),
            publish=weak_call(self._publish),
        )
        self.weighting, self.verification = weighting(state, calls), verification(state, calls)
        self.unmasking = unmasking(state, calls)
        self.uplink = RowUplink(state, self.verification.row_targets)
        self._parts_in_turn = self.routing.parts_in_send_order()

    @property
    def plan(self) -> ReducePlan:
        """The agreed plan, with the windows of this peer."""
        return self.state.plan

    # ---- events --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        for strategy in (self.weighting, self.verification, self.unmasking):
            if (effects := strategy.handle_event(event, now)) is not None:
                return effects
        job = self.state.job
        match event:
            case Start():
                return self._begin(now)
            case Received(sender, RowContribution() as message, Payload() as payload):
                return self._receive_row(sender, message, payload, now)
            case Received(sender, PartialSum() as message, Payload() as payload):
                return self._receive_sum(sender, message, payload, now)
            case Received(sender, PartReductionDeclined(part=part)):
                return self._decline(part, sender, now)
            case Received(sender, RowReroutedHint(part=part, peer=peer)):
                return self._receive_hint(part, peer, sender, now)
            case Received(sender, PartResult() as message, payload):
                return self._receive_result(sender, message, payload, now)
            case Received(sender, RowRequest(part=part, peer=author)):
                return self._open_row(sender, part, author)
            case Received(sender, RowResponse() as message, Payload() as payload):
                return self._receive_opened(sender, message, payload, now)
            case TimerFired(name) if name == self.state.timer():
                return self.review(now)
            case TaskDone(name, RowsCombined() as result) if name.startswith(job("own/")):
                return self._finish_part(int(name.rsplit("/", 1)[1]), result, now)
            case TaskDone(name, RowsCombined() as result) if name.startswith(job("on/")):
                return self._finish_sum(int(name.rsplit("/", 1)[1]), result, now)
            case TaskFailed(name, why) if name.startswith(job("")):
                return self._give_up(int(name.rsplit("/", 1)[1]), why, now)
            case _:
                return []  # another attempt, or another component

    def contribute(self, update: LocalRow, now: Seconds) -> list[Effect]:
        """The local update is encoded and committed. Before this call only rows of other peers are gathered."""
        self.state.set_update(update)
        return self.review(now)

    def review(self, now: Seconds) -> list[Effect]:
        """Review all parts: send, close or accept what is due. Call it when a peer commits or falls silent."""
        if not self.state.started:
            return []
        effects: list[Effect] = []
        while True:
            self.verification.before_review(now)
            effects += self.weighting.before_review(now) + self._review(now) + self.weighting.after_review(now)
            if not self.weighting.changed:
                return effects

    def resend(self, to: PeerId) -> list[Effect]:
        """Send what a peer that came back, or came late, may have missed."""
        self.broadcast.back.add(to)
        return [*self.verification.results_for(to), *self.uplink.resend(to), *self.weighting.resend(to)]

    # ---- what the round asks -------------------------------------------------------------------------------

    def accept_bytes(self, payload: Payload) -> list[Effect]:
        """Requested bytes of a result; bytes of no known result are ignored."""
        return self.verification.accept_bytes(payload)

    def check_result(self, signed: SignedStatement, said: OwnerResult, now: Seconds) -> list[Effect]:
        """Check a result that stands in a proposal, or that another member reports as a lie."""
        return self.verification.examine(signed, said, now)

    def believes(self, answered: OwnerResult) -> bool | None:
        """Whether the local peer may vote for this result. None: not yet known."""
        return self.verification.believes(answered)

    def request_again(self, now: Seconds) -> list[Effect]:
        """Request what may have been lost."""
        return self.weighting.request_again(now) + self.verification.request_again(now)

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        """Owners that failed this attempt in ways that cannot be proven."""
        return self.verification.lapses(now)

    def matching_statements(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        """Statements of other signers that match this result exactly."""
        return self.verification.seconded(answered)

    def is_recomputed(self, answered: OwnerResult) -> bool:
        """Whether the local peer recomputed this result from its rows."""
        return self.verification.made_again(answered)

    def results_for_body(self) -> tuple[dict[int, ReceivedResult], AgreedWeights | None]:
        """The results that may stand in one vertex body, and the weights that all of them name."""
        return self.weighting.results_for_body(self.results)

    # ---- reviews -------------------------------------------------------------------------------------------

    def _begin(self, now: Seconds) -> list[Effect]:
        self.state.begin(now)
        # a member that began earlier may have requested rows already
        wanted, row_of = [*self.state.row_server.waiting], self.state.row_of
        opened = [
            e
            for part, author in wanted
            for e in self.state.row_server.serve_waiting(part, author, row_of(part, author))
        ]
        return opened + self.review(now) + self.weighting.begin(now)

    def _review(self, now: Seconds) -> list[Effect]:
        self.state.note_pace(now)
        effects: list[Effect] = []
        for peer, part, author in self.state.row_server.pop_visible():
            effects += self._open_row(peer, part, author)
        filled = self.environment.parts_filled()
        if filled is not None:  # no update reaches the parts behind: they have no row and no result
            self.missing.update(range(filled, self.plan.parts))
        for part in self._parts_in_turn:
            effects += self._advance_part(part, now)
            effects += self.weighting.review_part(part) + self.verification.review_part(part, now)
            for heard in self.state.deferred.pop_due(part):
                effects += self._accept_result(heard, now)
        # the timer comes last: a message at the very deadline must not push it away before what is due is done
        return [*effects, *self._finish_if_over(), *self._set_timer(now)]

    def _advance_part(self, part: int, now: Seconds) -> list[Effect]:
        owned = self.routing.pass_turn(part, now)
        if owned and self.routing.owner[part] == self.me:
            self.state.stand_in(part)
        if part in self.results:
            return self.broadcast.show_due(self.results[part])
        lacking = self.state.owner_lacks_row(part)
        if part in self.missing:
            if lacking is not False or not owned:
                return []
            self.missing.discard(part)  # its owner has committed after all
        if not owned or lacking:
            self.missing.add(part)
            return [self.state.report(PartMissing(attempt=self.plan.attempt, part=part))]
        effects = [*self.recovery.request_bytes(part), *self.uplink.contribute_part(part)]
        effects += self.weighting.late_rows(part, now) + self.verification.late_rows(part, now)
        effects += self.uplink.hand_on(part, now) + self._close_if_due(part, now)
        return effects if self.recovery.is_fetching(part) else effects + self.broadcast.request_past_the_gone(part)

    def _finish_if_over(self) -> list[Effect]:
        if self.state.finished or len(self.results.keys() | self.missing) < self.plan.parts:
            return []
        self.state.finished = True
        over = self.state.report(PartsReduced(attempt=self.plan.attempt))
        return [SetTimer(self.state.timer(), None), over]

    def _set_timer(self, now: Seconds) -> list[Effect]:
        """Set the timer to the next time at which a review may act although no message arrives."""
        if self.state.finished or not self.state.started:
            return []
        plan = self.plan
        turns = range(len(plan.answer_until) + bool(plan.reserves))
        moments = [*map(plan.until, turns), *(plan.gather_until(i, 1) for i in turns), plan.gather_until(0, 2)]
        moments += [*self.reroute.moments(), *self.weighting.moments(), *self.verification.moments()]
        ahead = [moment for moment in moments if moment > now]
        return [SetTimer(self.state.timer(), min(ahead))] if ahead else []

    # ---- declining -----------------------------------------------------------------------------------------

    def _give_up(self, part: int, why: str, now: Seconds) -> list[Effect]:
        """The local peer cannot combine this part."""
        return self.state.announce_decline(part, why) + self._decline(part, self.me, now)

    def _decline(self, part: int, owner: PeerId, now: Seconds) -> list[Effect]:
        if not 0 <= part < self.plan.parts:
            raise PeerFault(owner, f"declined part {part}, which the plan does not have")
        if (part, owner) in self.routing.declined:
            return []
        self.routing.declined.add((part, owner))
        return self.review(now)

    # ---- rows ----------------------------------------------------------------------------------------------

    def _receive_row(
        self, sender: PeerId, message: RowContribution, payload: Payload, now: Seconds
    ) -> list[Effect]:
        commit = self.commit_of(sender)
        gather = self.state.gather_for(message.part, message.owner_index)
        if commit is None or gather is None:  # not committed, not for this peer, or closed
            return self.broadcast.answer_already(self.results, message.part, sender) + self.uplink.return_late_row(
                sender, message
            )
        if not self.state.takes_row(message.part, sender):
            raise PeerFault(sender, f"part {message.part} takes no row of this sender", message.statement.body)
        said = message.statement
        if said.signer != sender or self.notary.open(said, Commitment, self.vote_key_of(sender)) != commit:
            # the statement goes with the row when other peers request it
            raise PeerFault(sender, f"part {message.part} comes with another commitment than its first", said.body)
        row = committed_row(sender, commit, message, payload)
        if row is None:
            raise PeerFault(sender, f"part {message.part} is not what it committed to", said.body)
        return self._take(message.part, gather, sender, row, now)

    def _receive_sum(self, sender: PeerId, message: PartialSum, payload: Payload, now: Seconds) -> list[Effect]:
        gather = self.state.gather_for(message.part, message.owner_index)
        if gather is None:
            return self.broadcast.answer_already(self.results, message.part, sender) + self.uplink.return_late_row(
                sender, message
            )
        by = sender if message.by is UNSET else message.by
        if by != sender and (message.part, by) not in self.reroute.requested:
            return []
        check_handed(self.plan, sender, by, message, self.commit_of)
        held = GatheredRow(frozenset(message.contributors), message.weight, payload)
        return self._take(message.part, gather, by, held, now)

    def _take(
        self, part: int, gather: PartRowCollector, sender: PeerId, held: GatheredRow, now: Seconds
    ) -> list[Effect]:
        if sender in self.environment.refused:
            return []
        gather.add(sender, held)
        self.routing.senders.setdefault(part, set()).add(sender)
        if not self.state.started:
            return []
        plan = self.plan
        hint = RowReroutedHint(plan.round, plan.attempt, plan.trace, part, sender)
        effects: list[Effect] = [Send(peer, hint) for peer in self.routing.relays_between(part, sender)]
        effects += self.state.row_server.serve_waiting(part, sender, self.state.row_of(part, sender))
        if self.state.note_pace(now):
            return effects + self.review(now)
        effects += self.uplink.hand_on(part, now) + self._close_if_due(part, now)
        return effects + self.review(now) if self.weighting.changed else effects

    def _close_if_due(self, part: int, now: Seconds) -> list[Effect]:
        gather = self.accumulators.get(part)
        if gather is None or gather.closed or part in self.results:
            return []
        window = self.verification.window(part, gather)
        if window is None:
            return []
        if not gather.rows and (effects := self.verification.close_empty(part, now)):
            return effects
        return self.weighting.close_part(part, gather, window, now)

    def _await_rows(self, part: int, gather: PartRowCollector, window: int, now: Seconds) -> list[Effect] | None:
        """Wait for rows that may still come, and request those behind broken links. None: wait no longer."""
        if now >= self.plan.gather_until(window, 1):
            return None
        authors = self.state.awaited_authors(gather)
        if self.recovery.is_fetching(part) or self.environment.is_awaited(part, gather.names, authors):
            return self.reroute.request_sums(part, gather)
        asked = self.reroute.wait_for_rows(part, gather, now)
        return None if asked is None else [*asked, *self._set_timer(now)]

    def _finish_sum(self, part: int, result: RowsCombined, now: Seconds) -> list[Effect]:
        effects = self.state.note_undecodable(part, result, self.state.relays[part].rows)
        if result.payload is None:
            return effects + self._give_up(part, result.why, now)
        self.uplink.store_sum(part, result)
        return effects + self.review(now)

    # ---- rows that other peers request, and rows that go around broken links ------------------------------

    def _open_row(self, sender: PeerId, part: int, author: PeerId) -> list[Effect]:
        row = None
        if self.state.started:
            row = self.state.row_of(part, author) or self.verification.fetched_row(part, author)
        return self.state.row_server.answer_request(sender, part, author, row)

    def _receive_hint(self, part: int, peer: PeerId, sender: PeerId, now: Seconds) -> list[Effect]:
        if not 0 <= part < self.plan.parts or peer not in self.plan.recipient_set:
            raise PeerFault(sender, f"hears {peer} in part {part}, which the plan does not have")
        if not self.plan.topology.parts[part].parents:
            return []  # rows go straight to owners, and a liar could make an owner wait for the dead
        self.reroute.heard_elsewhere.add((part, peer))
        return self.review(now)

    def _receive_opened(self, sender: PeerId, message: RowResponse, payload: Payload, now: Seconds) -> list[Effect]:
        author, part = message.statement.signer, message.part
        commit = self.commit_of(author)
        if commit is None or not 0 <= part < self.plan.parts:
            return []
        if self.notary.open(message.statement, Commitment, self.vote_key_of(author)) != commit:
            return []  # the author committed twice, and the sender has the other commitment
        row = committed_row(author, commit, message, payload)
        if row is None:
            raise PeerFault(sender, f"opened a row of part {part} that {author} did not commit to")
        gather = self.accumulators.get(part)
        requested = (part, author) in self.reroute.requested or self.weighting.has_requested(part, author)
        if requested and gather is not None and not gather.closed:
            return self._take(part, gather, author, row, now)
        return self.verification.accept_row(part, author, row)

    # ---- results -------------------------------------------------------------------------------------------

    def _finish_part(self, part: int, combined: RowsCombined, now: Seconds) -> list[Effect]:
        effects = self.state.note_undecodable(part, combined, self.accumulators[part].rows)
        if combined.payload is None:  # another owner may combine it: it can request the rows from here
            return effects + self._give_up(part, combined.why, now)
        delayed = self.unmasking.unmask(part, combined, now)
        return effects + (self._publish(part, combined, now) if delayed is None else delayed)

    def _publish(self, part: int, combined: RowsCombined, now: Seconds) -> list[Effect]:
        gather, plan, payload = self.accumulators[part], self.plan, combined.payload
        assert payload is not None
        rows = dict(gather.rows)
        if not self.verification.keeps_rows:
            gather.rows.clear()
        names = sorted({name for sender in combined.counted for name in rows[sender].names})
        answered = OwnerResult(
            plan.round,
            plan.attempt,
            part,
            gather.owner_index,
            payload.digest,
            payload.size_bytes,
            tuple(names),
            self.weighting.weights_digest() or self.verification.commitments_digest(names),
            rows_digest(c for c in map(self.commit_of, names) if c is not None) if plan.is_audited else UNSET,
        )
        held = ReceivedResult(self.notary.sign(answered), answered, payload)
        if plan.is_audited or self.environment.keeps_rows:
            made_of = tuple(rows[name] for name in answered.contributors if name in rows)
            self.computed_results[part, answered.digest] = ComputedResult(answered, payload, made_of)
        # durable before it is sent: a restarted owner must never give a second, different result
        durable = Persist(self.state.result_key(part), encode(answered))
        return [durable, *self.verification.publish_result(held, now)]

    def _receive_result(
        self, sender: PeerId, message: PartResult, payload: Payload | None, now: Seconds
    ) -> list[Effect]:
        signed = message.statement
        answered = self.notary.open(signed, OwnerResult, self.vote_key_of(signed.signer))
        if (answered.round, answered.attempt) != (self.plan.round, self.plan.attempt):
            return []
        check_answer(self.plan, signed.signer, answered)
        if not self.weighting.admit_result(sender, message, answered):
            return []
        if payload is not None and (payload.digest, payload.size_bytes) != (answered.digest, answered.size_bytes):
            raise PeerFault(sender, f"bytes of part {answered.part} are not the ones its owner signed", signed.body)
        heard, effects = RemotePartResult(sender, signed, answered, payload), list[Effect]()
        if self.state.deferred.is_in_turn(answered):
            effects += self._accept_result(heard, now)
        else:
            self.state.deferred.keep(heard)
        return effects + self.weighting.after_result(now)

    def _accept_result(self, heard: RemotePartResult, now: Seconds) -> list[Effect]:
        if self.weighting.defers_result(heard, now):
            return []
        return self.verification.accept_result(heard, now)

    def _hold(self, held: ReceivedResult) -> list[Effect]:
        """Accept a result as the part's, and pass it on."""
        answered = held.result
        self.results[answered.part] = held
        self.recovery.stop_fetching(answered.part)
        self.missing.discard(answered.part)  # late, but here: the proposer may still count it
        fact = PartResultAccepted(
            attempt=answered.attempt,
            part=answered.part,
            owner_index=answered.owner_index,
            owner=held.statement.signer,
            digest=answered.digest,
            contributors=answered.contributors,
        )
        return [self.state.report(fact), *self.verification.pass_on(held), *self._finish_if_over()]
