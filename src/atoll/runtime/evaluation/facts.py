"""Findings about agreed states, as facts in the event log of the peer's folder.

Invariants:
- A line is written at once and whole, so it may come from another process than the peer's.
Not responsible for: what a run decides. An evaluation is one computer's, and no vertex has it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from atoll.base.errors import UNREADABLE
from atoll.base.ids import Digest
from atoll.base.machine import Fact, tag_of
from atoll.base.units import counted_text
from atoll.runtime.clock import SystemClock
from atoll.runtime.event_log import TAIL_BYTES, fact_to_entry
from atoll.runtime.storage.ownership import open_private

RECORD = "facts.jsonl"
PREDICTIONS_MAX = 16  # pairs in a fact


class StateEvaluated(Fact, frozen=True, kw_only=True, tag="StateEvaluated"):
    """A local process measured the state agreed in this round. None: not measured.

    `predictions` are pairs of the right class and the predicted one.
    """

    phase = "evaluate"
    trained: int
    state: Digest
    loss: float | None = None
    accuracy: float | None = None
    samples: int = 0
    prompt: str = ""
    text: str = ""
    predictions: tuple[tuple[int, int], ...] = ()


def record_evaluation(folder: Path, found: StateEvaluated) -> dict[str, Any]:
    """Append this fact to the folder's event log; returns the line."""
    entry = fact_to_entry(found, SystemClock().now())
    assert entry is not None
    with open(folder / RECORD, "ab", buffering=0, opener=open_private) as file:
        file.write(msgspec.json.encode(entry) + b"\n")
    return entry


def newest_evaluation(folder: Path) -> dict[str, Any] | None:
    """The newest such line near the end of the folder's event log; None if there is none."""
    name = tag_of(StateEvaluated).encode()
    with suppress(FileNotFoundError), (folder / RECORD).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in reversed(file.read(TAIL_BYTES).split(b"\n")):
            if name in line:
                with suppress(*UNREADABLE):  # the first line may be cut
                    entry = msgspec.json.decode(line)
                    if isinstance(entry, dict) and entry.get("fact") == tag_of(StateEvaluated):
                        return entry
    return None


def evaluation_text(entry: dict[str, Any]) -> str:
    """One line about such a fact, or two with a text sample."""
    loss, accuracy = entry["loss"], entry["accuracy"]
    parts = [f"held-out loss {loss:.4f}"] if loss is not None else []
    parts += [f"{accuracy:.1%} right"] if accuracy is not None else []
    over = f" ({entry['samples']:,} samples)" if entry["samples"] else ""
    told = f"evaluated after {counted_text(entry['trained'], 'round')}: {', '.join(parts) or 'a sample'}{over}"
    return f"{told}\n  sample: {entry['text']}" if entry["text"] else told
