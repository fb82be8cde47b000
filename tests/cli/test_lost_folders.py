"""Folders that are lost, or never became a run: what is lost, what to do, and nothing half made."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest
from processes import SMALL, Peer, peers

from atoll.base.ids import Digest
from atoll.crypto.identity import Identity
from atoll.wire.ticket import issue

pytestmark = [pytest.mark.net]


def test_a_deleted_folder_ends_its_peer_and_says_what_was_in_it(tmp_path: Path):
    """Open files still take writes, so the peer itself has to notice."""
    folder = tmp_path / "run"
    with peers(Peer("up", "--dir", folder, "--set", "run.rounds=0", *SMALL)) as running:
        ada = running[0]
        ada.until_fact("RoundClosed", trained=1)
        shutil.rmtree(folder)
        assert ada.ends() == 5
        assert f"E-DIR-13 the folder {folder} is gone: this peer's keys and states were in it" in ada.words()
        assert ada.until_fact("Ended")["why"] == "its folder is gone"


def test_a_founding_that_fails_leaves_no_run_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The port is taken: that is said before torch is loaded, and the folder holds nothing of the run."""
    folder = tmp_path / "run"
    ada, genesis, later = Identity.generate(), Digest(bytes(32)), int(time.time()) + 3600
    ticket = issue(ada, genesis=genesis, role="trainer", expires_wall_s=later, addresses=(), uses=1).text
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"/ip4/127.0.0.1/tcp/{other.getsockname()[1]}"
        with peers(Peer("up", "--dir", folder, "--listen", address, *SMALL)) as running:
            assert running[0].ends() == 3
            assert running[0].words().startswith(f"E-NET-11 cannot listen on {address}")
        with peers(Peer("join", ticket, "--dir", folder, "--listen", address)) as running:
            assert running[0].ends() == 3
            assert running[0].words().startswith(f"E-NET-11 cannot listen on {address}")
    assert not folder.exists()
