"""Signed envelopes: signing of statements, and verification of signed ones.

The signature covers a domain, the run and the exact bytes, so a statement is valid in one run only. It is verified
with the signer's vote key in the agreed membership; statements of other signers are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import OPENED_BYTES_MAX
from atoll.crypto.signer import SignatureVerifier, Signer
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.statements import BaseStatement, QuorumCertificate, SignedStatement, Vote

OPENED_MAX = 2048  # results, commitments and votes of a round, received alone and again inside the body
DOMAIN = b"atoll/statement/1\0"
DOMAIN_SECRET = b"atoll/twins/secret/1\0"

S = TypeVar("S", bound=BaseStatement)


class VerifiedCache:
    """Cache of recently verified statements, since the same statement often arrives several times.

    A result holds for every reader of the same run, so all peers of a simulation may share one cache.
    """

    def __init__(self, most: int = OPENED_MAX, bytes_max: int = OPENED_BYTES_MAX) -> None:
        """`most`: statements held. `bytes_max`: longest cached statement; longer ones are verified each time."""
        self.most, self.bytes_max = most, bytes_max
        self._statements: OrderedDict[tuple[SignedStatement, bytes], BaseStatement] = OrderedDict()

    def __contains__(self, signed: tuple[SignedStatement, bytes]) -> bool:
        return signed in self._statements

    def get(self, signed: SignedStatement, vote_key: bytes) -> BaseStatement | None:
        return self._statements.get((signed, vote_key))

    def add(self, signed: SignedStatement, vote_key: bytes, statement: BaseStatement) -> None:
        if len(signed.body) <= self.bytes_max:
            self._statements[signed, vote_key] = statement
        if len(self._statements) > self.most:
            self._statements.popitem(last=False)


class StatementSigner:
    """Signer of the local peer and verifier of all others in one run."""

    def __init__(self, run: Digest, signer: Signer, verifier: SignatureVerifier) -> None:
        self.run, self.signer, self.verifier = run, signer, verifier
        self.me = signer.peer
        self.opened = VerifiedCache()

    def sign(self, statement: BaseStatement) -> SignedStatement:
        body = encode(statement)
        return SignedStatement(self.me, body, self.signer.sign(signed_bytes(self.run, body)))

    def secret(self, round: int) -> bytes:
        """Secret of this round, 32 bytes, equal at every call and unknown to other peers."""
        return self.signer.secret(DOMAIN_SECRET + self.run + round.to_bytes(8, "big"))

    def open(self, signed: SignedStatement, kind: type[S], vote_key: bytes | None) -> S:
        """Return the statement inside after verifying its signature.

        Raises PeerFault without a peer: the signer field is unproven, so only the sender can be at fault.
        """
        unnamed = PeerId("")
        if vote_key is not None and isinstance(known := self.opened.get(signed, vote_key), kind):
            return known
        statement = decode_statement(signed.body, unnamed)
        if not isinstance(statement, kind):
            raise PeerFault(unnamed, f"{type(statement).__name__} in place of {kind.__name__}")
        if vote_key is None:
            raise PeerFault(unnamed, f"{kind.__name__} by {signed.signer}, which has no vote key here")
        if not self._holds(signed, vote_key):
            raise PeerFault(unnamed, f"{kind.__name__} that {signed.signer} did not sign", signed.body)
        self.opened.add(signed, vote_key, statement)
        return statement

    def certificate_holds(
        self, certificate: QuorumCertificate, vote_keys: dict[PeerId, bytes], quorum: int
    ) -> bool:
        """Whether a quorum of distinct voters signed exactly this vote. Never raises.

        Votes in the cache of verified statements are not verified again.
        """
        voters = {peer for peer, _ in certificate.votes}
        if len(voters) != len(certificate.votes) or len(voters) < quorum or not voters <= vote_keys.keys():
            return False
        vote = Vote(certificate.round, certificate.view, certificate.stage, certificate.digest)
        body = encode(vote)
        signed = [
            (SignedStatement(peer, body, signature), vote_keys[peer]) for peer, signature in certificate.votes
        ]
        return all(entry in self.opened or self._holds(*entry) for entry in signed)

    def _holds(self, signed: SignedStatement, vote_key: bytes) -> bool:
        return self.verifier.holds(vote_key, signed_bytes(self.run, signed.body), signed.signature)


def signed_bytes(run: Digest, body: bytes) -> bytes:
    """Bytes that a signature covers: domain, run and body."""
    return DOMAIN + run + body
