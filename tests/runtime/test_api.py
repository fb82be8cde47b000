"""The control door: for this user only, one line in, one line out, errors as the command line shows them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from atoll.base.errors import NetworkError, RefusedError, RunFailedError, UsageError
from atoll.runtime.control.socket import (
    PATH_MAX,
    REQUEST_MAX,
    ControlServer,
    count_local_peers,
    door_path,
    send_request,
    send_request_async,
)


async def echo(with_: dict[str, Any]) -> Any:
    return with_


async def refuse(_: dict[str, Any]) -> Any:
    raise RefusedError("E-TST-01", "no", cause="because", fix="do not")


async def break_down(_: dict[str, Any]) -> Any:
    raise ValueError("a count must be positive")


def with_door(folder: Path, story: Callable[[ControlServer], Any]) -> None:
    async def main() -> None:
        door = ControlServer(folder, {"echo": echo, "refuse": refuse, "break": break_down})
        await door.open()
        try:
            await story(door)
        finally:
            await door.close()

    asyncio.run(main())


def test_an_answer_comes_back_as_it_was_given(tmp_path: Path):
    async def story(_: ControlServer) -> None:
        assert await send_request_async(tmp_path, "echo", name="ada", numbers=[1, 2.5]) == {
            "name": "ada",
            "numbers": [1, 2.5],
        }

    with_door(tmp_path, story)


def test_an_error_arrives_with_its_code_its_class_and_its_advice(tmp_path: Path):
    async def story(_: ControlServer) -> None:
        with pytest.raises(RefusedError) as caught:
            await send_request_async(tmp_path, "refuse")
        assert (caught.value.code, caught.value.cause, caught.value.fix) == ("E-TST-01", "because", "do not")
        with pytest.raises(RunFailedError, match="ValueError: a count must be positive") as caught:
            await send_request_async(tmp_path, "break")
        assert caught.value.code == "E-DOOR-10" and "atoll.log" in str(caught.value.fix)
        with pytest.raises(UsageError, match="does not know 'fly'"):
            await send_request_async(tmp_path, "fly")

    with_door(tmp_path, story)


def test_nobody_else_can_open_it(tmp_path: Path):
    async def story(door: ControlServer) -> None:
        assert door.path.stat().st_mode & 0o777 == 0o600
        assert door.path.parent.stat().st_mode & 0o777 == 0o700
        assert door.path.parent.stat().st_uid == os.getuid()

    with_door(tmp_path, story)


def test_noise_costs_only_its_own_connection(tmp_path: Path):
    """No JSON, a line without an end, and a hang-up in the middle; the next question is answered."""

    def shout(path: Path, noise: bytes) -> None:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(5)
            line.connect(str(path))
            line.sendall(noise)

    async def story(door: ControlServer) -> None:
        for noise in (b"hello\n", b"x" * (2 * REQUEST_MAX), b'{"verb":', b'{"verb":"echo","extra":1}\n'):
            await asyncio.to_thread(shout, door.path, noise)
        assert await send_request_async(tmp_path, "echo", still=True) == {"still": True}

    with_door(tmp_path, story)


def test_a_folder_without_a_peer_says_so(tmp_path: Path):
    """Never started; ended in good order; killed, so that its socket is still lying there."""
    with pytest.raises(NetworkError, match="nothing was founded or joined"):
        send_request(tmp_path, "status")

    async def story(door: ControlServer) -> None:
        (tmp_path / "kept.sqlite").touch()

    with_door(tmp_path, story)
    with pytest.raises(NetworkError, match="it was stopped"):
        send_request(tmp_path, "status")
    dead = door_path(tmp_path)
    with socket.socket(socket.AF_UNIX) as line:
        line.bind(str(dead))
    (tmp_path / "door").write_text(f"{dead}\n")
    with pytest.raises(NetworkError, match="it was stopped"):
        send_request(tmp_path, "status")
    with_door(tmp_path, story)  # the next peer takes its place
    dead.unlink(missing_ok=True)


def test_the_socket_of_a_deep_folder_still_has_a_short_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The system allows 107 bytes; even a long TMPDIR must not reach them."""
    deep = tmp_path / ("very-deep/" * 20)
    assert len(os.fsencode(door_path(deep))) <= PATH_MAX
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert door_path(deep).is_relative_to("/tmp")


def test_a_runtime_folder_that_others_can_enter_is_refused(monkeypatch: pytest.MonkeyPatch):
    """A member made it first, in a shared /tmp, to put a socket of theirs in our way."""
    with TemporaryDirectory(dir="/tmp") as short:  # pytest's own folders are too deep for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        theirs = Path(short) / f"atoll-{os.getuid()}"
        theirs.mkdir()
        theirs.chmod(0o777)
        with pytest.raises(RunFailedError, match="not a private folder"):
            door_path(Path(short))


def test_the_socket_of_a_killed_peer_is_removed_a_young_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with TemporaryDirectory(prefix="door") as short, ExitStack() as bound:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        places = [door_path(tmp_path / name) for name in ("killed", "starting", "alive")]
        lines = [bound.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in places]
        for place, line in zip(places, lines, strict=True):
            line.bind(str(place))
        lines[2].listen()
        for place in (places[0], places[2]):
            os.utime(place, (0, 0))
        assert count_local_peers() == 1
        assert [place.exists() for place in places] == [False, True, True]
