"""The session that a folder signs with, and what becomes of it when the folder forgets what it signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import UsageError
from atoll.base.ids import Digest
from atoll.crypto.identity import Identity, SessionVerifier
from atoll.runtime.bootstrap import holds_run
from atoll.runtime.session_keys import (
    SESSION_DAYS,
    LazySessionKey,
    is_current,
    kept_session,
    remember_session,
    session_of,
)
from atoll.runtime.storage.store import PeerStore

RUN, IDENTITY = Digest(bytes(32)), Identity.generate()
NOW_S, DAY_S = 2e9, 86400.0


def test_a_session_outlives_a_restart_and_not_the_database_that_remembers_its_words(tmp_path: Path):
    """A deleted kept.sqlite beside a session.key: its next vote could contradict one that it forgot."""
    store = PeerStore(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key
    assert session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key == first
    store.close()
    for path in tmp_path.glob("kept.sqlite*"):
        path.unlink()
    with pytest.raises(UsageError, match="E-DIR-06"):
        holds_run(tmp_path)
    store = PeerStore(tmp_path)
    assert kept_session(store, RUN) is None
    assert session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key != first
    store.close()


def test_a_session_is_good_for_its_own_run(tmp_path: Path):
    """Its statements would hold in no other run."""
    store = PeerStore(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key
    assert kept_session(store, Digest(bytes([1] * 32))) is None
    again = kept_session(store, RUN)
    assert again is not None and again.vote_key == first
    store.close()


@pytest.mark.parametrize("later_s", [100 * DAY_S, 365 * DAY_S, -365 * DAY_S], ids=["a rest", "ahead", "behind"])
def test_no_clock_replaces_a_session_key(later_s: float, tmp_path: Path):
    """The membership holds the key. Only its certificate is made anew, for the time that the clock shows."""
    store = PeerStore(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key
    for now in (NOW_S + later_s, NOW_S):
        session = session_of(store, IDENTITY, RUN, "ed25519", now)
        assert session.vote_key == first and is_current(session, now)
    store.close()


def test_a_certificate_that_ends_while_the_peer_runs_is_renewed(tmp_path: Path):
    """A peer that was cut off after 90 days joins again with the same key and a certificate that holds."""
    store, now = PeerStore(tmp_path), NOW_S
    signer = LazySessionKey(IDENTITY.peer, lambda: session_of(store, IDENTITY, RUN, "ed25519", now), lambda: now)
    first, key = signer.certificate, signer.vote_key
    assert signer.certificate == first
    now += SESSION_DAYS * DAY_S
    validity = SessionVerifier().validity_of(signer.certificate)
    assert validity is not None and validity.not_before_s <= now < validity.not_after_s
    assert signer.vote_key == key
    store.close()


def test_a_folder_from_before_databases_knew_their_sessions_goes_on_with_its_own(tmp_path: Path):
    store = PeerStore(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key
    store.keep([("session", None), ("genesis", b"of a run")])
    remember_session(store)
    assert session_of(store, IDENTITY, RUN, "ed25519", NOW_S).vote_key == first
    store.close()
