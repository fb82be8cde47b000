"""Members that read rows of others first, then commit to a mix of them.

peeker    waits for others to share, and commits as soon as it has received a row
turncoat  declines the round, and commits in the next attempt, if there is one

Both own parts, share neither results nor updates of their own, and propose nothing. So their commitments are always
made of others' rows, and no vertex may ever contain one (`never_counted`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Effect, Event, Fact, Lane, Payload, Received, Send
from atoll.crypto.digest import digest, merkle_path, merkle_root
from atoll.peer.events import RoundClosed
from atoll.peer.peer import Peer
from atoll.peer.round.commit_reveal import passing
from atoll.peer.round.machine import RoundMachine
from atoll.simulation.adversaries.byzantine import ByzantineMember, disguised
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.world import VirtualComputer
from atoll.wire.codec import decode_statement
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.round import (
    PartResult,
    ProposalMessage,
    RowContribution,
    RowResponse,
    UpdateCommitmentMessage,
)
from atoll.wire.messages.statements import Accusation, SignedStatement


class PeekingMember(ByzantineMember):
    """The honest peer inside trains, shares and votes; none of its messages about its own update gets out."""

    def __init__(self, peer: Peer, passes: bool) -> None:
        super().__init__(peer, peek)
        self.passes = passes
        self.round, self.spoke = -1, -1  # last attempt with a message of this peer
        self.said: SignedStatement | None = None  # that commitment
        self.given: set[tuple[int, PeerId]] = set()  # (part, receiver) of rows already sent in it
        self.seen: list[Digest] = []  # rows of other members in this round
        self.rows: tuple[Digest, ...] = ()  # rows to send, made of them
        self.shown = 0  # rows received in all rounds before this peer committed

    def handle(self, event: Event, now: Seconds) -> list[Effect]:
        effects = super().handle(event, now)
        round = self.peer.round
        if round is None or round.closed or round.reduce is None or round.encoded is None:
            return effects
        if round.plan.round != self.round:
            self.round, self.spoke, self.said, self.seen, self.rows = round.plan.round, -1, None, [], ()
        match event:
            case Received(message=RowContribution() | RowResponse() as message, payload=Payload() as payload):
                if message.round == self.round and message.statement.signer != self.peer.me:
                    self.seen.append(payload.digest)
                    self.shown += self.spoke < 0
            case _:
                pass
        if self.spoke < round.attempt and (self.seen or self.passes):
            effects += self._speak(round)
        return effects + self._share(round)

    def _speak(self, round: RoundMachine) -> list[Effect]:
        """Commit once per attempt to the rows received, if any."""
        commit, made_of = passing(self.round, round.attempt, "nothing to give"), b"".join(sorted(self.seen))
        if self.seen:
            self.rows = self.rows or tuple(digest(made_of + bytes([k])) for k in range(len(round.encoded or ())))
            commit = replace(round.update.commit(round.attempt), root=merkle_root(self.rows))
        self.spoke, self.said, self.given = round.attempt, self.notary.sign(commit), set()
        said = UpdateCommitmentMessage(self.round, round.attempt, round.plan.trace, self.said)
        return [Send(peer, said) for peer in self.others]

    def _share(self, round: RoundMachine) -> list[Effect]:
        """Send rows to honest owners only: collusion of two liars is not modeled here."""
        if self.said is None or self.spoke != round.attempt or round.reduce is None:
            return []
        effects: list[Effect] = []
        for part, (name, true) in enumerate(zip(self.rows, round.encoded or (), strict=False)):
            path, payload = merkle_path(self.rows, part), Payload(name, true.size_bytes, (self.peer.me,))
            for index, owner in enumerate(round.reduce.plan.parallel_owners(part)):
                if owner != self.peer.me and (part, owner) not in self.given and round.reveal.may_receive(owner):
                    self.given.add((part, owner))
                    slot = self.round, round.attempt, round.plan.trace
                    row = RowContribution(*slot, part, index, path, self.said)
                    effects.append(Send(owner, row, Lane.BULK, payload))
        return effects


def peek(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Drop messages about its own update and its results, and the evidence of its double commitment."""
    match send.message:
        case UpdateCommitmentMessage(statement=said) | RowContribution(statement=said) | PartResult(statement=said):
            return [] if said.signer == villain.peer.me else [send]
        case RowResponse(statement=said):
            return [] if said.signer == villain.peer.me else [send]
        case ProposalMessage():
            return []  # the vertex would contain all of that
        case ReportMessage(statement=said):
            return [] if isinstance(decode_statement(said.body, said.signer), Accusation) else [send]
        case _:
            return [send]


def peeker(passes: bool = False) -> Callable[..., Peer]:
    """Maker of a peeker, for a swarm; `passes`: a turncoat."""
    return disguised(lambda peer: PeekingMember(peer, passes))


PEEKERS = {"peeker": peeker(), "turncoat": peeker(passes=True)}


def never_counted(peekers: Collection[PeerId]) -> Callable[[Seconds, VirtualComputer, Fact], None]:
    """Watcher that checks that no vertex contains a row of these members."""

    def watch(now: Seconds, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            counted = sorted(said.signer for said in fact.body.commits if said.signer in peekers)
            if counted:
                raise InvariantBroken(f"round {fact.body.round} counts {counted}, who looked before they committed")

    return watch
