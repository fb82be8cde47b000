"""A virtual swarm: genesis, peers with their clocks, disks and islands, checkers that always watch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from atoll.base.ids import ZERO_DIGEST, PeerId, Seconds
from atoll.keys.digest import blob_id, manifest_of
from atoll.node.peer import Peer, Wish
from atoll.node.settings import RunSettings, encode_settings
from atoll.policy.plan import RoundSettings
from atoll.protocol.dag.history import genesis_digest
from atoll.sim.checkers import Checkers
from atoll.sim.island import GENESIS_STATE, Island, IslandKnobs
from atoll.sim.network import NetworkKnobs
from atoll.sim.signatures import VirtualSigner, VirtualVerifier
from atoll.sim.world import Clock, World
from atoll.wire.codec import encode
from atoll.wire.messages.vertex import Body, Member, Metrics, Vertex


def peer_name(index: int) -> PeerId:
    return PeerId(f"p{index:04d}")


@dataclass
class SwarmKnobs:
    peers: int = 4
    network: NetworkKnobs = field(default_factory=NetworkKnobs)
    island: IslandKnobs = field(default_factory=IslandKnobs)
    clock_offset_s: Seconds = 0.0
    clock_drift: float = 0.0
    run: RunSettings = field(
        default_factory=lambda: RunSettings(open_to_all=True, round=RoundSettings(inner_steps=20, first_train_s=10))
    )


class Swarm:
    """`peers` founding members that all stand in genesis; others may join later with `join`."""

    def __init__(
        self, seed: int, knobs: SwarmKnobs | None = None, villains: frozenset[PeerId] = frozenset()
    ) -> None:
        self.knobs = knobs or SwarmKnobs()
        self.world = World(seed, self.knobs.network)
        self.checkers = Checkers(villains)
        self.world.watchers.append(self.checkers.watch)
        self.draw = random.Random(f"swarm/{seed}")
        self.verifier = VirtualVerifier()
        self.founders = tuple(peer_name(i) for i in range(self.knobs.peers))
        self.genesis = self._genesis()
        self.run_id = genesis_digest(self.genesis)
        for name in self.founders:
            self._place(name, self.genesis, ())

    def join(self, index: int, via: PeerId) -> PeerId:
        name = peer_name(index)
        node = self._place(name, None, (via,))
        node.contacts.add(via)
        self.world.at(self.world.now + 0.01, lambda: self.world._dial(name, via, node.life))
        return name

    def head(self, name: PeerId) -> int:
        machine = self.world.nodes[name].machine
        return machine.at if machine is not None else -2

    def heads(self) -> list[int]:
        return [n.machine.at for n in self.world.nodes.values() if n.machine is not None]

    def _place(self, name: PeerId, genesis: Vertex | None, bootstrap: tuple[PeerId, ...]):
        island = Island(name, self.knobs.island, random.Random(f"island/{self.world.seed}/{name}"))
        k = self.knobs
        clock = Clock(
            self.draw.uniform(-k.clock_offset_s, k.clock_offset_s), self.draw.uniform(-k.clock_drift, k.clock_drift)
        )

        def make() -> Peer:
            return Peer(self.run_id, VirtualSigner(name), self.verifier, Wish(name=name), genesis, bootstrap)

        return self.world.add(name, make, island, clock)

    def _genesis(self) -> Vertex:
        members = tuple(
            Member(p, VirtualSigner(p).vote_key, (), "trainer", "member", -1, 0.0, p) for p in self.founders
        )
        body = Body(
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
            metrics=Metrics(0.0, 0, 0),
            settings=encode_settings(self.knobs.run),
        )
        return Vertex(encode(body), None)
