"""How a virtual trainer shows its work, and how a virtual auditor takes it again.

A virtual chain is made of names: each link is the digest of the one before and of the steps between them, so a
segment is taken again by hashing once, and a trainer that took others has other links. Moments are one name, too:
they go on from the last claim that a vertex holds, or begin anew. Never looks at anything but names.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.crypto.digest import digest
from atoll.peer.tasks import JudgeReplay, JudgmentResult

FRESH = digest(b"fresh moments")
CLAIMS_HELD = 4  # rounds whose chain a virtual trainer remembers


class VirtualClaim(msgspec.Struct, frozen=True, array_like=True):
    """What a virtual trainer says about its round; its digest is what it commits to."""

    round: int
    steps: int
    root: Digest
    begins: Digest  # moments before the first step
    links: tuple[Digest, ...]

    @property
    def name(self) -> Digest:
        return digest(msgspec.msgpack.encode(self))

    @property
    def ends(self) -> Digest:
        return digest(b"moments of " + self.links[-1])


class VirtualExhibit(msgspec.Struct, frozen=True, array_like=True):
    claim: VirtualClaim
    last: VirtualClaim | None  # counted before it


_SHOWN = msgspec.msgpack.Decoder(VirtualExhibit)


class VirtualChain:
    """What a virtual trainer remembers of its rounds. `kept` survives a crash, all else does not."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.kept: tuple[Digest | None, Digest, VirtualClaim | None] = None, FRESH, None
        self.cheats = self.starts = False
        self.crash()

    def crash(self) -> None:
        self.moments, self.last = FRESH, None
        self.made: dict[int, VirtualExhibit] = {}
        self.taken: dict[int, int] = {}  # steps, by round

    def claim(self, round: int, before: Digest, root: Digest) -> Digest:
        steps = self.taken[round]
        begins = digest(b"chosen") if self.starts else self.moments
        links = [first_link(before, begins)]
        for segment in range(-(-steps // SEGMENT_STEPS)):
            links.append(next_link(links[-1], self.me, round, segment, honest=not self.cheats))
        claim = VirtualClaim(round, steps, root, begins, tuple(links))
        self.made[round] = VirtualExhibit(claim, self.last)
        if len(self.made) > CLAIMS_HELD:
            del self.made[min(self.made)]
        self.taken = {of: count for of, count in self.taken.items() if of >= round}
        return claim.name

    def adopt(self, round: int, vertex: Digest, claimed: Digest | None, afresh: bool) -> None:
        """A round that no vertex holds against me never happened; one whose record I lost begins anew.

        So does what follows where the run went back: moments are fresh, the last claim is still the last.
        """
        made = self.made.get(round)
        if claimed is not None and made is not None and made.claim.name == claimed:
            self.moments, self.last = made.claim.ends, made.claim
        elif claimed is not None:
            self.moments, self.last = FRESH, None
        if afresh:
            self.moments = FRESH
        self.kept = vertex, self.moments, self.last

    def restore(self, vertex: Digest) -> None:
        of, moments, last = self.kept
        self.moments, self.last = (moments, last) if of == vertex else (FRESH, None)

    def exhibit(self, round: int) -> bytes:
        if round not in self.made:
            raise RuntimeError(f"nothing is left of round {round}")
        return msgspec.msgpack.encode(self.made[round])


def first_link(before: Digest, moments: Digest) -> Digest:
    return digest(before + moments)


def next_link(link: Digest, peer: PeerId, round: int, segment: int, honest: bool = True) -> Digest:
    return digest(link + f"{peer}/{round}/{segment}/{honest}".encode())


def judged(work: JudgeReplay, data: bytes) -> JudgmentResult:
    """The verdict of an honest auditor, by the rules of the real one."""
    try:
        shown = _SHOWN.decode(data)
    except msgspec.DecodeError:
        return JudgmentResult("withheld", "this is no exhibit")
    claim, last = shown.claim, shown.last
    if claim.name != work.claim or (last is not None and last.name != work.last_claim):
        return JudgmentResult("withheld", "it shows another claim than it committed to")
    if (claim.steps, claim.root, claim.round) != (work.steps, work.root, work.round):
        return JudgmentResult("wrong", "its claim is of another round")
    if claim.steps > work.steps_max or len(claim.links) != -(-claim.steps // SEGMENT_STEPS) + 1:
        return JudgmentResult("wrong", "these are no links of so many steps")
    if claim.links[0] != first_link(work.before, claim.begins):
        return JudgmentResult("wrong", "it starts from another state than the agreed one")
    if claim.begins not in (FRESH, last.ends if last is not None else FRESH):
        return JudgmentResult("wrong", "its moments are neither those that its last round ended with nor fresh")
    again = next_link(claim.links[work.segment], work.peer, work.round, work.segment)
    return (
        JudgmentResult("accepted")
        if again == claim.links[work.segment + 1]
        else JudgmentResult("mismatch", "other steps")
    )
