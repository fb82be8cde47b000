"""Era check of a stored history: which rounds long-lived identities signed, and which only votes hold.

Follows a walk over the vertices (`peer/verify/chain.py`) and judges every ended era by the rules of
`protocol/history/era_signatures.py`.
Invariants:
- A valid signature under this vertex counts if its signer was in the committee at the start of the era.
- The recovery identity's order or recovery needs no other signature.
- After a lost or damaged vertex nothing is guessed: the walk resumes at the next stored era that names its end.
- An era is never demanded before its signatures had time to arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.peer.governance.settings_change import settings_after
from atoll.peer.settings import RunSettings
from atoll.protocol.history.era_signatures import (
    RECOVERY,
    EraEndSignatures,
    EraStart,
    begin_after,
    decode_era,
    era_ends,
    era_of,
    is_overdue,
    signature_flaw,
)
from atoll.wire.authority import Authority
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.vertex import Member, VertexBody


class EraSignatureResult(msgspec.Struct, frozen=True):
    """One era that is over. `needed` is 0 where the recovery identity signed its last vertex, or the era itself."""

    first: int
    last: int
    signed: int
    needed: int
    of: int
    anchored: bool  # the vertex that names its signers is held in the same way, and so on
    covered: bool = False  # too few signatures, but a later recovery

    @property
    def sealed(self) -> bool:
        return self.signed >= self.needed

    @property
    def held(self) -> bool:
        """Whether more than votes holds it."""
        return self.covered or (self.sealed and self.anchored)


class EraSignatureVerifier:
    """Walk over eras. `kept(round)`: stored signatures of the era that ended with this round."""

    def __init__(
        self,
        kept: Callable[[int], bytes | None],
        settings: RunSettings,
        notary: StatementSigner,
        voters_of: Callable[[Digest, VertexBody], tuple[dict[PeerId, bytes], int]],
        authority: Authority,
    ) -> None:
        self.authority = authority
        self.kept, self.settings, self.notary, self.voters_of = kept, settings, notary, voters_of
        self.eras: list[EraSignatureResult] = []
        self.begin: EraStart | None = None  # None: unknown
        self.anchored = True
        self.whole = 0  # first era of a stretch of vertices without a gap

    def start(self, named: Digest, body: VertexBody) -> None:
        self.begin = begin_after(body, self.voters_of(named, body))

    def lost(self) -> None:
        """A vertex is lost or damaged that may have ended an era."""
        self.begin, self.anchored, self.whole = None, False, len(self.eras)

    def go(self, named: Digest, body: VertexBody, trusted: bool) -> list[str]:
        """Flaws of the signatures under this vertex, if an era ends with it. `trusted`: the vertex is unchecked."""
        settings, begin = self.settings, self.begin
        if not settings.era_rounds:
            return []
        if begin is None:
            if self.kept(body.round) is not None:
                self.start(named, body)
            return []
        if not era_ends(begin, body, settings.era_rounds, settings_after(settings, body).rounds):
            return []
        self.start(named, body)
        era = era_of(begin, body, named)
        flaws: list[str] = []
        needed = 0 if trusted else era.quorum
        signed, word = self._signed(era, body.members, flaws) if needed else (0, False)
        needed = 0 if word else needed
        if body.epoch > begin.epoch and not trusted:
            since = self.eras[self.whole :]
            self.eras[self.whole :] = [e if e.sealed and e.anchored else replace(e, covered=True) for e in since]
        found = EraSignatureResult(
            begin.round + 1, body.round, signed, needed, len(begin.signers), self.anchored or not needed
        )
        self.eras.append(found)
        # genesis names the recovery identity: its signature suffices
        self.anchored = not needed or (self.anchored and found.sealed)
        return flaws

    def _signed(self, era: EraEndSignatures, roster: Sequence[Member], flaws: list[str]) -> tuple[int, bool]:
        """Number of valid signers, and whether the recovery identity signed."""
        data = self.kept(era.round)
        held = decode_era(data) if data is not None else None
        if held is None:
            if data is not None:
                flaws.append("what is kept of the signatures under its era cannot be read")
            return 0, False
        if held.vertex != era.vertex:
            flaws.append("the signatures kept under its era are for another vertex")
            return 0, False
        notary, authority = self.notary, self.authority
        signatures = {s.peer: s for s in held.signatures}
        wrong = {
            p: signature_flaw(s, era, notary.run, notary.verifier, authority, roster) for p, s in signatures.items()
        }
        flaws += [flaw for flaw in wrong.values() if flaw is not None]
        good = {peer for peer, flaw in wrong.items() if flaw is None}
        return len(good - {RECOVERY}), RECOVERY in good

    def overdue(self, head: int) -> list[EraSignatureResult]:
        """Eras that a quorum should have signed by now."""
        late = self.settings.era_rounds
        return [e for e in self.eras if not e.sealed and is_overdue(e.last, e.covered, head, late)]
