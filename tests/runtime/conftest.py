"""Lets the tests here import `islands`, and `warm` of the commands' tests: importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "cli")]


@pytest.fixture
def book(tmp_path: Path) -> str:
    path = tmp_path / "book.txt"
    path.write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return str(path)


@pytest.fixture
def peers_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers of attached loops are threads of this process, with all their sockets: two imports of torch less."""
    from loops import start_in_thread

    from atoll.runtime.embed.peer_channel import PeerChannel

    monkeypatch.setattr(PeerChannel, "start", start_in_thread)
    monkeypatch.setattr(
        "atoll.runtime.bootstrap.prepare_folder", lambda folder: folder.mkdir(parents=True, exist_ok=True)
    )


@pytest.fixture
def forked_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers are forked from an interpreter that has imported torch; their pipes and their ends are as ever."""
    from warm import trainer_program

    monkeypatch.setattr("atoll.runtime.trainer.client.PROGRAM", trainer_program())
