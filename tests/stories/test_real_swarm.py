"""What happens to real processes: one is killed in the middle, a trainer dies, every member loses power.

Nothing here is timed; `bench/survive.py` measures how long each of these takes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from real_swarm import Swarm
from warm import WarmPeer

pytestmark = [pytest.mark.net, pytest.mark.timeout(300)]

PEERS = 3
QUICK = ["run.rounds=0", "train.inner_steps=10", "sync.up=2bit"]
EAGER = ["run.rounds=0", "train.recipe=eager", "train.inner_steps=10"]
STREAMING = ["run.rounds=0", "train.recipe=streaming", "train.inner_steps=40", "sync.overlap=8"]


def together(base: Path, settings: list[str]) -> Swarm:
    swarm = Swarm(base, [*settings, f"run.start_peers={PEERS}"], begin=WarmPeer)
    swarm.found()
    for index in range(1, PEERS):
        swarm.join(index)
    return swarm


def test_a_killed_peer_and_a_dead_trainer_cost_one_round_each_and_a_blackout_none(tmp_path: Path):
    """One story, since starting a swarm takes longer than all that happens to it here."""
    with together(tmp_path, QUICK) as swarm:
        one_is_killed(swarm)
        a_trainer_dies(swarm, "LocalContributionSkipped")
        all_lose_power(swarm)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(STREAMING, id="streaming"),
        pytest.param(EAGER, id="eager", marks=pytest.mark.long),
    ],
)
def test_where_trainers_go_on_meanwhile_deaths_cost_no_more(tmp_path: Path, settings: list[str]):
    """What a dead trainer had handed over still counts, and if it is back in time nothing is missed at all."""
    with together(tmp_path, settings) as swarm:
        one_is_killed(swarm)
        a_trainer_dies(swarm, "RoundClosed")


def one_is_killed(swarm: Swarm) -> None:
    """Peer 2 gets SIGKILL as the share phase begins; the same attempt ends without it. It resumes from disk."""
    swarm.closed(2, peer=2)
    begun = swarm.wait(lambda f: f["fact"] == "UpdateSharingBegan" and f["by"] == 2, since=len(swarm.facts))
    swarm.kill(2)
    gone = len(swarm.facts)
    first = swarm.wait(
        lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and f["round"] >= begun["round"], since=gone
    )
    victim = swarm.wait(lambda f: f["fact"] == "Opened" and f["by"] == 2)["peer"]
    after = swarm.wait(lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and victim in f["missing"], since=gone)
    assert after["round"] <= first["round"] + 1
    assert not [f for f in swarm.facts[gone:] if f["fact"] == "RoundAttemptFailed"]

    swarm.resume(2)
    back = swarm.wait(
        lambda f: f["fact"] == "RoundClosed" and f["by"] == 2 and victim in f["counted"],
        since=len(swarm.facts),
    )
    same = swarm.wait(lambda f: f["fact"] == "RoundClosed" and f["by"] == 0 and f["round"] == back["round"])
    assert back["state"] == same["state"]


def a_trainer_dies(swarm: Swarm, noticed: str) -> None:
    """Its peer goes on, and counts again once another trainer has started, while the others do not wait.

    If it dies between two rounds, another one may start in time, so that the peer misses nothing.
    """
    trainer = swarm.peers[1].trainer()
    trainer.kill()
    hurt = len(swarm.facts)

    def is_replaced() -> bool:
        with suppress(StopIteration):
            return swarm.peers[1].trainer().pid != trainer.pid
        return False

    passed = swarm.wait(
        lambda f: f["by"] == 1 and (f["fact"] == noticed or (f["fact"] == "RoundClosed" and is_replaced())),
        since=hurt,
    )
    other = swarm.wait(lambda f: f["fact"] == "Opened" and f["by"] == 1)["peer"]
    again = swarm.wait(
        lambda f: (
            f["fact"] == "RoundClosed" and f["by"] == 0 and other in f["counted"] and f["round"] > passed["round"]
        ),
        since=hurt,
    )
    assert again["round"] <= passed["round"] + 12  # it starts anew while the others go on
    assert swarm.peers[1].trainer().pid != trainer.pid


def all_lose_power(swarm: Swarm) -> None:
    """All are killed at once and start again in their folders: the next round follows the last."""
    everybody = range(PEERS)
    ending = len(swarm.facts)
    for index in everybody:
        swarm.kill(index)
    for index in everybody:
        swarm.wait(lambda f, index=index: f["fact"] == "Exit" and f["by"] == index, since=ending)
    agreed = max(f["trained"] for f in swarm.facts if f["fact"] == "RoundClosed")
    dark = len(swarm.facts)
    for index in everybody:
        swarm.resume(index)
    onward = swarm.closed(agreed + 1, peer=0, since=dark)
    assert onward["trained"] == agreed + 1
    states = {
        swarm.wait(
            lambda f, index=index: (
                f["fact"] == "RoundClosed" and f["by"] == index and f["round"] == onward["round"]
            ),
            since=dark,
        )["state"]
        for index in everybody
    }
    assert states == {onward["state"]}
