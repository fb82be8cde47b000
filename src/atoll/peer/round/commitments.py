"""Commitment table of a round: commitments received, members still awaited, and double commitments.

Invariants:
- The first commitment of a peer counts; a second one is reported as evidence.
- A commitment that no body could carry is never stored.
- Only this attempt and the next two are stored.
Not responsible for: signing, deciding when sharing begins.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.draw import draw_below
from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import COMMITTEE_MAX
from atoll.base.machine import Broadcast, Effect, Send
from atoll.base.round_robin import round_robin
from atoll.peer.events import IncompatibleUpdateReceived
from atoll.peer.round.candidate import CommitmentCache
from atoll.peer.round.commitment_rules import commitment_flaw, parts_fit
from atoll.peer.round.context import RoundContext
from atoll.peer.round.topology_choice import topology_in
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import CommitmentRequest, UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment, SignedStatement

SHOWN_BY = 4  # voters of a large committee that send evidence to an owner: dozens can, one is enough
# peers asked at a time for another's commitment: nearly all receive from a peer that one alone cannot reach
ASKED_FOR_ANOTHERS = 2
AHEAD = 2  # attempts ahead with commitments stored: some clocks are faster


@dataclass(frozen=True)
class CommitmentEquivocation:
    """Two different commitments of one peer to one attempt."""

    first: SignedStatement
    second: SignedStatement


class CommitmentTable:
    def __init__(self, ground: RoundContext, notary: StatementSigner, gone: Callable[[PeerId], bool]) -> None:
        self.ground, self.plan, self.notary, self.me, self.gone = ground, ground.plan, notary, notary.me, gone
        self.hearers, self.speakers = self._audience()
        self.attempt = self.asks = 0
        self.heard: dict[int, CommitmentCache] = {}  # by attempt
        self.awaited: set[PeerId] = set()  # speakers with no commitment to this attempt yet
        # peers that committed to two updates in one attempt and no longer count
        self.two_faced: set[PeerId] = set()
        # peers that commit to another update than they are bound to; their rows are rejected
        self.refused: set[PeerId] = set()
        # (owner, author) of commitments to this attempt already sent to the owner
        self.shown: set[tuple[PeerId, PeerId]] = set()
        self.sought: set[PeerId] = set()  # authors requested from others since the last tick
        self.asked: str | None = None  # options by which this attempt's updates are reduced; None: not known yet
        self.elsewhere: set[PeerId] = (
            set()
        )  # peers with a caller that asked for other options; their rows are rejected

    # ---- what happens ------------------------------------------------------------------------------------

    def attempt_begins(self, attempt: int, trains: bool) -> None:
        """Start an attempt; `trains`: the local commitment is awaited as well."""
        self.attempt, self.shown, self.sought = attempt, set(), set()
        self.asked, self.elsewhere = None, set()
        self.heard = {a: c for a, c in self.heard.items() if a >= attempt}
        # a newcomer's first update has weight 0 and its trainer may still be starting, so it is not awaited
        mine = {self.me} if trains else set[PeerId]()
        self.awaited = (set(self.speakers) & self.settled | mine) - self.now.of.keys() - self.two_faced

    def say(self, commit: Commitment, signed: SignedStatement) -> list[Effect]:
        """Record the local commitment to this attempt and send it."""
        self.now.hear(self.me, commit, signed)
        self.awaited.discard(self.me)
        message = self._message(signed)
        return [Broadcast("commitments", message, tuple(p for p in self.hearers if p != self.me))]

    def hear(self, signed: SignedStatement) -> Commitment | CommitmentEquivocation | None:
        """Store a commitment; returns what is new in it, None if nothing is. PeerFault if it breaks a rule."""
        commit = self.notary.open(signed, Commitment, self.ground.vote_key_of.get(signed.signer))
        if commit.round != self.plan.round or not self.attempt <= commit.attempt <= self.attempt + AHEAD:
            return None
        before = self.in_attempt(commit.attempt).of.get(signed.signer)
        if before is not None and before[1].body == signed.body:
            return None  # repeated with every row, and checked when it first came
        self._check(signed, commit)
        if before is not None:  # the first commitment counts; a different one could follow another's reveal
            return CommitmentEquivocation(before[1], signed)
        if signed.signer in self.two_faced and self.ground.witnesses:
            return None
        self.heard.setdefault(commit.attempt, CommitmentCache()).hear(signed.signer, commit, signed)
        if commit.attempt == self.attempt:
            self.awaited.discard(signed.signer)
            self._note_way(signed.signer, commit)
        return commit

    def goes_by(self, asked: str) -> None:
        """Reduce the updates of this attempt by these options."""
        self.asked = asked
        for peer, (commit, _) in self.now.of.items():
            self._note_way(peer, commit)

    def _note_way(self, peer: PeerId, commit: Commitment) -> None:
        if self.asked is None or self.ground.ways is None or peer == self.me or not commit.parts:
            return
        if topology_in(commit.asked) != topology_in(self.asked):
            self.elsewhere.add(peer)

    def _check(self, signed: SignedStatement, commit: Commitment) -> None:
        if len(signed.body) + len(signed.signature) > self.plan.settings.signing.commit_bytes_max:
            raise PeerFault(signed.signer, f"its commitment has {len(signed.body)} bytes")
        if not parts_fit(self.ground, commit) or self.ground.topology is None:
            raise PeerFault(signed.signer, f"committed to {commit.parts} parts", signed.body)
        if (flaw := commitment_flaw(self.ground, signed.signer, commit)) is not None:
            raise PeerFault(signed.signer, f"its commitment {flaw}", signed.body)

    def waits_no_more(self, peer: PeerId) -> bool:
        """Mark a peer that committed twice; True if this attempt no longer waits for it.

        Where owners check each other, honest ones may combine different rows of it. Its rows of this attempt are
        still coming then, and there will be none in the next one.
        """
        self.two_faced.add(peer)
        if self.ground.witnesses:
            for commits in (c for attempt, c in self.heard.items() if attempt > self.attempt):
                commits.of.pop(peer, None)
                commits.giving.discard(peer)
            return False
        self.awaited.discard(peer)
        return True

    # ---- what is said again ------------------------------------------------------------------------------

    def repeat_to(self, peer: PeerId) -> list[Effect]:
        """Resend the local commitment to a peer; where members may lie it sends no row before that."""
        mine, hearers = self.now.of.get(self.me), self.ground.vote_key_of if self.plan.may_lie else self.hearers
        return [Send(peer, self._message(mine[1]))] if mine is not None and peer in hearers else []

    def ask(self, withheld: Iterable[PeerId] = ()) -> list[Effect]:
        """Request missing commitments from reachable peers, sending the local one along.

        Round-robin in a large swarm.

        `withheld`: peers that would receive a row in return.
        """
        known = self.now.of
        self.asks += 1
        self.sought = set()
        if self.me not in known:
            return []
        message = replace(self._message(known[self.me][1]), asks=True)
        silent = [p for p in self.speakers if p not in known and p != self.me and not self.gone(p)]
        asked = round_robin(silent, len(self.speakers), self.asks)
        more = [p for p in withheld if p not in known and p not in asked and not self.gone(p)]
        return [Send(p, message) for p in (*asked, *more)]

    def seek(self, names: Iterable[PeerId]) -> list[Effect]:
        """Request counted commitments of unreachable authors from peers that may have them."""
        lost = [p for p in sorted(names) if self.gone(p) and p not in self.sought]
        near = [p for p in self.speakers if p != self.me and not self.gone(p)]
        self.sought.update(lost)
        first = self.asks % max(1, len(near))
        asked = (near * 2)[first : first + ASKED_FOR_ANOTHERS]
        round, trace = self.plan.round, self.plan.trace
        return [
            Send(to, CommitmentRequest(round, self.attempt, trace, p)) for p in lost for to in dict.fromkeys(asked)
        ]

    def show_one(self, to: PeerId, name: PeerId) -> list[Effect]:
        """Send another's commitment to a member that cannot reach its author, once."""
        known = self.now.of.get(name)
        if known is None or to not in self.hearers or (to, name) in self.shown:
            return []
        self.shown.add((to, name))
        return [Send(to, self._message(known[1]))]

    def show(self, owner: PeerId, names: Iterable[PeerId]) -> list[Effect]:
        """Send commitments, once each, to an owner that received different ones: both together prove the double
        commitment.
        """
        if self.me not in shown_by(owner, self.plan.committee, self.plan.head, self.attempt):
            return []
        known = self.now.of
        others = [p for p in names if p in known and p != self.me and (owner, p) not in self.shown]
        self.shown.update((owner, p) for p in others)
        return [Send(owner, self._message(known[p][1])) for p in others]

    def _message(self, signed: SignedStatement) -> UpdateCommitmentMessage:
        return UpdateCommitmentMessage(self.plan.round, self.attempt, self.plan.trace, signed)

    # ---- what follows ------------------------------------------------------------------------------------

    @property
    def now(self) -> CommitmentCache:
        """Commitments to this attempt."""
        found = self.heard.get(self.attempt)
        if found is None:
            found = self.heard[self.attempt] = CommitmentCache()
        return found

    @property
    def settled(self) -> set[PeerId]:
        """Trainers that the round waits for."""
        return {m.peer for m in self.plan.trainers if m.standing == "member"}

    def in_attempt(self, attempt: int) -> CommitmentCache:
        return self.heard.get(attempt) or CommitmentCache()

    def commit_of(self, peer: PeerId) -> Commitment | None:
        known = self.now.of.get(peer)
        return known[0] if known is not None else None

    def reduced_of(self, peer: PeerId) -> Commitment | None:
        """The commitment of a peer with an update that can be combined with those of this attempt."""
        return None if peer in self.elsewhere else self.commit_of(peer)

    def other_calls(self, news: Iterable[PeerId]) -> list[IncompatibleUpdateReceived]:
        """Reports of updates with another length or form than the local one, where callers choose these.

        As many members as may lie could do that forever. That few are left out of the sums without a report.
        """
        commits, mine = self.now, self.commit_of(self.me)
        if mine is None or not mine.parts:
            return []

        def others(among: Iterable[PeerId]) -> list[tuple[PeerId, Commitment]]:
            given = ((p, commits.of[p][0]) for p in among if p in commits.giving)
            return [(p, c) for p, c in given if (c.values, c.asked) != (mine.values, mine.asked)]

        if not others(news) or len(others(commits.giving)) <= self.ground.liars:
            return []
        return [
            IncompatibleUpdateReceived(
                peer=p, values=c.values, asked=c.asked, my_values=mine.values, my_asked=mine.asked
            )
            for p, c in others(sorted(commits.giving))
        ]

    def awaits(self, part: int, names: Container[PeerId], among: Iterable[PeerId] | None) -> bool:
        """True while a row of this part may still come from an unlisted peer (of `among`).

        Stops at the first one.
        """
        commits = self.now
        unwaited = self.two_faced if not self.ground.witnesses else ()
        for peer in commits.giving if among is None else among:
            if peer in names or peer in self.refused or (peer != self.me and (peer in unwaited or self.gone(peer))):
                continue
            known = commits.of.get(peer)
            if known is not None and known[0].parts > part:
                return True
            if known is None and peer in self.plan.givers:
                return True  # in a large swarm a row may be forwarded without its commitment
        return False

    def filled(self) -> int | None:
        """Parts of the longest update; None while a reachable trainer has not committed.

        0 where callers asked for two topologies: they wait for rows by different plans, and all were notified.
        """
        if self.elsewhere:
            return 0
        commits, trainers = self.now, self.plan.trainers
        if len(trainers) > COMMITTEE_MAX or len(commits.of) < min(self.plan.quorum, len(trainers)):
            return None  # with too few commitments the local peer itself may be cut off
        if not all(m.peer in commits.of or self.gone(m.peer) for m in trainers):
            return None
        return max((commits.of[p][0].parts for p in commits.giving), default=0)

    def _audience(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """(receivers of the local commitment, peers that send theirs here).

        All members in a small swarm, except that clients cannot reach each other. In a large one commitments go to
        owners and voters. Those of first owners and their witnesses go to all members, since no row goes to an
        owner that has not committed. Any other peer that wants a row is asked for its commitment then.
        """
        trainers, givers = tuple(m.peer for m in self.plan.members if m.may_train), self.plan.givers
        if len(trainers) <= COMMITTEE_MAX:
            heard = self.plan.voters if self.me not in self.plan.voters else trainers
            return heard, tuple(p for p in heard if p in givers)
        combining = 1 + self.ground.witnesses
        first = {owner for owners in self.ground.owners for owner in owners[:combining]}
        concerned = {o for owners in self.ground.owners for o in owners} | set(self.plan.committee)
        hearers = trainers if self.me in first else tuple(sorted(concerned))
        speakers = trainers if self.me in concerned else tuple(sorted(first))
        return hearers, tuple(p for p in speakers if p in givers)


def shown_by(owner: PeerId, committee: tuple[PeerId, ...], head: Digest, attempt: int) -> tuple[PeerId, ...]:
    """Voters that send an owner commitments that it received differently: the committee, or a drawn few if it is
    large.

    Only voters dispute results. One double commitment would otherwise make all voters send all commitments to all
    owners, a cubic number of messages. One owner that can prove it is enough, since all receive the proof.
    """
    if len(committee) <= COMMITTEE_MAX:
        return committee
    first = draw_below(head, f"{owner} is shown, {attempt}", len(committee))
    return (committee * 2)[first : first + SHOWN_BY]
