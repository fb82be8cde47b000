"""Raft for the one entry of one round, behind the narrow door: one phase of votes, for voters that do not lie.

A view is a term, its proposer the term's only candidate. The leader sends a body, voters that find it right accept
it and say so with a signed vote to everybody; a quorum of votes of one view decides, and is the certificate that
strangers check. A voter whose leader is silent asks first whether a quorum would leave the view (pre-vote); only
then does it close it for good and say, signed, which entry is its newest: its ballot for the next leader. A leader
that more than a few have left is followed no longer (check-quorum). The next leader shows a quorum of ballots and
must propose the newest entry among them.

Promises: no two bodies are decided for one round while voters only crash and forget nothing that they kept; the
newest entry and the newest ballot are durable before they are said, and never said differently. Nothing is promised
where somebody lies: there `agreement.py` decides. Never reads a clock: patience ends when the round says so.

Source: D. Ongaro, Consensus: Bridging Theory and Practice, Stanford 2014, restricted to one entry per instance,
with candidates in turn as in Liskov & Cowling, Viewstamped Replication Revisited, MIT 2012; rules and reasons in
specs/raft.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Persist, Send
from atoll.protocol.agreement.events import BodyMissing, MayPropose
from atoll.protocol.agreement.view_change import timeouts_shown
from atoll.protocol.agreement.voter import Electorate, RoundVoter, ViewState
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PreVote, ProposalMessage, TimeoutMessage, VoteMessage
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, ViewTimeout, Vote

Entry = tuple[int, Digest]  # the view in which a body was accepted, and the body's name
NOTHING: Entry = (-1, ZERO_DIGEST)


class PersistentTerm(msgspec.Struct, array_like=True):
    """What a voter must remember across a crash (figure 3.1: term, vote and log): nothing of it is ever unsaid."""

    closed: int = -1  # every view up to this one is over for me
    named: Entry = NOTHING  # the newest entry when I closed it: what my ballot says
    newest: Entry = NOTHING  # that I accepted
    body: bytes = b""  # of the newest


@dataclass(frozen=True)
class LeaderElection:
    """A quorum of ballots for the leader of a view, and the newest entry they name: it must propose that one."""

    ballots: tuple[SignedStatement, ...]
    newest: Entry


@dataclass
class RaftTerm(ViewState):
    """Words heard in one view."""

    votes: dict[PeerId, tuple[Digest, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[Digest, SignedStatement]]
    )
    wishes: set[PeerId] = field(default_factory=set[PeerId])  # who would close it
    ballots: dict[PeerId, tuple[ViewTimeout, SignedStatement]] = field(
        default_factory=dict[PeerId, tuple[ViewTimeout, SignedStatement]]
    )
    election: LeaderElection | None = None  # what lets me lead: the first quorum of ballots that was heard


class OnePhaseAgreement(RoundVoter[RaftTerm]):
    """One voter's (or listener's) side of the one entry that closes one round."""

    heard = RaftTerm

    def __init__(self, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None) -> None:
        assert len(electorate.vote_keys) < 2 * electorate.quorum
        super().__init__(notary, electorate)
        self.kept = _KEPT.decode(kept) if kept else PersistentTerm()
        self.view = max(self.kept.closed + 1, self.kept.newest[0])
        if self.has_voted:  # a restarted voter needs no second look at what it accepted
            self.bodies[self.kept.newest[1]] = self.kept.body
            self.approved.add(self.kept.newest[1])

    # ---- what the round calls ------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        return self._see_if_i_lead()

    def has_proposed(self, view: int) -> bool:
        """Also before a restart: whoever leads accepts what it proposes in the same breath."""
        return self.proposer(view) == self.me and self.kept.newest[0] == view

    def holders(self, digest: Digest) -> list[PeerId]:
        """Voters who said that they accepted this body."""
        found: dict[PeerId, None] = {}
        for tally in self.tallies.values():
            found |= dict.fromkeys(p for p, (accepted, _) in tally.votes.items() if accepted == digest)
            found |= dict.fromkeys(p for p, (ballot, _) in tally.ballots.items() if ballot.high_digest == digest)
        return [p for p in found if p != self.me]

    @property
    def has_voted(self) -> bool:
        return self.kept.newest != NOTHING

    @property
    def is_open(self) -> bool:
        """This view has something to decide, or somebody gave it up or would."""
        tally = self._tally(self.view)
        return not self.over and (tally.proposal is not None or bool(tally.ballots or tally.wishes))

    @property
    def gave_up(self) -> set[PeerId]:
        """Voters heard to have closed this view or a later one: they vote in it no more."""
        return {p for view, tally in self.tallies.items() if view >= self.view for p in tally.ballots}

    @property
    def waiting_for(self) -> PeerId | None:
        """The leader whose silence alone holds this view up; None once its proposal is here."""
        return None if self.over or self._tally(self.view).proposal is not None else self.proposer(self.view)

    def propose(self, view: int, body: bytes) -> list[Effect]:
        """Put a body forward as the leader of this view. Does nothing if I already did."""
        if not self._is_my_turn(view):
            return []
        tally, digest, election = self._tally(view), vertex_id(body), self._election(view)
        if tally.proposal is not None or election is None or _binds_otherwise(election.newest, digest):
            return []
        if not self._may_accept(view, digest):
            return []  # said something else before a restart: silence
        self.bodies[digest] = body
        sends = self._put_forward(view, digest, body, election.ballots, None)
        return [self._accept(view, digest), *sends, *self._say_vote(view, digest)]

    def approve(self, digest: Digest) -> list[Effect]:
        """The round has recomputed everything in this body and found it right."""
        self.approved.add(digest)
        return self._look(self.view)

    def close_view(self, view: int) -> list[Effect]:
        """This view and all before it are over for me.

        The end of an attempt is known to all and comes at once. Of any other view I ask whether a quorum would
        leave it, too, and go on to vote in it until it does; asking again is for `remind`.
        """
        if self.over or view < self.view:
            return []
        if not self.votes:
            self._move(view + 1)
            return []
        if view > self.view or (view + 1) % len(self.proposers) == 0:
            return self._close(view)
        tally = self._tally(view)
        if self.me in tally.wishes:
            return []
        tally.wishes.add(self.me)
        return [*self._say_wish(self.others), *self._leave_if_over()]

    def remind(self, to: PeerId | None = None) -> list[Effect]:
        """Repeat what I said for the current view: to one peer, or to those I have not heard from."""
        if not self.votes or self.over:
            return []
        effects: list[Effect] = []
        peers = [p for p in self.others if to is None or p == to]
        if self.kept.closed >= 0 and self.view == self.kept.closed + 1:
            heard = self._tally(self.kept.closed).ballots
            effects += self._say_ballot([p for p in peers if p not in heard or to is not None])
        tally = self._tally(self.view)
        if self.me in tally.wishes:
            effects += self._say_wish(peers)
        silent = [p for p in peers if p not in tally.votes or to is not None]
        if tally.proposal is not None and self.proposer(self.view) == self.me:
            effects += [Send(p, tally.proposal) for p in silent]
        mine = tally.votes.get(self.me)
        return [*effects, *(Send(p, self._voted(self.view, mine[1])) for p in silent if mine is not None)]

    # ---- messages ------------------------------------------------------------------------------------------

    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | PreVote
    ) -> list[Effect]:
        """Raises PeerFault, before anything changed, if the sender broke the protocol."""
        if self.over:
            return []
        match message:
            case ProposalMessage():
                return self._hear_proposal(sender, message)
            case VoteMessage():
                return self._hear_vote(message)
            case PreVote():
                return self._hear_wish(sender, message)
            case TimeoutMessage():
                return self._hear_ballot(message)

    def _hear_proposal(self, sender: PeerId, message: ProposalMessage) -> list[Effect]:
        proposed = self._opened(sender, message)
        if proposed is None:
            return []
        view, tally = proposed.view, self._tally(proposed.view)
        if tally.proposed is not None:
            return self._catch(tally.proposed, message.statement)
        if view > 0:
            at = self.round, view
            newest = _newest(timeouts_shown(self.notary, sender, message, at, self.vote_keys, self.quorum))
            if _binds_otherwise(newest, proposed.digest):
                what = "did not re-propose the newest accepted body"
                raise PeerFault(sender, what, message.statement.body)
            if newest != NOTHING:
                # somebody has judged this very body, and its parts may be gone with those who held them in memory
                self.approved.add(proposed.digest)
        tally.put(message, proposed.digest)
        self.bodies[proposed.digest] = message.body
        if view > self.view:
            self._move(view)  # a quorum has moved on: so do I
        return self._look(view)

    def _hear_vote(self, message: VoteMessage) -> list[Effect]:
        signed = message.statement
        vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))
        if vote.round != self.round or not self._in_reach(vote.view):
            return []
        if vote.stage != "commit":
            raise PeerFault(signed.signer, "voted in two phases in a run that agrees by Raft", signed.body)
        return self._count(vote.view, vote.digest, signed)

    def _hear_wish(self, sender: PeerId, message: PreVote) -> list[Effect]:
        if sender not in self.vote_keys:
            raise PeerFault(sender, "would elect a leader and has no vote")
        if message.round != self.round or not self._in_reach(message.view):
            return []
        self._tally(message.view).wishes.add(sender)
        return self._leave_if_over()

    def _hear_ballot(self, message: TimeoutMessage) -> list[Effect]:
        signed = message.statement
        ballot = self.notary.open(signed, ViewTimeout, self.vote_keys.get(signed.signer))
        if ballot.round != self.round or not self._in_reach(ballot.view):
            return []
        if ballot.high_view > ballot.view:
            raise PeerFault(signed.signer, "names an entry of a view after the one it closes", signed.body)
        tally = self._tally(ballot.view)
        first = tally.ballots.get(signed.signer)
        if first is not None:
            return self._catch(first[1], signed)
        tally.ballots[signed.signer] = (ballot, signed)
        return self._leave_if_over() or self._see_if_i_lead()

    # ---- the entry -----------------------------------------------------------------------------------------

    def _look(self, view: int) -> list[Effect]:
        """Is there a proposal that I may accept, or should have judged?"""
        tally = self._tally(view)
        digest = tally.digest
        if digest is None or self.over:
            return []
        if digest not in self.approved:
            return self._judge(view, tally)
        if self.me in tally.votes or not self._may_accept(view, digest):
            return []
        return [self._accept(view, digest), *self._say_vote(view, digest)]

    def _may_accept(self, view: int, digest: Digest) -> bool:
        """One entry per term, and none in a term that I left."""
        return self.votes and view == self.view and (self.kept.newest[0] < view or self.kept.newest[1] == digest)

    def _accept(self, view: int, digest: Digest) -> Persist:
        """Durable before it is said: a voter that forgets what it accepted could help decide two bodies."""
        self.kept.newest, self.kept.body = (view, digest), self.bodies[digest]
        return self._keep()

    def _say_vote(self, view: int, digest: Digest) -> list[Effect]:
        signed = self.notary.sign(Vote(self.round, view, "commit", digest))
        sends = [Send(peer, self._voted(view, signed)) for peer in self.others]
        return [*sends, *self._count(view, digest, signed)]

    def _count(self, view: int, digest: Digest, signed: SignedStatement) -> list[Effect]:
        tally = self._tally(view)
        first = tally.votes.get(signed.signer)
        if first is not None:
            return self._catch(first[1], signed)
        tally.votes[signed.signer] = (digest, signed)
        same = {peer: said.signature for peer, (accepted, said) in tally.votes.items() if accepted == digest}
        if len(same) < self.quorum:
            return []
        return self._decide(QuorumCertificate(self.round, view, "commit", digest, tuple(sorted(same.items()))))

    # ---- terms ---------------------------------------------------------------------------------------------

    def _leave_if_over(self) -> list[Effect]:
        """Close what a quorum would close (pre-vote), or where too few are left to decide (check-quorum)."""
        closed: dict[PeerId, int] = {}  # the last view that each voter is heard to have closed, or would
        wished: dict[PeerId, int] = {}
        for view in sorted(view for view in self.tallies if view >= self.view):
            tally = self.tallies[view]
            closed |= dict.fromkeys(tally.ballots, view)
            wished |= dict.fromkeys(tally.wishes | tally.ballots.keys(), view)
        last = _reached(wished, self.quorum)
        last = max(last, _reached(closed, len(self.vote_keys) - self.quorum + 1))
        return self._close(last) if self.votes and last >= self.view else []

    def _close(self, view: int) -> list[Effect]:
        """For good: no word of mine in it or before it any more, and one ballot for the next leader."""
        self._move(view + 1)
        self.kept.closed, self.kept.named = view, self.kept.newest
        return [self._keep(), *self._say_ballot(self.others), *self._see_if_i_lead(), *self._look(view + 1)]

    def _see_if_i_lead(self) -> list[Effect]:
        view = self.view
        if not self._is_my_turn(view):
            return []
        tally, election = self._tally(view), self._election(view)
        if tally.told or election is None:
            return []
        tally.told = True
        if self.has_proposed(view):  # before a restart: repeat it, or this view would pass in silence
            return self.propose(view, self.kept.body)
        if election.newest != NOTHING:
            lacking = BodyMissing(view=view, digest=election.newest[1])
            return self._go_on_with(election.newest[1]) or [self._report(lacking)]
        return [self._report(MayPropose(view=view))]

    def _named(self) -> set[Digest]:
        """The entry that I must take over."""
        election = self.tallies[self.view].election if self.view in self.tallies else None
        return {election.newest[1]} if election is not None and election.newest != NOTHING else set()

    def _go_on_with(self, digest: Digest) -> list[Effect]:
        body = self.bodies.get(digest)
        return self.propose(self.view, body) if body is not None and digest in self._named() else []

    def _election(self, view: int) -> LeaderElection | None:
        """What lets me lead: the first quorum that was heard, so that what the round was told stays true."""
        if view == 0:
            return LeaderElection((), NOTHING)
        tally = self._tally(view)
        heard = self._tally(view - 1).ballots
        if tally.election is None and len(heard) >= self.quorum:
            chosen = [heard[p] for p in sorted(heard)[: self.quorum]]
            newest = _newest(ballot for ballot, _ in chosen)
            tally.election = LeaderElection(tuple(signed for _, signed in chosen), newest)
        return tally.election

    def _say_ballot(self, peers: Iterable[PeerId]) -> list[Effect]:
        view = self.kept.closed
        mine = self._tally(view).ballots.get(self.me)
        if mine is None:
            ballot = ViewTimeout(
                self.round, view, *self.kept.named
            )  # not what I accepted since: the first word counts
            mine = self._tally(view).ballots[self.me] = (ballot, self.notary.sign(ballot))
        message = TimeoutMessage(self.round, self._attempt(view), self.trace, mine[1], None)
        return [Send(p, message) for p in peers]

    def _say_wish(self, peers: Iterable[PeerId]) -> list[Effect]:
        message = PreVote(self.round, self._attempt(self.view), self.trace, self.view)
        return [Send(p, message) for p in peers]

    # ---- small words ---------------------------------------------------------------------------------------

    def _move(self, view: int) -> None:
        self.view = view
        self._forget_but([self.kept.newest[1]])

    def _keep(self) -> Persist:
        return Persist(f"said/{self.round}/agreement", msgspec.msgpack.encode(self.kept))


def _newest(ballots: Iterable[ViewTimeout]) -> Entry:
    best = max((ballot.high_view, ballot.high_digest) for ballot in ballots)
    return best if best[0] >= 0 else NOTHING


def _binds_otherwise(newest: Entry, digest: Digest) -> bool:
    return newest != NOTHING and newest[1] != digest


def _reached(views: dict[PeerId, int], needed: int) -> int:
    """The last view that so many have reached; -1: none."""
    return sorted(views.values(), reverse=True)[needed - 1] if len(views) >= needed else -1


_KEPT = msgspec.msgpack.Decoder(PersistentTerm)
