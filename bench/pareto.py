"""Loss against bytes and hours, all recipes side by side: a table and a picture of reports of bench/convergence.py.

    for r in auto diloco streaming; do python bench/convergence.py --recipe $r --json >> runs.jsonl; done
    python bench/pareto.py runs.jsonl [--png pareto.png] [--json]

Reads reports, one per line, and trains nothing. A run is on the front if no other of the same steps and peers ends
with a loss at most as high and sends at most as many bytes: marked `*`, the line in the picture. `--quick` is the
same: there is nothing to shorten.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from form import asking, report, versions


def rows_of(text: str) -> list[dict[str, Any]]:
    """Figures of every report of convergence in it, least loss first; ValueError if there is none."""
    reports = [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = [one["figures"] for one in reports if one.get("bench") == "convergence"]
    if not rows:
        raise ValueError("no report of bench/convergence.py in it: run that with --json")
    for row in rows:
        row["front"] = not any(_better(other, row) for other in rows)
    return sorted(rows, key=lambda row: (row["steps"], row["peers"], row["val_loss"]))


def _better(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """At most as high a loss for at most as many bytes, and less of one of them."""
    if (one["steps"], one["peers"]) != (other["steps"], other["peers"]):
        return False
    here, there = ((row["val_loss"], -(row["upload_ratio"] or 0.0)) for row in (one, other))
    return here != there and here[0] <= there[0] and here[1] <= there[1]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| recipe | arguments | steps | peers | val loss | gap | upload ÷ | download ÷ | rounds "
        "| hours at 20 | 100 | 1000 Mbit/s | front |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gap = f"{row['gap_percent']:+.1f} %" if "gap_percent" in row else ""
        hours = " | ".join("" if h is None else f"{h:.2f}" for h in row["modelled_h"].values())
        told = " ".join(f"`{one}`" for one in row["set"])
        lines.append(
            f"| {row['recipe']} | {told} | {row['steps']} | {row['peers']} | {row['val_loss']:.4f} | {gap} "
            f"| {row['upload_ratio']}× | {row['download_ratio']}× | {row['rounds']} | {hours} "
            f"| {'*' if row['front'] else ''} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 6))
    front = sorted((row["upload_ratio"], row["val_loss"]) for row in rows if row["front"] and row["upload_ratio"])
    axes.plot(*zip(*front, strict=True), color="tab:orange", zorder=1)
    for row in rows:
        at = row["upload_ratio"] or 1.0, row["val_loss"]
        axes.scatter(*at, color="tab:orange" if row["front"] else "tab:blue", zorder=2)
        axes.annotate(" ".join([row["recipe"], *row["set"]]), at, textcoords="offset points", xytext=(5, 4), size=7)
    axes.set_xscale("log")
    axes.set_xlabel("bytes that a peer sends: times fewer than ring data parallelism in fp32")
    axes.set_ylabel("validation loss, nats per byte")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = asking(__doc__, "the same")
    parser.add_argument("runs", type=Path, help="reports of bench/convergence.py --json, one per line")
    parser.add_argument("--png", type=Path, help="where to draw; needs matplotlib")
    asked = parser.parse_args()
    try:
        rows = rows_of(asked.runs.read_text())
    except (OSError, ValueError) as why:
        sys.exit(f"{asked.runs}: {why}")
    if asked.png:
        draw(rows, asked.png)
    print(report("pareto", {"runs": len(rows)}, rows, versions()) if asked.json else table(rows))


if __name__ == "__main__":
    main()
