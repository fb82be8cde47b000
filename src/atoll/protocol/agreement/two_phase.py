"""Two-phase Byzantine agreement on one vertex body, with rotating proposers (single-decision PBFT).

Driving contract: the round calls `start()` first, then `receive` for each message, in any order.
It answers `ProposalReceived` with `approve`, `LocalProposerTurnBegan` with `propose`, and
`VertexBodyMissing` with `add_body`.
It calls `close_view` when a view's time is up or its proposer is gone, and `retransmit` to retransmit.
The driver must make each `Persist` durable before it sends what follows, and pass the last one back as `kept`.

In each view the proposer sends a body, and voters that approve it send prepare votes. A quorum of these is a
certificate. Voters that hold the certificate and its body send commit votes; a quorum of commit votes decides.

Voters close a view by signing Timeout(view, highest prepare certificate). A quorum of timeouts permits the next
proposal, which must be the body of the highest certificate among them (Castro & Liskov 1999, section 4.4, for one
decision). Only that certificate binds (Jolteon, arXiv 2106.10362). The proposal carries the timeouts, so its
proposer need not wait. HotStuff-2 (ePrint 2023/397) shows one certificate, so its proposer must have received the
highest. Each attempt has as many views as voters: when the clock ends an attempt, all voters meet in one view.

A certificate binds a voter only after its body has arrived, so every honest claimant can serve the body. A timeout
that claims a certificate without an obtainable body comes from a liar and is not needed.

Votes go from each voter to all others, but not every link must work. A repeated commit vote carries its
certificate, so one proposer that a quorum receives is enough for a decision.

Invariants:
- No two bodies are decided for one round while fewer voters lie than two quorums share. For a majority quorum, a
  crash with loss of the durable state counts as a lie.
- Every vote and timeout is durable before it is sent.
- The first statement per slot counts; a different second one is reported as evidence.
Not responsible for: time (the round closes views), judging the content of a body.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Persist, Send
from atoll.base.round_robin import round_robin
from atoll.protocol.agreement.events import LocalProposerTurnBegan, PrepareQuorumReached, VertexBodyMissing
from atoll.protocol.agreement.view_change import CertificateCache, ViewChangeProof
from atoll.protocol.agreement.voter import Electorate, RoundVoter, ViewState
from atoll.protocol.agreement.voter_state import VoterState
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, Stage, ViewTimeout, Vote

STAGES: tuple[Stage, ...] = ("prepare", "commit")
PLAIN_REPEATS = 1  # repeats of a commit vote without its certificate: enough if one message was lost


@dataclass
class VoteTally(ViewState):
    """Statements received in one view."""

    proof: ViewChangeProof | None = None  # proof that permits and binds the view's proposer
    votes: dict[tuple[Stage, PeerId], tuple[Digest, SignedStatement]] = field(
        default_factory=dict[tuple[Stage, PeerId], tuple[Digest, SignedStatement]]
    )
    count: Counter[tuple[Stage, Digest]] = field(default_factory=Counter[tuple[Stage, Digest]])  # votes per body
    timeouts: dict[PeerId, tuple[ViewTimeout, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[ViewTimeout, SignedStatement]]
    )
    repeated: int = 0  # repeats of the local commit vote


class TwoPhaseAgreement(RoundVoter[VoteTally]):
    """One voter's or listener's side of the agreement that closes one round."""

    tally_type = VoteTally

    def __init__(self, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None) -> None:
        super().__init__(notary, electorate)
        self.state = VoterState.decode(kept)
        self.view = self.state.view
        self.reminders = 0  # calls of `remind` for all voters
        self.bodies |= self.state.bodies
        self.certificates = CertificateCache(notary, self.round, self.vote_keys, self.quorum)
        for known in (self.state.claimed, self.state.high):
            if known is not None:
                self.certificates.add(known)

    # ---- what the round calls ------------------------------------------------------------------------------

    def start(self) -> list[Effect]:
        return self._try_to_propose()

    def has_proposed(self, view: int) -> bool:
        """Whether the local voter proposed in this view, also before a restart."""
        return view in self.state.proposed

    @property
    def has_voted(self) -> bool:
        return bool(self.state.prepare)

    def holders(self, digest: Digest) -> list[PeerId]:
        """Voters that hold this body: those bound to it. If none is known, voters that once voted for it."""
        if self.decided is not None:
            return [p for p, _ in self.decided.certificate.votes if p != self.me]
        found: dict[PeerId, None] = {}
        for tally in self.tallies.values():
            found |= dict.fromkeys(p for (s, p), (of, _) in tally.votes.items() if s == "commit" and of == digest)
            found |= dict.fromkeys(p for p, (timeout, _) in tally.timeouts.items() if timeout.high_digest == digest)
        if not found:
            known = (c for (_, named), c in self.certificates.known.items() if named == digest)
            found = dict.fromkeys(p for c in known for p, _ in c.votes)
        return [p for p in found if p != self.me]

    @property
    def is_open(self) -> bool:
        """Whether this view has a proposal, a certificate or a timeout."""
        tally = self._tally(self.view)
        return not self.is_over and (tally.proposal is not None or bool(tally.timeouts) or self._is_certified)

    @property
    def _is_certified(self) -> bool:
        """Whether a certificate of this view is known, with or without its body."""
        return any(view == self.view for view, _ in self.certificates.known)

    @property
    def voters_timed_out(self) -> set[PeerId]:
        """Voters that have closed this view or a later one and no longer vote in it."""
        return {p for view, tally in self.tallies.items() if view >= self.view for p in tally.timeouts}

    @property
    def silent_proposer(self) -> PeerId | None:
        """The silent proposer of this view; None once its proposal or a certificate has arrived."""
        tally = self._tally(self.view)
        return (
            None if self.is_over or tally.proposal is not None or self._is_certified else self.proposer(self.view)
        )

    def propose(self, view: int, body: bytes) -> list[Effect]:
        """Propose a body as the proposer of this view. Does nothing after an earlier proposal."""
        if not self._is_my_turn(view):
            return []
        digest, proof = vertex_id(body), self._view_change_proof(view)
        if self.state.proposed.get(view, digest) != digest:
            return []  # another body was proposed before a restart: send nothing in this slot
        if proof is None or (proof.high is not None and proof.high.digest != digest):
            return []
        self.state.proposed[view] = digest
        self.bodies.setdefault(digest, body)
        sends = self._send_proposal(view, digest, body, proof.timeouts, proof.high)
        return [self._persist(), *sends, *self._vote("prepare", view, digest)]

    def approve(self, digest: Digest) -> list[Effect]:
        """Accept this body: the round has recomputed all of its content."""
        self.approved.add(digest)
        effects: list[Effect] = []
        for view, tally in sorted(self.tallies.items()):
            if tally.digest == digest:
                effects += self._vote("prepare", view, digest)
        return effects

    def close_view(self, view: int) -> list[Effect]:
        """Close this view and all earlier ones: send one timeout and enter the next view."""
        if self.is_over or view < self.view:
            return []
        self.view = view + 1
        self._drop_finished()
        if not self.votes or view <= self.state.timed_out:
            return self._try_to_propose()
        self.state.close_view(view)
        return [self._persist(), *self._send_timeout(view), *self._try_to_propose(), *self._vote_or_judge(view + 1)]

    def retransmit(self, to: PeerId | None = None) -> list[Effect]:
        """Repeat the local statements of the current view: to one peer, or to all unresponsive voters in turns."""
        if not self.votes or self.is_over:
            return []
        effects: list[Effect] = []
        self.reminders += to is None

        def lacking(heard: Container[PeerId]) -> Sequence[PeerId]:
            if to is not None:
                return [to] if to in self.vote_keys and to != self.me else []
            silent = [p for p in self.vote_keys if p != self.me and p not in heard]
            return round_robin(silent, len(self.vote_keys), self.reminders)

        if self.state.timed_out >= 0 and self.view == self.state.timed_out + 1:
            heard = self._tally(self.state.timed_out).timeouts
            effects += self._send_timeout(self.state.timed_out, lacking(heard))
        tally = self._tally(self.view)
        tally.repeated += to is None and ("commit", self.me) in tally.votes
        voted = {stage: {p for where, p in tally.votes if where == stage} for stage in STAGES}
        if tally.proposal is not None and self.proposer(self.view) == self.me:
            effects += [Send(p, tally.proposal) for p in lacking(voted["prepare"])]
        for stage in STAGES:
            mine = tally.votes.get((stage, self.me))
            if mine is not None:
                said = self._vote_message(self.view, mine[1])
                # a voter without a commit vote may lack links to the prepare voters: send it the certificate
                late = stage == "commit" and tally.repeated > PLAIN_REPEATS
                proof = self.certificates.known.get((self.view, mine[0])) if late else None
                said = replace(said, proof=proof) if proof is not None else said
                effects += [Send(p, said) for p in lacking(voted[stage])]
        return effects

    # ---- messages ------------------------------------------------------------------------------------------

    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | ViewChangePreVote
    ) -> list[Effect]:
        """Process one message. Raises PeerFault, before any change, if the sender broke the protocol.

        The sender answers for unsigned content: bodies, lists of timeouts, certificates.
        """
        if self.is_over:
            return []
        match message:
            case ProposalMessage():
                return self._receive_proposal(sender, message)
            case VoteMessage():
                return self._receive_vote(sender, message)
            case TimeoutMessage():
                return self._receive_timeout(sender, message)
            case ViewChangePreVote():
                return []  # a Raft message without effect here

    def _receive_proposal(self, sender: PeerId, message: ProposalMessage) -> list[Effect]:
        proposed = self._open_proposal(sender, message)
        if proposed is None:
            return []
        view, tally = proposed.view, self._tally(proposed.view)
        if tally.proposed is not None:
            return self._report_equivocation(tally.proposed, message.statement)
        high = self.certificates.check_proposal(sender, message, view)
        tally.set_proposal(message, proposed.digest)
        self.bodies.setdefault(proposed.digest, message.body)
        if high is not None:
            # a quorum has judged this body already; its parts may have been lost with the members that held them
            self.approved.add(proposed.digest)
            self.certificates.add(high)
        effects = self._resume_with_body(proposed.digest)
        if view > self.view:
            self.view = view  # a quorum has entered this view
            effects += self._try_to_propose()
        return effects + self._vote_or_judge(view)

    def _receive_vote(self, sender: PeerId, message: VoteMessage) -> list[Effect]:
        signed, proof = message.statement, message.proof
        vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))
        if vote.round != self.round or not self._in_reach(vote.view):
            return []
        if proof is UNSET or vote.view < self.view:  # proofs of closed views are not stored, hence not checked
            return self._count_vote(vote, signed)
        certificate = self.certificates.for_vote(sender, vote, proof)
        return self._count_vote(vote, signed) + self._receive_certificate(certificate)

    def _receive_certificate(self, certificate: QuorumCertificate) -> list[Effect]:
        """Adopt a received prepare certificate like one formed from local votes."""
        if self.is_over:
            return []
        effects: list[Effect] = []
        if (certificate.view, certificate.digest) not in self.certificates.known:
            effects = [self._emit(PrepareQuorumReached(view=certificate.view, digest=certificate.digest))]
        effects += self._adopt_received(certificate)
        if certificate.view > self.view:
            self.view = certificate.view  # a quorum has entered this view
            effects += self._try_to_propose()
        return [*effects, *self._vote("commit", certificate.view, certificate.digest)]

    def _receive_timeout(self, sender: PeerId, message: TimeoutMessage) -> list[Effect]:
        signed = message.statement
        timeout = self.notary.open(signed, ViewTimeout, self.vote_keys.get(signed.signer))
        if timeout.round != self.round or not self._in_reach(timeout.view):
            return []
        effects: list[Effect] = []
        if timeout.high_view >= 0:
            effects += self._adopt_received(self.certificates.for_timeout(sender, timeout, message.high))
        tally = self._tally(timeout.view)
        first = tally.timeouts.get(signed.signer)
        if first is not None:
            return effects + self._report_equivocation(first[1], signed)
        tally.timeouts[signed.signer] = (timeout, signed)
        if timeout.view >= self.view and len(tally.timeouts) > len(self.vote_keys) - self.quorum:
            return effects + self.close_view(
                timeout.view
            )  # at least one honest voter has left: no quorum without it
        return effects + self._try_to_propose()

    # ---- voting --------------------------------------------------------------------------------------------

    def _vote_or_judge(self, view: int) -> list[Effect]:
        """Vote for the proposal of this view if it is approved, or request its judgment."""
        tally = self._tally(view)
        if tally.digest is None or self.is_over:
            return []
        if tally.digest in self.approved:
            return self._vote("prepare", view, tally.digest)
        return self._request_judgment(view, tally)

    def _vote(self, stage: Stage, view: int, digest: Digest) -> list[Effect]:
        if not self._may_vote(view) or self.state.conflicts(stage, view, digest) or digest not in self.bodies:
            return []
        if (stage, self.me) in self._tally(view).votes:
            return []
        (self.state.prepare if stage == "prepare" else self.state.commit)[view] = digest
        self.state.remember_vote(digest, self.bodies[digest])
        vote = Vote(self.round, view, stage, digest)
        signed = self.notary.sign(vote)
        # durable before it is sent: a voter that forgets its vote could help decide two bodies
        message = self._vote_message(view, signed)
        return [self._persist(), self._broadcast(message), *self._count_vote(vote, signed)]

    def _may_vote(self, view: int) -> bool:
        """Whether voting in this view is allowed. Never after a timeout: its quorum permits the next proposal."""
        return self.votes and view == self.view and view > self.state.timed_out

    def _count_vote(self, vote: Vote, signed: SignedStatement) -> list[Effect]:
        tally = self._tally(vote.view)
        slot: tuple[Stage, PeerId] = (vote.stage, signed.signer)
        first = tally.votes.get(slot)
        if first is not None:
            return self._report_equivocation(first[1], signed)
        tally.votes[slot] = (vote.digest, signed)
        tally.count[vote.stage, vote.digest] += 1
        if tally.count[vote.stage, vote.digest] < self.quorum:
            return []
        if vote.stage == "prepare" and (vote.view, vote.digest) in self.certificates.known:
            # also if the other voters' certificate was complete before the local voter entered this view
            return self._vote("commit", vote.view, vote.digest)
        same = {
            peer: signed.signature
            for (stage, peer), (digest, signed) in tally.votes.items()
            if stage == vote.stage and digest == vote.digest
        }
        votes = tuple(sorted(same.items()))
        certificate = QuorumCertificate(self.round, vote.view, vote.stage, vote.digest, votes)
        if vote.stage == "commit":
            return self._decide(certificate)
        prepared = self._emit(PrepareQuorumReached(view=vote.view, digest=vote.digest))
        return [prepared, *self._adopt_certificate(certificate), *self._vote("commit", vote.view, vote.digest)]

    # ---- views ---------------------------------------------------------------------------------------------

    def _try_to_propose(self) -> list[Effect]:
        view = self.view
        if not self._is_my_turn(view):
            return []
        tally, proof = self._tally(view), self._view_change_proof(view)
        if tally.is_reported or proof is None:
            return []
        tally.is_reported = True
        if proof.high is not None:
            return self.propose(view, self.bodies[proof.high.digest])
        before = self.state.proposed.get(view)
        if before is not None and before in self.bodies:
            return self.propose(view, self.bodies[before])  # repeat it after a restart: no other body is allowed
        return [self._emit(LocalProposerTurnBegan(view=view))]

    def _view_change_proof(self, view: int) -> ViewChangeProof | None:
        """Proof that permits a local proposal. The first quorum is kept, so `LocalProposerTurnBegan` stays true."""
        if view == 0:
            return ViewChangeProof((), None)
        tally = self._tally(view)
        if tally.proof is None:
            tally.proof = self.certificates.choose_proof(self._tally(view - 1).timeouts, self.bodies)
        return tally.proof

    def _adopt_certificate(self, certificate: QuorumCertificate) -> list[Effect]:
        """Adopt a certificate once its body is here. Otherwise a timeout could claim a body that is lost."""
        self.certificates.add(certificate)
        body = self.bodies.get(certificate.digest)
        if body is None:
            return []
        return [self._persist()] if self.state.raise_highest(certificate, body) else []

    def _adopt_received(self, certificate: QuorumCertificate) -> list[Effect]:
        """Adopt a certificate from another voter. If its body is missing, it is not under way: report that."""
        fresh = (certificate.view, certificate.digest) not in self.certificates.known
        effects = self._adopt_certificate(certificate)
        if not fresh or certificate.digest in self.bodies:
            return effects
        return [*effects, self._emit(VertexBodyMissing(view=certificate.view, digest=certificate.digest))]

    def _binding_digests(self) -> set[Digest]:
        return {digest for _, digest in self.certificates.known}

    def _resume_with_body(self, digest: Digest) -> list[Effect]:
        waited = [c for (_, named), c in self.certificates.known.items() if named == digest]
        if self.is_over or not waited:
            return []
        newest = max(waited, key=lambda c: c.view)
        return [
            *self._adopt_certificate(newest),
            *self._vote("commit", newest.view, digest),
            *self._try_to_propose(),
        ]

    def _send_timeout(self, view: int, peers: Sequence[PeerId] | None = None) -> list[Effect]:
        assert view == self.state.timed_out
        high = self.state.claimed  # not a newer one: the first statement counts, also after a restart
        tally = self._tally(view)
        mine = tally.timeouts.get(self.me)
        if mine is None:
            timeout = ViewTimeout(self.round, view, high.view if high else -1, high.digest if high else ZERO_DIGEST)
            mine = (timeout, self.notary.sign(timeout))
            tally.timeouts[self.me] = mine
        message = TimeoutMessage(self.round, self._attempt(view), self.trace, mine[1], high)
        return [self._broadcast(message)] if peers is None else [Send(p, message) for p in peers]

    # ---- helpers -------------------------------------------------------------------------------------------

    def _drop_finished(self) -> None:
        self._drop_old_views(self.state.bodies)
        heard = [tally.timeouts for tally in self.tallies.values()]
        self.certificates.prune(heard, (self.state.claimed, self.state.high))

    def _persist(self) -> Persist:
        return Persist(f"said/{self.round}/agreement", self.state.encode())
