"""A trainer that cannot run: the peer tries three times, then pauses and says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SMALL, Peer, peers

pytestmark = [pytest.mark.net]

BROKEN = (
    "from atoll.runtime.trainer import client\n"
    "client.PROGRAM = ('-c', 'raise SystemExit(\"the device fell off the bus\")')\n"
)


def test_a_trainer_that_cannot_run_pauses_its_peer_instead_of_closing_empty_rounds(tmp_path: Path):
    """Three tries, so at most three rounds without an update; then one message, whose command goes on to
    the end."""
    up = ("up", "--dir", tmp_path, *SMALL, "--set", "run.rounds=8")
    with peers(Peer(*up, lies=BROKEN)) as running:
        broken = running[0]
        assert broken.until_fact("Ended")["why"] == "its trainer failed"
        assert broken.ends() == 5
        assert len([f for f in broken.facts if f["fact"] == "RoundClosed"]) <= 3
        said = broken.words()
        assert said.startswith("E-TRN-13 the trainer failed 3 times in a row, so this peer pauses")
        assert "the device fell off the bus" in said and f"atoll up --dir {tmp_path}" in said
        assert "failure 3 of the trainer" in (tmp_path / "atoll.log").read_text()

        running += [Peer("up", "--dir", tmp_path)]
        assert running[1].until_fact("Opened")["ticket"]
        assert running[1].until_fact("RunOver")["rounds"] == 8
        assert running[1].ends() == 0
        running += [Peer("up", "--dir", tmp_path)]
        assert running[2].until_fact("Opened")["ticket"] is None  # no peer can join a run that is over
        assert running[2].ends() == 0

        for blob in (tmp_path / "blobs").iterdir():
            blob.write_bytes(b"rubbish")
        running += [Peer("up", "--dir", tmp_path)]
        assert running[3].ends() == 5  # no other member could ever send the state
        assert "E-DIR-14 the state of history round" in running[3].words()
