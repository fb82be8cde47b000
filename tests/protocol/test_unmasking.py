"""The unmask phase of the all-reduce: masked rows, unmasked sums, the same bits as without masks.

Rows are integers. Member i adds s(i) - s(i - 1), so that the masks of all members cancel. If a member is missing,
an owner requests the secrets that are left over from the members that know them, and subtracts them from the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import pytest
from msgspec.structs import replace
from test_reduce import Group

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Event, Payload, Received, RunTask, Send, TaskDone
from atoll.crypto.digest import digest, merkle_root
from atoll.protocol.allreduce.attempt import AttemptState
from atoll.protocol.allreduce.buffers import LocalRow
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.events import PartsReduced
from atoll.protocol.allreduce.strategies import NoUnmaskingPhase, StrategyEngineActions
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.wire.messages.round import RoundMessage

MODULUS = 2**32


class SecretRequest(RoundMessage, frozen=True, tag="TestSecretRequest"):
    edge: int


class SecretReply(RoundMessage, frozen=True, tag="TestSecretReply"):
    edge: int
    secret: int


def number(value: int) -> Payload:
    return Payload(digest(repr(value % MODULUS).encode()), 8, value % MODULUS)


def secret_of(edge: int) -> int:
    """The constant that members `edge` and `edge` + 1 share."""
    return int.from_bytes(digest(f"edge {edge}".encode())[:4], "big")


@dataclass
class RingMasks:
    """Unmasking with the secrets of edges between counted and missing members."""

    state: AttemptState
    calls: StrategyEngineActions
    names: tuple[PeerId, ...]
    waiting: dict[int, tuple[RowsCombined, dict[int, int]]] = field(default_factory=dict)
    known: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        here, count = self.names.index(self.state.me), len(self.names)
        self.known |= {edge: secret_of(edge) for edge in (here, (here - 1) % count)}

    def handle_event(self, event: Event, now: Seconds) -> list[Effect] | None:
        match event:
            case Received(sender, SecretRequest(edge=edge)):
                return [Send(sender, SecretReply(0, 0, "", edge, self.known[edge]))]
            case Received(_, SecretReply(edge=edge, secret=secret)):
                self.known[edge] = secret
                return [effect for part in sorted(self.waiting) for effect in self.publish_if_known(part, now)]
            case _:
                return None

    def unmask(self, part: int, combined: RowsCombined, now: Seconds) -> list[Effect] | None:
        rows, count = self.state.gathers[part].rows, len(self.names)
        counted = {name for sender in combined.counted for name in rows[sender].names}
        left, holders = dict[int, int](), dict[int, PeerId]()
        for edge, (one, other) in enumerate((p, self.names[(i + 1) % count]) for i, p in enumerate(self.names)):
            if (one in counted) != (other in counted):
                left[edge] = 1 if one in counted else -1
                holders[edge] = one if one in counted else other
        if not left:
            return None
        self.waiting[part] = combined, left
        requests = [Send(holders[edge], SecretRequest(0, 0, "", edge)) for edge in left if edge not in self.known]
        return [*requests, *self.publish_if_known(part, now)]

    def publish_if_known(self, part: int, now: Seconds) -> list[Effect]:
        combined, left = self.waiting[part]
        if not self.known.keys() >= left.keys():
            return []
        del self.waiting[part]
        assert combined.payload is not None
        residue = sum(sign * self.known[edge] for edge, sign in left.items())
        unmasked = number(int(combined.payload.data) - residue)
        return self.calls.publish(part, replace(combined, payload=unmasked), now)


@dataclass
class Numbers(Group):
    """A group with integer rows, with masks or without."""

    masked: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for index, p in enumerate(self.names):
            mask = secret_of(index) - secret_of((index - 1) % self.count) if self.masked else 0
            parts = tuple(number(100 * index + part + mask) for part in range(self.plan.parts))
            self.commits[p] = replace(self.commits[p], root=merkle_root(tuple(x.digest for x in parts)))
            self.updates[p] = LocalRow(self.notaries[p].sign(self.commits[p]), parts)

    def machine(self, p: PeerId, judges: bool = False) -> AllReduce:
        unmasking = partial(RingMasks, names=self.names) if self.masked else NoUnmaskingPhase
        return AllReduce(self.notaries[p], self.plan, self.around(p), unmasking=unmasking)

    def do(self, p: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunTask(job, CombineRows() as work):
                    total = number(sum(int(row.payload.data) for row in work.rows))
                    done = TaskDone(job, RowsCombined(total, tuple(row.peer for row in work.rows), ()))
                    self.do(p, self.machines[p].handle(done, self.now))
                case _:
                    super().do(p, [effect])

    def bits(self) -> dict[PeerId, dict[int, int]]:
        living = [p for p in self.names if p not in self.dead]
        assert all(any(isinstance(fact, PartsReduced) for fact in self.facts[p]) for p in living)
        return {p: {part: held.payload.data for part, held in self.machines[p].results.items()} for p in living}


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("topology", ["butterfly", "tree", "hierarchical"])
def test_members_hold_the_same_bits_with_masks_as_without(topology: str, dead: int):
    """Seven members, some dead from the start: with a missing member the unmask phase needs messages."""
    plain, masked = Numbers(7, topology, masked=False), Numbers(7, topology)
    for group in (plain, masked):
        group.dead |= set(group.names[2 : 2 + dead])
        group.begin()
    requests = sum(isinstance(send.message, SecretRequest) for _, send in masked.flying)
    for group in (plain, masked):
        while group.flying:
            requests += isinstance(group.flying[0][1].message, SecretRequest)
            group.deliver(0)
        group.finish()
    expected = plain.bits()
    assert masked.bits() == expected and len({tuple(sorted(bits.items())) for bits in expected.values()}) == 1
    assert (requests > 0) == (dead > 0) and masked.now == plain.now
    assert {row for p in masked.names for row in masked.machines[p].results} == set(range(masked.plan.parts))


def test_the_next_owner_answers_if_the_unmask_phase_does_not_end():
    """Six members, one dead; the first owner of part 0 receives no secret: part 0 comes from its second owner."""
    plain, masked = Numbers(6, masked=False), Numbers(6)
    dead = masked.plan.owners(0)[2]
    first, second = (p for p in masked.plan.owners(0)[:3] if p != dead)
    for group in (plain, masked):
        group.dead.add(dead)
        group.begin()
    while masked.flying or masked.timers:
        while masked.flying:
            _, send = masked.flying[0]
            if send.to == first and isinstance(send.message, SecretReply):
                masked.flying.pop(0)
            else:
                masked.deliver(0)
        if masked.timers:
            masked.tick()
    plain.finish()
    held = {p: masked.machines[p].results[0] for p in masked.names if p not in masked.dead}
    assert {one.statement.signer for one in held.values()} == {second}
    assert {one.payload.data for one in held.values()} == {plain.machines[second].results[0].payload.data}
