"""The narrow door of agreement: what a round asks of whatever machine decides its one body.

`agreement.py` (two phases, some may lie) and `raft_round.py` (one phase, nobody lies) stand behind it; genesis says
which, and the round never asks. All of them decide with a commit certificate, so nothing behind the vertex knows
which one it was either. Values and names only: the rules are in the machines.
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
from atoll.wire.messages.round import PreVote, ProposalMessage, TimeoutMessage, VoteMessage


class ConsensusEngine(Protocol):
    """One voter's (or listener's) side of the agreement that closes one round; see `TwoPhaseAgreement`."""

    votes: bool  # I have a vote in this round
    view: int
    bodies: dict[Digest, bytes]
    asked: set[Digest]  # bodies that the round was asked to judge
    decided: BodyDecided | None

    @property
    def tallies(self) -> Sized:
        """One per view that anything was heard of."""
        ...

    @property
    def lacking(self) -> set[Digest]: ...
    @property
    def has_voted(self) -> bool: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def gave_up(self) -> set[PeerId]: ...
    @property
    def waiting_for(self) -> PeerId | None: ...

    def begin(self) -> list[Effect]: ...
    def proposer(self, view: int) -> PeerId: ...
    def has_proposed(self, view: int) -> bool: ...
    def holders(self, digest: Digest) -> list[PeerId]: ...
    def propose(self, view: int, body: bytes) -> list[Effect]: ...
    def approve(self, digest: Digest) -> list[Effect]: ...
    def learn_body(self, body: bytes) -> list[Effect]: ...
    def stop(self) -> None: ...
    def close_view(self, view: int) -> list[Effect]: ...
    def remind(self, to: PeerId | None = None) -> list[Effect]: ...
    def receive(
        self, sender: PeerId, message: ProposalMessage | VoteMessage | TimeoutMessage | PreVote
    ) -> list[Effect]: ...


def open_door(
    raft: bool, notary: StatementSigner, electorate: Electorate, kept: bytes | None = None
) -> ConsensusEngine:
    """The machine that this run agrees by; `kept` is what it kept under `said/ROUND/agreement`."""
    return (OnePhaseAgreement if raft else TwoPhaseAgreement)(notary, electorate, kept)
