"""Twins: every way to split four voters, one of which runs twice with one key, in every one of the first views.

"Running twin instances of a node that use correct, unmodified code and share the same network identity and
credentials allows to emulate most interesting Byzantine behaviors" (Bano et al., DISC 2021; arXiv 2004.10617): a
twin equivocates, forgets and votes twice without anybody having to invent how. A scenario is the twin and, for both
halves of each view (until the prepare votes, and the commit votes), which of the five machines hear each other;
all of them are enumerated, but of those that differ in names alone only the first, as the paper does. After these
views everybody hears everybody, and somebody must decide.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import permutations, product
from typing import Any

from watch import Watch

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Send, expand_broadcasts
from atoll.crypto.signer import Signer
from atoll.protocol.agreement.events import BodyDecided, Equivocation, LocalProposerTurnBegan, ProposalReceived
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.agreement.voter import Electorate
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import VoteMessage

NAMES = tuple(PeerId(f"p{i}") for i in range(4))
QUORUM = 3
Copy = tuple[PeerId, int]
Scenario = tuple[int, tuple[int, ...]]  # the twin; for each half of each view, who is on which side, as bits


def scenarios(views: int) -> Iterator[Scenario]:
    """All splits of five machines in two sides or none, in all halves of all views, once up to names."""
    for twin in range(4):
        for sides in product(range(16), repeat=2 * views):
            if (twin, sides) == min(namesakes((twin, sides), views)):
                yield twin, sides


def namesakes(scenario: Scenario, views: int) -> set[Scenario]:
    """The same story, had the twin's copies changed places, and voters that lead no view of the storm."""
    twin, sides = scenario
    found: set[Scenario] = set()
    for idle in permutations(range(views, 4)):
        name = [*range(views), *idle]
        for copies in ((name[twin], 4), (4, name[twin])):
            place = [*name, 4]
            place[twin], place[4] = copies
            found.add((name[twin], tuple(_moved(side << 1, place) for side in sides)))
    return found


def _moved(bits: int, place: list[int]) -> int:
    """The split with every machine in its new place; sides have no names, so the first machine's is 0."""
    after = sum((bits >> at & 1) << place[at] for at in range(5))
    return (after ^ 31 if after & 1 else after) >> 1


class Twins:
    def __init__(self, scenario: Scenario, machine: type[TwoPhaseAgreement] = TwoPhaseAgreement) -> None:
        twin, self.sides = scenario
        self.twin = NAMES[twin]
        honest = frozenset(NAMES) - {self.twin}
        signers: dict[PeerId, Signer] = {p: VirtualSigner(p) for p in NAMES}
        keys = {p: signer.vote_key for p, signer in signers.items()}
        run = Digest(bytes(32))
        self.watch = Watch(
            0, QUORUM, signers, honest, StatementSigner(run, VirtualSigner("x"), VirtualSignatureVerifier())
        )
        self.copies: list[Copy] = [*((p, 0) for p in NAMES), (self.twin, 1)]
        self.machines: dict[Copy, TwoPhaseAgreement] = {}
        self.flying: deque[tuple[Copy, Send]] = deque()
        self.split: tuple[int, ...] = (0, 0)
        for copy in self.copies:
            notary = StatementSigner(run, VirtualSigner(copy[0]), VirtualSignatureVerifier())
            notary = self.watch.spied(notary) if copy[0] in honest else notary
            self.machines[copy] = machine(notary, Electorate(0, "", dict(keys), QUORUM, NAMES))

    def play(self) -> None:
        views = len(self.sides) // 2
        for copy in self.copies:
            self._apply(copy, self.machines[copy].start())
        for view in range(views + 4):
            self.split = self.sides[2 * view : 2 * view + 2] or (0, 0)
            if view >= views:
                for copy in self.copies:
                    self._apply(copy, self.machines[copy].retransmit())
            self._deliver()
            if view >= views and self.watch.final is not None:
                return  # whoever decided shows it to the others: that is the peer's business
            for copy in self.copies:
                self._apply(copy, self.machines[copy].close_view(view))
        raise AssertionError("nobody decided within four views of peace")

    def _hears(self, copy: Copy, sender: Copy, message: Any) -> bool:
        late = isinstance(message, VoteMessage) and b"commit" in message.statement.body
        a, b = ((self.split[late] << 1) >> self.copies.index(c) & 1 for c in (sender, copy))
        return a == b

    def _deliver(self) -> None:
        while self.flying:
            sender, send = self.flying.popleft()
            for copy in self.copies:
                if copy[0] == send.to and self._hears(copy, sender, send.message):
                    try:
                        effects = self.machines[copy].receive(sender[0], send.message)  # type: ignore[arg-type]
                    except PeerFault as fault:
                        assert fault.who not in self.watch.honest, f"{copy} blames honest {fault}"
                        continue
                    self._apply(copy, effects)

    def _apply(self, copy: Copy, effects: list[Effect]) -> None:
        machine, name = self.machines[copy], copy[0]
        for effect in expand_broadcasts(effects):
            match effect:
                case Send():
                    self.watch.shown(effect.message)
                    if name != self.twin:
                        self.watch.said(name, effect.message)
                    self.flying.append((copy, effect))
                case Emit(fact):
                    self._hear_fact(copy, name, machine, fact)
                case _:
                    pass

    def _hear_fact(self, copy: Copy, name: PeerId, machine: TwoPhaseAgreement, fact: Any) -> None:
        match fact:
            case ProposalReceived(digest=digest):
                self._apply(copy, machine.approve(digest))
            case LocalProposerTurnBegan(view=view):
                body = f"right: by {name} {copy[1]} in {view}".encode()
                self.watch.bodies.add(body)
                self._apply(copy, machine.propose(view, body))
            case BodyDecided(certificate=certificate) if name != self.twin:
                self.watch.decided(name, certificate)
            case Equivocation(peer=peer) if name != self.twin:
                assert peer == self.twin, f"honest {peer} was caught saying two things"
                self.watch.evidence(fact)
            case _:
                pass


def play_twins(scenario: Scenario, machine: type[TwoPhaseAgreement] = TwoPhaseAgreement) -> Twins:
    world = Twins(scenario, machine)
    try:
        world.play()
    except AssertionError as why:
        raise AssertionError(f"twins {scenario}: {why}") from why
    return world
