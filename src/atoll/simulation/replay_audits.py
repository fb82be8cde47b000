"""Trainers that do not train as assigned, and auditors that do not audit. Each signs what it says.

cheat       takes other steps than assigned, in every segment, and commits to what it did
starter     begins its chain with moments of its own choice
refuser     never says where its exhibit lies
joker       points to a blob that is no exhibit
accuser     finds every audited member guilty
silent      never tells what it found
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.simulation.adversaries.byzantine import ByzantineMember, Twist
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain
from atoll.simulation.worker import VirtualWorker, WorkerKnobs
from atoll.wire.codec import decode_statement
from atoll.wire.messages.audits import ExhibitResponse
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import AuditReport


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, WorkerKnobs, Random], VirtualWorker]:
    """What stands behind each peer of an audited swarm: honest trainers, except for these kinds."""

    def make(me: PeerId, knobs: WorkerKnobs, draw: Random) -> VirtualWorker:
        chain = VirtualTrainingChain(me)
        chain.cheats, chain.starts = kinds.get(me) == "cheat", kinds.get(me) == "starter"
        return VirtualWorker(me, knobs, draw, chain=chain)

    return make


def as_it_is(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send]


def refuse(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [] if isinstance(send.message, ExhibitResponse) else [send]


def joke(villain: ByzantineMember, send: Send) -> list[Effect]:
    if not isinstance(send.message, ExhibitResponse) or villain.peer.history is None:
        return [send]
    return [replace(send, message=replace(send.message, blob=villain.peer.history.head_body.state))]


def accuse(villain: ByzantineMember, send: Send) -> list[Effect]:
    said = _own_verdict(villain, send)
    if said is None:
        return [send]
    return [replace(send, message=ReportMessage(villain.notary.sign(replace(said, finding="mismatch"))))]


def say_nothing(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send] if _own_verdict(villain, send) is None else []


def _own_verdict(villain: ByzantineMember, send: Send) -> AuditReport | None:
    if not isinstance(send.message, ReportMessage) or send.message.statement.signer != villain.peer.me:
        return None
    said = decode_statement(send.message.statement.body, villain.peer.me)
    return said if isinstance(said, AuditReport) else None


SHIRKERS: dict[str, Twist] = {"refuser": refuse, "joker": joke, "accuser": accuse, "silent": say_nothing}

TRAINERS = ("cheat", "starter")  # what they do is behind the peer; what they say is honest
LIARS = (*TRAINERS, "refuser", "joker")  # who are to lose their place
