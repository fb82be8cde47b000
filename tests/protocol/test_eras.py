"""Identities sign the history where eras end: nobody waits for it, nobody is left without, nobody can sneak in.

Swarms are virtual; one test has real keys. An era is looked up as it lies on each peer's disk.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.base.machine import Broadcast, Effect, Emit, Event, Persist, Received, RunTask, Send, Start, TaskDone
from atoll.capabilities import CAPABILITIES
from atoll.cli.verify import votes_alone
from atoll.crypto.digest import digest
from atoll.peer import operator_commands
from atoll.peer.events import ProtocolFault
from atoll.peer.membership.admission import DesiredRole
from atoll.peer.peer import Peer
from atoll.peer.verify.chain import HistoryVerificationReport, StoredHistory, verify_history
from atoll.protocol.history.era_signatures import (
    DIGEST_SCHEME,
    OVERDUE_LEAST,
    OVERDUE_TOLD_S,
    RECOVERY,
    EraEndSignatures,
    EraSignatureTracker,
    EraStart,
    HistoryLacksEraSignatures,
    ReadEraSignatures,
    UnsignedEra,
    decode_era,
    encode_era,
    era_bytes,
    era_ends,
)
from atoll.runtime.event_log import RunStatus, fact_to_entry
from atoll.runtime.storage.store import PeerStore, run_store_task
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.signatures import RealKeys, VirtualSignatureVerifier, sign_as_identity
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_body, encode, vertex_id
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.history import (
    EraSignature,
    EraSignatures,
    EraSignaturesRequest,
    VerticesRequest,
    VerticesResponse,
)
from atoll.wire.messages.statements import QuorumCertificate, Vote
from atoll.wire.messages.vertex import Vertex, VertexBody

EVERY = 5


def swarm_of(
    peers: int = 4, seed: int = 3, keys: RealKeys | None = None, mute: tuple[int, ...] = ()
) -> VirtualSwarm:
    """Founders that sign every five rounds; those in `mute` have lost their long-lived keys."""
    knobs = SwarmKnobs(peers=peers)
    knobs.run = replace(knobs.run, era_rounds=EVERY, recovery=peer_name(0).encode())

    def without_keys(run, signer, keys, wish, genesis, bootstrap):
        return Peer(run, signer, keys.verifier, wish, genesis, bootstrap, capabilities=CAPABILITIES)

    return VirtualSwarm(seed, knobs, dict.fromkeys(mute, without_keys), keys)


def eras_of(swarm: VirtualSwarm, index: int, kind: str = "sealed") -> dict[int, EraEndSignatures]:
    kept = swarm.world.nodes[swarm.keys.name(index)].kept
    found = {n: decode_era(v) for n, v in kept.items() if n.startswith(f"{kind}/")}
    assert None not in found.values()
    return {int(name.split("/")[1]): era for name, era in found.items() if era is not None}


def until_round(swarm: VirtualSwarm, round: int) -> None:
    swarm.world.run(swarm.world.now + 600, stop=lambda: min(swarm.heads()) >= round)
    assert min(swarm.heads()) >= round


@pytest.mark.parametrize("keys", [None, RealKeys(7)], ids=["virtual", "real"])
def test_every_era_is_signed_by_all_who_are_there_and_lies_on_every_disk(keys: RealKeys | None):
    swarm = swarm_of(keys=keys)
    until_round(swarm, 11)
    members = {swarm.keys.name(i) for i in range(4)}
    for index in range(4):
        eras = eras_of(swarm, index)
        assert list(eras) == [4, 9] and not eras_of(swarm, index, "era")
        assert all(set(e.signed_by) == members == set(e.signers) for e in eras.values())


def test_a_hook_beside_the_signatures_hears_of_each_era_once_and_of_the_same_at_every_member():
    """A recorder at each member; what it returns is carried out like any effect, and eras are signed as before."""
    swarm, heard = swarm_of(), dict[PeerId, list[UnsignedEra]]()
    swarm.world.run(0.1)

    def listen(name: PeerId, chain: EraSignatureTracker) -> None:
        def record(closed: UnsignedEra) -> list[Effect]:
            heard.setdefault(name, []).append(closed)
            return [Persist(f"attested/{closed.name}", closed.digest)]

        chain.hooks.append(record)

    for node in swarm.honest:
        listen(node.name, node.machine.eras)
    until_round(swarm, 11)
    ids = swarm.honest[0].machine.history.ids
    ends = [("era/4", ids[4]), ("era/9", ids[9])]
    assert [[(c.name, c.digest) for c in closed] for closed in heard.values()] == [ends] * 4
    assert {c.scheme for closed in heard.values() for c in closed} == {DIGEST_SCHEME}
    assert all(node.kept["attested/era/9"] == ids[9] for node in swarm.honest)
    assert all(list(eras_of(swarm, index)) == [4, 9] for index in range(4))


def test_a_newcomer_gets_the_signatures_of_eras_that_others_hold_only_on_disk():
    """Nine eras are over, four are in memory: it comes to hold all nine with their quorums, and signs the next."""
    swarm = swarm_of()
    until_round(swarm, 45)
    late = swarm.join(4, peer_name(0))
    swarm.world.run(swarm.world.now + 600, stop=lambda: len(eras_of(swarm, 4)) >= 12)
    eras = eras_of(swarm, 4)
    assert set(range(4, 45, EVERY)) <= set(eras)
    assert all(len(e.signatures) >= 3 for e in eras.values())
    assert late in eras[max(eras)].signed_by


def test_rounds_go_on_without_signatures_and_who_comes_back_signs_what_it_missed():
    """Two of four have lost their keys, three are needed: ten eras pass. One finds its keys: all are sealed."""
    swarm = swarm_of(mute=(2, 3))
    until_round(swarm, 50)
    lacking = eras_of(swarm, 0, "era")
    assert list(lacking) == list(range(4, 50, EVERY)) and not eras_of(swarm, 0)
    assert {e.signed_by for e in lacking.values()} == {(peer_name(0), peer_name(1))}
    node = swarm.world.nodes[peer_name(2)]
    swarm.world.crash(node.name)
    node.make = lambda make=node.make: _with_keys(make(), swarm)
    swarm.world.start(node.name)
    swarm.world.run(swarm.world.now + 60)
    for index in (0, 1, 2, 3):
        assert set(range(4, 50, EVERY)) <= set(eras_of(swarm, index)), index
        assert peer_name(2) in eras_of(swarm, index)[4].signed_by


def _with_keys(peer: Peer, swarm: VirtualSwarm) -> Peer:
    peer.vouch = swarm.keys.vouch(peer.me)
    return peer


def test_signatures_of_eras_that_were_lost_on_the_way_are_asked_for():
    """Nobody pushes what it signed: every disk has every era all the same, some seconds later."""
    swarm = swarm_of()
    for node in swarm.world.nodes.values():
        make = node.make
        node.make = lambda make=make: _says_nothing(make())
    until_round(swarm, 11)
    swarm.world.run(swarm.world.now + 60)
    assert all({4, 9} <= set(eras_of(swarm, index)) for index in range(4))


def _says_nothing(peer: Peer) -> Peer:
    """Only answers leave it."""
    react = peer.handle

    def handle(event: Event, now: float) -> list[Effect]:
        effects = react(event, now)
        asked = isinstance(event, Received) and isinstance(event.message, EraSignaturesRequest)
        return [
            e
            for e in effects
            if asked or not (isinstance(e, Send | Broadcast) and isinstance(e.message, EraSignatures))
        ]

    peer.handle = handle
    return peer


def test_an_era_that_the_last_crash_tore_off_is_ended_and_signed_at_start():
    """The vertex of round 9 is on disk, the era that ended with it is not: it ends again, in the same place."""
    swarm = swarm_of()
    until_round(swarm, 11)
    node = swarm.world.nodes[peer_name(1)]
    swarm.world.crash(node.name)
    del node.kept["sealed/9"]
    swarm.world.start(node.name)
    until_round(swarm, 16)
    swarm.world.run(swarm.world.now + 30)
    assert {4, 9, 14} <= set(eras_of(swarm, 1)) and peer_name(1) in eras_of(swarm, 1)[9].signed_by


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: replace(m, vertex=digest(b"another past")), "was not agreed"),
        (lambda m: _other(m, signature=b"scribble"), "did not sign"),
        (lambda m: _other(m, identity=b"mallory"), "is not p0003's"),
        (lambda m: _other(m, peer=peer_name(7)), "is not a signer"),
        (lambda m: _other(m, peer=RECOVERY), "recovery identity did not sign"),
        (lambda m: replace(m, signatures=m.signatures * 129), "signatures under one era"),
    ],
)
def test_a_lie_under_an_era_costs_its_sender_and_changes_nothing(change, what: str):
    swarm = swarm_of(mute=(3,))
    until_round(swarm, 6)
    machine = swarm.world.nodes[peer_name(0)].machine
    assert machine is not None and machine.eras is not None
    era = machine.eras.sealed[4]
    true = _signature(swarm, 3, era)
    liar = peer_name(2)
    effects = machine.handle(Received(liar, change(EraSignatures(4, era.vertex, (true,)))), swarm.world.now)
    faults = [e.fact for e in effects if isinstance(getattr(e, "fact", None), ProtocolFault)]
    assert [f.peer for f in faults] == [liar] and what in faults[0].what
    assert machine.eras.sealed[4] == era
    machine.handle(Received(liar, EraSignatures(4, era.vertex, (true,))), swarm.world.now)
    assert peer_name(3) in machine.eras.sealed[4].signed_by


def _signature(swarm: VirtualSwarm, index: int, era: EraEndSignatures) -> EraSignature:
    identity = swarm.keys.identity(index)
    return EraSignature(
        peer_name(index), identity, sign_as_identity(identity, era_bytes(swarm.run_id, era.round, era.vertex))
    )


def _other(said: EraSignatures, **fields: object) -> EraSignatures:
    return replace(said, signatures=(replace(said.signatures[0], **fields),))


def test_strangers_can_make_a_peer_read_only_so_many_eras_at_once():
    swarm = swarm_of()
    until_round(swarm, 60)
    machine = swarm.world.nodes[peer_name(0)].machine
    assert machine is not None and machine.eras is not None
    asked = [
        machine.handle(Received(PeerId(f"x{k}"), EraSignaturesRequest(4, ())), swarm.world.now) for k in range(50)
    ]
    reads = [e for effects in asked for e in effects if isinstance(getattr(e, "work", None), ReadEraSignatures)]
    assert len(reads) == 8
    answer = machine.handle(
        TaskDone(reads[0].job, swarm.world.nodes[peer_name(0)].kept["sealed/4"]), swarm.world.now
    )
    (sent,) = [e for e in answer if isinstance(e, Send)]
    assert sent.to == "x0" and sent.message.round == 4 and len(sent.message.signatures) == 4


def test_a_newcomer_has_no_more_eras_on_their_way_than_a_member_reads_at_once():
    """It asks when a link comes up, at every beat and with every answer; what is dropped comes seconds later."""
    swarm = swarm_of()
    until_round(swarm, 110)
    member = swarm.world.nodes[peer_name(0)].machine
    assert member is not None and member.eras is not None and member.history is not None
    newcomer = EraSignatureTracker(member.history, EVERY, lambda body: 0, VirtualSignatureVerifier(), None)
    newcomer.restore({})
    assert len(newcomer.lacking) >= 20
    on_their_way: set[int] = set()

    def asked(effects: list[Effect]) -> int:
        on_their_way.update(e.message.round for e in effects if isinstance(e, Send))
        return len(on_their_way)

    assert asked(newcomer.request_from(peer_name(0), 5.0)) == 8  # the link is up
    assert asked(newcomer.request_missing([peer_name(0)], 5.001)) == 8  # and a beat falls into the same moment
    for now in range(30):
        if not on_their_way:
            break
        round = min(on_their_way)
        on_their_way.remove(round)
        era = eras_of(swarm, 0)[round]
        more = newcomer.receive_signatures(
            peer_name(0), EraSignatures(round, era.vertex, era.signatures), 5.002 + now / 1000
        )
        assert asked(more) <= 8
    assert not newcomer.lacking
    newcomer = EraSignatureTracker(member.history, EVERY, lambda body: 0, VirtualSignatureVerifier(), None)
    newcomer.restore({})
    assert asked(newcomer.request_missing([peer_name(0)], 5.0)) == 8
    on_their_way.clear()  # nobody answers
    assert asked(newcomer.request_missing([peer_name(1)], 8.0)) == 8  # and others are asked for


# ---- where eras end ----------------------------------------------------------------------------------------


def begun(voters: int, quorum: int) -> EraStart:
    return EraStart(9, 0, {peer_name(i): digest(b"") for i in range(voters)}, quorum)


def body_with(voters: set[int], round: int = 12, trained: int = 5) -> VertexBody:
    body = decode_body(VirtualSwarm(1, SwarmKnobs(peers=max(voters) + 1)).genesis.body)
    members = tuple(replace(m, standing="member" if i in voters else "away") for i, m in enumerate(body.members))
    return replace(body, round=round, trained=trained, members=members)


@pytest.mark.parametrize(
    ("begin", "now", "over"),
    [
        (begun(4, 3), {0, 1, 2, 3}, False),
        (begun(4, 3), {0, 1, 2}, True),  # one more may go with the next vertex: these three sign now
        (begun(4, 3), {0, 1, 2, 3, 4, 5, 6, 7}, False),  # who came later does not sign this one
        (begun(7, 4), {0, 1, 2, 3, 4, 5}, False),
        (begun(7, 4), {0, 1, 2, 3, 4}, True),
        (begun(7, 5), {0, 1, 2, 3, 4, 5}, True),
        (begun(1, 1), {0}, False),
        (begun(1, 1), {0, 1}, True),  # a founder signs for the first who comes
        (begun(2, 2), {0, 1}, False),
        (begun(2, 2), {0, 1, 2}, True),
        (begun(3, 2), {0, 1, 2, 3}, False),
    ],
)
def test_an_era_ends_before_too_few_are_left_to_sign_it(begin: EraStart, now: set[int], over: bool):
    assert era_ends(begin, body_with(now), 100, 0) is over


def test_an_era_ends_after_its_rounds_with_the_run_and_with_an_epoch():
    begin, everybody = begun(4, 3), {0, 1, 2, 3}
    assert not era_ends(begin, body_with(everybody, round=13), 5, 0)
    assert era_ends(begin, body_with(everybody, round=14), 5, 0)
    assert era_ends(begin, body_with(everybody, trained=5), 100, 5)
    assert era_ends(begin, replace(body_with(everybody), epoch=1), 100, 0)


def test_a_run_that_begins_with_one_peer_is_signed_from_its_founder_on():
    """Five come one by one, then the founder leaves: each era is sealed by those whom the one before names."""
    swarm = swarm_of(peers=1)
    swarm.world.run(5)
    for index in range(1, 5):
        swarm.join(index, peer_name(0))
        swarm.world.run(swarm.world.now + 30)
    swarm.world.leave(peer_name(0))
    swarm.world.run(swarm.world.now + 90)
    eras, lacking = eras_of(swarm, 1), eras_of(swarm, 1, "era")
    assert not set(lacking) - {max((*eras, *lacking))}
    assert set(eras[min(eras)].signers) == {peer_name(0)}
    assert peer_name(0) not in eras[max(eras)].signers and len(eras[max(eras)].signatures) >= 3


def test_signatures_that_come_before_the_vertex_that_ends_their_era_are_kept():
    """As from a signer that leaves with this vertex, and so is asked for nothing later."""
    before = swarm_of()
    until_round(before, 6)
    era = eras_of(before, 1)[4]
    theirs = tuple(s for s in era.signatures if s.peer == peer_name(1))
    other = EraSignature(peer_name(2), peer_name(2).encode(), b"invented")

    swarm = swarm_of()
    for node in swarm.world.nodes.values():
        make = node.make
        node.make = lambda make=make: _says_nothing(make())
    until_round(swarm, 3)
    mine = swarm.honest[0].machine
    assert mine.history.head == 3
    for sender, signatures in ((peer_name(1), theirs), (peer_name(2), (other,)), (PeerId("stranger"), theirs)):
        assert mine.eras.receive_signatures(sender, EraSignatures(4, era.vertex, signatures), swarm.world.now) == []
    swarm.world.run(swarm.world.now + 60, stop=lambda: mine.history.head >= 4)
    assert mine.eras.lacking[4].signed_by == (peer_name(0), peer_name(1))


def test_eras_on_disk_are_read_back_or_refused():
    swarm = swarm_of()
    until_round(swarm, 6)
    era = eras_of(swarm, 0)[4]
    assert decode_era(encode_era(era)) == era
    for nonsense in (b"", b"\xc1", encode_era(era)[:-1], b"\x91" * 1000):
        assert decode_era(nonsense) is None


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3))])
def test_a_lossy_run_with_crashes_seals_all_but_the_newest_eras(seed: int):
    """One message in fifty is lost, somebody is killed and comes back: eras are complete on every disk."""
    stage = ScenarioContext("eras", seed, 5, 40, "")
    knobs = SwarmKnobs(5, NetworkKnobs(loss_rate=0.02), run=stage.settings(era_rounds=EVERY))
    swarm = stage.gather(knobs)
    swarm.world.run(1)
    for victim in (1, 3, 2):
        until_round(swarm, min(swarm.heads()) + 7)
        swarm.world.crash(peer_name(victim))
        swarm.world.run(swarm.world.now + 20)
        swarm.world.start(peer_name(victim))
        stage.demand_progress()
    swarm.world.run(swarm.world.now + 120)
    newest = min(swarm.heads()) - 20
    ended = [sorted(r for r in eras_of(swarm, i) if r <= newest) for i in range(5)]
    assert len(ended[0]) >= 5 and all(e == ended[0] for e in ended)
    assert not any(r <= newest for i in range(5) for r in eras_of(swarm, i, "era"))


def test_whoever_forges_every_vote_but_no_identity_rewrites_nothing(monkeypatch: pytest.MonkeyPatch):
    """Another past from the same genesis: four members vote in five newcomers and leave, none of the four can sign
    for long. The newcomers, who are the forger's and demand nothing, sign era after era for each other; the verdict
    is against the first, and none counts."""
    monkeypatch.setattr(EraSignatureTracker, "blocking_era", lambda self, head: None)
    swarm = swarm_of(mute=(0, 1, 2, 3))
    world = swarm.world
    world.run(5)
    for index in range(4, 9):
        swarm.join(index, peer_name(1))
        world.run(world.now + 10)
    for index in range(4):
        world.leave(peer_name(index))
        world.run(world.now + 10)
    world.run(world.now + 30)
    kept = world.nodes[peer_name(5)].kept
    rows = {int(k.split("/")[1]): v for k, v in kept.items() if k.startswith("vertex/")}
    eras = {int(k.split("/")[1]): v for k, v in kept.items() if k.startswith(("era/", "sealed/"))}
    found = StoredHistory(swarm.run_id, kept["genesis"], sorted(rows), rows.get, eras.get)
    audit = verify_history(found, VirtualSignatureVerifier(), CAPABILITIES.verifiers)
    voters = {m.peer for m in audit.head_body.members if m.votes} if audit.head_body is not None else set()
    assert voters == {peer_name(i) for i in range(4, 9)} and audit.eras[-1].sealed
    assert (audit.problems[0].kind, audit.problems[0].round) == ("era", audit.eras[0].last)
    assert not any(e.anchored and e.sealed for e in audit.eras)
    assert votes_alone(audit) == [(0, audit.head)]


@pytest.mark.parametrize("by", ["signer", "founder"])
def test_a_newcomer_refuses_a_past_whose_eras_nobody_signed_and_takes_it_when_they_do(by: str):
    """Two of four have lost their keys for 40 rounds: a newcomer believes as many of them as signatures have time
    for. Then one is back, or the founder signs for it; all eras are sealed, and the newcomer gets to the head."""
    swarm = swarm_of(mute=(2, 3))
    until_round(swarm, 40)
    late = swarm.join(4, peer_name(0))
    swarm.world.run(swarm.world.now + 30)
    newcomer = swarm.world.nodes[late].machine
    assert newcomer is not None and newcomer.history is not None
    assert newcomer.history.head == 4 + OVERDUE_LEAST - 1 and not swarm.checkers.complaints
    if by == "founder":
        recover(swarm)
    else:
        node = swarm.world.nodes[peer_name(2)]
        swarm.world.crash(node.name)
        node.make = lambda make=node.make: _with_keys(make(), swarm)
        swarm.world.start(node.name)
    swarm.world.run(swarm.world.now + 90)
    assert newcomer.history.head_body.epoch == 0
    assert newcomer.history.head >= min(swarm.heads()) - 2 > 40
    assert {m.peer for m in newcomer.history.head_body.members if m.votes} >= {late}


def recover(swarm: VirtualSwarm) -> None:
    node = swarm.world.nodes[peer_name(0)]
    assert node.machine is not None
    sign = swarm.keys.vouch(node.name).sign
    swarm.world.carry_out(node, operator_commands.recover(node.machine, sign, node.clock.local(swarm.world.now)))


def recovered(at: int, then_s: float = 60.0) -> VirtualSwarm:
    """Five peers, three without long-lived keys; the fifth goes away early, and two for good at round `at`."""
    swarm = swarm_of(peers=5, mute=(2, 3, 4))
    until_round(swarm, 6)
    swarm.world.crash(peer_name(4))
    until_round(swarm, at)
    for index in (2, 3):
        swarm.world.crash(peer_name(index))
    swarm.world.run(swarm.world.now + 40)
    recover(swarm)
    swarm.world.run(swarm.world.now + then_s)
    return swarm


def test_whoever_joins_or_comes_back_after_a_recovery_believes_the_eras_that_will_never_be_signed():
    """The quorum is gone for good long after eras that lack theirs. The founder speaks for these as it recovers."""
    swarm = recovered(at=36)
    assert eras_of(swarm, 0)[4].signed_by[0] == RECOVERY and eras_of(swarm, 1)[4].signed_by[0] == RECOVERY
    late = swarm.join(5, peer_name(1))
    swarm.world.start(peer_name(4))
    swarm.world.run(swarm.world.now + 150)
    head = swarm.head(peer_name(0))
    assert head > 60 and not swarm.checkers.complaints
    for name in (late, peer_name(4)):
        machine = swarm.world.nodes[name].machine
        assert machine is not None and machine.history is not None
        assert machine.history.head >= head - 2 and machine.history.head_body.epoch == 1
        assert name in {m.peer for m in machine.history.head_body.members if m.votes}
    kept = dict(swarm.world.nodes[peer_name(0)].kept)
    audit = audit_of(swarm, kept)
    assert audit.intact and next(e for e in audit.eras if e.last == 4).needed == 0
    for round, era in eras_of(swarm, 0).items():  # the recovery itself is enough for who holds it
        without = replace(era, signatures=tuple(s for s in era.signatures if s.peer != RECOVERY))
        kept[f"sealed/{round}"] = encode_era(without)
    audit = audit_of(swarm, kept)
    first = audit.eras[0]
    assert audit.intact and first.covered and not first.sealed and first.held
    assert all(start > audit.recoveries[0] for start, _ in votes_alone(audit))


def audit_of(swarm: VirtualSwarm, kept: dict[str, bytes]) -> HistoryVerificationReport:
    rows = {int(k.split("/")[1]): v for k, v in kept.items() if k.startswith("vertex/")}
    eras = {int(k.split("/")[1]): v for k, v in kept.items() if k.startswith(("era/", "sealed/"))}
    found = StoredHistory(swarm.run_id, kept["genesis"], sorted(rows), rows.get, eras.get)
    return verify_history(found, VirtualSignatureVerifier(), CAPABILITIES.verifiers)


def test_a_recovery_that_comes_soon_after_an_era_holds_it_without_another_word(monkeypatch: pytest.MonkeyPatch):
    """As in runs that recovered before there was such a word."""
    monkeypatch.setattr(EraSignatureTracker, "attest_unsigned", lambda self, sign, reach: [])
    swarm = recovered(at=12, then_s=120.0)
    assert not eras_of(swarm, 0, "sealed").get(4) and eras_of(swarm, 0, "era")[4].covered
    late = swarm.join(5, peer_name(1))
    swarm.world.run(swarm.world.now + 60)
    assert swarm.head(late) >= swarm.head(peer_name(0)) - 2 > 4 + OVERDUE_LEAST


def test_whoever_keeps_signatures_back_keeps_no_newcomer_out():
    """The member that a newcomer knows shows the history and no signature: others are asked, nobody is blamed."""
    swarm = swarm_of()
    until_round(swarm, 30)
    miser = swarm.world.nodes[peer_name(2)]
    assert miser.machine is not None
    react = miser.machine.handle

    def handle(event: Event, now: float) -> list[Effect]:
        effects = react(event, now)
        return [
            e for e in effects if not (isinstance(e, Send | Broadcast) and isinstance(e.message, EraSignatures))
        ]

    miser.machine.handle = handle
    late = swarm.join(4, miser.name)
    swarm.world.run(swarm.world.now + 60)
    assert swarm.head(late) >= swarm.head(peer_name(0)) - 2 > 30 and not swarm.checkers.complaints


def test_votes_alone_begin_no_epoch_and_so_seal_no_era():
    """A vertex that the recovery identity signs needs no signers: whoever forges votes must not claim to be one."""
    swarm = swarm_of()
    until_round(swarm, 2)
    member = swarm.world.nodes[peer_name(1)].machine
    assert member is not None and member.history is not None
    history, body = member.history, member.history.head_body

    def voted(epoch: int) -> Vertex:
        made = replace(body, round=history.head + 1, parent=history.head_id, epoch=epoch, reports=(), commits=())
        raw = encode(made)
        named = vertex_id(raw)
        vote = Vote(made.round, 0, "commit", named)
        signers = [swarm.keys.signer(index, swarm.run_id) for index in range(4)]
        votes = tuple(
            (s.peer, StatementSigner(swarm.run_id, s, swarm.keys.verifier).sign(vote).signature) for s in signers
        )
        return Vertex(raw, QuorumCertificate(made.round, 0, "commit", named, votes))

    history.check(voted(body.epoch), decode_body(voted(body.epoch).body))
    with pytest.raises(PeerFault, match="only the recovery key"):
        history.check(voted(body.epoch + 1), decode_body(voted(body.epoch + 1).body))


def _overdue(effects: list[Effect]) -> list[HistoryLacksEraSignatures]:
    return [e.fact for e in effects if isinstance(e, Emit) and isinstance(e.fact, HistoryLacksEraSignatures)]


def test_a_signature_for_another_past_says_that_mine_is_made_up_and_blames_nobody():
    """A newcomer took forged rounds, as many as it may; an honest member answers with what it signed."""
    swarm = swarm_of(mute=(2, 3))
    until_round(swarm, 40)
    member = swarm.world.nodes[peer_name(0)].machine
    assert member is not None and member.history is not None
    history, run, keys = member.history, swarm.run_id, swarm.keys
    fooled = Peer(
        run,
        keys.signer(8, run),
        keys.verifier,
        DesiredRole(),
        history.genesis,
        (peer_name(0),),
        capabilities=CAPABILITIES,
    )
    fooled.handle(Start({}), 0.0)
    handed = Received(peer_name(1), VerticesResponse(history.vertices_from(0, 1 << 22), history.head))
    assert not _overdue(fooled.handle(handed, 0.5))  # the members are asked first, without an alarm
    assert fooled.eras is not None
    true = replace(fooled.eras.lacking[4], vertex=digest(b"the true past"))
    one = EraSignatures(4, true.vertex, (_signature(swarm, 3, true),))
    assert not fooled.handle(Received(peer_name(3), one), 0.9)  # may be a liar's
    said = replace(one, signatures=tuple(_signature(swarm, i, true) for i in (1, 2, 3)))
    effects = fooled.handle(Received(peer_name(3), said), 1.0)
    awaited = _overdue(effects)
    assert [(f.round, f.elsewhere) for f in awaited] == [(4, 3)]
    assert not any(isinstance(e, Emit) and isinstance(e.fact, ProtocolFault) for e in effects)
    assert [f.elsewhere for f in _overdue(fooled.handle(handed, 0.5 + OVERDUE_TOLD_S))] == [0]
    progress = RunStatus()
    progress.fold(fact_to_entry(awaited[0], 1.0) or {})
    assert "made-up past" in progress.trouble and "atoll join TICKET" in progress.trouble
    unsigned = _other(one, signature=b"scribble")
    faults = [getattr(e, "fact", None) for e in fooled.handle(Received(peer_name(3), unsigned), 1.5)]
    assert any(isinstance(f, ProtocolFault) and "that was not agreed" in f.what for f in faults)


def test_who_is_kept_from_a_past_asks_for_signatures_of_whoever_shows_it_and_of_nobody_twice_at_once():
    """A long past and nothing under it: it stops there at once; floods of news grow nothing and blame nobody."""
    swarm = swarm_of(mute=(2, 3))
    until_round(swarm, 40)
    member = swarm.world.nodes[peer_name(0)].machine
    assert member is not None and member.history is not None
    history, run, keys = member.history, swarm.run_id, swarm.keys
    stranger = Peer(
        run,
        keys.signer(8, run),
        keys.verifier,
        DesiredRole(),
        history.genesis,
        (peer_name(0),),
        capabilities=CAPABILITIES,
    )
    stranger.handle(Start({}), 0.0)
    past = VerticesResponse(history.vertices_from(0, 1 << 22), history.head)
    sent: list[object] = []
    for index in range(20):
        effects = stranger.handle(Received(peer_name(index % 2), past), 0.5 + 0.7 * index)
        assert not [e for e in effects if isinstance(getattr(e, "fact", None), ProtocolFault)]
        sent += [
            (e.to, e.message.round)
            for e in effects
            if isinstance(e, Send) and isinstance(e.message, EraSignaturesRequest)
        ]
    assert stranger.history is not None and stranger.history.head == 4 + OVERDUE_LEAST - 1
    assert stranger.eras is not None and len(stranger.eras.lacking) == 4
    assert {peer for peer, _ in sent} == {peer_name(0), peer_name(1)} and len(sent) <= 7


def test_a_starting_peer_is_given_what_lacks_signatures_and_the_newest_of_the_rest(tmp_path: Path):
    """A run of 2,000 eras does not load 2,000 quorums; the disk still has each for whoever asks."""
    store = PeerStore(tmp_path, durable=False)
    swarm = swarm_of()
    until_round(swarm, 6)
    data = swarm.world.nodes[peer_name(0)].kept["sealed/4"]
    store.keep([(f"sealed/{round}", data) for round in range(9, 2000, 10)] + [("era/7", data), ("era/1234", data)])
    given = {name for name in store.startup_values() if name.startswith(("era/", "sealed/"))}
    assert given == {"era/7", "era/1234", "sealed/1999", "sealed/1989", "sealed/1979", "sealed/1969"}
    assert (
        run_store_task(store, ReadEraSignatures(19)) == data
        and run_store_task(store, ReadEraSignatures(20)) is None
    )
    store.close()


def test_who_asks_the_same_again_and_again_is_read_to_once(monkeypatch: pytest.MonkeyPatch):
    """Eras and vertices that are only on disk: fifty equal questions in a row are one piece of work."""
    monkeypatch.setattr("atoll.protocol.history.chain.WINDOW", 32)
    swarm = swarm_of()
    until_round(swarm, 45)
    machine = swarm.world.nodes[peer_name(0)].machine
    assert machine is not None
    for question in (EraSignaturesRequest(4, ()), VerticesRequest(4)):
        asked = [machine.handle(Received(PeerId("x"), question), swarm.world.now) for _ in range(50)]
        assert sum(isinstance(e, RunTask) for effects in asked for e in effects) == 1
