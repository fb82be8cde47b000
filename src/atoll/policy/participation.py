"""Who trains in a round where genesis says that not everybody does: drawn by the last vertex, from its own body.

    credits in the last vertex ─► the draw, from its id ─► who trains, is waited for, is counted, may be audited
    who counted, who was drawn in vain ─► credits in the next one

Everybody else votes, owns parts and watches as ever, and misses nothing. Specification: specs/clients.md.
Promises: pure functions of agreed things, in integers. A *group* (of data, of a site) stands behind an @ in a
member's name and is its own word: so groups count only where members trust each other. Where they do not, credit
cannot be saved up either, by declining or by being away: whoever does would come to be drawn together with others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET

from atoll.base.fair_draw import CALL, TURN, Credit, credits_after, draw_sample
from atoll.base.ids import Digest, PeerId
from atoll.base.limits import PEERS_MAX
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import SkipRound
from atoll.wire.messages.vertex import Member, VertexBody

GROUP_MARK = "@"
GROUP = re.compile(r"[A-Za-z0-9._-]{0,32}")
NAME_MAX = 64  # characters of a member's name
LEVEL: Credit = (0, 0)  # with whoever had the most turns
THOUSAND = 1000


class ParticipationPolicy(msgspec.Struct, frozen=True):
    """How many of the settled trainers train in a round; fixed in genesis."""

    thousandths: Annotated[int, msgspec.Meta(ge=0, le=THOUSAND)] = 0  # of them, rounded up; or
    peers: Annotated[int, msgspec.Meta(ge=0, le=PEERS_MAX)] = 0  # so many
    least: Annotated[int, msgspec.Meta(ge=1, le=PEERS_MAX)] = 1  # at any rate, as far as there are so many

    def of(self, trainers: int) -> int:
        wanted = self.peers or -(-self.thousandths * trainers // THOUSAND)
        return min(max(wanted, self.least), trainers)


def named(name: str, group: str) -> str:
    """What others call a peer of this group."""
    behind = GROUP_MARK + group if group else ""
    return name[: NAME_MAX - len(behind)] + behind


def group_problem(group: str) -> str:
    """Why no group can be called that; empty if one can."""
    return "" if GROUP.fullmatch(group) else "up to 32 letters, digits, dots, dashes and underscores"


def group_of(name: str) -> str:
    """What stands behind the last @ of a member's name; empty: it is in no group."""
    return name.rpartition(GROUP_MARK)[2] if GROUP_MARK in name else ""


def drawn_after(head: Digest, body: VertexBody, sample: ParticipationPolicy, trusted: bool) -> frozenset[PeerId]:
    """Who trains in the round after this body, whose id is `head`. `trusted`: members believe each other.

    Newcomers are not drawn yet, nor who said that it rests; if nobody else is there, they are.
    """
    settled = [m for m in body.members if m.trains and m.standing == "member"]
    resting = resting_in(body, body.round + 1)
    there = [m for m in settled if m.peer not in resting] or settled or [m for m in body.members if m.trains]
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
    """One per line of `members`, the membership after a round in which these were drawn and those counted.

    Who was drawn and does not count pays a quarter where members trust each other, else a whole turn. Where they do
    not, who is not there to be drawn, or rests, is level, when it comes back, with whoever had the most turns.
    """
    known, groups = _credits_in(parent), _groups(members, trusted)
    resting = set[PeerId]() if trusted else resting_in(parent, parent.round + 1)
    of_group = {group_of(m.name): known[m.peer][1] for m in parent.members if trusted and m.peer in known}
    credits: list[Credit] = []
    for m, group in zip(members, groups, strict=True):
        there = m.trains and m.standing == "member" and m.peer not in resting
        counts = m.peer in known and (trusted or there)
        own, among = known[m.peer] if counts else LEVEL
        credits.append((own, of_group.get(group, among)))
    vain = CALL if trusted else TURN
    costs = [TURN if m.peer in contributors else vain if m.peer in drawn else 0 for m in members]
    return tuple(credits_after(groups, credits, costs))


def resting_in(body: VertexBody, round: int) -> set[PeerId]:
    """Who says in this body that it does not train in that round."""
    said = ((signed.signer, statement_in(signed)) for signed in body.reports)
    return {peer for peer, word in said if isinstance(word, SkipRound) and word.round == round}


def _credits_in(body: VertexBody) -> Mapping[PeerId, Credit]:
    if body.credits is UNSET:
        return {m.peer: LEVEL for m in body.members}
    return {m.peer: credit for m, credit in zip(body.members, body.credits, strict=False)}


def _groups(members: Sequence[Member], trusted: bool) -> list[str]:
    """Who is in none is one by itself; no name of a group holds a mark, so nobody's is taken for another's."""
    return [(trusted and group_of(m.name)) or GROUP_MARK + m.peer for m in members]
