"""Plots of experiment results, and the one place that writes image files. Needs matplotlib.

Not responsible for: training, interactive windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.base.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atoll.training.experiment.results import ExperimentResult

MEGA = 1e6


@contextmanager
def charts_in(path: Path, count: int, title: str = "") -> Iterator[list[Any]]:
    """Charts side by side under a title, written to `path` (PNG, SVG, PDF) when the block ends.

    UsageError if matplotlib is missing or the file cannot be written.
    """
    if not path.suffix or path.is_dir():
        raise _unwritable(path, "it names no image file")
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        raise UsageError("E-PLOT-02", "matplotlib is not installed", fix="pip install matplotlib") from None
    with pyplot.rc_context({"svg.fonttype": "none"}):
        figure, charts = pyplot.subplots(1, count, figsize=(5 * count, 4), layout="constrained", squeeze=False)
        for chart in charts[0]:
            chart.grid(alpha=0.3, linewidth=0.6)
        if title:
            figure.suptitle(title, fontsize="medium")
        try:
            yield [*charts[0]]
            try:
                figure.savefig(path, dpi=130)
            except (OSError, ValueError) as why:
                raise _unwritable(path, str(why)) from None
        finally:
            pyplot.close(figure)


def _unwritable(path: Path, why: str) -> UsageError:
    fix = "name a .png, .svg or .pdf file in a folder that exists: losses.png"
    return UsageError("E-PLOT-03", f"cannot write an image to {str(path)!r}", cause=why, fix=fix)


def draw_outcomes(outcomes: Mapping[str, ExperimentResult], path: Path | str) -> None:
    """Loss over steps, and over uploaded bytes: training loss as lines, loss of the agreed model as points."""
    from matplotlib.ticker import LogLocator, NullFormatter

    with charts_in(Path(path), 2) as (over_steps, over_bytes):
        for index, (name, done) in enumerate(outcomes.items()):
            color = f"C{index}"
            steps = [one.step for one in done.history]
            losses = [one.train_loss for one in done.history]
            over_steps.plot(steps, losses, color=color, linewidth=1, label=name)
            over_steps.scatter(*zip(*done.curve, strict=True), color=color, s=16)
            over_bytes.plot([one.upload_bytes / MEGA for one in done.history], losses, color=color, linewidth=1)
            over_bytes.scatter([done.upload_bytes / MEGA], [done.val_loss], color=color, s=16)
        over_steps.set(title="training (lines) and validation (points)", xlabel="step", ylabel="nats")
        over_steps.legend(frameon=False)
        over_bytes.set(title="the same over traffic", xlabel="MB sent per peer", xscale="log")
        over_bytes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        over_bytes.xaxis.set_major_formatter(lambda value, place: f"{value:g}")
        over_bytes.xaxis.set_minor_formatter(NullFormatter())  # labels of all tenths would overlap
