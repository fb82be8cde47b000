"""Cross-checked owners: the first w + 1 owners of a part all combine it, and no owner is believed alone.

The local row goes to all w + 1 owners of a part. Each closes the part in the first owner's window, requests rows
that it lacks from the other owners, and signs its result. The owner in charge sends its bytes when the others have
signed, so that no owner can copy them. `CrossCheck` records all signed results of a part, and settles on one.

Invariants:
- Rows are kept until the attempt ends, and sent to each peer that doubts a result.
- Results are not passed on, except a reserve's to peers that do not hear it: each peer checks the owners itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from atoll.base.draw import shuffled
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Emit, Event, Payload, Persist, Received, Send, TaskDone, TaskFailed
from atoll.protocol.allreduce.attempt import AttemptState
from atoll.protocol.allreduce.buffers import GatheredRow, PartRowCollector, ReceivedResult, RemotePartResult
from atoll.protocol.allreduce.cross_check import CrossCheck, FalseOwnerResultProven
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.strategies import (
    ResultVerification,
    StrategyEngineActions,
    trusted_row_targets,
    window_in_turn,
)
from atoll.protocol.allreduce.tasks import RowsCombined
from atoll.wire.codec import encode
from atoll.wire.messages.round import PartRequest, PartStatementsRequest, ResendRequest
from atoll.wire.messages.statements import Lapse, OwnerResult, SignedStatement
from atoll.wire.opening import rows_digest

STATEMENT_REQUESTS_MAX = 3  # per signer and part, in a large committee: a statement may be lost each time


class CrossCheckedOwners(ResultVerification):
    """Verification for a plan with witnesses; one peer's side of one attempt."""

    keeps_rows = True  # a peer that doubts a result may request its rows

    def __init__(self, state: AttemptState, calls: StrategyEngineActions) -> None:
        self.state, self.calls, self.me, self.route = state, calls, state.me, state.route
        around = state.environment
        self.cross_check = CrossCheck(
            state.agreed_plan,
            self.me,
            state.row_of,
            state.commit_of,
            state.gone,
            around.has_vote,
            around.equivocators,
        )
        self.own_results: dict[int, ReceivedResult] = {}  # results that the local peer signed, by part
        self._absent_noted = False  # first owners that take no part in this attempt are known
        self._revealed: set[int] = set()  # parts with bytes sent to all peers that lack them
        self._statement_requests: Counter[tuple[int, PeerId]] = Counter()  # (part, signer)
        self._statement_replies: Counter[tuple[int, PeerId]] = Counter()  # (part, requester)
        self._repeat_requested: set[PeerId] = set()  # owners asked once to send everything again, without juries
        self._byte_requests: Counter[int] = Counter()  # requests for the bytes of a believed result, by part

    @property
    def plan(self) -> ReducePlan:
        """The agreed plan, with the windows of this peer."""
        return self.state.plan

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None:
        match event:
            case Received(sender, PartStatementsRequest(part=part)):
                return self._repeat_statement(sender, part)
            case TaskDone(job, RowsCombined() as result) if job.startswith(self.state.job("judge/")):
                return self._finish_check(job, result, now)
            case TaskFailed(job) if job.startswith(self.state.job("judge/")):
                return []  # no other peer waits for this check
            case _:
                return None

    # ---- reviews -------------------------------------------------------------------------------------------

    def before_review(self, now: Seconds) -> None:
        """Mark first owners without a commitment as absent, a third of a window after the sharing begins.

        A late member has reported by now, also if it has no update. A silent first owner is in the round before, or
        holds the attempt up: its turn is over. Later owners are not checked: not all peers hear them.
        """
        if self._absent_noted or now < self._absent_at:
            return
        self._absent_noted = True
        first = {owner for part in range(self.plan.parts) for owner in self.plan.parallel_owners(part)} - {self.me}
        self.route.absent = frozenset(owner for owner in first if self.state.commit_of(owner) is None)

    @property
    def _absent_at(self) -> Seconds:
        """A peer that begins late, as after a restart, has received nothing yet."""
        return max(self.plan.gather_until(0, 2), self.state.begun_at + self.plan.window_s / 3)

    def review_part(self, part: int, now: Seconds) -> list[Effect]:
        return self._check_part(part, now)

    def moments(self) -> Iterable[Seconds]:
        reveals = map(self._reveal_until, range(len(self.plan.answer_until) + bool(self.plan.reserves)))
        return [self._absent_at, *reveals]

    def request_again(self, now: Seconds) -> list[Effect]:
        """Request rows and owners' statements, which may have been lost."""
        if not self.state.started:
            return []
        effects = [e for part in range(self.plan.parts) for e in self._check_part(part, now, again=True)]
        if now < self.plan.gather_until(0, 1):
            return effects
        if self.plan.juries:
            return [*effects, *self._request_statements(), *self._request_bytes()]
        silent = {owner for part in range(self.plan.parts) for owner in self._silent_owners(part, -1)} - {self.me}
        for owner in sorted(silent - self._repeat_requested):
            self._repeat_requested.add(owner)
            effects.append(Send(owner, ResendRequest(self.plan.round, self.plan.attempt, self.plan.trace)))
        return effects

    # ---- rows ----------------------------------------------------------------------------------------------

    def row_targets(self, part: int) -> Sequence[PeerId]:
        stands_in = self.route.is_reserves_turn(part)
        others = trusted_row_targets(self.state, part) if stands_in else [self.route.target(part)]
        return (*self.plan.parallel_owners(part), *others)

    def late_rows(self, part: int, now: Seconds) -> list[Effect]:
        """Request rows that have not come after a third of the window: the other owners may have them."""
        gather = self.state.gathers.get(part)
        if gather is None or gather.closed or self.me not in self.plan.parallel_owners(part):
            return []
        if now < self.plan.gather_until(0, 2):
            return []
        giving = [(peer, self.state.commit_of(peer)) for peer in self.plan.recipients if peer not in gather.names]
        return self.state.reroute.request_rows(
            part, [peer for peer, commit in giving if commit is not None and commit.parts > part]
        )

    def window(self, part: int, gather: PartRowCollector) -> int | None:
        return 0 if gather.owner_index <= self.plan.witnesses else window_in_turn(self.state, part, gather)

    def close_empty(self, part: int, now: Seconds) -> list[Effect]:
        if self.me not in self.plan.parallel_owners(part) or (part, self.me) in self.route.declined:
            return []
        if now < self.plan.gather_until(0, 1):
            return []
        return self.calls.give_up(part, "no row arrived in time", now)

    def fetched_row(self, part: int, author: PeerId) -> GatheredRow | None:
        return self.cross_check.disputes[part].rows.get(author) if 0 <= part < self.plan.parts else None

    def accept_row(self, part: int, author: PeerId, row: GatheredRow) -> list[Effect]:
        if not self.cross_check.wants_row(part, author):
            return []
        return self.state.row_server.serve_waiting(part, author, row) + self.cross_check.add_row(part, author, row)

    # ---- results -------------------------------------------------------------------------------------------

    def commitments_digest(self, names: Iterable[PeerId]) -> Digest:
        return rows_digest(commit for commit in map(self.state.commit_of, sorted(names)) if commit is not None)

    def publish_result(self, held: ReceivedResult, now: Seconds) -> list[Effect]:
        """Send the signed statement alone, unless the local peer is in charge: then the bytes follow later."""
        part, effects = held.result.part, list[Effect]()
        self.own_results[part] = held
        if self.route.owner[part] != self.me:
            effects += [self._statement_to(peer, held) for peer in self.route.others()]
        heard = self.cross_check.record(held.statement, held.result, held.payload)
        return effects + heard + self._admit_lack(part, now) + self._check_part(part, now)

    def accept_result(self, heard: RemotePartResult, now: Seconds) -> list[Effect]:
        part = heard.answered.part
        effects = self.cross_check.record(heard.statement, heard.answered, heard.payload)
        return self._decline_liars(part, effects + self._admit_lack(part, now), now)

    def accept_bytes(self, payload: Payload) -> list[Effect]:
        effects: list[Effect] = []
        for part, dispute in enumerate(self.cross_check.disputes):
            if part not in self.state.answers and any(r.result.digest == payload.digest for r in dispute.results):
                dispute.add_bytes(payload)
                held = self.cross_check.settled(part, patient=False)
                effects += self.calls.hold(held) if held is not None else []
        return effects

    def pass_on(self, held: ReceivedResult) -> list[Send]:
        """Only a reserve's result, to peers with rows that came here because they do not hear the reserve."""
        part, by = held.result.part, held.statement.signer
        if not self.plan.stands_in(part, held.result.owner_index) or self.me == by:
            return []
        return [
            self.state.broadcast.send(peer, held) for peer in sorted(self.route.senders.get(part, ())) if peer != by
        ]

    def results_for(self, to: PeerId) -> list[Send]:
        others = {part: held for part, held in self.state.answers.items() if part not in self.own_results}
        own = [self._statement_to(to, held) for held in self.own_results.values()]
        return own + self.state.broadcast.serve(others, to)

    # ---- what the round asks -------------------------------------------------------------------------------

    def examine(self, signed: SignedStatement, said: OwnerResult, now: Seconds) -> list[Effect]:
        if said.attempt != self.plan.attempt:
            return []
        if not self.state.deferred.is_in_turn(said):
            self.state.deferred.keep(RemotePartResult(signed.signer, signed, said))
            return []
        return self._decline_liars(said.part, self.cross_check.record(signed, said, None), now)

    def believes(self, answered: OwnerResult) -> bool | None:
        in_turn = answered.attempt == self.plan.attempt and self.state.deferred.is_in_turn(answered)
        return self.cross_check.believes(answered) if in_turn else None

    def seconded(self, answered: OwnerResult) -> tuple[SignedStatement, ...]:
        return self.cross_check.seconded(answered)

    def made_again(self, answered: OwnerResult) -> bool:
        return self.cross_check.is_recomputed(answered)

    def lapses(self, now: Seconds) -> dict[PeerId, Lapse]:
        found: dict[PeerId, Lapse] = {}
        if self.state.started:
            late = now >= self.plan.answer_until[0]
            for part in range(self.plan.parts):
                held = self.state.answers.get(part)
                seen = self.cross_check.lapses(part, held.result if held is not None else None, late)
                found |= {peer: why for peer, why in seen.items() if not self.route.is_excused(part, peer)}
        return found

    # ---- owners that check each other ----------------------------------------------------------------------

    def _check_part(self, part: int, now: Seconds, again: bool = False) -> list[Effect]:
        """Send the own result if it is due, doubt what other owners signed, and settle on what is true."""
        if not self.state.started:
            return []
        effects, late = self._reveal_if_due(part, now), now >= self.plan.answer_until[0]
        if self.cross_check.is_in_doubt(part):
            waiting = not late and bool(self._silent_owners(part, -1))
            effects += self.cross_check.pursue_doubt(part, waiting, again)
        effects += self._speak_for_jury(part, patient=not late)
        held = self.cross_check.settled(part, patient=not late) if part not in self.state.answers else None
        return effects + self.calls.hold(held) if held is not None else effects

    def _admit_lack(self, part: int, now: Seconds) -> list[Effect]:
        """Decline the part if another owner had all rows of the own result and more.

        Those rows did not come here in time; without a report the local peer would seem to leave them out. What it
        signed stays true, if the other result proves false.
        """
        held = self.own_results.get(part)
        if held is None or self.me not in self.plan.parallel_owners(part) or (part, self.me) in self.route.declined:
            return []
        own = frozenset(held.result.contributors)
        larger = (result.names - own for result in self.cross_check.disputes[part].results if own < result.names)
        if not any(all(self.state.row_of(part, name) is None for name in lacked) for lacked in larger):
            return []
        return self.calls.give_up(part, "rows that other owners have did not arrive in time", now)

    def _silent_owners(self, part: int, after: int) -> list[PeerId]:
        """Parallel owners after this index that may still sign a result."""
        signers, later = self.cross_check.signers(part), self.plan.parallel_owners(part)[after + 1 :]
        left = [owner for owner in later if owner not in signers and not self.route.is_excused(part, owner)]
        return [owner for owner in left if owner == self.me or not self.state.gone(owner)]

    def _reveal_if_due(self, part: int, now: Seconds) -> list[Effect]:
        """Send the bytes once the witnesses have signed: no witness can copy them as its own result.

        A peer that signed the same bytes gets the statement alone.
        """
        held = self.own_results.get(part)
        if held is None or part in self._revealed or self.route.owner[part] != self.me:
            return []
        index = held.result.owner_index
        if index > 0 and part in self.state.answers:
            return []  # the owners before were slow, not silent
        if now < self._reveal_until(index) and self._silent_owners(part, index):
            return []
        self._revealed.add(part)
        results, down = self.cross_check.disputes[part].results, self.state.broadcast
        have = {r.statement.signer for r in results if r.result.digest == held.result.digest} - down.back
        return [down.show(p, held) if p in have else down.send(p, held) for p in self.route.others()]

    def _reveal_until(self, owner_index: int) -> Seconds:
        """Halfway between the end of gathering and the end of the window."""
        return (self.plan.gather_until(owner_index, 1) + self.plan.until(owner_index)) / 2

    def _statement_to(self, to: PeerId, held: ReceivedResult) -> Send:
        """The statement of an own result, with the bytes once they are revealed."""
        down = self.state.broadcast
        return down.send(to, held) if held.result.part in self._revealed else down.show(to, held)

    def _finish_check(self, job: str, result: RowsCombined, now: Seconds) -> list[Effect]:
        check, part = (int(word) for word in job.rsplit("/", 2)[1:])
        return self._decline_liars(part, self.cross_check.record_check(part, check, result), now)

    def _decline_liars(self, part: int, effects: list[Effect], now: Seconds) -> list[Effect]:
        """If a reserve lied, the next reserve has its turn; among owners another one has the true result."""
        liars = [e.fact.peer for e in effects if isinstance(e, Emit) and isinstance(e.fact, FalseOwnerResultProven)]
        for liar in liars if self.route.is_reserves_turn(part) else ():
            effects += self.calls.decline(part, liar, now)
        return effects + self._check_part(part, now)

    # ---- juries of large committees ------------------------------------------------------------------------

    def _speak_for_jury(self, part: int, patient: bool) -> list[Effect]:
        """As a juror, sign a doubted result that was recomputed: all peers count the jurors that agree."""
        plan, key = self.plan, self.state.result_key(part)
        if not plan.juries or self.me not in plan.juries[part] or part in self.own_results:
            return []
        if (
            key in self.state.environment.durable_keys
            or (answered := self.cross_check.largest_recomputed(part, patient)) is None
        ):
            return []
        place = len(plan.owners_and_reserves(part)) + plan.juries[part].index(self.me)
        own = replace(answered, owner_index=place)
        held = ReceivedResult(self.state.notary.sign(own), own, self.cross_check.bytes_of(own))
        self.own_results[part] = held
        sends = [self.state.broadcast.show(peer, held) for peer in self.route.others()]
        return [Persist(key, encode(own)), *sends, *self.cross_check.record(held.statement, own, None)]

    def _request_statements(self) -> list[Effect]:
        """Request statements of owners, and of jurors if few are lacking: statements may have been lost."""
        plan, effects = self.plan, list[Effect]()
        for part in range(plan.parts):
            if part in self.state.answers:
                continue
            signers = self.cross_check.signers(part)
            nearly = self.cross_check.is_nearly_decided(part)
            asked = plan.owners(part) + plan.juries[part] if nearly else plan.parallel_owners(part)
            for peer in dict.fromkeys((*asked, self.route.owner[part])):
                lost = peer not in signers and peer != self.me and not self.state.gone(peer)
                if lost and self._statement_requests[part, peer] < STATEMENT_REQUESTS_MAX:
                    self._statement_requests[part, peer] += 1
                    effects.append(Send(peer, PartStatementsRequest(plan.round, plan.attempt, plan.trace, part)))
        return effects

    def _request_bytes(self) -> list[Effect]:
        """Request the bytes of results that are believed and not here, from one signer after the other."""
        plan, effects = self.plan, list[Effect]()
        for part in range(plan.parts):
            unseen = self.cross_check.believed_unseen(part) if part not in self.state.answers else None
            if unseen is None:
                continue
            results = self.cross_check.disputes[part].results
            alike = {r.statement.signer for r in results if r.result.digest == unseen.digest}
            holders = [p for p in sorted(alike) if p != self.me and not self.state.gone(p)]
            if holders:
                self._byte_requests[part] += 1
                holder = shuffled(unseen.digest, f"{self.me}/{self._byte_requests[part]}", holders)[0]
                effects.append(Send(holder, PartRequest(plan.round, plan.attempt, plan.trace, unseen.digest)))
        return effects

    def _repeat_statement(self, to: PeerId, part: int) -> list[Effect]:
        own = self.own_results.get(part)
        if own is None or to not in self.plan.recipient_set:
            return []
        if self._statement_replies[part, to] >= STATEMENT_REQUESTS_MAX:
            return []
        self._statement_replies[part, to] += 1
        return [self._statement_to(to, own)]
