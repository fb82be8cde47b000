"""Every bench still starts: it finds what it imports, and says how to ask it."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.base.machine import Fact
from atoll.runtime.event_log import fact_to_entry
from atoll.simulation.swarm import SwarmKnobs, VirtualSwarm
from atoll.simulation.world import VirtualComputer

BENCH = Path(__file__).parents[1] / "bench"
# parts of benches, and atoll's test build
PARTS = {"cheats", "form", "real_swarm", "reduction_world", "soak_judge", "traffic_counts", "villain"}
BENCHES = sorted({file.stem for file in BENCH.glob("*.py")} - PARTS)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports one by its name, and forgets it afterwards: other tests have files of the same names."""
    monkeypatch.syspath_prepend(BENCH)
    for file in BENCH.glob("*.py"):
        monkeypatch.delitem(sys.modules, file.stem, raising=False)
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(BENCH):
            del sys.modules[name]


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_says_how_to_ask_it(
    name: str,
    bench: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """`--help` alone, in this process: every import and every option is looked at, and nothing is measured."""
    monkeypatch.setattr(sys, "argv", [f"bench/{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        bench(name).main()
    told = capsys.readouterr().out
    assert end.value.code == 0 and "--json" in told
    assert "--quick" in told or name == "lab"  # which is what others measure in


def test_the_agreement_bench_knows_whose_turn_it_is(bench: Callable[[str], Any]):
    """It kills the next proposer; a virtual swarm tells who that was in a dozen rounds."""
    proposer = bench("agreement").proposer
    swarm, facts = VirtualSwarm(1, SwarmKnobs(peers=5)), list[dict[str, object]]()

    def watch(now: float, node: VirtualComputer, fact: Fact) -> None:
        entry = fact_to_entry(fact, now) if node.name == swarm.honest[0].name else None
        facts.extend([entry] if entry is not None else [])

    swarm.world.watchers.append(watch)
    swarm.world.run(3600.0, stop=lambda: min(swarm.heads()) >= 12)
    closed = [fact for fact in facts if fact["fact"] == "RoundClosed"]
    machine = swarm.honest[0].machine
    assert machine is not None
    told = [proposer(machine.run, facts, before) for before in closed[4:-1]]
    assert told == [after["proposer"] for after in closed[5:]] and len(set(told)) == 5


def test_the_blackout_bench_excuses_a_round_that_was_trained_for_in_vain(bench: Callable[[str], Any]):
    """Two rounds that counted nobody: before one the peer was killed, of the other it saw the end."""

    def told(*facts: tuple[str, int]) -> list[dict[str, Any]]:
        return [{"fact": fact, "round": round} for fact, round in facts]

    bodies = [SimpleNamespace(round=n, parts=(None,), commits=() if n in (3, 5) else ("one",)) for n in range(7)]
    killed = told(
        ("LocalTrainingEnded", 3),
        ("GenesisKnown", -2),
        ("RoundClosed", 3),
        ("LocalTrainingEnded", 4),
        ("RoundClosed", 4),
    )
    in_vain = told(("LocalTrainingEnded", 5), ("RoundClosed", 5))
    first_in_vain = bench("blackout").first_in_vain
    assert first_in_vain(bodies, [killed]) == math.inf
    assert first_in_vain(bodies, [killed, killed + in_vain]) == 5


def test_equal_bits_are_equal_whatever_a_busy_computer_did_to_the_run(bench: Callable[[str], Any]):
    """A round was cut into fewer parts, as load makes it: an excuse where states differ, and no more than that."""
    compared = bench("exact").Compared
    cut = "round 9 was cut into 1 parts"
    assert compared("ab", "ab", rounds=4, differs=None, values=0, unlike=cut, sent_bytes=1).same
    assert not compared("ab", "cd", rounds=4, differs=3, values=7, unlike=cut, sent_bytes=1).same


@pytest.mark.parametrize(("caught", "stake"), [(0.05, 19), (0.1, 9), (0.2, 4)])
def test_honesty_is_best_from_the_stake_on_that_the_audit_bench_says(
    caught: float, stake: float, bench: Callable[[str], Any]
):
    """S = g (1 − p') / p': chances of 5 %, 10 %, 20 % ask for 19, 9, 4 times the gain."""
    audit = bench("audit")
    assert audit.stake_needed(1.0, caught) == pytest.approx(stake)
    assert audit.expected_gain(1.0, caught, stake) == pytest.approx(0.0)
    assert audit.expected_gain(1.0, caught, stake + 0.1) < 0.0 < audit.expected_gain(1.0, caught, stake - 0.1)


def test_a_cheater_in_few_segments_needs_a_little_more_to_lose(bench: Callable[[str], Any]):
    """Gain and risk both shrink with the share touched; the bound for all of them is g / p'."""
    audit, least = bench("audit"), 0.0
    for touched in (1.0, 0.5, 0.1, 0.001):
        least = audit.stake_needed(touched, audit.caught_share(0.05, touched=touched))
        assert least <= audit.stake_for_any(1.0, 0.05) == pytest.approx(20.0)
    assert least > 19.9
    assert audit.unseen_share(audit.caught_share(0.05), 50) == pytest.approx(0.95**50)
