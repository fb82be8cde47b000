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

ROUNDS = 300  # fewer would be over before the second process has come back
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
    """Both processes begin the second time where the run was; the figure shows all rounds since."""
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, kernels leave the output of child processes alone
    text = (EXAMPLES / "notebook.ipynb").read_text()
    notebook = nbformat.reads(text, as_version=4)
    client = Interrupting(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    first, second, figure = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert client.pressed is not None and printed(first).rstrip().endswith("interrupted")
    begins = [int(count) for count in re.findall(r"begins after (\d+) rounds", printed(second))]
    assert len(begins) == 2 and all(2 <= count < ROUNDS for count in begins)
    assert f"{ROUNDS} of {ROUNDS} rounds" in str(second.outputs)
    assert any("image/png" in output.get("data", {}) for output in figure.outputs)
    assert os.listdir(tmp_path) == ["atoll-local"]
