"""The record of a run and the fold that reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.base.ids import NAME_SHOWN_MAX, PeerId
from atoll.peer.settings import RunSettings
from atoll.policy.plan import QuorumAvailability, RoundSettings, StragglerPolicy
from atoll.runtime.control.status import uncounted_text
from atoll.runtime.event_log import (
    ROTATED,
    EventLog,
    RunStatus,
    data_parallel_bytes,
    entries_in,
    plain,
)
from atoll.runtime.reachability import paused_text

LEARNING = {
    "at": 0.0,
    "fact": "LearningKnown",
    "unit": "tokens",
    "model": "m",
    "parameters": 1000,
    "batch": 2,
    "seq_len": 8,
}


def closed(trained: int, at: float, counted: int = 2) -> dict[str, object]:
    """A RoundClosed line: two peers, 10 steps each."""
    who = [f"peer-{k}" for k in range(counted)]
    return {
        **{"at": at, "time_s": at, "fact": "RoundClosed", "round": trained, "trained": trained, "state": "ab"},
        **{"loss": 3.0 - trained, "steps": 10 * counted, "samples": 20 * counted, "counted": who, "missing": []},
        **{"bytes_out": 100 * trained, "bytes_in": 0},
    }


def test_data_parallel_traffic_is_that_of_a_ring():
    """2 (M-1)/M of 4 bytes per parameter and step (Patarasuk & Yuan 2009); nothing alone."""
    assert data_parallel_bytes(4, 1, 1000) == 6000
    assert data_parallel_bytes(2, 10, 1000) == 40_000
    assert data_parallel_bytes(1, 10, 1000) == 0


def test_progress_is_the_fold_of_the_record():
    progress = RunStatus.of([LEARNING, closed(1, at=10.0), closed(2, at=14.0)])
    assert (progress.trained, progress.loss, progress.bytes_out) == (2, 1.0, 200)
    assert progress.tokens == 2 * 40 * 8 and progress.tokens_per_s == 40 * 8 / 4
    assert (progress.bytes_data_parallel, progress.bytes_data_parallel_all) == (80_000, 160_000)
    assert progress.curve == [(1, 2.0), (2, 1.0)]


def test_a_round_told_twice_counts_once():
    """A restarted peer replays the last vertex: the curve must not fold back."""
    progress = RunStatus.of([LEARNING, closed(1, at=10.0), closed(1, at=11.0), closed(2, at=14.0)])
    assert [round for round, _ in progress.curve] == [1, 2]


def test_lines_of_another_version_and_torn_lines_are_passed_over(tmp_path: Path):
    """The last line was cut by a power loss, one in the middle lacks what we look for."""
    record = EventLog(tmp_path / "facts.jsonl")
    for entry in (LEARNING, {"at": 1.0, "fact": "RoundClosed"}, closed(1, at=10.0)):
        record.write(dict(entry))
    record.close()
    with (tmp_path / "facts.jsonl").open("ab") as file:
        file.write(b'{"at":3,"fact":"Round')
    again = EventLog(tmp_path / "facts.jsonl")
    assert RunStatus.of(again.tail()).trained == 1
    again.close()


def test_a_record_is_two_files_at_most_and_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It turns several times: no newest line is lost, the model stays known, and it says that lines are gone."""
    path = tmp_path / "facts.jsonl"
    record = EventLog(path)
    record.write(dict(LEARNING))
    line_bytes = path.stat().st_size
    monkeypatch.setattr("atoll.runtime.event_log.FILE_BYTES_MAX", 10 * line_bytes)
    for trained in range(1, 101):
        record.write(dict(closed(trained, at=float(trained))))
    found = list(entries_in(path))
    assert {file.name for file in tmp_path.iterdir()} == {"facts.jsonl", "facts.old.jsonl"}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 24 * line_bytes
    assert found[0]["fact"] == ROTATED and found[1] == LEARNING
    rounds = [entry["trained"] for entry in found if entry["fact"] == "RoundClosed"]
    assert rounds == list(range(rounds[0], 101)) and 1 < rounds[0] < 95
    assert record.tail() == found
    record.close()


def test_a_turn_that_was_cut_off_or_refused_loses_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No new file can be made at first: the next line is lost, all others are read, and then it goes on."""
    path = tmp_path / "facts.jsonl"
    record = EventLog(path)
    monkeypatch.setattr("atoll.runtime.event_log.FILE_BYTES_MAX", 1)
    record.write({"fact": "A"})
    with monkeypatch.context() as broken:
        no_room = lambda *how: (_ for _ in ()).throw(OSError(28, "No space left"))  # noqa: E731
        broken.setattr("atoll.runtime.event_log.open_private", no_room)
        record.write({"fact": "B"})
    record.write({"fact": "C"})
    assert [entry["fact"] for entry in entries_in(path)] == ["A", ROTATED, "C"]
    record.close()


def test_plain_values_are_json_for_people():
    assert plain({"a": b"\x01\xff", "b": (1, None, 0.5)}) == {"a": "01ff", "b": [1, None, 0.5]}


def test_a_member_whose_work_counts_for_nothing_is_told_why_and_what_helps():
    fast = RunSettings(round=RoundSettings(acceptance=StragglerPolicy(quorum=3, grace=0)))
    assert uncounted_text(7, "", fast) == ""
    assert "3 others are done first" in uncounted_text(8, "", fast) and "sync.grace" in uncounted_text(8, "", fast)
    assert "atoll peers" in uncounted_text(8, "", RunSettings())
    assert uncounted_text(9, "its data set has not arrived yet", fast).endswith(
        "9 rounds counted nothing of this peer: its data set has not arrived yet"
    )


def test_a_paused_run_says_who_is_missed_and_what_helps():
    """Two alone need both; of many some are enough, a few are named; only the founder can go on without them."""
    ada, bob = PeerId("ada"), PeerId("bob")
    assert paused_text(QuorumAvailability((ada, bob), (), (), 2), str, "majority", "atoll recover") is None
    assert paused_text(QuorumAvailability((ada, bob), (bob,), (), 2), str, "majority", "atoll recover") == (
        "paused: 1 of 2 voters are here, 2 are needed; it goes on once bob is back (atoll up in its folder, with "
        "--stay if the run is over there); if what they had is gone for good: atoll recover; "
        "with 3 members one may be away"
    )
    missed = paused_text(QuorumAvailability((ada, bob), (bob,), (), 2), str, "majority", "", loops=True)
    assert missed is not None and "once bob is back (start its program again, or atoll up --stay in its" in missed
    many = tuple(PeerId(f"p{i}") for i in range(20))
    assert paused_text(QuorumAvailability(many, many[:12], (), 11), str.upper, "majority", "") == (
        "paused: 8 of 20 voters are here, 11 are needed; it goes on once 3 of P0, P1, P2, P3, P4, P5 and 6 others "
        "are back (atoll up in their folders, with --stay if the run is over there)"
    )
    assert paused_text(QuorumAvailability((ada, bob, PeerId("cleo")), (), (bob,), 3), str, "two-thirds", "") == (
        "paused: 2 of 3 voters are here, 3 are needed; bob signs with a new key, which only a "
        "vertex can take in; with 4 members one may be away"
    )
    most = tuple(PeerId(f"{i}{'x' * NAME_SHOWN_MAX}") for i in range(64))
    told = paused_text(
        QuorumAvailability(most, most[:30], most[30:], 43),
        str,
        "two-thirds",
        "atoll recover in the founder's folder",
    )
    assert told is not None and "and 31 others sign with new keys" in told
    assert plain({"paused": told}) == {"paused": told} and told.endswith("atoll recover in the founder's folder")
    progress = RunStatus()
    progress.fold({"fact": "PeerSuspected", "peer": "bob", "why": "silent", "paused": "paused: 1 of 2"})
    assert progress.trouble == "paused: 1 of 2"
    progress.fold({"fact": "PeerReturned", "peer": "bob"})
    assert not progress.trouble
