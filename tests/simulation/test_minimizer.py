"""A failing seed arrives small: few faults, the replay command, and where it parts from a good run."""

from __future__ import annotations

from itertools import chain, repeat

import pytest

from atoll.base.ids import PeerId
from atoll.cli.main import main
from atoll.simulation.failure_minimizer import RUNS_MAX, FailureMinimizer
from atoll.simulation.invariants import InvariantBroken
from atoll.simulation.scenarios import SCENARIOS, ScenarioFailed, run_scenario
from atoll.simulation.world import VirtualWorld


def failure_of(name: str, seed: int, peers: int, rounds: int) -> ScenarioFailed:
    with pytest.raises(ScenarioFailed) as failed:
        run_scenario(name, seed, peers, rounds)
    return failed.value


@pytest.fixture
def brittle_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a peer that falls asleep after another one crashed breaks the world."""
    sleep = VirtualWorld.sleep

    def brittle(self: VirtualWorld, name: PeerId) -> None:
        sleep(self, name)
        if self.nodes[name].asleep and any(fault.startswith("crash.") for fault in self.faults.happened):
            raise InvariantBroken(f"{name} fell asleep after a crash")

    monkeypatch.setattr(VirtualWorld, "sleep", brittle)


# many faults and no join
@pytest.mark.parametrize("seed", [9, pytest.param(28, marks=pytest.mark.long)])
def test_a_failure_shrinks_to_the_faults_that_matter(
    seed: int, brittle_sleep: None, capsys: pytest.CaptureFixture[str]
):
    """Two of eight or eleven drawn faults remain, and the printed command fails in the same way."""
    failure = failure_of("churn", seed, peers=5, rounds=6)
    minimizer = FailureMinimizer(failure, SCENARIOS)
    told = minimizer.minimize().splitlines()
    assert len(failure.faults) >= 8 and minimizer.runs <= RUNS_MAX
    assert [name.split(".")[0] for name in minimizer.smallest.faults] == ["crash", "sleep"]
    assert "fell asleep after a crash" in told[0]
    assert any("the first event that differs" in line for line in told)
    command = told[-1].split("replay: atoll ")[1].split()
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 5 and "fell asleep after a crash" in capsys.readouterr().err


def test_a_failure_without_faults_says_so(monkeypatch: pytest.MonkeyPatch):
    """If the run fails without any fault, one run is enough."""

    def fails(stage) -> None:
        stage.gather()
        stage.until_round(0)
        for place in (1, 2):
            stage.world.crash(stage.swarm.founders[place])
        raise RuntimeError("the virtual sky fell")

    monkeypatch.setattr(SCENARIOS["calm"], "tell", fails)
    minimizer = FailureMinimizer(failure_of("calm", 1, peers=4, rounds=2), SCENARIOS)
    assert "0 of 2 faults, after 1 runs" in minimizer.minimize()


def test_the_minimizer_stops_when_its_time_is_over(brittle_sleep: None):
    """The clock passes the limit during the first run: the report names what is smallest until then."""
    times = chain([0.0, 1.0], repeat(1e6))
    minimizer = FailureMinimizer(failure_of("churn", 0, peers=5, rounds=6), SCENARIOS, clock=lambda: next(times))
    assert "replay: atoll simulate churn" in minimizer.minimize() and minimizer.runs == 1
