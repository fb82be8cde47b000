"""Agreement machines on a table, and a seeded enemy who decides what is delivered, lost, doubled, forgotten.

The enemy also crashes voters (they come back with what was durable) and, where liars are allowed, signs whatever it
likes with the liars' keys. It never forges an honest signature.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Keep, Report, Send
from atoll.keys.digest import digest
from atoll.protocol.consensus.agreement import Agreement, Bound, Decided, Equivocation, Free, Judge
from atoll.sim.signatures import VirtualSigner, VirtualVerifier
from atoll.wire.envelope import Notary
from atoll.wire.messages.round import Propose, TimedOut, Voted
from atoll.wire.messages.statements import Proposed, Timeout, Vote

RUN = Digest(bytes(32))


@dataclass
class Table:
    """`voters` machines, the last `liars` of which are the enemy's."""

    voters: int
    quorum: int
    draw: random.Random
    liars: int = 0
    machines: dict[PeerId, Agreement] = field(default_factory=dict)
    kept: dict[PeerId, bytes] = field(default_factory=dict)
    flying: list[Send] = field(default_factory=list)
    decided: dict[Digest, set[PeerId]] = field(default_factory=dict)
    known: list[Digest] = field(default_factory=list)  # bodies the enemy can speak about

    def __post_init__(self) -> None:
        self.names = [PeerId(f"p{i}") for i in range(self.voters)]
        self.honest = self.names[: self.voters - self.liars]
        self.notaries = {p: Notary(RUN, VirtualSigner(p), VirtualVerifier()) for p in self.names}
        for name in self.honest:
            self._start(name)

    def play(self, steps: int) -> None:
        for _ in range(steps):
            self._step()

    def heal(self, attempts: int) -> None:
        """Everything is delivered from now on, and time passes: somebody must decide."""
        for _ in range(attempts):
            self._deliver_all()
            for name in self.honest:
                self._carry_out(name, self.machines[name].remind())
            self._deliver_all()
            if self.decided:
                return  # whoever decided shows its vertex to the others: that is the peer's business
            last = max(self.machines[p].view for p in self.honest)
            for name in self.honest:
                self._carry_out(name, self.machines[name].close_view(last))

    # ---- the enemy -----------------------------------------------------------------------------------------

    def _step(self) -> None:
        what, draw = self.draw.random(), self.draw
        if what < 0.75 and self.flying:
            send = self.flying.pop(draw.randrange(len(self.flying)))
            if draw.random() < 0.1:
                self.flying.append(send)  # it comes again later
            if draw.random() > 0.15:
                self._deliver(send)
        elif what < 0.87:
            name = draw.choice(self.honest)
            self._carry_out(name, self.machines[name].close_view(self.machines[name].view))
        elif what < 0.92:
            self._start(draw.choice(self.honest))
        elif what < 0.96:
            name = draw.choice(self.honest)
            self._carry_out(name, self.machines[name].remind())
        elif self.liars:
            self._lie()

    def _lie(self) -> None:
        draw, liar = self.draw, self.draw.choice(self.names[self.voters - self.liars :])
        to = draw.choice(self.honest)
        view = max(0, self.machines[to].view + draw.randint(-1, 1))
        name = draw.choice(self.known or [digest(b"?")])
        sign = self.notaries[liar].sign
        high = self.machines[draw.choice(self.honest)].said.high
        claim = high if draw.random() < 0.5 else None
        timeout = Timeout(0, view, claim.view if claim else -1, claim.digest if claim else Digest(bytes(32)))
        body = f"a lie of {liar} in {view}/{draw.randrange(3)}".encode()
        self.known.append(digest(body))
        heard = [s for p in self.names for _, s in [self._timeout(to, view, p)] if s is not None]
        said = [
            Voted(0, 0, "", sign(Vote(0, view, draw.choice(["prepare", "commit"]), name))),
            TimedOut(0, 0, "", sign(timeout), high),
            Propose(0, 0, "", sign(Proposed(0, view, digest(body))), body, tuple(heard), high),
        ]
        self._deliver(Send(to, draw.choice(said)))

    def _timeout(self, at: PeerId, view: int, by: PeerId):
        tally = self.machines[at].tallies.get(view - 1)
        return tally.timeouts.get(by, (None, None)) if tally is not None else (None, None)

    # ---- the world -----------------------------------------------------------------------------------------

    def _start(self, name: PeerId) -> None:
        keys = {p: VirtualSigner(p).vote_key for p in self.names}
        kept = self.kept.get(name)
        machine = Agreement(self.notaries[name], 0, "", keys, self.quorum, tuple(self.names), kept)
        was_over = name in self.machines and self.machines[name].over
        if was_over:
            return  # it closed the round durably
        self.machines[name] = machine
        self._carry_out(name, machine.begin())

    def _deliver_all(self) -> None:
        while self.flying:
            self._deliver(self.flying.pop(0))

    def _deliver(self, send: Send) -> None:
        if send.to not in self.machines:
            return
        try:
            effects = self.machines[send.to].receive(PeerId("somebody"), send.message)
        except PeerFault as fault:
            assert fault.who not in self.honest, f"{send.to} blames {fault}"
            return
        self._carry_out(send.to, effects)

    def _carry_out(self, name: PeerId, effects: list[Effect]) -> None:
        machine = self.machines[name]
        more: list[Effect] = []
        for effect in effects:
            match effect:
                case Keep(blob=bytes() as blob):
                    self.kept[name] = blob
                case Send():
                    self.flying.append(effect)
                case Report(Judge(digest=what)):
                    self.known.append(what)
                    more += machine.approve(what)
                case Report(Free(view=view)):
                    body = f"{name} in {view}/{self.draw.random()}".encode()
                    self.known.append(digest(body))
                    more += machine.propose(view, body)
                case Report(Bound(view=view)):
                    more += machine.repropose(view)
                case Report(Decided(digest=what)):
                    self.decided.setdefault(what, set()).add(name)
                case Report(Equivocation(peer=peer)):
                    assert peer not in self.honest, f"honest {peer} was caught saying two things"
                case _:
                    pass
        assert len(self.decided) <= 1, f"two bodies are decided: {self.decided}"
        if more:
            self._carry_out(name, more)
