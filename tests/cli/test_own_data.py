"""A member that trains on data of its own: they stay with it, and all members end with the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import SMALL, TWO, Peer, atoll, peers

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]


def test_a_member_trains_on_its_own_text_and_both_have_the_same_model(tmp_path: Path):
    """Bob leaves and comes back without a word of his data. He never fetches the run's, so his updates are of his
    own, and Ada has no blob of his."""
    theirs, his = tmp_path / "theirs.txt", tmp_path / "secret-name.txt"
    theirs.write_text("what all members may read, line after line\n" * 900)
    his.write_text("zebra zebra quilt\n" * 2000)
    a, b = tmp_path / "a", tmp_path / "b"
    words = ("--set", f"data.source={theirs}", "--set", "train.recipe=fedavg", "--set", "run.rounds=20")
    with peers(Peer("up", "--dir", a, *TWO, *words, "--set", "run.min_peers=2")) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        bob = Peer("join", ticket, "--dir", b, "--data", his)
        running.append(bob)
        assert bob.until_fact("LearningKnown")["data"] == "own data"
        bob.trained_with(2)
        bob.process.kill()
        bob.ends()
        again = Peer("up", "--dir", b)
        running.append(again)
        again.trained_with(2)
        assert running[0].ends() == again.ends() == 0
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    blobs = [{path.name: path.read_bytes() for path in (folder / "blobs").iterdir()} for folder in (a, b)]
    assert any(b"all members may read" in one for one in blobs[0].values())
    assert not any(b"all members may read" in one for one in blobs[1].values())
    assert not any(b"zebra" in one for folder in blobs for one in folder.values())
    assert b"zebra quilt" in (b / "own-data.safetensors").read_bytes()
    assert (b / "own-data.safetensors").stat().st_mode & 0o777 == 0o600
    assert "secret-name" not in (a / "facts.jsonl").read_text() + (a / "atoll.log").read_text()


def test_what_a_run_cannot_use_is_refused_in_three_lines(tmp_path: Path):
    """Audits take steps again on common data; images are no text; a path may lead nowhere."""
    (own := tmp_path / "own.txt").write_text("short\n" * 2000)
    (numbers := tmp_path / "own.bin").write_bytes(b"\xff\xff" * 9000)
    words = (*SMALL, "--set", "run.trust=community", "--set", "run.start_peers=4", "--dir", tmp_path / "c")
    founded = atoll("up", *words, "--set", f"node.data={own}")
    assert founded.returncode == 2 and "E-DATA-08" in founded.stderr and not (tmp_path / "c").exists()
    with peers(
        Peer("up", "--dir", tmp_path / "a", *TWO),
        Peer("up", *words),
    ) as running:
        ticket, audited = (peer.until_fact("Opened")["ticket"] for peer in running)
        gone = atoll("join", ticket, "--dir", tmp_path / "b", "--data", tmp_path / "gone.txt")
        assert gone.returncode == 2 and "E-DATA-01" in gone.stderr
        watching = atoll("join", ticket, "--dir", tmp_path / "b", "--data", own, "--role", "observer")
        assert watching.returncode == 2 and "E-ARG-14" in watching.stderr
        unfit = atoll("join", ticket, "--dir", tmp_path / "b", "--data", numbers)
        assert "bye (its computer cannot take part)" in unfit.stdout
        refused = unfit.stderr.splitlines()[-3:]
        assert refused[0].startswith("E-DATA-09") and "token 65535" in refused[0]
        assert "bytes of text, in windows of 32" in refused[1] and "--data" in refused[2]
        assert not (tmp_path / "b" / "own-data.safetensors").exists()
        assert "MembershipChanged" not in (tmp_path / "a" / "facts.jsonl").read_text(), "it was a member"
        refused = atoll("join", audited, "--dir", tmp_path / "d", "--data", own).stderr.splitlines()[-3:]
        assert refused[0].startswith("E-DATA-08") and "run.audit_rate = 0" in refused[0]
        assert 'run.trust = "private"' in refused[2]
