"""What one decision costs by each engine, over the same virtual links: time, messages, bytes.

Every pair of members has a one-way latency drawn once from 50 to 100 ms; nothing is lost, computing takes no time,
bandwidth is not limited. Agreement and Raft decide on the same body of 4096 bytes: `agreement` (two phases) and
`raft` (one phase, in its place) with real signatures (`vote`: Ed25519, or ML-DSA-65) and the `quorum` named.
`first_s` is when the first member knows the decision, `virtual_s` when the last one does, both since it was
proposed; medians of several networks. `decisions_per_s` are those of one network, one after the other.
`cpu_ms_per_decision` is what one member computes, the mean: every word signed, checked and encoded; not the links.

    python bench/consensus.py [--quick] [--json]
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

from form import asking, report, versions

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import (
    Effect,
    Emit,
    Event,
    Fact,
    Message,
    Received,
    Send,
    SetTimer,
    TimerFired,
    expand_broadcasts,
)
from atoll.crypto.signer import VoteKind
from atoll.policy.plan import QuorumRule, quorum
from atoll.protocol.agreement import events
from atoll.protocol.agreement.interface import make_engine
from atoll.protocol.agreement.voter import Electorate
from atoll.simulation.signatures import RealKeys
from atoll.wire.codec import encode
from atoll.wire.envelope import StatementSigner

LATENCY_S = (0.05, 0.1)
BODY = bytes(range(256)) * 16
RUN = Digest(bytes(32))
MEMBERS = (4, 7, 16, 32, 100)
QUICK_MEMBERS = (4, 16)
NETWORKS, QUICK_NETWORKS = 5, 2


@dataclass
class Network:
    """Members, links and a clock; `hear` gives an event to one member, `told` is when it reported a decision."""

    names: Sequence[PeerId]
    draw: random.Random
    hear: Callable[[PeerId, Event, float], list[Effect]]
    fact: Callable[[PeerId, Fact], list[Effect] | None]  # None: this is a decision
    now: float = 0.0
    messages: int = 0
    bytes: int = 0
    told: dict[PeerId, float] = field(default_factory=dict)
    latency: dict[tuple[PeerId, PeerId], float] = field(default_factory=dict)
    queue: list[tuple[float, int, PeerId, Event]] = field(default_factory=list)
    timers: dict[tuple[PeerId, str], int] = field(default_factory=dict)
    count: int = 0
    began_cpu_s: float = field(default_factory=time.process_time)

    def carry_out(self, name: PeerId, effects: list[Effect]) -> None:
        for effect in expand_broadcasts(effects):
            match effect:
                case Send(to, message):
                    self._send(name, to, message)
                case SetTimer(timer, at):
                    self.count += 1
                    self.timers[name, timer] = self.count
                    if at is not None:
                        heapq.heappush(self.queue, (at, self.count, name, TimerFired(timer)))
                case Emit(fact):
                    more = self.fact(name, fact)
                    if more is None:
                        self.told.setdefault(name, self.now)
                    else:
                        self.carry_out(name, more)
                case _:
                    pass

    def until_all_know(self) -> None:
        while len(self.told) < len(self.names):
            self.now, number, name, event = heapq.heappop(self.queue)
            if not isinstance(event, TimerFired) or self.timers[name, event.name] == number:
                self.carry_out(name, self.hear(name, event, self.now))

    def _send(self, sender: PeerId, to: PeerId, message: Message) -> None:
        self.messages += 1
        self.bytes += len(encode(message))
        pair = (sender, to) if sender < to else (to, sender)
        if pair not in self.latency:
            self.latency[pair] = self.draw.uniform(*LATENCY_S)
        self.count += 1
        heapq.heappush(self.queue, (self.now + self.latency[pair], self.count, to, Received(sender, message)))


@dataclass(frozen=True)
class Cost:
    """Of one decision."""

    first_s: float
    virtual_s: float
    messages: int
    bytes: int
    cpu_s: float  # of all members

    @staticmethod
    def of(network: Network) -> Cost:
        told, cpu_s = network.told.values(), time.process_time() - network.began_cpu_s
        return Cost(min(told), max(told), network.messages, network.bytes, cpu_s)


@cache
def keys(votes: VoteKind) -> RealKeys:
    return RealKeys(7, votes)


def by_door(members: int, seed: int, rule: QuorumRule, raft: bool, votes: VoteKind = "ed25519") -> Cost:
    """One round: propose, then one phase of votes (Raft) or two; everybody judges at once."""
    known = keys(votes)
    names = tuple(known.name(i) for i in range(members))
    vote_keys = {name: known.vote_key(i) for i, name in enumerate(names)}
    need = quorum(members, rule)
    electorate = Electorate(0, "", vote_keys, need, names)
    machines = {
        name: make_engine(raft, StatementSigner(RUN, known.signer(i, RUN), known.verifier), electorate)
        for i, name in enumerate(names)
    }

    def hear(name: PeerId, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, Received)
        return machines[name].receive(event.sender, event.message)

    def fact(name: PeerId, fact: Fact) -> list[Effect] | None:
        match fact:
            case events.LocalProposerTurnBegan(view=view):
                return machines[name].propose(view, BODY)
            case events.ProposalReceived(digest=what):
                return machines[name].approve(what)
            case events.BodyDecided():
                return None
            case _:
                return []

    network = Network(names, random.Random(seed), hear, fact)
    for name in names:
        network.carry_out(name, machines[name].start())
    network.until_all_know()
    assert len({m.decided.digest for m in machines.values() if m.decided is not None}) == 1
    return Cost.of(network)


ENGINES: dict[tuple[str, str, str], Callable[[int, int], Cost]] = {
    ("agreement", "ed25519", "two-thirds"): lambda n, seed: by_door(n, seed, "two-thirds", raft=False),
    ("agreement", "ml-dsa-65", "two-thirds"): lambda n, seed: by_door(n, seed, "two-thirds", False, "ml-dsa-65"),
    ("agreement", "ed25519", "majority"): lambda n, seed: by_door(n, seed, "majority", raft=False),
    ("raft", "ed25519", "majority"): lambda n, seed: by_door(n, seed, "majority", raft=True),
    ("raft", "ml-dsa-65", "majority"): lambda n, seed: by_door(n, seed, "majority", True, "ml-dsa-65"),
}


def row(engine: str, vote: str, rule: str, members: int, networks: int) -> dict[str, object]:
    began = time.perf_counter()
    costs = [ENGINES[engine, vote, rule](members, seed) for seed in range(networks)]
    middle = {key: statistics.median(asdict(c)[key] for c in costs) for key in asdict(costs[0])}
    return {
        "engine": engine,
        "vote": vote,
        "quorum": rule,
        "n": members,
        "decisions_per_s": round(1 / middle["virtual_s"], 2),
        "bytes_per_decision": round(middle["bytes"]),
        "cpu_ms_per_decision": round(1e3 * middle["cpu_s"] / members, 2),
        "latency_ms_median": round(1e3 * middle["virtual_s"]),
        "first_s": round(middle["first_s"], 3),
        "virtual_s": round(middle["virtual_s"], 3),
        "messages": round(middle["messages"]),
        "networks": networks,
        "wall_s": round(time.perf_counter() - began, 2),
    }


def main() -> None:
    asked = asking(__doc__, "fewer sizes and networks; seconds").parse_args()
    sizes, networks = (QUICK_MEMBERS, QUICK_NETWORKS) if asked.quick else (MEMBERS, NETWORKS)
    wanted = [(kind, members, networks) for kind in ENGINES for members in sizes]
    rows: list[dict[str, object]] = []
    for kind, members, repeats in wanted:
        rows.append(row(*kind, members, repeats))
        if not asked.json:
            r = rows[-1]
            print(
                f"{r['engine']:<10} {r['vote']:<10} {r['quorum']:<10} {members:>5} members  "
                f"first {r['first_s']:>7} s  "
                f"all {r['virtual_s']:>7} s  {r['messages']:>9,} messages  {r['bytes_per_decision']:>12,} bytes  "
                f"{r['cpu_ms_per_decision']:>7} ms of CPU per member  ({r['wall_s']} s to compute)",
                flush=True,
            )
    if asked.json:
        settings = {"latency_s": LATENCY_S, "body_bytes": len(BODY), "members": sizes, "networks": networks}
        print(report("consensus", settings, {"rows": rows}, versions()))


if __name__ == "__main__":
    main()
