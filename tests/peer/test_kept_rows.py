"""Archived rows of closed rounds: which members keep them, who receives them, and what happens to lost ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from atoll.base.ids import PeerId
from atoll.base.machine import Emit, Fact, Payload, Received, RunTask, Start
from atoll.crypto.digest import digest
from atoll.features.attribution.leave_one_out import archived_rows, gather_rows, question_of
from atoll.peer.events import AttributionRowsGathered, ProtocolFault, RoundAttemptFailed
from atoll.peer.peer import Peer
from atoll.peer.tasks import LeaveOneOut, RetainArchivedRows
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.world import VirtualComputer
from atoll.wire.messages.history import VerticesResponse
from atoll.wire.messages.round import RowRequest, RowResponse, VoteMessage

ADA, BOB, CID, DAN = map(peer_name, range(4))
KEPT = 6  # rounds


def keeper(make: Callable[[], Peer]) -> Peer:
    peer = make()
    peer.verifiers.archived_rounds = KEPT
    return peer


def swarm_of(keeping: tuple[PeerId, ...] = (ADA, BOB, CID, DAN)) -> VirtualSwarm:
    """Four that have closed nine rounds."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=4))
    for name in keeping:
        node = swarm.world.nodes[name]
        node.make = partial(keeper, node.make)
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 8)
    return swarm


def gathered(swarm: VirtualSwarm, round: int) -> tuple[AttributionRowsGathered, LeaveOneOut]:
    """Ada asks about this round; the world goes on until she has its rows, or gives up."""
    world, told, ada = swarm.world, list[AttributionRowsGathered](), swarm.world.nodes[ADA]
    world.watchers.append(
        lambda now, node, fact: told.append(fact) if isinstance(fact, AttributionRowsGathered) else None
    )
    world.carry_out(ada, gather_rows(ada.machine, round))
    world.run(world.now + 60, stop=lambda: bool(told))
    return told[0], question_of(ada.machine, round).work(archived_rows(ada.machine).get(round, {}))


def test_every_row_of_a_round_comes_from_who_kept_it_and_is_what_its_author_sent():
    """Ada owns one part of four and has one update: the other nine rows come from the others."""
    swarm = swarm_of()
    round = swarm.head(ADA) - 2
    found, work = gathered(swarm, round)
    assert found.of == round and not found.gone and found.came == 9
    assert [part is not None and len(part.rows) for part in work.parts] == [4] * 4
    here, nodes = archived_rows(swarm.world.nodes[ADA].machine)[round], swarm.world.nodes
    assert all(nodes[peer].island.encoded[round][part] == lies.digest for (part, peer), lies in here.items())


def test_rows_whose_owner_is_gone_come_from_their_authors_and_else_are_said_to_be_gone():
    """Dan dies: what he sent lies with owners, what he combined with authors, his row of his own part nowhere."""
    swarm = swarm_of()
    round = swarm.head(ADA) - 1
    swarm.world.crash(DAN)
    found, work = gathered(swarm, round)
    ((part, author),) = found.gone
    assert author == DAN and [n for n, rows in enumerate(work.parts) if rows is None] == [part]


def test_a_silent_owner_of_more_rows_than_are_asked_for_at_once_holds_up_nothing(monkeypatch):
    """One row at a time is asked of each source, and one member no longer answers such words."""
    monkeypatch.setattr("atoll.features.attribution.row_archive.AT_ONCE", 1)
    swarm = swarm_of()
    archived_rows(swarm.world.nodes[DAN].machine).clear()
    found, _ = gathered(swarm, swarm.head(ADA) - 1)
    ((_, author),) = found.gone
    assert author == DAN and found.came == 8


def test_who_keeps_none_still_asks_and_what_nobody_kept_is_named():
    """Only Bob keeps rows: his part, and his own in all others, are all that Ada can have."""
    swarm = swarm_of((BOB,))
    found, work = gathered(swarm, swarm.head(ADA) - 1)
    assert found.came == 4 + 3 and len(found.gone) == 9
    assert sum(rows is not None for rows in work.parts) == 1


def test_rows_that_are_forgotten_here_are_said_to_be_gone_at_once():
    """All keep equally many rounds: peers that dropped these rows need not ask for twelve seconds."""
    swarm = swarm_of()
    asked_at, node = swarm.world.now, swarm.world.nodes[ADA]
    effects = gather_rows(node.machine, min(archived_rows(node.machine)) - 1)
    (told,) = (e.fact for e in effects if isinstance(e, Emit))
    assert isinstance(told, AttributionRowsGathered) and len(told.gone) == 16 and len(effects) == 1
    assert swarm.world.now == asked_at and gathered(swarm, max(archived_rows(node.machine)))[0].came == 9


def test_a_round_whose_vertex_is_out_of_reach_is_refused_with_those_that_are_not():
    """Memory holds the newest vertices, and genesis for ever, which says nothing of what lies between."""
    machine = swarm_of().world.nodes[ADA].machine
    history = machine.history
    for round in range(4):
        del history.bodies[round]
    for beyond in (-1, 2, 4, history.head + 1):
        with pytest.raises(ValueError, match=f"history rounds 5 to {history.head} "):
            gather_rows(machine, beyond)


def test_a_row_that_nobody_committed_to_is_a_fault_and_one_unasked_for_is_nothing():
    """Dan shows other bytes for Cid's row than Cid's commitment in the vertex names."""
    swarm = swarm_of((DAN,))
    machine, now = swarm.world.nodes[ADA].machine, swarm.world.now
    round = swarm.head(ADA) - 1
    body = machine.history.bodies[round]
    signed = next(s for s in body.commits if s.signer == CID)
    forged = Received(DAN, RowResponse(round, 0, "", 1, (), signed), Payload(digest(b"x"), 1, b"x"))
    assert not any(
        isinstance(e, RunTask | Emit) for e in machine.handle(forged, now)
    )  # he is shown where the run is
    gather_rows(machine, round)
    (said,) = machine.handle(forged, now)
    assert isinstance(said, Emit) and isinstance(said.fact, ProtocolFault) and said.fact.peer == DAN


def test_rows_are_forgotten_with_their_rounds_and_outlive_a_restart():
    """Those of the newest six rounds are named in what the disk keeps; a new life holds the very same blobs."""
    swarm = swarm_of()
    node = swarm.world.nodes[BOB]
    swarm.world.run(swarm.world.now + 1e3, stop=lambda: swarm.head(BOB) >= 12)
    kept = {int(name[5:]) for name in node.kept if name.startswith("rows/")}
    here = archived_rows(node.machine)
    assert kept == set(here) and KEPT - 1 <= len(kept) <= KEPT and max(kept) >= swarm.head(BOB) - 1
    blobs = {lies.blob for rows in here.values() for lies in rows.values()}
    assert blobs <= set(node.island.rows)
    again = node.make()
    asks = [e.work for e in again.handle(Start(node.kept), 1.0) if isinstance(e, RunTask)]
    assert archived_rows(again) == here
    assert [set(work.blobs) for work in asks if isinstance(work, RetainArchivedRows)] == [blobs]


def test_a_round_that_was_agreed_in_an_earlier_attempt_than_mine_leaves_my_rows():
    """Dan hears no vote and no vertex of a round before its first attempt failed for him. It counted his update."""
    swarm = swarm_of()
    world, missed, failed = swarm.world, swarm.head(DAN) + 1, list[RoundAttemptFailed]()
    arrivals = world.network.arrivals

    def deaf(now: float, to: PeerId, event: Received):
        said, whens = arrivals(now, to, event)
        return said, [] if to == DAN and not failed and isinstance(
            event.message, VoteMessage | VerticesResponse
        ) else whens

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        failed.extend([fact] if node.name == DAN and isinstance(fact, RoundAttemptFailed) else [])

    world.network.arrivals = deaf
    world.watchers.append(watch)
    world.run(world.now + 1e3, stop=lambda: swarm.head(DAN) >= missed)
    machine = world.nodes[DAN].machine
    assert [fact.round for fact in failed] == [missed] and machine.history.bodies[missed].attempt == 0
    world.run(world.now + 1.0)
    assert {part for part, peer in archived_rows(machine)[missed] if peer == DAN} == {0, 1, 2, 3}


def test_one_row_is_shown_to_one_member_four_times_and_to_strangers_never():
    swarm = swarm_of()
    node, now = swarm.world.nodes[BOB], swarm.world.now
    round = swarm.head(BOB) - 1
    part = next(n for n, peer in archived_rows(node.machine)[round] if peer == BOB)
    wish = RowRequest(round, 0, "", part, BOB)

    def shown(to: PeerId) -> int:
        asks = [e for e in node.machine.handle(Received(to, wish), now) if isinstance(e, RunTask)]
        again = [e for e in node.machine.handle(Received(to, wish), now) if isinstance(e, RunTask)]
        assert not asks or not again  # while one is read, a repeated request gets one response
        swarm.world.carry_out(node, list(asks))
        swarm.world.run(swarm.world.now + 0.2)
        return len(asks)

    assert [shown(ADA) for _ in range(6)] == [1, 1, 1, 1, 0, 0]
    assert shown(PeerId("stranger")) == 0
    assert not any(isinstance(e, RunTask) for e in node.machine.handle(Received(CID, replace(wish, part=99)), now))
