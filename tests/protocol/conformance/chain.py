"""Heights one after the other: real bodies whose members differ, so that each height has another committee.

Before every height a few may come, go, or bring the key of a new session; the proposer takes what it likes of that,
so had one height two bodies, the next one would have two committees. Of nobody's committee more lie, or lost their
disk, than its quorum allows; but there are more liars than that, since some wait outside, and some were let go.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.crypto.digest import digest
from atoll.policy.plan import QuorumRule, quorum
from atoll.simulation.signatures import VirtualSigner
from atoll.wire.codec import decode_body, encode, vertex_id
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, Vertex, VertexBody

AHEAD_S = 1.0  # of my clock a body may be: clocks are apart


@dataclass(frozen=True)
class VertexIs:
    vertex: Vertex  # in worlds of one height its body says nothing


@dataclass(frozen=True)
class Offers:
    """What the next vertex may change."""

    joins: tuple[PeerId, ...]
    leaves: tuple[PeerId, ...]


class Chain:
    """`voters` of `names` begin; who lies is drawn here, of the others as many as of them."""

    def __init__(
        self, seed: int, names: Sequence[PeerId], voters: int, liars: int, rule: QuorumRule, length: int, raft: bool
    ) -> None:
        self.draw = random.Random(f"members/{seed}")
        self.names, self.rule, self.length, self.raft = tuple(names), rule, length, raft
        self.villains = frozenset(self.draw.sample(names[:voters], liars))
        self.villains |= set(self.draw.sample(names[voters:], min(2 * liars, len(names) - voters)))
        self.sessions = dict.fromkeys(names, 0)
        self.known: dict[Digest, Offers] = {}
        self.genesis = VertexBody(
            run=ZERO_DIGEST,
            round=-1,
            attempt=0,
            parent=ZERO_DIGEST,
            time_s=0.0,
            proposer=names[0],
            parts=(),
            state=ZERO_DIGEST,
            commits=(),
            members=tuple(map(self._member, names[:voters])),
            tickets=(),
            reports=(),
            metrics=SwarmRoundMetrics(0.0, 0, 0),
        )
        self.run = vertex_id(encode(self.genesis))

    @property
    def first(self) -> Vertex:
        return Vertex(encode(self.genesis), None)

    def key_of(self, name: PeerId) -> bytes:
        return VirtualSigner(name, self.sessions[name]).vote_key

    def voters_of(self, head: Digest, body: VertexBody) -> tuple[dict[PeerId, bytes], int]:
        keys = {m.peer: m.vote_key for m in body.members if m.votes}
        return keys, quorum(len(keys), self.rule)

    def turns(self, head: Digest, body: VertexBody) -> tuple[PeerId, ...]:
        names = [m.peer for m in body.members]
        stays = self.raft and body.proposer in names
        first = names.index(body.proposer) if stays else int.from_bytes(head[:8], "big") % len(names)
        return (*names[first:], *names[:first])

    def offers(self, head: Digest, body: VertexBody) -> Offers:
        """Such that the next committee withstands its liars, whatever a proposer takes of them."""
        if head in self.known:
            return self.known[head]
        inside, most = [m.peer for m in body.members], max(1, (len(body.members) - 1) // 3)
        joins, leaves = list[PeerId](), list[PeerId]()
        for name in self.draw.sample(self.names, len(self.names)):
            kind = leaves if name in inside else joins
            kind.append(name)
            if len(joins) + len(leaves) > most or not self._withstands(inside, joins, leaves):
                kind.remove(name)
        self.known[head] = Offers(tuple(joins), tuple(leaves))
        return self.known[head]

    def _withstands(
        self, inside: Sequence[PeerId], joins: Sequence[PeerId], leaves: Sequence[PeerId], lost: int = 0
    ) -> bool:
        least = len(inside) - len(leaves)
        bad = sum(p in self.villains for p in (*inside, *joins)) + lost
        return least > 0 and bad <= least - quorum(least, self.rule)

    def may_lose_disk(self, head: Digest, body: VertexBody, name: PeerId) -> bool:
        """It will be as good as dead until a vertex has its new key."""
        inside, offers = [m.peer for m in body.members], self.offers(head, body)
        already = sum(m.vote_key != self.key_of(m.peer) for m in body.members)
        return not already and self._withstands(inside, (*offers.joins, name), offers.leaves, lost=1)

    def body(
        self, head: Digest, parent: VertexBody, proposer: PeerId, time_s: float, mark: str, draw: random.Random
    ) -> bytes:
        """A right one, with some of what is on offer."""
        offers = self.offers(head, parent)
        out = {p for p in offers.leaves if draw.random() < 0.6}
        stay = [replace(m, vote_key=self.key_of(m.peer)) for m in parent.members if m.peer not in out]
        come = [self._member(p) for p in offers.joins if draw.random() < 0.6]
        members = tuple(sorted((*stay, *come), key=lambda m: m.peer))
        return encode(
            replace(
                self.genesis,
                run=self.run,
                round=parent.round + 1,
                parent=head,
                time_s=max(parent.time_s, time_s),
                proposer=proposer,
                state=digest(mark.encode()),
                members=members,
            )
        )

    def wrong(
        self, head: Digest, parent: VertexBody, proposer: PeerId, time_s: float, mark: str, draw: random.Random
    ) -> bytes:
        """Nobody asked for these members; or it follows nothing; or it is of tomorrow."""
        body = decode_body(self.body(head, parent, proposer, time_s, mark, draw))
        liars = tuple(map(self._member, sorted(self.villains)))
        others = [replace(body, members=liars), replace(body, time_s=time_s + 1e5)]
        others.append(replace(body, parent=digest(mark.encode())))
        return encode(draw.choice(others))

    def is_right(self, raw: bytes, head: Digest, parent: VertexBody, now: float) -> bool:
        body, offers = decode_body(raw), self.offers(head, parent)
        before, after = {m.peer for m in parent.members}, {m.peer for m in body.members}
        fits = (body.run, body.round, body.parent) == (self.run, parent.round + 1, head)
        asked = before - after <= set(offers.leaves) and after - before <= set(offers.joins)
        keys = {p: {VirtualSigner(p, s).vote_key for s in range(n + 1)} for p, n in self.sessions.items()}
        known = all(m.vote_key in keys[m.peer] for m in body.members)
        return fits and asked and known and parent.time_s <= body.time_s <= now + AHEAD_S

    def _member(self, name: PeerId) -> Member:
        return Member(name, self.key_of(name), (), "trainer", "member", -1, 0.0, name)
