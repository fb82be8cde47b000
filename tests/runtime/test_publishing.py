"""Places for checkpoints: what a reader sees at any moment, what is sent twice, what a library's error may say.

The object store is fsspec's in memory, and an S3 server in this process. The hub is a server here, too, which the
hub's own library talks to; the real one was never tried.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import IO, Any

import fsspec
import pytest
from hub_server import REPOSITORY, TOKEN, hub_server

from atoll.base.errors import NetworkError, UsageError
from atoll.base.ids import Digest
from atoll.base.machine import Fact
from atoll.crypto.digest import blob_id, manifest_of
from atoll.runtime.publishing import state_source
from atoll.runtime.publishing.places import CheckpointPlace, ObjectStore, place_at, read_latest
from atoll.runtime.publishing.published import LATEST, PublishedCheckpoint, decode_latest, encode_latest, state_file
from atoll.runtime.publishing.state_source import (
    PublishedStateFetched,
    PublishedStateFetcher,
    PublishedStateNotFetched,
)
from atoll.runtime.storage.store import PeerStore

STATE = bytes(range(256)) * 5000  # 1.28 MB, so more than a chunk
NAME = blob_id(manifest_of(STATE))


def files_of(round: int) -> dict[str, bytes]:
    return {f"checkpoints/{round}/model.safetensors": bytes([round]) * 100, state_file(NAME): STATE}


def latest_of(round: int) -> bytes:
    files = {name: len(data) for name, data in files_of(round).items()}
    told = {"run": "moon", "run_id": "ab" * 32, "vertex": "cd" * 32, "state": NAME.hex()}
    model = f"checkpoints/{round}"
    return encode_latest(PublishedCheckpoint(**told, model=model, round=round, trained=round, files=files))


def put(place: CheckpointPlace, round: int) -> None:
    pieces = {name: (data[:1000], memoryview(data)[1000:]) for name, data in files_of(round).items()}
    place.put(pieces, latest_of(round), f"round {round}")


def newest(place: CheckpointPlace) -> PublishedCheckpoint | None:
    data = read_latest(place)
    return None if data is None else decode_latest(data)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "published")


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://published"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "an-id")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
        fsspec.filesystem("s3", use_listings_cache=False).mkdir("bucket")
        yield "s3://bucket/some/prefix"
    server.stop()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with hub_server(tmp_path / "repository") as url:
        # as HF_ENDPOINT and HF_HUB_DISABLE_XET would set them, if the library were not imported yet
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield f"hf://{REPOSITORY}"


@pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes")  # httpx, of the hub's library
@pytest.mark.parametrize("kind", ["folder", "memory", "s3", "hub"])
def test_what_is_published_is_read_back(kind: str, request: pytest.FixtureRequest):
    """latest.json names the newest; files of both rounds are whole; a place without any has none."""
    place = place_at(request.getfixturevalue(kind), to_write=True)
    assert newest(place) is None
    for round in (1, 2):
        put(place, round)
        found = newest(place)
        assert found is not None and found.round == round
        for name, size in found.files.items():
            assert (len(data := b"".join(place.read(name))), data) == (size, files_of(round)[name])
    with pytest.raises(FileNotFoundError):
        next(place.read("states/none"))


def test_an_upload_that_breaks_off_leaves_the_one_before(memory: str, monkeypatch: pytest.MonkeyPatch):
    """The server takes one more file and then no more. A second try sends only what is not there."""
    place = place_at(memory, to_write=True)
    put(place, 1)
    sent: list[str] = []
    assert isinstance(place, ObjectStore)
    whole = place._files.open

    def takes(count: int, path: str, mode: str) -> IO[bytes]:
        if "w" in mode:
            if len(sent) >= count:
                raise ConnectionResetError("the line is cut")
            sent.append(path.rsplit("/", 1)[1])
        return whole(path, mode)

    monkeypatch.setattr(place._files, "open", partial(takes, 1))
    with pytest.raises(NetworkError, match="E-PUB-04 memory://published cannot be written: the line is cut"):
        put(place, 2)
    before = newest(place)
    assert before is not None and before.round == 1
    assert b"".join(place.read(f"{before.model}/model.safetensors")) == bytes([1]) * 100
    monkeypatch.setattr(place._files, "open", partial(takes, 9))
    put(place, 2)
    assert sent == ["model.safetensors", LATEST]


def test_a_bucket_that_is_not_there_is_told(s3: str):
    place = place_at("s3://another/prefix", to_write=True)
    assert newest(place) is None
    with pytest.raises(NetworkError, match="E-PUB-04 s3://another/prefix cannot be written"):
        put(place, 1)


def test_no_secret_is_in_an_error(memory: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    place = place_at(memory)
    assert isinstance(place, ObjectStore)

    def refuses(path: str, mode: str) -> None:
        raise PermissionError("the key very-secret is refused")

    monkeypatch.setattr(place._files, "open", refuses)
    with pytest.raises(NetworkError) as caught:
        read_latest(place)
    assert "very-secret" not in str(caught.value) and "$AWS_SECRET_ACCESS_KEY" in str(caught.value)
    for url in ("s3://me:very-secret@bucket/x", "https://host/x?signature=very-secret"):
        with pytest.raises(UsageError, match="E-PUB-01") as refused:
            place_at(url)
        assert "very-secret" not in str(refused.value)


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"(?s)E-PUB-03 hf://ada/moon .*pip install huggingface_hub for hf://"):
        place_at("hf://ada/moon")


# ---- a source of states ------------------------------------------------------------------------------------


@contextmanager
def web_server(answers: Mapping[str, bytes], holds: Callable[[], object] = lambda: None) -> Iterator[str]:
    """A web server of these files; it calls `holds` in the middle of each."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = answers.get(self.path.lstrip("/"))
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write((data or b"")[:1000])
            holds()
            self.wfile.write((data or b"")[1000:])

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.daemon_threads = True
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def asked(
    url: str, folder: Path, *, bytes_max: int = 2 * len(STATE), state: Digest = NAME
) -> tuple[bool, list[Fact]]:
    """(whether the state is in a peer's store then, what the source told)."""
    store, told = PeerStore(folder), list[Fact]()
    source = PublishedStateFetcher(place_at(url), store, told.append)
    try:
        came = asyncio.run(source.fetch(state, bytes_max))
        assert came == (store.read_blob(state) == STATE)
        assert list((folder / "blobs").glob("*.new")) == []
        return came, told
    finally:
        store.close()


def test_a_state_comes_from_a_web_server_by_its_digest(tmp_path: Path):
    with web_server({state_file(NAME): STATE}) as url:
        came, (told,) = asked(url, tmp_path / "peer")
        assert came and told == PublishedStateFetched(state=NAME, place=url, size_bytes=len(STATE))
        assert asked(url, tmp_path / "peer") == (True, [])  # it is here already


def test_a_place_that_lies_or_lacks_it_or_is_gone_costs_one_fact(tmp_path: Path):
    """Members are asked then: nothing that it sent stays."""
    changed = STATE[:-1] + b"x"
    with web_server({state_file(NAME): changed}) as url:
        lied = asked(url, tmp_path / "a")
        longer = asked(url, tmp_path / "b", bytes_max=1000)
        lacked = asked(url, tmp_path / "c", state=Digest(bytes(32)))
    gone = asked(url, tmp_path / "d")
    whys = [
        "not those that the members agreed on",
        "more bytes than the state",
        "does not have this state",
        "refused",
    ]
    for (came, (told,)), why in zip((lied, longer, lacked, gone), whys, strict=True):
        assert not came and isinstance(told, PublishedStateNotFetched) and why in told.why


def test_a_slow_place_is_left_with_what_it_still_sends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It stops in the middle of a file until the peer has given it up."""
    monkeypatch.setattr(state_source, "STALL_S", 0.3)
    goes_on = Event()
    (folder := tmp_path / "peer").mkdir(mode=0o700)
    store, told, sources = PeerStore(folder), list[Fact](), list[PublishedStateFetcher]()

    async def main(url: str) -> list[bool]:
        sources.append(source := PublishedStateFetcher(place_at(url), store, told.append))
        return [await source.fetch(NAME, 2 * len(STATE)) for _ in range(2)]

    with web_server({state_file(NAME): STATE}, goes_on.wait) as url:
        assert asyncio.run(main(url)) == [False, False]  # the second time at once: it hangs still
        (slow,) = told
        assert isinstance(slow, PublishedStateNotFetched) and slow.why.startswith("it is slow")
        goes_on.set()
        source = sources[0]
        assert source.leftover is not None
        source.leftover.join()
    assert os.listdir(folder / "blobs") == []
    store.close()
