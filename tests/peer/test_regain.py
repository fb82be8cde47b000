"""State sync: disk reads, downloads, and when a download starts again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Emit, Received, RunTask, Send, Start, TaskDone
from atoll.crypto.digest import manifest_of
from atoll.peer.events import StateDownloadBegan
from atoll.peer.membership.admission import AdmissionRequester, DesiredRole
from atoll.peer.round.context import answered_bytes
from atoll.peer.settings import RunSettings
from atoll.peer.sync.state_sync import OUTRUN_S, StateSync
from atoll.peer.tasks import AbandonedRoundSettlement, RestoreState, StateRestored
from atoll.policy.membership import RECENT
from atoll.protocol.transfer.download import BlobFetched
from atoll.protocol.transfer.tasks import BlobStoragePrepared, CloseBlob, PrepareBlobStorage
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.wire.codec import decode_statement
from atoll.wire.messages.history import ManifestRequest, ManifestResponse

ADA, BOB, CLEO = (PeerId(name) for name in ("ada", "bob", "cleo"))


def swarm_node():
    """Of a run of some rounds."""
    swarm = VirtualSwarm(5, SwarmKnobs(peers=3))
    swarm.world.run(1e3, stop=lambda: min(swarm.heads()) >= 3)
    return swarm.world.nodes[peer_name(0)]


def swarm_history():
    machine = swarm_node().machine
    return machine.run, machine.history


def asked(regain: StateSync, history, now: float) -> list[tuple[PeerId, Digest]]:
    """Source and blob of the next download's first request."""
    assert regain.fetch_from([ADA, BOB, CLEO], {ADA, BOB, CLEO}, history, now)
    effects = regain.handle(Start({}), history, now)
    sent = [e for e in effects if isinstance(e, Send)]
    return [(e.to, e.message.blob) for e in sent if isinstance(e.message, ManifestRequest)]


def begun() -> tuple[StateSync, object]:
    """Its disk was asked, and does not hold the state."""
    run, history = swarm_history()
    regain = StateSync(run, PeerId("eve"))
    (ask,) = regain.begin(history)
    assert isinstance(ask.work, RestoreState) and ask.work.state == history.head_body.state
    assert regain.restored(None) is None
    return regain, history


def test_a_start_is_told_what_the_newest_two_vertices_count_of_it():
    """By the root in its commitment; a life that abandons a round for a later state gets nothing."""
    run, history = swarm_history()
    me = peer_name(0)
    (ask,) = StateSync(run, me).begin(history)
    newest, before = ask.work.mine
    assert (newest.before, before.before) == (history.ids[history.head - 1], history.ids[history.head - 2])
    said = next(s for s in history.head_body.commits if s.signer == me)
    assert newest.root == decode_statement(said.body, me).root and all(newest.parts)
    (stranger,) = StateSync(run, PeerId("eve")).begin(history)
    assert [one.root for one in stranger.work.mine] == [None, None]
    regain = StateSync(run, me)
    regain.left = AbandonedRoundSettlement(None, late=False)
    (left,) = regain.begin(history)
    assert left.work.mine == ()


def test_a_state_that_is_not_on_disk_is_fetched_and_then_the_disk_is_asked_again():
    """What comes is checked by its name."""
    regain, history = begun()
    state, data = history.head_body.state, swarm_node().island.blobs[history.head_body.state]
    assert {blob for _, blob in asked(regain, history, 0.0)} == {state}
    (opening,) = regain.handle(Received(ADA, ManifestResponse(state, manifest_of(data))), history, 1.1)
    assert isinstance(opening.work, PrepareBlobStorage)
    here = TaskDone(opening.job, BlobStoragePrepared(frozenset({0})))
    (closing,) = [e for e in regain.handle(here, history, 1.2) if isinstance(e, RunTask)]
    assert isinstance(closing.work, CloseBlob)
    effects = regain.handle(TaskDone(closing.job, None), history, 1.3)
    assert any(isinstance(e, Emit) and isinstance(e.fact, BlobFetched) for e in effects)
    (again,) = [e.work for e in effects if isinstance(e, RunTask)]
    assert again == RestoreState(history.head, history.head_id, state)
    assert regain.restored(StateRestored()) == "blob" and not regain.busy


def test_a_fetch_begins_anew_once_a_newer_state_was_agreed_on():
    regain, history = begun()
    asked(regain, history, 0.0)
    assert not regain.is_outrun(history, 0.0)
    regain.round -= 1
    assert regain.is_outrun(history, 0.0)


def test_a_newcomer_is_outrun_again_and_again_but_not_before_its_members_had_time_to_answer():
    """Its history grows in leaps: the second state may be as old as the first, and the dead are silent about it."""
    regain, history = begun()
    for begun_at in (0.0, 0.5, 0.5 + OUTRUN_S):
        asked(regain, history, begun_at)
        regain.round -= 1
        if begun_at:
            assert not regain.is_outrun(history, begun_at + OUTRUN_S - 0.1)
        assert regain.is_outrun(history, begun_at + OUTRUN_S)


def test_whoever_is_behind_follows_rounds_while_their_parts_are_less_than_the_state():
    """Sizes are those that owners signed in the vertices. Most of the round in progress is here."""
    run, history = swarm_history()
    part_bytes = answered_bytes(history.bodies[history.head])
    assert part_bytes > 0
    regain, at = StateSync(run, PeerId("eve")), history.head - 3
    for size, shorter in ((0, False), (2 * part_bytes - 1, True), (2 * part_bytes, False)):
        regain.begin(history)
        regain.restored(StateRestored(size))
        assert regain.is_shorter(history, at) is shorter
        assert not regain.is_shorter(history, history.head - 1)


@pytest.mark.parametrize("state_bytes", [2_500_000, 100_000_000])
def test_after_a_cut_the_state_is_fetched_at_once_however_large(state_bytes: int):
    """Six rounds of a megabyte behind, and away in the record: the members dropped these rounds' parts. A large
    state was fetched too, but only after the parts had been asked for in vain."""
    swarm = VirtualSwarm(3, SwarmKnobs(peers=5, island=WorkerKnobs(state_bytes=state_bytes)))
    world, far = swarm.world, peer_name(4)
    began: list[float] = []
    world.watchers.append(
        lambda now, node, fact: (
            began.append(now) if isinstance(fact, StateDownloadBegan) and node.name == far else None
        )
    )
    world.run(60, stop=lambda: min(swarm.heads()) >= 2)
    world.network.split({far}, set(world.nodes) - {far})
    world.run(200, stop=lambda: max(swarm.heads()) >= swarm.head(far) + 6)
    healed = world.now
    world.network.heal()
    world.run(healed + 1)
    assert began
    world.run(healed + 20, stop=lambda: min(swarm.heads()) >= 12)
    assert min(swarm.heads()) >= 12


def test_who_joins_while_another_fetches_the_state_is_asked_by_it():
    """The first of two gets no manifest; it learns of the second by the vertex that admits it."""
    swarm = VirtualSwarm(1, SwarmKnobs(peers=2, run=RunSettings(open_to_all=True)))
    world = swarm.world
    world.run(2)
    first = swarm.join(2, via=peer_name(0))
    world.run(10, stop=lambda: world.nodes[first].machine is not None)
    peer = world.nodes[first].machine
    handle = peer.handle
    peer.handle = lambda event, now: (
        [] if isinstance(event, Received) and isinstance(event.message, ManifestResponse) else handle(event, now)
    )
    world.run(12)
    second = swarm.join(3, via=peer_name(0))

    def is_asked() -> bool:
        return peer.regain.fetch is not None and second in peer.regain.fetch.candidates

    world.run(30, stop=is_asked)
    assert is_asked()


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("begun", [False, True])
def test_a_source_that_is_killed_costs_a_fetch_no_patience(source: int, begun: bool):
    """One member comes back six rounds late and fetches the state; a source dies just before or just after it asks.
    The connection ends at once, but the record names the dead member for a round more."""
    swarm = VirtualSwarm(7, SwarmKnobs(peers=5))
    world, far, killed, told = swarm.world, peer_name(4), peer_name(source), {}

    def watch(now, node, fact) -> None:
        if node.name == far and isinstance(fact, StateDownloadBegan | BlobFetched):
            told.setdefault(type(fact), now)
        if begun and node.name == far and isinstance(fact, StateDownloadBegan):
            world.at(now + 0.001, lambda: world.kill(killed))

    world.watchers.append(watch)
    world.run(60, stop=lambda: min(swarm.heads()) >= 2)
    world.kill(far)
    world.run(300, stop=lambda: max(swarm.heads()) >= 9)
    began = world.now
    world.start(far)
    returned = world.nodes[far].machine
    world.run(began + 30, stop=lambda: returned.regain.restoring and len(returned.linked) == 4)
    if not begun:
        world.kill(killed)
    world.run(began + 60, stop=lambda: BlobFetched in told)
    assert told[BlobFetched] - told[StateDownloadBegan] < 1.0


def test_a_join_that_named_an_old_vertex_is_said_again_as_soon_as_the_history_is_here():
    """Vertices of a long absence come in pieces. A request from the middle of them is too old for the members."""
    _, history = swarm_history()
    signer = swarm_node().machine.notary.signer
    eve = AdmissionRequester(PeerId("eve"), signer)
    seen = SimpleNamespace(head=history.head, head_id=history.head_id, head_body=history.head_body)
    ask = lambda now: eve.word(DesiredRole(), seen, -2, now)  # noqa: E731
    assert ask(0.0) is not None and ask(0.1) is None
    seen.head += RECENT
    assert ask(0.2) is not None and ask(0.3) is None
