"""Participation: sampling of trainers per round, drawn by the last vertex from its own body.

    credits in the last vertex ─► the draw, from its id ─► members that train, are awaited, counted, audited
    counted members, members drawn in vain ─► credits in the next vertex

All other members vote, own parts and watch as usual. Specification: specs/clients.md. A *group* (of data, of a
site) follows an @ in a member's name and is its own claim, so groups count only where members trust each other.

Invariants:
- Pure functions of agreed facts, in integers.
- Where members may lie, credit cannot be saved by declining or being away: such members would be drawn together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET

from atoll.base.fair_draw import ABSENT_COST, TURN_COST, Credit, credits_after, draw_sample
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import PEERS_MAX
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import RoundOptOutNotice
from atoll.wire.messages.vertex import Member, VertexBody

GROUP_MARK = "@"
GROUP = re.compile(r"[A-Za-z0-9._-]{0,32}")
NAME_MAX = 64  # characters of a member's name
LEVEL: Credit = (0, 0)  # equal to the member with the most turns
THOUSAND = 1000


class ParticipationPolicy(msgspec.Struct, frozen=True):
    """How many of the settled trainers train in a round; fixed in genesis."""

    thousandths: Annotated[int, msgspec.Meta(ge=0, le=THOUSAND)] = 0  # share of them, rounded up; or
    peers: Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)] = 0  # a number of them
    least: Annotated[int, msgspec.Meta(ge=1, le=PEERS_MAX)] = 1  # lower bound, as far as there are that many

    def of(self, trainers: int) -> int:
        wanted = self.peers or -(-self.thousandths * trainers // THOUSAND)
        return min(max(wanted, self.least), trainers)


def named(name: str, group: str) -> str:
    """A peer's name as shown to others, with its group."""
    behind = GROUP_MARK + group if group else ""
    return name[: NAME_MAX - len(behind)] + behind


def group_problem(group: str) -> str:
    """Why this is no valid group name; empty if it is."""
    return "" if GROUP.fullmatch(group) else "up to 32 letters, digits, dots, dashes and underscores"


def group_of(name: str) -> str:
    """The text after the last @ of a member's name; empty without a group."""
    return name.rpartition(GROUP_MARK)[2] if GROUP_MARK in name else ""


def drawn_after(head: Digest, body: VertexBody, sample: ParticipationPolicy, trusted: bool) -> frozenset[PeerId]:
    """Trainers of the round after this body, with id `head`. `trusted`: members do not lie.

    Newcomers and resting members are not drawn, unless there are no others.
    """
    settled = [m for m in body.members if m.may_train and m.standing == "member"]
    resting = resting_in(body, body.round + 1)
    there = [m for m in settled if m.peer not in resting] or settled or [m for m in body.members if m.may_train]
    known, count = _credits_in(body), sample.of(len(settled) or len(there))
    credits = [known.get(m.peer, LEVEL) for m in there]
    return frozenset(there[place].peer for place in draw_sample(head, _groups(there, trusted), credits, count))


def next_credits(
    parent: VertexBody,
    members: Sequence[Member],
    drawn: Collection[PeerId],
    contributors: Collection[PeerId],
    trusted: bool,
) -> tuple[Credit, ...]:
    """Credits per line of `members`, the membership after a round with these drawn and counted members.

    A member drawn in vain pays a quarter of a turn where members trust each other, else a whole turn. Where they do
    not, a member that is away or rests returns level with the member with the most turns.
    """
    known, groups = _credits_in(parent), _groups(members, trusted)
    resting = set[PeerId]() if trusted else resting_in(parent, parent.round + 1)
    of_group = {group_of(m.name): known[m.peer][1] for m in parent.members if trusted and m.peer in known}
    credits: list[Credit] = []
    for m, group in zip(members, groups, strict=True):
        there = m.may_train and m.standing == "member" and m.peer not in resting
        counts = m.peer in known and (trusted or there)
        own, among = known[m.peer] if counts else LEVEL
        credits.append((own, of_group.get(group, among)))
    vain = ABSENT_COST if trusted else TURN_COST
    costs = [TURN_COST if m.peer in contributors else vain if m.peer in drawn else 0 for m in members]
    return tuple(credits_after(groups, credits, costs))


def resting_in(body: VertexBody, round: int) -> set[PeerId]:
    """Members that report in this body that they skip that round."""
    said = ((signed.signer, statement_in(signed)) for signed in body.reports)
    return {peer for peer, word in said if isinstance(word, RoundOptOutNotice) and word.round == round}


def _credits_in(body: VertexBody) -> Mapping[PeerId, Credit]:
    if body.credits is UNSET:
        return {m.peer: LEVEL for m in body.members}
    return {m.peer: credit for m, credit in zip(body.members, body.credits, strict=False)}


def _groups(members: Sequence[Member], trusted: bool) -> list[str]:
    """Group per member; a member without one is a group by itself. A mark keeps both kinds of names apart."""
    return [(trusted and group_of(m.name)) or GROUP_MARK + m.peer for m in members]
