"""Invariants of every simulated run, checked on the facts that peers emit. They never steer.

- Vertices, membership and counted rows are those of the reference model (`reference_model.py`).
- A peer that closes a round holds exactly the state that its vertex names.
- Every contribution is counted exactly once in a part, or its peer is reported missing.
- Without faults every member is counted in every training round.
- An honest peer never breaks the protocol and never equivocates, not even across a restart.
- No honest peer accuses an honest owner.
- Steps taken while partitioned are counted in rows with weight, and at most once (`late`; scenarios compare it with
  the steps of the workers).
- Nothing that strangers can grow exceeds its bound.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.limits import (
    COMMITTEE_MAX,
    EARLY_BYTES_MAX,
    EARLY_MESSAGES_MAX,
    REPORTS_PER_VERTEX_MAX,
    ROUNDS_KEPT,
    VOICES_MAX,
)
from atoll.base.machine import Fact
from atoll.peer.events import (
    AgreedStateMissing,
    LocalStateCaughtUp,
    MalformedRowDetected,
    MemberAccused,
    ProposalRejected,
    ProtocolFault,
    RoundClosed,
)
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.allreduce.events import PartResultAccepted, RowDecodeFailed
from atoll.protocol.history.chain import WINDOW
from atoll.simulation.reference_model import ReferenceModel, ReferenceModelMismatch
from atoll.simulation.worker import counts_in
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Accusation, Commitment
from atoll.wire.messages.vertex import VertexBody

ANSWERS_WATCHED = 4096  # answers of the last few rounds


class InvariantBroken(AssertionError):
    """An invariant was violated. The message names it; the seed replays it."""


@dataclass
class InvariantCheckers:
    villains: frozenset[PeerId] = frozenset()
    faultless: bool = False
    model: ReferenceModel = field(default_factory=ReferenceModel)
    closings: int = 0
    full: int = 0  # closings of training rounds that counted every voter
    training: int = 0
    missing: int = 0
    answers: dict[tuple[int, str, int, int, PeerId], Digest] = field(default_factory=dict)
    repairs: int = 0
    # complaints of honest peers: the network may be to blame, and they need many to take effect
    complaints: int = 0
    attempts: dict[int, int] = field(default_factory=dict)  # round → attempt that decided it
    late: Counter[PeerId] = field(default_factory=Counter[PeerId])  # peer → steps taken apart that vertices count

    def watch(self, now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if node.name in self.villains:
            return
        match fact:
            case RoundClosed():
                self._closed(node, fact)
            case LocalStateCaughtUp(round=round):
                self.model.catch_up(node.name, round)
            case PartResultAccepted():
                self._answered(node, fact)
            case Equivocation(peer=peer) if peer not in self.villains:
                self._broken(f"honest {peer} was caught saying two things in round {fact.round}")
            case ProtocolFault(peer=peer, what=what) if peer not in self.villains:
                self._broken(f"honest {peer} is blamed by {node.name}: {what}")
            case MemberAccused(peer=peer, statement=Accusation()) if peer not in self.villains:
                self._broken(f"honest {peer} is called a liar by {node.name} in round {fact.round}")
            case MemberAccused(peer=peer) if peer not in self.villains:
                self.complaints += 1
            case RowDecodeFailed(peer=peer) | MalformedRowDetected(peer=peer) if peer not in self.villains:
                self._broken(f"honest {peer}'s bytes do not decode")
            case AgreedStateMissing(why=why):
                self.repairs += 1
                if "differs" in why:
                    self._broken(f"{node.name} diverged in round {fact.round}: {why}")
            case ProposalRejected(proposer=proposer, why=why) if (
                proposer not in self.villains and "state hash" in why
            ):
                self._broken(f"{node.name} computes another state than {proposer} in round {fact.round}")
            case _:
                pass

    def _closed(self, node: VirtualComputer, fact: RoundClosed) -> None:
        round, name = fact.body.round, node.name
        if round not in self.model.heights:
            self._count_late(fact.body)
        assert node.machine is not None and node.machine.history is not None
        try:
            self.model.close(name, fact.id, node.machine.history.bodies, round)
        except ReferenceModelMismatch as why:
            self._broken(str(why))
        if node.island.head != fact.body.state:
            self._broken(f"{name} closed round {round} with a state that is not the agreed one")
        if node.island.miscounted:
            self._broken(node.island.miscounted[0])
        counts = counts_in(node.island.blobs[fact.body.state])
        if counts is not None and counts != (expected := self.model.counts(fact.id)):
            self._broken(f"the state of round {round} counts {counts}, expected {expected}")
        self.closings += 1
        self.attempts.setdefault(round, fact.body.attempt)
        if fact.body.parts:
            self.training += 1
            self.missing += len(fact.missing)
            whole = not (fact.missing or fact.partly or fact.parts_missing)
            self.full += whole
            if self.faultless and not whole:
                self._broken(f"without faults, round {round} misses {fact.missing} (parts of {fact.partly})")
        self._bounds(node)

    def _count_late(self, body: VertexBody) -> None:
        for signed in body.commits:
            commit = statement_in(signed)
            if not isinstance(commit, Commitment) or commit.late is None:
                continue
            if not commit.weight:
                self._broken(f"late work of {signed.signer} is in a row of round {body.round} that weighs nothing")
            self.late[signed.signer] += commit.late.steps

    def _answered(self, node: VirtualComputer, fact: PartResultAccepted) -> None:
        """Check that an owner gives one result per part and attempt, also across a restart."""
        if fact.owner in self.villains or fact.owner == node.name:
            return  # the owner's own result before it is durable, so it was not sent
        slot = (fact.round, fact.trace, fact.attempt, fact.part, fact.owner)
        if self.answers.setdefault(slot, fact.digest) != fact.digest:
            self._broken(f"honest {fact.owner} gave two answers for part {fact.part} in round {fact.round}")
        if len(self.answers) > ANSWERS_WATCHED:
            del self.answers[next(iter(self.answers))]

    def _bounds(self, node: VirtualComputer) -> None:
        peer = node.machine
        if peer is None:
            return
        assert len(peer.early) <= EARLY_MESSAGES_MAX and peer.early.size_bytes <= EARLY_BYTES_MAX
        assert peer.pool is None or len(peer.pool) <= REPORTS_PER_VERTEX_MAX + VOICES_MAX
        assert len(peer.old_parts.held) <= ROUNDS_KEPT + 1
        if peer.history is not None:
            assert len(peer.history.vertices) <= WINDOW + 2
        if peer.round is not None:
            voters = max(len(peer.round.plan.committee), COMMITTEE_MAX)
            assert len(peer.round.agreement.tallies) <= 4 * voters, "tallies of finished attempts pile up"

    def _broken(self, what: str) -> None:
        raise InvariantBroken(what)
