"""Pace of a planned run: round time and share of training, from the time of its exchanges.

Not responsible for: measuring, a run in progress; `atoll plan` uses it before a run exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, inf

from atoll.base.ids import Seconds

ENOUGH = 0.9  # share of time spent training above which more steps per round gain little


@dataclass(frozen=True)
class RunPaceEstimate:
    round_s: Seconds
    utilisation: float  # share of the round in which a peer trains, 0 … 1


def pace(exchanges_s: Sequence[Seconds], steps: int, step_s: Seconds, overlap: int = 0) -> RunPaceEstimate:
    """Pace of a round of `steps` steps with these exchanges in turn, each awaited after `overlap` more steps."""
    training_s = steps * step_s
    waiting_s = sum(max(0.0, exchange_s - overlap * step_s) for exchange_s in exchanges_s)
    round_s = training_s + waiting_s
    return RunPaceEstimate(round_s, training_s / round_s)


def steps_for(utilisation: float, exchanges_s: Sequence[Seconds], step_s: Seconds, overlap: int = 0) -> int:
    """The fewest steps per round for this share of training time."""
    assert 0 < utilisation < 1
    waiting_s = sum(max(0.0, exchange_s - overlap * step_s) for exchange_s in exchanges_s)
    return max(1, ceil(utilisation / (1 - utilisation) * waiting_s / step_s))


def simple_exchange_s(
    sent_bytes: float, heard_bytes: float, up_bytes_s: float, down_bytes_s: float, hops: int, latency_s: Seconds
) -> Seconds:
    """Time of an exchange without owners: all members send and receive at once, each on its own link."""
    assert min(up_bytes_s, down_bytes_s) > 0 and latency_s < inf
    return hops * latency_s + max(sent_bytes / up_bytes_s, heard_bytes / down_bytes_s)
