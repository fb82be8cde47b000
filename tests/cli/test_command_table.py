"""Operator commands: one table serves the control socket and the command line."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from atoll.base.errors import RefusedError, UsageError
from atoll.cli.main import app
from atoll.runtime.control.commands import COMMANDS, AuthorityRight, OperatorCommand, run_command
from atoll.runtime.control.socket import ControlServer, send_request_async

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


def test_names_of_commands_are_unique():
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
