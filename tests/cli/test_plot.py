"""What `atoll plot` draws of a record."""

from __future__ import annotations

import json
from pathlib import Path

from atoll.cli.plot import rounds_of


def test_rounds_that_the_run_went_back_behind_are_no_part_of_the_picture(tmp_path: Path):
    """After three rounds the run goes back to the first of them, and trains one more."""
    closed = [{"trained": n, "loss": float(n), "counted": ["ada"], "samples": 4} for n in (1, 2, 3)]
    closed += [
        {"trained": 1, "loss": 1.0, "back_to": 0},
        {"trained": 2, "loss": 0.5, "counted": ["ada"], "samples": 4},
    ]
    record = tmp_path / "facts.jsonl"
    lines = ({"at": at, "fact": "RoundClosed", "round": at} | told for at, told in enumerate(closed))
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [(row["trained"], row["loss"]) for row in rounds_of(record)] == [(1, 1.0), (2, 0.5)]
