"""`atoll plot RUN_DIR`: plots of a run from its event log. Needs matplotlib: pip install matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from atoll.base.errors import RunFailedError, UsageError
from atoll.base.units import count_text, counted_text
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.training.experiment.plots import MEGA, charts_in

SMOOTH_FROM, SMOOTH_SHARE = 20, 0.15  # rounds from which noise is smoothed; weight of a round in the mean
LOSS, HELD_OUT = "#0072b2", "#cc79a7"


def plot(
    run: Dir = None,
    *,
    out: Annotated[
        Path | None, Parameter(help="PNG, SVG or PDF to write. Default: plot.png in that folder.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Draw training loss, held-out loss and bytes sent over the rounds of a run, running or finished."""
    folder = folder_of(run)
    try:
        rounds = rounds_of(folder / "facts.jsonl")
        held_out = evaluations_of(folder / "facts.jsonl") if rounds else []
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
    _draw(rounds, held_out, path, title_of(folder / "facts.jsonl"))
    losses = [row["loss"] for row in rounds if is_reported(row["loss"])]
    if json:
        say_json({"path": str(path), "rounds": len(rounds), "loss": losses[-1] if losses else None})
        return
    loss = f"training loss {losses[0]:.3f} -> {losses[-1]:.3f}" if losses else "no loss was reported"
    say(f"{len(rounds)} rounds, {loss}; see {path}")


def is_reported(loss: float | None) -> bool:
    """False for a round whose members reported no loss, and for losses that are not finite."""
    return loss is not None and isfinite(loss)


def title_of(record: Path) -> str:
    """Name of the run, model, members and day of its newest round."""
    from atoll.runtime.event_log import RunStatus, entries_in

    progress, at = RunStatus(), 0.0
    for entry in entries_in(record):
        progress.fold(entry)
        at = entry.get("time_s", at)
    members = sum(m["standing"] == "member" for m in progress.members)
    size = f" ({count_text(progress.parameters)})" if progress.parameters else ""
    parts = [
        progress.run,
        progress.model + size,
        counted_text(members, "peer") if members else "",
        datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d") if at > 0 else "",
    ]
    return ", ".join(filter(None, parts))


def smoothed(losses: Sequence[float], share: float) -> list[float]:
    """Exponential mean: each value moves it by this share."""
    means = list[float]()
    for loss in losses:
        means.append(loss if not means else means[-1] + share * (loss - means[-1]))
    return means


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


def evaluations_of(record: Path) -> list[tuple[int, float]]:
    """(rounds trained, held-out loss) as `atoll evaluate` found it, without rolled-back rounds."""
    from atoll.runtime.event_log import entries_in

    points = dict[int, float]()
    for entry in entries_in(record):
        if entry.get("fact") == "RoundClosed" and "back_to" in entry:
            points = {trained: loss for trained, loss in points.items() if trained <= entry["trained"]}
        elif entry.get("fact") == "StateEvaluated" and entry["loss"] is not None:
            points[entry["trained"]] = entry["loss"]
    return sorted(points.items())


def _draw(rounds: list[dict[str, Any]], held_out: list[tuple[int, float]], path: Path, title: str) -> None:
    """Loss beside peers, and traffic; a chart without any value is left out."""
    lossy = bool(held_out) or any(is_reported(row["loss"]) for row in rounds)
    sends = any(row["bytes_out"] for row in rounds)
    with charts_in(path, max(1, lossy + sends), title) as charts:
        if lossy or not sends:
            _draw_loss(rounds, held_out, charts[0])
        if sends:
            _draw_traffic(rounds, charts[-1])


def _draw_loss(rounds: list[dict[str, Any]], held_out: list[tuple[int, float]], chart: Any) -> None:
    reported = [(row["trained"], row["loss"]) for row in rounds if is_reported(row["loss"])]
    if reported:
        steps, losses = zip(*reported, strict=True)
        is_long = len(losses) >= SMOOTH_FROM
        chart.plot(steps, losses, color=LOSS, alpha=0.35 if is_long else 1.0, linewidth=1, label="training loss")
        if is_long:
            chart.plot(steps, smoothed(losses, SMOOTH_SHARE), color=LOSS, label="its moving mean")
    if held_out:
        steps, losses = zip(*held_out, strict=True)
        chart.plot(steps, losses, color=HELD_OUT, marker="o", markersize=3, linewidth=1, label="held-out loss")
    chart.set(title="training loss" if reported or not held_out else "held-out loss", xlabel="round", ylabel="nats")
    beside = chart.twinx()
    beside.step(
        [row["trained"] for row in rounds],
        [row["peers"] for row in rounds],
        where="mid",
        color="#999999",
        linewidth=1,
        label="peers counted",
    )
    beside.set(ylabel="peers counted", ylim=(0, max(row["peers"] for row in rounds) + 1))
    beside.yaxis.get_major_locator().set_params(integer=True)
    # the line of peers stays behind the loss
    chart.set_zorder(beside.get_zorder() + 1)
    chart.patch.set_visible(False)
    lines = [*chart.get_lines(), *beside.get_lines()]
    chart.legend(lines, [line.get_label() for line in lines], frameon=False)


def _draw_traffic(rounds: list[dict[str, Any]], chart: Any) -> None:
    steps = [row["trained"] for row in rounds]
    chart.plot(steps, [row["bytes_out"] / MEGA for row in rounds], color="#009e73", label="this peer sent")
    naive = [row["bytes_data_parallel"] / MEGA for row in rounds]
    if naive[-1]:
        chart.plot(steps, naive, color="#d55e00", linestyle="--", label="data-parallel would have sent")
        chart.set_yscale("log")
    chart.set(title="traffic", xlabel="round", ylabel="MB")
    chart.legend(frameon=False)
