"""`atoll blame`: whose losses stand apart, and after which rounds the loss rose; from a run's history, offline.

Says what vertices hold and no more: losses are what each peer reported of its own data, and updates are not kept,
so nobody can be convicted by this. Reads as `atoll checkpoint` does, without judging. Never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from atoll.base.errors import UsageError
from atoll.cli.checkpoint import read_vertex
from atoll.cli.say import AsJson, Dir, folder_of, say, say_json
from atoll.cli.verify import kept_in

CANNOT = (
    "losses are each peer's own word about its own data; updates are not kept, so what one update did is unknown"
)


def blame(
    run: Dir = None,
    *,
    metric: Annotated[
        Literal["loss"], Parameter(help="What to compare peers by; commitments hold the loss.")
    ] = "loss",
    json: AsJson = False,
) -> None:
    """Whose loss stands apart from the others', and who counted before it rose; from the history, offline."""
    from msgspec.structs import asdict

    from atoll.node.blame import blame_by_loss, refusals

    folder = folder_of(run)
    with kept_in(folder) as kept:
        peers, jumps = blame_by_loss(read_vertex(kept, folder, r)[1] for r in kept.rounds)
        refused = refusals(read_vertex(kept, folder, r)[1] for r in kept.rounds)
    if not peers:
        raise UsageError(
            "E-BLM-01",
            f"no update was counted yet in {folder}",
            cause="the run is still assembling members, or this folder has not caught up",
            fix="atoll status",
        )
    if json:
        found = [asdict(p) for p in peers]
        told = {"jumps": [asdict(j) for j in jumps], "refused": [asdict(r) for r in refused]}
        say_json({"metric": metric, "peers": found} | told | {"cannot_tell": CANNOT})
        return
    say("  loss above the others' in the same rounds; how theirs changed after it counted, and after it did not")
    for p in peers:
        worst = f"{_signed(p.worst)} in round {p.worst_round}" if p.worst is not None else "-"
        change = f"{_signed(p.rise)} / {_signed(p.rise_without)}"
        say(f"  {p.name:<16} {p.rounds:>6} rounds  {_signed(p.excess):>9}  worst {worst:<24}  {change}")
    for j in jumps:
        say(f"  round {j.round:>6}: loss rose by {j.by:.4f} after updates of {', '.join(j.counted)}")
    names = {p.peer: p.name for p in peers}
    for r in refused:
        rounds, who = ", ".join(map(str, r.refused)), ", ".join(names.get(p, p) for p in r.contributors)
        say(f"  round {r.round:>6}: the model was bad, back to round {r.back_to}; in rounds {rounds} counted {who}")
    say(f"  {CANNOT}")


def _signed(value: float | None) -> str:
    return f"{value:+.4f}" if value is not None else "-"
