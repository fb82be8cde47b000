"""The folder of a run: what makes it one, who comes back out of it, and what is told when it cannot be used."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.base.errors import NetworkError, RefusedError, UsageError
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.cli.watch import FinalJsonView
from atoll.crypto.identity import Identity
from atoll.peer.config.sections import RunConfig
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.round.vertex_body import write_genesis
from atoll.peer.settings import RULES, RunSettings
from atoll.runtime import bootstrap
from atoll.runtime.bootstrap import (
    ListenOptions,
    TicketTerms,
    found_run,
    holds_run,
    identity_of,
    join_run,
    prepare_folder,
    resume_run,
    training_peer_factory,
)
from atoll.runtime.driver import PeerStartParameters
from atoll.runtime.storage.store import PeerStore
from atoll.runtime.supervisor import PeerOptions, run_up
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training import spec
from atoll.training.recipe.recipes import diloco
from atoll.wire.codec import encode, vertex_id
from atoll.wire.messages.vertex import Member, Vertex
from atoll.wire.ticket import issue


def test_a_folder_of_a_run_of_other_rules_is_told_so_and_left_as_it_is(tmp_path: Path):
    """Its own program may still read it; `atoll up` does not begin to serve what it would judge wrongly."""
    settings = RunSettings(rules=RULES + 1)
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    raw = encode(write_genesis(settings, ZERO_DIGEST, founder, (), 0.0))
    store = PeerStore(tmp_path)
    store.keep([("run", vertex_id(raw)), ("genesis", encode(Vertex(raw, None)))])
    store.close()
    with pytest.raises(RefusedError, match=rf"E-RUN-15 .*rules {RULES + 1}(.*\n)+.*atoll up"):
        asyncio.run(resume_run(tmp_path, "", ListenOptions((), ()), lambda _: None))
    assert holds_run(tmp_path)


def test_a_folder_whose_history_the_disk_changed_is_told_so_and_left_as_it_is(tmp_path: Path):
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    raw = encode(write_genesis(RunSettings(), ZERO_DIGEST, founder, (), 0.0))
    store = PeerStore(tmp_path)
    store.keep([("run", vertex_id(raw)), ("genesis", encode(Vertex(raw, None))), ("vertex/0", b"torn")])
    store.close()
    with pytest.raises(UsageError, match=r"E-DIR-07 round 0 (.*\n)+.*atoll invite"):
        asyncio.run(resume_run(tmp_path, "", ListenOptions((), ()), lambda _: None))
    assert holds_run(tmp_path)


def test_a_folder_whose_history_a_member_can_mend_is_opened_and_that_of_a_lone_founder_is_not(tmp_path: Path):
    """Round 0 is torn, and round 1 names it: with a second member in round 1 there is somebody to ask."""
    founder = Member(PeerId("ada"), b"", (), "trainer", "member", 0, 0.0, "ada")
    genesis = write_genesis(RunSettings(), ZERO_DIGEST, founder, (), 0.0)
    run = vertex_id(raw := encode(genesis))
    before = vertex_id(encode(replace(genesis, run=run, round=0, parent=run)))
    for alone, members in ((True, (founder,)), (False, (founder, replace(founder, peer=PeerId("bob"))))):
        after = encode(replace(genesis, run=run, round=1, parent=before, members=members))
        store = PeerStore(folder := tmp_path / str(alone))
        store.keep([("run", run), ("genesis", encode(Vertex(raw, None))), ("vertex/0", b"torn")])
        store.keep([("vertex/1", encode(Vertex(after, None)))])
        store.close()

        async def opened(folder: Path = folder) -> None:
            make = training_peer_factory(1, lambda _: None)
            await (await resume_run(folder, "", ListenOptions((), ()), make)).stop(farewell=False)

        if alone:
            with pytest.raises(UsageError, match="E-DIR-07 round 0 of the history"):
                asyncio.run(opened())
        else:
            asyncio.run(opened())


@pytest.mark.parametrize("zeroed", [slice(16, None), slice(4096, None)], ids=["its head", "its pages"])
def test_a_database_that_the_disk_changed_is_told_so(zeroed: slice, tmp_path: Path):
    """The first bytes say that it is one; the rest is gone, at once or behind the first page."""
    store = PeerStore(tmp_path)
    store.keep([("run", b"name"), ("genesis", bytes(9000))])
    store.close()
    data = bytearray((tmp_path / "kept.sqlite").read_bytes())
    data[zeroed] = bytes(len(data[zeroed]))
    (tmp_path / "kept.sqlite").write_bytes(data)
    with pytest.raises(UsageError, match=r"E-DIR-07 kept.sqlite \(.*\) in"):
        holds_run(tmp_path)


def test_a_peer_that_comes_back_is_who_it_was_and_listens_where_it_was_told_to_at_first(tmp_path: Path):
    """Nothing said at the second start: same address, same port, same word to others; said otherwise: that."""
    beginning = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
    quiet = ListenOptions(as_before=True)

    names: list[str] = []

    async def addresses(
        listening: ListenOptions, first: bool = False, name: str = ""
    ) -> tuple[list[str], tuple[str, ...]]:
        make = training_peer_factory(1, lambda _: None)
        if first:
            host, _ = await found_run(tmp_path, beginning, "ada@clinic", listening, TicketTerms(), make)
        else:
            host = await resume_run(tmp_path, name, listening, make)
        told = host.bound, host.addresses
        names.append(host.wish.name)
        await host.stop(farewell=False)
        return told

    told = ("/ip4/192.0.2.7/tcp/7071",)
    begun = asyncio.run(addresses(ListenOptions(("/ip4/127.0.0.2/tcp/0",), told), first=True))
    assert begun[0][0].startswith("/ip4/127.0.0.2/") and begun[1] == told
    assert asyncio.run(addresses(quiet, name="eve")) == begun
    assert asyncio.run(addresses(ListenOptions()))[0][0].startswith("/ip4/127.0.0.1/")
    assert asyncio.run(addresses(quiet, name="bob@lab"))[0][0].startswith("/ip4/127.0.0.1/")
    assert names == ["ada@clinic", "eve@clinic", "eve@clinic", "bob@lab"]


def test_a_path_in_genesis_is_not_opened_on_the_disk_of_a_joiner(tmp_path: Path, book, monkeypatch):
    """Genesis names the very file that its data came from, and it lies here, too: the joiner fetches the blob."""
    opened: list[str] = []
    beginning = replace(start_of_built_in(diloco("gpt-nano", rounds=2), book), data=book)
    monkeypatch.setattr(spec, "load_data", opened.append)

    async def wanted_by_a_joiner() -> list[object]:
        store, wanted = PeerStore(tmp_path / "joiner"), list[object]()
        seat = PeerStartParameters(store, identity_of(store), ZERO_DIGEST, DesiredRole("trainer"))
        host = training_peer_factory(1, lambda _: None)(seat)
        host.island.learning = parse_training_spec(founding_blobs(beginning, RunSettings()).settings)
        monkeypatch.setattr(host, "run_step", wanted.append)
        await host._find_data()
        await host.island.close()
        host.record.close()
        store.close()
        return wanted

    assert len(asyncio.run(wanted_by_a_joiner())) == 1 and opened == []


@pytest.mark.parametrize("name", ["book.txt", "stdlib", "attached"])
def test_genesis_says_no_folder_of_its_founders_disk(tmp_path: Path, book, name: str):
    """Others see what the file is called; a file that is called like no file is `own data`."""
    path = tmp_path / name
    path.write_bytes(Path(book).read_bytes())
    founded = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), str(path)), RunSettings())
    label = parse_training_spec(founded.settings).data
    assert label == (name if name == "book.txt" else "own data")
    assert str(tmp_path).encode() not in founded.settings.learning


def test_a_folder_holds_a_run_once_its_founder_listens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The port is taken: nothing is founded, so the next start may say anything else and still gets a ticket.
    Whoever forgot that its environment names the port is told."""
    beginning = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())

    async def founded(port: int) -> str:
        where = ListenOptions((f"/ip4/127.0.0.1/tcp/{port}",))
        host, ticket = await found_run(
            tmp_path, beginning, "ada", where, TicketTerms(), training_peer_factory(1, lambda _: None)
        )
        assert host.ticket_text() == ticket.text
        await host.stop(farewell=False)
        return ticket.text

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("ATOLL_LISTEN", "/ip4/127.0.0.1/tcp/0")
        with pytest.raises(NetworkError, match=r"E-NET-11 .*\n.*another program .*\n.*try: another port"):
            asyncio.run(founded(port))
        monkeypatch.setenv("ATOLL_LISTEN", f"/ip6/::1/tcp/0 /ip4/127.0.0.1/tcp/{port}")
        with pytest.raises(NetworkError, match=r"E-NET-11 (.*\n)+.*try: unset ATOLL_LISTEN, or"):
            asyncio.run(founded(port))
    assert not holds_run(tmp_path) and not list(tmp_path.iterdir())
    assert asyncio.run(founded(0))


@pytest.mark.parametrize(("other_runs", "code"), [(True, "E-DIR-01"), (False, "E-DIR-02")])
def test_a_founding_that_is_refused_removes_nothing_of_another_process(
    other_runs: bool, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another process founds in the same folder, right after this one has looked which files are there."""
    beginning = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())

    def opened(folder: Path, durable: bool) -> PeerStore:
        other = PeerStore(folder, durable)
        other.write_secret("peer.key", Identity.generate().to_bytes())
        other.keep([("genesis", b"of the other process")])
        other.close()
        if other_runs:
            raise UsageError(code, "another Atoll process is using this folder")
        return PeerStore(folder, durable)

    monkeypatch.setattr(bootstrap, "PeerStore", opened)
    with pytest.raises(UsageError, match=code):
        make = training_peer_factory(1, lambda _: None)
        asyncio.run(found_run(tmp_path, beginning, "bob", ListenOptions(), TicketTerms(), make))
    assert (tmp_path / "peer.key").exists()
    store = PeerStore(tmp_path)
    assert store.startup_values()["genesis"] == b"of the other process"
    store.close()


def test_a_member_needs_its_ticket_no_more_and_who_never_was_one_may_try_another(tmp_path: Path):
    """An expired ticket is none to a newcomer, and harmless where its run is; a folder is bound once genesis is."""

    def ticket(run: Digest, expires_s: int) -> str:
        return issue(Identity.generate(), genesis=run, role="trainer", expires_wall_s=expires_s, addresses=()).text

    def joined(folder: Path, text: str) -> None:
        async def once() -> None:
            make = training_peer_factory(1, lambda _: None)
            await (await join_run(folder, text, "trainer", "bob", ListenOptions((), ()), make)).stop(farewell=False)

        asyncio.run(once())

    async def founded() -> Digest:
        beginning = founding_blobs(start_of_built_in(diloco("gpt-nano", rounds=2), "stdlib"), RunSettings())
        where = ListenOptions(("/ip4/127.0.0.1/tcp/0",))
        host, _ = await found_run(
            there, beginning, "ada", where, TicketTerms(), training_peer_factory(1, lambda _: None)
        )
        await host.stop(farewell=False)
        return host.run_id

    there, here = tmp_path / "there", tmp_path / "here"
    one, two, later = Digest(b"1" * 32), asyncio.run(founded()), 2**31
    with pytest.raises(RefusedError, match="E-TKT-0"):
        joined(here, ticket(one, 1))
    joined(here, ticket(one, later))  # nobody of it is ever reached
    joined(here, ticket(two, later))
    founders, store = PeerStore(there), PeerStore(here)
    store.keep([("genesis", founders.value("genesis"))])
    founders.close()
    store.close()
    joined(here, ticket(two, 1))
    with pytest.raises(UsageError, match="E-DIR-03"):
        joined(here, ticket(one, later))


def test_a_place_that_cannot_be_a_folder_is_told_so(tmp_path: Path):
    """A file of that name stands for a disk that is read-only or full: both refuse the folder."""
    (tmp_path / "taken").touch()
    start = PeerOptions(tmp_path / "taken", RunConfig())
    (nowhere := tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(UsageError, match=r"E-DIR-05 .*nowhere cannot be .*it is a link that leads nowhere"):
        prepare_folder(nowhere)
    with pytest.raises(UsageError, match=r"E-DIR-05 .*taken cannot be(.*\n)+.*--dir"):
        asyncio.run(run_up(start, FinalJsonView()))
