"""The session that a folder signs with, and what becomes of it when the folder forgets what it signed."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.errors import UsageError
from atoll.base.ids import Digest
from atoll.host.member import holds_run
from atoll.host.sessions import SESSION_DAYS, kept_session, remember_session, session_of
from atoll.host.store import Store
from atoll.keys.identity import Identity

RUN, IDENTITY = Digest(bytes(32)), Identity.generate()


def test_a_session_outlives_a_restart_and_not_the_database_that_remembers_its_words(tmp_path: Path):
    """A deleted kept.sqlite beside a session.key: its next vote could contradict one that it forgot."""
    store = Store(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519").vote_key
    assert session_of(store, IDENTITY, RUN, "ed25519").vote_key == first
    store.close()
    for path in tmp_path.glob("kept.sqlite*"):
        path.unlink()
    with pytest.raises(UsageError, match="E-DIR-06"):
        holds_run(tmp_path)
    store = Store(tmp_path)
    assert kept_session(store, RUN) is None
    assert session_of(store, IDENTITY, RUN, "ed25519").vote_key != first
    store.close()


def test_a_session_is_good_for_its_own_run_and_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its statements would hold in no other run; and where it ends within a day, a vote may come too late."""
    store = Store(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519").vote_key
    assert kept_session(store, Digest(bytes([1] * 32))) is None
    monkeypatch.setattr("atoll.host.sessions.RENEW_S", SESSION_DAYS * 86400.0 + 1)
    assert kept_session(store, RUN) is None
    monkeypatch.undo()
    again = kept_session(store, RUN)
    assert again is not None and again.vote_key == first
    store.close()


def test_a_folder_from_before_databases_knew_their_sessions_goes_on_with_its_own(tmp_path: Path):
    store = Store(tmp_path)
    first = session_of(store, IDENTITY, RUN, "ed25519").vote_key
    store.keep([("session", None), ("genesis", b"of a run")])
    remember_session(store)
    assert session_of(store, IDENTITY, RUN, "ed25519").vote_key == first
    store.close()
