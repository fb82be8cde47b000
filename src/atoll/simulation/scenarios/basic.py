"""Short scenarios: calm, growth, blackout, late_joiner, frozen, broken_links."""

from __future__ import annotations

from atoll.base.machine import Fact
from atoll.peer.events import RoundClosed
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.network import NetworkKnobs
from atoll.simulation.scenarios.harness import ScenarioContext
from atoll.simulation.swarm import SwarmKnobs
from atoll.simulation.worker import WorkerKnobs
from atoll.simulation.world import VirtualComputer

LINKS = NetworkKnobs(0.005, 0.02, jitter_s=0.005)
UNNOTICED_ROUNDS = 2  # rounds after a broken link: the current one, and the next, which may lack one of the two


def calm(stage: ScenarioContext) -> None:
    """No faults: every round counts all members, in its first attempt."""
    swarm = stage.gather()
    swarm.checkers.faultless = True
    stage.until_round(stage.rounds - 1, 30.0 * stage.rounds)
    if stage.attempts_failed or swarm.checkers.repairs:
        raise InvariantBroken(f"{stage.attempts_failed} attempts failed although nothing was wrong")


def growth(stage: ScenarioContext) -> None:
    """Two founders become six members by tickets and the real join path; then one is lost, and the others close
    rounds.
    """
    swarm = stage.gather(SwarmKnobs(stage.peers, run=stage.settings(open_to_all=False)))
    stage.until_round(1)
    ticket = swarm.invite(swarm.founders[0], uses=4)
    stage.until(lambda: bool(_tickets(stage)), 120.0, "the ticket never entered a vertex")
    for index in range(stage.peers, stage.peers + 4):
        swarm.join(index, via=swarm.founders[index % stage.peers], ticket=ticket)
        stage.world.run(stage.world.now + stage.draw.uniform(0.0, 3.0))
    stage.until(lambda: _voters(stage) == stage.peers + 4, 600.0, "not every peer became a member")
    if _tickets(stage):
        raise InvariantBroken("a ticket for four is still good after four used it")
    stage.until_round(max(swarm.heads()) + 2)
    lost = swarm.keys.name(stage.peers + 3)
    stage.fault("kill")
    stage.world.crash(lost)
    stage.until(lambda: _voters(stage) == stage.peers + 3, 600.0, "the lost member was not voted out")
    stage.until_round(max(max(swarm.heads()) + 3, stage.rounds))


def blackout(stage: ScenarioContext) -> None:
    """All peers stop at one moment, often during writes; they restart from disk and lose no agreed round."""
    swarm = stage.gather()
    for k in range(max(1, stage.rounds // 4)):
        stage.until_round(4 * k + stage.draw.randrange(2))
        if k % 2:
            stage.world.run(stage.world.now + stage.draw.uniform(0.0, 2.0))
        else:  # wait for the votes of a round, then stop within the milliseconds in which they are written
            fast = stage.draw.uniform(0.0, 0.25)
            round = max(swarm.heads()) + 1
            stage.until(lambda round=round: _voting(stage, round), 600.0, "no member voted")
            stage.world.run(stage.world.now + fast)
        closed = max(swarm.heads())
        stage.fault("blackout")
        for name in swarm.founders:
            stage.world.crash(name)
        stage.world.run(stage.world.now + stage.draw.uniform(0.5, 20.0))
        for name in swarm.founders:
            stage.world.at(
                stage.world.now + stage.draw.uniform(0.0, 2.0), lambda name=name: stage.world.start(name)
            )
        stage.until_round(closed + 1, stage.healed())
    stage.demand_progress()


def late_joiner(stage: ScenarioContext) -> None:
    """A peer joins after hundreds of rounds, a member sleeps through dozens: both hold the head soon."""
    swarm = stage.gather()
    stage.until_round(stage.rounds - 40)
    stage.fault("kill")
    stage.world.crash(swarm.founders[-1])
    stage.until_round(stage.rounds - 1)
    stage.world.start(swarm.founders[-1])
    name = swarm.join(stage.peers, via=swarm.founders[0])
    stage.until_round(stage.rounds, 120.0, [name, swarm.founders[-1]])
    stage.demand_progress()


def frozen(stage: ScenarioContext) -> None:
    """One member is suspended for ten seconds: the others go on without it, and it comes back."""
    swarm = stage.gather()
    stage.until_round(2)
    stage.world.run(stage.world.now + stage.draw.uniform(0.0, 2.0))
    who = stage.draw.choice(swarm.founders)
    before = max(swarm.heads())
    stage.fault("sleep")
    stage.world.sleep(who)
    stage.world.run(stage.world.now + 10.0)
    others = [p for p in swarm.founders if p != who]
    if stage.peers >= 4 and max(swarm.head(p) for p in others) <= before:
        raise InvariantBroken("no peer closed a round while one member slept for 10 s")
    stage.world.wake(who)
    stage.until_round(max(stage.rounds, max(swarm.heads()) + 2))
    stage.demand_progress()


def broken_links(stage: ScenarioContext) -> None:
    """One link after the other breaks for some rounds. Once members have noticed, all rows count in all parts
    again.
    """
    stage.quorum = "majority"
    run = stage.settings(round=stage.paced())
    swarm = stage.gather(SwarmKnobs(stage.peers, LINKS, WorkerKnobs(update_bytes=400_000), run=run))
    closed: dict[int, RoundClosed] = {}

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        if isinstance(fact, RoundClosed):
            closed.setdefault(fact.body.round, fact)

    stage.world.watchers.append(watch)
    stage.until_round(2)
    while max(swarm.heads()) < stage.rounds - 1:
        one, other = stage.draw.sample(swarm.founders, 2)
        stage.fault("link")
        stage.world.cut(one, other)
        stage.until_round(max(swarm.heads()) + UNNOTICED_ROUNDS)
        stage.until(lambda: _all_settled(stage), 120.0, f"the link of {one} and {other} keeps one of them out")
        noticed = max(swarm.heads()) + 2
        stage.until_round(noticed + 2)
        for round in range(noticed, noticed + 3):
            fact = closed[round]
            lost = set(swarm.founders) - set(fact.counted)
            if lost or fact.partly or fact.parts_missing:
                raise InvariantBroken(
                    f"without the link of {one} and {other} round {round} lost {lost or fact.partly}"
                )
        stage.world.network.heal()
        stage.until_round(max(swarm.heads()) + 2)


def _all_settled(stage: ScenarioContext) -> bool:
    newest = stage.newest
    return newest is not None and all(m.standing == "member" for m in newest.head_body.members)


def _voters(stage: ScenarioContext) -> int:
    newest = stage.newest
    return sum(m.votes for m in newest.head_body.members) if newest else 0


def _tickets(stage: ScenarioContext) -> int:
    """Agreed tickets that can still be used."""
    newest = stage.newest
    return sum(ticket.uses_left > 0 for ticket in newest.head_body.tickets) if newest else 0


def _voting(stage: ScenarioContext, round: int) -> bool:
    rounds = [n.machine.round for n in stage.swarm.honest if n.machine]
    return any(r is not None and r.plan.round == round and r.agreement.has_voted for r in rounds)
