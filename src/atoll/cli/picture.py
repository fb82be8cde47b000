"""Terminal pictures of a run, drawn with rich: one peer's view, and the demo's view of a whole swarm."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from atoll.base.units import bytes_text, counted_text, per_second_text, seconds_text
from atoll.runtime.event_log import RunStatus

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48  # characters
JOINING = Spinner("dots", Text("waiting for the members"))  # one object, whose frames follow the time


def peer_picture(p: RunStatus) -> RenderableType:
    """View of one peer: round, phase, step, loss, members, bytes."""
    head = Text()
    head.append(f" {p.run or '…'} ", style="bold reverse")
    of = f"/{p.rounds}" if p.rounds else ""
    is_known = not p.me or p.is_member(p.me)  # a newcomer has not seen how many rounds the run has trained
    head.append(f"  round {p.trained}{of}  {p.phase}" if is_known else f"  no member yet, {p.phase}")
    if p.phase == "training" and p.inner_steps:
        head.append(f" {p.step}/{p.inner_steps}")
    if p.loss is not None:
        head.append(f"  loss {p.loss:.3f}", style="bold")
    if (held_out := p.evaluated.get("loss")) is not None:
        head.append(f"  held-out {held_out:.3f}")
    members = counted_text(sum(m["standing"] == "member" for m in p.members), "member")
    head.append(f"  {members}  {per_second_text(p.tokens_per_s, p.unit)}".rstrip())
    lines: list[RenderableType] = [head, *_bars(p), _traffic(p.bytes_out, p.bytes_data_parallel)]
    if p.curve:
        lines.append(Text(" " + curve_text([loss for _, loss in p.curve]), style="cyan"))
    if p.trouble:
        lines.append(Text(f" {p.trouble}", style="yellow"))
    return Group(*lines)


def _bars(p: RunStatus) -> list[RenderableType]:
    """Bar of the download in progress, and bar of the run with the time left; a spinner until members answer."""
    bars = list[RenderableType]()
    if p.phase in ("starting", "joining"):
        bars.append(JOINING)
    here, whole = p.transferred()
    if whole:
        bars.append(_bar(f"downloading {bytes_text(here)} of {bytes_text(whole)}", here / whole, ""))
    if p.rounds and not p.over and (not p.me or p.is_member(p.me)):
        step = p.step / p.inner_steps if p.phase == "training" and p.inner_steps else 0.0
        left = f"about {seconds_text(p.left_s)} left" if p.left_s is not None else ""
        bars.append(_bar("rounds", min(1.0, (p.trained + step) / p.rounds), left))
    return bars


def _bar(title: str, share: float, after: str) -> Table:
    row = Table.grid(padding=(0, 1))
    row.add_row(Text(f" {title}"), ProgressBar(total=1.0, completed=share, width=30), Text(after))
    return row


def _traffic(sent: int, data_parallel: int) -> Text:
    text = Text(f" sent {bytes_text(sent)}")
    if data_parallel and sent:
        text.append(
            f"; data-parallel training would have sent {bytes_text(data_parallel)}, {data_parallel / sent:.0f}x"
        )
    return text


def curve_text(losses: Sequence[float]) -> str:
    """Loss curve in eight heights, one column per round, at most CURVE_WIDTH."""
    if not losses:
        return ""
    stride = -(-len(losses) // CURVE_WIDTH)
    kept = list(losses[::stride])
    low, high = min(kept), max(kept)
    span = (high - low) or 1.0
    return "".join(BARS[min(7, int((loss - low) / span * 7.999))] for loss in kept)


def swarm_picture(
    names: Sequence[str],
    seen: dict[str, RunStatus],
    gone: dict[str, str],
    shown: RunStatus,
    sent: int,
    data_parallel: int,
) -> RenderableType:
    """View of the demo: one line per process, one bar for the run. `gone`: exit reasons of processes that ended."""
    table = Table(box=None, padding=(0, 2, 0, 1), show_header=True, header_style="dim")
    for title in ("peer", "phase", "step", "loss", "sent", "standing"):
        table.add_column(title, justify="left" if title in ("peer", "phase", "standing") else "right")
    for name in names:
        p = seen[name]
        standing = next((m["standing"] for m in shown.members if m["name"] == name), "…")
        style = "red" if name in gone else ""
        phase = gone.get(name, p.phase)
        step = f"{p.step}/{p.inner_steps}" if p.inner_steps and name not in gone else ""
        loss = f"{p.step_loss:.2f}" if p.step_loss is not None else ""
        table.add_row(name, phase, step, loss, bytes_text(p.bytes_out), standing, style=style)
    done = Table.grid(padding=(0, 1))
    share = shown.trained / shown.rounds if shown.rounds else 0.0
    done.add_row(
        Text(f" round {shown.trained}/{shown.rounds or '?'}"),
        ProgressBar(total=1.0, completed=share, width=30),
        Text(f"loss {shown.loss:.3f}" if shown.loss is not None else "starting", style="bold"),
        Text(per_second_text(shown.tokens_per_s, shown.unit)),
        Text(f"about {seconds_text(shown.left_s)} left" if shown.left_s else ""),
    )
    lines: list[RenderableType] = [table, done, _traffic(sent, data_parallel)]
    if shown.curve:
        lines.append(Text(" " + curve_text([loss for _, loss in shown.curve]), style="cyan"))
    return Group(*lines)
