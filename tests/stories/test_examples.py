"""The examples run as their first lines say: they are what a newcomer copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import PATIENCE_S
from warm import WarmPeer, code_of_script

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Callable[..., WarmPeer]]:
    """Begins an example in a fresh folder; it ends with the test."""
    with ExitStack() as ends:

        def begin(name: str, *words: str) -> WarmPeer:
            process = WarmPeer([], lies=code_of_script(tmp_path, str(EXAMPLES / name), *words))
            ends.callback(process.close)
            return process

        yield begin


def rest_of(process: WarmPeer) -> tuple[int, str, str]:
    """Exit status and what it said from now on, here and on stderr."""
    assert process.stderr is not None
    said = process.stdout.read()
    return process.wait(PATIENCE_S), said, process.stderr.read()


def test_reduce_averages_among_three_that_join_by_the_ticket_it_prints(begun: Callable[..., WarmPeer]):
    crew = [begun("reduce.py")]
    first = crew[0].stdout.readline()
    ticket = first.split()[-1]
    assert ticket.startswith("ATOLL1:"), first
    crew += [begun("reduce.py", ticket) for _ in range(2)]
    done = [rest_of(one) for one in crew]
    assert [status for status, _, _ in done] == [0, 0, 0]
    for _, words, _ in done:
        assert [line.split(":")[0] for line in words.splitlines() if line.startswith("step")] == [
            f"step {n}" for n in range(10)
        ]


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        pytest.param("federated.py", (), "validation loss", marks=pytest.mark.long),
        pytest.param("robust.py", (), "nnm + trimmed mean", marks=pytest.mark.long),
    ],
)
def test_an_example_alone_comes_to_its_last_line(
    name: str, words: tuple[str, ...], says: str, begun: Callable[..., WarmPeer]
):
    status, said, _ = rest_of(begun(name, *words))
    assert status == 0 and says in said


def test_mnist_without_its_images_says_where_they_are(begun: Callable[..., WarmPeer]):
    status, _, said = rest_of(begun("mnist.py", "mnist.npz"))
    assert status == 2
    assert "there is no mnist.npz" in said
    assert "https://" in said
