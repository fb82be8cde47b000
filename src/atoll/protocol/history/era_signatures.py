"""Eras: stretches of rounds whose last vertex members sign with the keys that outlive their sessions.

Votes may be Ed25519: whoever can forge such signatures one day could write another past. So the vertex that ends an
era is signed once more, by the long-lived identities (Ed25519 and ML-DSA-65) of those who were the committee when
the era began, and since vertices name their parents, their quorum holds every round up to it. That committee was
named by a vertex signed in the same way, and so on back to genesis: made-up members cannot sign themselves in.
Where they cannot sign any more, the recovery identity that genesis names can: with a recovery, or by its word.

Promises: where an era ends follows from the vertices alone; nothing waits for a signature, and whoever was away
signs when it is back; only signatures that hold are kept, at most one per member of a committee; of a past that
others handed on no more is taken than an era that lacks its quorum has time for. Never judges a vertex: it signs
what the history believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.base.errors import UNREADABLE, PeerFault
from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import COMMITTEE_MOST, ERAS_LACKING_MAX, ERAS_READ_AT_ONCE
from atoll.base.machine import Effect, Emit, Fact, Persist, RunTask, Send
from atoll.crypto.digest import digest
from atoll.crypto.signer import IdentitySigner, SignatureVerifier
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.history import EraSignature, EraSignatures, EraSignaturesRequest
from atoll.wire.messages.vertex import VertexBody

ERA_DOMAIN = b"atoll/era/1\0"
WORD_DOMAIN = b"atoll/era/recovered/1\0"
RECOVERY = PeerId("")  # stands where a signer's name does: the word of the recovery identity, which needs no other
ASK_AGAIN_S = 10.0  # for what an era lacks; whoever signs late was away for longer
ASKED_AT_ONCE = 8  # eras: answers are up to 170 kB each, and who is asked for more than it reads at once drops them
UNHEARD_S = 2.0  # without an answer for so long: there is none, or it was lost
OVERDUE_LEAST = 20  # rounds: signatures travel beside them, and the shortest rounds take no longer than a message
SEALED_HELD = 4  # newest sealed eras in memory, for late signatures and those who ask; all are on disk


def era_bytes(run: Digest, round: int, vertex: Digest) -> bytes:
    """What identities sign: this is the vertex of this round."""
    return ERA_DOMAIN + run + round.to_bytes(8, "big") + vertex


class EraStart(NamedTuple):
    """The vertex that an era begins after, and who has to sign the vertex that ends it."""

    round: int
    epoch: int  # a higher one: the recovery identity signed
    signers: dict[PeerId, Digest]  # and the digest of each one's identity, as the membership holds it
    quorum: int


def word_bytes(run: Digest, round: int, vertex: Digest) -> bytes:
    """What the recovery identity signs where a quorum cannot: another thing than it says as one signer of many."""
    return WORD_DOMAIN + run + round.to_bytes(8, "big") + vertex


def is_overdue(ended: int, covered: bool, head: int, era_rounds: int) -> bool:
    """A quorum should have signed by now: a whole era's rounds have passed since it ended, and not a few.

    `covered`: a recovery came after it. Its vertex, signed by both keys of an identity that stands in genesis,
    names its parent and so on, so it holds that era as well as its own.
    """
    return not covered and head - ended >= max(era_rounds, OVERDUE_LEAST)


def begin_after(body: VertexBody, voters: tuple[dict[PeerId, bytes], int]) -> EraStart:
    """`voters` are the keys and the quorum of the committee that `body` implies."""
    committee, quorum = voters
    return EraStart(
        body.round, body.epoch, {m.peer: m.identity for m in body.members if m.peer in committee}, quorum
    )


def ends(begin: EraStart, body: VertexBody, era_rounds: int, rounds: int) -> bool:
    """Whether the era that began there ends with this body: after `era_rounds`, with the run, before too many left.

    The next vertex may take a third of the voters, at least one. While those who began the era are enough even
    then, it goes on; where they might not be, they sign now. A founder alone signs when the first member comes.
    """
    if body.round - begin.round >= era_rounds or 0 < rounds <= body.trained or body.epoch > begin.epoch:
        return True
    voters = {m.peer for m in body.members if m.votes}
    if voters == begin.signers.keys():
        return False
    at_once = max(1, (len(begin.signers) - 1) // 3)
    return len(voters & begin.signers.keys()) - at_once < begin.quorum


class Era(msgspec.Struct, frozen=True, array_like=True):
    """The end of one era as a peer keeps it: whose signatures it takes, and those that are here."""

    round: int  # its last
    vertex: Digest
    signers: dict[PeerId, Digest]
    quorum: int  # 0: the recovery identity signed the vertex itself
    signatures: tuple[EraSignature, ...] = ()
    handed: bool = False  # I was not there: others handed its rounds to me when they were long over
    covered: bool = False  # by a recovery that came after it

    @property
    def sealed(self) -> bool:
        return len(self.signatures) >= self.quorum or RECOVERY in self.signed_by

    @property
    def signed_by(self) -> tuple[PeerId, ...]:
        return tuple(s.peer for s in self.signatures)


def era_of(begin: EraStart, body: VertexBody, named: Digest) -> Era:
    """The era that began there and ended with this body, without signatures."""
    return Era(body.round, named, begin.signers, 0 if body.epoch > begin.epoch else begin.quorum)


def signature_flaw(
    signature: EraSignature, era: Era, run: Digest, verifier: SignatureVerifier, recovery: bytes
) -> str | None:
    """None if this is the word of one of the era's signers for the vertex that ended it; else what is wrong.

    `recovery` is the identity that genesis names, empty where it names none.
    """
    if signature.peer == RECOVERY:
        said = word_bytes(run, era.round, era.vertex)
        if recovery and verifier.identity_holds(recovery, said, signature.signature):
            return None
        return f"the recovery identity did not sign the era that ended with round {era.round}"
    pinned = era.signers.get(signature.peer)
    if pinned is None:
        return f"{signature.peer} is not one of those who sign the era that ended with round {era.round}"
    if digest(signature.identity) != pinned:
        return f"the identity under the era that ended with round {era.round} is not {signature.peer}'s"
    signed = era_bytes(run, era.round, era.vertex)
    if not verifier.identity_holds(signature.identity, signed, signature.signature):
        return f"{signature.peer} did not sign the era that ended with round {era.round}"
    return None


def encode_era(era: Era) -> bytes:
    return msgspec.msgpack.encode(era)


_ERA = msgspec.msgpack.Decoder(Era)


def decode_era(data: bytes) -> Era | None:
    """What `encode_era` wrote; None if these bytes are something else."""
    try:
        return _ERA.decode(data)
    except UNREADABLE:
        return None


class EraSealed(Fact, frozen=True, kw_only=True, tag="EraSealed"):
    """A quorum of identities, or the recovery identity ("" in `signed`), signed what ended with this round."""

    phase = "keep"
    signed: tuple[PeerId, ...]


class EraAwaited(Fact, frozen=True, kw_only=True, tag="EraAwaited"):
    """The history that I am shown goes on too long after this round for so few signatures: I believe no more."""

    phase = "join"
    signed: int
    needed: int
    elsewhere: int = 0  # of those who should have signed it a quorum signed another past: so many


class EraChain:
    """The eras of one run as one peer keeps them. `vouch` is its own identity; without one it only collects.

    `rounds_after` a vertex says how many the run has then; 0: no end.
    `demands`: it believes no past that others hand it without the signatures that should be there by now.
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
        self.begin = self._begin_at(-1)
        self.lacking: dict[int, Era] = {}  # ended without a quorum so far
        self.sealed: dict[int, Era] = {}  # the newest of the others
        self.asked: dict[int, tuple[Seconds, PeerId]] = {}  # when and who was last asked for this one
        self.unheard: dict[int, Seconds] = {}  # asked for then, and not a word since
        self.reading: dict[
            str, tuple[PeerId, EraSignaturesRequest]
        ] = {}  # eras on their way from disk, and who wants what

    # ---- where eras end ------------------------------------------------------------------------------------

    def restore(self, kept: dict[str, bytes]) -> list[Effect]:
        """What my disk holds. Signs what ended while I could not, also if the last write was lost in a crash."""
        found = [decode_era(data) for name, data in kept.items() if name.startswith(("era/", "sealed/"))]
        for era in sorted((e for e in found if e is not None), key=lambda era: era.round):
            if era.round <= self.history.head:
                self._hold(era)
        ended = [r for r in (*self.lacking, *self.sealed) if r in self.history.bodies]
        if ended:
            self.begin = self._begin_at(max(ended))
        effects: list[Effect] = []
        for era in list(self.lacking.values()):
            effects += self._sign(era)
        for round in range(self.begin.round + 1, self.history.head + 1):
            if round in self.history.bodies:
                effects += self.grew(self.history.bodies[round])
        return effects

    def grew(self, body: VertexBody, handed: bool = False) -> list[Effect]:
        """The history grew by this one. If an era ends with it: keep that, signed by me if it is my turn."""
        begin = self.begin
        if not ends(begin, body, self.era_rounds, self.rounds_after(body)):
            return []
        self.begin = self._begin_at(body.round)
        era = replace(era_of(begin, body, self.history.ids[body.round]), handed=handed)
        effects = self._cover() if body.epoch > begin.epoch else []
        return effects + (self._sign(era) or self._keep(era))

    def _cover(self) -> list[Effect]:
        """The recovery identity signed the vertex that came now: that is for all below it."""
        bare = [era for era in self.lacking.values() if not era.covered]
        return [e for era in bare for e in self._keep(replace(era, covered=True))]

    def vouch_for(self, sign: Callable[[bytes], bytes], reach: Sequence[PeerId]) -> list[Effect]:
        """Seal what is `unsigned` by the word of the recovery identity, whose `sign` this is, and say it to these.

        Whoever comes later stops at the first era that should be signed and is not, and never gets to see a
        recovery that came much later: so the word is said under each.
        """
        effects: list[Effect] = []
        for era in self.unsigned():
            word = EraSignature(RECOVERY, b"", sign(word_bytes(self.run, era.round, era.vertex)))
            effects += self._keep(_with(era, (word,)))
            effects += [Send(peer, EraSignatures(era.round, era.vertex, (word,))) for peer in reach]
        return effects

    def unsigned(self) -> list[Era]:
        """Eras, oldest first, that a quorum should have signed by now, or that a recovery covers."""
        next, every = self.history.head + 1, self.era_rounds
        late = (e for e in self.lacking.values() if e.covered or is_overdue(e.round, False, next, every))
        return sorted(late, key=lambda era: era.round)

    def demanded(self, head: int) -> Era | None:
        """The first era that a quorum must sign before I believe others that the history goes on to `head`.

        Eras that ended while I was there are not among them: I saw who voted. So a run whose members have lost
        their long-lived keys goes on, and nobody new believes it.
        """
        if not self.demands or not self.lacking:
            return None
        every, handed = self.era_rounds, (e for e in self.lacking.values() if e.handed)
        waits = (e for e in handed if is_overdue(e.round, e.covered, head, every))
        return min(waits, key=lambda era: era.round, default=None)

    def demand(self, peer: PeerId, head: int, now: Seconds) -> list[Effect]:
        """This peer shows a history that goes on to `head`: it may show what holds it, too."""
        era = self.demanded(head)
        if era is None or now - self.asked.get(era.round, (-1e9, peer))[0] < UNHEARD_S:
            return []
        awaited = EraAwaited(round=era.round, signed=len(era.signatures), needed=era.quorum)
        return [Emit(awaited), *self._ask(era.round, peer, now)]

    def _begin_at(self, round: int) -> EraStart:
        history = self.history
        body = history.bodies[round]
        return begin_after(body, history.voters_of(history.ids[round], body))

    def _sign(self, era: Era) -> list[Effect]:
        """Nothing if it is not my turn, or if I did."""
        vouch = self.vouch
        if vouch is None or self.me in era.signed_by or digest(vouch.identity) != era.signers.get(self.me):
            return []
        signature = vouch.sign(era_bytes(self.run, era.round, era.vertex))
        return self._keep(_with(era, (EraSignature(self.me, vouch.identity, signature),)))

    def _keep(self, era: Era) -> list[Effect]:
        """Remember it, in memory as long as something may be missing; say so when it is sealed."""
        name = f"era/{era.round}"
        news = era.round in self.lacking or era.round not in self.sealed
        self._hold(era)
        if not era.sealed:
            return [Persist(name, encode_era(era))]
        effects: list[Effect] = [Persist(f"sealed/{era.round}", encode_era(era)), Persist(name, None)]
        return [*effects, Emit(EraSealed(round=era.round, signed=era.signed_by))] if news else effects

    def _hold(self, era: Era) -> None:
        """In memory, where the oldest give way."""
        self.lacking.pop(era.round, None)
        held, most = (self.sealed, SEALED_HELD) if era.sealed else (self.lacking, ERAS_LACKING_MAX)
        held[era.round] = era
        if len(held) > most:
            del held[min(held)]
        self.asked = {r: asked for r, asked in self.asked.items() if r in self.lacking}
        self.unheard = {r: since for r, since in self.unheard.items() if r in self.lacking}

    # ---- signatures from and for others --------------------------------------------------------------------

    def mine(self, first: int, reach: Sequence[PeerId]) -> list[Effect]:
        """What I signed of eras that ended with round `first` or later, for all. It may be lost: they can ask."""
        effects: list[Effect] = []
        for era in (*self.lacking.values(), *self.sealed.values()):
            own = tuple(s for s in era.signatures if s.peer == self.me)
            if own and era.round >= first:
                effects += [Send(peer, EraSignatures(era.round, era.vertex, own)) for peer in reach]
        return effects

    def hear(self, sender: PeerId, said: EraSignatures, now: Seconds) -> list[Effect]:
        """Keep what holds. PeerFault, before anything is kept, for a signature that does not."""
        self.unheard.pop(said.round, None)
        era = self.lacking.get(said.round) or self.sealed.get(said.round)
        if era is None:
            return []  # I am not there yet, or need no more of it
        if len(said.signatures) > COMMITTEE_MOST:
            raise PeerFault(sender, f"{len(said.signatures)} signatures under one era; {COMMITTEE_MOST} can be")
        if said.vertex != era.vertex:
            return self._contest(sender, said, era)
        fresh = {s.peer: s for s in said.signatures if s.peer not in era.signed_by}
        for signature in fresh.values():
            flaw = signature_flaw(signature, era, self.run, self.verifier, self.history.recovery)
            if flaw is not None:
                raise PeerFault(sender, flaw)
        if not fresh:
            return []
        return self._keep(_with(era, tuple(fresh.values()))) + self.ask_of(sender, now, ASK_AGAIN_S, most=1)

    def _contest(self, sender: PeerId, said: EraSignatures, era: Era) -> list[Effect]:
        """Those who had to sign the vertex that I hold signed another one. I may have been shown a made-up past."""
        if era.handed and not era.sealed:
            other, recovery = replace(era, vertex=said.vertex), self.history.recovery
            signed = {s.peer: s for s in said.signatures}.values()
            good = [s for s in signed if signature_flaw(s, other, self.run, self.verifier, recovery) is None]
            if replace(other, signatures=tuple(good)).sealed:
                have, needed = len(era.signatures), era.quorum
                return [Emit(EraAwaited(round=era.round, signed=have, needed=needed, elsewhere=len(good)))]
            if good:
                return []  # too few to tell who is lied to, and it may only have handed them on
        if not any(m.peer == sender and m.present for m in self.history.head_body.members):
            return []  # it may stand on another branch of the run, where this is the vertex of that round
        raise PeerFault(sender, f"signatures under another vertex of round {said.round} than the agreed one")

    def ask(self, reach: Sequence[PeerId], now: Seconds) -> list[Effect]:
        """For each era that lacks signatures ask the peer after the one asked last, unless that was lately."""
        effects: list[Effect] = []
        for round in self._due(now, ASK_AGAIN_S) if reach else ():
            before = self.asked[round][1] if round in self.asked else PeerId("")
            effects += self._ask(round, min((p for p in reach if p > before), default=min(reach)), now)
        return effects

    def ask_of(self, peer: PeerId, now: Seconds, rest_s: Seconds = 0.0, most: int = ASKED_AT_ONCE) -> list[Effect]:
        """Ask this peer for so many eras, but not for those of which somebody was asked within `rest_s`."""
        return [e for round in self._due(now, rest_s)[:most] for e in self._ask(round, peer, now)]

    def _due(self, now: Seconds, rest_s: Seconds) -> list[int]:
        """Eras that lack signatures, longest not asked for first; no more than may be on their way at once."""
        asked = {r: self.asked[r][0] if r in self.asked else -1e9 for r in self.lacking}
        room = ASKED_AT_ONCE - sum(now - since < UNHEARD_S for since in self.unheard.values())
        return sorted((r for r in asked if now - asked[r] >= rest_s), key=lambda r: (asked[r], r))[: max(room, 0)]

    def _ask(self, round: int, peer: PeerId, now: Seconds) -> list[Effect]:
        self.asked[round] = now, peer
        self.unheard[round] = now
        return [Send(peer, EraSignaturesRequest(round, self.lacking[round].signed_by))]

    def give(self, sender: PeerId, wish: EraSignaturesRequest) -> list[Effect]:
        era = self.lacking.get(wish.round) or self.sealed.get(wish.round)
        if era is not None:
            return _answer(sender, wish, era)
        job = f"era/{wish.round}/{sender}"
        if (
            job in self.reading
            or len(self.reading) >= ERAS_READ_AT_ONCE
            or not 0 <= wish.round <= self.history.head
        ):
            return []
        self.reading[job] = sender, wish
        return [RunTask(job, ReadEra(wish.round))]

    def read(self, job: str, data: bytes | None) -> list[Effect]:
        """An old era came from disk, or is not there."""
        asked = self.reading.pop(job, None)
        era = decode_era(data) if data is not None else None
        return _answer(*asked, era) if asked is not None and era is not None else []


class ReadEra(msgspec.Struct, frozen=True):
    """What was kept of the era that ended with this round -> bytes, or None."""

    round: int


def _with(era: Era, more: tuple[EraSignature, ...]) -> Era:
    """In the order of their names, so that equal eras are equal bytes."""
    return replace(era, signatures=tuple(sorted((*era.signatures, *more), key=lambda s: s.peer)))


def _answer(asker: PeerId, wish: EraSignaturesRequest, era: Era) -> list[Effect]:
    more = tuple(s for s in era.signatures if s.peer not in wish.have)
    return [Send(asker, EraSignatures(era.round, era.vertex, more[:COMMITTEE_MOST]))] if more else []
