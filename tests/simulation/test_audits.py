"""Swarms with audited rounds: cheats are out, the honest stay, whatever is lost and a member that lies about
it.
"""

from __future__ import annotations

import dataclasses

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, PeerId
from atoll.base.limits import AUDIT_ROUNDS
from atoll.base.machine import Effect, Fact, Send
from atoll.capabilities import CAPABILITIES
from atoll.peer.events import ProtocolFault, RoundClosed
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.peer.verify.chain import HistoryVerificationReport, StoredHistory, verify_history
from atoll.policy import membership
from atoll.policy.reputation import FLOOR, scores_of
from atoll.simulation import worker as islands_of_names
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.replay_audits import LIARS, SHIRKERS, TRAINERS, islands
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.replay_audits import AuditReports, play_audits
from atoll.simulation.signatures import VirtualSignatureVerifier
from atoll.simulation.simulated_audit_chain import judged
from atoll.simulation.swarm import SwarmKnobs, honest
from atoll.simulation.worker import VirtualWorker
from atoll.simulation.world import VirtualComputer
from atoll.verification.offline import DisputeHistory
from atoll.verification.replay_audit import policy
from atoll.wire.codec import decode_statement, encode
from atoll.wire.messages.round import RowContribution, UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment
from atoll.wire.messages.vertex import Member


def played(kinds: dict[int, str], peers: int = 4, rounds: int = 12, seed: int = 1, share: float = 1.0):
    stage = ScenarioContext("audits", seed, peers, rounds, "two-thirds")
    told = play_audits(stage, kinds, share=share)
    assert stage.newest is not None
    return told, {m.peer: m.standing for m in stage.newest.head_body.members}


def test_every_round_of_honest_trainers_is_accepted():
    """Four peers, every member audited in every round: one auditor each, and nothing left open."""
    told, standing = played({})
    assert set(told.findings) == {"accepted"} and not told.late
    assert set(standing.values()) == {"member"}
    per_peer = told.findings["accepted"] / 4  # each of four peers tells what its vertices hold
    assert len(told.done) == per_peer >= 4 * 8


def test_who_cannot_be_audited_trains_beside_the_others_and_decides_nothing():
    """A fifth member on a GPU: it counts in rounds with no weight, never votes, and its record stays a newcomer's.
    Started on a CPU it is a member like any other; on a GPU again it is none, and no member is accused."""
    stage = ScenarioContext("audits", 1, 4, 12, "two-thirds")
    run = replace(stage.settings(), audit_rate=1.0, reputation=True)
    on_gpu = [True]

    def started(run_id, signer, keys, wish, genesis, bootstrap):
        return honest(run_id, signer, keys, dataclasses.replace(wish, unaudited=on_gpu[0]), genesis, bootstrap)

    swarm = stage.gather(SwarmKnobs(4, run=run), island=islands({}))
    swarm.makers = {4: started}
    told = AuditReports(stage)
    stage.world.watchers.append(told.watch)
    stage.until_round(0)
    new = swarm.join(4, swarm.founders[0])

    def line() -> Member:
        return next(m for m in stage.newest.head_body.members if m.peer == new)

    def goes_on(rounds: int, standing: str) -> None:
        stage.until(
            lambda: any(m.peer == new and m.standing == standing for m in stage.newest.head_body.members),
            600.0,
            f"it never became {standing}",
        )
        stage.until_round(max(swarm.heads()) + rounds)
        assert line().standing == standing

    goes_on(10, "unaudited")
    bodies = stage.newest.bodies.values()
    said = [(s.signer, decode_statement(s.body, s.signer)) for body in bodies for s in body.commits]
    weights = [c.weight for by, c in said if by == new and isinstance(c, Commitment)]
    assert len(weights) >= 8 and set(weights) == {0} and not line().votes
    assert scores_of(stage.newest.head_body)[new] == FLOOR and new not in {peer for _, peer in told.drawn}
    for gpu, standing in ((False, "member"), (True, "unaudited")):
        on_gpu[0] = gpu
        swarm.world.crash(new)
        swarm.world.start(new)
        goes_on(10, standing)
        assert line().votes != gpu
    assert new in {peer for _, peer in told.drawn} and set(told.findings) <= {"accepted", "withheld"}
    # a restart on a GPU does not void the audits of rounds before: what it can no longer show sends it away once
    assert set(told.left) <= {new} and all(standing == "away" for _, standing in told.left.values())


@pytest.mark.parametrize("kind", TRAINERS)
def test_one_cheating_trainer_of_four_is_expelled_within_a_few_rounds(kind: str):
    """Its statements are true to its chain: two replicas, both drawn, are what finds it."""
    told, standing = played({2: kind})
    assert [standing[p] for p in sorted(standing)] == ["member", "member", "expelled", "member"]
    (left,) = told.left.values()
    assert left[0] <= 2  # words of one round bring each other: before, those of the others were a vertex later
    assert told.findings["mismatch"] + told.findings["wrong"] >= 2 * 3  # two verdicts, as three honest peers tell


def read_by_a_stranger(stage: ScenarioContext, folder: PeerId) -> tuple[HistoryVerificationReport, DisputeHistory]:
    """The history on this peer's disk, walked offline."""
    kept = stage.world.nodes[folder].kept
    rows = {int(name[7:]): data for name, data in kept.items() if name.startswith("vertex/")}
    eras = {int(name.split("/")[1]): data for name, data in kept.items() if name.startswith(("era/", "sealed/"))}
    found = StoredHistory(stage.swarm.run_id, kept["genesis"], sorted(rows), rows.get, eras.get)
    verdicts = DisputeHistory()
    return verify_history(found, VirtualSignatureVerifier(), CAPABILITIES.verifiers, observers=[verdicts]), verdicts


def test_what_expelled_a_cheat_convicts_it_again_long_after_and_offline():
    """Its exhibit, out of the folder of one who refuted it, which was restarted since; its author, what was drawn
    and what it was to do follow from the history on another's disk."""
    stage = ScenarioContext("audits", 1, 4, 10, "two-thirds")
    play_audits(stage, {2: "cheat"})
    honest = [p for p in stage.swarm.founders if p != "p0002"]
    audit, verdicts = read_by_a_stranger(stage, honest[0])
    (out,) = verdicts.departures
    assert not audit.problems and (out.peer, out.standing) == ("p0002", "expelled")
    doubt = next(d for d in verdicts.doubts.values() if d.outcome == "refuted")
    assert {reason.ground for reason in out.reasons} == {"audit"}
    assert doubt.round in {reason.round for reason in out.reasons}
    (exhibit,) = doubt.exhibits
    auditor = stage.world.nodes[doubt.against[0].auditor]
    stage.world.crash(auditor.name)
    assert isinstance(auditor.island, VirtualWorker)
    auditor.island.needed.clear()
    stage.world.start(auditor.name)
    stage.until_round(10 + AUDIT_ROUNDS, 12_000.0, who=honest)
    assert doubt.work is not None and doubt.work.before in auditor.island.blobs
    assert judged(replace(doubt.work, blob=exhibit), auditor.island.blobs[exhibit]).finding == "mismatch"


def test_a_false_accuser_names_an_exhibit_that_does_not_bear_it_out():
    """Accusers name what they were shown; a member that judges it again finds nothing."""
    stage = ScenarioContext("audits", 1, 7, 12, "two-thirds")
    play_audits(stage, {2: "accuser", 5: "accuser"})
    audit, verdicts = read_by_a_stranger(stage, PeerId("p0000"))
    assert not audit.problems and not verdicts.departures
    shown = {blob: data for node in stage.world.nodes.values() for blob, data in node.island.blobs.items()}
    doubts = [(d, one) for d in verdicts.doubts.values() for one in d.against if one.exhibit in shown]
    assert doubts and all(len(d.against) < d.needed for d, _ in doubts)
    for doubt, one in doubts:
        assert one.auditor in ("p0002", "p0005") and doubt.work is not None
        assert judged(replace(doubt.work, blob=one.exhibit), shown[one.exhibit]).finding == "accepted"


@pytest.mark.parametrize("kind", sorted(set(LIARS) - set(TRAINERS)))
def test_who_shows_nothing_loses_its_place_and_is_never_expelled(kind: str):
    told, _ = played({1: kind}, rounds=20)
    assert {how for _, how in told.left.values()} == {"away"}
    assert told.findings["mismatch"] == told.findings["wrong"] == 0


@pytest.mark.parametrize("kind", sorted(set(SHIRKERS) - set(LIARS)))
def test_false_auditors_harm_nobody_and_others_take_their_turn(kind: str):
    """Two of seven accuse every member, or never say a word: honest trainers are accepted by the next in order."""
    told, standing = played({2: kind, 5: kind}, peers=7, rounds=14)
    assert set(standing.values()) == {"member"}
    assert told.findings["accepted"] > told.findings["mismatch"]


def test_a_cheat_beside_a_false_auditor_is_found_all_the_same():
    _, standing = played({1: "cheat", 4: "accuser"}, peers=7, rounds=14)
    assert standing["p0001"] == "expelled" and sum(s == "expelled" for s in standing.values()) == 1


def test_at_a_rate_of_a_fifth_a_cheat_is_out_in_time():
    """Five rounds on average until it is drawn; every other round costs no member anything."""
    told, standing = played({3: "cheat"}, rounds=40, share=0.2)
    assert standing["p0003"] == "expelled"
    assert len(told.drawn) < 0.4 * 4 * 40


@pytest.mark.long
def test_drawn_villains_of_all_kinds():
    assert run_scenario("audits", 3).rounds >= 36
    assert run_scenario("accusers", 5).members == 7
    run_scenario("audited", 2)


def test_crashes_partitions_and_lost_disks_never_make_a_liar():
    """What a vertex holds against a restarted peer may be lost with its memory: it begins afresh and says so."""
    run_scenario("audited_churn", 4, peers=6, rounds=8, quorum="two-thirds")


@pytest.mark.parametrize("audited", [True, False])
def test_an_update_comes_with_a_claim_where_rounds_are_audited_and_nowhere_else(audited: bool):
    """A member that signs otherwise is at fault, and counts for no other member."""

    def other(villain: ByzantineMember, send: Send) -> list[Effect]:
        message = send.message
        if (
            not isinstance(message, UpdateCommitmentMessage | RowContribution)
            or message.statement.signer != villain.peer.me
        ):
            return [send]
        commit = decode_statement(message.statement.body, villain.peer.me)
        assert isinstance(commit, Commitment)
        said = villain.notary.sign(replace(commit, claim=UNSET if audited else ZERO_DIGEST))
        return [replace(send, message=replace(message, statement=said))]

    stage = ScenarioContext("audits", 1, 4, 4, "two-thirds")
    settings = stage.settings(audit_rate=1.0) if audited else stage.settings()
    island = islands({}) if audited else VirtualWorker
    swarm = stage.gather(SwarmKnobs(4, run=settings), villains={1: villain(other)}, island=island)
    faults: set[str] = set()
    counted: set[str] = set()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, ProtocolFault) and node.name != "p0001":
            faults.add(fact.what)
        if isinstance(fact, RoundClosed) and fact.body.proposer != "p0001":
            counted.update(set(fact.counted) - set(fact.partly))  # as an owner it counts what it told no member

    stage.world.watchers.append(watch)
    stage.until_round(
        5, 300.0, who=[p for p in swarm.founders if p != "p0001"]
    )  # not only where it proposes itself
    assert any("does not say how it trained" in what for what in faults)
    assert counted == set(swarm.founders) - {"p0001"}


def test_runs_without_audits_are_encoded_as_they_always_were():
    """A field that is left out of genesis and of commitments: old runs keep their names."""
    plain = encode_settings(RunSettings())
    assert b"audit_rate" not in plain and b"audit_rate" in encode_settings(RunSettings(audit_rate=0.05))
    assert decode_settings(plain).audited_share == 0.0
    assert b"claim" not in encode(Commitment(7, 0, ZERO_DIGEST, 2, 35, 70, 1.0, 0.1, 70))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2000, 2060))
def test_many_audited_swarms(seed: int):
    run_scenario("audits", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("accusers", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("audited_churn", seed)


# ---- a rule is deleted, and the scenarios notice -----------------------------------------------------------


def test_if_one_auditor_were_enough_anybody_could_be_framed(monkeypatch: pytest.MonkeyPatch):
    for room in (policy, membership):
        monkeypatch.setattr(room, "voices_needed", lambda voters, rule: 1)
    with pytest.raises(ScenarioFailed, match=r"lost their place|agreed .*'expelled'"):
        run_scenario("accusers", 1)


@pytest.mark.long
def test_if_moments_were_not_carried_nobody_would_see_chosen_ones(monkeypatch: pytest.MonkeyPatch):
    """Mutant: an auditor takes whatever moments a chain begins with."""

    def blind(work, data):
        said = judged(work, data)
        return said if "moments" not in said.why else type(said)("accepted")

    judged = islands_of_names.judged
    monkeypatch.setattr(islands_of_names, "judged", blind)
    stage = ScenarioContext("audits", 1, 4, 36, "two-thirds")
    with pytest.raises(Exception, match="starter"):
        play_audits(stage, {2: "starter"})
