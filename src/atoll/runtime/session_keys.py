"""The session that this folder signs with in its run: the one from before a restart, or a new one.

Genesis says which kind of key it has (`run.votes`). A joiner learns genesis from the members, so its session is
made with the first word that it signs, which is never before.
Promises: a session is on disk before it signs anything. Its key is never replaced by time: the membership holds
that key, and a lone founder, or a run that slept for months, has no quorum to admit another. Where the certificate
ends or has not begun, the identity certifies the same key again. A session is good only beside the database that
remembers what it signed: a peer whose database is lost signs with a new key, which votes once a vertex knows it, so
it never contradicts what it forgot.
Never asks the network anything.
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

SESSION_DAYS = 90  # that a certificate holds; a longer one gives a thief of the key more time to join with it
RENEW_S = 86400.0  # a certificate that ends within a day is renewed before a vertex may judge it
REMEMBERED = "session"  # under this name the database knows whose words it remembers


class LazySessionKey:
    """A `Signer` whose session `make` brings when it is first asked for, and again when its certificate ends."""

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
    """The session key from before a restart, so that the membership still knows it; a new one has to join."""
    kept = kept_session(store, run)
    if kept is None or kind_of_key(kept.vote_key) != kind:
        return certify(store, identity, run, new_vote_key(kind), now)
    return kept if is_current(kept, now) else certify(store, identity, run, kept.private_key, now)


def is_current(signer: SessionSigner, now: Seconds) -> bool:
    """True if its certificate holds now, and for a day more."""
    session = SessionVerifier().session_of(signer.certificate)
    return session is not None and session.valid_at(now) and session.valid_at(now + RENEW_S)


def kept_session(store: PeerStore, run: Digest) -> SessionSigner | None:
    """From before a restart, if it is of this run and the database remembers its words. UsageError if damaged."""
    secret = store.secret("session.key")
    if secret is None:
        return None
    signer = SessionSigner.from_bytes(secret)
    session = SessionVerifier().session_of(signer.certificate)
    good = session is not None and session.run == run
    return signer if good and store.kept().get(REMEMBERED) == signer.vote_key else None


def remember_session(store: PeerStore) -> None:
    """In a folder from before databases knew their sessions: what is there belongs together."""
    secret, kept = store.secret("session.key"), store.kept()
    if secret is not None and "genesis" in kept and REMEMBERED not in kept:
        store.keep([(REMEMBERED, SessionSigner.from_bytes(secret).vote_key)])


def certify(
    store: PeerStore, identity: Identity, run: Digest, key: VotePrivateKey, now_wall_s: Seconds
) -> SessionSigner:
    """The identity's certificate that this key speaks for it from now on, written to disk."""
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
