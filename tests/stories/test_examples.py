"""The examples run as their first lines say: they are what a newcomer copies."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytestmark = [pytest.mark.net, pytest.mark.timeout(120)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def begun(folder: Path, name: str, *words: str) -> subprocess.Popen[str]:
    typed = [sys.executable, EXAMPLES / name, *words]
    return subprocess.Popen(
        typed, cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )


def test_reduce_averages_among_three_that_join_by_the_ticket_it_prints(tmp_path: Path):
    with ExitStack() as ends:
        crew = [begun(tmp_path, "reduce.py")]
        ends.callback(lambda: [one.kill() for one in crew])
        assert crew[0].stdout is not None
        first = crew[0].stdout.readline()
        ticket = first.split()[-1]
        assert ticket.startswith("ATOLL1:"), first
        crew += [ends.enter_context(begun(tmp_path, "reduce.py", ticket)) for _ in range(2)]
        said = [one.communicate()[0] for one in crew]
    assert [one.returncode for one in crew] == [0, 0, 0]
    for words in said:
        assert [line.split(":")[0] for line in words.splitlines() if line.startswith("step")] == [
            f"step {n}" for n in range(10)
        ]


@pytest.mark.parametrize(
    ("name", "words", "says"),
    [
        pytest.param("federated.py", (), "validation loss", marks=pytest.mark.long),
        pytest.param("robust.py", (), "nnm + trimmed mean", marks=pytest.mark.long),
        pytest.param("lora.py", (), "values exchanged", marks=pytest.mark.long),
    ],
)
def test_an_example_alone_comes_to_its_last_line(tmp_path: Path, name: str, words: tuple[str, ...], says: str):
    alone = begun(tmp_path, name, *words)
    said, _ = alone.communicate()
    assert alone.returncode == 0
    assert says in said


def test_mnist_without_its_images_says_where_they_are(tmp_path: Path):
    typed = [sys.executable, EXAMPLES / "mnist.py", "mnist.npz"]
    done = subprocess.run(typed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "there is no mnist.npz" in done.stderr
    assert "https://" in done.stderr
