"""Voters around a table and a postman: what reaches whom, and when, is for the test to say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Persist, Send, expand_broadcasts
from atoll.protocol.agreement.events import BodyDecided, ProposalReceived
from atoll.protocol.agreement.interface import ConsensusEngine
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.voter import Electorate
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import BaseStatement

RUN, ROUND = Digest(bytes(32)), 7
Route = tuple[PeerId, PeerId, Any]


def names_of(voters: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{i}") for i in range(voters))


@dataclass
class Table:
    """Voters around a table; p0 leads view 0. Mail lies until it is delivered or lost."""

    voters: int
    machine: Callable[..., ConsensusEngine] = OnePhaseAgreement
    deaf: set[PeerId] = field(default_factory=set)
    mail: list[Route] = field(default_factory=list)
    facts: list[tuple[PeerId, Any]] = field(default_factory=list)
    kept: dict[PeerId, bytes] = field(default_factory=dict)
    judges: bool = True

    def __post_init__(self) -> None:
        self.names = names_of(self.voters)
        self.keys = {p: VirtualSigner(p).vote_key for p in self.names}
        self.at: dict[PeerId, ConsensusEngine] = {}
        for name in self.names:
            self.start(name)
        for name in self.names:
            self.do(name, self.at[name].start())

    def start(self, name: PeerId, session: int = 0) -> ConsensusEngine:
        """With what it kept; another `session` than the first is one that is not agreed."""
        notary = StatementSigner(RUN, VirtualSigner(name, session), VirtualSignatureVerifier())
        quorum = self.voters // 2 + 1
        made = self.machine(notary, Electorate(ROUND, "t", self.keys, quorum, self.names), self.kept.get(name))
        self.at[name] = made
        return made

    def sign(self, name: str, statement: BaseStatement) -> Any:
        return StatementSigner(RUN, VirtualSigner(PeerId(name)), VirtualSignatureVerifier()).sign(statement)

    def do(self, name: PeerId, effects: list[Effect]) -> None:
        for effect in expand_broadcasts(effects):
            match effect:
                case Persist(blob=bytes(blob)):
                    self.kept[name] = blob
                case Send(to, message):
                    self.mail.append((name, to, message))
                case Emit(fact):
                    self.facts.append((name, fact))
                    if isinstance(fact, ProposalReceived) and self.judges:
                        self.do(name, self.at[name].approve(fact.digest))
                case _:
                    raise AssertionError(effect)

    def deliver(self) -> None:
        """All that lies here now, one hop."""
        mail, self.mail = self.mail, []
        for sender, to, message in mail:
            if to not in self.deaf and sender not in self.deaf:
                self.do(to, self.at[to].receive(sender, message))

    def settle(self) -> None:
        while self.mail:
            self.deliver()

    def told(self, kind: type[Any], name: str = "") -> list[Any]:
        return [fact for who, fact in self.facts if isinstance(fact, kind) and name in ("", who)]

    def decided(self) -> dict[PeerId, bytes | None]:
        return {who: fact.body for who, fact in self.facts if isinstance(fact, BodyDecided)}
