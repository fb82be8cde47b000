"""Who committed to what in a round, whose word is still waited for, and who said two different ones.

Promises: the first word counts, a second one is shown as what it is; a commitment that no body could carry is never
remembered; of attempts, this one and the next two are held. Never signs, never decides when sharing begins.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.draw import draw_below
from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import COMMITTEE_MAX
from atoll.base.machine import Effect, Send
from atoll.base.round_robin import in_turn
from atoll.peer.events import IncompatibleCall
from atoll.peer.round.candidate import CommitmentCache
from atoll.peer.round.commitment_rules import (
    claims_right,
    commit_flaw,
    draws_flaw,
    late_right,
    parts_fit,
    weighs_right,
)
from atoll.peer.round.context import RoundContext
from atoll.peer.round.topology_choice import topology_in
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import CommitAnnouncement, CommitRequest
from atoll.wire.messages.statements import Commitment, SignedStatement

SHOWN_BY = 4  # of a large committee, to each owner: one of dozens that can prove it is enough, 82 % of them can
ASKED_FOR_ANOTHERS = 2  # at a time: nearly everybody hears whom I alone do not hear
AHEAD = 2  # attempts: their commitments come from peers whose clock is faster


@dataclass(frozen=True)
class DoubleCommit:
    """Two different commitments of one peer to one attempt."""

    first: SignedStatement
    second: SignedStatement


class CommitmentTable:
    def __init__(self, ground: RoundContext, notary: StatementSigner, gone: Callable[[PeerId], bool]) -> None:
        self.ground, self.plan, self.notary, self.me, self.gone = ground, ground.plan, notary, notary.me, gone
        self.hearers, self.speakers = self._audience()
        self.attempt = self.asks = 0
        self.heard: dict[int, CommitmentCache] = {}  # by attempt
        self.awaited: set[PeerId] = set()  # speakers whose commitment to this attempt I have not heard
        self.two_faced: set[PeerId] = set()  # who committed to two updates in one attempt: it counts no more
        self.refused: set[PeerId] = set()  # who gives another update than it was bound to: of these no row is taken
        self.shown: set[tuple[PeerId, PeerId]] = set()  # (owner, whose commitment to this attempt I showed it)
        self.sought: set[PeerId] = set()  # whose I asked others for since the last nudge
        self.asked: str | None = None  # for this way this attempt's updates are reduced; None: not known yet
        self.elsewhere: set[PeerId] = set()  # whose caller asked for another one: of these no row is taken

    # ---- what happens --------------------------------------------------------------------------------------

    def attempt_begins(self, attempt: int, trains: bool) -> None:
        """`trains`: my own commitment is waited for, too."""
        self.attempt, self.shown, self.sought = attempt, set(), set()
        self.asked, self.elsewhere = None, set()
        self.heard = {a: c for a, c in self.heard.items() if a >= attempt}
        # a newcomer's first update moves nothing: nobody waits for it, its trainer may still be starting
        mine = {self.me} if trains else set[PeerId]()
        self.awaited = (set(self.speakers) & self.settled | mine) - self.now.of.keys() - self.two_faced

    def say(self, commit: Commitment, signed: SignedStatement) -> list[Effect]:
        """My own, to this attempt."""
        self.now.hear(self.me, commit, signed)
        self.awaited.discard(self.me)
        message = self._message(signed)
        return [Send(p, message) for p in self.hearers if p != self.me]

    def hear(self, signed: SignedStatement) -> Commitment | DoubleCommit | None:
        """What is new in it; None if nothing is. PeerFault for what nobody may commit to."""
        commit = self.notary.open(signed, Commitment, self.ground.vote_key_of.get(signed.signer))
        if commit.round != self.plan.round or not self.attempt <= commit.attempt <= self.attempt + AHEAD:
            return None
        before = self.in_attempt(commit.attempt).of.get(signed.signer)
        if before is not None and before[1].body == signed.body:
            return None  # it comes with every row, and was looked at when it came first
        self._check(signed, commit)
        if before is not None:  # the first commitment counts; a different one could follow another's reveal
            return DoubleCommit(before[1], signed)
        if signed.signer in self.two_faced and self.ground.witnesses:
            return None
        self.heard.setdefault(commit.attempt, CommitmentCache()).hear(signed.signer, commit, signed)
        if commit.attempt == self.attempt:
            self.awaited.discard(signed.signer)
            self._note_way(signed.signer, commit)
        return commit

    def goes_by(self, asked: str) -> None:
        """The updates of this attempt are reduced as this asks for."""
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
        flaw = commit_flaw(commit)
        if flaw is not None:
            raise PeerFault(signed.signer, f"its commitment {flaw}", signed.body)
        if not weighs_right(self.ground, signed.signer, commit):
            raise PeerFault(signed.signer, "claims a weight that is not its own", signed.body)
        if not claims_right(self.ground, commit):
            raise PeerFault(signed.signer, "does not say how it trained", signed.body)
        flaw = draws_flaw(self.ground, signed.signer, commit)
        if flaw is not None:
            raise PeerFault(signed.signer, f"its commitment {flaw}", signed.body)
        if not late_right(self.ground, signed.signer, commit):
            raise PeerFault(signed.signer, "claims late work that it cannot have", signed.body)

    def waits_no_more(self, peer: PeerId) -> bool:
        """It committed twice. What came of it counts. True if this attempt waits for it no more.

        Where owners watch each other honest ones make different sums of it: there its rows of this attempt are on
        their way, and there will be none in the next one.
        """
        self.two_faced.add(peer)
        if self.ground.witnesses:
            for commits in (c for attempt, c in self.heard.items() if attempt > self.attempt):
                commits.of.pop(peer, None)
                commits.giving.discard(peer)
            return False
        self.awaited.discard(peer)
        return True

    # ---- what is said again --------------------------------------------------------------------------------

    def repeat_to(self, peer: PeerId) -> list[Effect]:
        """It may not have heard mine; where members may lie it shows me no row before that."""
        mine, hearers = self.now.of.get(self.me), self.ground.vote_key_of if self.plan.may_lie else self.hearers
        return [Send(peer, self._message(mine[1]))] if mine is not None and peer in hearers else []

    def ask(self, withheld: Iterable[PeerId] = ()) -> list[Effect]:
        """Whom I could hear, and did not, with my own word; in a large swarm those whose turn it is to be asked.
        `withheld`: who would be shown a row for it.
        """
        known = self.now.of
        self.asks += 1
        self.sought = set()
        if self.me not in known:
            return []
        message = replace(self._message(known[self.me][1]), asks=True)
        silent = [p for p in self.speakers if p not in known and p != self.me and not self.gone(p)]
        asked = in_turn(silent, len(self.speakers), self.asks)
        more = [p for p in withheld if p not in known and p not in asked and not self.gone(p)]
        return [Send(p, message) for p in (*asked, *more)]

    def seek(self, names: Iterable[PeerId]) -> list[Effect]:
        """These count, I do not hear them, and have not heard what they committed to: somebody else has."""
        lost = [p for p in sorted(names) if self.gone(p) and p not in self.sought]
        near = [p for p in self.speakers if p != self.me and not self.gone(p)]
        self.sought.update(lost)
        first = self.asks % max(1, len(near))
        asked = (near * 2)[first : first + ASKED_FOR_ANOTHERS]
        round, trace = self.plan.round, self.plan.trace
        return [Send(to, CommitRequest(round, self.attempt, trace, p)) for p in lost for to in dict.fromkeys(asked)]

    def show_one(self, to: PeerId, name: PeerId) -> list[Effect]:
        """Once, to a member that does not hear its author."""
        known = self.now.of.get(name)
        if known is None or to not in self.hearers or (to, name) in self.shown:
            return []
        self.shown.add((to, name))
        return [Send(to, self._message(known[1]))]

    def show(self, owner: PeerId, names: Iterable[PeerId]) -> list[Effect]:
        """The words of these others, once each, to an owner that heard another word of one of them: together we can
        prove it."""
        if self.me not in shown_by(owner, self.plan.committee, self.plan.head, self.attempt):
            return []
        known = self.now.of
        others = [p for p in names if p in known and p != self.me and (owner, p) not in self.shown]
        self.shown.update((owner, p) for p in others)
        return [Send(owner, self._message(known[p][1])) for p in others]

    def _message(self, signed: SignedStatement) -> CommitAnnouncement:
        return CommitAnnouncement(self.plan.round, self.attempt, self.plan.trace, signed)

    # ---- what follows --------------------------------------------------------------------------------------

    @property
    def now(self) -> CommitmentCache:
        """To this attempt."""
        found = self.heard.get(self.attempt)
        if found is None:
            found = self.heard[self.attempt] = CommitmentCache()
        return found

    @property
    def settled(self) -> set[PeerId]:
        """Trainers that are waited for."""
        return {m.peer for m in self.plan.trainers if m.standing == "member"}

    def in_attempt(self, attempt: int) -> CommitmentCache:
        return self.heard.get(attempt) or CommitmentCache()

    def commit_of(self, peer: PeerId) -> Commitment | None:
        known = self.now.of.get(peer)
        return known[0] if known is not None else None

    def reduced_of(self, peer: PeerId) -> Commitment | None:
        """The same, if its update can be reduced with those of this attempt."""
        return None if peer in self.elsewhere else self.commit_of(peer)

    def other_calls(self, news: Iterable[PeerId]) -> list[IncompatibleCall]:
        """Whose update is of another length or form than mine: where callers choose these, that is a mistake.

        As many as may lie could say so for ever. So few are left out of the sums, and nobody else is disturbed.
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
            IncompatibleCall(peer=p, values=c.values, asked=c.asked, my_values=mine.values, my_asked=mine.asked)
            for p, c in others(sorted(commits.giving))
        ]

    def awaits(self, part: int, names: Container[PeerId], among: Iterable[PeerId] | None) -> bool:
        """True while somebody (of these) whose row of this part may still come is not named. Stops at the first."""
        commits = self.now
        unwaited = self.two_faced if not self.ground.witnesses else ()
        for peer in commits.giving if among is None else among:
            if peer in names or peer in self.refused or (peer != self.me and (peer in unwaited or self.gone(peer))):
                continue
            known = commits.of.get(peer)
            if known is not None and known[0].parts > part:
                return True
            if known is None and peer in self.plan.givers:
                return True  # in a large swarm I do not hear the commitments of everybody whose row I hand on
        return False

    def filled(self) -> int | None:
        """Parts of the longest update; None while somebody I could hear from has not said what it has. None at all
        where callers asked for two ways: they wait for rows by different plans, and all were told."""
        if self.elsewhere:
            return 0
        commits, trainers = self.now, self.plan.trainers
        if len(trainers) > COMMITTEE_MAX or len(commits.of) < min(self.plan.quorum, len(trainers)):
            return None  # whoever hears too few may be the one who is cut off
        if not all(m.peer in commits.of or self.gone(m.peer) for m in trainers):
            return None
        return max((commits.of[p][0].parts for p in commits.giving), default=0)

    def _audience(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...]]:
        """(who hears my commitment, whose commitment I hear).

        Everybody in a small swarm, but that clients cannot hear each other. In a large one a commitment goes to
        owners and voters, who need it, and those of first owners and their witnesses go to everybody, since nobody
        reveals a part to an owner that has not committed. Whoever else wants a row is asked for its word then.
        """
        trainers, givers = tuple(m.peer for m in self.plan.members if m.trains), self.plan.givers
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
    """Who shows an owner what it heard otherwise than that owner: the whole committee; of a large one a few, drawn.

    Only who votes doubts answers. One member that commits twice would else have all others show all words to all
    owners: the cube of their number in messages. One owner that can prove it is enough: all are told the proof.
    """
    if len(committee) <= COMMITTEE_MAX:
        return committee
    first = draw_below(head, f"{owner} is shown, {attempt}", len(committee))
    return (committee * 2)[first : first + SHOWN_BY]
