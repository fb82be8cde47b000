"""Agreement on one vertex body: two phases of votes, views with rotating proposers, nothing decided twice.

The narrow door: the round calls `propose`, `approve` and `close_view`; the machine answers with the facts
`Judge` (is this body right?), `MayPropose` (propose what you like), `BodyMissing` (a body to be fetched) and
`BodyDecided`.

In a view its proposer sends a body; voters that find it right send prepare votes; a quorum of prepare votes is
a certificate; voters that hold it, and its body, send commit votes; a quorum of commit votes decides. When a view
is over, because its time is or because its proposer is gone, voters sign Timeout(view, highest prepare
certificate). A quorum of those lets the next proposer speak, and it must re-propose the body of the highest
certificate among them (Castro & Liskov 1999, section 4.4, for one decision; Jolteon, arXiv 2106.10362, for the rule
that only the timeouts' highest certificate binds). It shows them, so it need not wait as HotStuff-2's does (ePrint
2023/397), which shows one certificate and has to have heard of the highest. Each attempt of a round has as many
views as there are voters, so that all voters meet in the same view again when the clock ends an attempt.

A certificate binds nobody before its body is here: it is asked for first. So whoever claims a certificate can give
its body, and a timeout that claims one whose body nobody gives is a liar's, and not needed.

Votes go from everybody to everybody, but voters need not all hear each other: a commit vote that is said again
brings the certificate that it stands on, so one proposer that a quorum hears is enough for a decision.

Promises: no two bodies are decided for one round while fewer voters lie (or, for a majority quorum, crash with
amnesia) than two quorums share; every vote and timeout is durable before it is sent; the first statement per
slot counts, a different second one is reported as evidence. Never reads a clock: views end when told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Persist, Send
from atoll.base.round_robin import in_turn
from atoll.protocol.agreement.events import BodyMissing, BodyPrepared, MayPropose
from atoll.protocol.agreement.view_change import CertificateCache, ViewChangeProof
from atoll.protocol.agreement.voter import Electorate, RoundVoter, ViewState
from atoll.protocol.agreement.voter_state import VoterState
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PreVote, ProposalMessage, TimeoutMessage, VoteMessage
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, Stage, ViewTimeout, Vote

STAGES: tuple[Stage, ...] = ("prepare", "commit")
PLAIN_REPEATS = 1  # of a commit vote: where only a word was lost its certificate is not sent along


@dataclass
class VoteTally(ViewState):
    """Statements heard in one view."""

    grounds: ViewChangeProof | None = None  # what lets, and binds, its proposer
    votes: dict[tuple[Stage, PeerId], tuple[Digest, SignedStatement]] = field(
        default_factory=dict[tuple[Stage, PeerId], tuple[Digest, SignedStatement]]
    )
    count: Counter[tuple[Stage, Digest]] = field(default_factory=Counter[tuple[Stage, Digest]])  # of these votes
    timeouts: dict[PeerId, tuple[ViewTimeout, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[ViewTimeout, SignedStatement]]
    )
    repeated: int = 0  # how often I said my commit vote again


class TwoPhaseAgreement(RoundVoter[VoteTally]):
    """One voter's (or listener's) side of the agreement that closes one round."""

    heard = VoteTally

    def __init__(self, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None) -> None:
        super().__init__(notary, electorate)
        self.said = VoterState.recall(kept)
        self.view = self.said.view
        self.reminders = 0  # how often I said my words again
        self.bodies |= self.said.bodies
        self.proofs = CertificateCache(notary, self.round, self.vote_keys, self.quorum)
        for known in (self.said.claimed, self.said.high):
            if known is not None:
                self.proofs.add(known)

    # ---- what the round calls ------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        return self._see_if_i_propose()

    def has_proposed(self, view: int) -> bool:
        """Also before a restart."""
        return view in self.said.proposed

    @property
    def has_voted(self) -> bool:
        return bool(self.said.prepare)

    def holders(self, digest: Digest) -> list[PeerId]:
        """Voters who said that they are bound to this body, and so have it; else those who once voted for it."""
        if self.decided is not None:
            return [p for p, _ in self.decided.certificate.votes if p != self.me]
        found: dict[PeerId, None] = {}
        for tally in self.tallies.values():
            found |= dict.fromkeys(p for (s, p), (of, _) in tally.votes.items() if s == "commit" and of == digest)
            found |= dict.fromkeys(p for p, (timeout, _) in tally.timeouts.items() if timeout.high_digest == digest)
        if not found:
            known = (c for (_, named), c in self.proofs.known.items() if named == digest)
            found = dict.fromkeys(p for c in known for p, _ in c.votes)
        return [p for p in found if p != self.me]

    @property
    def is_open(self) -> bool:
        """This view has something to decide, or somebody gave it up."""
        tally = self._tally(self.view)
        return not self.over and (tally.proposal is not None or bool(tally.timeouts) or self._is_certified)

    @property
    def _is_certified(self) -> bool:
        """I know of a certificate of this view, whether or not its body is here."""
        return any(view == self.view for view, _ in self.proofs.known)

    @property
    def gave_up(self) -> set[PeerId]:
        """Voters heard to have closed this view or a later one: they vote in it no more."""
        return {p for view, tally in self.tallies.items() if view >= self.view for p in tally.timeouts}

    @property
    def waiting_for(self) -> PeerId | None:
        """The proposer whose silence alone holds this view up; None once its proposal or a certificate is here."""
        tally = self._tally(self.view)
        return None if self.over or tally.proposal is not None or self._is_certified else self.proposer(self.view)

    def propose(self, view: int, body: bytes) -> list[Effect]:
        """Put a body forward as the proposer of this view. Does nothing if I already did."""
        if not self._is_my_turn(view):
            return []
        digest, grounds = vertex_id(body), self._grounds(view)
        if self.said.proposed.get(view, digest) != digest:
            return []  # said something else before a restart: silence for this slot
        if grounds is None or (grounds.high is not None and grounds.high.digest != digest):
            return []
        self.said.proposed[view] = digest
        self.bodies.setdefault(digest, body)
        sends = self._put_forward(view, digest, body, grounds.timeouts, grounds.high)
        return [self._keep(), *sends, *self._vote("prepare", view, digest)]

    def approve(self, digest: Digest) -> list[Effect]:
        """The round has recomputed everything in this body and found it right."""
        self.approved.add(digest)
        effects: list[Effect] = []
        for view, tally in sorted(self.tallies.items()):
            if tally.digest == digest:
                effects += self._vote("prepare", view, digest)
        return effects

    def close_view(self, view: int) -> list[Effect]:
        """This view and all before it are over for me: say so, once, and move on to the next."""
        if self.over or view < self.view:
            return []
        self.view = view + 1
        self._drop_finished()
        if not self.votes or view <= self.said.timed_out:
            return self._see_if_i_propose()
        self.said.time_out(view)
        return [self._keep(), *self._say_timeout(view), *self._see_if_i_propose(), *self._look(view + 1)]

    def remind(self, to: PeerId | None = None) -> list[Effect]:
        """Repeat what I said for the current view: to one peer, or to those I have not heard from."""
        if not self.votes or self.over:
            return []
        effects: list[Effect] = []
        self.reminders += to is None

        def lacking(heard: Container[PeerId]) -> Sequence[PeerId]:
            if to is not None:
                return [to] if to in self.vote_keys and to != self.me else []
            silent = [p for p in self.vote_keys if p != self.me and p not in heard]
            return in_turn(silent, len(self.vote_keys), self.reminders)

        if self.said.timed_out >= 0 and self.view == self.said.timed_out + 1:
            heard = self._tally(self.said.timed_out).timeouts
            effects += self._say_timeout(self.said.timed_out, lacking(heard))
        tally = self._tally(self.view)
        tally.repeated += to is None and ("commit", self.me) in tally.votes
        voted = {stage: {p for where, p in tally.votes if where == stage} for stage in STAGES}
        if tally.proposal is not None and self.proposer(self.view) == self.me:
            effects += [Send(p, tally.proposal) for p in lacking(voted["prepare"])]
        for stage in STAGES:
            mine = tally.votes.get((stage, self.me))
            if mine is not None:
                said = self._voted(self.view, mine[1])
                # who has not voted to commit may not hear those whose prepare votes I heard
                late = stage == "commit" and tally.repeated > PLAIN_REPEATS
                proof = self.proofs.known.get((self.view, mine[0])) if late else None
                said = replace(said, proof=proof) if proof is not None else said
                effects += [Send(p, said) for p in lacking(voted[stage])]
        return effects

    # ---- messages ------------------------------------------------------------------------------------------

    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | PreVote
    ) -> list[Effect]:
        """Raises PeerFault, before anything changed, if the sender broke the protocol.

        What a signature does not cover (bodies, lists of timeouts, certificates) is the word of who sent it here.
        """
        if self.over:
            return []
        match message:
            case ProposalMessage():
                return self._hear_proposal(sender, message)
            case VoteMessage():
                return self._hear_vote(sender, message)
            case TimeoutMessage():
                return self._hear_timeout(sender, message)
            case PreVote():
                return []  # Raft's word: it binds nobody

    def _hear_proposal(self, sender: PeerId, message: ProposalMessage) -> list[Effect]:
        proposed = self._opened(sender, message)
        if proposed is None:
            return []
        view, tally = proposed.view, self._tally(proposed.view)
        if tally.proposed is not None:
            return self._catch(tally.proposed, message.statement)
        high = self.proofs.check(sender, message, view)
        tally.put(message, proposed.digest)
        self.bodies.setdefault(proposed.digest, message.body)
        if high is not None:
            # a quorum has judged this very body, and its parts may be gone with those who held them in memory
            self.approved.add(proposed.digest)
            self.proofs.add(high)
        effects = self._go_on_with(proposed.digest)
        if view > self.view:
            self.view = view  # a quorum has moved on: so do I
            effects += self._see_if_i_propose()
        return effects + self._look(view)

    def _hear_vote(self, sender: PeerId, message: VoteMessage) -> list[Effect]:
        signed, proof = message.statement, message.proof
        vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))
        if vote.round != self.round or not self._in_reach(vote.view):
            return []
        if proof is UNSET or vote.view < self.view:  # of a view that is over nothing is kept: not checked either
            return self._count(vote, signed)
        certificate = self.proofs.under(sender, vote, proof)
        return self._count(vote, signed) + self._hear_certificate(certificate)

    def _hear_certificate(self, certificate: QuorumCertificate) -> list[Effect]:
        """A quorum of prepare votes that did not reach me one by one binds me like one that did."""
        if self.over:
            return []
        effects: list[Effect] = []
        if (certificate.view, certificate.digest) not in self.proofs.known:
            effects = [self._report(BodyPrepared(view=certificate.view, digest=certificate.digest))]
        effects += self._shown(certificate)
        if certificate.view > self.view:
            self.view = certificate.view  # a quorum has moved on: so do I
            effects += self._see_if_i_propose()
        return [*effects, *self._vote("commit", certificate.view, certificate.digest)]

    def _hear_timeout(self, sender: PeerId, message: TimeoutMessage) -> list[Effect]:
        signed = message.statement
        timeout = self.notary.open(signed, ViewTimeout, self.vote_keys.get(signed.signer))
        if timeout.round != self.round or not self._in_reach(timeout.view):
            return []
        effects: list[Effect] = []
        if timeout.high_view >= 0:
            effects += self._shown(self.proofs.of(sender, timeout, message.high))
        tally = self._tally(timeout.view)
        first = tally.timeouts.get(signed.signer)
        if first is not None:
            return effects + self._catch(first[1], signed)
        tally.timeouts[signed.signer] = (timeout, signed)
        if timeout.view >= self.view and len(tally.timeouts) > len(self.vote_keys) - self.quorum:
            return effects + self.close_view(timeout.view)  # more than may be wrong say so: do not hold them up
        return effects + self._see_if_i_propose()

    # ---- voting --------------------------------------------------------------------------------------------

    def _look(self, view: int) -> list[Effect]:
        """Is there a proposal that I may vote for, or should have judged?"""
        tally = self._tally(view)
        if tally.digest is None or self.over:
            return []
        if tally.digest in self.approved:
            return self._vote("prepare", view, tally.digest)
        return self._judge(view, tally)

    def _vote(self, stage: Stage, view: int, digest: Digest) -> list[Effect]:
        if not self._may_vote(view) or self.said.otherwise(stage, view, digest) or digest not in self.bodies:
            return []
        if (stage, self.me) in self._tally(view).votes:
            return []
        (self.said.prepare if stage == "prepare" else self.said.commit)[view] = digest
        self.said.remember(digest, self.bodies[digest])
        vote = Vote(self.round, view, stage, digest)
        signed = self.notary.sign(vote)
        # durable before it is sent: a voter that forgets its vote could help decide two bodies
        message = self._voted(view, signed)
        sends = [Send(peer, message) for peer in self.others]
        return [self._keep(), *sends, *self._count(vote, signed)]

    def _may_vote(self, view: int) -> bool:
        """Never in a view that I said is over: a quorum of such words lets the next proposer speak."""
        return self.votes and view == self.view and view > self.said.timed_out

    def _count(self, vote: Vote, signed: SignedStatement) -> list[Effect]:
        tally = self._tally(vote.view)
        slot: tuple[Stage, PeerId] = (vote.stage, signed.signer)
        first = tally.votes.get(slot)
        if first is not None:
            return self._catch(first[1], signed)
        tally.votes[slot] = (vote.digest, signed)
        tally.count[vote.stage, vote.digest] += 1
        if tally.count[vote.stage, vote.digest] < self.quorum:
            return []
        if vote.stage == "prepare" and (vote.view, vote.digest) in self.proofs.known:
            # also when the others were faster: their certificate was complete before I came to this view
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
        prepared = self._report(BodyPrepared(view=vote.view, digest=vote.digest))
        return [prepared, *self._heed(certificate), *self._vote("commit", vote.view, vote.digest)]

    # ---- views ---------------------------------------------------------------------------------------------

    def _see_if_i_propose(self) -> list[Effect]:
        view = self.view
        if not self._is_my_turn(view):
            return []
        tally, grounds = self._tally(view), self._grounds(view)
        if tally.told or grounds is None:
            return []
        tally.told = True
        if grounds.high is not None:
            return self.propose(view, self.bodies[grounds.high.digest])
        before = self.said.proposed.get(view)
        if (
            before is not None and before in self.bodies
        ):  # said before a restart: repeat it, or this view would pass in silence
            return self.propose(view, self.bodies[before])
        return [self._report(MayPropose(view=view))]

    def _grounds(self, view: int) -> ViewChangeProof | None:
        """What lets me propose: the first quorum that was heard, so that what the round was told stays true."""
        if view == 0:
            return ViewChangeProof((), None)
        tally = self._tally(view)
        if tally.grounds is None:
            tally.grounds = self.proofs.choose(self._tally(view - 1).timeouts, self.bodies)
        return tally.grounds

    def _heed(self, certificate: QuorumCertificate) -> list[Effect]:
        """It binds me once its body is here: else I might claim what nobody could propose any more."""
        self.proofs.add(certificate)
        body = self.bodies.get(certificate.digest)
        if body is None:
            return []
        return [self._keep()] if self.said.raise_high(certificate, body) else []

    def _shown(self, certificate: QuorumCertificate) -> list[Effect]:
        """The same where somebody shows it to me: if I lack the body, that is not on its way either."""
        fresh = (certificate.view, certificate.digest) not in self.proofs.known
        effects = self._heed(certificate)
        if not fresh or certificate.digest in self.bodies:
            return effects
        return [*effects, self._report(BodyMissing(view=certificate.view, digest=certificate.digest))]

    def _named(self) -> set[Digest]:
        return {digest for _, digest in self.proofs.known}

    def _go_on_with(self, digest: Digest) -> list[Effect]:
        waited = [c for (_, named), c in self.proofs.known.items() if named == digest]
        if self.over or not waited:
            return []
        newest = max(waited, key=lambda c: c.view)
        return [*self._heed(newest), *self._vote("commit", newest.view, digest), *self._see_if_i_propose()]

    def _say_timeout(self, view: int, peers: Sequence[PeerId] | None = None) -> list[Effect]:
        assert view == self.said.timed_out
        high = self.said.claimed  # not what I learned since: the first word counts, also after a restart
        tally = self._tally(view)
        mine = tally.timeouts.get(self.me)
        if mine is None:
            timeout = ViewTimeout(self.round, view, high.view if high else -1, high.digest if high else ZERO_DIGEST)
            mine = (timeout, self.notary.sign(timeout))
            tally.timeouts[self.me] = mine
        message = TimeoutMessage(self.round, self._attempt(view), self.trace, mine[1], high)
        return [Send(p, message) for p in (self.others if peers is None else peers)]

    # ---- small words ---------------------------------------------------------------------------------------

    def _drop_finished(self) -> None:
        self._forget_but(self.said.bodies)
        heard = [tally.timeouts for tally in self.tallies.values()]
        self.proofs.forget_all_but(heard, (self.said.claimed, self.said.high))

    def _keep(self) -> Persist:
        return Persist(f"said/{self.round}/agreement", self.said.keep())
