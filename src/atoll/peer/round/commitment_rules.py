"""Rules for one commitment: its form, parts, weight, claim and late work.

The same rules apply on receipt and inside a body, so no peer commits to what no body could carry.

Not responsible for: signatures, and comparing two commitments.
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

NUMBER_MAX = 2**40  # largest steps or samples of one update: their sums stay far below 2^63, the wire's maximum


def commitment_flaw(ground: RoundContext, peer: PeerId, commit: Commitment) -> str | None:
    """Flaw of this peer's commitment apart from its number of parts, as a predicate; None if valid."""
    if (flaw := commit_flaw(commit)) is not None:
        return flaw
    if not weighs_right(ground, peer, commit):
        return "claims a weight that is not its own"
    if not claims_right(ground, commit):
        return "does not say how it trained"
    if (flaw := draws_flaw(ground, peer, commit)) is not None:
        return flaw
    return None if late_right(ground, peer, commit) else "claims late work that it cannot have"


def parts_fit(ground: RoundContext, commit: Commitment) -> bool:
    """True for a pass without parts, or for an update with all parts.

    With only the first ones if callers set its length.

    Raises PeerFault for an unknown topology.
    """
    planned = len(ground.with_topology(commit.asked).owners)
    return commit.parts in (0, planned) or (commit.values > 0 and 0 < commit.parts < planned)


def weighs_right(ground: RoundContext, peer: PeerId, commit: Commitment) -> bool:
    """True if the row's weight is correct. Statistics that sort rows require a weight above 0."""
    member = ground.plan.by_peer.get(peer)
    if member is None or peer not in ground.plan.givers:
        return False
    if commit.parts == 0 or member.standing in WEIGHTLESS:
        return commit.weight == 0
    own = row_weight(ground, peer, commit.steps_now, commit.samples_now)
    return commit.weight == own and (commit.samples > 0 or ground.trust.statistic == "mean")


def row_weight(ground: RoundContext, peer: PeerId, steps: int, samples: int) -> int:
    """Weight of a trainer's update in a mean: its samples; 0 for a newcomer.

    Where the run keeps reputation, influence times the assigned steps taken decides, so claimed samples change
    nothing. Where time ends rounds no number of steps is assigned and an invented one would raise the weight:
    influence alone decides.
    """
    if peer in ground.weightless:
        return 0
    if not ground.trust.reputed or ground.trust.statistic != "mean":
        return samples
    work = ground.work_of(peer)
    assigned = work.steps if work.limit_s is None else 1
    return ground.influence[peer] * max(0, min(steps, assigned))


def late_right(ground: RoundContext, peer: PeerId, commit: Commitment) -> bool:
    """True if late work is allowed here and is a part of the committed work."""
    late = commit.late
    if late is None:
        return True
    fits = 0 <= late.since < commit.round and 0 < late.steps < commit.steps and 0 < late.samples < commit.samples
    return commit.parts > 0 and ground.takes_late(peer) and fits


def claims_right(ground: RoundContext, commit: Commitment) -> bool:
    """True if the commitment has a claim exactly where rounds are audited."""
    if commit.claimed is None:
        return not (ground.trust.audited and commit.parts)
    return ground.trust.audited and commit.parts > 0 and len(commit.claimed) == DIGEST_BYTES


def draws_flaw(ground: RoundContext, peer: PeerId, commit: Commitment) -> str | None:
    """Flaw of the secrets for redundant training; None if valid.

    They accompany an update only in runs that use them.
    """
    if ground.twins is None or not commit.parts:
        return None if commit.draws is None else "names secrets that decide nothing"
    return ground.twins.flaw(peer, commit)


def commit_flaw(commit: Commitment) -> str | None:
    """Flaw that no honest commitment has: numbers that break sums for all, or text that fills the vertex."""
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
    if commit.claims_data and commit.data is None:
        return "claims samples that cannot be"
    if len(commit.why) > WORDS_MAX or len(commit.root) != DIGEST_BYTES:
        return "holds a text or a digest that is too long"
    return report_flaw(commit.links)
