"""What one commitment may say: its form, its parts, its weight, its claim and its late work.

The same questions where it is heard and where it stands in a body, so nobody commits to what no body could carry.
Never looks at a signature and never at a second commitment.
"""

from __future__ import annotations

from math import isfinite

from atoll.base.ids import DIGEST_BYTES, PeerId
from atoll.base.limits import (
    WORDS_MAX,
)
from atoll.peer.round.context import RoundContext
from atoll.policy.links import report_flaw
from atoll.wire.messages.statements import (
    Commitment,
)
from atoll.wire.messages.vertex import WEIGHTLESS

NUMBER_MAX = 2**40  # steps and samples of one update: their sums stay far below 2^63, the largest on the wire


def parts_fit(ground: RoundContext, commit: Commitment) -> bool:
    """A pass has no parts; an update has all of them, or the first ones where its length is its caller's choice.

    PeerFault where it is to be reduced in a way that there is not.
    """
    planned = len(ground.by(commit.asked).owners)
    return commit.parts in (0, planned) or (commit.values > 0 and 0 < commit.parts < planned)


def weighs_right(ground: RoundContext, peer: PeerId, commit: Commitment) -> bool:
    """A row weighs what it should. Where rows are sorted, each must weigh something."""
    member = ground.plan.by_peer.get(peer)
    if member is None or peer not in ground.plan.givers:
        return False
    if commit.parts == 0 or member.standing in WEIGHTLESS:
        return commit.weight == 0
    own = row_weight(ground, peer, commit.steps_now, commit.samples_now)
    return commit.weight == own and (commit.samples > 0 or ground.statistic == "mean")


def row_weight(ground: RoundContext, peer: PeerId, steps: int, samples: int) -> int:
    """What a trainer's update counts in a mean: the samples it learned from, and a newcomer's nothing.

    Where records are kept these decide, and how many of the steps assigned it took: what it says of its samples
    then moves nothing. Where time ends rounds nobody is assigned a number of steps, and one that it made up would
    be worth as much as it is large: records alone decide.
    """
    if peer in ground.weightless:
        return 0
    if not ground.reputed or ground.statistic != "mean":
        return samples
    assigned = ground.plan.steps_of(peer) if ground.plan.limit_s is None else 1
    return ground.influence[peer] * max(0, min(steps, assigned))


def late_right(ground: RoundContext, peer: PeerId, commit: Commitment) -> bool:
    """Late work is where it may be, and is a part of what the commitment stands for."""
    late = commit.late
    if late is None:
        return True
    fits = 0 <= late.since < commit.round and 0 < late.steps < commit.steps and 0 < late.samples < commit.samples
    return commit.parts > 0 and ground.takes_late(peer) and fits


def claims_right(ground: RoundContext, commit: Commitment) -> bool:
    """Where rounds are audited an update comes with a claim that can be, and nowhere else does anything."""
    if commit.claimed is None:
        return not (ground.audited and commit.parts)
    return ground.audited and commit.parts > 0 and len(commit.claimed) == DIGEST_BYTES


def draws_flaw(ground: RoundContext, peer: PeerId, commit: Commitment) -> str | None:
    """Where members take each other's samples an update comes with the secrets that decide it, and nowhere else
    does anything. What is wrong with them; None if nothing is."""
    if ground.twins is None or not commit.parts:
        return None if commit.draws is None else "names secrets that decide nothing"
    return ground.twins.flaw(peer, commit)


def commit_flaw(commit: Commitment) -> str | None:
    """What no honest peer says: numbers that break sums for everybody, or words that fill the vertex."""
    if not (
        isfinite(commit.loss)
        and isfinite(commit.step_s)
        and isfinite(commit.offset_s)
        and abs(commit.loss) < NUMBER_MAX
    ):
        return "holds a number that is not one"
    if not (
        0 <= commit.values < NUMBER_MAX
        and 0 <= commit.steps < NUMBER_MAX
        and 0 <= commit.samples < NUMBER_MAX
        and 0 <= commit.step_s < NUMBER_MAX
    ):
        return "holds a number that cannot be"
    if len(commit.why) > WORDS_MAX or len(commit.root) != DIGEST_BYTES:
        return "holds a text or a digest that is too long"
    return report_flaw(commit.links)
