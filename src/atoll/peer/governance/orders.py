"""What the recovery identity says to a running run, and when its word may stand: go back, pause, resume, tune.

An `Amend` names a vertex of this very chain, a `Pause` says whether rounds train, a `Tune` which numbers hold
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
from atoll.protocol.history.chain import History
from atoll.wire.codec import decode_statement, encode
from atoll.wire.envelope import Notary
from atoll.wire.messages.statements import Amend, Pause, Signed, Tune, Tuned
from atoll.wire.messages.vertex import Body

Word = Amend | Pause | Tune  # of the recovery identity
W = TypeVar("W", bound=Word)

DOMAINS: dict[type[Word], bytes] = {
    Amend: b"atoll/amend/1\0",
    Pause: b"atoll/pause/1\0",
    Tune: b"atoll/tune/1\0",
}
WANTS: dict[type[Word], str] = {Amend: "go back", Pause: "pause or resume", Tune: "change numbers"}


@dataclass(frozen=True)
class Goal:
    """An earlier vertex, as far as one needs to know it to go back to it."""

    round: int
    id: Digest
    state: Digest
    trained: int
    tuned: Tuned | UnsetType = UNSET


def goal_of(body: Body, id: Digest) -> Goal:
    return Goal(body.round, id, body.state, body.trained, body.tuned)


def word_bytes(run: Digest, word: Word) -> bytes:
    """What the recovery identity signs; the signature in it does not count."""
    return DOMAINS[type(word)] + run + encode(replace(word, signature=b""))


def word_holds(signed: Signed, word: Word, notary: Notary, recovery: bytes) -> bool:
    """True if the identity that genesis names said so, in these very bytes.

    Decoding passes over keys that it does not know, and the inner signature does not see them: a member could make
    a thousand words of one.
    """
    if not recovery or signed.body != encode(word):
        return False
    return notary.verifier.identity_holds(recovery, word_bytes(notary.run, word), word.signature)


def amends_in(reports: Iterable[Signed]) -> list[tuple[Signed, Amend]]:
    """The words among these that want to go back, unjudged; what cannot be read is none."""
    return _said(reports, Amend)


def pauses_in(reports: Iterable[Signed]) -> list[tuple[Signed, Pause]]:
    """Those that pause the run or resume it."""
    return _said(reports, Pause)


def tunes_in(reports: Iterable[Signed]) -> list[tuple[Signed, Tune]]:
    """Those that change numbers of the run."""
    return _said(reports, Tune)


def _said(reports: Iterable[Signed], kind: type[W]) -> list[tuple[Signed, W]]:
    found: list[tuple[Signed, W]] = []
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


def amend_of(body: Body) -> Amend | None:
    """Where this vertex went back to. A body with two of them is none that voters believe."""
    return next((amend for _, amend in amends_in(body.reports)), None)


def rank(word: tuple[Signed, Amend]) -> tuple[int, bytes]:
    """The farthest back comes first: after it the others want to go nowhere."""
    return word[1].round, word[0].body


def first_of(amends: Iterable[tuple[Signed, Amend]]) -> tuple[Signed, Amend] | None:
    """Of several, what every proposer takes."""
    return min(amends, key=rank, default=None)


def paused_after(parent: Body, round: int, reports: Iterable[Signed]) -> int | UnsetType:
    """Since which round the run is paused once this one carries these; going back and starting over keep it so."""
    word = next((pause for _, pause in pauses_in(reports)), None)
    if word is None:
        return parent.paused
    return round if word.paused else UNSET


def may_follow(history: History, word: Word) -> bool:
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


def agrees(amend: Amend, earlier: Goal | None) -> Earlier:
    """What an Amend says of the vertex that it names, held against that vertex."""
    if earlier is None:
        return "unknown"
    said = Goal(amend.round, amend.back_to, amend.state, amend.trained, amend.tuned)
    return "same" if said == earlier else "other"
