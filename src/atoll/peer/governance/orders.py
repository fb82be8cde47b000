"""What the recovery identity says to a running run, and when its word may stand: go back, pause, resume, tune.

An `RollbackOrder` names a vertex of this very chain, a `PauseOrder` says whether rounds train, a `ChangeSettings`
which numbers hold
(`tuning.py`). Each is good for a few rounds after the head that its signer saw, and never once another of its kind
took effect since: so none can be used twice, and of two that race the first in the chain wins. Pure: what
lies on disk is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.base.machine import tag_of
from atoll.policy.membership import AMEND_ROUNDS, Earlier
from atoll.protocol.history.chain import VertexChain
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    ChangedNumbers,
    ChangeSettings,
    PauseOrder,
    RollbackOrder,
    SignedStatement,
)
from atoll.wire.messages.vertex import VertexBody

Word = RollbackOrder | PauseOrder | ChangeSettings  # of the recovery identity
W = TypeVar("W", bound=Word)

DOMAINS: dict[type[Word], bytes] = {
    RollbackOrder: b"atoll/amend/1\0",
    PauseOrder: b"atoll/pause/1\0",
    ChangeSettings: b"atoll/tune/1\0",
}
WANTS: dict[type[Word], str] = {
    RollbackOrder: "go back",
    PauseOrder: "pause or resume",
    ChangeSettings: "change numbers",
}


@dataclass(frozen=True)
class RollbackGoal:
    """An earlier vertex, as far as one needs to know it to go back to it."""

    round: int
    id: Digest
    state: Digest
    trained: int
    tuned: ChangedNumbers | UnsetType = UNSET


def goal_of(body: VertexBody, id: Digest) -> RollbackGoal:
    return RollbackGoal(body.round, id, body.state, body.trained, body.tuned)


def word_bytes(run: Digest, word: Word) -> bytes:
    """What the recovery identity signs; the signature in it does not count."""
    return DOMAINS[type(word)] + run + encode(replace(word, signature=b""))


def word_holds(signed: SignedStatement, word: Word, notary: StatementSigner, recovery: bytes) -> bool:
    """True if the identity that genesis names said so, in these very bytes.

    Decoding passes over keys that it does not know, and the inner signature does not see them: a member could make
    a thousand words of one.
    """
    if not recovery or signed.body != encode(word):
        return False
    return notary.verifier.identity_holds(recovery, word_bytes(notary.run, word), word.signature)


def amends_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, RollbackOrder]]:
    """The words among these that want to go back, unjudged; what cannot be read is none."""
    return _said(reports, RollbackOrder)


def pauses_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, PauseOrder]]:
    """Those that pause the run or resume it."""
    return _said(reports, PauseOrder)


def tunes_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, ChangeSettings]]:
    """Those that change numbers of the run."""
    return _said(reports, ChangeSettings)


def _said(reports: Iterable[SignedStatement], kind: type[W]) -> list[tuple[SignedStatement, W]]:
    found: list[tuple[SignedStatement, W]] = []
    tag = tag_of(kind).encode()
    for signed in reports:
        if tag not in signed.body:  # of a thousand reports nearly none is opened
            continue
        try:
            statement = decode_statement(signed.body, signed.signer)
        except PeerFault:
            continue
        if isinstance(statement, kind):
            found.append((signed, statement))
    return found


def amend_of(body: VertexBody) -> RollbackOrder | None:
    """Where this vertex went back to. A body with two of them is none that voters believe."""
    return next((amend for _, amend in amends_in(body.reports)), None)


def rank(word: tuple[SignedStatement, RollbackOrder]) -> tuple[int, bytes]:
    """The farthest back comes first: after it the others want to go nowhere."""
    return word[1].round, word[0].body


def first_of(
    amends: Iterable[tuple[SignedStatement, RollbackOrder]],
) -> tuple[SignedStatement, RollbackOrder] | None:
    """Of several, what every proposer takes."""
    return min(amends, key=rank, default=None)


def paused_after(parent: VertexBody, round: int, reports: Iterable[SignedStatement]) -> int | UnsetType:
    """Since which round the run is paused once this one carries these; going back and starting over keep it so."""
    word = next((pause for _, pause in pauses_in(reports)), None)
    if word is None:
        return parent.paused
    return round if word.paused else UNSET


def may_follow(history: VertexChain, word: Word) -> bool:
    """True if it was said after one of the newest vertices of this chain, and none since holds one of its kind."""
    for round in range(history.head, max(-2, history.head - AMEND_ROUNDS), -1):
        body = history.bodies.get(round)
        if body is None:
            return False
        if history.ids[round] == word.after:
            return True
        if _said(body.reports, type(word)):
            return False
    return False


def agrees(amend: RollbackOrder, earlier: RollbackGoal | None) -> Earlier:
    """What an Amend says of the vertex that it names, held against that vertex."""
    if earlier is None:
        return "unknown"
    said = RollbackGoal(amend.round, amend.back_to, amend.state, amend.trained, amend.tuned)
    return "same" if said == earlier else "other"
