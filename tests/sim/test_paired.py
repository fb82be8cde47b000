"""Rounds in pairs, in the virtual world: who sends what to whom, and what the death of a partner costs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import msgspec
from msgspec import UNSET, UnsetType

from atoll.base.draw import in_pairs
from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Lane, Send
from atoll.node.facts import CaughtUp, RoundClosed
from atoll.node.requests import rest
from atoll.node.settings import RunSettings
from atoll.policy.plan import RoundSettings
from atoll.sim.paired import OwnState, PairedIsland
from atoll.sim.swarm import Swarm, SwarmKnobs, peer_name
from atoll.wire.messages.round import Contribution
from atoll.wire.pairs import is_roll, roll_from_bytes

WINDOW_S = 6.0  # of an owner


class Paired:
    """A swarm whose members exchange in pairs; `rows` are all that were sent, by round of training."""

    def __init__(self, peers: int, seed: int = 3, window_min_s: float | UnsetType = UNSET) -> None:
        settings = RunSettings(
            open_to_all=True,
            topology="pairs",
            round=RoundSettings(inner_steps=20, first_train_s=10, owner_s=WINDOW_S, window_min_s=window_min_s),
        )
        self.swarm = Swarm(seed, SwarmKnobs(peers=peers, run=settings), island=PairedIsland)
        self.world, self.closed, self.rows = (
            self.swarm.world,
            list[RoundClosed](),
            list[tuple[int, PeerId, PeerId]](),
        )
        self.caught_up = Counter[PeerId]()
        self.world.watchers.append(self._watch)
        send = self.world._send

        def watched(node, effect: Send) -> None:
            if isinstance(effect.message, Contribution):
                assert effect.lane is Lane.BULK
                self.rows.append((effect.message.round, node.name, effect.to))
            send(node, effect)

        self.world._send = watched

    def _watch(self, _now, node, fact) -> None:
        if isinstance(fact, RoundClosed) and fact.body.parts and fact.body.round not in self.rounds:
            self.closed.append(fact)
        if isinstance(fact, CaughtUp):
            self.caught_up[node.name] += 1

    @property
    def rounds(self) -> set[int]:
        return {fact.body.round for fact in self.closed}

    def until(self, rounds: int) -> None:
        self.world.run(self.world.now + 1e3, stop=lambda: len(self.closed) >= rounds)
        assert len(self.closed) >= rounds

    def island(self, peer: PeerId) -> PairedIsland:
        found = self.world.nodes[peer].island
        assert isinstance(found, PairedIsland)
        return found


def partners(fact: RoundClosed) -> list[set[PeerId]]:
    """Who was drawn together in this round, by the function that the experiment draws with."""
    drawn = [m.peer for m in fact.body.members if m.trains]
    return [set(pair) for pair in in_pairs(fact.body.trained - 1, drawn)]


def test_each_sends_one_row_to_its_partner_and_nothing_else_and_pairs_change():
    """Five members, eight rounds: everybody is counted, the odd one sends nothing, all agree on one roll."""
    paired = Paired(5)
    paired.until(8)
    for fact in paired.closed:
        assert not fact.missing and not fact.partly and not fact.parts_missing and fact.body.attempt == 0
        pairs = [pair for pair in partners(fact) if len(pair) == 2]
        sent = sorted((a, b) for round, a, b in paired.rows if round == fact.body.round)
        assert sent == sorted((a, b) for pair in pairs for a in pair for b in pair - {a})
        assert len(pairs) == 2
    assert len({frozenset(map(frozenset, partners(fact))) for fact in paired.closed}) > 3
    island = paired.island(peer_name(0))
    roll = island.roll(island.head)
    assert [entry.peer for entry in roll.states] == sorted(paired.swarm.founders)
    assert len({entry.state for entry in roll.states}) == 5


def test_a_partner_that_dies_costs_the_other_no_row_and_the_rest_nothing():
    """Killed while it trains: its partner goes on alone, as soon as its silence is over; it has no part itself."""
    paired = Paired(4)
    paired.until(3)
    dead = peer_name(1)
    paired.world.crash(dead)
    paired.until(5)
    first, second = paired.closed[3:5]
    (alone,) = next(pair for pair in partners(paired.closed[2]) if dead in pair) - {dead}
    for fact in (first, second):
        assert set(fact.counted) == {*paired.swarm.founders} - {dead}
        assert fact.missing in ((dead,), ()) and fact.body.attempt == 0
    times = [fact.body.time_s for fact in paired.closed[2:5]]
    assert max(b - a for a, b in pairwise(times)) < 2 * WINDOW_S, "a silence, and no window on top of it"
    assert alone in first.counted


def test_a_partner_that_rests_takes_no_others_time():
    """Windows follow the pace; in every round one of four rests, and it is nobody's lateness that its part is."""
    paired = Paired(4, window_min_s=0.1)
    world, rests = paired.world, peer_name(3)

    def at(round: int) -> float:
        paired.until(round)
        node = world.nodes[rests]
        world.carry_out(node, rest(node.machine, 50, node.clock.local(world.now)))
        paired.until(round + 8)
        return paired.closed[-1].body.window_s

    assert at(3) < WINDOW_S / 4
    assert all(set(fact.counted) == {*paired.swarm.founders} - {rests} for fact in paired.closed[-4:])


def test_a_member_whose_word_is_lost_keeps_what_it_held():
    """Cut off for some rounds: who was drawn with it goes on, and it goes on from its own when it is back."""
    paired = Paired(4)
    paired.until(3)
    cut = peer_name(2)
    there = paired.closed[-1].body.round
    paired.world.run(1e3, stop=lambda: paired.swarm.head(cut) >= there)
    before = paired.island(cut).own
    paired.world.split({cut})
    paired.until(5)
    assert paired.island(cut).own == before
    paired.world.network.heal()
    paired.until(12)
    island = paired.island(cut)
    state = island.own
    while state != before:
        made = _own(island, state)
        assert made.of == cut, "every state since was made of its own"
        state = made.before
    assert cut in paired.closed[-1].counted


def _own(island: PairedIsland, name: Digest) -> OwnState:
    return msgspec.msgpack.decode(island.blobs[name], type=OwnState)


def test_a_newcomer_and_one_that_lost_its_disk_take_a_members_state_and_are_drawn():
    paired = Paired(3)
    paired.until(3)
    joiner, lost = peer_name(3), peer_name(2)
    paired.swarm.join(3, via=peer_name(0))
    paired.world.crash(lost)
    old = paired.island(lost).blobs
    old.clear()
    paired.world.at(paired.world.now + 1.0, lambda: paired.world.start(lost))
    paired.world.run(1e3, stop=lambda: bool(paired.closed) and {joiner, lost} <= set(paired.closed[-1].counted))
    for peer in (joiner, lost):
        assert peer in paired.closed[-1].counted and paired.caught_up[peer] >= 1
        island = paired.island(peer)
        roots = {_own(island, name).of for name in island.blobs if _is_own(island.blobs[name])}
        assert roots - {peer}, "it began from what another made"


def test_what_a_newcomer_made_becomes_its_own_though_it_died_and_took_anothers_meanwhile():
    """No roll names it when it dies, so its next life begins from what another holds; then the vertex names what it
    made before, of what it held then. One more sleeps, so that the round lasts that long."""
    paired = Paired(3)
    paired.until(2)
    world, joiner = paired.world, peer_name(3)
    paired.swarm.join(3, via=peer_name(0))
    island = paired.island(joiner)
    world.run(1e3, stop=lambda: bool(_made_by(island)))
    (first,) = _made_by(island)
    partner = next(peer for peer, _ in _own(island, first).rows if peer != joiner)
    world.sleep(next(peer for peer in paired.swarm.founders if peer != partner))
    world.run(world.now + 0.5)  # its answer is at the others
    world.crash(joiner)
    world.start(joiner)
    world.run(1e3, stop=lambda: island.own is not None)
    assert island.own not in (first, _own(island, first).before), "what it begins from is another's"
    world.run(1e3, stop=lambda: island.own == first)
    assert island.own == first and paired.closed[-1].body.state in island.blobs


def _made_by(island: PairedIsland) -> list[Digest]:
    own = [name for name, data in island.blobs.items() if _is_own(data)]
    return [name for name in own if _own(island, name).of == island.me]


def _is_own(data: bytes) -> bool:
    try:
        msgspec.msgpack.decode(data, type=OwnState)
    except msgspec.MsgspecError:
        return False
    return not is_roll(data)


def test_a_client_is_drawn_like_everybody_and_waits_for_nobody_that_it_cannot_hear():
    """Two clients that nothing passes between: drawn together each goes on alone, and rounds are as short."""
    paired = Paired(3)
    paired.world.network.split({peer_name(3)}, {peer_name(4)})
    paired.until(2)
    for index in (3, 4):
        paired.swarm.join(index, via=peer_name(0), role="client")
    paired.until(24)
    clients = {peer_name(3), peer_name(4)}
    last = [fact for fact in paired.closed if clients <= set(fact.counted)][2:]
    assert len(last) > 8 and any(clients in partners(fact) for fact in last)
    assert not any(fact.missing or fact.partly or fact.body.attempt for fact in last)
    times = [fact.body.time_s for fact in last]
    assert max(b - a for a, b in pairwise(times)) < WINDOW_S


def test_a_roll_that_a_vertex_names_is_the_same_at_everybody():
    paired = Paired(4)
    paired.until(4)
    state = paired.closed[-1].body.state
    rolls = {bytes(node.island.blobs[state]) for node in paired.swarm.honest if state in node.island.blobs}
    assert len(rolls) == 1 and roll_from_bytes(rolls.pop()).round == paired.closed[-1].body.trained
