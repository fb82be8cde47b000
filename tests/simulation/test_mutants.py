"""A simulator that catches no mutant proves nothing: a rule of the protocol is deleted, and some seed notices.

A mutant replaces one small method. The seeds begin shortly before the first that catches it; the unmutated code
passes them all. Mutants of the voting rules alone are caught faster in tests/protocol/conformance.
"""

from __future__ import annotations

import pytest

from atoll.policy import plan as plans
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.world import VirtualWorld


def caught(name: str, seeds: range, peers: int | None = None, rounds: int | None = None) -> str:
    """What the first failing seed says; empty if none fails."""
    for seed in seeds:
        try:
            run_scenario(name, seed, peers, rounds)
        except ScenarioFailed as failure:
            return str(failure)
    return ""


def test_a_voter_that_writes_nothing_down_says_two_things(monkeypatch: pytest.MonkeyPatch):
    """Mutant: what a voter said is never kept."""
    keep = VirtualWorld._keep

    def forgetful(self: VirtualWorld, node, name: str, blob: bytes | None) -> None:
        if not (name.startswith("said/") and name.endswith("agreement")):
            keep(self, node, name, blob)

    monkeypatch.setattr(VirtualWorld, "_keep", forgetful)
    assert "two things" in caught("churn", range(0, 20), peers=4, rounds=15)


def test_words_that_leave_before_the_disk_is_done_are_noticed(monkeypatch: pytest.MonkeyPatch):
    """Mutant: neither words nor work wait until what they rest on is durable."""
    monkeypatch.setattr(VirtualWorld, "_durable_at", lambda self, node: self.now)
    assert caught("churn", range(7, 20), peers=5, rounds=15)


def test_a_quorum_of_half_splits_the_run(monkeypatch: pytest.MonkeyPatch):
    """Mutant: one vote too few makes a certificate."""
    monkeypatch.setattr(plans, "quorum", lambda voters, rule: max(1, voters // 2))
    assert "two vertices" in caught("churn", range(1, 20), peers=5, rounds=15)


def test_a_part_counted_without_its_proof_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """Mutant: an owner combines whatever bytes arrive, whether they are the ones committed to or not."""
    monkeypatch.setattr("atoll.protocol.allreduce.validation.merkle_holds", lambda *proof: True)
    assert "holds" in caught("liars", range(3, 9), rounds=4)
