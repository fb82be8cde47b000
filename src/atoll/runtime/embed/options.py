"""Options of a run that a training loop founds, beyond the arguments of `atoll.found`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from atoll.base.arguments import Count, Positive, Share, Whole, checked_options
from atoll.base.ids import Seconds
from atoll.base.limits import PEERS_MAX, WINDOW_MOST_S
from atoll.policy.fault_tolerance import StatisticName

INNER_STEPS = 50  # optimizer steps of a round, unless the caller chooses


@checked_options("atoll.RunOptions", "E-ATT-11")
@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of `atoll.found`. UsageError if a value is out of its range.

    Outer step and codecs (docs/reference/config.md), for runs without a `recipe`:
    `outer_lr`, `outer_momentum`: of the outer Nesterov step.
    `up`, `down`: codecs of updates and of results (specs/codecs.md).
    `fragments`: parts of the model, of which each round exchanges one. `overlap`: inner steps that go on while a
    round is agreed. `epochs`: passes over its own data per round of a member, at most `inner_steps` steps.
    `share`: share of the values averaged per round, such as 0.005 with `inner_steps=1`. Every round averages other
    values, and members keep their own of the rest until the last round (SPARTA; codecs and outer step are fixed).

    Members:
    `min_peers`: a round waits while fewer members are present; 0: as many as `trust` needs.
    `statistic`: rule that combines updates; None: the default of `trust`. `trust="open"` allows no rule by
    distance.
    `sample` (a share) or `sample_peers` (a number): members drawn per round by the round before.
    `group`: owner of this loop's data (specs/clients.md). `name`: name of this peer; default: the computer's.

    Length of a round (specs/effort.md), never below `inner_steps_min` or above `inner_steps` steps:
    `round_time`: seconds of training. `target_samples`: samples of all members together; `attach(batch=…)` sets
    the samples per step. `adaptive_steps`: fewer steps as the loss of `run.report` falls.

    Network:
    `listen`: addresses, for members on other computers such as /ip4/0.0.0.0/tcp/7071; default: ATOLL_LISTEN.
    `announce`: addresses under which others reach this peer.
    """

    min_peers: Annotated[int, Meta(ge=0, le=PEERS_MAX)] = 0
    statistic: StatisticName | None = None
    outer_lr: Positive = 1.0
    outer_momentum: Share = 0.6
    up: str = "int8"
    down: str = "int8"
    fragments: Count = 1
    overlap: Whole = 0
    epochs: Whole = 0
    share: Share = 0.0
    sample: Share = 0.0
    sample_peers: Annotated[int, Meta(ge=0, le=PEERS_MAX)] = 0
    round_time: Annotated[Seconds, Meta(ge=0, le=WINDOW_MOST_S)] = 0.0
    target_samples: Annotated[int, Meta(ge=0, lt=2**40)] = 0
    adaptive_steps: bool = False
    inner_steps_min: Count = 1
    name: str = ""
    group: str = ""
    listen: tuple[str, ...] = ()
    announce: tuple[str, ...] = ()
