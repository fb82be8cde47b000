"""The chain of agreed vertices as one peer holds it, and the rule by which a stranger's vertex is believed.

A vertex is believed if it follows the head and carries a commit certificate by a quorum of the committee that
the head's membership implies (or the recovery key's signature, which is visible for ever as a new epoch). Older
vertices than the window are not held in memory. Never decides anything: it only checks what was decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import CLOCK_FAR_S
from atoll.crypto.digest import digest
from atoll.wire.codec import decode_body, decode_vertex, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.vertex import Member, Vertex, VertexBody

RECOVERY_DOMAIN = b"atoll/recovery/1\0"
VOTE_BYTES = 100  # of one in a certificate, at the least
WINDOW = 256  # vertices held in memory; a laggard further behind is served from disk or fetches a checkpoint


def genesis_digest(vertex: Vertex) -> Digest:
    """The name of the run."""
    return vertex_id(vertex.body)


def is_too_old(parent: VertexBody, time_s: Seconds) -> bool:
    """True if no body after `parent` may have this time: it is earlier, by less than a wrong clock that was set."""
    return 0 < parent.time_s - time_s <= CLOCK_FAR_S


def recovery_bytes(run: Digest, body: bytes) -> bytes:
    """What the recovery identity signs to make this body final without a quorum."""
    return RECOVERY_DOMAIN + run + vertex_id(body)


def whole(kept: Iterable[bytes]) -> list[Vertex]:
    """Vertices from this disk, up to the first that it changed: shown to others it would be taken for a forgery.

    Whether the votes under them hold is for whoever hears them, and for `atoll verify`.
    """
    found: list[Vertex] = []
    for data in kept:
        try:
            vertex = decode_vertex(data)
        except PeerFault:
            break
        if vertex.certificate is not None and vertex.certificate.digest != vertex_id(vertex.body):
            break
        found.append(vertex)
    return found


class MissingVertex(NamedTuple):
    """A vertex that this disk changed or lost; `id` is what the next one calls its parent, None if none does."""

    round: int
    id: Digest | None


def newest_hole(kept: Mapping[str, bytes], run: Digest) -> MissingVertex | None:
    """The newest hole in what a starting peer goes by; None: it is whole.

    Who went on from it would refuse what the others agreed on, and blame them for it.
    """
    if "genesis" in kept and [genesis_digest(vertex) for vertex in whole([kept["genesis"]])] != [run]:
        return MissingVertex(-1, None)
    rounds = [int(name.removeprefix("vertex/")) for name in kept if name.startswith("vertex/")]
    if not rounds:
        return None
    goal = None
    for round in range(max(rounds), min(rounds) - 1, -1):  # older ones stay on the disk: nobody goes by them
        vertex = next(iter(whole([kept.get(f"vertex/{round}", b"")])), None)
        try:
            body = decode_body(vertex.body) if vertex is not None else None
        except PeerFault:
            body = None
        if vertex is None or body is None or body.round != round or goal not in (None, vertex_id(vertex.body)):
            return MissingVertex(round, goal)
        goal = body.parent
    return MissingVertex(0, None) if min(rounds) == 0 and goal != run else None


class VertexChain:
    """Vertices from genesis to the head; `voters_of(head id, body)` gives the keys and quorum for the next."""

    def __init__(
        self,
        genesis: Vertex,
        notary: StatementSigner,
        voters_of: Callable[[Digest, VertexBody], tuple[dict[PeerId, bytes], int]],
        recovery: bytes = b"",
    ) -> None:
        body = decode_body(genesis.body)
        assert body.round == -1 and genesis_digest(genesis) == notary.run
        self.notary, self.voters_of, self.recovery = notary, voters_of, recovery
        self.genesis = genesis
        self.bodies: dict[int, VertexBody] = {-1: body}
        self.vertices: dict[int, Vertex] = {-1: genesis}
        self.ids: dict[int, Digest] = {-1: genesis_digest(genesis)}
        self.head = -1

    @property
    def head_body(self) -> VertexBody:
        return self.bodies[self.head]

    @property
    def head_id(self) -> Digest:
        return self.ids[self.head]

    def append(self, vertex: Vertex, who: PeerId = PeerId("")) -> VertexBody | None:
        """Believe this vertex if it is the next one. None if it is not the next; PeerFault if it is forged."""
        body = decode_body(vertex.body, who)
        if body.round != self.head + 1:
            return None
        self.check(vertex, body, who)
        self._hold(vertex, body)
        return body

    def check(self, vertex: Vertex, body: VertexBody, who: PeerId = PeerId("")) -> None:
        """Raise PeerFault unless this vertex follows the head and is final. Its content is
        `peer/round/vertex_body.py`'s."""
        self._check_after(self.head_id, self.head_body, vertex, body, who)

    def check_after(self, parent: Vertex, vertex: Vertex, who: PeerId) -> None:
        """The same of two that memory does not hold; whether the parent itself is final is another question."""
        before, body = decode_body(parent.body, who), decode_body(vertex.body, who)
        self._check_after(vertex_id(parent.body), before, vertex, body, who)

    def other(self, vertex: Vertex, who: PeerId = PeerId("")) -> VertexBody | None:
        """Where another branch begins: as final as ours of this round, after the same parent, and not the same.

        None if it is ours, or its place is not in memory; PeerFault if it is forged.
        """
        body = decode_body(vertex.body, who)
        mine, parent = self.ids.get(body.round), self.ids.get(body.round - 1)
        if mine in (None, vertex_id(vertex.body)) or parent is None or body.parent != parent:
            return None
        self._check_after(parent, self.bodies[body.round - 1], vertex, body, who)
        return body

    def _check_after(
        self, parent: Digest, before: VertexBody, vertex: Vertex, body: VertexBody, who: PeerId
    ) -> None:
        if body.run != self.notary.run or body.parent != parent:
            raise PeerFault(who, f"a vertex for round {body.round} that does not follow ours")
        if is_too_old(before, body.time_s):
            raise PeerFault(who, f"a vertex for round {body.round} that is older than its parent")
        self._check_certificate(parent, before, vertex, body, who)

    def restore(self, vertex: Vertex) -> None:
        """A vertex from my own disk, checked before it was written; anything unreadable is the caller's trouble."""
        body = decode_body(vertex.body)
        self._hold(vertex, body)

    def recent_states(self, count: int) -> dict[Digest, Digest]:
        """Vertex id -> agreed state of the last `count` vertices."""
        rounds = range(max(-1, self.head - count + 1), self.head + 1)
        return {self.ids[r]: self.bodies[r].state for r in rounds if r in self.bodies}

    def rounds(self) -> dict[Digest, int]:
        """Of all vertices in memory, by their ids."""
        return {vertex: round for round, vertex in self.ids.items()}

    def since(self, first: int, bytes_max: int) -> tuple[Vertex, ...]:
        """Consecutive vertices from round `first`, as many as fit; empty if that round is not in memory."""
        chosen: list[Vertex] = []
        size = 0
        for round in range(first, self.head + 1):
            vertex = self.vertices.get(round)
            if vertex is None:
                break
            votes = vertex.certificate.votes if vertex.certificate else ()
            size += len(vertex.body) + sum(max(VOTE_BYTES, len(peer) + len(signed)) for peer, signed in votes)
            if chosen and size > bytes_max:
                break
            chosen.append(vertex)
        return tuple(chosen)

    def _check_certificate(
        self, parent: Digest, before: VertexBody, vertex: Vertex, body: VertexBody, who: PeerId
    ) -> None:
        certificate, digest = vertex.certificate, vertex_id(vertex.body)
        if certificate is None:
            self._check_recovery(before, vertex, body, who)
            return
        if body.epoch != before.epoch:  # or whoever forges votes needs no signers of eras
            raise PeerFault(who, f"votes for round {body.round} that begin an epoch: only the recovery key can")
        keys, quorum = self.voters_of(parent, before)
        fits = (
            certificate.stage == "commit"
            and certificate.round == body.round
            and certificate.digest == digest != ZERO_DIGEST
            and self.notary.certificate_holds(certificate, keys, quorum)
        )
        if not fits:
            raise PeerFault(who, f"a certificate for round {body.round} that no quorum signed")

    def _check_recovery(self, parent: VertexBody, vertex: Vertex, body: VertexBody, who: PeerId) -> None:
        """A new epoch: the same state, fewer members, signed by the identity that genesis named for this.

        That identity may also bring another vote key of its own: no quorum can admit it where only it votes.
        """
        signed = recovery_bytes(self.notary.run, vertex.body)
        stays = body.invited == parent.invited and (body.epoch, body.state, body.trained, body.tickets) == (
            *(parent.epoch + 1, parent.state, parent.trained),
            parent.tickets,
        )
        silent = not (body.parts or body.commits or body.reports)  # nobody judged whose words these are
        before = {m.peer: m for m in parent.members}
        owner, keys = digest(self.recovery), {m.vote_key for m in parent.members}
        for m in body.members:
            line = before.get(m.peer)
            if line is not None and line.identity == owner and m.vote_key not in keys:
                before[m.peer] = _with_key_of(m, line)
        only_fewer = [m.peer for m in body.members] == list(before) and all(
            _same_or_away(m, before[m.peer]) for m in body.members
        )
        believed = self.recovery and self.notary.verifier.identity_holds(self.recovery, signed, vertex.recovery)
        if not (believed and stays and silent and only_fewer and any(m.votes for m in body.members)):
            raise PeerFault(
                who, f"a vertex for round {body.round} that neither a quorum nor the recovery key signed"
            )

    def _hold(self, vertex: Vertex, body: VertexBody) -> None:
        self.head = body.round
        self.bodies[body.round], self.vertices[body.round] = body, vertex
        self.ids[body.round] = vertex_id(vertex.body)
        old = body.round - WINDOW
        if old > -1:
            for held in (self.bodies, self.vertices, self.ids):
                held.pop(old, None)


def _with_key_of(now: Member, before: Member) -> Member:
    """The line before under the key of the line now, if that is a key of the same kind."""
    return replace(before, vote_key=now.vote_key) if len(now.vote_key) == len(before.vote_key) else before


def _same_or_away(now: Member, before: Member) -> bool:
    """What was measured of its links may be forgotten, never written anew."""
    stays = replace(before, links=now.links)
    return now.links in (b"", before.links) and now in (stays, replace(stays, standing="away"))
