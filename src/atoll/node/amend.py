"""Going back to an earlier state by the recovery identity's word: what it signs, and when that word may stand.

An `Amend` names a vertex of this very chain. It is good for a few rounds after the head that its signer saw, and
never once another one took effect since: so none can be used twice, and of two that race the first in the chain
wins. Pure: what lies on disk is handed in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.policy.members import AMEND_ROUNDS, Earlier
from atoll.protocol.dag.history import History
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.statements import Amend, Signed
from atoll.wire.messages.vertex import Body

AMEND_DOMAIN = b"atoll/amend/1\0"


@dataclass(frozen=True)
class Goal:
    """An earlier vertex, as far as one needs to know it to go back to it."""

    round: int
    id: Digest
    state: Digest
    trained: int


def goal_of(body: Body, id: Digest) -> Goal:
    return Goal(body.round, id, body.state, body.trained)


def amend_bytes(run: Digest, amend: Amend) -> bytes:
    """What the recovery identity signs; the signature in it does not count."""
    return AMEND_DOMAIN + run + encode(replace(amend, signature=b""))


def amend_holds(signed: Signed, amend: Amend, notary: Notary, recovery: bytes) -> bool:
    """True if the identity that genesis names said so, in these very bytes.

    Decoding passes over keys that it does not know, and the inner signature does not see them: a member could make
    a thousand words of one.
    """
    if not recovery or signed.body != encode(amend):
        return False
    return notary.verifier.identity_holds(recovery, amend_bytes(notary.run, amend), amend.signature)


def amends_in(reports: Iterable[Signed]) -> list[tuple[Signed, Amend]]:
    """The words among these that want to go back, unjudged; what cannot be read is none."""
    found: list[tuple[Signed, Amend]] = []
    for signed in reports:
        if b"Amend" not in signed.body:  # its tag: of a thousand reports nearly none is opened
            continue
        try:
            statement = decode_statement(signed.body, signed.signer)
        except PeerFault:
            continue
        if isinstance(statement, Amend):
            found.append((signed, statement))
    return found


def amend_of(body: Body) -> Amend | None:
    """Where this vertex went back to. A body with two of them is none that voters believe."""
    return next((amend for _, amend in amends_in(body.reports)), None)


def rank(word: tuple[Signed, Amend]) -> tuple[int, bytes]:
    """The farthest back comes first: after it the others want to go nowhere."""
    return word[1].round, word[0].body


def first_of(amends: Iterable[tuple[Signed, Amend]]) -> tuple[Signed, Amend] | None:
    """Of several, what every proposer takes."""
    return min(amends, key=rank, default=None)


def may_follow(history: History, after: Digest) -> bool:
    """True if `after` is one of the newest vertices of this chain, and none since has gone back."""
    for round in range(history.head, max(-2, history.head - AMEND_ROUNDS), -1):
        body = history.bodies.get(round)
        if body is None:
            return False
        if history.ids[round] == after:
            return True
        if amend_of(body) is not None:
            return False
    return False


def agrees(amend: Amend, earlier: Goal | None) -> Earlier:
    """What an Amend says of the vertex that it names, held against that vertex."""
    if earlier is None:
        return "unknown"
    said = Goal(amend.round, amend.back_to, amend.state, amend.trained)
    return "same" if said == earlier else "other"
