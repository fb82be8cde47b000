"""Byzantine members: an honest peer with a filter that twists its messages.

    equivocator   votes, proposes and times out one way to some members and another way to the others
    garbler       signs nonsense, forges statements of others, claims certificates that do not exist
    liar          sends parts and results with other bytes than it committed to or signed
    withholder    never serves its parts and never proposes
    flooder       sends messages of rounds that do not exist yet, a hundred per heartbeat
    replayer      repeats every report of joining and leaving that it received (only in its own scenario)
    usurper       changes settings of the run in the recovery identity's name, and repeats its old orders
                  (not among `KINDS`: `atoll simulate amendments` has one)
    recruiter     invites itself under one name after the other, to gain votes
                  (not among `KINDS`: `atoll simulate recruiter` has one, invited by a ticket with one use)

`simulation/adversaries/commit_after_peek.py` has the peekers and turncoats, which read rows before they commit.

A villain signs with its own keys only, as in the real world. Beside villains no honest peer may ever be blamed,
lose its vote or hold other bits than the others, and rounds must go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf, nan
from typing import cast

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Event, Lane, Payload, Send, SetTimer, Start, TimerFired, expand_broadcasts
from atoll.capabilities import CAPABILITIES
from atoll.crypto.digest import digest
from atoll.crypto.signer import Signer
from atoll.peer.governance.orders import amends_in, tunes_in
from atoll.peer.governance.settings_change import tuned_after
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.peer import Peer
from atoll.protocol.history.chain import VertexChain
from atoll.simulation.signatures import WorldKeys
from atoll.wire.codec import decode_body, decode_statement, encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import VerticesResponse
from atoll.wire.messages.membership import Ping, PingReply, ReportMessage
from atoll.wire.messages.round import (
    PartRequest,
    PartResponse,
    PartResult,
    ProposalMessage,
    RowContribution,
    TimeoutMessage,
    UpdateCommitmentMessage,
    VoteMessage,
)
from atoll.wire.messages.statements import (
    BaseStatement,
    ChangeableSettings,
    ChangeSettings,
    Commitment,
    LeaveReport,
    Proposal,
    QuorumCertificate,
    SignedStatement,
    SuspicionReport,
    ViewTimeout,
    Vote,
)
from atoll.wire.messages.vertex import Vertex

Twist = Callable[["ByzantineMember", Send], list[Effect]]
MISCHIEF_S = 0.5  # interval of unprompted messages of a villain
LISTENERS = 16  # most recipients at once; in a larger swarm this many are drawn each time
LISTENERS_DRAWN = 4
REPORTS_HEARD = 64


class ByzantineMember:
    """`twist` maps each message of the honest peer inside to the messages that are sent instead."""

    def __init__(self, peer: Peer, twist: Twist) -> None:
        self.peer, self.twist = peer, twist
        self.lied = False  # True once it has sent something else than the peer inside, or nothing
        self.notary: StatementSigner = peer.notary
        self.draw = random.Random(f"villain/{peer.me}")
        self.heard: dict[PeerId, SignedStatement] = {}  # latest statements of other members, for misuse
        self.reports: list[SignedStatement] = []  # their reports of joining and leaving

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        if isinstance(event, TimerFired) and event.name == "mischief":
            return [SetTimer("mischief", now + MISCHIEF_S), *self._mischief(now)]
        self._overhear(event)
        effects = self._twisted(self.peer.handle(event, now))
        if isinstance(event, Start):
            effects.append(SetTimer("mischief", now + MISCHIEF_S))
        return effects

    def say(self, statement: BaseStatement, now: Seconds) -> list[Effect]:
        """Pass on an order of its user, as an honest peer does."""
        return self.peer.say(statement, now)

    @property
    def others(self) -> list[PeerId]:
        history = self.peer.history
        return [m.peer for m in history.head_body.members if m.peer != self.peer.me] if history else []

    def _twisted(self, effects: list[Effect]) -> list[Effect]:
        out: list[Effect] = []
        for effect in expand_broadcasts(effects):
            said = self.twist(self, effect) if isinstance(effect, Send) else [effect]
            self.lied = self.lied or said != [effect]
            out += said
        return out

    def _overhear(self, event: Event) -> None:
        statement = getattr(getattr(event, "message", None), "statement", None)
        if isinstance(statement, SignedStatement):
            self.heard[statement.signer] = statement
            if isinstance(getattr(event, "message", None), ReportMessage) and statement not in self.reports:
                self.reports = [*self.reports, statement][-REPORTS_HEARD:]

    def _mischief(self, now: Seconds) -> list[Effect]:
        if self.peer.round is None:
            return []
        made = MISCHIEF.get(self.twist, lambda villain, to, now: [])
        others = self.others
        listeners = others if len(others) <= LISTENERS else self.draw.sample(others, LISTENERS_DRAWN)
        return [e for to in listeners for e in made(self, to, now)]


# ---- saying one thing to some and another to the rest ------------------------------------------------------


def equivocate(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Every second peer gets a different vote, proposal, commitment or timeout, each properly signed."""
    if villain.others.index(send.to) % 2 if send.to in villain.others else True:
        return [send]
    match send.message:
        case VoteMessage(statement=signed) as message:
            vote = decode_statement(signed.body, signed.signer)
            assert isinstance(vote, Vote)
            other = replace(vote, digest=digest(vote.digest))
            return [replace(send, message=replace(message, statement=villain.notary.sign(other)))]
        case ProposalMessage(body=raw) as message:
            body = decode_body(raw)
            other = encode(replace(body, time_s=body.time_s + 1e-3))
            proposed = decode_statement(message.statement.body, villain.peer.me)
            assert isinstance(proposed, Proposal)
            signed = villain.notary.sign(replace(proposed, digest=vertex_id(other)))
            return [replace(send, message=replace(message, body=other, statement=signed))]
        case TimeoutMessage(statement=signed) as message:
            timeout = decode_statement(signed.body, signed.signer)
            assert isinstance(timeout, ViewTimeout)
            other = replace(timeout, high_view=-1, high_digest=Digest(bytes(32)))
            return [replace(send, message=replace(message, statement=villain.notary.sign(other), high=None))]
        case UpdateCommitmentMessage(statement=signed) as message:
            commit = decode_statement(signed.body, signed.signer)
            assert isinstance(commit, Commitment)
            other = replace(commit, loss=commit.loss + 1)
            return [replace(send, message=replace(message, statement=villain.notary.sign(other)))]
        case _:
            return [send]


# ---- nonsense ----------------------------------------------------------------------------------------------


def garble(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Propose an invalid body; commit to numbers that are not finite."""
    match send.message:
        case ProposalMessage() as message:
            proposed = decode_statement(message.statement.body, villain.peer.me)
            assert isinstance(proposed, Proposal)
            body = b"\xc1 not a body"
            signed = villain.notary.sign(replace(proposed, digest=vertex_id(body)))
            return [replace(send, message=replace(message, body=body, statement=signed))]
        case UpdateCommitmentMessage(statement=signed) as message:
            commit = decode_statement(signed.body, signed.signer)
            assert isinstance(commit, Commitment)
            loss = villain.draw.choice([nan, inf, 1e300])
            wrong = villain.draw.choice(
                [
                    replace(commit, loss=loss),
                    replace(commit, samples=2**63, weight=2**63),
                    replace(commit, steps=-1),
                ]
            )
            return [replace(send, message=replace(message, statement=villain.notary.sign(wrong)))]
        case PingReply() as message:
            return [replace(send, message=replace(message, clock_s=villain.draw.choice([nan, inf, -1e300])))]
        case _:
            return [send]


def _nonsense(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    round = villain.peer.round
    assert round is not None
    number, trace, view = round.plan.round, round.plan.trace, round.agreement.view
    sign = villain.notary.sign
    invented = digest(villain.draw.randbytes(8))
    forged = SignedStatement(to, encode(Vote(number, view, "commit", invented)), villain.draw.randbytes(64))
    nobody_voted = QuorumCertificate(number, view + 40, "prepare", invented, ((villain.peer.me, b""),))
    words = [
        VoteMessage(number, 0, trace, forged),
        VoteMessage(number, 0, trace, replace(forged, body=villain.draw.randbytes(20))),
        VoteMessage(number, 0, trace, sign(Commitment(number, 0, invented, 1, 1, 1, 1.0, 1.0, 1))),
        TimeoutMessage(number, 0, trace, sign(ViewTimeout(number, view, view - 1, invented)), None),
        TimeoutMessage(number, 0, trace, sign(ViewTimeout(number, view, view + 40, invented)), nobody_voted),
        ProposalMessage(number, 0, trace, sign(Proposal(number, view, invented)), b"", (), nobody_voted),
        ProposalMessage(
            number, 0, trace, sign(Proposal(number, view + 1, vertex_id(b"x"))), b"x", (forged,) * 9, None
        ),
        ReportMessage(sign(LeaveReport(number, "x" * 100_000))),
        ReportMessage(sign(SuspicionReport(number, to, "silent"))),
        ReportMessage(replace(forged, body=encode(LeaveReport(number, "I never said so")))),
        PartRequest(number, 0, trace, invented),
        PartResponse(number, 0, trace, invented),
        Ping(nan, 2**62),
        VerticesResponse((Vertex(villain.draw.randbytes(30), None),), 2**62),
    ]
    message = villain.draw.choice(words)
    heard = villain.heard.get(to)
    if heard is not None and villain.draw.random() < 0.3:  # a statement of another member with other bytes
        message = ProposalMessage(number, 0, trace, heard, b"other bytes", (), None)
    payload = Payload(digest(b"x"), 1, b"x") if isinstance(message, PartResponse) else None
    return [Send(to, message, Lane.CONTROL, payload)]


# ---- lies about bytes --------------------------------------------------------------------------------------


def lie(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Send parts and results with other bytes than committed to."""
    match send.message:
        case RowContribution() | PartResult() | PartResponse() if send.payload is not None:
            other = Payload(digest(send.payload.digest), send.payload.size_bytes, (villain.peer.me, "nobody"))
            return [replace(send, payload=other)]
        case _:
            return [send]


def withhold(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [] if isinstance(send.message, PartResult | ProposalMessage) else [send]


# ---- too many words ----------------------------------------------------------------------------------------


def flood(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send]


def _flood(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    round = villain.peer.round
    assert round is not None
    effects: list[Effect] = []
    for k in range(100):
        number = round.plan.round + villain.draw.choice([1, 2, 3, 1000, 2**40])
        vote = villain.notary.sign(Vote(number, k, "prepare", digest(bytes([k]))))
        effects.append(Send(to, VoteMessage(number, k, "", vote)))
    return effects


# ---- words of yesterday ------------------------------------------------------------------------------------


def replay(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send]


def _replay(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    return [Send(to, ReportMessage(signed)) for signed in villain.reports]


# ---- in another name -------------------------------------------------------------------------------


FORGED = ChangeableSettings(
    inner_steps=1, lr=1e3
)  # conspicuous numbers, so that a peer that accepts them is detected


def usurp(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Add a forged order to every body that it proposes."""
    history = villain.peer.history
    if not isinstance(send.message, ProposalMessage) or history is None:
        return [send]
    body = decode_body(send.message.body)
    parent, genesis = history.bodies.get(body.round - 1), villain.peer.settings
    if parent is None or amends_in(body.reports):
        return [send]
    said = {id(signed) for signed, _ in tunes_in(body.reports)}
    others = (signed for signed in body.reports if id(signed) not in said)
    reports = (*others, _forged(villain, history))
    forged = replace(body, reports=reports, tuned=tuned_after(genesis, parent, body.trained, reports))
    raw = encode(forged)
    proposed = decode_statement(send.message.statement.body, villain.peer.me)
    assert isinstance(proposed, Proposal)
    signed = villain.notary.sign(replace(proposed, digest=vertex_id(raw)))
    return [replace(send, message=replace(send.message, body=raw, statement=signed))]


def _usurp(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    history = villain.peer.history
    if history is None:
        return []
    olds = [said for body in history.bodies.values() for said, _ in tunes_in(body.reports)]
    again = villain.draw.sample(olds, min(1, len(olds)))
    again += [villain.notary.sign(decode_statement(signed.body, signed.signer)) for signed in again]
    return [Send(to, ReportMessage(signed)) for signed in [_forged(villain, history), *again]]


def _forged(villain: ByzantineMember, history: VertexChain) -> SignedStatement:
    return villain.notary.sign(ChangeSettings(history.head_id, FORGED, b"the founder's, of course"))


MISCHIEF: dict[Twist, Callable[[ByzantineMember, PeerId, Seconds], list[Effect]]] = {
    garble: _nonsense,
    flood: _flood,
    replay: _replay,
    usurp: _usurp,
}
KINDS: dict[str, Twist] = {
    "equivocator": equivocate,
    "garbler": garble,
    "liar": lie,
    "withholder": withhold,
    "flooder": flood,
}


def disguised(wrap: Callable[[Peer], object]) -> Callable[..., Peer]:
    """Maker of peers for a swarm: `wrap(honest peer)` takes the place of the peer."""

    def make(
        run: Digest,
        signer: Signer,
        keys: WorldKeys,
        wish: DesiredRole,
        genesis: Vertex | None,
        bootstrap: tuple[PeerId, ...],
    ) -> Peer:
        peer = Peer(run, signer, keys.verifier, wish, genesis, bootstrap, capabilities=CAPABILITIES)
        return cast(Peer, wrap(peer))

    return make


def villain(kind: str | Twist) -> Callable[..., Peer]:
    """Maker of villains of this kind, for a swarm."""
    twist = KINDS[kind] if isinstance(kind, str) else kind
    return disguised(lambda peer: ByzantineMember(peer, twist))
