"""Operator commands: one table serves the control socket and the command line."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from processes import answering, atoll

from atoll.base.errors import RefusedError, UsageError
from atoll.cli.main import app
from atoll.runtime.control.commands import COMMANDS, AuthorityRight, OperatorCommand, run_command
from atoll.runtime.control.socket import ControlServer, door_path, send_request_async

WITHOUT_A_VERB = {"invitations", "fetch", "evaluate", "sample", "blame"}


class GreetArguments(msgspec.Struct, frozen=True):
    name: str
    times: int = 1


async def greet(host: Any, given: GreetArguments) -> str:
    return " ".join([host.word, given.name] * given.times)


GREET = OperatorCommand("greet", GreetArguments, "Greet a peer.", greet)
ORDER = GREET._replace(right=AuthorityRight("E-TST-01", "greet {0.name}", "atoll status in {0.name}'s folder"))


def test_a_command_is_an_entry_and_a_handler(tmp_path: Path):
    """Over the control socket: arguments are checked and converted, defaults are filled in."""
    host = SimpleNamespace(word="hello")

    async def main() -> None:
        handlers = {"greet": lambda given: run_command(GREET, host, given)}
        server = ControlServer(tmp_path, handlers)
        await server.open()
        try:
            assert await send_request_async(tmp_path, "greet", name="ada") == "hello ada"
            assert await send_request_async(tmp_path, "greet", name="ada", times=2) == "hello ada hello ada"
            for wrong in ({}, {"name": 7}, {"name": "ada", "times": "many"}):
                with pytest.raises(UsageError, match="E-DOOR-03 invalid request"):
                    await send_request_async(tmp_path, "greet", **wrong)
        finally:
            await server.close()

    asyncio.run(main())


def test_a_peer_without_the_right_is_refused_before_the_handler_starts():
    host = SimpleNamespace(may_recover=False)  # the handler would fail: no word
    with pytest.raises(RefusedError, match=r"E-TST-01 only .* can greet ada") as caught:
        asyncio.run(run_command(ORDER, host, {"name": "ada"}))
    assert caught.value.fix == "atoll status in ada's folder"
    host = SimpleNamespace(may_recover=True, word="hello")
    assert asyncio.run(run_command(ORDER, host, {"name": "ada"})) == "hello ada"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_table_and_the_command_line_describe_a_command_alike(command: OperatorCommand):
    assert command.help.endswith(".") and "\n" not in command.help
    if command.name in WITHOUT_A_VERB:
        return
    place = app["checkpoint"] if command.name == "rollback" else app
    assert place[command.name].help.strip().splitlines()[0].strip() == command.help


OLDER = (  # a command, and the reply of a peer that lacks what the command prints
    ("status", {"run": "ada's", "run_id": "ab" * 32, "phase": "training", "rounds": 9}),
    ("peers", [{"peer": "ada", "standing": "member"}]),
    ("amend run.rounds=9", {"agreed": True, "amended": {"run.rounds": 9}, "round": 3}),
    ("pause", {"agreed": True, "round": 3}),
    ("invite", {"agreed": True}),
    ("export model.safetensors", {"trained": 3}),
    ("recover --yes", {"epoch": 1}),
    ("checkpoint rollback 3", {"round": 4}),
)


@pytest.mark.parametrize(("words", "reply"), OLDER, ids=[words for words, _ in OLDER])
def test_a_command_beside_a_peer_of_another_version_says_that_it_must_be_restarted(
    words: str, reply: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with answering(tmp_path, reply):
        done = atoll(*words.split(), "--dir", tmp_path)
        assert done.returncode == 2, done.stderr
        assert f"E-DOOR-09 the peer in {tmp_path} answered as another version of Atoll" in done.stderr
        assert f"try: atoll stop --dir {tmp_path}, then start the peer again" in done.stderr
        assert atoll(*words.split(), "--dir", tmp_path, "--json").returncode == 0


@pytest.mark.parametrize(("verb", "says"), [("stop", "ended; "), ("leave", "left the run; ")])
def test_a_peer_of_another_version_can_be_ended(verb: str, says: str, tmp_path: Path):
    """`atoll stop` is the next command of the error about its version."""
    with answering(tmp_path, {"leaving": "ada"}, ends=True):
        done = atoll(verb, tmp_path)
    assert done.returncode == 0 and done.stdout.startswith(f"{says}atoll up --dir {tmp_path} "), done.stderr


def test_an_unforeseen_error_in_the_peer_reaches_the_command(tmp_path: Path):
    with answering(tmp_path, AttributeError("no such thing")):
        failed = atoll("status", tmp_path)
    assert (
        failed.returncode == 5 and "E-DOOR-10" in failed.stderr and "AttributeError: no such thing" in failed.stderr
    )


def test_a_reply_that_cannot_be_read_is_of_another_version(tmp_path: Path):
    (tmp_path / "door").write_text(str(path := door_path(tmp_path)))
    with socket.socket(socket.AF_UNIX) as peer:
        peer.bind(str(path))
        peer.listen()

        def answer() -> None:
            line, _ = peer.accept()
            with line:
                line.recv(1000)
                line.sendall(b'{"ok": 3, "error": "a text"}\n')

        thread = threading.Thread(target=answer)
        thread.start()
        told = atoll("status", tmp_path)
        thread.join()
    path.unlink()
    assert told.returncode == 2 and "E-DOOR-09" in told.stderr


def test_names_of_commands_are_unique():
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
