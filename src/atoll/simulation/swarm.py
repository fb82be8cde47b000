"""Simulated swarm: genesis, peers with clocks, disks and workers, and checkers that always run."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.base.draw import draw_bytes
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId, Seconds
from atoll.capabilities import CAPABILITIES
from atoll.crypto.digest import blob_id, digest, manifest_of
from atoll.crypto.signer import Signer
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.peer import Peer
from atoll.peer.settings import RunSettings, encode_settings
from atoll.policy.plan import RoundSettings
from atoll.protocol.history.chain import genesis_digest
from atoll.simulation.fault_schedule import FaultSelection
from atoll.simulation.invariants import InvariantCheckers
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.signatures import VirtualKeys, WorldKeys, peer_name
from atoll.simulation.worker import GENESIS_STATE, VirtualWorker, WorkerKnobs
from atoll.simulation.world import DriftingClock, VirtualComputer, VirtualWorld
from atoll.wire.codec import encode
from atoll.wire.envelope import VerifiedCache
from atoll.wire.messages.statements import TicketInvite
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, Vertex, VertexBody
from atoll.wire.ticket import Ticket, TicketBody, ticket_id

OPENED = 16384  # messages that all peers know to be valid: some rounds of a hundred peers

__all__ = ["SwarmKnobs", "VirtualSwarm", "peer_name"]

IslandMaker = Callable[[PeerId, WorkerKnobs, random.Random], VirtualWorker]
PeerMaker = Callable[[Digest, Signer, WorldKeys, DesiredRole, Vertex | None, tuple[PeerId, ...]], Peer]


def honest(
    run: Digest,
    signer: Signer,
    keys: WorldKeys,
    wish: DesiredRole,
    genesis: Vertex | None,
    bootstrap: tuple[PeerId, ...],
) -> Peer:
    return Peer(
        run, signer, keys.verifier, wish, genesis, bootstrap, keys.vouch(signer.peer), capabilities=CAPABILITIES
    )


@dataclass
class SwarmKnobs:
    peers: int = 4
    network: NetworkKnobs = field(default_factory=NetworkKnobs)
    island: WorkerKnobs = field(default_factory=WorkerKnobs)
    clock_offset_s: Seconds = 0.0
    clock_drift: float = 0.0
    names: tuple[str, ...] = ()  # names of the founders, for people; empty: their numbers
    run: RunSettings = field(
        default_factory=lambda: RunSettings(open_to_all=True, round=RoundSettings(inner_steps=20, first_train_s=10))
    )


class VirtualSwarm:
    """`peers` founding members that are all in genesis; others may join later with `join`.

    `villains` maps the index of a founder to a maker of its peer; all others are honest. `island` makes the worker
    behind each peer.
    """

    def __init__(
        self,
        seed: int,
        knobs: SwarmKnobs | None = None,
        villains: Mapping[int, PeerMaker] | None = None,
        keys: WorldKeys | None = None,
        island: IslandMaker = VirtualWorker,
        faults: FaultSelection | None = None,
    ) -> None:
        self.knobs, self.island = knobs or SwarmKnobs(), island
        self.keys = keys or VirtualKeys(self.knobs.run.round.signing.kind)
        self.makers = villains or {}
        self.world = VirtualWorld(seed, self.knobs.network, faults)
        self.checkers = InvariantCheckers(frozenset(self.keys.name(i) for i in self.makers))
        self.world.watchers.append(self.checkers.watch)
        self.draw = random.Random(f"swarm/{seed}")
        self.sessions = Counter[int]()  # index → number of sessions begun
        self.founders = tuple(self.keys.name(i) for i in range(self.knobs.peers))
        self.opened = VerifiedCache(OPENED)
        self.genesis = self._genesis()
        self.run_id = genesis_digest(self.genesis)
        for index in range(self.knobs.peers):
            self._place(index, self.genesis, (), b"")

    def join(self, index: int, via: PeerId, ticket: Ticket | None = None, role: str = "trainer") -> PeerId:
        """Add a stranger that knows one address: it links, downloads, observes, and becomes a member by vertex."""
        name = self.keys.name(index)
        if not self.world.faults.admits("join", self.world.now, name):
            return name
        node = self._place(index, None, (via,), ticket.redeem(name) if ticket else b"", role)
        node.contacts.add(via)
        self.world.at(self.world.now + 0.01, lambda: self.world.dial(name, via))
        return name

    def lose_disk(self, index: int, via: PeerId) -> None:
        """Replace a dead computer by one that knows its identity and one address, and begins a new session."""
        name = self.keys.name(index)
        if not self.world.faults.admits("lose_disk", self.world.now, name):
            return
        self.world.kill(name)
        self.sessions[index] += 1
        node = self.world.nodes[name]
        node.island = self._island(name)
        node.kept = node.island.kept
        node.make = self._maker(index, None, (via,), session=self.sessions[index])
        self.world.start(name)
        self.world.dial(name, via)

    def invite(self, by: PeerId, uses: int = 1, lasts_s: Seconds = 1e6) -> Ticket:
        """Ticket proposed to the members by `by`; valid once a vertex contains it."""
        seed = self.world.seed.to_bytes(8, "big", signed=True)
        secret = Ed25519PrivateKey.from_private_bytes(draw_bytes(seed, f"ticket/{self.world.now}", 32))
        key = secret.public_key().public_bytes_raw()
        expires_s = self.world.now + lasts_s
        node = self.world.nodes[by]
        assert node.machine is not None
        statement = TicketInvite(ticket_id(key), key, "trainer", uses, expires_s)
        self.world.carry_out(node, node.machine.say(statement, node.clock.local(self.world.now)))
        body = TicketBody(self.run_id, bytes(32), "trainer", uses, int(expires_s), secret.private_bytes_raw(), ())
        return Ticket(body, b"")

    @property
    def honest(self) -> list[VirtualComputer]:
        """Honest peers that are running."""
        nodes = self.world.nodes.values()
        return [n for n in nodes if n.machine is not None and n.name not in self.checkers.villains]

    def head(self, name: PeerId) -> int:
        machine = self.world.nodes[name].machine
        return machine.at if machine is not None else -2

    def heads(self) -> list[int]:
        return [n.machine.at for n in self.honest if n.machine is not None]

    def _place(
        self,
        index: int,
        genesis: Vertex | None,
        bootstrap: tuple[PeerId, ...],
        admission: bytes,
        role: str = "trainer",
    ) -> VirtualComputer:
        name, k = self.keys.name(index), self.knobs
        clock = DriftingClock(
            self.draw.uniform(-k.clock_offset_s, k.clock_offset_s), self.draw.uniform(-k.clock_drift, k.clock_drift)
        )
        make = self._maker(index, genesis, bootstrap, admission, role)
        return self.world.add(name, make, self._island(name), clock)

    def _maker(
        self,
        index: int,
        genesis: Vertex | None,
        bootstrap: tuple[PeerId, ...],
        admission: bytes = b"",
        role: str = "trainer",
        session: int = 0,
    ) -> Callable[[], Peer]:
        name, names = self.keys.name(index), self.knobs.names
        signer = self.keys.signer(index, self.run_id, session)
        maker = self.makers.get(index, honest)

        def make() -> Peer:
            wish = DesiredRole(role, names[index] if index < len(names) else name, (), admission)
            peer = maker(self.run_id, signer, self.keys, wish, genesis, bootstrap)
            peer.notary.opened = self.opened
            return peer

        return make

    def _island(self, name: PeerId) -> VirtualWorker:
        island = self.island(name, self.knobs.island, random.Random(f"island/{self.world.seed}/{name}"))
        island.now = lambda: self.world.now
        return island

    def _genesis(self) -> Vertex:
        members = tuple(
            Member(
                self.keys.name(i),
                self.keys.vote_key(i),
                (),
                "trainer",
                "member",
                -1,
                0.0,
                self.knobs.names[i] if self.knobs.names else f"{i}",
                identity=digest(self.keys.identity(i)),
            )
            for i in range(self.knobs.peers)
        )
        body = VertexBody(
            run=ZERO_DIGEST,
            round=-1,
            attempt=0,
            parent=ZERO_DIGEST,
            time_s=0.0,
            proposer=self.founders[0],
            parts=(),
            state=blob_id(manifest_of(GENESIS_STATE)),
            commits=(),
            members=members,
            tickets=(),
            reports=(),
            metrics=SwarmRoundMetrics(0.0, 0, 0),
            settings=encode_settings(self.knobs.run),
        )
        return Vertex(encode(body), None)
