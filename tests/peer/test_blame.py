"""Blame from commitments: an outlier is named first, and what cannot be compared is not invented."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.features.attribution.statistics import blame_by_loss
from atoll.simulation.signatures import VirtualSignatureVerifier, VirtualSigner
from atoll.verification.state_validation.statistics import refusals
from atoll.wire.envelope import StatementSigner
from atoll.wire.messages.statements import Commitment, RollbackOrder
from atoll.wire.messages.vertex import SwarmRoundMetrics, VertexBody

RUN = Digest(bytes(32))


def body(round: int, losses: dict[str, float]) -> VertexBody:
    commits = []
    for name, loss in losses.items():
        notary = StatementSigner(RUN, VirtualSigner(PeerId(name)), VirtualSignatureVerifier())
        commits.append(notary.sign(Commitment(round, 0, ZERO_DIGEST, 1, 10, 10, loss, 0.1, 10)))
    metrics = SwarmRoundMetrics(0.0, 0, 0)
    return VertexBody(
        RUN, round, 0, ZERO_DIGEST, 0.0, PeerId("a"), (), ZERO_DIGEST, tuple(commits), (), (), (), metrics
    )


def test_a_peer_whose_loss_stands_apart_and_whose_updates_hurt_is_named_first():
    """c reports 3 above the others, and their loss rises by 1 after each of its updates, falls by 0.5 otherwise."""
    bodies = [
        body(0, {"a": 2.0, "b": 2.0}),
        body(1, {"a": 1.5, "b": 1.5, "c": 4.5}),
        body(2, {"a": 2.5, "b": 2.5}),
        body(4, {"a": 2.0, "b": 2.0, "c": 5.0}),
        body(5, {"a": 3.0, "b": 3.0}),
    ]
    peers, jumps = blame_by_loss(bodies)
    first = peers[0]
    assert first.peer == "c" and first.rounds == 2 and first.excess == pytest.approx(3.0)
    assert (first.rise, first.rise_without) == (pytest.approx(1.0), pytest.approx(-0.5))
    assert all(p.excess is not None and p.excess <= 0 and p.rise_without is None for p in peers[1:])
    assert not any("c" not in j.counted and j.round in (2, 5) for j in jumps)


def test_one_alone_is_compared_with_nobody():
    (only,), jumps = blame_by_loss([body(0, {"a": 2.0}), body(1, {"a": 2.5})])
    assert only.excess is only.worst is only.rise is only.rise_without is None
    assert jumps[0].round == 1 and jumps[0].by == 0.5 and jumps[0].counted == ("a",)
    assert blame_by_loss([body(0, {})]) == ([], [])


def went_back(body: VertexBody, to: int) -> VertexBody:
    """This vertex goes back, as validators demand."""
    amend = RollbackOrder(ZERO_DIGEST, to, ZERO_DIGEST, ZERO_DIGEST, to + 1, b"")
    return replace(
        body, reports=(StatementSigner(RUN, VirtualSigner(PeerId("a")), VirtualSignatureVerifier()).sign(amend),)
    )


def test_who_counted_in_what_was_left_before_is_not_named_again():
    """Round 3 left 2 behind, and its own updates moved nothing.

    Round 6 leaves 4 and 5, which follow from round 1.
    """
    trained = [replace(body(round, {"a": 1.0, who: 1.0}), parts=(None,)) for round, who in enumerate("abcdefg")]
    bodies = [*trained[:3], went_back(trained[3], 1), *trained[4:6], went_back(trained[6], 1)]
    first, second = refusals(bodies)
    assert (first.round, first.refused, first.contributors) == (3, (2,), ("a", "c"))
    assert (second.round, second.refused, second.contributors) == (6, (4, 5), ("a", "e", "f"))
