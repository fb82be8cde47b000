"""Commit, then reveal, where members may lie: a member without a commitment receives no row."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest

from atoll.base.ids import Digest, PeerId, Seconds
from atoll.base.machine import Broadcast, Effect, Event, Received, Send
from atoll.peer.events import LocalContributionSkipped, RoundClosed
from atoll.peer.peer import Peer
from atoll.peer.round import commit_reveal
from atoll.peer.round.commit_reveal import BOUND, UNDER_WAY, CommitRevealGate, passing
from atoll.peer.round.commitments import CommitmentTable
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import TrainRound
from atoll.policy.plan import RoundPlan, RoundSettings
from atoll.protocol.allreduce.events import PartResultAccepted
from atoll.simulation.adversaries.commit_after_peek import PEEKERS, PeekingMember, never_counted
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios import run_scenario
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm, peer_name
from atoll.wire.codec import decode_statement, encode
from atoll.wire.evidence import commits_to_two_updates
from atoll.wire.messages.round import (
    ProposalMessage,
    RowContribution,
    RowRequest,
    RowResponse,
    UpdateCommitmentMessage,
)
from atoll.wire.messages.statements import Commitment, SignedStatement

WHO = peer_name(2)
LINKS = NetworkKnobs(0.01, 0.3, jitter_s=0.05)
TRUST = {
    "believed": {},
    "watched": {"witnessed": True, "statistic": "trimmed_mean"},
    "weighed": {"statistic": "robust"},
}


def swarm_of(peers: int = 7, seed: int = 1, trust: str = "watched", **more) -> VirtualSwarm:
    plan = RoundSettings(inner_steps=20, first_train_s=10, quorum="two-thirds")
    run = RunSettings(open_to_all=True, round=plan, tolerance=0.33, **TRUST[trust])
    return VirtualSwarm(seed, SwarmKnobs(peers, LINKS, run=run), **more)


def without_first_attempts(monkeypatch: pytest.MonkeyPatch, round: int) -> None:
    """Nothing is proposed in the first attempt of this round: everything was shown, and is shared again."""
    handle = Peer.handle

    def silenced(self: Peer, event: Event, now: Seconds) -> list[Effect]:
        effects, under_way = handle(self, event, now), self.round
        if under_way is None or under_way.plan.round != round or under_way.attempt > 0:
            return effects
        return [
            e for e in effects if not (isinstance(e, Send | Broadcast) and isinstance(e.message, ProposalMessage))
        ]

    monkeypatch.setattr(Peer, "handle", silenced)


def train_for(swarm: VirtualSwarm, seconds: float) -> None:
    """In round 0 one of them needs so long, and hands over nothing before."""
    island = swarm.world.nodes[WHO].island
    takes_s = island.takes_s
    island.takes_s = lambda work: seconds if isinstance(work, TrainRound) and work.round == 0 else takes_s(work)


# ---- no member looks first ----------------------------------------------------------------------------------


def play_peeking(kind: str, trust: str, rounds: int = 1) -> PeekingMember:
    """Raises InvariantBroken if it ever counts."""
    swarm = swarm_of(trust=trust, villains={2: PEEKERS[kind]})
    swarm.world.watchers.append(never_counted({WHO}))
    swarm.world.run(400, stop=lambda: min(swarm.heads()) >= rounds)
    assert min(swarm.heads()) >= rounds
    machine = swarm.world.nodes[WHO].machine
    assert isinstance(machine, PeekingMember)
    return machine


@pytest.mark.parametrize("trust", TRUST)
def test_an_owner_that_says_nothing_is_shown_nothing_and_never_counts(trust: str):
    """One of seven waits for rows, to commit to something made of them. Rounds go on without it."""
    assert play_peeking("peeker", trust).shown == 0


@pytest.mark.parametrize("trust", ["believed", "watched"])
def test_it_would_be_shown_rows_and_count_if_nobody_asked_for_its_word_first(
    trust: str, monkeypatch: pytest.MonkeyPatch
):
    """As it was before this rule."""
    monkeypatch.setattr(CommitRevealGate, "may_receive", lambda self, peer: True)
    with pytest.raises(InvariantBroken, match="looked before"):
        play_peeking("peeker", trust)


@pytest.mark.parametrize("trust", ["believed", "watched"])
def test_who_gives_nothing_sees_rows_and_cannot_give_something_in_the_next_attempt(
    trust: str, monkeypatch: pytest.MonkeyPatch
):
    """It passes, as honest members do that are late, and commits when the rows are shared again: that is proof."""
    without_first_attempts(monkeypatch, 0)
    turncoat = play_peeking("turncoat", trust)
    history = turncoat.peer.history
    assert turncoat.rows and history is not None
    assert {m.peer: m.standing for m in history.head_body.members}[WHO] == "expelled"


def test_it_would_count_if_words_of_earlier_attempts_bound_nobody(monkeypatch: pytest.MonkeyPatch):
    without_first_attempts(monkeypatch, 0)
    monkeypatch.setattr(commit_reveal, "commits_to_two_updates", lambda one, other: False)
    with pytest.raises(InvariantBroken, match="looked before"):
        play_peeking("turncoat", "watched")


class Tap:
    """An independent record beside the rule: what peers received, and to which peers they sent rows."""

    def __init__(self) -> None:
        self.heard: set[tuple[PeerId, int, PeerId]] = set()  # receiver, round, author
        self.shown, self.too_early = 0, list[str]()

    def watch(self, me: Peer, event: Event, effects: list[Effect]) -> None:
        match event:
            case Received(message=UpdateCommitmentMessage() | RowContribution() | RowResponse() as message):
                said = decode_statement(message.statement.body, message.statement.signer)
                if isinstance(said, Commitment):
                    self.heard.add((me.me, said.round, message.statement.signer))
            case _:
                pass
        for effect in effects:
            message = effect.message if isinstance(effect, Send) else None
            if me.round is None or not isinstance(message, RowContribution | RowResponse):
                continue
            self.shown += 1
            known = (me.me, message.round, effect.to) in self.heard
            if effect.to in me.round.plan.givers and not known:
                self.too_early.append(f"round {message.round}: {me.me} shows {effect.to} a row")


@pytest.fixture
def tap(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tap]:
    tap, handle = Tap(), Peer.handle

    def tapped(self: Peer, event: Event, now: Seconds) -> list[Effect]:
        effects = handle(self, event, now)
        tap.watch(self, event, effects)
        return effects

    monkeypatch.setattr(Peer, "handle", tapped)
    yield tap


@pytest.mark.parametrize(
    ("story", "seed", "peers", "rounds"),
    [("churn", 7, 8, 4), ("weighed", 1, 7, 2), ("owners", 1, 7, 3)],
)
def test_no_row_leaves_for_whoever_has_not_been_heard(tap: Tap, story: str, seed: int, peers: int, rounds: int):
    """Loss, kills, partitions, villains: of thousands of rows not one went out too early."""
    run_scenario(story, seed, peers, rounds, "two-thirds")
    assert tap.shown > 100 and tap.too_early == []


def test_where_members_trust_each_other_rows_wait_for_nobody(tap: Tap):
    """There the rule is off, and the tap sees that: one trains on when the others share."""
    plan = RoundSettings(inner_steps=20, first_train_s=10)
    swarm = VirtualSwarm(1, SwarmKnobs(7, LINKS, run=RunSettings(open_to_all=True, round=plan)))
    train_for(swarm, 30.0)
    swarm.world.run(60, stop=lambda: min(swarm.heads()) >= 0)
    assert tap.too_early


# ---- what it costs the honest ------------------------------------------------------------------------------


def test_an_owner_whose_training_is_not_over_says_so_and_combines_its_part():
    """It takes half a minute where ten seconds are planned. No member waits for the window of its part."""
    swarm = swarm_of()
    train_for(swarm, 30.0)
    passed: list[str] = []
    answered: dict[int, int] = {}
    closed: list[tuple[float, RoundClosed]] = []

    def watch(now: float, node, fact) -> None:
        match fact:
            case LocalContributionSkipped(why=why) if node.name == WHO and fact.round == 0:
                passed.append(why)
            case PartResultAccepted(owner=owner, owner_index=index) if fact.round == 0 and owner == WHO:
                answered[fact.part] = index
            case RoundClosed() if fact.round == 0:
                closed.append((now, fact))
            case _:
                pass

    swarm.world.watchers.append(watch)
    swarm.world.run(60, stop=lambda: min(swarm.heads()) >= 0)
    assert passed == [UNDER_WAY] and 0 in answered.values()
    assert closed[0][1].missing == (WHO,) and not closed[0][1].parts_missing
    assert closed[0][0] < 15, "all waited for its word, a quarter of a window, and for no whole one"


def test_an_update_that_comes_a_little_late_counts():
    """A second after the others began to share: it was waited for, and its author then saw rows."""
    swarm = swarm_of()
    train_for(swarm, 11.0)
    closed: list[RoundClosed] = []

    def watch(now: float, node, fact) -> None:
        if isinstance(fact, RoundClosed):
            closed.append(fact)

    swarm.world.watchers.append(watch)
    swarm.world.run(60, stop=lambda: min(swarm.heads()) >= 0)
    assert not closed[0].missing and WHO in closed[0].counted and not closed[0].parts_missing


def test_a_lost_word_is_asked_for_and_costs_a_second(monkeypatch: pytest.MonkeyPatch):
    """No member received one commitment when it was first sent."""
    handle, lost = Peer.handle, 0

    def loses(self: Peer, event: Event, now: Seconds) -> list[Effect]:
        nonlocal lost
        said = (
            isinstance(event, Received)
            and isinstance(event.message, UpdateCommitmentMessage)
            and event.sender == WHO
        )
        if said and lost < 6:
            lost += 1
            return []
        return handle(self, event, now)

    monkeypatch.setattr(Peer, "handle", loses)
    swarm, closed = swarm_of(), list[RoundClosed]()
    swarm.world.watchers.append(
        lambda _now, _n, fact: closed.append(fact) if isinstance(fact, RoundClosed) else None
    )
    swarm.world.run(9, stop=lambda: bool(closed))
    assert lost == 6 and closed[0].counted == tuple(sorted(swarm.founders)) and not closed[0].partly


def crash_between_attempts(swarm: VirtualSwarm) -> list[str]:
    """It commits, is killed, and has another update in the next attempt. Returns why it passes then."""
    passed: list[str] = []
    swarm.world.watchers.append(
        lambda _now, node, fact: (
            passed.append(fact.why) if isinstance(fact, LocalContributionSkipped) and node.name == WHO else None
        )
    )
    swarm.world.run(8)
    swarm.world.crash(WHO)
    swarm.world.run(8.5)
    swarm.world.start(WHO)
    swarm.world.run(300, stop=lambda: min(swarm.heads()) >= 1)
    assert min(swarm.heads()) >= 1
    return passed


def test_whoever_restarts_keeps_to_its_word_of_the_attempt_before(monkeypatch: pytest.MonkeyPatch):
    """What it had committed to is lost with the process, so it gives nothing, and is accused of no lie."""
    without_first_attempts(monkeypatch, 0)
    said: list[Commitment] = []
    say = CommitmentTable.say

    def says(self: CommitmentTable, commit: Commitment, signed: SignedStatement) -> list[Effect]:
        said.extend([commit] if self.me == WHO else [])
        return say(self, commit, signed)

    monkeypatch.setattr(CommitmentTable, "say", says)
    crash_between_attempts(swarm_of())
    mine = [(c.attempt, c.parts > 0, c.why) for c in said if c.round == 0]
    assert mine[0][1] and mine[-1] == (1, False, BOUND)


def test_it_would_be_called_a_liar_if_it_gave_what_it_trained_since(monkeypatch: pytest.MonkeyPatch):
    without_first_attempts(monkeypatch, 0)
    monkeypatch.setattr(CommitRevealGate, "bound", lambda self, commit: commit)
    with pytest.raises(InvariantBroken, match="liar"):
        crash_between_attempts(swarm_of())


@pytest.mark.parametrize(
    ("before", "attempt", "says"),
    [
        ({0: b"x"}, 1, "the same"),
        ({0: b"y"}, 1, "a pass"),
        ({0: b"x", 1: b""}, 2, "a pass"),  # two crashes: some heard the pass alone
        ({3: b"x"}, 2, "the same"),
        ({3: b"y"}, 2, "nothing"),  # its clock was ahead: a pass before that would make a lie of it
        ({3: b""}, 2, "the same"),
    ],
)
def test_after_crashes_no_word_makes_a_lie_of_one_before(before: dict[int, bytes], attempt: int, says: str):
    """A receiver of any two of them finds nothing to prove, whatever was trained since."""

    def word(attempt: int, root: bytes) -> Commitment:
        if not root:
            return passing(5, attempt, "why")
        return Commitment(5, attempt, Digest(root * 32), 3, 1, 1, 1.0, 1.0, 1)

    said = {f"said/5/{a}/commit": encode(word(a, root)) for a, root in before.items()}
    plan = SimpleNamespace(may_lie=True, round=5)
    mine = CommitRevealGate(cast(RoundPlan, plan), WHO, said | {"said/5/agreement": b""}).bound(word(attempt, b"x"))
    assert says == ("nothing" if mine is None else "the same" if mine.parts else "a pass")
    assert mine is None or not any(commits_to_two_updates(word(a, root), mine) for a, root in before.items())


# ---- early requests ----------------------------------------------------------------------------------------


def test_a_row_that_was_asked_for_too_early_is_opened_when_the_asker_has_spoken():
    """A member asks for a row before its commitment arrived: nothing, then its commitment, then the row."""
    swarm = swarm_of(villains={2: PEEKERS["peeker"]})
    asked_of = peer_name(0)
    node = swarm.world.nodes[asked_of]
    swarm.world.run(1)
    peer = node.machine
    assert peer is not None and peer.round is not None
    round = peer.round
    swarm.world.run(30, stop=lambda: round.patience.sharing)
    plan, now = peer.round.plan, node.clock.local(swarm.world.now)
    slot = plan.round, peer.round.attempt, plan.trace

    def opened(message) -> list[tuple[int, PeerId]]:
        effects = peer.handle(Received(WHO, message), now)
        rows = [e.message for e in effects if isinstance(e, Send) and e.to == WHO]
        return [(m.part, m.statement.signer) for m in rows if isinstance(m, RowResponse)]

    assert opened(RowRequest(*slot, 0, asked_of)) == []
    reduce = peer.round.reduce
    assert reduce is not None and asked_of in reduce.plan.reserves
    for part in range(reduce.plan.parts + 1):
        assert opened(RowRequest(*slot, part, peer_name(1))) == []
    kept = {(part, peer_name(1)) for part in range(reduce.plan.parts)} | {(0, asked_of)}
    assert reduce.state.row_server.hidden[WHO] == kept, "no more than could ever be opened is remembered"
    insider = swarm.world.nodes[WHO].machine
    assert isinstance(insider, PeekingMember) and insider.peer.round is not None
    later = insider.notary.sign(passing(plan.round, peer.round.attempt + 1, "it will give nothing then"))
    assert opened(UpdateCommitmentMessage(*slot, later)) == opened(RowRequest(*slot, 0, asked_of)) == [], (
        "it may give one now"
    )
    word = insider.notary.sign(insider.peer.round.update.commit(peer.round.attempt))
    assert opened(UpdateCommitmentMessage(*slot, word)) == [(0, asked_of)]
