"""The agreement, Raft in its place, and Snowball held to what they promise.

Many small worlds, twins, mutants that must die.

`python tests/protocol/conformance/run.py --minutes 10` goes on for as long as you like; a failure names its seed.
"""

from __future__ import annotations

import random
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).parent))
import run
from clocks import DRIFT
from mutants import MUTANTS, Mutant
from twins import namesakes, play_twins, scenarios
from world import World, story

from atoll.base.ids import PeerId
from atoll.base.machine import Broadcast, Send
from atoll.crypto.digest import digest
from atoll.crypto.signer import VoteKind
from atoll.protocol.agreement.events import Equivocation
from atoll.protocol.agreement.one_phase import OnePhaseAgreement
from atoll.protocol.agreement.two_phase import TwoPhaseAgreement
from atoll.simulation.signatures import RealKeys
from atoll.wire.messages.round import ProposalMessage, TimeoutMessage, VoteMessage
from atoll.wire.messages.statements import BaseStatement, Proposal, QuorumCertificate, ViewTimeout, Vote

THIRD = [(4, 60), (7, 15), (16, 3), (31, 1)]


@pytest.mark.parametrize(("voters", "seeds"), THIRD)
def test_a_third_of_liars_crashes_and_partitions_break_nothing_and_peace_brings_a_decision(voters: int, seeds: int):
    """Silent, late, doubled, lying, forging and replaying voters; what must hold is listed in `watch.py`."""
    for seed in range(seeds):
        story(seed, voters, (voters - 1) // 3, moves=60 if voters < 10 else 30)


@pytest.mark.parametrize(("voters", "seeds"), [(4, 30), (7, 2)])
def test_liars_that_speak_for_others_and_prove_what_they_do_not_claim_break_nothing(voters: int, seeds: int):
    """Proposals and timeouts in honest names under their own signatures, true certificates under other claims."""
    for seed in range(seeds):
        story(seed, voters, (voters - 1) // 3, moves=30, forgers=True)


@pytest.mark.parametrize(("voters", "seeds"), [(4, 24), (7, 8), (16, 2)])
def test_voters_that_do_not_hear_each_other_decide_through_one_that_all_hear(voters: int, seeds: int):
    """After the storm all links between honest voters stay cut but those of one; the liars hear everybody."""
    for seed in range(seeds):
        story(seed, voters, (voters - 1) // 3 * (seed % 2), moves=30, hub=True)


@pytest.mark.parametrize(
    ("voters", "liars", "rule", "machine"),
    [
        (4, 1, "two-thirds", TwoPhaseAgreement),
        (7, 2, "two-thirds", TwoPhaseAgreement),
        (3, 0, "majority", TwoPhaseAgreement),
        (3, 0, "majority", OnePhaseAgreement),
        (5, 0, "majority", OnePhaseAgreement),
    ],
)
def test_clocks_that_run_apart_and_are_set_break_nothing(
    voters: int, liars: int, rule: str, machine: type[TwoPhaseAgreement | OnePhaseAgreement]
):
    """A twentieth too fast or too slow, ten seconds forward or back in the storm; in peace they only run apart."""
    for seed in range(12 if voters < 5 else 4):
        story(seed, voters, liars, rule, machine=machine, drift=DRIFT)


def test_such_clocks_do_not_break_the_preference():
    """Timers fire early and late by what each peer's clock shows."""
    for seed in [s for s in range(48) if run.drift_of(s)][::3]:
        run.snow(seed)


@pytest.mark.parametrize("votes", ["ed25519", "ml-dsa-65"])
def test_the_same_with_real_signatures_of_either_kind(votes: VoteKind):
    """Nothing but the length of what is signed tells them apart; one liar, or Raft and none."""
    length = {"ed25519": 64, "ml-dsa-65": 3309}[votes]
    for seed in range(2):
        keys = RealKeys(seed, votes)
        lied_to = story(seed, 4, 1, moves=20, real=keys)
        crashed = story(seed, 3, 0, "majority", moves=20, real=keys, machine=OnePhaseAgreement)
        for world in (lied_to, crashed):
            assert world.watch.final is not None and {len(sig) for _, sig in world.watch.final.votes} == {length}


@pytest.mark.parametrize("voters", [1, 2, 3, 5])
def test_a_majority_that_only_crashes_agrees(voters: int):
    for seed in range(50):
        story(seed, voters, 0, "majority")


@pytest.mark.parametrize("voters", [1, 2, 3, 4, 5, 7])
def test_raft_behind_the_door_agrees_wherever_a_majority_does(voters: int):
    """The same worlds: crashes, torn writes, partitions, loss; and nobody leaves a view alone (`watch.py`)."""
    for seed in range(50):
        story(seed, voters, 0, "majority", machine=OnePhaseAgreement)


@pytest.mark.parametrize(("voters", "liars", "seeds"), [(4, 1, 5), (7, 2, 1), (4, 0, 4)])
def test_committees_follow_each_other_while_old_and_new_members_lie_lag_and_crash(
    voters: int, liars: int, seeds: int
):
    """Four heights by real vertices; of those who wait outside and of those let go many more lie than may."""
    changed = 0
    for seed in range(seeds):
        levels = story(seed, voters, liars, heights=4).levels
        changed += sum(a.keys != b.keys for a, b in pairwise(levels))
    assert changed >= seeds


@pytest.mark.parametrize(("voters", "seeds"), [(3, 24), (4, 10), (5, 10)])
def test_leaders_follow_each_other_through_committees_that_change(voters: int, seeds: int):
    for seed in range(seeds):
        story(seed, voters, 0, "majority", machine=OnePhaseAgreement, heights=4)


def test_no_scenario_of_twins_is_left_out_but_for_names():
    """One view: all 4 x 256 are namesakes of the 150 that are played."""
    every = {(twin, sides) for twin in range(4) for sides in product(range(16), repeat=2)}
    played = list(scenarios(1))
    assert set().union(*(namesakes(scenario, 1) for scenario in played)) == every and len(played) == 150


def test_twins_split_in_every_half_of_two_views():
    """Drawn ones; `long` plays every one."""
    draw = random.Random(1)
    for _ in range(600):
        play_twins((draw.randrange(4), tuple(draw.randrange(16) for _ in range(4))))


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_rule_that_is_deleted_is_missed(mutant: Mutant):
    """The listed seed catches the mutant and passes the machine as it is."""
    mutated = mutant.build()
    story(mutant.seed, **mutant.whole, **mutant.knobs())
    with pytest.raises(AssertionError):
        story(mutant.seed, **mutated, **mutant.knobs())


@pytest.mark.long
@pytest.mark.parametrize("engine", sorted(run.ENGINES))
def test_many_seeds(engine: str):
    for seed in range(1_000, 3_500):
        run.ENGINES[engine](seed)


@pytest.mark.long
@pytest.mark.parametrize(("voters", "seeds"), [(4, 2500), (7, 2500), (16, 300), (31, 40)])
def test_many_seeds_with_a_third_of_liars(voters: int, seeds: int):
    for seed in range(10_000, 10_000 + seeds):
        story(seed, voters, (voters - 1) // 3, moves=60 if voters < 10 else 30)


@pytest.mark.long
def test_twins_split_in_every_way():
    for scenario in scenarios(2):
        play_twins(scenario)


# ---- short stories -------------------------------------------------------------------------------------------


def quiet(voters: int = 4) -> World:
    """Everybody has begun and nothing has been delivered; the test hands out the messages."""
    world = World(3, voters, crashes=False)
    world.queue.clear()
    world.loss = world.doubled = 0.0
    return world


# Sentences in quotation marks: Castro & Liskov, Practical Byzantine Fault Tolerance, OSDI 1999. A pre-prepare is a
# proposal here, and a view-change message a timeout.


# A backup accepts a pre-prepare message if "it has not accepted a pre-prepare message for view v and sequence
# number n containing a different digest" (4.2)
@pytest.mark.parametrize("kind", ["propose", "vote", "timeout"])
def test_two_words_for_one_slot_become_evidence_once(kind: str):
    """p01 says two things; its third one is not reported again, and the first goes on to count."""
    world = quiet()
    host, liar = world.hosts[PeerId("p03")], world.hosts[PeerId("p00")]
    assert host.machine is not None and host.machine.proposer(0) == liar.name

    def says(word: bytes) -> list[Equivocation]:
        said: BaseStatement
        if kind == "propose":
            said = Proposal(7, 0, digest(word))
            message = ProposalMessage(7, 0, "", liar.notary.sign(said), word, (), None)
        elif kind == "vote":
            message = VoteMessage(7, 0, "", liar.notary.sign(Vote(7, 0, "prepare", digest(word))))
        else:
            message = TimeoutMessage(7, 0, "", liar.notary.sign(ViewTimeout(7, 0, -1, digest(word))), None)
        assert host.machine is not None
        effects = host.machine.receive(liar.name, message)
        return [e.fact for e in effects if hasattr(e, "fact") and isinstance(e.fact, Equivocation)]

    assert not says(b"one") and not says(b"one")
    (fact,) = says(b"two")
    assert fact.peer == liar.name and fact.evidence.first != fact.evidence.second
    assert not says(b"three")


# "if a replica receives a set of f + 1 valid view-change messages from other replicas for views greater than its
# current view, it sends a view-change message for the smallest view in the set, even if its timer has not expired;
# this prevents it from starting the next view change too late" (4.5.2)
def test_more_than_may_lie_close_a_view_for_everybody():
    """n = 7: two may lie, so two timeouts move nobody, the third moves all."""
    world = quiet(7)
    host = world.hosts[world.names[6]]
    assert host.machine is not None
    for index, peer in enumerate(world.names[:3]):
        signed = world.hosts[peer].notary.sign(ViewTimeout(7, 0, -1, bytes(32)))  # type: ignore[arg-type]
        effects = host.machine.receive(peer, TimeoutMessage(7, 0, "", signed, None))
        assert host.machine.view == (1 if index == 2 else 0)
    assert any(isinstance(e, Send | Broadcast) and isinstance(e.message, TimeoutMessage) for e in effects)


def test_a_restarted_proposer_repeats_its_proposal():
    """It kept the body with its vote: the view does not pass in silence, and the statement is the same."""
    world = quiet()
    world.draw.random = lambda: 0.0  # type: ignore[method-assign]
    name = world.names[0]
    host = world.hosts[name]
    if host.free is not None and 0 not in host.machine.state.proposed:  # type: ignore[union-attr]
        world._propose(host, 0)
    first = dict(world.watch.slots)
    sends: list[bytes] = []
    world.send = lambda sender, to, message: sends.append(message.statement.body)  # type: ignore[method-assign]
    world.crash(name)
    world.start(name)
    assert first[name, "propose", 0] in sends


def test_a_proof_that_is_shown_again_and_again_is_checked_once():
    """A liar repeats the certificate of a view that is over, or of this one: signatures cost time."""
    world = quiet()
    machine, liar = world.hosts[world.names[3]].machine, world.hosts[world.names[0]]
    assert isinstance(machine, TwoPhaseAgreement)
    checked = 0
    holds = machine.notary.certificate_holds

    def counted(certificate: QuorumCertificate, keys: dict[PeerId, bytes], quorum: int) -> bool:
        nonlocal checked
        checked += 1
        return holds(certificate, keys, quorum)

    machine.notary.certificate_holds = counted  # type: ignore[method-assign]
    machine.close_view(0)
    for view in (0, 1):
        prepare = Vote(7, view, "prepare", digest(b"body"))
        votes = sorted((p, world.hosts[p].notary.sign(prepare).signature) for p in world.names[:3])
        proof = QuorumCertificate(7, view, "prepare", digest(b"body"), tuple(votes))
        said = VoteMessage(7, 0, "", liar.notary.sign(replace(prepare, stage="commit")), proof)
        checked = 0
        for _ in range(5):
            machine.receive(liar.name, said)
        assert checked <= 1


def test_a_long_pause_leaves_nothing_behind():
    """Ten thousand views pass by the clock at a voter and at one without a vote: memory stays where it was."""
    world = quiet()
    for name in world.names[:2]:
        machine = world.hosts[name].machine
        assert machine is not None
        machine.votes = machine.votes and name == world.names[0]
        for view in range(10_000):
            machine.close_view(view)
        assert len(machine.tallies) <= 4 and len(machine.bodies) <= 5 and len(machine.sent_for_judgment) <= 5
