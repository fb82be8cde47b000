"""What lets a proposer speak in a view, and what binds it: timeouts of the view before, with their certificates.

A quorum of `ViewTimeout`s must be shown with every proposal after view 0, and its body must be the one of the
highest
prepare certificate among them. Two quorums share an honest voter, and a voter that helped to decide a body claims a
certificate for it in every later timeout; so nothing else can be proposed any more. Promises: a claim is believed
only with the certificate that proves it, and binds a proposer only to a body that is here. Never holds more
certificates than the live timeouts speak of, and two.
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

Heard = dict[PeerId, tuple[ViewTimeout, SignedStatement]]  # the first timeout of everybody in one view


@dataclass(frozen=True)
class ViewChangeProof:
    """A quorum of timeouts, and the certificate among them that binds the next proposer."""

    timeouts: tuple[SignedStatement, ...]
    high: QuorumCertificate | None


class CertificateCache:
    """Prepare certificates of one round that were shown here and hold."""

    def __init__(self, notary: StatementSigner, round: int, vote_keys: dict[PeerId, bytes], quorum: int) -> None:
        self.notary, self.round, self.vote_keys, self.quorum = notary, round, vote_keys, quorum
        self.known: dict[tuple[int, Digest], QuorumCertificate] = {}

    def add(self, certificate: QuorumCertificate) -> None:
        self.known[certificate.view, certificate.digest] = certificate

    def of(self, who: PeerId, timeout: ViewTimeout, shown: QuorumCertificate | None) -> QuorumCertificate:
        """The certificate that this timeout claims: the one I know, or the one shown if it holds; never another."""
        claim = (timeout.high_view, timeout.high_digest)
        proof = self.known.get(claim) or self._proven(claim, shown)
        if proof is None:
            raise PeerFault(who, "claims a certificate that it does not show")
        return proof

    def under(self, who: PeerId, vote: Vote, shown: QuorumCertificate) -> QuorumCertificate:
        """The certificate that this vote to commit stands on, by the same rule."""
        claim = (vote.view, vote.digest)
        proof = self.known.get(claim) or self._proven(claim, shown)
        if proof is None or vote.stage != "commit":
            raise PeerFault(who, "proves a vote with what does not prove it")
        return proof

    def _proven(self, claim: tuple[int, Digest], shown: QuorumCertificate | None) -> QuorumCertificate | None:
        fits = (
            shown is not None
            and shown.stage == "prepare"
            and (shown.round, shown.view, shown.digest) == (self.round, *claim)
            and self.notary.certificate_holds(shown, self.vote_keys, self.quorum)
        )
        return shown if fits else None

    def choose(self, heard: Heard, bodies: Container[Digest]) -> ViewChangeProof | None:
        """None while fewer than a quorum have timed out whose certificates bind to nothing that is not here.

        Every claim in `heard` was proven when it was heard. Of honest voters whoever claims a certificate has its
        body to give; a liar may claim one whose body is gone, and is not needed.
        """
        most = max((t.high_view for t, _ in heard.values() if t.high_digest in bodies), default=-1)
        able = [p for p, (t, _) in heard.items() if t.high_view < max(most, 0) or t.high_digest in bodies]
        if len(able) < self.quorum:
            return None
        able.sort(key=lambda p: (-heard[p][0].high_view, p))
        chosen = [heard[p] for p in able[: self.quorum]]
        best = highest(timeout for timeout, _ in chosen)
        high = self.known[best.high_view, best.high_digest] if best is not None else None
        return ViewChangeProof(tuple(signed for _, signed in chosen), high)

    def check(self, who: PeerId, message: ProposalMessage, view: int) -> QuorumCertificate | None:
        """Raise PeerFault unless the timeouts allow this proposal. Returns the certificate that binds it."""
        if view == 0:
            return None
        best = highest(timeouts_shown(self.notary, who, message, (self.round, view), self.vote_keys, self.quorum))
        if best is None:
            return None
        proof = self.of(who, best, message.high)
        if best.high_digest != vertex_id(message.body):
            raise PeerFault(who, "did not re-propose the highest certified body", message.statement.body)
        return proof

    def forget_all_but(self, heard: Iterable[Heard], mine: Iterable[QuorumCertificate | None]) -> None:
        """Keep what live timeouts claim and what I may claim myself; whoever claims another shows it again."""
        live = {(t.high_view, t.high_digest) for view in heard for t, _ in view.values()}
        live.update((c.view, c.digest) for c in mine if c is not None)
        self.known = {claim: proof for claim, proof in self.known.items() if claim in live}


def timeouts_shown(
    notary: StatementSigner,
    who: PeerId,
    message: ProposalMessage,
    at: tuple[int, int],  # round and view of the proposal
    vote_keys: dict[PeerId, bytes],
    quorum: int,
) -> list[ViewTimeout]:
    """The timeouts of the view before that a proposal shows. Raises PeerFault unless they are a quorum's."""
    round, view = at
    timeouts: dict[PeerId, ViewTimeout] = {}
    for signed in message.timeouts[: len(vote_keys)]:
        timeout = notary.open(signed, ViewTimeout, vote_keys.get(signed.signer))
        if (timeout.round, timeout.view) != (round, view - 1):
            raise PeerFault(who, "justified a proposal with timeouts of another view", signed.body)
        timeouts.setdefault(signed.signer, timeout)
    if len(timeouts) < quorum:
        raise PeerFault(who, "proposed without a quorum of timeouts", message.statement.body)
    return list(timeouts.values())


def highest(timeouts: Iterable[ViewTimeout]) -> ViewTimeout | None:
    """The timeout whose certificate binds the next proposer; None if nobody among them holds one."""
    best = max(timeouts, key=lambda t: t.high_view)
    return best if best.high_view >= 0 else None
