"""Session keys: the key with which this folder signs in its run, from before a restart or new.

Genesis fixes the kind of key (`run.votes`). A joiner learns genesis from the members, so its session is made with
the first statement that it signs.

Invariants:
- A session is on disk before it signs.
- Time never replaces a key: the membership holds it, and a lone founder, or a run that slept for months, has no
  quorum to admit another. If the certificate has ended or not begun, the identity certifies the same key again.
- A session is valid only beside the database that remembers its statements. A peer that lost the database signs
  with a new key, which votes once a vertex holds it, so it never contradicts what it forgot.
Not responsible for: the network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.crypto.identity import (
    Identity,
    SessionSigner,
    SessionVerifier,
    VotePrivateKey,
    kind_of_key,
    new_vote_key,
)
from atoll.crypto.signer import VoteKind
from atoll.runtime.storage.store import PeerStore

SESSION_DAYS = 90  # validity of a certificate; a longer one gives a thief of the key more time to join
RENEW_S = 86400.0  # a certificate that ends within a day is renewed before a vertex checks it
REMEMBERED = "session"  # name of the value with the key of the remembered statements


class LazySessionKey:
    """A `Signer` that calls `make` for its session at first use, and again when the certificate ends."""

    def __init__(self, peer: PeerId, make: Callable[[], SessionSigner], now: Callable[[], Seconds]) -> None:
        self.peer, self._make, self._now = peer, make, now

    @cached_property
    def _made(self) -> SessionSigner:
        return self._make()

    @property
    def vote_key(self) -> bytes:
        return self._made.vote_key

    @property
    def certificate(self) -> bytes:
        if not is_current(self._made, self._now()):
            self._made = self._make()
        return self._made.certificate

    def sign(self, data: bytes) -> bytes:
        return self._made.sign(data)

    def secret(self, purpose: bytes) -> bytes:
        return self._made.secret(purpose)


def session_of(store: PeerStore, identity: Identity, run: Digest, kind: VoteKind, now: Seconds) -> SessionSigner:
    """The session from before a restart, which the membership knows; else a new one, which has to join."""
    kept = kept_session(store, run)
    if kept is None or kind_of_key(kept.vote_key) != kind:
        return certify(store, identity, run, new_vote_key(kind), now)
    return kept if is_current(kept, now) else certify(store, identity, run, kept.private_key, now)


def is_current(signer: SessionSigner, now: Seconds) -> bool:
    """True if the certificate is valid now and for one more day."""
    session = SessionVerifier().session_of(signer.certificate)
    return session is not None and session.valid_at(now) and session.valid_at(now + RENEW_S)


def kept_session(store: PeerStore, run: Digest) -> SessionSigner | None:
    """Session from before a restart, if it is of this run and of this database. Raises UsageError if damaged."""
    secret = store.secret("session.key")
    if secret is None:
        return None
    signer = SessionSigner.from_bytes(secret)
    session = SessionVerifier().session_of(signer.certificate)
    good = session is not None and session.run == run
    return signer if good and store.startup_values().get(REMEMBERED) == signer.vote_key else None


def remember_session(store: PeerStore) -> None:
    """Migrate a folder from before databases recorded their session: its files belong together."""
    secret, kept = store.secret("session.key"), store.startup_values()
    if secret is not None and "genesis" in kept and REMEMBERED not in kept:
        store.keep([(REMEMBERED, SessionSigner.from_bytes(secret).vote_key)])


def certify(
    store: PeerStore, identity: Identity, run: Digest, key: VotePrivateKey, now_wall_s: Seconds
) -> SessionSigner:
    """Certify this key by the identity, from now on, and write the session to disk."""
    now = int(now_wall_s)
    signer = SessionSigner.certified(
        identity,
        run,
        epoch=0,
        not_before_s=now - 3600,  # a joiner's clock may be an hour ahead of a member's
        not_after_s=now + SESSION_DAYS * 86400,
        generate=lambda: key,
    )
    store.write_secret("session.key", signer.to_bytes())
    store.keep([(REMEMBERED, signer.vote_key)])
    return signer
