"""Swarms with opened results: owners that sum wrongly are out, the honest stay, a member that lies
about them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Fact, Received, Send
from atoll.peer.events import ProtocolFault, RoundClosed
from atoll.peer.settings import RunSettings, decode_settings, encode_settings
from atoll.policy import findings, membership
from atoll.policy.capability_terms import SumCheckTerms
from atoll.policy.plan import RoundSettings
from atoll.simulation.adversaries.byzantine import ByzantineMember, villain
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.scenarios.sum_check import TOGETHER_WITHIN, SumCheckRecorder, play_openings, play_together
from atoll.simulation.sum_check import CUT, PROVEN, UNSHOWN, LyingOwnerWorker, islands, twist_of
from atoll.simulation.swarm import SwarmKnobs, peer_name
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer
from atoll.verification.replay_audit import policy
from atoll.verification.replay_audit.machine import LAID, ReplayAudits
from atoll.verification.sum_check import policy as draws
from atoll.verification.sum_check import tasks as work
from atoll.wire.codec import decode_statement
from atoll.wire.messages.audits import ExhibitRequest, ExhibitResponse
from atoll.wire.messages.history import ChunkResponse, ManifestResponse
from atoll.wire.messages.round import PartResult, RowContribution, RowResponse, UpdateCommitmentMessage
from atoll.wire.messages.statements import Commitment, OwnerResult


def played(kinds: dict[int, str], peers: int = 4, rounds: int = 9, seed: int = 1, **more) -> SumCheckRecorder:
    return play_openings(ScenarioContext("openings", seed, peers, rounds, "two-thirds"), kinds, **more)


def test_where_nobody_lies_nothing_is_said():
    """No report travels, none stands in a vertex."""
    told = played({})
    assert not told.said and not told.left


def test_an_owner_of_two_parts_with_equal_results_opens_both():
    """Updates of zeros. It had only one of the two sets of rows once, and lost its place for what it withheld."""

    def zeros(me: PeerId, knobs: WorkerKnobs, draw: random.Random) -> LyingOwnerWorker:
        worker = LyingOwnerWorker(me, knobs, draw)
        worker.poison = torch.zeros_like
        return worker

    stage = ScenarioContext("openings", 1, 4, 12, "two-thirds")
    settings = replace(stage.settings(), tolerance=0.33, openings=SumCheckTerms(0.9, CUT.leaf_bytes), pieces=2)
    told = stage.play_beside({}, twist_of, lambda kinds: zeros, settings, SumCheckRecorder)
    assert not told.said and not told.left


@pytest.mark.parametrize("kind", sorted({*PROVEN} - {"one_block"}))
def test_an_owner_whose_sum_is_another_than_its_rows_make_is_expelled_at_once(kind: str):
    told = played({2: kind})
    assert told.left == {peer_name(2): (told.left[peer_name(2)][0], "expelled")}
    assert told.left[peer_name(2)][0] <= 3 and set(told.findings) == {"mismatch"}


def test_a_lie_in_one_value_is_found_in_time():
    """One block of 112, eleven of which are drawn in every round."""
    told = played({1: "one_block"}, rounds=30, share=0.1)
    assert told.left[peer_name(1)][1] == "expelled" and set(told.findings) == {"mismatch"}


@pytest.mark.parametrize("kind", UNSHOWN)
def test_who_shows_nothing_that_it_committed_to_loses_its_place_and_is_never_expelled(kind: str):
    told = played({1: kind}, rounds=12)
    assert {how for _, how in told.left.values()} == {"away"} and set(told.findings) == {"withheld"}


@pytest.mark.parametrize("statistic", [pytest.param("trimmed_mean", marks=pytest.mark.long), "robust"])
def test_sorted_and_weighed_answers_are_opened_too(statistic: str):
    told = played({2: "all_blocks", 5: "forger"}, peers=7, rounds=6, statistic=statistic)
    assert {told.left[peer_name(place)][1] for place in (2, 5)} == {"expelled"}
    assert not played({}, peers=7, rounds=4, statistic=statistic).said


def test_false_checkers_harm_nobody_and_hide_nobody():
    """One of two accuses every member; the other lies about its sums."""
    told = played({2: "accuser", 5: "smuggler"}, peers=7, rounds=8)
    assert told.left == {peer_name(5): (told.left[peer_name(5)][0], "expelled")}
    assert told.findings["accepted"] > 0


def test_nobody_is_accused_where_messages_are_lost_and_links_are_slow():
    told = played({}, peers=5, rounds=12, network=NetworkKnobs(0.01, 0.3, jitter_s=0.05, loss_rate=0.01))
    assert not told.left and not told.findings.keys() - {"withheld", "accepted"}


@pytest.mark.long
def test_drawn_villains_of_all_kinds():
    assert run_scenario("openings", 3, rounds=26).rounds >= 26
    assert run_scenario("slanderers", 4, rounds=8).members == 7


def test_who_promises_twice_harms_no_owner_and_is_expelled():
    """It commits to one update before every second peer and to another before the rest."""

    def twice(villain: ByzantineMember, send: Send) -> list[Effect]:
        message, others = send.message, villain.others
        mine = (
            isinstance(message, UpdateCommitmentMessage | RowContribution)
            and message.statement.signer == villain.peer.me
        )
        if not mine or send.to not in others or others.index(send.to) % 2:
            return [send]
        commit = decode_statement(message.statement.body, villain.peer.me)
        assert isinstance(commit, Commitment)
        signed = villain.notary.sign(replace(commit, loss=commit.loss + 1))
        return [replace(send, message=replace(message, statement=signed))]

    stage = ScenarioContext("openings", 1, 4, 8, "two-thirds")
    settings = replace(stage.settings(), tolerance=0.33, openings=SumCheckTerms(0.1, CUT.leaf_bytes))
    swarm = stage.gather(SwarmKnobs(4, run=settings), villains={2: villain(twice)}, island=islands({}))
    told = SumCheckRecorder(stage)
    stage.world.watchers.append(told.watch)
    stage.until_round(7, 1200.0)
    assert {name: how for name, (_, how) in told.left.items()} == {swarm.founders[2]: "expelled"}


def test_an_answer_says_what_it_is_made_of_where_answers_are_opened_and_nowhere_else():
    """A member that signs one that does not is at fault, and no vertex holds it."""

    def bare(villain: ByzantineMember, send: Send) -> list[Effect]:
        message = send.message
        if not isinstance(message, PartResult) or message.statement.signer != villain.peer.me:
            return [send]
        answered = decode_statement(message.statement.body, villain.peer.me)
        assert isinstance(answered, OwnerResult)
        signed = villain.notary.sign(replace(answered, made_of=UNSET))
        return [replace(send, message=replace(message, statement=signed))]

    stage = ScenarioContext("openings", 1, 4, 3, "two-thirds")
    settings = replace(stage.settings(), tolerance=0.33, openings=SumCheckTerms(0.1, CUT.leaf_bytes))
    swarm = stage.gather(SwarmKnobs(4, run=settings), villains={2: villain(bare)}, island=islands({}))
    faults: set[str] = set()
    said: set[int] = set()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name != swarm.founders[2] and isinstance(fact, ProtocolFault):
            faults.add(fact.what)
        if node.name != swarm.founders[2] and isinstance(fact, RoundClosed):
            answers = [decode_statement(s.body, s.signer) for s in fact.body.parts if s is not None]
            said.update(len(a.made_of) for a in answers if isinstance(a, OwnerResult) and a.made_of is not UNSET)

    stage.world.watchers.append(watch)
    stage.until_round(1, 900.0)
    assert any("names the commitments of part" in what for what in faults)
    assert said == {32}


def test_runs_without_openings_are_encoded_as_they_always_were():
    plain = encode_settings(RunSettings())
    assert b"openings" not in plain and decode_settings(plain).opened is None
    asked = RunSettings(openings=SumCheckTerms(0.03, 4128))
    with pytest.raises(Exception, match="members that are trusted"):
        decode_settings(encode_settings(asked))
    fitting = replace(asked, round=replace(asked.round, quorum="two-thirds"))
    assert decode_settings(encode_settings(fitting)) == fitting


# ---- owners that watch each other, and liars that own a part by themselves -----------------------------------


def test_two_liars_that_own_a_part_by_themselves_are_both_expelled_for_what_they_said_alike():
    """One witness among eight: their false part is agreed on once; openings and what both signed send them off."""
    together = play_together(
        ScenarioContext("accomplices", 7, 8, 12, "two-thirds"), {1: "accomplice", 2: "accomplice"}
    )
    (lie,) = together.false
    assert set(together.lied) == {peer_name(1), peer_name(2)} == set(together.told.left)
    assert {how for _, how in together.told.left.values()} == {"expelled"}
    assert max(round for round, _ in together.told.left.values()) <= lie[0] + TOGETHER_WITHIN


def test_where_no_part_may_be_captured_they_never_own_one_by_themselves():
    """The same draw with two witnesses: one of three owners is honest, and nothing false is agreed on."""
    together = play_together(
        ScenarioContext("accomplices", 2, 8, 6, "two-thirds"), {1: "accomplice", 2: "accomplice"}, captured=0.0
    )
    assert not together.false and not together.told.left


@pytest.mark.long
def test_if_what_others_signed_were_forgotten_the_second_liar_would_stay(monkeypatch: pytest.MonkeyPatch):
    """Mutant: only the owner of the agreed result is held to it."""
    monkeypatch.setattr(
        "atoll.verification.replay_audit.machine.words_against", lambda openings, seconded, findings: {}
    )
    with pytest.raises(Exception, match="lied together with others"):
        play_together(ScenarioContext("accomplices", 7, 8, 12, "two-thirds"), {1: "accomplice", 2: "accomplice"})


def test_liars_own_whole_parts_only_where_openings_would_find_them():
    plain = RunSettings(witnessed=True, captured=0.05, round=RoundSettings(quorum="two-thirds"))
    with pytest.raises(Exception, match="results are not opened"):
        decode_settings(encode_settings(plain))
    with pytest.raises(Exception, match="do not check each other"):
        decode_settings(encode_settings(replace(plain, witnessed=False, openings=SumCheckTerms(0.03, 4128))))
    with pytest.raises(Exception, match="weights by distances"):
        decode_settings(encode_settings(replace(plain, statistic="robust", openings=SumCheckTerms(0.03, 4128))))
    assert b"captured" not in encode_settings(RunSettings())


"""# ---- an answer is shown by a member that made it
-------------------------------------------------------------------
"""


def shut(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Sends its row to owners, since it committed to it, and never shows anything to any member who asks."""
    return (
        [] if isinstance(send.message, RowResponse | ExhibitResponse | ChunkResponse | ManifestResponse) else [send]
    )


def test_an_owner_that_crashes_after_its_answer_keeps_its_place_whatever_a_contributor_refuses():
    """It loses its rows in the moment in which its round closes; the other owner that made the same has them."""
    stage = ScenarioContext("accomplices", 1, 8, 17, "two-thirds")
    trust = {"tolerance": 0.33, "statistic": "trimmed_mean", "witnessed": True, "captured": 0.05}
    settings = stage.settings(openings=SumCheckTerms(0.1, CUT.leaf_bytes), **trust)
    swarm = stage.gather(SwarmKnobs(8, run=settings), villains={6: villain(shut)}, island=islands({}))
    told = SumCheckRecorder(stage)
    stage.world.watchers += [told.watch, crash_of(stage, swarm.founders[3], after_s=0.0)]
    stage.until_round(16, 1500.0)
    assert told.left.keys() <= {peer_name(6)}  # which owns parts, too


def crash_of(
    stage: ScenarioContext, victim: PeerId, after_s: float
) -> Callable[[float, VirtualComputer, Fact], None]:
    """So soon after it has closed round 2, in which it owned a part; it is back a second later."""
    world = stage.world

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if node.name == victim and isinstance(fact, RoundClosed) and fact.body.round == 2:
            assert any(signed.signer == victim for signed in fact.body.parts if signed is not None)
            world.at(now + after_s, lambda: world.crash(victim))
            world.at(now + 1.0, lambda: world.start(victim))

    return watch


NOWHERE = Digest(bytes(31) + b"7")


def staller(villain: ByzantineMember, send: Send) -> list[Effect]:
    """Answers rightly, and points to a blob that never comes."""
    if isinstance(send.message, ExhibitResponse):
        return [replace(send, message=replace(send.message, blob=NOWHERE))]
    silent = isinstance(send.message, ManifestResponse | ChunkResponse) and send.message.blob == NOWHERE
    return [] if silent else [send]


def test_who_points_to_what_never_comes_keeps_nobody_from_showing_the_answer():
    """The witness has it all. Else two such owners would take an honest one along that signed the same."""
    stage = ScenarioContext("accomplices", 1, 8, 12, "two-thirds")
    trust = {"tolerance": 0.33, "statistic": "trimmed_mean", "witnessed": True, "captured": 0.05}
    settings = stage.settings(openings=SumCheckTerms(0.1, CUT.leaf_bytes), **trust)
    stage.gather(SwarmKnobs(8, run=settings), villains={6: villain(staller)}, island=islands({}))
    told = SumCheckRecorder(stage)
    stage.world.watchers.append(told.watch)
    stage.until_round(11, 1500.0)
    assert not told.left and not told.complained, (told.left, told.complained, told.findings)


@pytest.mark.long
def test_two_liars_that_own_parts_by_themselves_and_show_nothing_both_lose_their_places():
    together = play_together(
        ScenarioContext("accomplices", 2, 8, 24, "two-thirds"), dict.fromkeys((1, 2), "buried")
    )
    assert len(together.false) > 1
    assert {name: how for name, (_, how) in together.told.left.items()} == dict.fromkeys(together.names, "away")


def test_who_signed_what_nobody_shows_is_complained_of(monkeypatch: pytest.MonkeyPatch):
    """Were once enough: then every honest voter says so of the witness of the first false part, and it is away."""
    monkeypatch.setattr("atoll.policy.fault_tolerance.STRIKES", 1)
    together = play_together(
        ScenarioContext("accomplices", 2, 8, 14, "two-thirds"), dict.fromkeys((1, 2), "buried")
    )
    told = together.told
    (owner,) = {peer for peer, round, part, _, _ in told.said if (round, part) in together.false[:1]}
    (witness,) = together.names - {owner}
    assert {who for who, of in told.complained if of == witness} == {peer_name(k) for k in (0, 3, 4, 5, 6, 7)}
    assert set(told.left) == {owner, witness}


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3000, 3030))
def test_many_swarms_whose_answers_are_opened(seed: int):
    run_scenario("openings", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("slanderers", seed, peers=[4, 7, 7, 10][seed % 4])
    run_scenario("opened", seed)


# ---- a rule is deleted, and the scenarios notice -----------------------------------------------------------


def test_if_one_checker_were_enough_anybody_could_be_framed(monkeypatch: pytest.MonkeyPatch):
    for room in (policy, draws, membership, findings):
        monkeypatch.setattr(room, "voices_needed", lambda voters, rule: 1)
    with pytest.raises(ScenarioFailed, match=r"lost their place|agreed .*'expelled'"):
        run_scenario("slanderers", 1, rounds=6)


def test_if_owners_were_not_asked_for_all_rows_a_lie_would_pass(monkeypatch: pytest.MonkeyPatch):
    """Mutant: checkers take the owner's word for what is drawn, and look at no block."""
    judge = work.judge_opening
    monkeypatch.setattr(
        "atoll.verification.task_builder.judge_opening",
        lambda *args: None if (found := judge(*args)) is None else replace(found, blocks=()),
    )
    with pytest.raises(Exception, match="the all_blocks"):
        played({2: "all_blocks"}, rounds=8)


def test_who_starts_again_still_says_where_the_openings_lie_that_it_laid_out(
    monkeypatch: pytest.MonkeyPatch,
):
    """Its disk holds them, and a note of the peer that each of them is for. Where they are over, so is the note."""
    monkeypatch.setattr(policy, "AUDIT_ROUNDS", 4)
    stage = ScenarioContext("openings", 1, 4, 9, "two-thirds")
    settings = replace(stage.settings(), tolerance=0.33, openings=SumCheckTerms(0.1, CUT.leaf_bytes))
    swarm = stage.gather(SwarmKnobs(4, run=settings), island=islands({}))
    world, owner = stage.world, swarm.founders[1]
    node = world.nodes[owner]

    def shown(round: int) -> dict[int, tuple[tuple[PeerId, ...], Digest | None]]:
        """By the number of each opening of what it answered: who may ask for it, and where it lies."""
        mine = node.machine.verifiers.find(ReplayAudits)
        cases = (case for key, case in mine.docket.cases.items() if key[:2] == (round, owner))
        return {case.number: (case.order, mine.exhibits.get(case.key)) for case in cases}

    def noted() -> set[int]:
        return {int(name.removeprefix(LAID)) for name in node.kept if name.startswith(LAID)}

    def ready() -> list[int]:
        return [round for round in sorted(noted()) if any(blob for _, blob in shown(round).values())]

    world.run(1e3, stop=ready)
    round = ready()[0]
    before = shown(round)
    world.crash(owner)
    world.start(owner)
    world.run(world.now + 0.5, stop=lambda: node.machine.round is not None)
    assert node.machine.round is not None and shown(round) == before
    for number, (order, blob) in before.items():
        for asker in order:
            event = Received(asker, ExhibitRequest(round, number))
            said = node.machine.handle(event, node.clock.local(world.now))
            assert [e.message for e in said if isinstance(e, Send)] == [ExhibitResponse(round, blob, number)]
    world.run(1e4, stop=lambda: swarm.head(owner) >= round + 5)
    assert round not in noted()
