"""Members of these tests are forked from an interpreter that has imported the libraries; so are their peers."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import forkserver
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "cli"), str(HERE.parent / "runtime")]
LIBRARIES = [
    *("atoll.integrations.transformers", "atoll.integrations.lightning", "atoll.integrations.accelerate"),
    *("transformers.trainer", "transformers.models.llama", "peft", "forked_peer", "atoll.runtime.bootstrap"),
]


@pytest.fixture(scope="session")
def libraries() -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload(LIBRARIES)
    return server


@pytest.fixture
def begun(
    tmp_path: Path, libraries: forkserver.ForkServer, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., "WarmPeer"]]:  # noqa: F821  # imported once sys.path has it
    """Begins a script in this test's folder, with this environment; it ends with the test."""
    from warm import WarmPeer, code_of_script

    monkeypatch.setattr(forkserver, "connect_to_new_process", libraries.connect_to_new_process)
    with ExitStack() as ends:

        def begin(script: Path, *words: str, folder: Path = tmp_path, prints: int = 0, **env: str) -> WarmPeer:
            """`prints`: it kills itself by SIGKILL when it has printed so many lines of steps."""
            prepared = f"import forked_peer; forked_peer.prepare({env!r}, {prints})\n"
            process = WarmPeer([], lies=prepared + code_of_script(folder, str(script), *words))
            ends.callback(process.close)
            return process

        yield begin
