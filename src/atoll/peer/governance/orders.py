"""Operator orders, signed by the recovery identity: rollback, pause and settings change, and when each is valid.

A `RollbackOrder` names a vertex of this chain, a `PauseOrder` stops or resumes training, a `ChangeSettings` sets
new numbers (`settings_change.py`). Each is valid for a few rounds after the head that its signer saw, and until
another of its kind takes effect. So no order can be used twice, and of two that race the first in the chain wins.

Not responsible for: reading old vertices from disk; the caller passes them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.base.machine import tag_of
from atoll.crypto.signer import SignatureVerifier
from atoll.peer.settings import RunSettings
from atoll.policy.membership import AMEND_ROUNDS, Earlier
from atoll.protocol.history.chain import VertexChain
from atoll.wire.authority import Authority, FounderAuthority, SignedOrder
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import (
    ChangedSettings,
    ChangeSettings,
    PauseOrder,
    RollbackOrder,
    SignedStatement,
)
from atoll.wire.messages.vertex import Member, VertexBody

Word = RollbackOrder | PauseOrder | ChangeSettings  # orders of the recovery identity
W = TypeVar("W", bound=Word)

DOMAINS: dict[type[Word], bytes] = {
    RollbackOrder: b"atoll/amend/1\0",
    PauseOrder: b"atoll/pause/1\0",
    ChangeSettings: b"atoll/tune/1\0",
}
COMMANDS: dict[type[Word], Literal["rollback", "pause", "amend"]] = {
    RollbackOrder: "rollback",
    PauseOrder: "pause",
    ChangeSettings: "amend",
}
WANTS: dict[type[Word], str] = {
    RollbackOrder: "go back",
    PauseOrder: "pause or resume",
    ChangeSettings: "change numbers",
}


@dataclass(frozen=True)
class RollbackGoal:
    """An earlier vertex, with the fields needed to go back to it."""

    round: int
    id: Digest
    state: Digest
    trained: int
    tuned: ChangedSettings | UnsetType = UNSET


def goal_of(body: VertexBody, id: Digest) -> RollbackGoal:
    return RollbackGoal(body.round, id, body.state, body.trained, body.tuned)


def word_bytes(run: Digest, word: Word) -> bytes:
    """The bytes that the recovery identity signs; the signature field is empty in them."""
    return DOMAINS[type(word)] + run + encode(replace(word, signature=b""))


def authority_of(settings: RunSettings, verifier: SignatureVerifier) -> Authority:
    """The authority over a run with these settings of genesis."""
    return FounderAuthority(settings.recovery, verifier)


def word_holds(
    signed: SignedStatement, word: Word, notary: StatementSigner, authority: Authority, roster: Sequence[Member]
) -> bool:
    """True if the run's authority signed this order in exactly these bytes.

    Decoding skips unknown keys and the inner signature does not cover them: without this check a member could make
    many reports from one order.
    """
    order = SignedOrder(COMMANDS[type(word)], word_bytes(notary.run, word), word.signature)
    return signed.body == encode(word) and authority.allows(order, roster)


def amends_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, RollbackOrder]]:
    """Rollback orders among these reports, without a check of signatures; undecodable ones are skipped."""
    return _said(reports, RollbackOrder)


def pauses_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, PauseOrder]]:
    """Pause and resume orders among these reports."""
    return _said(reports, PauseOrder)


def tunes_in(reports: Iterable[SignedStatement]) -> list[tuple[SignedStatement, ChangeSettings]]:
    """Settings changes among these reports."""
    return _said(reports, ChangeSettings)


def _said(reports: Iterable[SignedStatement], kind: type[W]) -> list[tuple[SignedStatement, W]]:
    found: list[tuple[SignedStatement, W]] = []
    tag = tag_of(kind).encode()
    for signed in reports:
        if tag not in signed.body:  # cheap filter: of a thousand reports nearly none is decoded
            continue
        try:
            statement = decode_statement(signed.body, signed.signer)
        except PeerFault:
            continue
        if isinstance(statement, kind):
            found.append((signed, statement))
    return found


def amend_of(body: VertexBody) -> RollbackOrder | None:
    """The rollback in this vertex; voters reject a body with two."""
    return next((amend for _, amend in amends_in(body.reports)), None)


def rank(word: tuple[SignedStatement, RollbackOrder]) -> tuple[int, bytes]:
    """Sort key: the earliest target comes first, after which the other orders have no effect."""
    return word[1].round, word[0].body


def first_of(
    amends: Iterable[tuple[SignedStatement, RollbackOrder]],
) -> tuple[SignedStatement, RollbackOrder] | None:
    """The order that every proposer chooses among several."""
    return min(amends, key=rank, default=None)


def paused_after(parent: VertexBody, round: int, reports: Iterable[SignedStatement]) -> int | UnsetType:
    """Round since which the run is paused once this round carries these reports; rollback and recovery keep it."""
    word = next((pause for _, pause in pauses_in(reports)), None)
    if word is None:
        return parent.paused
    return round if word.paused else UNSET


def may_follow(history: VertexChain, word: Word) -> bool:
    """True if the order follows one of the newest vertices of this chain and none of its kind took effect since."""
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
    """Whether a RollbackOrder describes the vertex that it names correctly."""
    if earlier is None:
        return "unknown"
    said = RollbackGoal(amend.round, amend.back_to, amend.state, amend.trained, amend.tuned)
    return "same" if said == earlier else "other"
