"""Signatures of the virtual world: a keyed hash behind the same door as the real ones.

Unforgeable inside a simulation because villains sign through their own signer only. Real keys run in at least
one scenario, so that the door itself is proven.
"""

from __future__ import annotations

from hashlib import blake2b

from atoll.base.ids import PeerId

_SECRET = b"the world's own secret"


class VirtualSigner:
    def __init__(self, peer: PeerId, session: int = 0) -> None:
        self.peer = peer
        self.vote_key = f"{peer}#{session}".encode()
        self.certificate = b"certified " + self.vote_key

    def sign(self, data: bytes) -> bytes:
        return _mark(self.vote_key, data)


class VirtualVerifier:
    def holds(self, vote_key: bytes, data: bytes, signature: bytes) -> bool:
        return signature == _mark(vote_key, data)

    def certifies(self, certificate: bytes, peer: PeerId, vote_key: bytes, run: bytes) -> bool:
        return certificate == b"certified " + vote_key and vote_key.startswith(f"{peer}#".encode())


def _mark(vote_key: bytes, data: bytes) -> bytes:
    return blake2b(data, key=_SECRET, salt=blake2b(vote_key, digest_size=16).digest(), digest_size=16).digest()
