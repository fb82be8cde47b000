"""One-phase crash-fault-tolerant agreement (Raft) on the one vertex body of a round.

Driving contract: as for `two_phase.py`; the round also passes `ViewChangePreVote` messages to `receive`.
`close_view` starts a pre-vote; the view ends once a quorum agrees. At the end of an attempt it ends at once.
The driver must make each `Persist` durable before it sends what follows, and pass the last one back as `kept`.

A view is a Raft term, and its proposer is the term's only candidate. The leader sends a body. Voters that approve
it accept it and send a signed vote to all. A quorum of votes of one view decides and is the certificate that other
peers check. If the leader is silent, a voter first asks whether a quorum would leave the view (pre-vote). Only then
it closes the view for good and signs its newest entry: the ballot for the next leader. Voters also leave a leader
once too few remain for a quorum (check-quorum). The next leader shows a quorum of ballots and must propose the
newest entry among them.

Invariants:
- No two bodies are decided for one round while voters only crash and keep their durable state.
- The newest entry and the newest ballot are durable before they are sent, and never contradicted.
Not responsible for: lying voters (`two_phase.py`), time (the round closes views).

Source: D. Ongaro, Consensus: Bridging Theory and Practice, Stanford 2014, restricted to one entry per instance.
Candidates take turns as in Liskov & Cowling, Viewstamped Replication Revisited, MIT 2012. Rules and reasons:
specs/raft.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Persist, Send
from atoll.protocol.agreement.events import LocalProposerTurnBegan, VertexBodyMissing
from atoll.protocol.agreement.view_change import open_timeouts
from atoll.protocol.agreement.voter import Electorate, RoundVoter, ViewState
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, ViewTimeout, Vote

Entry = tuple[int, Digest]  # view in which a body was accepted, digest of the body
NOTHING: Entry = (-1, ZERO_DIGEST)


class PersistentTerm(msgspec.Struct, array_like=True):
    """Durable voter state (figure 3.1: term, vote and log), never contradicted after a crash."""

    closed_view: int = -1  # last closed view; all earlier views are closed too
    ballot_entry: Entry = NOTHING  # newest entry when that view was closed, named in the ballot
    newest: Entry = NOTHING  # newest accepted entry
    body: bytes = b""  # body of the newest entry


@dataclass(frozen=True)
class BallotQuorum:
    """A quorum of ballots for the leader of a view, and their newest entry, which it must propose."""

    ballots: tuple[SignedStatement, ...]
    newest: Entry


@dataclass
class RaftTerm(ViewState):
    """Messages received in one view."""

    votes: dict[PeerId, tuple[Digest, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[Digest, SignedStatement]]
    )
    pre_votes: set[PeerId] = field(default_factory=set[PeerId])  # voters that sent a pre-vote to close the view
    ballots: dict[PeerId, tuple[ViewTimeout, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[ViewTimeout, SignedStatement]]
    )
    election: BallotQuorum | None = None  # first quorum of ballots, which permits the leader to propose


class OnePhaseAgreement(RoundVoter[RaftTerm]):
    """One voter's or listener's side of the one entry that closes one round."""

    tally_type = RaftTerm

    def __init__(self, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None) -> None:
        assert len(electorate.vote_keys) < 2 * electorate.quorum
        super().__init__(notary, electorate)
        self.state = _STATE.decode(kept) if kept else PersistentTerm()
        self.view = max(self.state.closed_view + 1, self.state.newest[0])
        if self.has_voted:  # a restarted voter need not judge an accepted body again
            self.bodies[self.state.newest[1]] = self.state.body
            self.approved.add(self.state.newest[1])

    # ---- what the round calls ------------------------------------------------------------------------------

    def start(self) -> list[Effect]:
        return self._try_to_lead()

    def has_proposed(self, view: int) -> bool:
        """Whether the local voter proposed in this view, also before a restart: it accepts its own proposal."""
        return self.proposer(view) == self.me and self.state.newest[0] == view

    def holders(self, digest: Digest) -> list[PeerId]:
        """Voters that accepted this body, by their votes and ballots."""
        found: dict[PeerId, None] = {}
        for tally in self.tallies.values():
            found |= dict.fromkeys(p for p, (accepted, _) in tally.votes.items() if accepted == digest)
            found |= dict.fromkeys(p for p, (ballot, _) in tally.ballots.items() if ballot.high_digest == digest)
        return [p for p in found if p != self.me]

    @property
    def has_voted(self) -> bool:
        return self.state.newest != NOTHING

    @property
    def is_open(self) -> bool:
        """Whether this view has a proposal, a ballot or a pre-vote."""
        tally = self._tally(self.view)
        return not self.is_over and (tally.proposal is not None or bool(tally.ballots or tally.pre_votes))

    @property
    def voters_timed_out(self) -> set[PeerId]:
        """Voters that have closed this view or a later one and no longer vote in it."""
        return {p for view, tally in self.tallies.items() if view >= self.view for p in tally.ballots}

    @property
    def silent_proposer(self) -> PeerId | None:
        """The silent leader of this view; None once its proposal has arrived."""
        return None if self.is_over or self._tally(self.view).proposal is not None else self.proposer(self.view)

    def propose(self, view: int, body: bytes) -> list[Effect]:
        """Propose a body as the leader of this view. Does nothing after an earlier proposal."""
        if not self._is_my_turn(view):
            return []
        tally, digest, election = self._tally(view), vertex_id(body), self._election(view)
        if tally.proposal is not None or election is None or _binds_other_body(election.newest, digest):
            return []
        if not self._may_accept(view, digest):
            return []  # another body was proposed before a restart: send nothing
        self.bodies[digest] = body
        sends = self._send_proposal(view, digest, body, election.ballots, None)
        return [self._accept(view, digest), *sends, *self._send_vote(view, digest)]

    def approve(self, digest: Digest) -> list[Effect]:
        """Accept this body: the round has recomputed all of its content."""
        self.approved.add(digest)
        return self._vote_or_judge(self.view)

    def close_view(self, view: int) -> list[Effect]:
        """Close this view and all earlier ones.

        At the end of an attempt, which all voters know, the view closes at once. Otherwise the voter sends a
        pre-vote and keeps voting in the view until a quorum would leave it. `remind` repeats the pre-vote.
        """
        if self.is_over or view < self.view:
            return []
        if not self.votes:
            self._enter_view(view + 1)
            return []
        if view > self.view or (view + 1) % len(self.proposers) == 0:
            return self._close_view(view)
        tally = self._tally(view)
        if self.me in tally.pre_votes:
            return []
        tally.pre_votes.add(self.me)
        return [*self._send_pre_vote(), *self._close_if_abandoned()]

    def retransmit(self, to: PeerId | None = None) -> list[Effect]:
        """Repeat the local statements of the current view: to one peer, or to all unresponsive voters."""
        if not self.votes or self.is_over:
            return []
        effects: list[Effect] = []
        peers = [p for p in self.others if to is None or p == to]
        if self.state.closed_view >= 0 and self.view == self.state.closed_view + 1:
            heard = self._tally(self.state.closed_view).ballots
            effects += self._send_ballot([p for p in peers if p not in heard or to is not None])
        tally = self._tally(self.view)
        if self.me in tally.pre_votes:
            effects += self._send_pre_vote(peers)
        silent = [p for p in peers if p not in tally.votes or to is not None]
        if tally.proposal is not None and self.proposer(self.view) == self.me:
            effects += [Send(p, tally.proposal) for p in silent]
        mine = tally.votes.get(self.me)
        return [*effects, *(Send(p, self._vote_message(self.view, mine[1])) for p in silent if mine is not None)]

    # ---- messages ------------------------------------------------------------------------------------------

    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | ViewChangePreVote
    ) -> list[Effect]:
        """Process one message. Raises PeerFault, before any change, if the sender broke the protocol."""
        if self.is_over:
            return []
        match message:
            case ProposalMessage():
                return self._receive_proposal(sender, message)
            case VoteMessage():
                return self._receive_vote(message)
            case ViewChangePreVote():
                return self._receive_pre_vote(sender, message)
            case TimeoutMessage():
                return self._receive_ballot(message)

    def _receive_proposal(self, sender: PeerId, message: ProposalMessage) -> list[Effect]:
        proposed = self._open_proposal(sender, message)
        if proposed is None:
            return []
        view, tally = proposed.view, self._tally(proposed.view)
        if tally.proposed is not None:
            return self._report_equivocation(tally.proposed, message.statement)
        if view > 0:
            at = self.round, view
            newest = _newest_entry(open_timeouts(self.notary, sender, message, at, self.vote_keys, self.quorum))
            if _binds_other_body(newest, proposed.digest):
                what = "proposal is not the newest accepted body"
                raise PeerFault(sender, what, message.statement.body)
            if newest != NOTHING:
                # a voter has judged this body already; its parts may have been lost with the members that held them
                self.approved.add(proposed.digest)
        tally.set_proposal(message, proposed.digest)
        self.bodies[proposed.digest] = message.body
        if view > self.view:
            self._enter_view(view)  # a quorum has entered this view
        return self._vote_or_judge(view)

    def _receive_vote(self, message: VoteMessage) -> list[Effect]:
        signed = message.statement
        vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))
        if vote.round != self.round or not self._in_reach(vote.view):
            return []
        if vote.stage != "commit":
            raise PeerFault(signed.signer, "prepare vote in a run that agrees by Raft", signed.body)
        return self._count_vote(vote.view, vote.digest, signed)

    def _receive_pre_vote(self, sender: PeerId, message: ViewChangePreVote) -> list[Effect]:
        if sender not in self.vote_keys:
            raise PeerFault(sender, "pre-vote from a peer without a vote")
        if message.round != self.round or not self._in_reach(message.view):
            return []
        self._tally(message.view).pre_votes.add(sender)
        return self._close_if_abandoned()

    def _receive_ballot(self, message: TimeoutMessage) -> list[Effect]:
        signed = message.statement
        ballot = self.notary.open(signed, ViewTimeout, self.vote_keys.get(signed.signer))
        if ballot.round != self.round or not self._in_reach(ballot.view):
            return []
        if ballot.high_view > ballot.view:
            raise PeerFault(signed.signer, "ballot names an entry of a later view than it closes", signed.body)
        tally = self._tally(ballot.view)
        first = tally.ballots.get(signed.signer)
        if first is not None:
            return self._report_equivocation(first[1], signed)
        tally.ballots[signed.signer] = (ballot, signed)
        return self._close_if_abandoned() or self._try_to_lead()

    # ---- the entry -----------------------------------------------------------------------------------------

    def _vote_or_judge(self, view: int) -> list[Effect]:
        """Accept the proposal of this view if it is approved, or request its judgment."""
        tally = self._tally(view)
        digest = tally.digest
        if digest is None or self.is_over:
            return []
        if digest not in self.approved:
            return self._request_judgment(view, tally)
        if self.me in tally.votes or not self._may_accept(view, digest):
            return []
        return [self._accept(view, digest), *self._send_vote(view, digest)]

    def _may_accept(self, view: int, digest: Digest) -> bool:
        """Whether this entry may be accepted: one entry per term, and none in a closed term."""
        return self.votes and view == self.view and (self.state.newest[0] < view or self.state.newest[1] == digest)

    def _accept(self, view: int, digest: Digest) -> Persist:
        """Persist the entry before the vote is sent: a voter that forgets it could help decide two bodies."""
        self.state.newest, self.state.body = (view, digest), self.bodies[digest]
        return self._persist()

    def _send_vote(self, view: int, digest: Digest) -> list[Effect]:
        signed = self.notary.sign(Vote(self.round, view, "commit", digest))
        vote = self._broadcast(self._vote_message(view, signed))
        return [vote, *self._count_vote(view, digest, signed)]

    def _count_vote(self, view: int, digest: Digest, signed: SignedStatement) -> list[Effect]:
        tally = self._tally(view)
        first = tally.votes.get(signed.signer)
        if first is not None:
            return self._report_equivocation(first[1], signed)
        tally.votes[signed.signer] = (digest, signed)
        same = {peer: said.signature for peer, (accepted, said) in tally.votes.items() if accepted == digest}
        if len(same) < self.quorum:
            return []
        return self._decide(QuorumCertificate(self.round, view, "commit", digest, tuple(sorted(same.items()))))

    # ---- terms ---------------------------------------------------------------------------------------------

    def _close_if_abandoned(self) -> list[Effect]:
        """Close views that a quorum would close (pre-vote), or with too few voters to decide (check-quorum)."""
        closed: dict[PeerId, int] = {}  # voter -> last view that it closed
        would_close: dict[PeerId, int] = {}  # voter -> last view that it closed or would close
        for view in sorted(view for view in self.tallies if view >= self.view):
            tally = self.tallies[view]
            closed |= dict.fromkeys(tally.ballots, view)
            would_close |= dict.fromkeys(tally.pre_votes | tally.ballots.keys(), view)
        last = _view_reached(would_close, self.quorum)
        last = max(last, _view_reached(closed, len(self.vote_keys) - self.quorum + 1))
        return self._close_view(last) if self.votes and last >= self.view else []

    def _close_view(self, view: int) -> list[Effect]:
        """Close this view for good: send one ballot for the next leader, and nothing more in closed views."""
        self._enter_view(view + 1)
        self.state.closed_view, self.state.ballot_entry = view, self.state.newest
        return [
            self._persist(),
            *self._send_ballot(),
            *self._try_to_lead(),
            *self._vote_or_judge(view + 1),
        ]

    def _try_to_lead(self) -> list[Effect]:
        view = self.view
        if not self._is_my_turn(view):
            return []
        tally, election = self._tally(view), self._election(view)
        if tally.is_reported or election is None:
            return []
        tally.is_reported = True
        if self.has_proposed(view):  # repeat it after a restart: no other body is allowed
            return self.propose(view, self.state.body)
        if election.newest != NOTHING:
            lacking = VertexBodyMissing(view=view, digest=election.newest[1])
            return self._resume_with_body(election.newest[1]) or [self._emit(lacking)]
        return [self._emit(LocalProposerTurnBegan(view=view))]

    def _binding_digests(self) -> set[Digest]:
        """Digest of the entry that the local leader must propose."""
        election = self.tallies[self.view].election if self.view in self.tallies else None
        return {election.newest[1]} if election is not None and election.newest != NOTHING else set()

    def _resume_with_body(self, digest: Digest) -> list[Effect]:
        body = self.bodies.get(digest)
        return self.propose(self.view, body) if body is not None and digest in self._binding_digests() else []

    def _election(self, view: int) -> BallotQuorum | None:
        """Election of the local leader. The first quorum is kept, so `LocalProposerTurnBegan` stays true."""
        if view == 0:
            return BallotQuorum((), NOTHING)
        tally = self._tally(view)
        heard = self._tally(view - 1).ballots
        if tally.election is None and len(heard) >= self.quorum:
            chosen = [heard[p] for p in sorted(heard)[: self.quorum]]
            newest = _newest_entry(ballot for ballot, _ in chosen)
            tally.election = BallotQuorum(tuple(signed for _, signed in chosen), newest)
        return tally.election

    def _send_ballot(self, peers: Iterable[PeerId] | None = None) -> list[Effect]:
        view = self.state.closed_view
        mine = self._tally(view).ballots.get(self.me)
        if mine is None:
            # not a newer entry: the first statement counts
            ballot = ViewTimeout(self.round, view, *self.state.ballot_entry)
            mine = self._tally(view).ballots[self.me] = (ballot, self.notary.sign(ballot))
        message = TimeoutMessage(self.round, self._attempt(view), self.trace, mine[1], None)
        return [self._broadcast(message)] if peers is None else [Send(p, message) for p in peers]

    def _send_pre_vote(self, peers: Iterable[PeerId] | None = None) -> list[Effect]:
        message = ViewChangePreVote(self.round, self._attempt(self.view), self.trace, self.view)
        return [self._broadcast(message)] if peers is None else [Send(p, message) for p in peers]

    # ---- helpers -------------------------------------------------------------------------------------------

    def _enter_view(self, view: int) -> None:
        self.view = view
        self._drop_old_views([self.state.newest[1]])

    def _persist(self) -> Persist:
        return Persist(f"said/{self.round}/agreement", msgspec.msgpack.encode(self.state))


def _newest_entry(ballots: Iterable[ViewTimeout]) -> Entry:
    best = max((ballot.high_view, ballot.high_digest) for ballot in ballots)
    return best if best[0] >= 0 else NOTHING


def _binds_other_body(newest: Entry, digest: Digest) -> bool:
    return newest != NOTHING and newest[1] != digest


def _view_reached(views: dict[PeerId, int], needed: int) -> int:
    """The last view that at least `needed` voters have reached; -1: none."""
    return sorted(views.values(), reverse=True)[needed - 1] if len(views) >= needed else -1


_STATE = msgspec.msgpack.Decoder(PersistentTerm)
