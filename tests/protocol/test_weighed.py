"""Rows weighed by distances of whole updates: owners speak twice, and may die before, between and after.

Updates are names with a number in them, so a comparison is arithmetic that a test can do again.
"""

from __future__ import annotations

import random
import struct
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace as changed

sys.path.insert(0, str(Path(__file__).parent))
from test_reduce import Group

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Effect, Payload, Received, RunTask, Send, Start, TaskDone
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.buffers import weights_digest, weights_left_of
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import LocalPartCombineFailed, PartMissing, PartsReduced, RowWeightsComputed
from atoll.protocol.allreduce.factory import build_reduce
from atoll.protocol.allreduce.tasks import (
    CombineRows,
    ComputedWeights,
    ComputeRowProducts,
    ProductsComputed,
    RowsCombined,
    WeighRows,
)
from atoll.protocol.allreduce.validation import check_compared, weighing_flaw
from atoll.protocol.allreduce.weighted import DistanceWeighting
from atoll.simulation.signatures import VirtualSigner
from atoll.wire.messages.round import (
    PartReductionDeclined,
    PartResult,
    PartRowProducts,
    RowContribution,
    RowRequest,
)
from atoll.wire.messages.statements import AgreedWeights, OwnerResult, RowInnerProducts
from atoll.wire.weights import mixtures_in, packed_mixtures

LIARS = 2


def products(rows: tuple[PeerId, ...]) -> bytes:
    """Row "p3" is the number 3."""
    pairs = combinations_with_replacement([int(name[1:]) for name in rows], 2)
    return b"".join(struct.pack("<d", a * b) for a, b in pairs)


class Weighed(Group):
    """Only the dead are gone; weights of rows are proportional to their numbers."""

    def __init__(self, count: int, newcomers: tuple[str, ...] = ()) -> None:
        self.newcomers = frozenset(map(PeerId, newcomers))
        super().__init__(count)

    def __post_init__(self) -> None:
        super().__post_init__()
        plan = replace(
            self.plan, statistic="robust", has_distance_weights=True, liars=LIARS, weightless=self.newcomers
        )
        self.plan = replace(plan, rows_least=2 * LIARS + 1)
        self.machines = {p: self.machine(p) for p in self.names}

    def do(self, p: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunTask(job, ComputeRowProducts() as work):
                    rows = tuple(row.peer for row in work.rows)
                    done = ProductsComputed(products(tuple(self.plan.with_weight(rows))), rows, ())
                case RunTask(job, WeighRows() as work):
                    assert all(given == products(names) for names, given in work.parts)
                    assert all(set(work.rows) <= set(names) for names, _ in work.parts)
                    total = sum(1 + int(name[1:]) for name in work.rows)
                    done = ComputedWeights(tuple((1 + int(name[1:])) / total for name in work.rows))
                case RunTask(job, CombineRows() as work):
                    names = tuple(row.peer for row in work.rows)
                    assert abs(sum(work.weights) - 1) < 1e-9
                    whole = Payload(digest(repr((work.part, names, work.weights)).encode()), 8, names)
                    done = RowsCombined(whole, names, ())
                case _:
                    super().do(p, [effect])
                    continue
            self.do(p, self.machines[p].handle(TaskDone(job, done), self.now))

    def until(self, true) -> Weighed:
        """Deliver in order until this is true of a message that is still under way."""
        while self.flying and not any(true(s, x) for s, x in self.flying):
            self.deliver(0)
        return self

    def deliver_all(self) -> Weighed:
        while self.flying:
            self.deliver(0)
        return self

    @property
    def living(self) -> list[PeerId]:
        return [p for p in self.names if p not in self.dead]

    def weighings(self) -> set[bytes]:
        return {held.result.rows for p in self.living for held in self.machines[p].results.values()}

    def rows(self, p: PeerId) -> dict[int, set[PeerId]]:
        return {j: set(names) for j, names in self.parts_of(p).items()}


class Mixed(Weighed):
    """Rows are mixed with those that follow them: whatever is nearest, owners hand bits around."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan = replace(self.plan, statistic="nnm + trimmed_mean", has_mixtures=True)
        self.machines = {p: self.machine(p) for p in self.names}

    def do(self, p: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case RunTask(job, WeighRows() as work):
                    done = ComputedWeights(following(len(work.rows)))
                case RunTask(job, CombineRows() as work):
                    names = tuple(row.peer for row in work.rows)
                    mixtures = mixtures_in(work.weights, len(names))
                    said = sorted((names[i], tuple(names[j] for j in some)) for i, some in enumerate(mixtures))
                    whole = Payload(digest(repr((work.part, said)).encode()), 8, names)
                    done = RowsCombined(whole, names, ())
                case _:
                    super().do(p, [effect])
                    continue
            self.do(p, self.machines[p].handle(TaskDone(job, done), self.now))


def following(rows: int) -> bytes:
    return packed_mixtures([{(row + k) % rows for k in range(rows - LIARS)} for row in range(rows)])


def compared_by(sender: PeerId):
    return lambda s, x: s == sender and isinstance(x.message, PartRowProducts)


def test_all_owners_weigh_alike_with_one_more_message_each():
    """Seven peers, nothing lost: every part is answered with one weighing, no timer is needed, and it is cheap."""
    group, said = Weighed(7).begin(), Counter()
    size = 0
    while group.flying:
        message = group.flying[0][1].message
        said[type(message)] += 1
        size = max(size, len(message.statement.body) if isinstance(message, PartRowProducts) else 0)
        group.deliver(0)
    assert said == {RowContribution: 42, PartRowProducts: 42, PartResult: 42}
    assert 8 * 28 < size < 8 * 28 + 256
    told = [f.weighing for p in group.names for f in group.facts[p] if isinstance(f, RowWeightsComputed)]
    assert len(told) == 7 and len(set(told)) == 1 and {weights_digest(told[0])} == group.weighings()
    assert told[0].weights == tuple((1 + k) / 28 for k in range(7)) and told[0].without == ()
    for p in group.names:
        assert group.rows(p) == {j: set(group.names) for j in range(7)}
        answers, weighing = group.machines[p].results_for_body()
        assert len(answers) == 7 and weighing == told[0]


def test_a_newcomers_row_is_listed_everywhere_and_weighs_nothing():
    group = Weighed(7, newcomers=("p6",)).begin().deliver_all()
    (told,) = {f.weighing for p in group.names for f in group.facts[p] if isinstance(f, RowWeightsComputed)}
    assert told.peers == group.names and told.weights[-1] == 0.0 and sum(told.weights) == pytest.approx(1)


def test_a_newcomers_row_has_no_mixture_and_is_in_none():
    """It stands in the middle of the names: the rule spoke of six rows, the weighing of seven."""
    group = Mixed(7, newcomers=("p2",)).begin().deliver_all()
    (told,) = {f.weighing for p in group.names for f in group.facts[p] if isinstance(f, RowWeightsComputed)}
    mixtures = mixtures_in(told.weights, 7)
    assert mixtures[2] == () and not any(2 in some for some in mixtures) and told.shares[2] == 0.0
    assert mixtures[6] == (0, 1, 3, 6) and {len(some) for row, some in enumerate(mixtures) if row != 2} == {4}
    assert sum(told.shares) == pytest.approx(1) and len(told.weights) == 7


def test_a_row_that_died_with_an_owner_is_in_no_mixture_of_its_part():
    """The owner of part 0 dies when all have its comparison: six mixtures are left, of what they have left."""
    group = Mixed(7).begin()
    victim = group.plan.owners(0)[0]
    group.until(compared_by(victim))
    for one in [(s, x) for s, x in group.flying if s == victim]:
        group.deliver(group.flying.index(one))
    group.flying = [(s, x) for s, x in group.flying if s != victim]
    group.dies(victim)
    group.deliver_all()
    left = [p for p in group.names if p != victim]
    cut = [[p for p in (group.names * 2)[k : k + 5] if p != victim] for k in range(7)]
    said = sorted((p, tuple(sorted(cut[group.names.index(p)]))) for p in left)
    for p in group.living:
        answers, _ = group.machines[p].results_for_body()
        assert answers[0].result.contributors == tuple(left) and len(answers) == 7
        assert answers[0].result.digest == digest(repr((0, said)).encode())


def test_a_row_that_one_part_lacks_counts_in_none():
    """p5's row of part 0 never comes, though its author is asked for it: the other parts leave p5 out, too."""
    group = Weighed(7).begin()
    owner, wished = group.plan.owners(0)[0], 0
    while group.flying or group.timers:
        while group.flying:
            sender, send = group.flying[0]
            if sender == "p5" and send.to == owner and getattr(send.message, "part", None) == 0:
                group.flying.pop(0)
                continue
            wished += send.to == "p5" and isinstance(send.message, RowRequest)
            group.deliver(0)
        if group.timers:
            group.tick()
    assert owner != "p5" and wished > 0 and len(group.weighings()) == 1
    for p in group.names:
        assert group.rows(p) == {j: set(group.names) - {"p5"} for j in range(7)}


def test_a_row_that_was_lost_once_comes_when_it_is_asked_for():
    group = Weighed(7).begin()
    owner = group.plan.owners(0)[0]
    lost = [(s, x) for s, x in group.flying if s == "p5" and x.to == owner and x.message.part == 0]
    group.flying = [one for one in group.flying if one not in lost]
    group.finish()
    assert len(lost) == 1 and group.now < group.plan.answer_until[0]
    assert all(group.rows(p) == {j: set(group.names) for j in range(7)} for p in group.names)


class Cut(Weighed):
    """Nothing passes between these two; the first takes the other for gone, which still waits for it."""

    links = ((PeerId("p0"), PeerId("p4")), (PeerId("p1"), PeerId("p2")))

    def machine(self, p: PeerId, judges: bool = False) -> AllReduce:
        def gone(q: PeerId) -> bool:
            return (p, q) in self.links

        def awaits(part, names, among) -> bool:
            return any(q not in names and not gone(q) for q in (self.names if among is None else among))

        keys = {q: VirtualSigner(q).vote_key for q in self.names}
        around = ReduceEnvironment(keys.get, self.commits.get, awaits, gone, self.kept[p])
        return build_reduce(self.notaries[p], self.plan, around)


def test_a_row_that_its_author_gave_to_another_owner_is_asked_of_that_one():
    """Two of 21 links are broken: without it four of seven rows are missing somewhere, and no part is weighed."""
    group = Cut(7).begin()
    while group.flying or group.timers:
        while group.flying:
            sender, send = group.flying[0]
            if (sender, send.to) in group.links or (send.to, sender) in group.links:
                group.flying.pop(0)
            else:
                group.deliver(0)
        if group.timers:
            group.tick()
    for p in group.names:
        answers, weighing = group.machines[p].results_for_body()
        assert len(answers) >= 5 and weighing is not None and len(weighing.peers) == 5, p


def test_a_lost_comparison_is_made_good_by_the_first_answer():
    """All comparisons from the owner of part 0 to p3 are lost: p3 adopts the weights of the others."""
    group = Weighed(7).begin()
    owner = group.plan.owners(0)[0]
    deaf = next(p for p in group.names if p != owner)
    while group.flying:
        sender, send = group.flying[0]
        if sender == owner and send.to == deaf and isinstance(send.message, PartRowProducts):
            group.flying.pop(0)
        else:
            group.deliver(0)
    assert not any(isinstance(f, RowWeightsComputed) for f in group.facts[deaf]) and len(group.weighings()) == 1
    assert all(group.rows(p) == {j: set(group.names) for j in range(7)} for p in group.names)


def test_an_owner_that_dies_before_it_compares_is_left_out_everywhere_and_its_part_is_not():
    group = Weighed(7).begin()
    victim = group.plan.owners(0)[0]
    group.flying = [(s, x) for s, x in group.flying if s != victim or x.to != group.plan.owners(1)[0]]
    group.dies(victim)
    group.deliver_all()
    assert len(group.weighings()) == 1
    for p in group.living:
        assert group.rows(p) == {j: set(group.names) - {victim} for j in range(7)}


def test_an_owner_that_dies_after_it_compared_leaves_a_comparison_that_is_good():
    """All have its comparison, and it alone had its own row of its part: there the others weigh more."""
    group = Weighed(7).begin()
    victim = group.plan.owners(0)[0]
    group.until(compared_by(victim))
    held = [(s, x) for s, x in group.flying if s == victim]
    for one in held:
        group.deliver(group.flying.index(one))
    group.flying = [(s, x) for s, x in group.flying if s != victim]
    group.dies(victim)
    group.deliver_all()
    assert len(group.weighings()) == 1
    for p in group.living:
        assert group.rows(p).pop(0) == set(group.names) - {victim}
        assert all(names == set(group.names) for j, names in group.rows(p).items() if j)


@pytest.mark.parametrize("reached", range(7))
def test_the_next_owner_spreads_the_comparison_of_an_owner_that_died_sending_it(reached: int):
    """Some received it and some did not: the next owner gets it and passes it on; no owner compares anew."""
    group = Weighed(7).begin()
    victim = group.plan.owners(0)[0]
    group.until(compared_by(victim))
    held = [one for one in group.flying if one[0] == victim and isinstance(one[1].message, PartRowProducts)]
    lost = held[reached:] + [one for one in group.flying if one[0] == victim and one not in held]
    group.flying = [one for one in group.flying if one not in lost]
    for one in held[:reached]:
        group.deliver(group.flying.index(one))
    group.dies(victim)
    group.deliver_all()
    for p in group.living:
        answers, _ = group.machines[p].results_for_body()
        assert set(answers) == set(range(7)), f"{p} can propose {sorted(answers)} only"
    assert len(group.weighings()) == 1


@pytest.mark.parametrize("kind", [Weighed, Mixed])
@pytest.mark.parametrize("seed", range(60))
def test_survivors_of_any_death_at_any_time_hold_a_body_of_one_weighting(seed: int, kind: type[Weighed]):
    """One of eight dies at a random moment, in any order of messages, and loses half of its messages.

    All survivors hold a result of every part, all with the same weights, without any deadline.
    """
    draw = random.Random(seed)
    group = kind(8).begin()
    dies_in, victim = draw.randrange(250), draw.choice(group.names)
    while group.flying:
        group.deliver(draw.randrange(len(group.flying)))
        dies_in -= 1
        if dies_in == 0:
            group.flying = [(s, x) for s, x in group.flying if s != victim or draw.random() < 0.5]
            group.dies(victim)
    group.check()
    for p in group.living:
        machine = group.machines[p]
        assert set(machine.results) == set(range(8)), f"{p} waits for {set(range(8)) - set(machine.results)}"
        alike, weighing = machine.results_for_body()
        assert len(alike) == 8 and weighing is not None
        assert all(set(held.result.contributors) <= set(weighing.peers) for held in alike.values())
        assert weighing_flaw(group.plan, weighing) is None


@pytest.mark.parametrize(
    ("keeps_back", "late_s"),
    [((PartRowProducts,), 4.0), ((PartResult,), 10.0), ((PartRowProducts, PartResult), 10.0)],
)
def test_an_owner_that_withholds_a_message_costs_time_and_no_part(keeps_back: tuple[type, ...], late_s: float):
    """The owner is heard, so no peer takes it for gone: the next owner takes over when the window is over.

    If it withholds only its comparison, it alone can weigh: one owner is enough once the others had time to request
    the comparison.
    """
    group = Weighed(7).begin()
    mute, second = group.plan.owners(0)[:2]
    reader = next(p for p in group.names if p not in (mute, second))
    answered_s: dict[int, float] = {}
    while group.flying or group.timers:
        while group.flying:
            sender, send = group.flying[0]
            if sender == mute and isinstance(send.message, keeps_back):
                group.flying.pop(0)
            else:
                group.deliver(0)
        answered_s |= {j: group.now for j in group.machines[reader].results if j not in answered_s}
        if group.timers:
            group.tick()
    assert max(answered_s.values()) == late_s and answered_s.keys() == set(range(7))
    for p in set(group.names) - {mute}:
        answers, _ = group.machines[p].results_for_body()
        assert set(answers) == set(range(7))
        assert answers[0].statement.signer == (second if PartResult in keeps_back else mute)


@pytest.mark.parametrize("without", [(), (1, 2, 3, 4, 5, 6)], ids=["its own row", "its own part"])
@pytest.mark.parametrize("index", [0, 1, 5])
def test_no_owner_alone_decides_what_rows_weigh(index: int, without: tuple[int, ...]):
    """It answers for part 0 as the sharing begins: no other part has its weights, none is declined or late."""
    group = Weighed(7)
    liar = group.plan.owners(0)[index]
    weighing = AgreedWeights(group.names, tuple(float(p == liar) for p in group.names), digest(b"lie"), without)
    payload = Payload(digest(b"lie"), 8, group.names)
    said = group.notaries[liar].sign(
        OwnerResult(0, 0, 0, index, payload.digest, 8, group.names, weights_digest(weighing))
    )
    group.begin()
    for p in set(group.names) - {liar}:
        event = Received(liar, PartResult(0, 0, "", said, weighing), payload)
        group.do(p, group.machines[p].handle(event, 0.0))
    group.finish()
    for p in set(group.names) - {liar}:
        answers, believed = group.machines[p].results_for_body()
        assert believed is not None and believed.weights == tuple((1 + k) / 28 for k in range(7))
        assert set(answers) >= set(range(1, 7)) and (index == 0 or 0 in answers)
    assert group.now == 0.0


def test_a_part_whose_owners_all_keep_silent_takes_no_other_part_with_it():
    """Three owners have a window each: near the end of the third the others weigh without that part."""
    group = Weighed(10)
    mute = set(group.plan.owners(0)[:3])
    group.begin()
    while group.flying or group.timers:
        while group.flying:
            sender, send = group.flying[0]
            if sender in mute and isinstance(send.message, (PartRowProducts, PartResult)):
                group.flying.pop(0)
            else:
                group.deliver(0)
        if group.timers:
            group.tick()
    for p in set(group.names) - mute:
        answers, weighing = group.machines[p].results_for_body()
        assert set(answers) == set(range(1, 10)) and weighing is not None and weighing.without == (0,)


def test_too_few_rows_are_no_answer_and_never_a_mean():
    """Three of seven are dead and two may lie: four rows are one too few. All owners report it at once."""
    group = Weighed(7)
    group.dead |= {PeerId("p0"), PeerId("p2"), PeerId("p4")}
    group.begin().finish()
    for p in group.living:
        assert group.machines[p].results == {} and any(isinstance(f, PartsReduced) for f in group.facts[p])
        assert {f.part for f in group.facts[p] if isinstance(f, PartMissing)} == set(range(7))
    said = {f.why for p in group.living for f in group.facts[p] if isinstance(f, LocalPartCombineFailed)}
    assert said == {"robust needs 5 rows to withstand 2 liars, 4 are in all parts"} and group.now == 0.0


def test_a_part_that_no_owner_can_compare_is_left_out_and_the_others_are_weighed_without_it():
    """All six owners of part 0 of twelve decline: the part has no result."""
    group = Weighed(12)
    out = group.plan.owners(0)
    for p in group.names:
        group.do(p, group.machines[p].handle(Start({}), 0.0))
    for p in group.names:
        for owner in out:
            if owner != p:
                group.do(
                    p, group.machines[p].handle(Received(owner, PartReductionDeclined(0, 0, "", 0), None), 0.0)
                )
        if p in out:
            group.machines[p].routing.declined.add((0, p))
        group.do(p, group.machines[p].contribute(group.updates[p], 0.0))
    group.finish()
    for p in group.names:
        answers, weighing = group.machines[p].results_for_body()
        assert set(answers) == set(range(1, 12)) and weighing is not None and weighing.without == (0,)


def restarted(group: Weighed, owner: PeerId) -> list[Send]:
    """What a restarted owner sends."""
    group.machines[owner] = group.machine(owner)
    group.flying = []
    for p in group.names:
        group.do(p, group.machines[p].resend(owner) if p != owner else [])
    group.do(owner, group.machines[owner].handle(Start({}), 1.0))
    group.do(owner, group.machines[owner].contribute(group.updates[owner], 1.0))
    said: list[Send] = []
    while group.flying:
        sender, send = group.flying[0]
        said += [send] if sender == owner else []
        group.deliver(0)
    return said


def test_a_restarted_owner_never_compares_a_second_time():
    """Its comparison is durable, its rows are not: it declines at once. The mutant that forgets compares again."""
    for forgets in (False, True):
        group = Weighed(7).begin()
        owner = group.plan.owners(0)[0]
        group.until(compared_by(owner))
        assert "said/0/0/compared/0" in group.kept[owner]
        if forgets:
            group.kept[owner].clear()
        said = restarted(group, owner)
        assert any(isinstance(x.message, PartRowProducts) for x in said) == forgets
        assert any(isinstance(x.message, PartReductionDeclined) and x.message.part == 0 for x in said) != forgets


def test_an_answer_without_its_weighing_is_its_senders_fault():
    group = Weighed(7).begin().until(lambda s, x: isinstance(x.message, PartResult))
    sender, send = next(one for one in group.flying if isinstance(one[1].message, PartResult))
    other = AgreedWeights(group.names, (1 / 7,) * 7, digest(b"other"))
    for message in (changed(send.message, weighing=UNSET), changed(send.message, weighing=other)):
        with pytest.raises(PeerFault) as fault:
            group.machines[send.to].handle(Received(sender, message, send.payload), 0.0)
        assert fault.value.who == sender


def compared(**but: object) -> RowInnerProducts:
    names = tuple(PeerId(f"p{k}") for k in range(7))
    return changed(RowInnerProducts(0, 0, 0, 0, names, products(names)), **but)


@pytest.mark.parametrize(
    "wrong",
    [
        compared(part=7),
        compared(part=-1),
        compared(owner_index=1),
        compared(owner_index=-1),
        compared(contributors=()),
        compared(contributors=(PeerId("p1"), PeerId("p0"))),
        compared(contributors=(PeerId("nobody"),), products=bytes(8)),
        compared(products=bytes(8 * 27)),
        compared(products=struct.pack("<d", float("nan")) + bytes(8 * 27)),
        compared(products=struct.pack("<d", 1e61) + bytes(8 * 27)),
    ],
)
def test_a_comparison_that_cannot_be_is_a_fault(wrong: RowInnerProducts):
    group = Weighed(7)
    owner = group.plan.owners(0)[0]
    check_compared(group.plan, owner, compared())
    with pytest.raises(PeerFault):
        check_compared(group.plan, owner, wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"peers": tuple(PeerId(f"p{k}") for k in reversed(range(7)))},
        {"peers": (PeerId("nobody"), *(PeerId(f"p{k}") for k in range(6)))},
        {"weights": (1.0,)},
        {"weights": (float("nan"),) + (0.0,) * 6},
        {"weights": (1.5, -0.5) + (0.0,) * 5},
        {"weights": (0.0,) * 7},
        {"weights": (1.0,) * 7},
        {"weights": (0.0,) * 6 + (1.0,)},
        {"weights": (1e308,) * 6 + (0.0,)},
        {"weights": (float("inf"),) + (0.0,) * 6},
        {"compared": bytes(2_000_000)},
        {"compared": b""},
        {"without": (7,)},
        {"without": (1, 0)},
        {"peers": tuple(PeerId(f"p{k}") for k in range(4)), "weights": (0.25,) * 4},
    ],
)
def test_a_weighing_that_cannot_be_is_seen(wrong: dict):
    """p6 is a newcomer: its row must weigh nothing."""
    group = Weighed(7, newcomers=("p6",))
    good = AgreedWeights(group.names, (1 / 6,) * 6 + (0.0,), digest(b"compared"))
    assert weighing_flaw(group.plan, good) is None
    assert weighing_flaw(group.plan, changed(good, **wrong)) is not None


def test_mixtures_that_cannot_be_are_seen():
    """p6 is a newcomer, two may lie: six settled rows have mixtures of four."""
    group = Mixed(7, newcomers=("p6",))
    right = [{(row + k) % 6 for k in range(4)} for row in range(6)]
    good = AgreedWeights(group.names, packed_mixtures([*right, ()]), digest(b"compared"))
    assert weighing_flaw(group.plan, good) is None
    for wrong in (
        packed_mixtures([{1, 2, 3, 4}, *right[1:], ()]),  # without its own row
        packed_mixtures([{0, 1, 2}, *right[1:], ()]),
        packed_mixtures([{0, 1, 2, 3, 4}, *right[1:], ()]),
        packed_mixtures([{0, 1, 2, 6}, *right[1:], ()]),  # of a newcomer's row
        packed_mixtures([*right, {6, 0, 1, 2}]),
        packed_mixtures([(), *right[1:], ()]),
        packed_mixtures([*right[:5], {5, 0, 1, 7}, ()]),  # of a row that there is not
        good.weights[:-1],
        good.weights + b"\0",
        b"",
        (1 / 6,) * 6 + (0.0,),
    ):
        assert weighing_flaw(group.plan, changed(good, weights=wrong)) is not None, wrong
    assert weighing_flaw(Weighed(7, newcomers=("p6",)).plan, good) is not None
    assert weighing_flaw(group.plan, changed(good, peers=(PeerId("p6"),), weights=b"\0")) is not None  # no mixture


def test_what_is_left_of_rows_weighs_as_much_and_never_stands_for_most():
    weighing = AgreedWeights((PeerId("a"), PeerId("b"), PeerId("c")), (0.5, 0.25, 0.25), b"")
    assert weights_left_of(weighing, weighing.peers) == (0.5, 0.25, 0.25)
    assert weights_left_of(weighing, weighing.peers[:2]) == pytest.approx((2 / 3, 1 / 3))
    assert weights_left_of(weighing, weighing.peers[1:]) is None


def test_no_owner_fills_the_memory_with_weights():
    """An owner signs a thousand answers for its part, each with weights of its own."""
    group = Weighed(7).begin()
    liar = group.plan.owners(0)[0]
    reader = next(p for p in group.names if p != liar)
    for k in range(1000):
        weights = tuple(float(p == liar) for p in group.names)
        weighing = AgreedWeights(group.names, weights, digest(str(k).encode()))
        payload = Payload(digest(b"lie"), 8, group.names)
        answered = OwnerResult(0, 0, 0, 0, payload.digest, 8, group.names, weights_digest(weighing))
        event = Received(liar, PartResult(0, 0, "", group.notaries[liar].sign(answered), weighing), payload)
        group.do(reader, group.machines[reader].handle(event, 0.0))
    assert len(group.machines[reader].state.weighings) == 1


def test_an_observer_has_no_row_to_compare_or_weigh():
    """Else a liar pads the rows that a rule needs with those of observers."""
    group = Weighed(7)
    owner, listens = group.plan.owners(0)[0], replace(group.plan, rowless=frozenset({PeerId("p6")}))
    with pytest.raises(PeerFault):
        check_compared(listens, owner, compared())
    padded = AgreedWeights(group.names, (1 / 7,) * 7, digest(b"compared"))
    assert weighing_flaw(group.plan, padded) is None and weighing_flaw(listens, padded) is not None


def test_a_plan_that_weighs_always_has_distance_weighting():
    assert all(isinstance(machine.weighting, DistanceWeighting) for machine in Weighed(5).machines.values())
