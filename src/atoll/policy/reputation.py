"""Reputation: integer scores of members, updated by every vertex and equal at every voter.

    conduct in a vertex ─► score of the moment ─► memory: up by a sixteenth, down by a quarter
    score ─► tier: part ownership, auditor duty, audit rate
    scores ─► committee, where not all members can vote (`policy/committee.py`)
    scores ─► influence: row weights, after liars among the rows were filtered

Invariants:
- Integers only, so all machines agree; scores stay within FLOOR … SCORE_ONE.
- No member is below a newcomer, so a new identity gains nothing.
- No influence exceeds 1.5 times an equal share.
- A reported loss better than the others' gains nothing.
Not responsible for: tensors, membership. specs/reputation.md explains every number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec import UNSET

from atoll.base.ids import PeerId
from atoll.base.limits import SCORE_ONE
from atoll.wire.messages.vertex import VertexBody

FLOOR = SCORE_ONE // 10  # score of a newcomer, and of a convicted member
RISE = 16  # a good round adds 1/16 of what is missing: "trusted" takes 28 of them
FALL = 4  # a bad round removes 1/4 of what the score exceeds the moment by
VOUCHED = 4  # an accepted audit adds 1/4 of what is missing: audits are few and factual
CLAIMED = 6 * SCORE_ONE // 10  # highest score by own claims alone, where rounds are audited
CLAIMED_UNTAUGHT = 5 * SCORE_ONE // 10  # the same where updates are scored: own claims never end probation
HOLLOW = 2  # a hollow update removes 1/2 of what is above the floor
PROGRESS, UPTIME, PARTICIPATION = 5, 3, 2  # tenths of the score of the moment

BELIEVED = 4  # spreads from the median within which a loss is fully believed
DISBELIEVED = 12  # spreads from which on it is not believed at all
SPREAD_LEAST = 32  # a spread is at least 1/32 of the median: honest losses may agree by chance
LOSSES_LEAST = 3  # fewer losses have no meaningful median
LOSS_UNITS = 2**20  # units per nat: a power of two, so that floats convert exactly

Tier = Literal["probation", "regular", "trusted"]
TIERS: tuple[tuple[Tier, int], ...] = (  # (tier, least score); boasters end at 5 000, silent owners at 8 000
    ("trusted", 85 * SCORE_ONE // 100),
    ("regular", CLAIMED),
)
AUDITED: dict[Tier, int] = {"probation": 4, "regular": 2, "trusted": 1}  # factor on the run's audit rate


@dataclass(frozen=True)
class WorkFindings:
    """Members with a settled finding about their work."""

    taught: frozenset[PeerId] = frozenset()  # its update taught the model
    hollow: frozenset[PeerId] = frozenset()  # its update did not, or is not what its samples make
    hid: frozenset[PeerId] = frozenset()  # its update was not shown to its referees

    def __or__(self, other: WorkFindings) -> WorkFindings:
        return WorkFindings(self.taught | other.taught, self.hollow | other.hollow, self.hid | other.hid)


NO_FINDINGS = WorkFindings()


@dataclass(frozen=True)
class MemberConduct:
    """What a vertex shows about a settled trainer, in a round with at least one result."""

    counted: int  # parts with a result that includes its row
    answered: int  # parts with a result
    steps: int  # claimed steps of its update
    assigned: int  # steps of the round
    belief: int = SCORE_ONE  # in the loss that it reports: 0 … SCORE_ONE
    duties: int = 0  # parts with a result of which it was the first owner
    done: int = 0  # those with its own result


def units_of(loss: float) -> int:
    """A loss in nats as an integer; a finite float times a power of two is exact."""
    return int(loss * LOSS_UNITS)


def beliefs(losses: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Belief in each loss, 0 … SCORE_ONE, by its distance from the median on either side.

    Median and spread are honest while liars are fewer than half (lower medians, so nothing is divided). A liar can
    report the loss that it expects from the others: belief is no proof of work.
    """
    if len(losses) < LOSSES_LEAST:
        return dict.fromkeys(losses, SCORE_ONE)
    middle = _lower_median(list(losses.values()))
    apart = {peer: abs(loss - middle) for peer, loss in losses.items()}
    spread = max(_lower_median(list(apart.values())), abs(middle) // SPREAD_LEAST, 1)
    width = (DISBELIEVED - BELIEVED) * spread
    return {
        peer: SCORE_ONE * min(max(DISBELIEVED * spread - distance, 0), width) // width
        for peer, distance in apart.items()
    }


def moment(conduct: MemberConduct) -> int:
    """0.5 · progress + 0.3 · uptime + 0.2 · participation, within FLOOR … SCORE_ONE."""
    uptime = SCORE_ONE * conduct.counted // conduct.answered
    progress = 0
    if conduct.counted and conduct.assigned:
        progress = conduct.belief * min(max(conduct.steps, 0), conduct.assigned) // conduct.assigned
    participation = SCORE_ONE * conduct.done // conduct.duties if conduct.duties else uptime
    return max(FLOOR, (PROGRESS * progress + UPTIME * uptime + PARTICIPATION * participation) // 10)


def shift_bounds(
    score: int,
    conduct: MemberConduct | None,
    *,
    audits: bool = False,
    vouched: bool = False,
    convicted: bool = False,
    scored: bool = False,
    hollow: bool = False,
    hid: bool = False,
) -> int:
    """The score after this vertex.

    `audits`, `scored`: the run has audits, loss scores. `vouched`: an audit of this member was accepted, or its
    update taught the model something. `hollow`: its update did not, or is not what its samples make. `hid`: its
    update was not shown to its referees, which costs as much as a silent round.
    """
    if convicted:
        return FLOOR
    if conduct is not None:
        now = moment(conduct)
        if now >= score:
            claimed = CLAIMED_UNTAUGHT if scored else CLAIMED if audits else SCORE_ONE
            score = max(score, min(score + _up(now - score, RISE), claimed))
        else:
            score -= _up(score - now, FALL)
    if hid:
        score -= _up(score - FLOOR, FALL)
    if hollow:
        return score - _up(score - FLOOR, HOLLOW)
    return score + _up(SCORE_ONE - score, VOUCHED) if vouched else score


def tier_of(score: int) -> Tier:
    for tier, least in TIERS:
        if score >= least:
            return tier
    return "probation"


def scores_of(body: VertexBody) -> dict[PeerId, int]:
    """Scores of all members in this vertex; empty without reputation, or before its first values."""
    if body.reputation is UNSET:
        return {}
    return {m.peer: max(score, FLOOR) for m, score in zip(body.members, body.reputation, strict=False)}


def audit_factor(scores: Mapping[PeerId, int], peer: PeerId) -> int:
    """Factor on the audit rate of genesis for this member."""
    return AUDITED[tier_of(scores.get(peer, FLOOR))] if scores else 1


def on_duty(peers: Sequence[PeerId], scores: Mapping[PeerId, int]) -> tuple[PeerId, ...]:
    """The peers that may own parts, in their order.

    Members on probation may not, unless they are more than may lie: a run of newcomers works with newcomers, and a
    few settled members never own everything.
    """
    low = {p for p in peers if tier_of(scores.get(p, FLOOR)) == "probation"} if scores else set[PeerId]()
    return tuple(peers) if len(low) > (len(peers) - 1) // 3 else tuple(p for p in peers if p not in low)


def by_tier(peers: Sequence[PeerId], scores: Mapping[PeerId, int]) -> list[PeerId]:
    """Peers in their order, with those on probation last."""
    return sorted(peers, key=lambda p: bool(scores) and tier_of(scores.get(p, FLOOR)) == "probation")


def influence_of(scores: Mapping[PeerId, int]) -> dict[PeerId, int]:
    """Relative influence: the score, capped at 3 / (2n) of the sum.

    So f < n / 3 liars weigh less than half together, even with the best scores against the worst.
    """
    return cut_to_share(scores, 3, 2 * len(scores))


def cut_to_share(scores: Mapping[PeerId, int], part: int, of: int) -> dict[PeerId, int]:
    """Scores capped at part / of of their capped sum, which must be at least an equal share.

    A cap lowers the sum that the share is of, so the level is found from above: with the k highest at level c, c ≤
    part / of · (k · c + rest) holds up to c = part · rest / (of − part · k).
    """
    rest = sum(scores.values())
    for cut, score in enumerate(sorted(scores.values(), reverse=True)):
        level = part * rest // (of - part * cut)
        if score <= level:
            return {peer: min(score, level) for peer, score in scores.items()}
        rest -= score
    return {}


def _lower_median(values: Sequence[int]) -> int:
    return sorted(values)[(len(values) - 1) // 2]


def _up(amount: int, parts: int) -> int:
    """An amount divided and rounded up, so that a score reaches its limit."""
    return -(-amount // parts)
