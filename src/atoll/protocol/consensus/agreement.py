"""Agreement on one vertex body: two phases of votes, attempts that follow the clock, nothing decided twice.

The narrow door: the round calls `propose`, `approve` and `close_attempt`; the machine answers with the facts
`Judge` (is this body right?), `Free` (propose what you like), `Bound` (propose exactly this) and `Decided`.

Attempt k: its proposer sends a body; voters that find it right send prepare votes; a quorum of prepare votes is
a certificate; voters that hold it send commit votes; a quorum of commit votes decides. At the end of an
attempt's time voters sign Timeout(k, highest prepare certificate). A quorum of those lets the next proposer
speak, and it must re-propose the body of the highest certificate among them (Castro & Liskov 1999, section 4.4,
for one decision; Jolteon, arXiv 2106.10362, for the rule that only the timeouts' highest certificate binds).

Promises: no two bodies are decided for one round while fewer voters lie (or, for a majority quorum, crash with
amnesia) than two quorums share; every vote and timeout is durable before it is sent; the first statement per
slot counts, a different second one is reported as evidence. Never reads a clock: attempts end when told.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Fact, Keep, Report, Send
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Propose, TimedOut, Voted
from atoll.wire.messages.statements import Certificate, Proposed, Signed, Stage, Timeout, Vote

FUTURE_ATTEMPTS = 8  # votes are remembered for at most this many attempts ahead of mine: clocks differ by less


class Judge(Fact, frozen=True, kw_only=True):
    """A proposal that may be voted for, if its content is right: call `approve(digest)` when it is."""

    phase = "agree"
    attempt: int
    digest: Digest
    body: bytes


class Free(Fact, frozen=True, kw_only=True):
    """I am the proposer of this attempt and may propose any body."""

    phase = "agree"
    attempt: int


class Bound(Fact, frozen=True, kw_only=True):
    """I am the proposer of this attempt and must re-propose this body (None: I do not hold its bytes)."""

    phase = "agree"
    attempt: int
    digest: Digest


class Prepared(Fact, frozen=True, kw_only=True):
    phase = "agree"
    attempt: int
    digest: Digest


class Decided(Fact, frozen=True, kw_only=True):
    """Final. `body` is None if the certificate came before the bytes did."""

    phase = "agree"
    attempt: int
    digest: Digest
    body: bytes | None
    certificate: Certificate


class Equivocation(Fact, frozen=True, kw_only=True):
    """Two different statements by one signer for one slot: anyone can check both signatures."""

    phase = "agree"
    peer: PeerId
    first: Signed
    second: Signed


class Said(msgspec.Struct, array_like=True):
    """What this voter must remember across a crash: nothing in here may ever be said differently."""

    prepare: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    commit: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    proposed: dict[int, Digest] = msgspec.field(default_factory=dict[int, Digest])
    timed_out: int = -1  # every attempt up to this one is over for me
    high: Certificate | None = None  # the highest prepare certificate I have seen
    high_body: bytes | None = None  # its body, so that a restarted proposer can re-propose it


_SAID = msgspec.msgpack.Decoder(Said)


@dataclass
class Tally:
    """Statements heard in one attempt."""

    proposal: Propose | None = None
    proposed: Signed | None = None
    votes: dict[tuple[Stage, PeerId], tuple[Digest, Signed]] = field(
        default_factory=dict[tuple[Stage, PeerId], tuple[Digest, Signed]]
    )
    timeouts: dict[PeerId, tuple[Timeout, Signed]] = field(default_factory=dict[PeerId, tuple[Timeout, Signed]])
    told: bool = False  # the round knows that I may propose


class Agreement:
    """One voter's (or listener's) side of the agreement that closes one round."""

    def __init__(
        self,
        notary: Notary,
        round: int,
        trace: str,
        vote_keys: dict[PeerId, bytes],
        quorum: int,
        proposers: tuple[PeerId, ...],
        kept: bytes | None = None,
    ) -> None:
        assert 0 < quorum <= len(vote_keys) == len(proposers)
        self.notary, self.me, self.round, self.trace = notary, notary.me, round, trace
        self.vote_keys, self.quorum, self.proposers = vote_keys, quorum, proposers
        self.votes = self.me in vote_keys
        self.said = _SAID.decode(kept) if kept else Said()
        self.attempt = self.said.timed_out + 1
        self.tallies: dict[int, Tally] = {}
        self.bodies: dict[Digest, bytes] = {}
        self.proofs: dict[tuple[int, Digest], Certificate] = {}  # prepare certificates, by (attempt, digest)
        if self.said.high is not None:
            self.proofs[self.said.high.attempt, self.said.high.digest] = self.said.high
            if self.said.high_body is not None:
                self.bodies[self.said.high.digest] = self.said.high_body
        self.asked: set[Digest] = set()  # bodies that the round was asked to judge
        self.approved: set[Digest] = set()
        self.decided: Decided | None = None

    # ---- what the round calls ------------------------------------------------------------------------------

    def begin(self) -> list[Effect]:
        return self._see_if_i_propose()

    def proposer(self, attempt: int) -> PeerId:
        return self.proposers[attempt % len(self.proposers)]

    def propose(self, attempt: int, body: bytes) -> list[Effect]:
        """Put a body forward as the proposer of this attempt. Does nothing if I already did."""
        if self.decided or attempt != self.attempt or self.proposer(attempt) != self.me or not self.votes:
            return []
        if attempt in self.said.proposed and self.said.proposed[attempt] != vertex_id(body):
            return []  # said something else before a restart: silence for this slot
        tally, digest = self._tally(attempt), vertex_id(body)
        timeouts, high = self._justification(attempt)
        if attempt > 0 and (timeouts is None or (high is not None and high.digest != digest)):
            return []
        self.said.proposed[attempt] = digest
        self.bodies[digest] = body
        statement = self.notary.sign(Proposed(self.round, attempt, digest))
        message = Propose(self.round, attempt, self.trace, statement, body, timeouts or (), high)
        tally.proposal, tally.proposed = message, statement
        sends = [Send(peer, message) for peer in self.vote_keys if peer != self.me]
        self.approved.add(digest)
        self.asked.add(digest)
        return [self._keep(), *sends, *self._vote("prepare", attempt, digest)]

    def repropose(self, attempt: int) -> list[Effect]:
        """Propose the body that the timeouts bind me to, if I hold its bytes."""
        _, high = self._justification(attempt)
        body = self.bodies.get(high.digest) if high else None
        return self.propose(attempt, body) if body is not None else []

    def approve(self, digest: Digest) -> list[Effect]:
        """The round has recomputed everything in this body and found it right."""
        self.approved.add(digest)
        effects: list[Effect] = []
        for attempt, tally in sorted(self.tallies.items()):
            if tally.proposal is not None and vertex_id(tally.proposal.body) == digest:
                effects += self._vote("prepare", attempt, digest)
        return effects

    def learn_body(self, body: bytes) -> list[Effect]:
        """Bytes that arrived by another way; completes a decision whose certificate came first."""
        digest = vertex_id(body)
        self.bodies.setdefault(digest, body)
        if self.decided is not None and self.decided.digest == digest and self.decided.body is None:
            self.decided = replace(self.decided, body=body)
            return [Report(self.decided)]
        return []

    def close_attempt(self, attempt: int) -> list[Effect]:
        """The plan's time for this attempt is over: say so, once, and move on to the next."""
        if self.decided or attempt < self.attempt:
            return []
        self.attempt = attempt + 1
        if not self.votes or attempt <= self.said.timed_out:
            return self._see_if_i_propose()
        self.said.timed_out = attempt
        self._drop_finished()
        return [self._keep(), *self._say_timeout(attempt), *self._see_if_i_propose(), *self._look(attempt + 1)]

    def remind(self, to: PeerId | None = None) -> list[Effect]:
        """Repeat what I said for the current attempt: to one peer, or to those I have not heard from."""
        if not self.votes or self.decided is not None:
            return []
        effects: list[Effect] = []
        peers = [p for p in self.vote_keys if p != self.me and (to is None or p == to)]
        if self.said.timed_out >= 0 and self.attempt == self.said.timed_out + 1:
            heard = self._tally(self.said.timed_out).timeouts
            missing = [p for p in peers if p not in heard or to is not None]
            effects += self._say_timeout(self.said.timed_out, missing)
        tally = self._tally(self.attempt)
        stages: tuple[Stage, ...] = ("prepare", "commit")
        if tally.proposal is not None and self.proposer(self.attempt) == self.me:
            silent = [p for p in peers if ("prepare", p) not in tally.votes or to is not None]
            effects += [Send(p, tally.proposal) for p in silent]
        for stage in stages:
            mine = tally.votes.get((stage, self.me))
            if mine is not None:
                silent = [p for p in peers if (stage, p) not in tally.votes or to is not None]
                effects += [Send(p, self._voted(self.attempt, mine[1])) for p in silent]
        return effects

    # ---- messages ------------------------------------------------------------------------------------------

    def receive(self, sender: PeerId, message: Propose | Voted | TimedOut) -> list[Effect]:
        """Raises PeerFault if the sender broke the protocol; a stale message is silently nothing."""
        if self.decided is not None:
            return []
        match message:
            case Propose():
                return self._hear_proposal(message)
            case Voted():
                return self._hear_vote(message)
            case TimedOut():
                return self._hear_timeout(message)

    def _hear_proposal(self, message: Propose) -> list[Effect]:
        signed, attempt = message.statement, message.attempt
        proposed = self.notary.open(signed, Proposed, self.vote_keys.get(signed.signer))
        if (proposed.round, proposed.attempt) != (self.round, attempt) or not self._in_reach(attempt):
            return []
        if signed.signer != self.proposer(attempt) or vertex_id(message.body) != proposed.digest:
            raise PeerFault(signed.signer, f"proposed out of turn or other bytes in attempt {attempt}", signed.body)
        tally = self._tally(attempt)
        if tally.proposed is not None:
            if tally.proposed.body == signed.body:
                return []
            return [self._report(Equivocation(peer=signed.signer, first=tally.proposed, second=signed))]
        high = self._check_justification(message)
        tally.proposal, tally.proposed = message, signed
        self.bodies.setdefault(proposed.digest, message.body)
        effects: list[Effect] = self._raise_high(high) if high is not None else []
        if attempt > self.attempt:
            self.attempt = attempt  # a quorum has moved on: so do I
            effects += self._see_if_i_propose()
        return effects + self._look(attempt)

    def _hear_vote(self, message: Voted) -> list[Effect]:
        signed = message.statement
        vote = self.notary.open(signed, Vote, self.vote_keys.get(signed.signer))
        if vote.round != self.round or not self._in_reach(vote.attempt):
            return []
        return self._count(vote, signed)

    def _hear_timeout(self, message: TimedOut) -> list[Effect]:
        signed = message.statement
        timeout = self.notary.open(signed, Timeout, self.vote_keys.get(signed.signer))
        if timeout.round != self.round or not self._in_reach(timeout.attempt):
            return []
        effects: list[Effect] = []
        if timeout.high_attempt >= 0:
            self._check_claim(signed.signer, timeout, message.high)
            assert message.high is not None
            effects += self._raise_high(message.high)
        tally = self._tally(timeout.attempt)
        first = tally.timeouts.get(signed.signer)
        if first is not None:
            if first[1].body != signed.body:
                effects.append(self._report(Equivocation(peer=signed.signer, first=first[1], second=signed)))
            return effects
        tally.timeouts[signed.signer] = (timeout, signed)
        return effects + self._see_if_i_propose()

    # ---- voting --------------------------------------------------------------------------------------------

    def _look(self, attempt: int) -> list[Effect]:
        """Is there a proposal that I may vote for, or should have judged?"""
        tally = self._tally(attempt)
        if tally.proposal is None or self.decided is not None:
            return []
        body = tally.proposal.body
        digest = vertex_id(body)
        if digest in self.approved:
            return self._vote("prepare", attempt, digest)
        if digest in self.asked:
            return []
        self.asked.add(digest)
        return [self._report(Judge(attempt=attempt, digest=digest, body=body))]

    def _vote(self, stage: Stage, attempt: int, digest: Digest) -> list[Effect]:
        if not self.votes or attempt != self.attempt or attempt <= self.said.timed_out:
            return []
        slots = self.said.prepare if stage == "prepare" else self.said.commit
        if slots.get(attempt, digest) != digest:
            return []  # the first statement per slot counts, also across a restart
        slots[attempt] = digest
        vote = Vote(self.round, attempt, stage, digest)
        signed = self.notary.sign(vote)
        # durable before it is sent: a voter that forgets its vote could help decide two bodies
        sends = [Send(peer, self._voted(attempt, signed)) for peer in self.vote_keys if peer != self.me]
        return [self._keep(), *sends, *self._count(vote, signed)]

    def _count(self, vote: Vote, signed: Signed) -> list[Effect]:
        tally = self._tally(vote.attempt)
        slot: tuple[Stage, PeerId] = (vote.stage, signed.signer)
        first = tally.votes.get(slot)
        if first is not None:
            if first[0] != vote.digest:
                return [self._report(Equivocation(peer=signed.signer, first=first[1], second=signed))]
            return []
        tally.votes[slot] = (vote.digest, signed)
        same = {
            peer: signed.signature
            for (stage, peer), (digest, signed) in tally.votes.items()
            if stage == vote.stage and digest == vote.digest
        }
        if len(same) != self.quorum:
            return []
        votes = tuple(sorted(same.items()))
        certificate = Certificate(self.round, vote.attempt, vote.stage, vote.digest, votes)
        if vote.stage == "commit":
            return self._decide(certificate)
        prepared = self._report(Prepared(attempt=vote.attempt, digest=vote.digest))
        return [prepared, *self._raise_high(certificate), *self._vote("commit", vote.attempt, vote.digest)]

    def _decide(self, certificate: Certificate) -> list[Effect]:
        self.decided = Decided(
            round=self.round,
            trace=self.trace,
            attempt=certificate.attempt,
            digest=certificate.digest,
            body=self.bodies.get(certificate.digest),
            certificate=certificate,
        )
        return [Report(self.decided)]

    # ---- attempts ------------------------------------------------------------------------------------------

    def _see_if_i_propose(self) -> list[Effect]:
        attempt = self.attempt
        if self.decided or not self.votes or self.proposer(attempt) != self.me:
            return []
        tally = self._tally(attempt)
        timeouts, high = self._justification(attempt)
        if tally.told or (attempt > 0 and timeouts is None):
            return []
        tally.told = True
        if high is not None:
            return [self._report(Bound(attempt=attempt, digest=high.digest))]
        return [self._report(Free(attempt=attempt))]

    def _justification(self, attempt: int) -> tuple[tuple[Signed, ...] | None, Certificate | None]:
        """A quorum of timeouts of the attempt before, and the certificate among them that binds me."""
        if attempt == 0:
            return (), None
        heard = self._tally(attempt - 1).timeouts
        if len(heard) < self.quorum:
            return None, None
        chosen = sorted(heard)[: self.quorum]
        best = max((heard[p][0] for p in chosen), key=lambda t: t.high_attempt)
        signed = tuple(heard[p][1] for p in chosen)
        if best.high_attempt < 0:
            return signed, None
        return signed, self.proofs[best.high_attempt, best.high_digest]  # every claim was proven when heard

    def _check_justification(self, message: Propose) -> Certificate | None:
        """Raise PeerFault unless the timeouts allow this proposal. Returns the certificate that binds it."""
        attempt, who = message.attempt, message.statement.signer
        if attempt == 0:
            return None
        signers: set[PeerId] = set()
        best: Timeout | None = None
        for signed in message.timeouts[: len(self.vote_keys)]:
            timeout = self.notary.open(signed, Timeout, self.vote_keys.get(signed.signer))
            if (timeout.round, timeout.attempt) != (self.round, attempt - 1):
                raise PeerFault(who, "justified a proposal with timeouts of another attempt", signed.body)
            signers.add(signed.signer)
            if best is None or timeout.high_attempt > best.high_attempt:
                best = timeout
        if best is None or len(signers) < self.quorum:
            raise PeerFault(who, "proposed without a quorum of timeouts", message.statement.body)
        if best.high_attempt < 0:
            return None
        self._check_claim(who, best, message.high)
        if best.high_digest != vertex_id(message.body):
            raise PeerFault(who, "did not re-propose the highest certified body", message.statement.body)
        return message.high

    def _check_claim(self, who: PeerId, timeout: Timeout, proof: Certificate | None) -> None:
        claim = (timeout.high_attempt, timeout.high_digest)
        if claim in self.proofs:
            return
        fits = (
            proof is not None
            and proof.stage == "prepare"
            and (proof.round, proof.attempt, proof.digest) == (self.round, *claim)
            and proof.attempt <= timeout.attempt
            and self.notary.certificate_holds(proof, self.vote_keys, self.quorum)
        )
        if not fits:
            raise PeerFault(who, "claims a certificate that it does not show")

    def _raise_high(self, certificate: Certificate) -> list[Effect]:
        self.proofs[certificate.attempt, certificate.digest] = certificate
        if self.said.high is not None and self.said.high.attempt >= certificate.attempt:
            return []
        self.said.high = certificate
        self.said.high_body = self.bodies.get(certificate.digest)
        return [self._keep()]

    def _say_timeout(self, attempt: int, peers: list[PeerId] | None = None) -> list[Effect]:
        high = self.said.high
        tally = self._tally(attempt)
        mine = tally.timeouts.get(self.me)
        if mine is None:
            timeout = Timeout(
                self.round, attempt, high.attempt if high else -1, high.digest if high else ZERO_DIGEST
            )
            mine = (timeout, self.notary.sign(timeout))
            tally.timeouts[self.me] = mine
        proof = self.proofs.get((mine[0].high_attempt, mine[0].high_digest))
        message = TimedOut(self.round, attempt, self.trace, mine[1], proof)
        return [Send(p, message) for p in (self.vote_keys if peers is None else peers) if p != self.me]

    # ---- small words ---------------------------------------------------------------------------------------

    def _drop_finished(self) -> None:
        """A long pause passes through thousands of attempts; what they left behind changes nothing any more."""
        for slots in (self.said.prepare, self.said.commit, self.said.proposed, self.tallies):
            for attempt in [a for a in slots if a < self.said.timed_out]:
                del slots[attempt]

    def _tally(self, attempt: int) -> Tally:
        return self.tallies.setdefault(attempt, Tally())

    def _in_reach(self, attempt: int) -> bool:
        """Votes of long finished attempts change nothing; votes of far future ones are not remembered."""
        return self.attempt - 1 <= attempt <= self.attempt + FUTURE_ATTEMPTS or attempt in self.tallies

    def _voted(self, attempt: int, signed: Signed) -> Voted:
        return Voted(self.round, attempt, self.trace, signed)

    def _keep(self) -> Keep:
        return Keep(f"said/{self.round}/agreement", msgspec.msgpack.encode(self.said))

    def _report(self, fact: Fact) -> Report:
        return Report(replace(fact, round=self.round, trace=self.trace))
