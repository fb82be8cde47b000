"""A disk that is full says so in words for people, keeps all of a step or nothing, and ends a peer before it says
what is not durable. The disk is made full by sqlite's own limit on the pages of its file."""

from __future__ import annotations

import asyncio
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from atoll.base.errors import RunFailedError
from atoll.base.ids import Digest
from atoll.base.machine import Persist, Send, TimerFired
from atoll.cli.watch import line_of
from atoll.crypto.identity import Identity
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.settings import RunSettings
from atoll.runtime.bootstrap import ListenOptions, TicketTerms, found_run, identity_of, training_peer_factory
from atoll.runtime.driver import Driver, PeerStartParameters
from atoll.runtime.event_log import EventLog
from atoll.runtime.storage import atomic_files
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.recipe.recipes import diloco
from atoll.wire.messages.history import VerticesRequest

RUN = Digest(bytes(32))


def full(store: PeerStore, pages: int = 1) -> None:
    """No more pages than there are and so many."""
    (count,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count={count + pages}")


def with_room(store: PeerStore) -> None:
    store._database.execute("PRAGMA max_page_count=1073741823")


def test_a_step_that_a_full_disk_refuses_is_not_kept_in_part_and_the_next_one_is(tmp_path: Path):
    store = PeerStore(tmp_path)
    store.keep([("a", b"1")])
    full(store)
    with pytest.raises(RunFailedError, match="E-DISK-01"):
        store.keep([("a", b"2"), ("b", bytes(1 << 20))])
    assert store.startup_values() == {"a": b"1"}
    with_room(store)
    store.keep([("a", b"3")])
    store.close()
    again = PeerStore(tmp_path)
    assert again.startup_values() == {"a": b"3"}
    again.close()


def test_a_peer_whose_disk_is_full_says_nothing_that_is_not_durable_and_ends(tmp_path: Path):
    """The machine keeps a word and says it; the disk refuses the first. One more event changes nothing."""

    class Machine:
        def handle(self, event, now):
            return [Persist("said/1/0/commit", bytes(1 << 20)), Send("somebody", VerticesRequest(0))]

    class Links:
        said = 0

        def send(self, *word):
            self.said += 1

    async def story() -> tuple[int, list[RunFailedError]]:
        store = PeerStore(tmp_path)
        driver = Driver(PeerStartParameters(store, identity_of(store), RUN, DesiredRole("trainer", "full")), None)
        driver.machine, driver.links, ended = Machine(), Links(), []
        driver.on_persist_failed = ended.append
        full(store)
        driver.handle(TimerFired("beat"))
        with_room(store)
        driver.handle(TimerFired("beat"))
        driver.record.close()
        store.close()
        return driver.links.said, ended

    said, ended = asyncio.run(story())
    assert said == 0
    assert [why.code for why in ended] == ["E-DISK-01"]
    assert "free some space" in ended[0].fix


def test_work_that_a_full_disk_refuses_is_told_once_in_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A state or an answer finds no room while a vote still does: attempts fail, and nobody would know why."""

    def no_room(*what: object) -> None:
        raise OSError(28, "No space left on device")

    async def story() -> tuple[str, list[str]]:
        store = PeerStore(tmp_path)
        driver = Driver(PeerStartParameters(store, identity_of(store), RUN, DesiredRole("trainer", "full")), None)
        driver.machine, told = SimpleNamespace(handle=lambda event, now: []), []
        driver.on_entry = told.append
        monkeypatch.setattr(atomic_files, "write_at", no_room)
        for state in (b"of the first attempt", b"of the second"):
            with pytest.raises(RunFailedError, match="E-DISK-01") as state_refused:
                store.put_blob(state)
            driver._answered("round/3/combine", state_refused.value)
            driver._answered("round/3/combine", OSError(5, "Input/output error"))
        driver._answered("round/3/combine", OSError(28, "No space left on device", "an answer"))
        driver.record.close()
        store.close()
        return driver.progress.trouble, [line_of(e, driver.progress) for e in told]

    trouble, lines = asyncio.run(story())
    assert trouble.endswith("Input/output error") and len(lines) == 2
    assert "No space left on device; free memory or disk" in lines[0]


def test_a_peer_whose_disk_takes_no_session_key_ends_as_well(tmp_path: Path):
    """A joiner of a run with post-quantum votes makes its key in the midst of its first step; here it cannot."""

    async def story() -> list[RunFailedError]:
        store = PeerStore(tmp_path)
        driver = Driver(PeerStartParameters(store, identity_of(store), RUN, DesiredRole("trainer", "full")), None)
        signer, ended = driver.machine.notary.signer, []
        signing = SimpleNamespace(round=SimpleNamespace(signing=SimpleNamespace(kind="ml-dsa-65")))
        step = lambda event, now: [Send("somebody", VerticesRequest(signer.sign(b"a word")))]  # noqa: E731
        driver.machine = SimpleNamespace(genesis=b"known", settings=signing, handle=step)
        driver.on_persist_failed = ended.append
        (tmp_path / "session.key.tmp").mkdir()  # stands where the file has to go
        driver.handle(TimerFired("beat"))
        driver.handle(TimerFired("beat"))
        driver.record.close()
        store.close()
        return ended

    assert [why.code for why in asyncio.run(story())] == ["E-DISK-01"]


def test_a_line_of_the_record_that_a_full_disk_tears_costs_that_line_alone(tmp_path: Path):
    record = EventLog(tmp_path / "facts.jsonl")
    whole = record._file

    class Full:
        def write(self, line):
            whole.write(line[:7])
            raise OSError(28, "No space left on device")

    record.write({"fact": "A"})
    record._file = Full()
    record.write({"fact": "B"})
    record._file = whole
    record.write({"fact": "C"})
    assert [entry["fact"] for entry in record.tail()] == ["A", "C"]
    record.close()


def test_a_founding_without_room_says_what_it_needs_and_leaves_no_half_of_a_run(tmp_path: Path, monkeypatch):
    """A kilobyte is free: refused before anything is written. Then a state meets a full disk: all is removed again,
    except for the key that the user put there."""
    founded = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
    make = training_peer_factory(1, lambda _: None)

    def found() -> str:
        with pytest.raises(RunFailedError, match="E-DISK-01") as refused:
            asyncio.run(found_run(tmp_path, founded, "ada", ListenOptions(), TicketTerms(), make))
        assert "name all its settings again" in refused.value.fix
        assert "elsewhere: what lies in that folder is needed" in refused.value.fix
        return refused.value.what

    (tmp_path / "peer.key").write_bytes(Identity.generate().to_bytes())
    (tmp_path / "peer.key").chmod(0o600)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        assert re.search(r"cannot found this run: it needs [\d.]+ MB of disk \(1.0 kB are free\)", found())

    def no_room(*what: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_files, "write_at", no_room)
    assert "No space left on device" in found()
    assert [path.name for path in tmp_path.iterdir()] == ["peer.key"]
