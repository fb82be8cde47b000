"""Simulated training chain, and its replay by a simulated auditor.

A virtual chain consists of digests: each link hashes the link before and the steps between them. A segment is
replayed by hashing once, and a trainer with other steps has other links. Moments are one digest: they continue from
the last claim that a vertex contains, or begin anew.
"""

from __future__ import annotations

import msgspec

from atoll.base.ids import Digest, PeerId
from atoll.base.limits import SEGMENT_STEPS
from atoll.crypto.digest import digest
from atoll.peer.tasks import JudgeReplay, JudgmentResult

FRESH = digest(b"fresh moments")
CLAIMS_HELD = 4  # rounds of which a virtual trainer remembers the chain


class VirtualClaim(msgspec.Struct, frozen=True, array_like=True):
    """Claim of a virtual trainer about its round; it commits to the digest."""

    round: int
    steps: int
    root: Digest
    begins: Digest  # digest of the moments before the first step
    links: tuple[Digest, ...]

    @property
    def name(self) -> Digest:
        return digest(msgspec.msgpack.encode(self))

    @property
    def ends(self) -> Digest:
        return digest(b"moments of " + self.links[-1])


class VirtualExhibit(msgspec.Struct, frozen=True, array_like=True):
    claim: VirtualClaim
    last: VirtualClaim | None  # last counted claim before it


_SHOWN = msgspec.msgpack.Decoder(VirtualExhibit)


class VirtualTrainingChain:
    """Rounds that a virtual trainer remembers. `kept` survives a crash, all else does not."""

    def __init__(self, me: PeerId) -> None:
        self.me = me
        self.kept: tuple[Digest | None, Digest, VirtualClaim | None] = None, FRESH, None
        self.cheats = self.starts = False
        self.crash()

    def crash(self) -> None:
        self.moments, self.last = FRESH, None
        self.made: dict[int, VirtualExhibit] = {}
        self.taken: dict[int, int] = {}  # round → steps taken

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
        """Adopt a round.

        A round without a vertex never happened for the record; if the local record is lost, it begins anew. After a
        rollback moments are fresh, and the last claim is still the last.
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
    """Verdict of an honest auditor, by the rules of the real one."""
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
