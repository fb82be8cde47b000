"""`atoll plot RUN_DIR`: plots of a run from its event log. Needs matplotlib: pip install matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import RunFailedError, UsageError
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.training.experiment.plots import MEGA, two_charts


def plot(
    run: Dir = None,
    *,
    out: Annotated[
        Path | None, Parameter(help="PNG, SVG or PDF to write. Default: plot.png in that folder.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Draw training loss and bytes sent over the rounds of a run, running or finished."""
    folder = folder_of(run)
    try:
        rounds = rounds_of(folder / "facts.jsonl")
    except (KeyError, TypeError) as why:
        raise RunFailedError(
            "E-PLOT-04",
            f"{folder / 'facts.jsonl'} holds incomplete facts: {why}",
            cause="another version of Atoll wrote it, or this disk changed bytes",
            fix=f"atoll checkpoint list {folder} has the losses as they were agreed",
        ) from None
    if not rounds:
        raise UsageError(
            "E-PLOT-01",
            f"the event log in {folder} has no trained round",
            cause="the run has not trained yet, or this is not a peer's folder",
            fix="atoll plot FOLDER, with the --dir of `atoll up` or `atoll join`",
        )
    path = (out or folder / "plot.png").expanduser()
    _draw(rounds, path)
    if json:
        say_json({"path": str(path), "rounds": len(rounds), "loss": rounds[-1]["loss"]})
    else:
        say(f"{len(rounds)} rounds, training loss {rounds[0]['loss']:.3f} -> {rounds[-1]['loss']:.3f}; see {path}")


def rounds_of(record: Path) -> list[dict[str, Any]]:
    """One row per trained round: loss, peers, bytes sent so far, and bytes of data-parallel training."""
    from atoll.runtime.event_log import RunStatus, entries_in

    if not record.exists():
        return []
    progress, rows = RunStatus(), dict[int, dict[str, Any]]()
    for entry in entries_in(record):
        progress.fold(entry)
        # later rounds than the target of a rollback are no longer part of the run
        if entry.get("fact") == "RoundClosed" and "back_to" in entry:
            rows = {trained: row for trained, row in rows.items() if trained <= entry["trained"]}
        elif entry.get("fact") == "RoundClosed" and entry.get("counted"):
            rows[entry["trained"]] = {
                "trained": entry["trained"],
                "loss": entry["loss"],
                "peers": len(entry["counted"]),
                "bytes_out": entry.get("bytes_out", 0),
                "bytes_data_parallel": progress.bytes_data_parallel,
            }
    return [rows[k] for k in sorted(rows)]


def _draw(rounds: list[dict[str, Any]], path: Path) -> None:
    steps = [row["trained"] for row in rounds]
    with two_charts(path) as (loss, sent):
        loss.plot(steps, [row["loss"] for row in rounds], color="#0072b2")
        loss.set(title="training loss", xlabel="round", ylabel="nats")
        peers = loss.twinx()
        peers.step(steps, [row["peers"] for row in rounds], where="mid", color="#999999", linewidth=1)
        peers.set(ylabel="peers counted", ylim=(0, max(row["peers"] for row in rounds) + 1))
        sent.plot(steps, [row["bytes_out"] / MEGA for row in rounds], color="#009e73", label="this peer sent")
        naive = [row["bytes_data_parallel"] / MEGA for row in rounds]
        if naive[-1]:
            sent.plot(steps, naive, color="#d55e00", linestyle="--", label="data-parallel would have sent")
            sent.set_yscale("log")
        sent.set(title="traffic", xlabel="round", ylabel="MB")
        sent.legend(frameon=False)
