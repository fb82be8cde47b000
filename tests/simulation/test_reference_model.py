"""The reference model beside the simulator: mutants of rules that all peers share are caught by nothing else."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.policy import membership_change, votes
from atoll.policy.membership_change import _MembershipChange
from atoll.simulation.scenarios import ScenarioFailed, run_scenario
from atoll.simulation.worker import VirtualWorker
from atoll.wire.messages.statements import LeaveReport


def test_a_join_that_is_admitted_a_round_too_early(monkeypatch: pytest.MonkeyPatch):
    """Mutant: the vertex that admits a peer lets it vote at once, before it has the state."""
    line_of = membership_change.joining_line
    early = lambda join, identity, standing, round: line_of(join, identity, "new", round)  # noqa: E731
    monkeypatch.setattr(membership_change, "joining_line", early)
    with pytest.raises(ScenarioFailed, match=r"lines of p\d+: expected .*'observer'.* agreed .*'new'"):
        run_scenario("growth", 1)


def test_a_leave_that_is_ignored(monkeypatch: pytest.MonkeyPatch):
    """Mutant: a member that said farewell stays a voter."""
    find = _MembershipChange._find_departing

    def deaf(self, contributors, rule):
        found = find(self, contributors, rule)
        self.leaving -= {r.by for r in self.reports if isinstance(r.statement, LeaveReport)}
        return found

    monkeypatch.setattr(_MembershipChange, "_find_departing", deaf)
    with pytest.raises(ScenarioFailed, match=r"lines of p\d+: expected .*'away'.* agreed .*'(member|new)'"):
        run_scenario("churn", 2, peers=4, rounds=6)


def test_a_row_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch):
    """Mutant: all owners add the first row twice."""
    combine = VirtualWorker._combine

    def doubled(self, work):
        done = combine(self, work)
        assert done.payload is not None
        return replace(done, payload=replace(done.payload, data=(*done.payload.data, work.rows[0].peer)))

    monkeypatch.setattr(VirtualWorker, "_combine", doubled)
    with pytest.raises(ScenarioFailed, match=r"counts .* expected"):
        run_scenario("calm", 1)


def test_a_vote_that_is_earned_too_early(monkeypatch: pytest.MonkeyPatch):
    """Mutant: one round less is enough for a vote."""
    next_votes = votes.next_votes

    def early(parent, members, tickets, contributors, reports, terms):
        sooner = votes.VoteEligibilityTerms(terms.after_rounds - 1, terms.sponsor_rounds)
        return next_votes(parent, members, tickets, contributors, reports, sooner)

    monkeypatch.setattr("atoll.peer.round.vertex_body.next_votes", early)
    with pytest.raises(ScenarioFailed, match=r"lines of p\d+: expected .*'apprentice'.* agreed .*'trainer'"):
        run_scenario("recruiter", 1)
