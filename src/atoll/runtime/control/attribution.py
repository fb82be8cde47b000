"""`atoll blame --round`: fetches the archived rows of a round and measures the loss without each contributor.

Not responsible for: accusing a member (people do).
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING, Any

from atoll.base.errors import RefusedError, UsageError
from atoll.base.ids import PeerId, names_of
from atoll.base.units import history_round_text, spans_of, spans_text
from atoll.features.attribution.leave_one_out import (
    ReplayableRound,
    archived_rows,
    notable,
    question_of,
    state_lacking,
)
from atoll.peer.tasks import CheckStateStored, LeaveOneOutResult

if TYPE_CHECKING:  # the driver imports torch, and light commands import this file
    from atoll.peer.peer import Peer
    from atoll.runtime.training_peer import TrainingPeer
    from atoll.runtime.worker.training_worker import TrainingWorker


async def blame_round(host: TrainingPeer, round: int) -> dict[str, Any]:
    """The change of the loss without each contributor of this round."""
    if not host.island.trains or host.island.tended.attached:
        raise cannot_measure()
    try:
        asked = question_of(host.machine, round)
        if not await host.island.run(
            CheckStateStored(asked.ground.parent.state)
        ):  # pins the state, as rows are pinned
            raise state_lacking(round, asked.body.trained)
        gathered = await host.gather_rows(round)
    except ValueError as why:
        raise cannot_replay(host.machine, round, why) from None
    return await measure_effects(host.machine, host.island, asked, gathered.gone)


def cannot_measure() -> RefusedError:
    return RefusedError(
        "E-BLM-07",
        "this peer cannot measure held-out losses",
        cause="it observes, or its loop has a model and data of its own",
        fix="run the command at a member that trains a built-in model",
    )


def cannot_replay(peer: Peer, round: int, why: ValueError) -> RefusedError:
    body = None if peer.is_lost else peer.known.history.bodies.get(round)
    where = history_round_text(round, body.trained if body is not None else None)
    return RefusedError(
        "E-BLM-02",
        f"{where} cannot be replayed: {why}",
        fix="atoll blame lists the rounds with archived updates",
    )


async def measure_effects(
    peer: Peer, island: TrainingWorker, asked: ReplayableRound, gone: tuple[tuple[int, PeerId], ...]
) -> dict[str, Any]:
    """Replay the round with the rows on this disk; `gone` are the others. Raises UsageError if there are none."""
    round, archived = asked.body.round, archived_rows(peer)
    work = asked.work(archived.get(round, {}))
    if not any(work.parts):
        here = sorted(archived)
        kept = f"this one those of history rounds {spans_text(spans_of(here))}" if here else "this one none"
        later = f"atoll blame --round {here[-1]}, or " if here else ""
        raise UsageError(
            "E-BLM-03",
            f"no reachable member kept the updates of {history_round_text(round, asked.body.trained)}",
            cause=f"peers keep updates for keep.updates rounds of their run.toml, {kept}",
            fix=f"{later}set keep.updates higher at all members and start them again, "
            "which keeps updates from then on",
        )
    found = await island.run(work)
    assert isinstance(found, LeaveOneOutResult)
    left_out = [n for n, part in enumerate(work.parts) if part is None]
    told = _summary(peer, round, found, gone) | {"trained": asked.body.trained}
    return told | {"parts_left_out": left_out, "summed_on_the_way": asked.summed_on_the_way}


def _summary(
    peer: Peer, round: int, found: LeaveOneOutResult, gone: tuple[tuple[int, PeerId], ...]
) -> dict[str, Any]:
    names = names_of((m.peer, m.name) for m in peer.known.history.head_body.members)
    stand_out = notable(found)
    peers = [
        {
            "peer": one.peer,
            "name": names.get(one.peer, one.peer),
            "loss": _finite(one.loss),
            "change": _finite(one.loss - found.whole) if one.loss is not None else None,
            "why": one.why,
            "notable": one.peer in stand_out,
        }
        for one in found.without
    ]
    peers.sort(key=lambda p: (not p["notable"], p["change"] is None, p["change"] or 0.0))
    return {
        "round": round,
        "exact": found.exact,
        "before": _finite(found.before),
        "loss": _finite(found.whole),
        "peers": peers,
        "gone": [{"part": part, "peer": peer, "name": names.get(peer, peer)} for part, peer in gone],
    }


def _finite(loss: float | None) -> float | None:
    """The loss if JSON can express it; else None."""
    return loss if loss is not None and isfinite(loss) else None
