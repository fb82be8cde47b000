"""Trainers that do not train as assigned, and auditors that do not audit. Each signs what it says.

cheat       takes other steps than assigned, in every segment, and commits to what it did
starter     begins its chain with moments of its own choice
refuser     never says where its exhibit lies
joker       points to a blob that is no exhibit
accuser     finds everybody guilty that it audits
silent      never tells what it found
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Send
from atoll.simulation.adversaries.byzantine import Twist, Villain
from atoll.simulation.simulated_audit_chain import Chain
from atoll.simulation.worker import Island, IslandKnobs
from atoll.wire.codec import decode_statement
from atoll.wire.messages.audits import ExhibitIs
from atoll.wire.messages.membership import MemberReport
from atoll.wire.messages.statements import Audited


def islands(kinds: dict[PeerId, str]) -> Callable[[PeerId, IslandKnobs, Random], Island]:
    """What stands behind each peer of an audited swarm: honest trainers, but for those of these kinds."""

    def make(me: PeerId, knobs: IslandKnobs, draw: Random) -> Island:
        chain = Chain(me)
        chain.cheats, chain.starts = kinds.get(me) == "cheat", kinds.get(me) == "starter"
        return Island(me, knobs, draw, chain=chain)

    return make


def as_it_is(villain: Villain, send: Send) -> list[Effect]:
    return [send]


def refuse(villain: Villain, send: Send) -> list[Effect]:
    return [] if isinstance(send.message, ExhibitIs) else [send]


def joke(villain: Villain, send: Send) -> list[Effect]:
    if not isinstance(send.message, ExhibitIs) or villain.peer.history is None:
        return [send]
    return [replace(send, message=replace(send.message, blob=villain.peer.history.head_body.state))]


def accuse(villain: Villain, send: Send) -> list[Effect]:
    said = _own_verdict(villain, send)
    if said is None:
        return [send]
    return [replace(send, message=MemberReport(villain.notary.sign(replace(said, finding="mismatch"))))]


def say_nothing(villain: Villain, send: Send) -> list[Effect]:
    return [send] if _own_verdict(villain, send) is None else []


def _own_verdict(villain: Villain, send: Send) -> Audited | None:
    if not isinstance(send.message, MemberReport) or send.message.statement.signer != villain.peer.me:
        return None
    said = decode_statement(send.message.statement.body, villain.peer.me)
    return said if isinstance(said, Audited) else None


SHIRKERS: dict[str, Twist] = {"refuser": refuse, "joker": joke, "accuser": accuse, "silent": say_nothing}

TRAINERS = ("cheat", "starter")  # what they do is behind the peer; what they say is honest
LIARS = (*TRAINERS, "refuser", "joker")  # who are to lose their place
