"""Era signatures: long-lived identities sign the last vertex of each era (a range of rounds).

Driving contract: call `restore` once, then `on_vertex` for each vertex in order of rounds, then pass its messages.
`receive_signatures` raises PeerFault before any change. The driver makes each `Persist` durable before later sends.

Votes may be Ed25519, and a future forger of such signatures could write another past. So the vertex that ends an
era is signed again, by the long-lived identities (Ed25519 and ML-DSA-65) of the era's first committee. Vertices
name their parents, so this quorum covers every round up to it. That committee was named by a vertex signed in the
same way, back to genesis: invented members cannot sign themselves in. If the committee can no longer sign, the
recovery identity of genesis can, by a recovery or by an attestation.

Invariants:
- The end of an era follows from the vertices alone.
- Nothing waits for a signature; an absent member signs after its return.
- Only valid signatures are kept, at most one per member of a committee.
- A history from other peers is accepted only as far as its overdue eras have their quorum.
Not responsible for: judging vertices. It signs vertices that the chain accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import COMMITTEE_MOST, ERAS_LACKING_MAX, ERAS_READ_AT_ONCE
from atoll.base.machine import Broadcast, Effect, Emit, Fact, Persist, RunTask, Send
from atoll.crypto.digest import digest
from atoll.crypto.signer import IdentitySigner, SignatureVerifier
from atoll.protocol.history.chain import VertexChain
from atoll.wire.authority import Authority, SignedOrder
from atoll.wire.messages.history import EraSignature, EraSignatures, EraSignaturesRequest
from atoll.wire.messages.vertex import Member, VertexBody

ERA_DOMAIN = b"atoll/era/1\0"
ATTESTATION_DOMAIN = b"atoll/era/recovered/1\0"
RECOVERY = PeerId("")  # signer name of the recovery identity's attestation, which seals an era alone
ASK_AGAIN_S = 10.0  # seconds between requests for missing signatures; a late signer was away for longer
ASKED_AT_ONCE = 8  # eras requested at once: responses have up to 170 kB, and peers drop requests beyond their limit
OVERDUE_TOLD_S = 2 * ASK_AGAIN_S  # two members were asked since: until then, a message is only under way
UNHEARD_S = 2.0  # seconds after which a request counts as lost or unanswered
OVERDUE_LEAST = 20  # rounds: the shortest rounds take no longer than a message with signatures
DIGEST_SCHEME = "blake3-chain"  # BLAKE3 of the last body, which names its parent
SEALED_HELD = 4  # newest sealed eras in memory, for late signatures and requests; all are on disk


def era_bytes(run: Digest, round: int, vertex: Digest) -> bytes:
    """Bytes that identities sign: the run, the round and its vertex."""
    return ERA_DOMAIN + run + round.to_bytes(8, "big") + vertex


class EraStart(NamedTuple):
    """The vertex before an era, and the committee that must sign the vertex that ends the era."""

    round: int
    epoch: int  # higher than in the era before if the recovery identity signed
    signers: dict[PeerId, Digest]  # signer -> digest of its identity in the membership
    quorum: int


def attestation_bytes(run: Digest, round: int, vertex: Digest) -> bytes:
    """Bytes that the recovery identity signs in place of a quorum. They differ from `era_bytes`."""
    return ATTESTATION_DOMAIN + run + round.to_bytes(8, "big") + vertex


def is_overdue(ended: int, covered: bool, head: int, era_rounds: int) -> bool:
    """Whether a quorum should have signed: at least an era's rounds, and OVERDUE_LEAST, have passed since its end.

    `covered`: a later recovery exists. Both keys of an identity in genesis sign its vertex, which names its
    ancestors and so covers this era too.
    """
    return not covered and head - ended >= max(era_rounds, OVERDUE_LEAST)


def begin_after(body: VertexBody, voters: tuple[dict[PeerId, bytes], int]) -> EraStart:
    """The era that begins after `body`. `voters`: keys and quorum of the committee that `body` implies."""
    committee, quorum = voters
    return EraStart(
        body.round, body.epoch, {m.peer: m.identity for m in body.members if m.peer in committee}, quorum
    )


def era_ends(begin: EraStart, body: VertexBody, era_rounds: int, rounds: int) -> bool:
    """Whether the era ends with this body: after `era_rounds`, with the run, or before too many signers leave.

    The next vertex may remove a third of the voters, at least one. If the remaining signers might then be no
    quorum, the era ends and they sign now. A lone founder signs when the first member joins.
    """
    if body.round - begin.round >= era_rounds or 0 < rounds <= body.trained or body.epoch > begin.epoch:
        return True
    voters = {m.peer for m in body.members if m.votes}
    if voters == begin.signers.keys():
        return False
    at_once = max(1, (len(begin.signers) - 1) // 3)
    return len(voters & begin.signers.keys()) - at_once < begin.quorum


class EraEndSignatures(msgspec.Struct, frozen=True, array_like=True):
    """End of one era: its signers and the signatures collected so far."""

    round: int  # last round of the era
    vertex: Digest
    signers: dict[PeerId, Digest]
    quorum: int  # 0 if the recovery identity signed the vertex itself
    signatures: tuple[EraSignature, ...] = ()
    handed: bool = False  # whether its rounds were received from other peers after they were over
    covered: bool = False  # whether a later recovery covers it

    @property
    def sealed(self) -> bool:
        return len(self.signatures) >= self.quorum or RECOVERY in self.signed_by

    @property
    def signed_by(self) -> tuple[PeerId, ...]:
        return tuple(s.peer for s in self.signatures)


def era_of(begin: EraStart, body: VertexBody, named: Digest) -> EraEndSignatures:
    """The era from `begin` to this body, without signatures. `named`: vertex id of `body`."""
    return EraEndSignatures(body.round, named, begin.signers, 0 if body.epoch > begin.epoch else begin.quorum)


def signature_flaw(
    signature: EraSignature,
    era: EraEndSignatures,
    run: Digest,
    verifier: SignatureVerifier,
    authority: Authority,
    roster: Sequence[Member],
) -> str | None:
    """Describe what is wrong with a signature under an era; None if it is valid."""
    if signature.peer == RECOVERY:
        signed = attestation_bytes(run, era.round, era.vertex)
        if authority.allows(SignedOrder("attest", signed, signature.signature), roster):
            return None
        return f"the recovery identity did not sign the era ending with round {era.round}"
    pinned = era.signers.get(signature.peer)
    if pinned is None:
        return f"{signature.peer} is not a signer of the era ending with round {era.round}"
    if digest(signature.identity) != pinned:
        return f"identity under the era ending with round {era.round} is not {signature.peer}'s"
    signed = era_bytes(run, era.round, era.vertex)
    if not verifier.identity_holds(signature.identity, signed, signature.signature):
        return f"{signature.peer} did not sign the era ending with round {era.round}"
    return None


def encode_era(era: EraEndSignatures) -> bytes:
    return msgspec.msgpack.encode(era)


_ERA = msgspec.msgpack.Decoder(EraEndSignatures)


def decode_era(data: bytes) -> EraEndSignatures | None:
    """Decode the bytes of `encode_era`; None if they are not readable."""
    try:
        return _ERA.decode(data)
    except UNREADABLE:
        return None


class UnsignedEra(NamedTuple):
    """An era that has ended, as a hook reads it."""

    name: str
    digest: Digest  # covers all bodies up to its end: vertices name their parents
    scheme: str  # of the digest
    era: EraEndSignatures


EraHook = Callable[[UnsignedEra], list[Effect]]


class EraQuorumSigned(Fact, frozen=True, kw_only=True, tag="EraQuorumSigned"):
    """A quorum of identities, or the recovery identity ("" in `signed`), signed the era ending with this round."""

    phase = "keep"
    signed: tuple[PeerId, ...]


class HistoryLacksEraSignatures(Fact, frozen=True, kw_only=True, tag="HistoryLacksEraSignatures"):
    """A received history continues too long after this round for its few era signatures. No more is accepted.

    Several members were asked for the others in vain, unless a quorum signed another past (`elsewhere`).
    """

    phase = "join"
    signed: int
    needed: int
    elsewhere: int = 0  # signers of another past, if they are a quorum


class EraSignatureTracker:
    """The eras of one run at one peer.

    `vouch`: identity of the local peer; None: it only collects signatures.
    `rounds_after`: number of training rounds of the run after a given vertex; 0: no end.
    `hooks`: called when an era ends, again by a restart if the era was not stored. The first hook signs.
    `demands`: whether a history from other peers is refused while an overdue era lacks its quorum.
    """

    def __init__(
        self,
        history: VertexChain,
        era_rounds: int,
        rounds_after: Callable[[VertexBody], int],
        verifier: SignatureVerifier,
        vouch: IdentitySigner | None,
        demands: bool = True,
    ) -> None:
        assert era_rounds > 0
        self.history, self.verifier, self.vouch = history, verifier, vouch
        self.era_rounds, self.rounds_after, self.demands = era_rounds, rounds_after, demands
        self.run, self.me = history.notary.run, history.notary.me
        self.hooks: list[EraHook] = [self._sign_closed]
        self.begin = self._begin_at(-1)
        self.lacking: dict[int, EraEndSignatures] = {}  # eras without a quorum so far
        self.sealed: dict[int, EraEndSignatures] = {}  # newest sealed eras
        self.asked: dict[int, tuple[Seconds, PeerId]] = {}  # era -> time and peer of the last request
        self.blocking: dict[int, Seconds] = {}  # era -> time since which it blocks a received history
        self.unheard: dict[int, Seconds] = {}  # era -> time of the request without a response
        self.reading: dict[str, tuple[PeerId, EraSignaturesRequest]] = {}  # read task -> requester and its request
        self.early: dict[PeerId, EraSignatures] = {}  # signer -> its message about the vertex that comes next

    # ---- era ends ------------------------------------------------------------------------------------------

    def restore(self, kept: dict[str, bytes]) -> list[Effect]:
        """Load the stored eras. Signs eras that ended meanwhile, also if a crash lost the last write."""
        found = [decode_era(data) for name, data in kept.items() if name.startswith(("era/", "sealed/"))]
        for era in sorted((e for e in found if e is not None), key=lambda era: era.round):
            if era.round <= self.history.head:
                self._cache(era)
        ended = [r for r in (*self.lacking, *self.sealed) if r in self.history.bodies]
        if ended:
            self.begin = self._begin_at(max(ended))
        effects: list[Effect] = []
        for era in list(self.lacking.values()):
            effects += self._sign(era)
        for round in range(self.begin.round + 1, self.history.head + 1):
            if round in self.history.bodies:
                effects += self.on_vertex(self.history.bodies[round])
        return effects

    def on_vertex(self, body: VertexBody, handed: bool = False) -> list[Effect]:
        """Handle a new vertex. If an era ends with it, call the hooks."""
        begin, early = self.begin, tuple(self.early.values())
        self.early.clear()
        if not era_ends(begin, body, self.era_rounds, self.rounds_after(body)):
            return []
        self.begin = self._begin_at(body.round)
        era = replace(era_of(begin, body, self.history.ids[body.round]), handed=handed)
        effects = self._mark_covered() if body.epoch > begin.epoch else []
        closed = UnsignedEra(f"era/{era.round}", era.vertex, DIGEST_SCHEME, era)
        effects += [e for hook in self.hooks for e in hook(closed)]
        return effects + self._take_early(early)

    def _sign_closed(self, closed: UnsignedEra) -> list[Effect]:
        """Store an ended era, signed if the local peer is a signer."""
        return self._sign(closed.era) or self._store(closed.era)

    def _take_early(self, messages: Iterable[EraSignatures]) -> list[Effect]:
        """Store valid signatures that came before the vertex. Members that leave with it may not repeat theirs.

        Others are dropped without blame: their sender may have expected another vertex.
        """
        effects: list[Effect] = []
        for message in messages:
            era = self.lacking.get(message.round) or self.sealed.get(message.round)
            if era is None or era.vertex != message.vertex:
                continue
            (signature,) = message.signatures
            if signature.peer not in era.signed_by and self._flaw_of(signature, era) is None:
                effects += self._store(_add_signatures(era, (signature,)))
        return effects

    def _mark_covered(self) -> list[Effect]:
        """Mark all eras as covered: the recovery identity signed the new vertex."""
        bare = [era for era in self.lacking.values() if not era.covered]
        return [e for era in bare for e in self._store(replace(era, covered=True))]

    def attest_unsigned(self, sign: Callable[[bytes], bytes], reach: Sequence[PeerId]) -> list[Effect]:
        """Seal all `unsigned` eras by attestations of the recovery identity and send them to `reach`.

        A later joiner stops at the first overdue era and would not see a much later recovery. So each such era gets
        an attestation. `sign`: signs bytes as the recovery identity.
        """
        effects: list[Effect] = []
        for era in self.unsigned():
            attestation = EraSignature(RECOVERY, b"", sign(attestation_bytes(self.run, era.round, era.vertex)))
            effects += self._store(_add_signatures(era, (attestation,)))
            effects.append(Broadcast("eras", EraSignatures(era.round, era.vertex, (attestation,)), tuple(reach)))
        return effects

    def unsigned(self) -> list[EraEndSignatures]:
        """Unsealed eras that are overdue or covered by a recovery, oldest first."""
        next, every = self.history.head + 1, self.era_rounds
        late = (e for e in self.lacking.values() if e.covered or is_overdue(e.round, False, next, every))
        return sorted(late, key=lambda era: era.round)

    def blocking_era(self, head: int) -> EraEndSignatures | None:
        """The first era that needs its quorum before a received history up to `head` is accepted.

        Eras that ended while the local peer took part are exempt: it received the votes. A run thus continues after
        its members lost their long-lived keys, but no new peer accepts it.
        """
        if not self.demands or not self.lacking:
            return None
        every, handed = self.era_rounds, (e for e in self.lacking.values() if e.handed)
        waits = (e for e in handed if is_overdue(e.round, e.covered, head, every))
        return min(waits, key=lambda era: era.round, default=None)

    def request_blocking(self, peer: PeerId, head: int, now: Seconds) -> list[Effect]:
        """Request missing era signatures from a peer that shows a history up to `head`."""
        era = self.blocking_era(head)
        if era is None or now - self.asked.get(era.round, (-1e9, peer))[0] < UNHEARD_S:
            return []
        requests = self._request(era.round, peer, now)
        if now - self.blocking.setdefault(era.round, now) < OVERDUE_TOLD_S:
            return requests
        return [
            Emit(HistoryLacksEraSignatures(round=era.round, signed=len(era.signatures), needed=era.quorum)),
            *requests,
        ]

    def _begin_at(self, round: int) -> EraStart:
        history = self.history
        body = history.bodies[round]
        return begin_after(body, history.voters_of(history.ids[round], body))

    def _sign(self, era: EraEndSignatures) -> list[Effect]:
        """Sign an era as the local peer. Nothing if it is no signer or has signed."""
        vouch = self.vouch
        if vouch is None or self.me in era.signed_by or digest(vouch.identity) != era.signers.get(self.me):
            return []
        signature = vouch.sign(era_bytes(self.run, era.round, era.vertex))
        return self._store(_add_signatures(era, (EraSignature(self.me, vouch.identity, signature),)))

    def _store(self, era: EraEndSignatures) -> list[Effect]:
        """Store an era on disk and in memory, and report when it is sealed."""
        name = f"era/{era.round}"
        news = era.round in self.lacking or era.round not in self.sealed
        self._cache(era)
        if not era.sealed:
            return [Persist(name, encode_era(era))]
        effects: list[Effect] = [Persist(f"sealed/{era.round}", encode_era(era)), Persist(name, None)]
        return [*effects, Emit(EraQuorumSigned(round=era.round, signed=era.signed_by))] if news else effects

    def _cache(self, era: EraEndSignatures) -> None:
        """Hold an era in memory, dropping the oldest one beyond the limit."""
        self.lacking.pop(era.round, None)
        held, most = (self.sealed, SEALED_HELD) if era.sealed else (self.lacking, ERAS_LACKING_MAX)
        held[era.round] = era
        if len(held) > most:
            del held[min(held)]
        self.blocking = {r: since for r, since in self.blocking.items() if r in self.lacking}
        self.asked = {r: asked for r, asked in self.asked.items() if r in self.lacking}
        self.unheard = {r: since for r, since in self.unheard.items() if r in self.lacking}

    # ---- exchange of signatures ----------------------------------------------------------------------------

    def send_own(self, first: int, reach: Sequence[PeerId]) -> list[Effect]:
        """Send the local signatures under eras from round `first` on to `reach`. A lost one can be requested."""
        effects: list[Effect] = []
        for era in (*self.lacking.values(), *self.sealed.values()):
            own = tuple(s for s in era.signatures if s.peer == self.me)
            if own and era.round >= first:
                effects.append(Broadcast("eras", EraSignatures(era.round, era.vertex, own), tuple(reach)))
        return effects

    def request_from_leavers(self, round: int, members: Sequence[PeerId]) -> list[Effect]:
        """Request the signatures of signers that left with the vertex that ended this era: they stay a moment."""
        era = self.lacking.get(round)
        if era is None:
            return []
        gone = era.signers.keys() - {*members, *era.signed_by, self.me}
        return [Send(peer, EraSignaturesRequest(round, era.signed_by)) for peer in sorted(gone)]

    def receive_signatures(self, sender: PeerId, message: EraSignatures, now: Seconds) -> list[Effect]:
        """Store valid signatures. Raises PeerFault, before any change, if one is invalid."""
        self.unheard.pop(message.round, None)
        era = self.lacking.get(message.round) or self.sealed.get(message.round)
        if len(message.signatures) > COMMITTEE_MOST:
            raise PeerFault(sender, f"{len(message.signatures)} signatures under one era, limit {COMMITTEE_MOST}")
        if era is None:  # the era needs no more signatures, or it has not ended here yet
            own = tuple(s for s in message.signatures if s.peer == sender)[:1]
            if own and message.round == self.history.head + 1 and sender in self.begin.signers:
                self.early[sender] = EraSignatures(message.round, message.vertex, own)
            return []
        if message.vertex != era.vertex:
            return self._check_other_past(sender, message, era)
        fresh = {s.peer: s for s in message.signatures if s.peer not in era.signed_by}
        for signature in fresh.values():
            flaw = self._flaw_of(signature, era)
            if flaw is not None:
                raise PeerFault(sender, flaw)
        if not fresh:
            return []
        return self._store(_add_signatures(era, tuple(fresh.values()))) + self.request_from(
            sender, now, ASK_AGAIN_S, most=1
        )

    def _flaw_of(self, signature: EraSignature, era: EraEndSignatures) -> str | None:
        history = self.history
        return signature_flaw(signature, era, self.run, self.verifier, history.authority, history.head_body.members)

    def _check_other_past(self, sender: PeerId, message: EraSignatures, era: EraEndSignatures) -> list[Effect]:
        """Handle signatures under another vertex than the local one, which may be part of an invented past."""
        if era.handed and not era.sealed:
            other = replace(era, vertex=message.vertex)
            signed = {s.peer: s for s in message.signatures}.values()
            good = [s for s in signed if self._flaw_of(s, other) is None]
            if replace(other, signatures=tuple(good)).sealed:
                have, needed = len(era.signatures), era.quorum
                return [
                    Emit(
                        HistoryLacksEraSignatures(round=era.round, signed=have, needed=needed, elsewhere=len(good))
                    )
                ]
            if good:
                return []  # too few to decide which past is invented; the sender may only forward them
        if not any(m.peer == sender and m.is_present for m in self.history.head_body.members):
            return []  # the sender may be on another branch of the run, with this vertex
        raise PeerFault(sender, f"signatures under a vertex of round {message.round} that was not agreed")

    def request_missing(self, reach: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """Request missing signatures of each era from the peer after the last one, at most every ASK_AGAIN_S."""
        effects: list[Effect] = []
        for round in self._eras_due(now, ASK_AGAIN_S) if reach else ():
            before = self.asked[round][1] if round in self.asked else PeerId("")
            effects += self._request(round, min((p for p in reach if p > before), default=min(reach)), now)
        return effects

    def request_from(
        self, peer: PeerId, now: Seconds, rest_s: Seconds = 0.0, most: int = ASKED_AT_ONCE
    ) -> list[Effect]:
        """Request at most `most` eras from this peer, except eras requested within the last `rest_s` seconds."""
        return [e for round in self._eras_due(now, rest_s)[:most] for e in self._request(round, peer, now)]

    def _eras_due(self, now: Seconds, rest_s: Seconds) -> list[int]:
        """Eras to request, longest not requested first, at most as many as may be in flight."""
        asked = {r: self.asked[r][0] if r in self.asked else -1e9 for r in self.lacking}
        room = ASKED_AT_ONCE - sum(now - since < UNHEARD_S for since in self.unheard.values())
        return sorted((r for r in asked if now - asked[r] >= rest_s), key=lambda r: (asked[r], r))[: max(room, 0)]

    def _request(self, round: int, peer: PeerId, now: Seconds) -> list[Effect]:
        self.asked[round] = now, peer
        self.unheard[round] = now
        return [Send(peer, EraSignaturesRequest(round, self.lacking[round].signed_by))]

    def serve(self, sender: PeerId, wish: EraSignaturesRequest) -> list[Effect]:
        era = self.lacking.get(wish.round) or self.sealed.get(wish.round)
        if era is not None:
            return _respond(sender, wish, era)
        job = f"era/{wish.round}/{sender}"
        if (
            job in self.reading
            or len(self.reading) >= ERAS_READ_AT_ONCE
            or not 0 <= wish.round <= self.history.head
        ):
            return []
        self.reading[job] = sender, wish
        return [RunTask(job, ReadEraSignatures(wish.round))]

    def on_era_read(self, job: str, data: bytes | None) -> list[Effect]:
        """Handle an old era read from disk, or its absence."""
        asked = self.reading.pop(job, None)
        era = decode_era(data) if data is not None else None
        return _respond(*asked, era) if asked is not None and era is not None else []


class ReadEraSignatures(msgspec.Struct, frozen=True):
    """Read the stored era that ended with this round -> bytes, or None."""

    round: int


def _add_signatures(era: EraEndSignatures, more: tuple[EraSignature, ...]) -> EraEndSignatures:
    """Add signatures in the order of peer names, so that equal eras have equal bytes."""
    return replace(era, signatures=tuple(sorted((*era.signatures, *more), key=lambda s: s.peer)))


def _respond(asker: PeerId, wish: EraSignaturesRequest, era: EraEndSignatures) -> list[Effect]:
    more = tuple(s for s in era.signatures if s.peer not in wish.have)
    return [Send(asker, EraSignatures(era.round, era.vertex, more[:COMMITTEE_MOST]))] if more else []
