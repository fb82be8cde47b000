"""All-reduce of multisets of names through a hostile network: no contributor counts twice, owners take over.

A combined part is the tuple of its contributors, so every false sum is visible.
"""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.base.errors import PeerFault
from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.base.limits import OWNERS_PER_PART
from atoll.base.machine import (
    Effect,
    Emit,
    Payload,
    Persist,
    Received,
    RunTask,
    Send,
    SetTimer,
    Start,
    TaskDone,
    TaskFailed,
    TimerFired,
)
from atoll.crypto.digest import digest, merkle_root
from atoll.protocol.allreduce.buffers import LocalRow
from atoll.protocol.allreduce.cross_check import FalseOwnerResultProven
from atoll.protocol.allreduce.engine import AllReduce
from atoll.protocol.allreduce.environment import ReduceEnvironment
from atoll.protocol.allreduce.events import PartMissing, PartResultAccepted, PartsReduced
from atoll.protocol.allreduce.factory import build_reduce
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.protocol.allreduce.topology import ReduceTopology, butterfly, hierarchical, ring, star, tree
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.round import PartReductionDeclined, PartRequest, PartResponse, PartResult, ResendRequest
from atoll.wire.messages.statements import Commitment, OwnerResult
from atoll.wire.opening import rows_digest

RUN = Digest(bytes(32))
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(8, 20))]
A_MOMENT_S = 10.0  # shorter than any window of a plan without a clock
ANSWER_UNTIL = (6.0, 12.0, 18.0, 18.0, 18.0, 18.0)  # as in plans: owners behind the third share its end


def topology_named(name: str, names: tuple[PeerId, ...]) -> ReduceTopology:
    clusters = tuple(names[i : i + 3] for i in range(0, len(names), 3))
    return {
        "butterfly": lambda: butterfly(names, b"seed"),
        "butterfly in turns": lambda: butterfly(names, b"seed", pieces=3, spread=True),
        "ring": lambda: ring(names, b"seed"),
        "tree": lambda: tree(names, b"seed", pieces=2),
        "star": lambda: star(names, b"seed"),
        "hierarchical": lambda: hierarchical((clusters[::2], clusters[1::2]), b"seed"),
    }[name]()


TOPOLOGIES = ["butterfly", "ring", "tree", "star", "hierarchical"]


@dataclass
class Group:
    """`count` members that have all committed. Tests decide with `deliver` which message arrives when."""

    count: int
    topology: str = "butterfly"
    dead: set[PeerId] = field(default_factory=set)
    now: float = 0.0
    has_clock: bool = True
    silent: bool = False  # the dead are gone for their silence alone
    reserves: bool = False  # members stand in if all owners are gone
    trust: str = "private"  # or "community" (members may lie), or "open" (owners also check each other)
    unable: set[PeerId] = field(default_factory=set)  # members that cannot combine rows
    liars: set[PeerId] = field(default_factory=set)  # members with results that no rows make
    deaf: set[PeerId] = field(default_factory=set)  # members that hear no other for a while, and are not heard
    broken: set[frozenset[PeerId]] = field(default_factory=set)  # pairs that do not hear each other
    passing: set[PeerId] = field(default_factory=set)  # members without an update that hand on others' rows

    def __post_init__(self) -> None:
        self.names = tuple(PeerId(f"p{i}") for i in range(self.count))
        notaries = {p: StatementSigner(RUN, VirtualSigner(p), VirtualSignatureVerifier()) for p in self.names}
        topology = topology_named(self.topology, self.names)
        never = 0.0 if self.has_clock else 1e8
        until = tuple(never + t for t in ANSWER_UNTIL[: min(OWNERS_PER_PART, self.count)])
        reserves = self.names if self.reserves else ()
        self.plan = ReducePlan(0, 0, "", topology, self.names, until, has_clock=self.has_clock, reserves=reserves)
        if self.trust != "private":
            watched = 1 if self.trust == "open" else 0
            self.plan = replace(self.plan, may_lie=True, is_audited=True, witnesses=watched)
        self.flying: list[tuple[PeerId, Send]] = []
        self.timers: dict[tuple[PeerId, str], float] = {}
        self.kept: dict[PeerId, dict[str, bytes]] = {p: {} for p in self.names}
        self.facts: dict[PeerId, list[object]] = {p: [] for p in self.names}
        self.updates: dict[PeerId, LocalRow] = {}
        commits: dict[PeerId, Commitment] = {}
        for p in self.names:
            parts = tuple(Payload(digest(f"{p}/{j}".encode()), 8, (p,)) for j in range(self.plan.parts))
            root, count = merkle_root(tuple(x.digest for x in parts)), 0 if p in self.passing else len(parts)
            commits[p] = Commitment(0, 0, root, count, 1, 1, 1.0, 1.0, 1)
            self.updates[p] = LocalRow(notaries[p].sign(commits[p]), parts)
        self.commits, self.notaries = commits, notaries
        self.machines = {p: self.machine(p, judges=self.trust == "open") for p in self.names}

    def machine(self, p: PeerId, judges: bool = False) -> AllReduce:
        return build_reduce(self.notaries[p], self.plan, self.around(p, judges))

    def around(self, p: PeerId, judges: bool = False) -> ReduceEnvironment:
        def gone(q: PeerId) -> bool:
            deaf = q != p and (p in self.deaf or q in self.deaf)
            return q in self.dead or deaf or frozenset((p, q)) in self.broken

        def awaits(part, names, among) -> bool:
            may = set(self.names if among is None else among) - self.passing
            return any(q not in names and not gone(q) for q in may)

        keys = {q: VirtualSigner(q).vote_key for q in self.names}
        return ReduceEnvironment(
            keys.get,
            self.commits.get,
            awaits,
            gone,
            self.kept[p],
            is_unheard=lambda q: gone(q) and (self.silent or q not in self.dead),
            has_vote=judges,
        )

    def begin(self) -> Group:
        for p in self.names:
            if p not in self.dead:
                self.do(p, self.machines[p].handle(Start({}), self.now))
                if p not in self.passing:
                    self.do(p, self.machines[p].contribute(self.updates[p], self.now))
        return self

    def do(self, p: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.flying.append((p, effect))
                case SetTimer(name, at):
                    if at is None:
                        self.timers.pop((p, name), None)
                    else:
                        self.timers[p, name] = at
                case RunTask(job, CombineRows()) if p in self.unable:
                    self.do(p, self.machines[p].handle(TaskFailed(job, "no memory"), self.now))
                case RunTask(job, CombineRows() as work):
                    assert all(tuple(sorted(row.payload.data)) == row.names for row in work.rows)
                    assert all(row.weight == len(row.names) for row in work.rows)
                    assert (work.statistic, work.liars) == (self.plan.statistic, self.plan.liars)
                    names = tuple(sorted(x for row in work.rows for x in row.payload.data))
                    lies = (p,) if p in self.liars and "/own/" in job else ()
                    whole = Payload(digest(repr((work.part, names + lies)).encode()), 8, names)
                    few = len(names) < self.plan.rows_least
                    done = TaskDone(job, RowsCombined(None if few else whole, tuple(r.peer for r in work.rows), ()))
                    self.do(p, self.machines[p].handle(done, self.now))
                case Persist(name, bytes() as blob):
                    self.kept[p][name] = blob
                case Emit(fact):
                    self.facts[p].append(fact)
                case _:
                    pass

    def deliver(self, index: int, keep: bool = False) -> None:
        sender, send = self.flying[index] if keep else self.flying.pop(index)
        if send.to in self.dead or frozenset((sender, send.to)) in self.broken:
            return
        machine = self.machines[send.to]
        if isinstance(send.message, ResendRequest):
            self.do(send.to, machine.resend(sender))
        elif isinstance(send.message, PartRequest):
            held = [h.payload for h in machine.results.values() if h.payload.digest == send.message.digest]
            self.flying += [(send.to, Send(sender, PartResponse(0, 0, "", p.digest), payload=p)) for p in held]
        elif isinstance(send.message, PartResponse):
            self.do(send.to, machine.accept_bytes(send.payload))
        else:
            self.do(send.to, self.machines[send.to].handle(Received(sender, send.message, send.payload), self.now))

    def dies(self, peer: PeerId) -> None:
        """The peer dies, and all others notice at once."""
        self.dead.add(peer)
        for p in self.names:
            if p not in self.dead:
                self.do(p, self.machines[p].review(self.now))

    def breaks(self, one: PeerId, other: PeerId) -> None:
        """The link between these two breaks; both notice at once."""
        self.broken.add(frozenset((one, other)))
        for p in (one, other):
            self.do(p, self.machines[p].review(self.now))

    def hears(self, deaf: set[PeerId]) -> None:
        """From now on only these are deaf."""
        self.deaf = deaf
        for p in self.names:
            self.do(p, self.machines[p].review(self.now))

    def tick(self) -> None:
        (p, name), at = min(self.timers.items(), key=lambda item: (item[1], item[0]))
        del self.timers[p, name]
        self.now = max(self.now, at)
        if p not in self.dead:
            self.do(p, self.machines[p].handle(TimerFired(name), self.now))

    def finish(self) -> Group:
        while self.flying or self.timers:
            while self.flying:
                self.deliver(0)
            if self.timers:
                self.tick()
        return self

    def stands_in_alone(self, p: PeerId) -> tuple[PartResult, OwnerResult, Payload]:
        """A reserve's result of part 0 that counts its own row alone."""
        index, rows = self.plan.owners_and_reserves(0).index(p), rows_digest([self.commits[p]])
        alone = Payload(digest(repr((0, (p,))).encode()), 8, (p,))
        said = OwnerResult(
            0, 0, 0, index, alone.digest, 8, (p,), rows if self.plan.witnesses else ZERO_DIGEST, rows
        )
        return PartResult(0, 0, "", self.notaries[p].sign(said)), said, alone

    def parts_of(self, p: PeerId) -> dict[int, tuple[PeerId, ...]]:
        return {j: held.payload.data for j, held in self.machines[p].results.items()}

    def check(self) -> None:
        for p in self.names:
            for j, names in self.parts_of(p).items():
                assert len(set(names)) == len(names), f"counted twice: {names}"
                assert names == self.machines[p].results[j].result.contributors


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_member_counts_once_in_every_part_and_all_hold_the_same(topology: str):
    """Groups of 1 to 20, nothing lost: no timer is needed."""
    for count in (1, 2, 3, 5, 16, 20):
        group = Group(count, topology).begin()
        while group.flying:
            group.deliver(0)
        for p in group.names:
            assert group.parts_of(p) == {j: tuple(sorted(group.names)) for j in range(group.plan.parts)}
            assert any(isinstance(f, PartsReduced) for f in group.facts[p])


def test_a_dead_owner_is_answered_for_by_the_next_in_the_plan():
    """Group of 4, the first owner of part 2 is known to be gone: part 2 comes from its second owner, at once."""
    group = Group(4)
    first, second = group.plan.owners(2)[:2]
    group.dead.add(first)
    group.begin().finish()
    for p in set(group.names) - {first}:
        told = [f for f in group.facts[p] if isinstance(f, PartResultAccepted) and f.part == 2]
        assert [f.owner for f in told] == [second]
        assert first not in group.parts_of(p)[2] and len(group.parts_of(p)[2]) == 3


@pytest.mark.parametrize("restarts", [False, True])
def test_a_holder_of_a_dead_owners_result_is_not_sent_it_again_unless_it_came_back(restarts: bool):
    """One of four holds all three results of an owner that died; the other two get them from it.

    The holder may restart while the bytes are on their way, and has lost them then.
    """
    group = Group(4, "butterfly in turns").begin()
    dying = group.plan.owners(0)[0]
    owned = [part for part in range(group.plan.parts) if group.plan.owners(part)[0] == dying]
    holder, *others = [p for p in group.names if p != dying]
    while group.flying:
        sender, send = group.flying[0]
        late = isinstance(send.message, PartResult) and sender == dying and send.to != holder
        group.flying.pop(0) if late else group.deliver(0)
    group.dies(dying)
    lost = [group.machines[holder].results[part].payload for part in owned]
    sent: list[PeerId] = []
    while group.flying:
        _, send = group.flying[0]
        sent += [send.to] if isinstance(send.message, PartResult) and send.payload in lost else []
        if restarts and isinstance(send.message, PartResponse):
            group.do(send.to, group.machines[send.to].resend(holder))
        group.deliver(0)
    assert all(group.machines[p].results[part].statement.signer == dying for p in others for part in owned)
    assert (holder in sent) == restarts


@pytest.mark.parametrize(("has_clock", "least_s", "most_s"), [(True, 6.0, 18.0), (False, 30.0, 90.0)])
def test_an_owner_that_goes_silent_costs_its_time_and_no_more(has_clock: bool, least_s: float, most_s: float):
    """No peer knows that it is gone: the second owner answers after the first one's deadline.

    Without a clock the plan's times are years away, and five windows end the wait.
    """
    group = Group(4, has_clock=has_clock).begin()
    first, second = group.plan.owners(1)[:2]
    group.flying = [(s, x) for s, x in group.flying if x.to != first and s != first]
    group.machines[first].handle = lambda event, now: []  # type: ignore[method-assign]  # it receives nothing more
    group.finish()
    others = set(group.names) - {first}
    assert {group.machines[p].results[1].statement.signer for p in others} == {second}
    assert least_s <= group.now <= most_s


def test_without_a_clock_owners_have_time_for_a_large_update_on_slow_links():
    """100 MB at 2 Mbit/s take 400 s: before that no peer closes a part, hands rows on, or passes an owner over."""
    group = Group(4, has_clock=False)
    for p in group.names:
        parts = tuple(Payload(part.digest, 25 * 10**6, part.data) for part in group.updates[p].parts)
        group.updates[p] = replace(group.updates[p], parts=parts)
    group.begin()
    assert min(group.timers.values()) >= 400.0
    assert all(
        not machine.accumulators[part].closed
        for machine in group.machines.values()
        for part in machine.accumulators
    )
    watched = replace(group.plan, witnesses=1)  # each row goes to two owners
    assert watched.started_at(0.0, 10**8).window_s == 2 * group.plan.started_at(0.0, 10**8).window_s
    # a liar delays the others by four times their own pace, or five windows
    assert watched.started_at(0.0, 10**8, pace_s=20.0).window_s == 80.0
    assert watched.started_at(0.0, 10**8, pace_s=1.0).window_s == 30.0


@pytest.mark.parametrize("has_clock", [True, False])
def test_a_silent_death_costs_a_moment_in_which_others_may_have_its_rows(has_clock: bool):
    """A twelfth of a window of 6 s, also without a clock, when owners have five times as long."""
    group = Group(4, has_clock=has_clock, silent=True)
    group.dead.add(group.names[3])
    group.begin()
    while not all(group.parts_of(p).keys() == set(range(4)) for p in group.names[:3]):
        if group.flying:
            group.deliver(0)
        else:
            group.tick()
    assert 0.0 < group.now <= 0.5


def test_a_part_without_any_owner_is_missing_and_the_others_are_not():
    """All six owners of part 0 of nine are gone: the part is reported missing."""
    group = Group(9)
    group.dead |= set(group.plan.owners(0))
    group.begin().finish()
    for p in set(group.names) - group.dead:
        missing = {f.part for f in group.facts[p] if isinstance(f, PartMissing)}
        assert 0 in missing and missing | group.parts_of(p).keys() == set(range(9))


TRUSTS = ["private", "community", "open"]
WAYS = [("private", topology) for topology in TOPOLOGIES]
# rows go straight to owners there
WAYS += [(trust, topology) for trust in TRUSTS[1:] for topology in ("butterfly", "star")]


@pytest.mark.parametrize(("trust", "topology"), WAYS)
@pytest.mark.parametrize("seed", range(5))
def test_if_all_owners_of_a_part_die_a_reserve_stands_in(trust: str, topology: str, seed: int):
    """The six owners of a drawn part and the first reserve die one after the other, after they may have had rows.

    Authors still have their rows. No deadline is needed, and no row counts twice. If members may lie, most must be
    left.
    """
    count = 13 if trust == "private" else 16
    group, draw = Group(count, topology, reserves=True, trust=trust).begin(), random.Random(seed)
    part = draw.randrange(group.plan.parts)
    doomed = [*group.plan.owners(part), next(p for p in group.names if p not in group.plan.owners(part))]
    while doomed:
        for _ in range(draw.randrange(30)):
            if group.flying:
                group.deliver(draw.randrange(len(group.flying)))
        if part in {j for p in group.names if p not in group.dead for j in group.parts_of(p)}:
            return  # it was answered before all were dead: a holder sends it to the others
        group.dies(doomed.pop(0))
    while group.flying:
        group.deliver(draw.randrange(len(group.flying)))
    group.check()
    living = set(group.names) - group.dead
    for p in living:
        assert group.parts_of(p).keys() == set(range(group.plan.parts))
        assert living <= set(group.parts_of(p)[part])
        assert group.machines[p].results[part].result.owner_index > OWNERS_PER_PART
    assert len({group.parts_of(p)[part] for p in living}) == 1


def orphan(trust: str, seed: int = 0, **more: object) -> tuple[Group, list[PeerId]]:
    """A group of 20 with the owners of part 0 dead before the sharing begins, and its reserves in order."""
    group = Group(20, "star", reserves=True, trust=trust, **more)  # type: ignore[arg-type]
    order = random.Random(seed).sample(group.names, group.count)
    group.plan = replace(group.plan, reserves=tuple(order))
    group.dead |= set(group.plan.owners(0))
    group.machines = {p: group.machine(p, judges=trust == "open") for p in group.names}
    return group, [p for p in order if p not in group.dead]


@pytest.mark.parametrize("trust", TRUSTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_reserve_needs_no_link_to_the_authors_nor_to_the_listeners(trust: str, seed: int):
    """The first reserve does not hear some of the others, but one of the next two.

    It requests their rows by author from all holders, and its result goes back to them.
    """
    group, left = orphan(trust, seed)
    draw = random.Random(seed)
    near = draw.choice(left[1:3])
    cut = draw.sample([p for p in left[1:] if p != near], draw.randrange(1, 9 if trust == "private" else 4))
    group.broken |= {frozenset((left[0], other)) for other in cut}
    group.begin()
    while group.flying:
        group.deliver(draw.randrange(len(group.flying)))
    group.finish().check()
    assert {group.parts_of(p)[0] for p in left} == {tuple(sorted(left))}


@pytest.mark.parametrize(("needed", "answered"), [(14, True), (15, False)])
def test_an_order_statistic_never_has_too_few_rows(needed: int, answered: bool):
    """Six of twenty are dead, and the first reserve does not hear three: it requests their rows.

    If fourteen rows are too few, no peer answers.
    """
    group, left = orphan("community")
    group.plan = replace(group.plan, statistic="median", liars=4, rows_least=needed)
    group.machines = {p: group.machine(p) for p in group.names}
    group.broken |= {frozenset((left[0], other)) for other in left[-3:]}
    group.begin().finish().check()
    assert {group.parts_of(p).get(0) for p in left} == {tuple(sorted(left)) if answered else None}


def test_a_lying_reserve_is_found_out_by_all_and_its_sum_replaced():
    """Owners check each other, but no peer checks a reserve: all members recompute its result."""
    group, left = orphan("open")
    group.liars = {left[0]}
    group.begin()
    while group.flying:
        group.deliver(0)
    group.finish().check()
    for p in left[1:]:
        assert [fact.peer for fact in group.facts[p] if isinstance(fact, FalseOwnerResultProven)] == [left[0]]
        assert group.machines[p].results[0].result.digest == digest(repr((0, tuple(sorted(left)))).encode())


@pytest.mark.parametrize("trust", ["private", "community"])
@pytest.mark.parametrize("unable", [1, OWNERS_PER_PART, OWNERS_PER_PART + 1])
def test_a_dead_authors_row_comes_from_an_owner_that_could_not_combine_it(trust: str, unable: int):
    """The author dies when its row is at the first owner, which gives up, as do `unable` owners in all.

    If all six owners decline, a reserve tries once, and its own refusal ends the part.
    """
    group = Group(13, "star", reserves=True, trust=trust)
    takers = group.plan.owners_and_reserves(0)
    group.unable = set(takers[:unable])
    author = next(p for p in reversed(group.names) if p not in takers[: unable + 1])
    group.begin()
    while group.flying:
        sender, send = group.flying[0]
        if sender == author and send.to == takers[0]:
            group.deliver(0)
            group.dies(author)
            break
        group.flying.append(group.flying.pop(0)) if sender != author else group.deliver(0)
    group.finish().check()
    for p in set(group.names) - group.dead:
        if unable > OWNERS_PER_PART:
            assert any(isinstance(fact, PartMissing) for fact in group.facts[p])
            continue
        assert group.machines[p].results[0].result.owner_index == unable
        assert group.parts_of(p)[0] == tuple(sorted(group.names))


@pytest.mark.parametrize("trust", ["community", "open"])
def test_no_reserve_that_may_lie_stands_in_for_live_owners(trust: str):
    """A reserve answers at once, with its own row: no peer accepts it or votes for it while an owner is heard.

    After that, none does before the reserve's turn.
    """
    group = Group(13, reserves=True, trust=trust).begin()
    liar, reader = group.plan.owners_and_reserves(0)[-1], group.machines[group.plan.owners(0)[-1]]
    said, lie, alone = group.stands_in_alone(liar)
    group.do(reader.me, reader.handle(Received(liar, said, alone), 0.0))
    assert 0 not in reader.results and reader.believes(lie) is None
    group.finish().check()
    assert all(group.parts_of(p)[0] == tuple(sorted(group.names)) for p in group.names)


@pytest.mark.parametrize("trust", ["community", "open"])
def test_no_reserve_that_may_lie_replaces_an_owner_that_answered_however_late_it_is(trust: str):
    """All windows are over, and every part has its result: no peer votes for a reserve with its own row alone."""
    group = Group(13, reserves=True, trust=trust).begin().finish()
    liar, reader = group.plan.owners_and_reserves(0)[-1], group.machines[group.plan.owners(0)[-1]]
    said, lie, alone = group.stands_in_alone(liar)
    late = group.plan.answer_until[-1] + 1.0
    group.do(
        reader.me, reader.handle(Received(liar, PartReductionDeclined(0, 0, "", 1)), late)
    )  # any peer may cause a review
    group.do(reader.me, reader.handle(Received(liar, said, alone), late))
    group.do(reader.me, reader.review(late))
    assert reader.believes(lie) is None
    assert not any(isinstance(effect, RunTask) for effect in reader.check_result(said.statement, lie, late))


@pytest.mark.parametrize("trust", TRUSTS)
def test_the_first_reserve_stands_in_for_owners_that_all_declined_whatever_others_decline(trust: str):
    """A later reserve has declined too, before it was asked: the first reserve still tries."""
    group = Group(13, "star", reserves=True, trust=trust)
    owners, reserves = (
        group.plan.owners_and_reserves(0)[:OWNERS_PER_PART],
        group.plan.owners_and_reserves(0)[OWNERS_PER_PART:],
    )
    group.unable = set(owners)
    group.begin()
    for p in group.names:
        if p != reserves[-1]:
            group.do(p, group.machines[p].handle(Received(reserves[-1], PartReductionDeclined(0, 0, "", 0)), 0.0))
    group.finish().check()
    assert {group.machines[p].results[0].statement.signer for p in reserves} == {reserves[0]}


def test_of_two_that_stand_in_and_lie_alike_both_are_passed_over():
    """The second signs a lie about rows that all have recomputed already, and keeps its own row from the third."""
    group, left = orphan("open")
    group.liars = {left[0], left[1]}
    group.begin().finish().check()
    names = tuple(sorted(set(left) - {left[1]}))
    for p in left[2:]:
        assert [fact.peer for fact in group.facts[p] if isinstance(fact, FalseOwnerResultProven)] == left[:2]
        assert group.machines[p].results[0].result.digest == digest(repr((0, names)).encode())


def test_the_sender_of_an_early_result_keeps_no_peer_from_its_bytes():
    """A liar shows the signed result before the reserve does, and never sends the bytes."""
    group, left = orphan("community")
    owners, first, liar, reader = group.plan.owners(0), left[0], left[-1], left[1]
    group.dead -= set(owners)
    said, _, whole = group.stands_in_alone(first)
    machine = group.machines[reader]
    group.do(reader, machine.handle(Start({}), 0.0))
    group.do(reader, machine.handle(Received(liar, said, None), 0.0))
    group.do(reader, machine.handle(Received(first, said, whole), 0.0))
    group.dead |= set(owners)
    effects = machine.review(0.0)
    asked = [e.to for e in effects if isinstance(e, Send) and isinstance(e.message, PartRequest)]
    assert asked == [first]


def test_five_of_nine_that_die_at_once_leave_every_part_an_owner():
    group = Group(9).begin()
    for p in group.plan.owners(0)[:5]:
        group.dies(p)
    group.finish().check()
    for p in set(group.names) - group.dead:
        assert group.parts_of(p).keys() == set(range(9))


def test_bytes_that_were_not_committed_to_are_the_senders_fault():
    """A liar sends other bytes, then the right ones: the first is a fault, the second counts."""
    group = Group(3).begin()
    index = next(i for i, (_, x) in enumerate(group.flying) if x.payload is not None)
    liar, send = group.flying[index]
    wrong = Payload(digest(b"other"), 8, (liar, liar))
    with pytest.raises(PeerFault) as fault:
        group.machines[send.to].handle(Received(liar, send.message, wrong), 0.0)
    assert fault.value.who == liar
    group.finish().check()
    assert all(len(names) == 3 for p in group.names for names in group.parts_of(p).values())


def answers_after_restart(forgets: bool) -> list[object]:
    """Its result of part 0 was durable, and lost on the way; it restarts, and all members resend."""
    group = Group(3).begin()
    owner = group.plan.owners(0)[0]
    while group.flying:
        sender, send = group.flying[0]
        lost = sender == owner and isinstance(send.message, PartResult)
        if lost:
            group.flying.pop(0)
        else:
            group.deliver(0)
    assert "said/0/0/answer/0" in group.kept[owner]
    if forgets:
        group.kept[owner].clear()
    group.machines[owner] = group.machine(owner)
    group.do(owner, group.machines[owner].handle(Start({}), 1.0))
    group.do(owner, group.machines[owner].contribute(group.updates[owner], 1.0))
    for p in group.names:
        group.do(p, group.machines[p].resend(owner) if p != owner else [])
    said: list[object] = []
    while group.flying:
        sender, send = group.flying[0]
        said += [send] if sender == owner and isinstance(send.message, PartResult) else []
        group.deliver(0)
    return said


@pytest.mark.parametrize("witnesses", [0, 1, 2])
def test_a_plan_with_witnesses_never_believes_one_owner(witnesses: int):
    """The first owner of five sends bytes that no other owner signed: accepted only without witnesses."""
    group = Group(5)
    group.plan = replace(group.plan, witnesses=witnesses)
    owner, *_, reader = group.plan.owners(0)
    machine = group.machine(reader, judges=True)
    names, whole = group.names, Payload(digest(b"combined"), 8, group.names)
    rows = rows_digest(group.commits[p] for p in names) if witnesses else ZERO_DIGEST
    said = group.notaries[owner].sign(OwnerResult(0, 0, 0, 0, whole.digest, 8, names, rows))
    machine.handle(Start({}), 0.0)
    machine.handle(Received(owner, PartResult(0, 0, "", said), whole), 0.0)
    assert (0 in machine.results) == (witnesses == 0)


def test_rows_of_a_round_that_is_over_are_let_go_at_once():
    """An owner holds rows of w + 1 updates, and witnesses all results: without cycles they are freed at once."""
    group = Group(5, trust="open")
    gc.disable()
    try:
        reduce = group.machine(group.names[0], judges=True)
        dropped = [weakref.ref(reduce), weakref.ref(reduce.verification), weakref.ref(reduce.state)]
        del reduce
        assert [each() for each in dropped] == [None] * 3
    finally:
        gc.enable()


def test_a_late_starter_gives_owners_time_before_it_takes_them_for_absent():
    """It restarts in the middle of a round with witnesses: no commitment is here yet."""
    group = Group(7)
    group.plan = replace(group.plan, witnesses=2)
    me, third = group.names[-1], group.plan.window_s / 3
    machine, begins = group.machine(me, judges=True), group.plan.gather_until(0, 2) + 0.1
    known = dict(group.commits)
    group.commits.clear()
    group.do(me, machine.handle(Start({}), begins))
    assert (
        not machine.routing.absent
        and not machine.missing
        and group.timers[me, machine.state.timer()] <= begins + third
    )
    heard, *silent = group.plan.parallel_owners(0)
    group.commits[heard] = known[heard]
    group.do(me, machine.review(begins + third))
    assert set(silent) - {me} <= machine.routing.absent and heard not in machine.routing.absent


def test_owners_with_commitments_that_do_not_reach_all_are_not_taken_for_absent():
    """In a large swarm a trainer receives commitments of first owners and witnesses only; later owners may help."""
    group = Group(7)
    topology = replace(group.plan.topology, parts=group.plan.topology.parts[:1])
    group.plan = replace(group.plan, topology=topology, witnesses=1)
    first, second = group.plan.parallel_owners(0)
    machine = group.machine(group.names[-1], judges=True)
    for name in set(group.commits) - {first}:
        del group.commits[name]
    machine.handle(Start({}), 0.0)
    machine.review(group.plan.gather_until(0, 2))
    assert machine.routing.absent == {second}


def test_a_restarted_owner_never_answers_a_second_time():
    """Its statement is durable, its bytes are not: silence. The mutant that forgets answers again."""
    assert answers_after_restart(forgets=False) == []
    assert answers_after_restart(forgets=True) != []


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_survivors_of_any_death_count_all_living_members_without_any_deadline(topology: str, seed: int):
    """Up to a third die at random moments: every part has a result at once, or no owner is left."""
    draw = random.Random(seed)
    group = Group(draw.randrange(4, 14), topology).begin()
    doomed = draw.sample(group.names, len(group.names) // 3)
    while group.flying or doomed:
        if doomed and (not group.flying or draw.random() < 0.05):
            victim = doomed.pop()
            group.flying = [(s, x) for s, x in group.flying if s != victim or draw.random() < 0.5]
            group.dies(victim)
        elif group.flying:
            group.deliver(draw.randrange(len(group.flying)))
    group.check()
    for p in set(group.names) - group.dead:
        machine = group.machines[p]
        for j, owners in enumerate(group.plan.owners(j) for j in range(group.plan.parts)):
            if set(owners) <= group.dead:
                continue
            assert j in machine.results, f"{p} waits for part {j} of the {topology}"
            living = {q for q in machine.results[j].result.contributors if q not in group.dead}
            late = {q for q in group.names if q not in group.dead} - living
            assert not late, f"part {j} of the {topology} is without {late}, who live"


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_member_that_was_deaf_for_a_while_keeps_no_peer_waiting(topology: str, seed: int):
    """Computers freeze at random moments, and no message is lost.

    Without a clock an owner that was given up and is heard again waits for the row: nothing else ends it.
    """
    draw = random.Random(seed)
    group = Group(draw.randrange(3, 9), topology, has_clock=False, reserves=True).begin()
    naps = draw.randrange(1, 6)
    while group.flying or naps or group.deaf or any(at < group.now + A_MOMENT_S for at in group.timers.values()):
        if draw.random() < 0.1 or not group.flying:
            if naps and not group.deaf:
                group.hears(set(draw.sample(group.names, draw.randrange(1, group.count))))
                naps -= 1
            elif group.deaf:
                group.hears(set())
            elif group.timers and min(group.timers.values()) < group.now + A_MOMENT_S:
                group.tick()
        elif group.flying:
            group.deliver(draw.randrange(len(group.flying)))
    group.check()
    for p in group.names:
        waits_for = set(range(group.plan.parts)) - group.machines[p].results.keys()
        assert not waits_for, f"{p} waits for parts {waits_for} of the {topology}"


@settings(max_examples=100)
@given(st.integers(1, 9), st.sampled_from(TOPOLOGIES), st.integers(0, 2**32))
def test_whatever_the_network_does_no_contributor_counts_twice(count: int, topology: str, seed: int):
    """Messages are lost, doubled, reordered, members die and time passes at any moment."""
    draw, group = random.Random(seed), Group(count, topology).begin()
    for _ in range(150):
        what = draw.random()
        if what < 0.7 and group.flying:
            group.deliver(draw.randrange(len(group.flying)), keep=draw.random() < 0.15)
        elif what < 0.8 and group.flying:
            group.flying.pop(draw.randrange(len(group.flying)))
        elif what < 0.84 and len(group.dead) + 1 < count:
            group.dies(draw.choice(group.names))
        elif group.timers:
            group.tick()
        group.check()
    group.finish().check()
    for p in set(group.names) - group.dead:
        machine = group.machines[p]
        assert machine.results.keys() | machine.missing == set(range(group.plan.parts)), "a part is in limbo"
