"""Slow links and slow members: what is on its way is waited for, what is not coming is not waited for, for ever."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace as changed

from atoll.base.limits import MIB
from atoll.base.machine import Broadcast, Effect, Send
from atoll.peer.events import AgreedStateMissing, RoundClosed, StateDownloadBegan
from atoll.peer.settings import PIECES_BY_SIZE, RunSettings
from atoll.peer.tasks import AdvanceState, RestoreState
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.plan import RoundSettings
from atoll.protocol.agreement.events import BodyDecided
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.wire.messages.round import (
    PartResponse,
    PartResult,
    ProposalMessage,
    RowContribution,
    RowResponse,
    UpdateCommitmentMessage,
)

SLOW = peer_name(0)
UPDATE_BYTES, RATE = 16_000_000, 1e6  # three quarters of the answers: 12 s on this link, twice the patience


def test_whoever_gets_the_parts_late_closes_the_round_with_them():
    """Once it gave up after six seconds, while they were arriving, and fetched a whole state on the same link."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=4, island=WorkerKnobs(update_bytes=UPDATE_BYTES)))
    swarm.world.network.downlink_bytes_s[SLOW] = RATE
    closed: list[RoundClosed] = []
    gave_up: list[str] = []
    sent_again = 0

    def watch(_now, node, fact):
        if isinstance(fact, RoundClosed) and node.name == SLOW:
            closed.append(fact)
        if isinstance(fact, AgreedStateMissing):
            gave_up.append(f"{node.name}: {fact.why}")

    swarm.world.watchers.append(watch)
    swarm.world.run(0.5)
    handle = swarm.world.nodes[SLOW].machine.handle

    def counted(event, now):
        nonlocal sent_again
        sent_again += isinstance(getattr(event, "message", None), PartResponse)
        return handle(event, now)

    swarm.world.nodes[SLOW].machine.handle = counted
    swarm.world.run(120, stop=lambda: len(closed) >= 1 or bool(gave_up))
    assert not gave_up
    assert closed[0].round == 0
    assert sent_again <= 3, "each of the three parts of others may come twice, not more often"


def test_a_newcomer_on_a_slow_link_gets_each_part_once_and_no_round_before_it_can_follow():
    """Results of rounds that it could not use yet once took most of its link, and each part came three times."""
    terms = RoundSettings(inner_steps=1, first_train_s=10)
    run = RunSettings(open_to_all=True, round=terms, update_bytes=64 * MIB, pieces=PIECES_BY_SIZE)
    swarm = VirtualSwarm(
        1, SwarmKnobs(2, NetworkKnobs(0.002, 0.004), WorkerKnobs(2.0, update_bytes=8_000_000), run=run)
    )
    ada, far = peer_name(0), peer_name(3)
    came, gave_up, unasked, committed = list[bytes](), list[AgreedStateMissing](), list[int](), False
    swarm.world.watchers.append(
        lambda _now, _node, fact: gave_up.append(fact) if isinstance(fact, AgreedStateMissing) else None
    )
    swarm.world.run(40)
    swarm.world.network.downlink_bytes_s[far] = swarm.world.network.uplink_bytes_s[far] = 5e6
    swarm.join(3, via=ada)
    swarm.world.run(swarm.world.now + 0.02)
    handle = swarm.world.nodes[far].machine.handle

    def counted(event, now):
        nonlocal committed
        message, payload = getattr(event, "message", None), getattr(event, "payload", None)
        if isinstance(message, PartResponse):
            came.append(message.digest)
        if isinstance(message, PartResult) and payload is not None and not committed:
            unasked.append(payload.size_bytes)
        effects = handle(event, now)
        committed |= any(isinstance(getattr(e, "message", None), UpdateCommitmentMessage) for e in effects)
        return effects

    swarm.world.nodes[far].machine.handle = counted
    swarm.world.run(swarm.world.now + 60)
    assert not gave_up and not unasked
    assert swarm.head(far) >= swarm.head(ada) - 1
    assert len(set(came)) >= 4 and len(came) <= 1.25 * len(set(came))


def test_a_part_that_is_lost_on_a_slow_link_is_requested_again():
    """All others had come, and after six seconds the newcomer fetched a whole state instead."""
    run = RunSettings(
        open_to_all=True, round=RoundSettings(20, first_train_s=60), update_bytes=80 * MIB, pieces=PIECES_BY_SIZE
    )
    swarm = VirtualSwarm(
        1, SwarmKnobs(2, NetworkKnobs(0.002, 0.004), WorkerKnobs(1.0, update_bytes=20_000_000), run=run)
    )
    far, world = peer_name(3), swarm.world
    gave_up, lost = list[str](), set[int]()
    world.watchers.append(
        lambda _now, _node, fact: gave_up.append(fact.why) if isinstance(fact, AgreedStateMissing) else None
    )
    world.run(200)
    world.network.downlink_bytes_s[far] = world.network.uplink_bytes_s[far] = 2e6
    swarm.join(3, via=peer_name(0))
    node = world.nodes[far]
    takes_s, began = node.island.takes_s, world.now
    node.island.takes_s = lambda work: 110.0 if isinstance(work, RestoreState) else takes_s(work)
    world.run(began + 0.02)
    handle = node.machine.handle

    def lossy(event, now):
        """Without one part of each round, the first time that it comes."""
        message = getattr(event, "message", None)
        if isinstance(message, PartResponse) and message.round not in lost and now > began + 150:
            lost.add(message.round)
            return []
        return handle(event, now)

    node.machine.handle = lossy
    world.run(began + 600)
    assert len(lost) > 5 and not gave_up


def test_no_round_waits_for_a_newcomer_that_is_still_behind():
    """It has a state of five rounds ago, and needs 16 s for the parts of each. It once said that it was ready."""
    run = RunSettings(
        open_to_all=True, round=RoundSettings(20, first_train_s=60), update_bytes=80 * MIB, pieces=PIECES_BY_SIZE
    )
    swarm = VirtualSwarm(
        1, SwarmKnobs(2, NetworkKnobs(0.002, 0.004), WorkerKnobs(1.0, update_bytes=20_000_000), run=run)
    )
    ada, far, world = peer_name(0), peer_name(3), swarm.world
    closed: list[tuple[float, str]] = []  # time, and the newcomer's standing before it

    def watch(now: float, node, fact) -> None:
        if isinstance(fact, RoundClosed) and node.name == ada:
            history = node.machine.history
            standing = next((m.standing for m in history.bodies[fact.round - 1].members if m.peer == far), "")
            closed.append((now, "counted" if far in fact.counted else standing))

    world.watchers.append(watch)
    world.run(200)
    came = world.now
    world.network.downlink_bytes_s[far] = world.network.uplink_bytes_s[far] = 1.25e6
    swarm.join(3, via=ada)
    island = world.nodes[far].island
    takes_s = island.takes_s
    island.takes_s = lambda work: 110.0 if isinstance(work, RestoreState) else takes_s(work)
    world.run(came + 1500, stop=lambda: closed[-1][1] == "counted")
    took = [(end - begin, standing) for (begin, _), (end, standing) in pairwise(closed)]
    usual_s = median(s for s, standing in took if not standing)
    behind = [s for s, standing in took if standing == "observer"]
    assert len(behind) > 5 and max(behind) < 1.15 * usual_s
    assert [standing for _, standing in took[-3:]] == ["observer", "new", "counted"]


def newcomer_behind(waits: dict[type, float]) -> tuple[VirtualSwarm, Any]:
    """A swarm and the node of a member that comes in the middle; its link needs 16 s for the parts of a round.

    `waits`: seconds of its tasks.
    """
    run = RunSettings(
        open_to_all=True, round=RoundSettings(20, first_train_s=60), update_bytes=80 * MIB, pieces=PIECES_BY_SIZE
    )
    island = WorkerKnobs(1.0, update_bytes=20_000_000, state_bytes=160_000_000)
    swarm = VirtualSwarm(1, SwarmKnobs(2, NetworkKnobs(0.002, 0.004), island, run=run))
    far, world = peer_name(3), swarm.world
    world.run(200)
    world.network.downlink_bytes_s[far] = world.network.uplink_bytes_s[far] = 1.25e6
    swarm.join(3, via=peer_name(0))
    node = world.nodes[far]
    takes_s = node.island.takes_s
    node.island.takes_s = lambda work: waits.get(type(work)) or takes_s(work)
    world.run(world.now + 0.02)
    return swarm, node


def test_a_newcomer_gets_the_parts_of_the_next_round_while_it_makes_the_state_of_this_one():
    """Its link needs 16 s for the parts of a round, its disk 5 s for a state: it once followed in 21 s, not 16."""
    swarm, node = newcomer_behind({RestoreState: 110.0, AdvanceState: 5.0})
    closed, came = list[float](), list[bytes]()
    swarm.world.watchers.append(
        lambda now, at, fact: closed.append(now) if isinstance(fact, RoundClosed) and at is node else None
    )
    handle = node.machine.handle

    def counted(event, now):
        if isinstance(message := getattr(event, "message", None), PartResponse):
            came.append(message.digest)
        return handle(event, now)

    node.machine.handle = counted
    swarm.world.run(swarm.world.now + 440)
    followed = [end - begin for begin, end in pairwise(closed)]
    assert len(followed) > 10 and median(followed) < 17
    assert len(came) == len(set(came)) > 300


def test_a_newcomer_that_fetches_a_newer_state_drops_the_parts_that_it_requested_ahead():
    """Its disk stalls over one state. The parts once stayed in memory, and their pace spoiled later waits."""
    waits = {RestoreState: 110.0, AdvanceState: 5.0}
    (swarm, node), fetched = newcomer_behind(waits), list[StateDownloadBegan]()
    swarm.world.run(swarm.world.now + 200)
    swarm.world.watchers.append(
        lambda _now, at, fact: fetched.append(fact) if isinstance(fact, StateDownloadBegan) and at is node else None
    )
    waits[AdvanceState] = 1000.0
    ahead = node.machine.participation.prefetch
    swarm.world.run(swarm.world.now + 60)
    assert ahead.parts.here and not fetched
    swarm.world.run(swarm.world.now + 900, stop=lambda: bool(fetched))
    assert fetched and not ahead.parts.here and not ahead.parts.coming


NO_CLOCK = RoundSettings(inner_steps=1, first_train_s=1e8, train_max_s=1e8, owner_s=60)  # as a group's


def closing_times(swarm: VirtualSwarm, peers: set[str], within_s: float) -> list[float]:
    """When these peers close round 0."""
    times: list[float] = []
    swarm.world.watchers.append(
        lambda now, node, fact: (
            times.append(now) if isinstance(fact, RoundClosed) and fact.round == 0 and node.name in peers else None
        )
    )
    swarm.world.run(within_s, stop=lambda: len(times) == len(peers))
    return times


def first_proposer(swarm: VirtualSwarm) -> str:
    swarm.world.run(0.03)
    return swarm.world.nodes[peer_name(0)].machine.round.agreement.proposer(0)


@pytest.mark.parametrize(("peers", "dead"), [(3, 1), (5, 2), (5, 1)])
def test_a_proposer_slower_than_the_others_beside_a_tolerated_death_holds_nobody_up(peers: int, dead: int):
    """Voters that gave its view up may not vote in it any more; once the rest waited in it forever."""
    knobs = SwarmKnobs(peers, island=WorkerKnobs(step_s=0.5), run=RunSettings(open_to_all=True, round=NO_CLOCK))
    swarm = VirtualSwarm(1, knobs)
    slow = first_proposer(swarm)
    island = swarm.world.nodes[slow].island
    takes_s = island.takes_s
    island.takes_s = lambda work: takes_s(work) + 5.0 * isinstance(work, AdvanceState)
    others = [p for p in swarm.founders if p != slow]
    for peer in others[:dead]:
        swarm.world.crash(peer)
    assert len(closing_times(swarm, {slow, *others[dead:]}, 15)) == peers - dead


def test_proposers_that_are_heard_and_never_propose_cost_their_views_and_no_more():
    """As many as are tolerated, four of nine. The time of a view doubles; it does not run away."""
    knobs = SwarmKnobs(9, island=WorkerKnobs(step_s=0.5), run=RunSettings(open_to_all=True, round=NO_CLOCK))
    swarm = VirtualSwarm(1, knobs)
    first_proposer(swarm)
    agreement = swarm.world.nodes[peer_name(0)].machine.round.agreement
    for view in range(4):
        node = swarm.world.nodes[agreement.proposer(view)]
        node.machine.handle = without_proposals(node.machine.handle)
    assert len(closing_times(swarm, set(swarm.founders), 100)) == 9


def without_proposals(handle, until_s: float = float("inf")):
    """What a peer sends, without its proposals up to a time."""

    def silenced(event, now):
        effects = handle(event, now)
        return [
            e
            for e in effects
            if now >= until_s or not (isinstance(e, Send | Broadcast) and isinstance(e.message, ProposalMessage))
        ]

    return silenced


def test_a_group_whose_views_are_all_used_up_shares_again():
    """No proposal arrives for ten minutes: without a clock, one peer has to begin the next attempt."""
    knobs = SwarmKnobs(3, island=WorkerKnobs(step_s=0.5), run=RunSettings(open_to_all=True, round=NO_CLOCK))
    swarm = VirtualSwarm(1, knobs)
    first_proposer(swarm)
    for node in swarm.world.nodes.values():
        node.machine.handle = without_proposals(node.machine.handle, until_s=600)
    times = closing_times(swarm, set(swarm.founders), 3000)
    assert len(times) == 3 and min(times) >= 600


def test_whoever_has_no_vote_yet_waits_where_all_voters_are_gone():
    """The founder of a group dies while a newcomer joins.

    Once the newcomer passed view after view, and attempt after attempt, within one event: nothing stopped it, since
    no turn was ever its own.
    """
    settings = RunSettings(open_to_all=True, round=NO_CLOCK)
    swarm = VirtualSwarm(
        1, SwarmKnobs(1, island=WorkerKnobs(step_s=1e7), run=settings)
    )  # nor has a later round a clock
    world, founder = swarm.world, peer_name(0)
    world.nodes[founder].island.takes_s = lambda work: 0.5
    world.run(1)
    newcomer = world.nodes[swarm.join(1, via=founder)]

    def observes() -> bool:
        return newcomer.machine.round is not None and not newcomer.machine.round.plan.has_clock

    world.run(20, stop=observes)
    world.crash(founder)
    world.run(world.now + 20)
    assert newcomer.machine.heartbeat.is_gone(founder) and 0 < newcomer.machine.round.attempt <= 20


def test_arithmetic_that_takes_longer_than_the_exchange_uses_up_no_views():
    """A large model on slow machines: they are still computing the proposal's state, so no voter gives it up."""
    knobs = SwarmKnobs(4, island=WorkerKnobs(step_s=0.5), run=RunSettings(open_to_all=True, round=NO_CLOCK))
    swarm = VirtualSwarm(1, knobs)
    proposer = first_proposer(swarm)
    for name, node in swarm.world.nodes.items():
        takes_s, more_s = node.island.takes_s, 5.0 if name == proposer else 60.0
        node.island.takes_s = lambda work, t=takes_s, m=more_s: t(work) + m * isinstance(work, AdvanceState)
    views: list[int] = []
    swarm.world.watchers.append(
        lambda _now, _node, fact: views.append(fact.view) if isinstance(fact, BodyDecided) and not views else None
    )
    assert max(closing_times(swarm, set(swarm.founders), 200)) < 80
    assert views == [0]


def test_an_exchange_longer_than_its_windows_has_the_time_that_training_left():
    """30 MB over 1 MB/s, 200 s of training, windows of 6 s: nothing is cut off, no byte is sent for nothing."""
    settings = RoundSettings(inner_steps=20, first_train_s=312)
    links = NetworkKnobs(uplink_bytes_s=1e6, downlink_bytes_s=1e6)
    island = WorkerKnobs(step_s=10, update_bytes=30_000_000)
    swarm = VirtualSwarm(1, SwarmKnobs(4, links, island, run=RunSettings(open_to_all=True, round=settings)))
    closed: list[RoundClosed] = []
    swarm.world.watchers.append(
        lambda _now, _node, fact: closed.append(fact) if isinstance(fact, RoundClosed) else None
    )
    swarm.world.run(2000, stop=lambda: min(swarm.heads()) >= 1)
    assert {fact.body.attempt for fact in closed} == {0}
    assert all(len(fact.counted) == 4 and not fact.partly for fact in closed)
    least = 2 * 3 * 30e6  # all parts there and back
    assert swarm.world.network.bytes <= 1.05 * 2 * least


TRAINING_S = 100.0  # of the next round, too, which has a clock and so does not disturb
LIARS = changed(NO_CLOCK, owner_s=2, quorum="two-thirds")  # five windows are ten seconds
LYING = [{"witnessed": True, "statistic": "trimmed_mean"}, {"openings": SumCheckTerms(0.03, 16_384)}]


def group_with_liars(settings: dict[str, object], update_s: float, rate: float, **more) -> VirtualSwarm:
    """Four members, one of which may lie, on links that need this long for an update."""
    run = RunSettings(open_to_all=True, round=LIARS, tolerance=0.333, **settings)
    links = NetworkKnobs(uplink_bytes_s=rate, downlink_bytes_s=rate)
    island = WorkerKnobs(TRAINING_S, step_jitter=0.0, update_bytes=round(update_s * rate))
    return VirtualSwarm(1, SwarmKnobs(4, links, island, run=run), **more)


def counted_in_round_0(swarm: VirtualSwarm, peers: set[str], within_s: float) -> tuple[set[tuple[str, ...]], float]:
    """Members that count in it everywhere, and how long the last of these peers shared and agreed."""
    closed: list[RoundClosed] = []
    swarm.world.watchers.append(
        lambda _now, node, fact: (
            closed.append(fact)
            if isinstance(fact, RoundClosed) and fact.round == 0 and node.name in peers
            else None
        )
    )
    swarm.world.run(within_s, stop=lambda: len(closed) == len(peers))
    assert len(closed) == len(peers) and not any(fact.partly or fact.parts_missing for fact in closed)
    return {fact.counted for fact in closed}, swarm.world.now - TRAINING_S


@pytest.mark.parametrize("settings", LYING, ids=["watched", "opened"])
def test_where_members_may_lie_slow_links_have_time_for_a_large_update_too(settings: dict[str, object]):
    """Ten megabytes at 2 Mbit/s take half a minute.

    Once the mean held only members that had sent within seven seconds.
    """
    swarm = group_with_liars(settings, update_s=40, rate=250_000)
    counted, _ = counted_in_round_0(swarm, set(swarm.founders), 600)
    assert counted == {tuple(sorted(swarm.founders))}


@pytest.mark.parametrize("settings", LYING, ids=["watched", "opened"])
def test_a_liar_holds_the_others_up_by_a_few_times_what_they_took_and_no_longer(settings: dict[str, object]):
    """It is heard, commits and sends no row and no answer. Its bytes alone would let it take twenty minutes."""

    def sends_nothing(_villain: ByzantineMember, send: Send) -> list[Effect]:
        return [] if isinstance(send.message, RowContribution | RowResponse | PartResult) else [send]

    swarm = group_with_liars(settings, update_s=20, rate=5e6, villains={1: villain(sends_nothing)})
    honest = set(swarm.founders) - {peer_name(1)}
    counted, took_s = counted_in_round_0(swarm, honest, 3600)
    assert counted == {tuple(sorted(honest))}
    assert 20 < took_s < 200
