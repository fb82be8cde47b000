"""Agreement under a hostile network, crashes and liars: never two bodies, never a framed voter, and an end."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from hostile_agreement import Table

from atoll.base.machine import Send
from atoll.keys.digest import digest
from atoll.policy.plan import quorum
from atoll.protocol.consensus import agreement
from atoll.protocol.consensus.agreement import Agreement
from atoll.wire.messages.round import Propose, Voted
from atoll.wire.messages.statements import Proposed

STORIES = int(os.environ.get("ATOLL_STORIES", "150"))


def play(seed: int, voters: int, rule: str, liars: int, needed: int | None = None) -> Table:
    table = Table(voters, needed or quorum(voters, rule), random.Random(seed), liars)
    table.play(400)
    return table


@pytest.mark.parametrize(("voters", "rule"), [(1, "majority"), (2, "majority"), (3, "majority"), (4, "two-thirds")])
def test_two_bodies_are_never_decided_and_peace_brings_a_decision(voters: int, rule: str):
    """Loss, duplicates, reordering, crashes with restarts, views closed at any moment; then everything arrives."""
    for seed in range(STORIES):
        table = play(seed, voters, rule, 0)
        table.heal(4 * voters + 2)
        assert len(table.decided) == 1, f"seed {seed}"


@pytest.mark.parametrize("voters", [4, 7])
def test_a_third_of_liars_neither_splits_the_voters_nor_frames_one(voters: int):
    """Liars vote twice, propose out of turn, claim what they did not see: evidence names only them."""
    for seed in range(STORIES):
        table = play(seed, voters, "two-thirds", (voters - 1) // 3)
        assert len(table.decided) <= 1, f"seed {seed}"
        table.heal(4 * voters)
        assert len(table.decided) == 1, f"seed {seed}"


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([(3, "majority"), (5, "majority"), (4, "two-thirds")]))
def test_whatever_the_enemy_draws(seed: int, swarm: tuple[int, str]):
    play(seed, swarm[0], swarm[1], 0)


def test_a_restarted_voter_repeats_its_vote_or_is_silent():
    """The proposer lies: after the voter's restart it proposes something else in the same view."""
    table = Table(4, 3, random.Random(0), liars=1)
    liar, voter = table.names[3], table.names[1]
    for machine in table.machines.values():
        machine.proposers = (liar, *table.names[:3])

    def hears(body: bytes) -> list[bytes]:
        signed = table.notaries[liar].sign(Proposed(0, 0, digest(body)))
        table.flying.clear()
        table._deliver(Send(voter, Propose(0, 0, "", signed, body, (), None)))
        return [s.message.statement.body for s in table.flying if isinstance(s.message, Voted)]

    first = hears(b"one body")
    table._start(voter)
    table.machines[voter].proposers = (liar, *table.names[:3])
    assert first and not hears(b"another body"), "it voted for another body"
    table._start(voter)
    table.machines[voter].proposers = (liar, *table.names[:3])
    assert hears(b"one body") == first


def caught(seeds: range, voters: int, rule: str = "majority", liars: int = 0, needed: int | None = None) -> str:
    for seed in seeds:
        try:
            play(seed, voters, rule, liars, needed)
        except AssertionError as why:
            return str(why)
    return ""


def test_mutant_the_highest_certified_body_does_not_bind(monkeypatch: pytest.MonkeyPatch):
    """Proposers propose what they like: what one voter saw decided is decided differently by the others."""
    monkeypatch.setattr(agreement, "_highest", lambda timeouts: None)
    assert "two bodies" in caught(range(400), 3)


def test_mutant_a_later_statement_replaces_the_first(monkeypatch: pytest.MonkeyPatch):
    """A restarted voter votes for another body in a view in which it voted before."""
    test_a_restarted_voter_repeats_its_vote_or_is_silent()
    monkeypatch.setattr(Agreement, "_said_otherwise", lambda self, stage, view, digest: False)
    with pytest.raises(AssertionError, match="another body"):
        test_a_restarted_voter_repeats_its_vote_or_is_silent()


def test_mutant_who_timed_out_votes_all_the_same(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Agreement, "_may_vote", lambda self, view: self.votes)
    assert "two bodies" in caught(range(400), 3)


def test_mutant_half_the_voters_are_enough():
    assert "two bodies" in caught(range(400), 4, needed=2)


def test_mutant_nothing_said_is_kept(monkeypatch: pytest.MonkeyPatch):
    """A voter that forgets its timeouts and votes is caught contradicting itself."""
    monkeypatch.setattr(Table, "kept", property(lambda self: {}, lambda self, value: None), raising=False)
    assert caught(range(400), 3)
