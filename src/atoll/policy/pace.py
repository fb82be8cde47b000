"""How fast a round goes and how much of it is training, from what its exchanges take: arithmetic for planning.

Never measures and never decides anything about a run in progress: `atoll plan` asks before there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from atoll.base.ids import Seconds

ENOUGH = 0.9  # share of time spent training from which on more steps per round buy little


@dataclass(frozen=True)
class RunPace:
    round_s: Seconds
    utilisation: float  # share of the round in which a peer trains, 0 … 1


def pace(exchanges_s: Sequence[Seconds], steps: int, step_s: Seconds, overlap: int = 0) -> RunPace:
    """A round of `steps` steps with these exchanges in turn; training waits for each after `overlap` more steps.

    Exchanges do not overlap each other (`schedule.check_schedule`), so each waits for itself alone.
    """
    training_s = steps * step_s
    waiting_s = sum(max(0.0, exchange_s - overlap * step_s) for exchange_s in exchanges_s)
    round_s = training_s + waiting_s
    return RunPace(round_s, training_s / round_s)


def steps_for(utilisation: float, exchanges_s: Sequence[Seconds], step_s: Seconds, overlap: int = 0) -> int:
    """The fewest steps per round that leave so large a share of time for training."""
    assert 0 < utilisation < 1
    waiting_s = sum(max(0.0, exchange_s - overlap * step_s) for exchange_s in exchanges_s)
    return max(1, ceil(utilisation / (1 - utilisation) * waiting_s / step_s))


def simple_exchange_s(
    sent_bytes: float, heard_bytes: float, up_bytes_s: float, down_bytes_s: float, hops: int, latency_s: Seconds
) -> Seconds:
    """What does not pass through owners: everybody sends and hears at once, each on a link of its own."""
    assert min(up_bytes_s, down_bytes_s) > 0 and latency_s < inf
    return hops * latency_s + max(sent_bytes / up_bytes_s, heard_bytes / down_bytes_s)
