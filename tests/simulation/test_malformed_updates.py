"""Rows that no member can read, on the real round: their authors are out by evidence, and no other member can be
made so.

Seven peers with real numbers behind them; two of them lie.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import PeerId, Seconds
from atoll.base.machine import Effect, Fact, Send
from atoll.crypto.digest import digest
from atoll.peer.events import JoinRejected, MalformedRowDetected, ProtocolFault, RoundClosed
from atoll.peer.membership.admission import EXPELLED
from atoll.peer.settings import RunSettings
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.plan import RoundSettings
from atoll.protocol.allreduce.buffers import GatheredRow
from atoll.simulation.adversaries.byzantine import MISCHIEF, ByzantineMember, Twist, villain
from atoll.simulation.sum_check import CUT
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.tensors import POISONS, Poison, TensorWorker
from atoll.simulation.worker import WorkerKnobs
from atoll.verification.malformed_updates import tensors
from atoll.verification.malformed_updates.messages import MalformedRowEvidence, malformed_row_bytes
from atoll.wire.messages.audits import MalformedRowShown
from atoll.wire.messages.membership import ReportMessage
from atoll.wire.messages.statements import Accusation

LIARS = (1, 4)
NAMES = {peer_name(place) for place in LIARS}
ONE = 17  # values, of the part of one owner


class Stage:
    """Rows are cut into leaves if `opened`; `twist`: what the liars say otherwise than an honest peer would."""

    def __init__(self, poison: Poison | None = None, opened: bool = False, twist: Twist | None = None) -> None:
        plan = RoundSettings(inner_steps=5, first_train_s=10, quorum="two-thirds")
        openings = SumCheckTerms(0.03, CUT.leaf_bytes) if opened else UNSET
        trust = {"statistic": "trimmed_mean", "tolerance": 0.33, "witnessed": True, "openings": openings}
        settings = RunSettings(open_to_all=True, round=plan, **trust)

        def island(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> TensorWorker:
            return TensorWorker(me, knobs, draw, poison if me in NAMES else None, cut=CUT if opened else None)

        villains = {place: villain(twist) for place in LIARS} if twist is not None else {}
        self.swarm = VirtualSwarm(3, SwarmKnobs(7, run=settings), villains=villains, island=island)
        self.swarm.checkers.villains = frozenset(NAMES)
        self.told: list[tuple[PeerId, Fact]] = []
        self.swarm.world.watchers.append(lambda now, node, fact: self.told.append((node.name, fact)))

    def run(self, rounds: int) -> Stage:
        self.swarm.world.run(600.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1
        return self

    def by_honest(self, kind: type[Fact]) -> list:
        return [fact for by, fact in self.told if isinstance(fact, kind) and by not in NAMES]

    @property
    def expelled(self) -> dict[PeerId, int]:
        since: dict[PeerId, int] = {}
        for body in (fact.body for fact in self.by_honest(RoundClosed)):
            for member in body.members:
                if not member.is_present:
                    assert member.standing == "expelled"
                    since[member.peer] = min(body.round, since.get(member.peer, body.round))
        return since


def one_value(delta_V: torch.Tensor) -> torch.Tensor:
    """Of 4096: the owners of one part alone see it, fewer than it takes."""
    spoilt_V = delta_V.clone()
    spoilt_V[ONE] = torch.nan
    return spoilt_V


@pytest.mark.parametrize("opened", [True, False])
def test_one_value_that_is_no_number_expels_its_author_with_the_vertex_of_that_round(opened: bool):
    """Those who own no part in which it stands are shown the leaf, or the row where it has none."""
    stage = Stage(one_value, opened).run(3)
    assert stage.expelled == dict.fromkeys(NAMES, 0)
    assert {fact.peer for fact in stage.by_honest(MalformedRowDetected)} == NAMES and not stage.by_honest(
        ProtocolFault
    )
    out = [(by, fact.code, fact.for_good) for by, fact in stage.told if isinstance(fact, JoinRejected)]
    assert sorted(out) == [(name, EXPELLED, True) for name in sorted(NAMES)]


def test_rows_that_are_too_large_to_be_shown_are_said_by_those_who_have_them(monkeypatch: pytest.MonkeyPatch):
    """Nothing in them is a number, so owners of all parts say so, each of what it saw itself."""
    monkeypatch.setattr(tensors, "ROW_SHOWN_MAX", 0)
    assert Stage(POISONS["not a number"]).run(3).expelled == dict.fromkeys(NAMES, 0)


# ---- liars about rows --------------------------------------------------------------------------------------

CRIED: Counter[str] = Counter()


def cry(villain: ByzantineMember, send: Send) -> list[Effect]:
    return [send]


def _cry(villain: ByzantineMember, to: PeerId, now: Seconds) -> list[Effect]:
    """About an honest row that it holds as an owner: a true leaf, other bytes, other numbers, another round's plan,
    and a bare accusation."""
    reduce = villain.peer.round.reduce if villain.peer.round is not None else None
    gathers = reduce.accumulators.items() if reduce is not None else ()
    held = [(part, row) for part, gather in gathers for peer, row in gather.rows.items() if peer not in NAMES]
    if not held:
        return []
    part, row = villain.draw.choice(held)
    kind = villain.draw.choice(["leaf", "bytes", "count", "part", "bare", "nonsense"])
    CRIED[kind] += 1
    assert row.statement is not None
    if kind == "bare":
        return [Send(to, ReportMessage(villain.notary.sign(Accusation(row.statement, None, digest(b"?")))))]
    if kind == "nonsense":
        return [Send(to, MalformedRowShown(villain.draw.randbytes(100)))]
    return [Send(to, MalformedRowShown(malformed_row_bytes(_shown(kind, part, row))))]


def _shown(kind: str, part: int, row: GatheredRow) -> MalformedRowEvidence:
    assert row.statement is not None
    tree, leaf = CUT.tree(row.payload.data), bytes(CUT.leaf(row.payload.data, 0))
    count = len(tree.levels[0])
    true = MalformedRowEvidence(row.statement, part, row.path, count, 0, digest(leaf), tree.path(0), leaf)
    match kind:
        case "bytes":
            junk = b"\xff" * len(leaf)
            return replace(true, leaf=junk, name=digest(junk))
        case "count":
            return replace(true, leaves=count + 1)
        case "part":
            return replace(true, part=part + 1)
        case _:
            return true


MISCHIEF[cry] = _cry


def test_who_calls_honest_rows_unreadable_is_blamed_and_nobody_else_is():
    """Checkers hold that no honest peer is accused or blamed by one; the accusers' two words are too few."""
    CRIED.clear()
    stage = Stage(opened=True, twist=cry).run(5)
    assert len(CRIED) == 6 and not stage.by_honest(MalformedRowDetected)
    assert {fact.peer for fact in stage.by_honest(ProtocolFault)} == NAMES
    assert stage.expelled == {}
    rounds = [fact for fact in stage.by_honest(RoundClosed) if fact.body.parts]
    assert rounds and all(len(fact.counted) == 7 and fact.parts_missing == 0 for fact in rounds)
