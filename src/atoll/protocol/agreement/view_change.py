"""View-change proof: the timeout quorum that permits a proposal, and its highest prepare certificate.

Every proposal after view 0 carries a quorum of `ViewTimeout`s of the view before. Its body must be the body of the
highest prepare certificate among them. Two quorums share an honest voter. A voter that helped to decide a body
claims a certificate for it in every later timeout, so no other body can be proposed any more.
Invariants:
- A claim counts only with the certificate that proves it.
- A claim binds a proposer only to a body that is here.
- At most two certificates are held beside those that live timeouts claim.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.wire.codec import vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage
from atoll.wire.messages.statements import QuorumCertificate, SignedStatement, ViewTimeout, Vote

Heard = dict[PeerId, tuple[ViewTimeout, SignedStatement]]  # first timeout of each voter in one view


@dataclass(frozen=True)
class ViewChangeProof:
    """A quorum of timeouts, and the certificate among them that binds the next proposer."""

    timeouts: tuple[SignedStatement, ...]
    high: QuorumCertificate | None


class CertificateCache:
    """Verified prepare certificates of one round."""

    def __init__(self, notary: StatementSigner, round: int, vote_keys: dict[PeerId, bytes], quorum: int) -> None:
        self.notary, self.round, self.vote_keys, self.quorum = notary, round, vote_keys, quorum
        self.known: dict[tuple[int, Digest], QuorumCertificate] = {}

    def add(self, certificate: QuorumCertificate) -> None:
        self.known[certificate.view, certificate.digest] = certificate

    def for_timeout(self, who: PeerId, timeout: ViewTimeout, shown: QuorumCertificate | None) -> QuorumCertificate:
        """The certificate that this timeout claims: known already, or shown and valid. Else raises PeerFault."""
        claim = (timeout.high_view, timeout.high_digest)
        proof = self.known.get(claim) or self._verified(claim, shown)
        if proof is None:
            raise PeerFault(who, "timeout claims a certificate without a valid one attached")
        return proof

    def for_vote(self, who: PeerId, vote: Vote, shown: QuorumCertificate) -> QuorumCertificate:
        """The certificate under this commit vote: already known, or shown and valid. Raises PeerFault otherwise."""
        claim = (vote.view, vote.digest)
        proof = self.known.get(claim) or self._verified(claim, shown)
        if proof is None or vote.stage != "commit":
            raise PeerFault(who, "vote carries a certificate that does not prove it")
        return proof

    def _verified(self, claim: tuple[int, Digest], shown: QuorumCertificate | None) -> QuorumCertificate | None:
        fits = (
            shown is not None
            and shown.stage == "prepare"
            and (shown.round, shown.view, shown.digest) == (self.round, *claim)
            and self.notary.certificate_holds(shown, self.vote_keys, self.quorum)
        )
        return shown if fits else None

    def choose_proof(self, heard: Heard, bodies: Container[Digest]) -> ViewChangeProof | None:
        """Choose a quorum of timeouts. None while fewer than a quorum claim no certificate with a missing body.

        Every claim in `heard` was proven on receipt. An honest voter that claims a certificate can serve its body.
        A liar may claim a certificate without a body; its timeout is not needed.
        """
        most = max((t.high_view for t, _ in heard.values() if t.high_digest in bodies), default=-1)
        able = [p for p, (t, _) in heard.items() if t.high_view < max(most, 0) or t.high_digest in bodies]
        if len(able) < self.quorum:
            return None
        able.sort(key=lambda p: (-heard[p][0].high_view, p))
        chosen = [heard[p] for p in able[: self.quorum]]
        best = highest_timeout(timeout for timeout, _ in chosen)
        high = self.known[best.high_view, best.high_digest] if best is not None else None
        return ViewChangeProof(tuple(signed for _, signed in chosen), high)

    def check_proposal(self, who: PeerId, message: ProposalMessage, view: int) -> QuorumCertificate | None:
        """Return the certificate that binds this proposal, or None. Raises PeerFault if its timeouts forbid it."""
        if view == 0:
            return None
        best = highest_timeout(
            open_timeouts(self.notary, who, message, (self.round, view), self.vote_keys, self.quorum)
        )
        if best is None:
            return None
        proof = self.for_timeout(who, best, message.high)
        if best.high_digest != vertex_id(message.body):
            raise PeerFault(who, "proposal is not the highest certified body", message.statement.body)
        return proof

    def prune(self, heard: Iterable[Heard], mine: Iterable[QuorumCertificate | None]) -> None:
        """Keep only certificates that live timeouts or the local voter claim. Other claims show theirs again."""
        live = {(t.high_view, t.high_digest) for view in heard for t, _ in view.values()}
        live.update((c.view, c.digest) for c in mine if c is not None)
        self.known = {claim: proof for claim, proof in self.known.items() if claim in live}


def open_timeouts(
    notary: StatementSigner,
    who: PeerId,
    message: ProposalMessage,
    at: tuple[int, int],  # round and view of the proposal
    vote_keys: dict[PeerId, bytes],
    quorum: int,
) -> list[ViewTimeout]:
    """The verified timeouts of the previous view in this proposal. Raises PeerFault if they are no quorum."""
    round, view = at
    timeouts: dict[PeerId, ViewTimeout] = {}
    for signed in message.timeouts[: len(vote_keys)]:
        timeout = notary.open(signed, ViewTimeout, vote_keys.get(signed.signer))
        if (timeout.round, timeout.view) != (round, view - 1):
            raise PeerFault(who, "proposal carries a timeout of another view", signed.body)
        timeouts.setdefault(signed.signer, timeout)
    if len(timeouts) < quorum:
        raise PeerFault(who, "proposal lacks a quorum of timeouts", message.statement.body)
    return list(timeouts.values())


def highest_timeout(timeouts: Iterable[ViewTimeout]) -> ViewTimeout | None:
    """The timeout with the highest certificate, which binds the next proposer; None if none claims one."""
    best = max(timeouts, key=lambda t: t.high_view)
    return best if best.high_view >= 0 else None
