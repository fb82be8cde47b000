"""What is signed is checked once, however often it is shown."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import ViewTimeout, Vote
from atoll.wire.messages.vertex import QuorumCertificate

RUN, BODY = Digest(bytes(32)), Digest(b"b" * 32)


class Counting(VirtualSignatureVerifier):
    checks = 0

    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        self.checks += 1
        return super().holds(vote_key, data, signature)


def test_votes_that_were_opened_are_not_checked_again_in_a_certificate():
    """Two of three came as messages. What they did not sign is no vote of theirs, opened or not."""
    verifier, vote = Counting(), Vote(3, 0, "commit", BODY)
    signers = {PeerId(name): VirtualSigner(PeerId(name)) for name in ("ada", "bob", "cyd")}
    keys = {peer: signer.vote_key for peer, signer in signers.items()}
    said = {peer: StatementSigner(RUN, signer, verifier).sign(vote) for peer, signer in signers.items()}
    reader = StatementSigner(RUN, VirtualSigner(PeerId("eve")), verifier)
    for peer in (PeerId("ada"), PeerId("bob")):
        assert reader.open(said[peer], Vote, keys[peer]) == vote
    verifier.checks = 0
    votes = tuple((peer, word.signature) for peer, word in said.items())
    certificate = QuorumCertificate(vote.round, vote.view, vote.stage, vote.digest, votes)
    assert reader.certificate_holds(certificate, keys, 3)
    assert verifier.checks == 1
    swapped = ((votes[0][0], votes[1][1]), (votes[1][0], votes[0][1]), votes[2])
    for false in (replace(certificate, votes=swapped), replace(certificate, digest=Digest(b"c" * 32))):
        assert not reader.certificate_holds(false, keys, 3)
    assert not reader.certificate_holds(certificate, {**keys, PeerId("ada"): keys[PeerId("bob")]}, 3)


def test_readers_of_one_world_share_what_they_opened_and_nothing_that_does_not_hold():
    """Bob reads what ada has read: no second check. A forged word, or another key, is refused to each of them."""
    verifier, vote = Counting(), Vote(3, 0, "commit", BODY)
    cyd = VirtualSigner(PeerId("cyd"))
    said = StatementSigner(RUN, cyd, verifier).sign(vote)
    ada, bob = (StatementSigner(RUN, VirtualSigner(PeerId(name)), verifier) for name in ("ada", "bob"))
    bob.opened = ada.opened
    assert ada.open(said, Vote, cyd.vote_key) is bob.open(said, Vote, cyd.vote_key)
    assert verifier.checks == 1
    for reader in (ada, bob):
        with pytest.raises(PeerFault):
            reader.open(replace(said, signature=b"forged"), Vote, cyd.vote_key)
        with pytest.raises(PeerFault):
            reader.open(said, Vote, VirtualSigner(PeerId("cyd"), session=1).vote_key)
        with pytest.raises(PeerFault):
            reader.open(said, ViewTimeout, cyd.vote_key)
