"""How a peer comes to be what it wishes to be: the word it says until the membership agrees, and a refusal.

Promises: one word is said again after a pause and not before, and none at all once a vertex holds what was wished.
A refusal counts only while a request is out, once enough peers gave it, and never by the words of another peer.
Never lets anybody in: that is decided by a vertex.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from atoll.base.ids import PeerId, Seconds
from atoll.crypto.signer import Signer
from atoll.peer.events import JoinRejected
from atoll.policy.membership import (
    CLOCKS_DIFFER,
    FULL,
    IS_EXPELLED,
    NO_TICKET,
    RECENT,
    TICKET_EXPIRED,
    VerifiedReport,
)
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.membership import JoinRefused, RefusalCode
from atoll.wire.messages.statements import JoinRequest, ReadyReport, Statement

JOIN_AGAIN_S = 3.0  # a join or readiness that did not make it into a vertex is said again
REFUSALS_MAX = 3  # requests refused in a row: a ticket may be newer than what a member knows, so the third is a no


@dataclass(frozen=True)
class DesiredRole:
    """How this peer wants to take part."""

    role: str = "trainer"  # a visitor reads along and never asks to be let in
    name: str = ""
    addresses: tuple[str, ...] = ()
    admission: bytes = b""
    unaudited: bool = False  # nobody else could take its steps again and come to the same numbers


class AdmissionRequest:
    def __init__(self, me: PeerId, signer: Signer, visits: bool = False) -> None:
        self.me, self.signer, self.visits = me, signer, visits
        self.asked: tuple[type[Statement] | None, Seconds] = None, -1e9  # with which word, and when
        self.waits = (
            visits  # for the answer to a request: a Join, the question for genesis, all that a visitor asks
        )
        self.refusers: dict[RefusalCode, set[PeerId]] = {}  # of that request
        self.refusals = 0  # requests that enough peers refused

    def knows_genesis(self) -> None:
        """The first request is answered. A visitor says no Join: all its questions are requests."""
        self.waits, self.refusals = self.visits, 0

    def begins(self) -> None:
        """A request goes out; refusals of the one before count no more."""
        self.waits, self.refusers = True, {}

    def hear_refusal(self, by: PeerId, code: RefusalCode, needed: int) -> JoinRejected | None:
        """`by` is a peer whose refusal counts; it takes as many as `needed`. The fact ends this peer."""
        if not self.waits:
            return None
        refusers = self.refusers.setdefault(code, set())
        refusers.add(by)
        if len(refusers) < needed:
            return None
        self.waits, self.refusers, self.refusals = self.visits, {}, self.refusals + 1
        return refused(by, code) if self.refusals >= REFUSALS_MAX else None

    def word(
        self, wish: DesiredRole, history: VertexChain, at: int, now: Seconds, audited: bool = False
    ) -> JoinRequest | ReadyReport | None:
        """What is to be said now, if anything; `at` is the round whose state I hold, `audited` is the run."""
        if wish.role == "visitor":
            return None
        word = self._lacking(wish, history, at, audited and wish.unaudited)
        before, said_at = self.asked
        if word is None or (isinstance(word, before or ()) and now - said_at < JOIN_AGAIN_S):
            return None
        self.asked = type(word), now
        if isinstance(word, JoinRequest):
            self.begins()
        else:
            self.waits, self.refusals = False, 0
        return word

    def _lacking(
        self, wish: DesiredRole, history: VertexChain, at: int, unaudited: bool
    ) -> JoinRequest | ReadyReport | None:
        mine = next((m for m in history.head_body.members if m.peer == self.me), None)
        moved = mine is not None and bool(wish.addresses) and mine.addresses != wish.addresses
        if mine is None or mine.standing == "away" or mine.vote_key != self.signer.vote_key or moved:
            role = wish.role if wish.role in ("observer", "client") else "trainer"
            return JoinRequest(
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
            return ReadyReport(history.ids[at], history.bodies[at].state, unaudited or UNSET)
        return None


UNTOLD = "no vertex says yet that its work cannot be replayed"  # in words for people
EXPELLED: RefusalCode = "E-JOIN-03"
NEW_TICKET = "ask a member for a new one (atoll invite), then atoll join NEW_TICKET"
REFUSALS: dict[RefusalCode, tuple[str, str]] = {  # what a peer tells its owner, and the way out
    "E-JOIN-01": ("this ticket is used up or revoked, or the members of the run do not know it", NEW_TICKET),
    "E-JOIN-02": (
        "the run is full: its vertices have no room for one member more",
        "wait until a member has left and join again, or start a run of your own: atoll up",
    ),
    EXPELLED: (
        "this run has expelled this peer for good: members found something false in what it signed or sent, or the "
        "run went on without it",
        "atoll verify --verdicts, in its folder, says why; then look at its memory and its disk, and join as "
        "somebody new: atoll join NEW_TICKET --dir NEW_FOLDER",
    ),
    "E-JOIN-04": ("this ticket has expired", NEW_TICKET),
    "E-JOIN-05": (
        "the members found that this join does not fit their run: its role, its keys or its version",
        "pip install --upgrade atoll; or ask for a ticket of the role that you want: atoll invite --role trainer",
    ),
    "E-JOIN-06": (
        "this peer's session certificate does not hold at the time of the run: a clock is wrong",
        "set the clock of this computer, then start again: atoll up",
    ),
}
_CODES: dict[str, RefusalCode] = {
    NO_TICKET: "E-JOIN-01",
    FULL: "E-JOIN-02",
    IS_EXPELLED: EXPELLED,
    TICKET_EXPIRED: "E-JOIN-04",
    CLOCKS_DIFFER: "E-JOIN-06",
}


def refused(by: PeerId, code: RefusalCode, for_good: bool = False) -> JoinRejected:
    what, fix = REFUSALS[code]
    return JoinRejected(by=by, code=code, what=what, fix=fix, for_good=for_good)


def expelled(me: PeerId) -> JoinRejected:
    """No peer shows it anything more, and nothing that it says counts: its driver ends it."""
    return refused(me, EXPELLED, for_good=True)


def code_of(why: str) -> RefusalCode:
    """The code that travels for these words of `admissible` or `ticket_problem`."""
    for begin, code in _CODES.items():
        if why.startswith(begin):
            return code
    return "E-JOIN-05"


def refusal_of(reported: VerifiedReport, why: str) -> JoinRefused | None:
    """The answer to a report that may not stand in the next vertex; only a join gets one."""
    if not isinstance(reported.statement, JoinRequest):
        return None
    if why == "it is a member already" or why.startswith("it was written too long ago"):
        return None  # not a refusal: it will see so in the next vertices
    return JoinRefused(code_of(why))
