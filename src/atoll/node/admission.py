"""How a peer comes to be what it wishes to be: the word it says until the membership agrees, and a refusal.

Promises: one word is said again after a pause and not before, and none at all once a vertex holds what was wished.
Never lets anybody in: that is decided by a vertex.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from atoll.base.ids import PeerId, Seconds
from atoll.keys.signer import Signer
from atoll.node.facts import Refused
from atoll.policy.members import FULL, RECENT, Reported
from atoll.protocol.dag.history import History
from atoll.wire.messages.membership import JoinRefused
from atoll.wire.messages.statements import Join, Ready, Statement

JOIN_AGAIN_S = 3.0  # a join or readiness that did not make it into a vertex is said again


@dataclass(frozen=True)
class Wish:
    """How this peer wants to take part."""

    role: str = "trainer"  # a visitor reads along and never asks to be let in
    name: str = ""
    addresses: tuple[str, ...] = ()
    admission: bytes = b""
    unaudited: bool = False  # nobody else could take its steps again and come to the same numbers


class Admission:
    def __init__(self, me: PeerId, signer: Signer) -> None:
        self.me, self.signer = me, signer
        self.asked: tuple[type[Statement] | None, Seconds] = None, -1e9  # with which word, and when

    def word(
        self, wish: Wish, history: History, at: int, now: Seconds, audited: bool = False
    ) -> Join | Ready | None:
        """What is to be said now, if anything; `at` is the round whose state I hold, `audited` is the run."""
        if wish.role == "visitor":
            return None
        word = self._lacking(wish, history, at, audited and wish.unaudited)
        before, said_at = self.asked
        if word is None or (isinstance(word, before or ()) and now - said_at < JOIN_AGAIN_S):
            return None
        self.asked = type(word), now
        return word

    def _lacking(self, wish: Wish, history: History, at: int, unaudited: bool) -> Join | Ready | None:
        mine = next((m for m in history.head_body.members if m.peer == self.me), None)
        moved = mine is not None and bool(wish.addresses) and mine.addresses != wish.addresses
        if mine is None or mine.standing == "away" or mine.vote_key != self.signer.vote_key or moved:
            role = wish.role if wish.role in ("observer", "client") else "trainer"
            return Join(
                self.me,
                self.signer.vote_key,
                self.signer.certificate,
                wish.addresses,
                role,
                wish.name,
                history.head_id,
                wish.admission,
            )
        near = history.head - at <= RECENT // 4  # what is left comes with the next rounds; they may outrun my disk
        waits = mine.standing == "observer" and mine.role != "observer"
        changed = mine.trains and unaudited != (mine.standing == "unaudited")
        if (waits or changed) and at in history.ids and near:
            return Ready(history.ids[at], history.bodies[at].state, unaudited or UNSET)
        return None


UNTOLD = "no vertex says yet that its work cannot be replayed"  # in words for people
EXPELLED = "E-JOIN-03"


def expelled(me: PeerId) -> Refused:
    """Nobody shows it anything more, and nothing that it says counts; whoever drives it ends it."""
    return Refused(
        by=me,
        code=EXPELLED,
        what="this run has expelled this peer for good: members found something false in what it signed or "
        "sent, or the run went on without it",
        fix="atoll verify --verdicts, in its folder, says why; then look at its memory and its disk, and join as "
        "somebody new: atoll join NEW_TICKET --dir NEW_FOLDER",
        for_good=True,
    )


def refusal_of(reported: Reported, why: str) -> JoinRefused | None:
    """What its author is told of a report that may not stand in the next vertex; only of a join is anybody told."""
    if not isinstance(reported.statement, Join):
        return None
    if why == "it is a member already" or why.startswith("it was written too long ago"):
        return None  # not a refusal: it will see so in the next vertices
    what = f"your join was refused: {why}"
    if why.startswith(FULL):
        fix = "wait until a member has left and join again, or start a run of your own: atoll up"
        return JoinRefused("E-JOIN-02", what, fix)
    return JoinRefused("E-JOIN-01", what, "atoll join NEW_TICKET")
