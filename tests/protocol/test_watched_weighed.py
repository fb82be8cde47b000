"""Rows weighed by distances where nobody believes owners: false products are made again, and named.

Updates are names with a number in them, so a comparison is arithmetic that a test can do again.
"""

from __future__ import annotations

import gc
import random
import struct
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

sys.path.insert(0, str(Path(__file__).parent))
from test_weighed import LIARS, Weighed, products

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Payload, Received, Send, Start, TimerFired
from atoll.keys.digest import digest, merkle_path, merkle_root
from atoll.protocol.reduce.facts import NoAnswer, Reduced, RowsWeighed
from atoll.protocol.reduce.kinds import reduce_for
from atoll.protocol.reduce.rows import Update, name_of, shares_left
from atoll.protocol.reduce.run import Reduce
from atoll.protocol.reduce.surroundings import Surroundings
from atoll.protocol.reduce.watched_weighed import WatchedWeighedReduce
from atoll.protocol.reduce.witness import Contradicted, Doubted, Lied, OtherRows
from atoll.sim.signatures import VirtualSigner
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import Answer, Comparison, Contribution, PartBytes, WantPart, WantWords
from atoll.wire.messages.statements import Answered, Compared, Weighing
from atoll.wire.opening import rows_of

Twist = Callable[[PeerId, Send], "Send | None"]


class Watched(Weighed):
    """Everybody votes. `twist` is what becomes of a message on its way; None: nothing."""

    def __init__(self, count: int, newcomers: tuple[str, ...] = ()) -> None:
        self.twist: Twist = lambda sender, send: send
        super().__init__(count, newcomers)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan = replace(self.plan, witnesses=LIARS)
        self.machines = {p: self.machine(p) for p in self.names}

    def machine(self, p: PeerId, judges: bool = True) -> Reduce:
        return super().machine(p, judges)

    def do(self, p: PeerId, effects: list) -> None:
        told = [self.twist(p, effect) if isinstance(effect, Send) else effect for effect in effects]
        super().do(p, [effect for effect in told if effect is not None])

    def played(self) -> Watched:
        """To the end, with a nudge every second as long as somebody waits."""
        while True:
            while self.flying:
                self.deliver(0)
            if all(self.machines[p].finished for p in self.living):
                return self
            soon = min((at for at in self.timers.values()), default=self.now + 1)
            self.now = min(soon, self.now + 1)
            for (p, name), at in sorted(self.timers.items()):
                if at <= self.now and self.timers.pop((p, name), None) is not None and p not in self.dead:
                    self.do(p, self.machines[p].handle(TimerFired(name), self.now))
            for p in self.living:
                self.do(p, self.machines[p].ask_again(self.now))
            assert self.now < 60

    def deliver(self, index: int, keep: bool = False) -> None:
        """Whoever combined a part holds its bytes, also before it is answered."""
        sender, send = self.flying[index]
        if isinstance(send.message, WantPart) and send.to not in self.dead:
            mine = self.machines[send.to].mine.values()
            held = {h.payload.digest: h.payload for h in (*mine, *self.machines[send.to].answers.values())}
            if (payload := held.get(send.message.digest)) is not None:
                self.do(send.to, [Send(sender, PartBytes(0, 0, "", payload.digest), payload=payload)])
            self.flying.pop(index)
        else:
            super().deliver(index, keep)

    def told(self, kind: type) -> list:
        return [fact for p in self.living for fact in self.facts[p] if isinstance(fact, kind)]

    def bodies(self, but: tuple[PeerId, ...] = ()) -> dict[PeerId, tuple[set[int], Weighing | None]]:
        found = {p: self.machines[p].for_body() for p in self.living if p not in but}
        return {p: (set(answers), weighing) for p, (answers, weighing) in found.items()}

    def agreed(self, but: tuple[PeerId, ...] = ()) -> Weighing:
        """All hold all parts, of one weighing, and believe all that they hold."""
        bodies = self.bodies(but)
        assert {tuple(sorted(parts)) for parts, _ in bodies.values()} == {tuple(range(self.plan.parts))}, bodies
        (weighing,) = {weighing for _, weighing in bodies.values()}
        assert weighing is not None
        for p in bodies:
            answers, _ = self.machines[p].for_body()
            assert all(self.machines[p].believes(held.answered) for held in answers.values())
        return weighing


def as_owner(group: Watched, liar: PeerId, statement: Compared | Answered, send: Send, **more: object) -> Send:
    return changed(send, message=changed(send.message, statement=group.notaries[liar].sign(statement), **more))


def said(send: Send, kind: type):
    """What is signed in this message, if it is of this kind."""
    signed = getattr(send.message, "statement", None)
    statement = decode_statement(signed.body, signed.signer) if signed is not None else None
    return statement if isinstance(statement, kind) else None


def false_products(group: Watched, liar: PeerId, to: Callable[[PeerId], bool] = lambda p: True) -> Twist:
    """All its rows are orthogonal, it says."""

    def twist(sender: PeerId, send: Send) -> Send:
        compared = said(send, Compared)
        if sender != liar or compared is None or send.message.statement.signer != liar or not to(send.to):
            return send
        lie = b"".join(struct.pack("<d", 1.0) for _ in range(len(send.message.products) // 8))
        return as_owner(group, liar, changed(compared, products=digest(lie)), send, products=lie)

    return twist


def test_products_that_all_owners_signed_are_believed_and_nobody_opens_a_row():
    group, kinds = Watched(7), Counter()

    def count(sender: PeerId, send: Send) -> Send:
        kinds[type(send.message)] += 1
        return send

    group.twist = count
    group.begin().deliver_all()
    weighing = group.agreed()
    assert weighing.weights == tuple((1 + k) / 28 for k in range(7)) and weighing.without == ()
    assert len(weighing.compared) == 7 * 32
    # a row for each of three owners but oneself; three owners compare, three answer, and each tells six
    assert kinds == {Contribution: 7 * 18, Comparison: 7 * 18, Answer: 7 * 18}
    assert group.now == 0.0 and not group.told(Doubted) and len(group.told(RowsWeighed)) == 7


def test_false_products_are_made_again_and_their_owner_is_named_by_all():
    group = Watched(7)
    liar = group.plan.owners(0)[0]
    group.twist = false_products(group, liar)
    group.begin().deliver_all()
    assert group.agreed(but=(liar,)).weights == tuple((1 + k) / 28 for k in range(7))
    accusers = {p for p in group.names for fact in group.facts[p] if isinstance(fact, Lied) and fact.peer == liar}
    assert accusers == set(group.names) - {liar} and {fact.peer for fact in group.told(Lied)} == {liar}
    assert group.now == 0.0


def test_two_liars_of_three_owners_turn_no_weight():
    """Both watch part 0 and say the same: three must agree, and the rows are opened."""
    group = Watched(7)
    liars = group.plan.owners(0)[:2]
    lies = [false_products(group, liar) for liar in liars]
    group.twist = lambda sender, send: lies[1](sender, lies[0](sender, send))
    group.begin().deliver_all()
    assert group.agreed(but=liars).weights == tuple((1 + k) / 28 for k in range(7))
    assert {fact.peer for fact in group.told(Lied)} == set(liars)


def test_other_products_for_every_second_member_are_found_out():
    """Each judges what it hears: those who were lied to name it, and all weigh alike."""
    group = Watched(7)
    liar = group.plan.owners(0)[0]
    group.twist = false_products(group, liar, lambda p: int(p[1:]) % 2 == 0)
    group.begin().deliver_all()
    assert group.agreed(but=(liar,)).weights == tuple((1 + k) / 28 for k in range(7))
    assert {fact.peer for fact in group.told(Lied) + group.told(Contradicted)} == {liar}


@pytest.mark.parametrize("keeps_back", [(Comparison,), (Answer,), (Comparison, Answer)])
def test_an_owner_that_keeps_its_words_back_costs_a_window_and_no_part(keeps_back: tuple[type, ...]):
    group = Watched(7)
    mute = group.plan.owners(0)[0]
    group.twist = lambda p, send: None if p == mute and isinstance(send.message, keeps_back) else send
    group.begin().played()
    assert group.agreed(but=(mute,)).weights == tuple((1 + k) / 28 for k in range(7))
    assert group.now == 6.0 and not group.told(Lied)
    for p in set(group.names) - {mute}:
        assert group.machines[p].lapses(group.now).keys() <= {mute}


def test_weights_that_follow_from_no_comparison_are_their_owners_lie():
    """It gives its own row all the weight, and signs its answers for that."""
    group = Watched(7)
    liar = group.plan.owners(0)[0]

    def twist(sender: PeerId, send: Send) -> Send:
        answered = said(send, Answered)
        if sender != liar or answered is None or send.message.statement.signer != liar:
            return send
        greedy = changed(send.message.weighing, weights=tuple(float(p == liar) for p in group.names))
        return as_owner(group, liar, changed(answered, rows=name_of(greedy)), send, weighing=greedy)

    group.twist = twist
    group.begin().played()
    assert group.agreed(but=(liar,)).weights == tuple((1 + k) / 28 for k in range(7))
    assert {fact.peer for fact in group.told(Lied)} == {liar}


def test_a_false_sum_of_rightly_weighed_rows_is_replaced_and_named():
    group = Watched(7)
    liar = group.plan.owners(0)[0]

    def twist(sender: PeerId, send: Send) -> Send:
        answered = said(send, Answered)
        if sender != liar or answered is None or send.message.statement.signer != liar:
            return send
        lie = as_owner(group, liar, changed(answered, digest=digest(b"lie")), send)
        return lie if send.payload is None else changed(lie, payload=Payload(digest(b"lie"), 8, ()))

    group.twist = twist
    group.begin().played()
    group.agreed(but=(liar,))
    assert {fact.peer for fact in group.told(Lied)} == {liar}


def test_a_row_that_one_owner_never_gets_is_opened_by_those_who_compared_it():
    """The link between an author and an owner is broken for good, both ways."""
    group = Watched(7)
    owner = group.plan.owners(0)[1]
    author = next(p for p in group.names if p not in group.plan.owners(0)[:3])
    group.twist = lambda p, send: None if {p, send.to} == {owner, author} else send
    group.begin().played()
    weighing = group.agreed()
    assert weighing.peers == group.names and not group.told(Lied)


@pytest.mark.parametrize("seed", range(40))
def test_lost_words_make_nobody_a_liar_and_all_weigh_alike(seed: int):
    """One message in twenty is lost, in any order of messages."""
    draw = random.Random(seed)
    group = Watched(7)
    group.twist = lambda p, send: None if draw.random() < 0.05 else send
    group.begin()
    for _ in range(600):
        if group.flying:
            group.deliver(draw.randrange(len(group.flying)))
    group.played()
    group.agreed()
    assert not group.told(Lied) and not group.told(Contradicted)


@pytest.mark.parametrize("seed", range(60))
def test_whoever_dies_whenever_survivors_agree(seed: int):
    """One of eight dies at a random moment, and loses half of what it was saying."""
    draw = random.Random(seed)
    group = Watched(8).begin()
    dies_in, victim = draw.randrange(600), draw.choice(group.names)
    while group.flying:
        group.deliver(draw.randrange(len(group.flying)))
        dies_in -= 1
        if dies_in == 0:
            group.flying = [(s, x) for s, x in group.flying if s != victim or draw.random() < 0.5]
            group.dies(victim)
    group.played()
    group.agreed()
    assert not group.told(Lied)


def test_who_committed_twice_makes_no_honest_owner_a_liar():
    """p6 gave another row, and another commitment, to every second member."""
    group = Watched(7)
    liar, parts = PeerId("p6"), tuple(Payload(digest(f"2/{j}".encode()), 8, (PeerId("p6"),)) for j in range(7))
    commit = changed(group.commits[liar], root=merkle_root(tuple(x.digest for x in parts)))
    second = Update(group.notaries[liar].sign(commit), parts)
    for p in group.names[::2]:
        commits = dict(group.commits) | {liar: commit}
        for judge in (group.machines[p], group.machines[p].watch, group.machines[p].compared):
            judge.commit_of = commits.get

    def twist(sender: PeerId, send: Send) -> Send:
        if sender != liar or send.to not in group.names[::2] or not isinstance(send.message, Contribution):
            return send
        part = send.message.part
        path = merkle_path(tuple(x.digest for x in parts), part)
        message = changed(send.message, statement=second.statement, path=path)
        return changed(send, message=message, payload=parts[part])

    group.twist = twist
    group.begin().played()
    assert not [f for p in group.names if p != liar for f in group.facts[p] if isinstance(f, Lied | Contradicted)]
    assert {name for fact in group.told(OtherRows) for name in fact.contributors} >= {liar}


def test_too_few_rows_are_no_answer_and_never_a_mean():
    group = Watched(7)
    group.dead |= {PeerId("p0"), PeerId("p2"), PeerId("p4")}
    group.begin().played()
    for p in group.living:
        assert group.machines[p].answers == {} and any(isinstance(f, Reduced) for f in group.facts[p])
    assert {f.why for f in group.told(NoAnswer)} == {"robust needs 5 rows to withstand 2 liars, 4 are here"}


def compared(group: Watched, **but: object) -> Compared:
    owner_index, names = 0, group.names
    rows = rows_of(group.commits[p] for p in names)
    return changed(Compared(0, 0, 0, owner_index, names, digest(products(names)), rows), **but)


@pytest.mark.parametrize("wrong", ["shown", "unshown", "few", "whole", "of nothing"])
def test_a_comparison_that_cannot_be_is_a_fault(wrong: str):
    group = Watched(7).begin()
    owner, given = group.plan.owners(0)[0], products(group.names)
    reader = next(p for p in group.names if p != owner)
    statement = {
        "few": compared(group, contributors=group.names[:4], products=digest(products(group.names[:4]))),
        "whole": compared(group, products=given),
        "of nothing": compared(group, rows=b""),
    }.get(wrong, compared(group))
    message = Comparison(0, 0, "", group.notaries[owner].sign(statement), given)
    if wrong == "shown":
        message = changed(message, products=bytes(8 * 28))
    if wrong == "unshown":
        message = Comparison(0, 0, "", message.statement)
    with pytest.raises(PeerFault):
        group.machines[reader].handle(Received(owner, message, None), 0.0)


def test_words_are_told_a_few_times_and_only_to_members():
    group = Watched(7).begin().deliver_all()
    owner = group.plan.owners(0)[0]
    wish = WantWords(0, 0, "", 0)
    told = [group.machines[owner].handle(Received(PeerId("p6"), wish, None), 0.0) for _ in range(20)]
    assert len(told[0]) == 2 and told[-1] == []
    assert group.machines[owner].handle(Received(PeerId("stranger"), wish, None), 0.0) == []
    assert group.machines[owner].handle(Received(PeerId("p6"), changed(wish, part=99), None), 0.0) == []


def test_a_restarted_owner_never_compares_a_second_time():
    group = Watched(7).begin()
    owner = group.plan.owners(0)[0]
    group.until(lambda s, _: s == owner and "said/0/0/compared/0" in group.kept[s])
    group.machines[owner] = group.machine(owner)
    group.flying = [(s, x) for s, x in group.flying if owner not in (s, x.to)]
    again: list[Send] = []
    group.twist = lambda p, send: again.append(send) or send if p == owner else send
    for p in group.names:
        group.do(p, group.machines[p].resend(owner) if p != owner else [])
    group.do(owner, group.machines[owner].handle(Start({}), 1.0))
    group.do(owner, group.machines[owner].contribute(group.updates[owner], 1.0))
    group.played()
    mine = [x for x in again if isinstance(x.message, Comparison) and x.message.statement.signer == owner]
    assert not [x for x in mine if said(x, Compared).part == 0]
    group.agreed(but=(owner,))
    assert not group.told(Lied) and not group.told(Contradicted)


def test_what_is_left_of_rows_weighs_as_much_and_never_stands_for_most():
    weighing = Weighing((PeerId("a"), PeerId("b"), PeerId("c")), (0.5, 0.25, 0.25), b"")
    assert shares_left(weighing, weighing.peers) == (0.5, 0.25, 0.25)
    assert shares_left(weighing, weighing.peers[:2]) == pytest.approx((2 / 3, 1 / 3))
    assert shares_left(weighing, weighing.peers[1:]) is None


def test_a_plan_that_weighs_and_has_witnesses_is_carried_out_by_nothing_else():
    assert all(isinstance(machine, WatchedWeighedReduce) for machine in Watched(5).machines.values())


def test_nobody_fills_the_memory_with_weighings():
    """An owner signs a thousand answers, each with weights of its own, some beside bytes that are not theirs."""
    group = Watched(7).begin()
    liar = group.plan.owners(0)[0]
    reader = next(p for p in group.names if p != liar)
    for k in range(1000):
        weights = tuple(float(p == liar) for p in group.names)
        weighing = Weighing(group.names, weights, digest(str(k).encode()) * 7)
        payload = Payload(digest(b"lie"), 8, group.names)
        answered = Answered(0, 0, 0, 0, payload.digest, 8, group.names, name_of(weighing))
        shown = payload if k % 2 else Payload(digest(b"other"), 8, group.names)
        event = Received(liar, Answer(0, 0, "", group.notaries[liar].sign(answered), weighing), shown)
        if k % 2:
            group.do(reader, group.machines[reader].handle(event, 0.0))
        else:
            with pytest.raises(PeerFault):
                group.machines[reader].handle(event, 0.0)
    assert len(group.machines[reader].weighings) <= 3
    group.played()
    group.agreed(but=(liar,))


def test_an_accusation_shows_no_products_and_is_answered_with_none():
    """Somebody shows me what I signed before I restarted: I hold the statement, and not what it is about."""
    group = Watched(7).begin().deliver_all()
    owner, other = group.plan.owners(0)[:2]
    word = next(w for w in group.machines[other].compared.cases[0].words if w.statement.signer == owner)
    group.machines[owner] = group.machine(owner)
    group.do(owner, group.machines[owner].handle(Start({}), 1.0))
    statement = decode_statement(word.statement.body, owner)
    group.do(owner, group.machines[owner].examine(word.statement, statement, 1.0))
    asked = group.machines[owner].handle(Received(other, WantWords(0, 0, "", 0), None), 1.0)
    assert asked == [] and group.machines[owner].resend(other) == []


class Broken(Watched):
    """Two of 21 links are broken, and both ends call each other gone."""

    links = (frozenset({"p0", "p4"}), frozenset({"p1", "p2"}))

    def machine(self, p: PeerId, judges: bool = True) -> Reduce:
        def gone(q: PeerId) -> bool:
            return frozenset({p, q}) in self.links

        def awaits(part, names, among) -> bool:
            return any(q not in names and not gone(q) for q in (self.names if among is None else among))

        keys = {q: VirtualSigner(q).vote_key for q in self.names}
        around = Surroundings(keys.get, self.commits.get, awaits, gone, self.kept[p], judges=judges)
        return reduce_for(self.notaries[p], self.plan, around)


def test_two_broken_links_of_seven_cost_no_row():
    """Where one owner compares alone they stop a round; here another one has the row, and opens it."""
    group = Broken(7)
    group.twist = lambda p, send: None if frozenset({p, send.to}) in Broken.links else send
    group.begin().played()
    assert group.agreed().peers == group.names and not group.told(Lied)


@pytest.mark.parametrize("weighs", [True, False])
def test_rows_of_a_round_that_is_over_are_let_go_at_once(weighs: bool):
    """An owner holds rows of w + 1 updates, and its witnesses all answers: whoever drops its reduce has that memory
    back before any collector."""
    world = Watched(5)
    world.plan = replace(world.plan, weighs=weighs)
    gc.disable()
    try:
        reduce = world.machine(world.names[0])
        held = [reduce, reduce.watch, reduce.compared if weighs else reduce.watch]
        dropped = [weakref.ref(each) for each in held]
        del reduce, held
        assert [each() for each in dropped] == [None, None, None]
    finally:
        gc.enable()
