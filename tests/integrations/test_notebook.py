"""The notebook of the examples, as a person runs it: interrupted while it trains, it goes on in the next cell."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROUNDS = 300  # as many as in the example
EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.net, pytest.mark.timeout(150)]


class Interrupting(NotebookClient):
    """Presses the button when a training cell has printed the end of a round."""

    pressed: asyncio.Future[Any] | None = None

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        if "round 2" in msg["content"].get("text", "") and self.pressed is None:
            self.pressed = asyncio.ensure_future(self.km.interrupt_kernel())
        return super().process_message(msg, cell, cell_index)


def printed(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_a_notebook_founds_a_run_is_interrupted_goes_on_and_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The second time it begins where the run was, and the figure shows all rounds since.

    On a busy computer a process may come so late that the other one has trained all of them.
    """
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kernels leave the output of child processes alone
    text = (EXAMPLES / "notebook.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    client = Interrupting(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    first, second, figure = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert client.pressed is not None and "interrupted" in printed(first)
    begins = [int(count) for count in re.findall(r"begins after (\d+) rounds", printed(second))]
    assert len(begins) == 2 and 2 <= min(begins) < ROUNDS
    assert f"{ROUNDS} of {ROUNDS} rounds" in str(second.outputs)
    assert any("image/png" in output.get("data", {}) for output in figure.outputs)
    assert os.listdir(tmp_path) == ["atoll-local"]
