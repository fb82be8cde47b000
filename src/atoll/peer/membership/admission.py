"""Admission request: how a peer asks for its role until the membership grants it, or until it is refused.

Driving contract: call `begins` when a request is sent, `knows_genesis` once, and `hear_refusal` for each refusal.
`word` returns the request that is due; the caller signs and sends it.

Invariants:
- A request is repeated after a pause and never once a vertex grants it.
- A refusal counts only while a request is pending, from enough peers, and with a code of this peer's own texts.
Not responsible for: admitting members, which a vertex decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import UNSET

from atoll.base.ids import PeerId, Seconds
from atoll.crypto.signer import Signer
from atoll.peer.events import JoinRejected
from atoll.policy.membership import CLOCKS_DIFFER, FULL, IS_EXPELLED, RECENT, VerifiedReport
from atoll.policy.ticket_check import NO_TICKET, TICKET_EXPIRED
from atoll.protocol.history.chain import VertexChain
from atoll.wire.messages.membership import JoinRefused, RefusalCode
from atoll.wire.messages.statements import BaseStatement, Extensions, JoinRequest, ReadyReport

JOIN_AGAIN_S = 3.0  # seconds before a JoinRequest or ReadyReport without a vertex is repeated
READY_LAG_S = 5.0  # most run time between the local state and the head's for a ReadyReport
REFUSALS_MAX = 3  # consecutive refused requests before giving up: a ticket may be newer than what a member knows


@dataclass(frozen=True)
class DesiredRole:
    """The role that this peer asks for."""

    role: str = "trainer"  # a visitor reads and never asks for admission
    name: str = ""
    addresses: tuple[str, ...] = ()
    admission: bytes = b""
    extensions: Extensions = ()  # of this member's record, sorted by name; empty: as the membership has them
    unaudited: bool = False  # steps that no other peer can replay to the same numbers


class AdmissionRequester:
    def __init__(self, me: PeerId, signer: Signer, visits: bool = False) -> None:
        self.me, self.signer, self.visits = me, signer, visits
        self.asked: tuple[type[BaseStatement] | None, Seconds] = None, -1e9  # last request and its time
        self.asked_at_head = -1  # the newest vertex here at that time
        self.waits = visits  # a request is pending: a JoinRequest, a request for genesis, any request of a visitor
        self.refusers: dict[RefusalCode, set[PeerId]] = {}  # peers that refused it, by code
        self.withdrawn = False  # the local driver refused the run: it asks for no role any more
        self.postponed = False  # the local driver still checks whether this computer fits the run
        self.refusals = 0  # consecutive requests that enough peers refused

    def knows_genesis(self) -> None:
        """Note that the first request succeeded. A visitor sends no JoinRequest: all its requests count."""
        self.waits, self.refusals = self.visits, 0

    def begins(self) -> None:
        """Note a new request; refusals of the last one no longer count."""
        self.waits, self.refusers = True, {}

    def hear_refusal(self, by: PeerId, code: RefusalCode, needed: int) -> JoinRejected | None:
        """Count a refusal by `by`; once `needed` peers refused often enough, the event that ends this peer."""
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
        """The report to send now, if any; `at` is the round of the local state, `audited` a property of the run."""
        if wish.role == "visitor" or self.withdrawn or self.postponed:
            return None
        word = self._lacking(wish, history, at, audited and wish.unaudited)
        before, said_at = self.asked
        # a request from the middle of a long download of vertices would be refused as too old
        is_recent = now - said_at < JOIN_AGAIN_S and history.head - self.asked_at_head < RECENT // 2
        if word is None or (isinstance(word, before or ()) and is_recent):
            return None
        self.asked, self.asked_at_head = (type(word), now), history.head
        if isinstance(word, JoinRequest):
            self.begins()
        else:
            self.waits, self.refusals = False, 0
        return word

    def _lacking(
        self, wish: DesiredRole, history: VertexChain, at: int, unaudited: bool
    ) -> JoinRequest | ReadyReport | None:
        mine = next((m for m in history.head_body.members if m.peer == self.me), None)
        body, extensions = history.head_body, wish.extensions or UNSET
        moved = mine is not None and bool(wish.addresses) and mine.addresses != wish.addresses
        moved = moved or extensions not in (UNSET, body.extensions_by_peer.get(self.me))
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
                extensions,
            )
        waits = mine.standing == "observer" and mine.role != "observer"
        changed = mine.may_train and unaudited != (mine.standing == "unaudited")
        if (waits or changed) and _is_near(history, at):
            return ReadyReport(history.ids[at], history.bodies[at].state, unaudited or UNSET)
        return None


def _is_near(history: VertexChain, at: int) -> bool:
    """True if a peer with the state of round `at` reaches the head within seconds.

    A member is awaited, so one that says this while it still downloads long rounds would stop the others. Rounds of
    milliseconds may be faster than the local disk, so the head itself is not required.
    """
    if at not in history.ids or history.head - at > RECENT // 4:
        return False
    return history.head_body.time_s - history.bodies[at].time_s <= READY_LAG_S


UNTOLD = "no vertex says yet that its work cannot be replayed"  # pass reason, for people
EXPELLED: RefusalCode = "E-JOIN-03"
NEW_TICKET = "ask a member for a new one (atoll invite), then atoll join NEW_TICKET"
REFUSALS: dict[RefusalCode, tuple[str, str]] = {  # code → reason and fix, shown to the operator
    "E-JOIN-01": ("this ticket is used up or revoked, or the members of the run do not know it", NEW_TICKET),
    "E-JOIN-02": (
        "the run is full: its vertices have no room for one member more",
        "wait until a member has left and join again, or start a run of your own: atoll up",
    ),
    EXPELLED: (
        "this run has expelled this peer for good: members found something false in what it signed or sent, or the "
        "run went on without it",
        "atoll verify --verdicts, in its folder, gives the reason; then check its memory and its disk, and join as "
        "a new peer: atoll join NEW_TICKET --dir NEW_FOLDER",
    ),
    "E-JOIN-04": ("this ticket has expired", NEW_TICKET),
    "E-JOIN-05": (
        "the members found that this join does not fit their run: its role, keys, extensions or version",
        "install the members' version of Atoll; or ask for a ticket of another role: atoll invite --role trainer",
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
    """No peer answers it any more and none of its statements counts: its driver ends."""
    return refused(me, EXPELLED, for_good=True)


def code_of(why: str) -> RefusalCode:
    """The refusal code for a reason of `admissible` or `ticket_problem`."""
    for begin, code in _CODES.items():
        if why.startswith(begin):
            return code
    return "E-JOIN-05"


def refusal_of(reported: VerifiedReport, why: str) -> JoinRefused | None:
    """The reply to a report that may not stand in the next vertex; only a join gets one."""
    if not isinstance(reported.statement, JoinRequest):
        return None
    if why == "it is a member already" or why.startswith("it was written too long ago"):
        return None  # not a refusal: the next vertices show it
    return JoinRefused(code_of(why))
