"""Consensus engine interface: the calls by which a round agrees on one vertex body.

Engines: `two_phase.py` (some voters may lie) and `one_phase.py` (voters only crash). Genesis selects the engine.
Every engine decides with a commit certificate, so readers of a vertex need not know the engine.
Not responsible for: voting rules, which are in the engines.
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Protocol

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect
from atoll.protocol.agreement.events import BodyDecided
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.agreement.voter import Electorate
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, ViewChangePreVote, VoteMessage


class ConsensusEngine(Protocol):
    """One voter's (or listener's) side of the agreement that closes one round; see `TwoPhaseAgreement`."""

    votes: bool  # whether the local peer votes in this round
    view: int
    bodies: dict[Digest, bytes]
    sent_for_judgment: set[Digest]  # bodies sent to the round for judgment
    decided: BodyDecided | None

    @property
    def tallies(self) -> Sized:
        """One entry per view with received messages."""
        ...

    @property
    def missing_bodies(self) -> set[Digest]: ...
    @property
    def has_voted(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def voters_timed_out(self) -> set[PeerId]: ...
    @property
    def silent_proposer(self) -> PeerId | None: ...

    def start(self) -> list[Effect]: ...
    def proposer(self, view: int) -> PeerId: ...
    def has_proposed(self, view: int) -> bool: ...
    def holders(self, digest: Digest) -> list[PeerId]: ...
    def propose(self, view: int, body: bytes) -> list[Effect]: ...
    def approve(self, digest: Digest) -> list[Effect]: ...
    def add_body(self, body: bytes) -> list[Effect]: ...
    def stop(self) -> None: ...
    def close_view(self, view: int) -> list[Effect]: ...
    def retransmit(self, to: PeerId | None = None) -> list[Effect]: ...
    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | ViewChangePreVote
    ) -> list[Effect]: ...


def make_engine(
    raft: bool, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None
) -> ConsensusEngine:
    """Create the engine of this run. `kept` is its durable state, stored under `said/ROUND/agreement`."""
    return (OnePhaseAgreement if raft else TwoPhaseAgreement)(notary, electorate, kept)
