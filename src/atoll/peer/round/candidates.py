"""Candidate vertex bodies of a round, proposed or final, and what each still lacks.

    judge      does every entry follow from what is signed in it?
    believes   does the local cross-check accept its results?
    knows      are its parts stored, and which state do they make? `ask` requests what is missing

Invariants:
- Missing parts are requested from the body's voters, and again with every retransmission tick.
Not responsible for: voting and adopting, which the round does once nothing is missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.base.draw import shuffled
from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Payload, Send
from atoll.peer.events import ProposalRejected
from atoll.peer.round.candidate import CandidateVertex, trial_of
from atoll.peer.round.context import RoundContext
from atoll.peer.round.part_exchange import MissingPart, ReducedPartExchange
from atoll.peer.round.state_transition import NextStateTasks
from atoll.peer.round.update_sharing import UpdateSharing
from atoll.peer.round.vertex_body import check_body
from atoll.protocol.agreement.events import ProposalReceived
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.wire.codec import decode_body, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PartRequest
from atoll.wire.messages.statements import OwnerResult

HOLDERS_ASKED = 2  # holders of a body asked at once; the next ones follow with the next tick


class CandidateVertexTracker:
    def __init__(
        self,
        ground: RoundContext,
        notary: StatementSigner,
        agreement: ConsensusEngine,
        parts: ReducedPartExchange,
        next_state: NextStateTasks,
        sharing: UpdateSharing,
    ) -> None:
        self.ground, self.plan, self.notary, self.me = ground, ground.plan, notary, notary.me
        self.agreement, self.parts, self.next_state = agreement, parts, next_state
        self.sharing, self.gone = sharing, sharing.env.gone
        self.attempt = 0
        self.under_way: dict[Digest, CandidateVertex] = {}
        self.asked = 0  # requests so far for bodies that certificates name and that are missing

    def attempt_begins(self, attempt: int) -> None:
        self.attempt = attempt

    def close(self) -> None:
        self.under_way.clear()

    # ---- bodies ------------------------------------------------------------------------------------------

    def judge(self, proposal: ProposalReceived, now: Seconds) -> CandidateVertex | ProposalRejected:
        """The candidate of a valid body, or the reason why it is invalid."""
        raw, most = proposal.body, self.plan.settings.signing.body_bytes_max
        who = self.agreement.proposer(proposal.view)
        if len(raw) > most:
            return ProposalRejected(proposer=who, why=f"its body has {len(raw)} bytes")
        try:
            body = decode_body(raw)
        except PeerFault as fault:
            return ProposalRejected(proposer=who, why=fault.what)
        if body.proposer != who:  # the next proposer follows from this field
            return ProposalRejected(proposer=who, why=f"it says that {body.proposer} wrote it")
        if (wrong := check_body(self.ground, self.notary, body, now)) is not None:
            return ProposalRejected(proposer=body.proposer, why=wrong)
        return self._of(raw)

    def finish(self, raw: bytes) -> CandidateVertex:
        """Mark this body as final."""
        trial = self._of(raw)
        trial.final = True
        return trial

    def _of(self, raw: bytes) -> CandidateVertex:
        id = vertex_id(raw)
        if id not in self.under_way:
            self.under_way[id] = trial_of(id, raw, self.plan)
        return self.under_way[id]

    @property
    def final(self) -> CandidateVertex | None:
        return next((trial for trial in self.under_way.values() if trial.final), None)

    @property
    def waiting(self) -> list[CandidateVertex]:
        """Candidates without a known state."""
        return [trial for trial in self.under_way.values() if trial.state is None]

    @property
    def needed(self) -> set[Digest]:
        """Digests of all parts of all candidates."""
        return {a.digest for trial in self.under_way.values() for a in trial.answers if a is not None}

    def forget_old(self) -> None:
        """Drop candidates that no live proposal needs: a long pause combines the same updates again and again."""
        live = self.agreement.bodies.keys()
        self.under_way = {id: trial for id, trial in self.under_way.items() if id in live or trial.final}
        self.parts.keep_only(self.needed)
        self.next_state.keep_only(self.needed)

    # ---- what one lacks ----------------------------------------------------------------------------------

    def believes(self, trial: CandidateVertex) -> bool:
        """True if every result in it is accepted. All are in a final body; the all-reduce decides on the others."""
        reduce = self.sharing.reduce
        if trial.final or not self.plan.may_lie or reduce is None:
            return True
        return all(reduce.believes(answered) is True for answered in trial.answers if answered is not None)

    def knows(self, trial: CandidateVertex) -> bool:
        """Compute the state that the body leaves behind; True once it is known."""
        if trial.state is None:
            trial.state = self.next_state.of(trial.step, trial.back)
        return trial.state is not None

    def lacks_earlier(self, trial: CandidateVertex) -> bool:
        """True if it rolls back to a state that is not stored here and must be fetched."""
        return trial.back is not None and self.next_state.lacks(trial.step, trial.back)

    def ask(self, trial: CandidateVertex, now: Seconds) -> list[Effect]:
        """Request missing parts; if none are missing, request the state that they make."""
        if trial.back is not None:
            return [] if self.lacks_earlier(trial) else self.next_state.ask(trial.step, trial.back)
        said = zip(trial.body.parts, trial.answers, strict=True)
        answers = ((signed.signer, a) for signed, a in said if signed is not None and a is not None)
        missing = [(owner, a) for owner, a in answers if a.digest not in self.parts.held]
        return self._want(trial, missing, now) if missing else self.next_state.ask(trial.step, None)

    def _want(
        self, trial: CandidateVertex, missing: Sequence[tuple[PeerId, OwnerResult]], now: Seconds
    ) -> list[Effect]:
        """Request parts from the proposer and other voters, later those with a present owner that may still
        send them.
        """
        reduce = self.sharing.reduce
        here = reduce.results.keys() if reduce is not None else range(len(self.ground.owners))
        only_shown = reduce is not None and self.me in reduce.plan.unsettled and reduce.state.update is None

        def missing_part(owner: PeerId, a: OwnerResult) -> MissingPart:
            # the owner's result that was accepted here blocks this one
            is_coming = trial.body.attempt == self.attempt and a.part not in here and not self.gone(owner)
            is_requested = is_coming and reduce is not None and reduce.recovery.is_fetching(a.part)
            return MissingPart(a.digest, a.size_bytes, is_coming, is_requested, only_shown)

        sources = dict.fromkeys([trial.body.proposer, *self.plan.committee])
        holders = [p for p in sources if p != self.me and not self.gone(p)]
        return self.parts.want(trial.body.attempt, [missing_part(*one) for one in missing], holders, now)

    def ask_for_bodies(self) -> list[Effect]:
        """Request bodies that certificates name from the voters bound to them."""
        self.asked += 1
        effects: list[Effect] = []
        for lacking in sorted(self.agreement.missing_bodies):
            holders = [p for p in self.agreement.holders(lacking) if not self.gone(p)]
            wish = PartRequest(self.plan.round, self.attempt, self.plan.trace, lacking)
            asked = shuffled(lacking, f"{self.me}/{self.asked}", holders)[:HOLDERS_ASKED]
            effects += [Send(p, wish) for p in asked]
        return effects

    # ---- bytes that go and come --------------------------------------------------------------------------

    def give(self, to: PeerId, wish: PartRequest, now: Seconds) -> list[Effect]:
        """Send a requested part or body."""
        body = self.agreement.bodies.get(wish.digest)
        payload = self.parts.held.get(wish.digest) if body is None else Payload(wish.digest, len(body), body)
        return self.parts.give(to, wish, payload, now)
