"""Vertex chain of one peer: the agreed history, and the checks before a vertex is appended.

Driving contract: create it from genesis, `restore` the stored vertices in round order, then `append` received ones.
`append` accepts only the vertex after the head; the caller fetches gaps and persists each appended vertex.
`voters_of` must return the committee that the parent's membership implies, equal at all peers.
`check`, `check_after` and `check_other_branch` change nothing. All raise PeerFault for a forged vertex.

Invariants:
- A vertex is final by a commit certificate from a quorum of the committee that the head's membership implies.
- Or by the signature of the run's authority, which begins a new epoch that stays visible.
- At most WINDOW vertices are held in memory, beside genesis.
Not responsible for: deciding vertices, judging their content.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.base.limits import CLOCK_FAR_S
from atoll.crypto.digest import digest
from atoll.wire.authority import Authority, FounderAuthority, SignedOrder
from atoll.wire.codec import decode_body, decode_vertex, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.vertex import Member, Vertex, VertexBody

RECOVERY_DOMAIN = b"atoll/recovery/1\0"
VOTE_BYTES = 100  # least size of one vote in a certificate
WINDOW = 256  # vertices held in memory; a peer further behind is served from disk or fetches a checkpoint


def genesis_digest(vertex: Vertex) -> Digest:
    """Digest of the genesis vertex, which names the run."""
    return vertex_id(vertex.body)


def is_too_old(parent: VertexBody, time_s: Seconds) -> bool:
    """Whether this time is too old for a successor of `parent`: earlier, by at most CLOCK_FAR_S.

    A larger step back is accepted as a wrong clock that was set.
    """
    return 0 < parent.time_s - time_s <= CLOCK_FAR_S


def recovery_bytes(run: Digest, body: bytes) -> bytes:
    """Bytes that the recovery identity signs to make this body final without a quorum."""
    return RECOVERY_DOMAIN + run + vertex_id(body)


def decode_undamaged(kept: Iterable[bytes]) -> list[Vertex]:
    """Decode vertices from the local disk, up to the first damaged one, which other peers would take for a forgery.

    Votes are not checked: the receiver and `atoll verify` do that.
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
    """A vertex that the local disk lost or damaged. `id`: the parent id in the next vertex, None without one."""

    round: int
    id: Digest | None


def find_missing_vertex(kept: Mapping[str, bytes], run: Digest) -> MissingVertex | None:
    """Find the newest missing vertex in the stored history of a starting peer; None if it is complete.

    A peer that continued from a damaged history would refuse agreed vertices and blame the other members.
    """
    if "genesis" in kept and [genesis_digest(vertex) for vertex in decode_undamaged([kept["genesis"]])] != [run]:
        return MissingVertex(-1, None)
    rounds = [int(name.removeprefix("vertex/")) for name in kept if name.startswith("vertex/")]
    if not rounds:
        return None
    goal = None
    for round in range(max(rounds), min(rounds) - 1, -1):  # older files stay on the disk unused
        vertex = next(iter(decode_undamaged([kept.get(f"vertex/{round}", b"")])), None)
        try:
            body = decode_body(vertex.body) if vertex is not None else None
        except PeerFault:
            body = None
        if vertex is None or body is None or body.round != round or goal not in (None, vertex_id(vertex.body)):
            return MissingVertex(round, goal)
        goal = body.parent
    return MissingVertex(0, None) if min(rounds) == 0 and goal != run else None


class VertexChain:
    """Vertices from genesis to the head. `voters_of(head id, body)` returns the next vertex's keys and quorum."""

    def __init__(
        self,
        genesis: Vertex,
        notary: StatementSigner,
        voters_of: Callable[[Digest, VertexBody], tuple[dict[PeerId, bytes], int]],
        authority: Authority | None = None,
    ) -> None:
        body = decode_body(genesis.body)
        assert body.round == -1 and genesis_digest(genesis) == notary.run
        self.notary, self.voters_of = notary, voters_of
        self.authority = authority or FounderAuthority(b"", notary.verifier)
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
        """Append this vertex if it follows the head, and return its body; None if it does not.

        Raises PeerFault if it is forged.
        """
        body = decode_body(vertex.body, who)
        if body.round != self.head + 1:
            return None
        self.check(vertex, body, who)
        self._store(vertex, body)
        return body

    def check(self, vertex: Vertex, body: VertexBody, who: PeerId = PeerId("")) -> None:
        """Raise PeerFault unless this vertex follows the head and is final.

        `peer/round/vertex_body.py` checks its content.
        """
        self._check_after(self.head_id, self.head_body, vertex, body, who)

    def check_after(self, parent: Vertex, vertex: Vertex, who: PeerId) -> None:
        """Check a vertex against a parent that is not in memory. The parent itself is not checked."""
        before, body = decode_body(parent.body, who), decode_body(vertex.body, who)
        self._check_after(vertex_id(parent.body), before, vertex, body, who)

    def check_other_branch(self, vertex: Vertex, who: PeerId = PeerId("")) -> VertexBody | None:
        """The body that begins another branch: final, with the parent of the local vertex of its round.

        None if it is the local vertex, or its round is not in memory. Raises PeerFault if it is forged.
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
            raise PeerFault(who, f"vertex for round {body.round} does not follow the local one")
        if is_too_old(before, body.time_s):
            raise PeerFault(who, f"vertex for round {body.round} is older than its parent")
        self._check_certificate(parent, before, vertex, body, who)

    def restore(self, vertex: Vertex) -> None:
        """Add a vertex from the local disk, which was checked before it was written.

        Raises PeerFault if it cannot be decoded.
        """
        body = decode_body(vertex.body)
        self._store(vertex, body)

    def recent_states(self, count: int) -> dict[Digest, Digest]:
        """Vertex id -> agreed state of the last `count` vertices."""
        rounds = range(max(-1, self.head - count + 1), self.head + 1)
        return {self.ids[r]: self.bodies[r].state for r in rounds if r in self.bodies}

    def rounds(self) -> dict[Digest, int]:
        """Vertex id -> round of all vertices in memory."""
        return {vertex: round for round, vertex in self.ids.items()}

    def vertices_from(self, first: int, bytes_max: int) -> tuple[Vertex, ...]:
        """Consecutive vertices from round `first` within `bytes_max`; empty if that round is not in memory."""
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
        if body.epoch != before.epoch:  # otherwise a forger of votes could avoid the signers of eras
            raise PeerFault(who, f"votes for round {body.round} begin an epoch: only the recovery key can")
        keys, quorum = self.voters_of(parent, before)
        fits = (
            certificate.stage == "commit"
            and certificate.round == body.round
            and certificate.digest == digest != ZERO_DIGEST
            and self.notary.certificate_holds(certificate, keys, quorum)
        )
        if not fits:
            raise PeerFault(who, f"certificate for round {body.round} that no quorum signed")

    def _check_recovery(self, parent: VertexBody, vertex: Vertex, body: VertexBody, who: PeerId) -> None:
        """Check a new epoch: the same state and fewer members, signed by the run's authority.

        A member with that authority may also replace its own vote key. No quorum could admit the new key of a lone
        voter.
        """
        signed = recovery_bytes(self.notary.run, vertex.body)
        kept = (body.invited, body.extensions, body.data) == (parent.invited, parent.extensions, parent.data)
        stays = kept and (body.epoch, body.state, body.trained, body.tickets) == (
            *(parent.epoch + 1, parent.state, parent.trained),
            parent.tickets,
        )
        silent = not (body.parts or body.commits or body.reports)  # no voter has judged such statements
        before = {m.peer: m for m in parent.members}
        owners, keys = {*map(digest, self.authority.identities)}, {m.vote_key for m in parent.members}
        for m in body.members:
            line = before.get(m.peer)
            if line is not None and line.identity in owners and m.vote_key not in keys:
                before[m.peer] = _replace_vote_key(m, line)
        only_fewer = [m.peer for m in body.members] == list(before) and all(
            _is_same_or_away(m, before[m.peer]) for m in body.members
        )
        believed = self.authority.allows(SignedOrder("recover", signed, vertex.recovery), parent.members)
        if not (believed and stays and silent and only_fewer and any(m.votes for m in body.members)):
            raise PeerFault(
                who, f"vertex for round {body.round} is signed by neither a quorum nor the recovery key"
            )

    def _store(self, vertex: Vertex, body: VertexBody) -> None:
        self.head = body.round
        self.bodies[body.round], self.vertices[body.round] = body, vertex
        self.ids[body.round] = vertex_id(vertex.body)
        old = body.round - WINDOW
        if old > -1:
            for held in (self.bodies, self.vertices, self.ids):
                held.pop(old, None)


def _replace_vote_key(now: Member, before: Member) -> Member:
    """The earlier member line with the new vote key, if both keys are of the same kind."""
    return replace(before, vote_key=now.vote_key) if len(now.vote_key) == len(before.vote_key) else before


def _is_same_or_away(now: Member, before: Member) -> bool:
    """Whether a member line is unchanged or only set to away. Link measurements may be dropped, never changed."""
    stays = replace(before, links=now.links)
    return now.links in (b"", before.links) and now in (stays, replace(stays, standing="away"))
