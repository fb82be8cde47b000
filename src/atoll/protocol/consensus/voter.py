"""What every machine behind the door of agreement has: who votes, whose turn it is, what was caught and decided.

`Agreement` and `RaftRound` add the rules by which they vote; nothing here ever makes a vote or counts one.
Promises: of a signer's contradicting words one pair is reported, once; a decision that came before its body is
reported again when that arrives.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Fact, Report
from atoll.protocol.consensus.facts import Decided, Equivocation
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import Notary
from atoll.wire.evidence import contradiction
from atoll.wire.messages.round import Voted
from atoll.wire.messages.statements import Certificate, Signed

ATTEMPTS_AHEAD = 2  # words are remembered for the views of this many attempts ahead: clocks differ by less


class Voter:
    """One voter (or listener) of one round."""

    def __init__(
        self,
        notary: Notary,
        round: int,
        trace: str,
        vote_keys: dict[PeerId, bytes],
        quorum: int,
        proposers: tuple[PeerId, ...],
    ) -> None:
        assert 0 < quorum <= len(vote_keys) == len(proposers)
        self.notary, self.me, self.round, self.trace = notary, notary.me, round, trace
        self.vote_keys, self.quorum, self.proposers = vote_keys, quorum, proposers
        self.votes = vote_keys.get(self.me) == notary.signer.vote_key  # not yet with a session that is not agreed
        self.bodies: dict[Digest, bytes] = {}
        self.asked: set[Digest] = set()  # bodies that the round was asked to judge
        self.approved: set[Digest] = set()
        self.caught: set[PeerId] = set()  # signers whose contradiction was reported: one pair says it all
        self.decided: Decided | None = None
        self.over = False  # decided, here or elsewhere: nothing is said any more

    def proposer(self, view: int) -> PeerId:
        """Everybody in turn within an attempt, and each attempt begins with another one."""
        return self.proposers[(view + self._attempt(view)) % len(self.proposers)]

    def learn_body(self, body: bytes) -> list[Effect]:
        """Bytes that arrived by another way; completes a decision whose certificate came first."""
        digest = vertex_id(body)
        self._hold(digest, body)
        if self.decided is not None and self.decided.digest == digest and self.decided.body is None:
            self.decided = replace(self.decided, body=body)
            return [Report(self.decided)]
        return []

    def stop(self) -> None:
        """The round's vertex came from somebody else: there is nothing left to agree on."""
        self.over = True

    def _decide(self, certificate: Certificate) -> list[Effect]:
        self.over = True
        self.decided = Decided(
            round=self.round,
            trace=self.trace,
            view=certificate.view,
            digest=certificate.digest,
            body=self.bodies.get(certificate.digest),
            certificate=certificate,
        )
        return [Report(self.decided)]

    def _hold(self, digest: Digest, body: bytes) -> None:
        self.bodies.setdefault(digest, body)

    def _voted(self, view: int, signed: Signed) -> Voted:
        return Voted(self.round, self._attempt(view), self.trace, signed)

    def _attempt(self, view: int) -> int:
        return view // len(self.proposers)

    def _catch(self, first: Signed, second: Signed) -> list[Effect]:
        if first.signer in self.caught:
            return []
        self.caught.add(first.signer)
        evidence = contradiction(self.notary.run, self.vote_keys[first.signer], first, second)
        return [self._report(Equivocation(peer=first.signer, evidence=evidence))]

    def _report(self, fact: Fact) -> Report:
        return Report(replace(fact, round=self.round, trace=self.trace))
