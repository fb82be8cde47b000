"""Liars: up to f voters who share everything they hear and do their worst with their own keys.

silent     says nothing from some moment on
delaying   its honest machine's words leave much too late
twins      two machines with one key, each talking to a different half
lying      proposes two bodies with the least binding grounds it can find, votes for everything, claims what it
           likes, shows certificates of too few, of the wrong stage, or with somebody's vote twice
forging    puts honest names under its own words
replaying  repeats what anybody ever said, here and as if it were of another round

Where heights follow each other (`chain.py`) liars who have no vote yet, or none any more, speak as well; all claim,
repeat and propose what was right at the height before, and make vertices out of their own votes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from chain import VertexIs
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.machine import Effect, Emit, Persist, Send, expand_broadcasts
from atoll.crypto.digest import digest
from atoll.protocol.agreement.events import LocalProposerTurnBegan, ProposalReceived
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.protocol.agreement.voter import Electorate
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, VoteMessage
from atoll.wire.messages.statements import Proposal, QuorumCertificate, SignedStatement, Stage, ViewTimeout, Vote
from atoll.wire.messages.vertex import Vertex

if TYPE_CHECKING:
    from world import Height, World

HABITS = ("silent", "delaying", "twins", "lying", "lying", "forging", "replaying")  # lying is the worst
HEARD_MAX = 400
PERIOD_S = 0.5  # between two lies of one villain


class Gang:
    """All liars, at one height."""

    def __init__(self, world: World, height: Height, past: Gang | None = None) -> None:
        self.world, self.height, self.past, self.draw = world, height, past, world.draw
        self.round = height.round
        self.heard: list[Any] = []
        self.timeouts: dict[int, dict[PeerId, tuple[tuple[ViewTimeout, SignedStatement], ...]]] = {}
        self.votes: dict[tuple[int, Stage, Digest], dict[PeerId, bytes]] = {}
        self.known: list[Digest] = []
        self.bodies: dict[Digest, bytes] = {}
        self.view = 0
        self.pairs: dict[tuple[PeerId, int], list[bytes]] = {}
        self.notaries = {p: world.notary(p) for p in sorted(world.villains)}
        self.habits = {p: self._habits() for p in sorted(world.villains)}
        self.machines: dict[tuple[PeerId, int], TwoPhaseAgreement] = {}
        self.side = {p: self.draw.randrange(2) for p in world.names}
        for name, habits in self.habits.items():
            if habits & {"twins", "delaying"} and name in height.keys:
                for twin in range(1 + ("twins" in habits)):
                    self._start(name, twin)
            if habits & {"lying", "forging", "replaying"}:
                world._every(PERIOD_S, lambda n=name: self._lie(n))

    def _habits(self) -> set[str]:
        return {self.draw.choice(HABITS) for _ in range(self.draw.choice([1, 2, 3]))}

    # ---- machines that are run dishonestly ------------------------------------------------------------------

    def _start(self, name: PeerId, twin: int) -> None:
        w, h = self.world, self.height
        machine = TwoPhaseAgreement(
            self.notaries[name], Electorate(self.round, "", dict(h.keys), h.quorum, h.names)
        )
        self.machines[name, twin] = machine
        self.world.after(0.0, lambda: self._apply(name, twin, machine.start()))
        w._every(w.draw.uniform(2.0, 9.0), lambda: self._apply(name, twin, machine.close_view(machine.view)))

    def _apply(self, name: PeerId, twin: int, effects: list[Effect]) -> None:
        machine = self.machines[name, twin]
        for effect in expand_broadcasts(effects):
            match effect:
                case Send(to, message):
                    if "twins" not in self.habits[name] or to in self.world.villains or self.side[to] == twin:
                        late_s = self.draw.uniform(0, 12.0) if "delaying" in self.habits[name] else 0.0
                        self.world.after(late_s, lambda t=to, m=message: self._say(name, t, m))
                case Emit(ProposalReceived(digest=what)):
                    self._apply(name, twin, machine.approve(what))
                case Emit(LocalProposerTurnBegan(view=view)):
                    self._apply(name, twin, machine.propose(view, self._body(name, view, twin)))
                case Persist() | Emit():
                    pass
                case _:
                    raise AssertionError(effect)

    def _body(self, name: PeerId, view: int, which: int) -> bytes:
        right = self.draw.random() < 0.7
        mark = f"by {name} in {view}/{which}/{self.draw.randrange(3)}"
        body = self.world.body(self.height, right, name, self.world.now, mark)
        if right:
            self.height.watch.bodies.add(body)
        self.known.append(digest(body))
        self.bodies[digest(body)] = body
        return body

    def _say(self, name: PeerId, to: PeerId, message: Any) -> None:
        if "silent" in self.habits[name] and self.world.now > 5.0:
            return
        self.world.send(name, to, message)

    # ---- what they overhear ------------------------------------------------------------------------------------

    def hear(self, name: PeerId, message: Any) -> None:
        if not isinstance(message, (ProposalMessage, VoteMessage, TimeoutMessage)):
            return
        self._learn(message)
        for (owner, twin), machine in self.machines.items():
            if owner == name and ("twins" not in self.habits[name] or self.draw.random() < 0.7):
                try:
                    effects = machine.receive(message.statement.signer, message)
                except PeerFault:
                    continue
                self._apply(owner, twin, effects)

    def _learn(self, message: Any) -> None:
        if len(self.heard) < HEARD_MAX:
            self.heard.append(message)
        else:
            self.heard[self.draw.randrange(HEARD_MAX)] = message
        signed = message.statement
        statement = decode_statement(signed.body, signed.signer)
        match statement:
            case ViewTimeout(view=view):
                self.timeouts.setdefault(view, {}).setdefault(signed.signer, ((statement, signed),))
                if message.high is not None:
                    self._collect(message.high)
                self.view = max(self.view, view + 1)
            case Vote(view=view):
                self.votes.setdefault((view, statement.stage, statement.digest), {})[signed.signer] = (
                    signed.signature
                )
                self.view = max(self.view, view)
                self.known.append(statement.digest)
            case Proposal(view=view):
                self.bodies[statement.digest] = message.body
                self.known.append(statement.digest)
                self.view = max(self.view, view)
            case _:
                pass

    def _collect(self, certificate: QuorumCertificate) -> None:
        found = self.votes.setdefault((certificate.view, certificate.stage, certificate.digest), {})
        found.update(certificate.votes)

    # ---- lies ----------------------------------------------------------------------------------------------

    def _lie(self, name: PeerId) -> None:
        if self.world.is_over(self.height) or (self.world.now > 5.0 and "silent" in self.habits[name]):
            return
        habits = self.habits[name]
        if "replaying" in habits and self.heard:
            for _ in range(3):
                self._to_some(name, self._aged(self.draw.choice(self.heard)))
        if self.past is not None and self.past.heard and "replaying" in habits:
            for _ in range(3):
                self._to_some(name, replace(self.draw.choice(self.past.heard), round=self.round))
        if "forging" in habits:
            self._forge(name)
        if self.world.forgers:
            self._speak_for_another(name)
            self._claim_another(name)
        if "lying" in habits:
            self._vote_for_everything(name)
            self._claim(name)
            self._propose_twice(name)
            self._make_vertex(name)

    def _aged(self, message: Any) -> Any:
        """As it was; or its envelope of another round; the statement inside stays what was signed."""
        return replace(message, round=message.round - 1) if self.draw.random() < 0.2 else message

    def _to_some(self, name: PeerId, message: Any) -> None:
        for to in self.world.honest:
            if self.draw.random() < 0.6:
                self._say(name, to, message)

    def _forge(self, name: PeerId) -> None:
        """An honest name under a word of mine; another round's vote of my own."""
        honest = self.draw.choice(self.world.honest)
        what = self.draw.choice(self.known or [digest(b"?")])
        view = max(0, self.view + self.draw.randint(-1, 1))
        vote = Vote(self.round, view, self.draw.choice(["prepare", "commit"]), what)
        mine = self.notaries[name].sign(vote)
        self._to_some(name, VoteMessage(self.round, 0, "", replace(mine, signer=honest)))
        other = self.notaries[name].sign(replace(vote, round=self.round - 1))
        self._to_some(name, VoteMessage(self.round, 0, "", other))
        timeout = ViewTimeout(self.round, view, view + 3, what)
        self._to_some(
            name, TimeoutMessage(self.round, 0, "", replace(self.notaries[name].sign(timeout), signer=honest), None)
        )

    def _speak_for_another(self, name: PeerId) -> None:
        """What an honest voter may well say, as a proposer or when it has had enough; the signature is mine."""
        view, names = self.view, self.height.names
        nothing = ViewTimeout(self.round, view, -1, ZERO_DIGEST)
        self._to_some(
            name, TimeoutMessage(self.round, 0, "", self._as(self.draw.choice(self.world.honest), nothing), None)
        )
        proposer, grounds = names[(view + view // len(names)) % len(names)], self._least_binding(view)
        if proposer in self.world.honest and grounds is not None:
            body = self._body(name, view, 3)
            signed = self._as(proposer, Proposal(self.round, view, digest(body)))
            self._to_some(name, ProposalMessage(self.round, 0, "", signed, body, *grounds))

    def _as(self, honest: PeerId, statement: Proposal | ViewTimeout) -> SignedStatement:
        mine = self.notaries[self.draw.choice(sorted(self.notaries))]
        return replace(mine.sign(statement), signer=honest)

    def _claim_another(self, name: PeerId) -> None:
        """A certificate that holds, under the claim of another body, or of a later view."""
        shown = self.real()
        if shown is None:
            return
        claims = [(shown.view + 1, shown.digest), *((shown.view, what) for what in self.known[-3:])]
        signed = self.notaries[name].sign(ViewTimeout(self.round, self.view, *self.draw.choice(claims)))
        self._to_some(name, TimeoutMessage(self.round, 0, "", signed, shown))

    def _vote_for_everything(self, name: PeerId) -> None:
        for what in self.draw.sample(self.known[-8:], min(3, len(self.known[-8:]))):
            for view in {self.view, max(0, self.view - 1)}:
                for stage in ("prepare", "commit"):
                    vote = self.notaries[name].sign(Vote(self.round, view, stage, what))
                    self.votes.setdefault((view, stage, what), {})[name] = vote.signature
                    said = VoteMessage(self.round, 0, "", vote)
                    if self.world.hub:  # certificates travel with votes there, so lies about them do, too
                        said = replace(said, proof=self._certificate() or UNSET)
                    self._to_some(name, said)

    def _claim(self, name: PeerId) -> None:
        """A timeout that claims the lowest, or what nobody certified."""
        view = max(0, self.view + self.draw.randint(-1, 1))
        high, claim = self._certificate(), None
        if high is not None:
            claim = (high.view, high.digest)
        nothing = (-1, ZERO_DIGEST)
        claimed = self.draw.choice([nothing, claim or nothing])
        signed = self.notaries[name].sign(ViewTimeout(self.round, view, *claimed))
        self._to_some(name, TimeoutMessage(self.round, 0, "", signed, high))

    def _certificate(self) -> QuorumCertificate | None:
        """Of what was voted for somewhere: real if enough did; else short, padded with a vote twice, or forged."""
        if self.past is not None and self.draw.random() < 0.3:
            return self.past.real()
        if not self.votes:
            return None
        view, stage, what = self.draw.choice(sorted(self.votes))
        votes = sorted(self.votes[view, stage, what].items())
        quorum = self.height.quorum
        if len(votes) < quorum:
            how = self.draw.randrange(3)
            if how == 0:
                votes = (votes * quorum)[:quorum]
            elif how == 1:
                missing = [p for p in self.height.names if p not in dict(votes)]
                votes = sorted(votes + [(p, bytes(16)) for p in missing[: quorum - len(votes)]])
        return QuorumCertificate(self.round, view, self.draw.choice([stage, "prepare"]), what, tuple(votes))

    def real(self) -> QuorumCertificate | None:
        """What a quorum here prepared, as it was."""
        made = [
            QuorumCertificate(self.round, view, stage, what, tuple(sorted(votes.items())))
            for (view, stage, what), votes in sorted(self.votes.items())
            if stage == "prepare" and len(votes) >= self.height.quorum
        ]
        return self.draw.choice(made) if made else None

    def _make_vertex(self, name: PeerId) -> None:
        """The next one, as I should like it, under the votes of all liars of all times."""
        if self.past is None or self.draw.random() < 0.5:
            return
        body = self._body(name, self.view, 2)
        vote = Vote(self.round, self.view, "commit", digest(body))
        votes = tuple((p, notary.sign(vote).signature) for p, notary in self.notaries.items())
        vertex = Vertex(body, QuorumCertificate(self.round, self.view, "commit", digest(body), votes))
        self._to_some(name, VertexIs(vertex))

    def _propose_twice(self, name: PeerId) -> None:
        w, names = self.world, self.height.names
        for view in range(max(0, self.view - 1), self.view + 2):
            mine = names[(view + view // len(names)) % len(names)] == name or self.draw.random() < 0.1
            if not mine:
                continue
            grounds = self._least_binding(view)
            if grounds is None:
                continue
            timeouts, high = grounds
            if (name, view) not in self.pairs:
                bodies = [self._body(name, view, which) for which in range(2)]
                if self.draw.random() < 0.2 and self.bodies:
                    bodies[0] = self.draw.choice([self.bodies[d] for d in sorted(self.bodies)])
                if self.past is not None and self.past.bodies and self.draw.random() < 0.2:
                    bodies[1] = self.draw.choice([self.past.bodies[d] for d in sorted(self.past.bodies)])
                self.pairs[name, view] = bodies
            bodies = self.pairs[name, view]
            for to in w.honest:
                body = bodies[self.side[to]]
                if self.draw.random() < 0.1:
                    body = bodies[1 - self.side[to]]
                named = digest(body) if self.draw.random() < 0.8 else digest(bodies[0])
                signed = self.notaries[name].sign(Proposal(self.round, view, named))
                self._say(name, to, ProposalMessage(self.round, 0, "", signed, body, timeouts, high))

    def _least_binding(self, view: int) -> tuple[tuple[SignedStatement, ...], QuorumCertificate | None] | None:
        """A quorum of timeouts that claim as little as can be; sometimes too few, doubled, or of another view."""
        if view == 0:
            return (), None
        heard = dict(self.timeouts.get(view - 1, {}))
        for liar in self.notaries:
            nothing = ViewTimeout(self.round, view - 1, -1, ZERO_DIGEST)
            heard[liar] = ((nothing, self.notaries[liar].sign(nothing)),)
        if self.past is not None and self.draw.random() < 0.2:  # what was said of the height before
            for p, said in self.past.timeouts.get(view - 1, {}).items():
                heard[p] = min(said + heard.get(p, said), key=lambda s: s[0].high_view), *said
        if self.world.forgers and self.draw.random() < 0.3:
            nothing = ViewTimeout(self.round, view - 1, -1, ZERO_DIGEST)
            heard |= {p: ((nothing, self._as(p, nothing)),) for p in self.world.honest if p in self.height.keys}
        how, quorum = self.draw.random(), self.height.quorum
        if how < 0.15:  # words of older views claim less
            for older in range(view - 1):
                for p, said in self.timeouts.get(older, {}).items():
                    heard[p] = min(said + heard.get(p, said), key=lambda s: s[0].high_view), *said
        wanted = quorum - 1 if 0.15 <= how < 0.4 else quorum
        chosen = sorted((s[0][0].high_view, p) for p, s in heard.items())[:wanted]
        timeouts = tuple(heard[p][0][1] for _, p in chosen)
        if len(timeouts) < wanted and how < 0.8:
            return None
        if 0.3 <= how < 0.4:
            timeouts = (timeouts * quorum)[:quorum]
        top, high = max((view for view, _ in chosen), default=-1), None
        for (at, stage, what), votes in sorted(self.votes.items()):
            if at == top and stage == "prepare" and len(votes) >= self.height.quorum:
                high = QuorumCertificate(self.round, at, stage, what, tuple(sorted(votes.items())))
        return timeouts, high or self._certificate()
