"""Whole swarms with adaptive rounds: all plan alike, and a vertex that asks for something else is refused.

In the virtual world losses fall with the rounds, and a step is 16 samples unless a round asks for others.
"""

from __future__ import annotations

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from atoll.base.machine import Fact
from atoll.base.workload import AdaptiveWorkloadPolicy, AdaptiveWorkloadState, LossAdaptiveBatchSize
from atoll.peer.events import AuditFindingRecorded, LocalTrainingEnded, RoundClosed
from atoll.peer.peer import Peer
from atoll.peer.round.context import context_after
from atoll.peer.round.vertex_body import check_body
from atoll.peer.settings import RunSettings
from atoll.peer.tasks import JudgeReplay
from atoll.policy.plan import RoundSettings, plan_round
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.simulated_audit_chain import VirtualTrainingChain
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.worker import VirtualWorker
from atoll.simulation.world import VirtualComputer

STEPS = 40


class Story:
    """Four members, unequally fast if told so; what they trained and closed, round by round."""

    def __init__(self, effort: AdaptiveWorkloadPolicy | None, slow: float = 1.0, peers: int = 4, **run) -> None:
        round = RoundSettings(inner_steps=STEPS, first_train_s=10, effort=UNSET if effort is None else effort)
        settings = RunSettings(open_to_all=True, round=round, **run)
        network = NetworkKnobs(0.005, 0.02, jitter_s=0.005)
        self.swarm = VirtualSwarm(1, SwarmKnobs(peers, network, run=settings))
        self.slow = self.swarm.founders[-1]
        node = self.swarm.world.nodes[self.slow]
        node.island.knobs = type(node.island.knobs)(step_s=0.05 * slow)
        self.trained: dict[int, dict[str, LocalTrainingEnded]] = {}
        self.closed: dict[int, RoundClosed] = {}
        self.audited = settings.audited_share > 0
        self.judged: list[JudgeReplay] = []
        self.findings = set[str]()
        self.swarm.world.watchers.append(self._watch)
        for peer in self.swarm.founders:
            self._overhear(self.swarm.world.nodes[peer].island)

    def run(self, rounds: int) -> Story:
        world = self.swarm.world
        world.run(world.now + 3600.0, stop=lambda: min(self.swarm.heads()) >= rounds - 1)
        assert min(self.swarm.heads()) >= rounds - 1
        return self

    def steps(self, round: int) -> list[int]:
        return sorted(fact.steps for fact in self.trained[round].values())

    @property
    def peer(self) -> Peer:
        machine = self.swarm.world.nodes[self.swarm.founders[0]].machine
        assert machine is not None
        return machine

    def _overhear(self, island: VirtualWorker) -> None:
        do, island.chain = island.run, VirtualTrainingChain(island.me) if self.audited else None

        def does(work: object) -> object:
            if isinstance(work, JudgeReplay):
                self.judged.append(work)
            return do(work)

        island.run = does

    def _watch(self, now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, LocalTrainingEnded):
            self.trained.setdefault(fact.round, {})[node.name] = fact
        if isinstance(fact, RoundClosed):
            self.closed[fact.round] = fact
        if isinstance(fact, AuditFindingRecorded):
            self.findings.add(fact.finding)


def test_a_round_in_seconds_ends_for_all_together_and_the_slow_take_fewer_steps():
    """One of four takes four times as long for a step: all train for one second."""
    story = Story(AdaptiveWorkloadPolicy(16, train_s=1.0), slow=4.0).run(6)
    for round in range(6):
        assert story.steps(round) == [5, 20, 20, 20]
        assert len(story.closed[round].body.commits) == 4
    last = story.closed[5].body
    assert last.metrics.samples == 65 * 16 and last.effort is UNSET


def test_where_time_ends_rounds_records_of_the_others_do_not_suffer():
    """Steps assigned are what the median member manages; by steps alone all would be taken for idle."""
    story = Story(AdaptiveWorkloadPolicy(16, train_s=1.0), slow=4.0, reputation=True).run(8)
    plan = plan_round(*_head(story, 7), story.peer.settings.round)
    scores = {peer: plan.scores[peer] for peer in story.swarm.founders}
    fast = [score for peer, score in scores.items() if peer != story.slow]
    usual = Story(None, reputation=True).run(8)
    before = plan_round(*_head(usual, 7), usual.peer.settings.round)
    assert min(fast) >= 0.95 * min(before.scores.values()) > scores[story.slow]


def test_where_time_ends_rounds_claimed_steps_buy_no_weight():
    """One takes a quarter of the others' steps: its record is a little worse, and nothing else weighs less."""
    from atoll.wire.codec import decode_statement

    def weights(effort: AdaptiveWorkloadPolicy | None) -> list[int]:
        closed = Story(effort, slow=4.0, reputation=True).run(2).closed[1]
        return sorted(decode_statement(s.body, s.signer).weight for s in closed.body.commits)

    timed, counted = weights(AdaptiveWorkloadPolicy(16, train_s=1.0)), weights(None)
    assert timed[3] < 1.5 * timed[0]
    assert counted[3] == counted[0] == STEPS * timed[3]  # where they are assigned they weigh


def test_each_takes_steps_by_its_own_speed_and_all_arrive_together():
    """One of four takes four times as long for a step: once vertices say so it takes a quarter of the steps."""
    story = Story(AdaptiveWorkloadPolicy(16, by_speed=True), slow=4.0, audit_rate=1.0, reputation=True).run(6)
    assert story.steps(0) == [STEPS] * 4, "nobody's speed is known"
    for round in range(2, 6):
        assert story.steps(round) == [STEPS // 4, *[STEPS] * 3]
        assert story.closed[round].body.metrics.samples == 13 * STEPS // 4 * 16
    asked = {work.peer: work.steps_max for work in story.judged if work.round >= 2}
    assert asked == {peer: STEPS // (4 if peer == story.slow else 1) for peer in story.swarm.founders}
    assert story.findings == {"accepted"}, "auditors know what each was asked for"


def test_losses_shorten_rounds_and_move_batches_alike_at_all_members():
    effort = AdaptiveWorkloadPolicy(16, steps_min=10, by_loss=True, batches=LossAdaptiveBatchSize(2.0, 8, 40))
    story = Story(effort).run(7)
    told = [story.closed[round].body.effort for round in range(7)]
    assert all(isinstance(one, AdaptiveWorkloadState) for one in told)
    for before, round in zip(told, range(1, 7), strict=False):
        assert story.steps(round) == [before.steps] * 4
        assert {fact.samples for fact in story.trained[round].values()} == {before.steps * before.batch}
    assert [one.batch for one in told] == [20, 24, 19, 15, 12, 9, 8]
    assert told[0].steps == STEPS > told[2].steps > told[4].steps >= 10


def test_a_vertex_that_asks_the_next_round_for_something_else_is_refused():
    """Every voter works it out from the vertex before and from the commitments in this one."""
    effort = AdaptiveWorkloadPolicy(16, steps_min=10, by_loss=True, batches=LossAdaptiveBatchSize(2.0, 8, 40))
    story = Story(effort).run(4)
    body = story.closed[3].body
    assert _flaw(story, body) is None
    asked = body.effort
    for wrong in (UNSET, replace(asked, steps=asked.steps + 1), replace(asked, batch=8), replace(asked, before=1)):
        assert "does not follow from its losses" in str(_flaw(story, replace(body, effort=wrong)))
    plain = Story(None).run(2)
    forged = replace(plain.closed[1].body, effort=AdaptiveWorkloadState(10, 16, 16, 5.0))
    assert "does not follow from its losses" in str(_flaw(plain, forged))


def test_as_many_samples_with_eight_members_as_with_four():
    asks = AdaptiveWorkloadPolicy(16, samples=4 * STEPS * 16 // 2, steps_min=2)
    four, eight = Story(asks).run(3), Story(asks, peers=8).run(3)
    assert four.steps(2) == [20] * 4 and eight.steps(2) == [10] * 8
    assert four.closed[2].body.metrics.samples == eight.closed[2].body.metrics.samples


@pytest.mark.parametrize("lie", [10**9, 2**39])
def test_who_says_that_it_learned_more_than_was_asked_moves_rates_no_further(lie: int):
    """The step that leads to the next state counts no more of one member than the round asked of it."""
    from atoll.peer.round.candidate import step_of
    from atoll.wire.messages.statements import Commitment

    honest = Commitment(1, 0, bytes(32), 4, STEPS, STEPS * 16, 2.0, 0.1, STEPS * 16)
    liar = replace(honest, samples=lie, weight=lie)
    for effort, counted in (
        (AdaptiveWorkloadPolicy(16, bounded=True), STEPS * 16),
        (AdaptiveWorkloadPolicy(16, samples=10**6), lie),
    ):
        story = Story(effort).run(1)
        plan = plan_round(*_head(story, 0), story.peer.settings.round)
        assert step_of((), [honest, liar], plan).samples == STEPS * 16 + counted


def _head(story: Story, round: int):
    history = story.peer.history
    return history.ids[round], history.bodies[round]


def _flaw(story: Story, body) -> str | None:
    peer, round = story.peer, body.round - 1
    plan = plan_round(*_head(story, round), peer.settings.round)
    ground = context_after(peer.settings, plan, _head(story, round)[1], peer.pool.recent(), peer.history.notary.run)
    return check_body(ground, peer.history.notary, body, body.time_s)
