"""Contributions in a vertex body, read from commitments and results written by hand."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST, Digest, PeerId
from atoll.policy.contributions import (
    CountedContribution,
    contribution_of,
    contributions_of,
    parts_counted,
    results_of,
)
from atoll.wire.codec import encode
from atoll.wire.messages.statements import (
    BaseStatement,
    Commitment,
    OwnerResult,
    SignedStatement,
    StepsTakenWhilePartitioned,
)
from atoll.wire.messages.vertex import SwarmRoundMetrics, VertexBody

ADA, BOB, CLEO, DAN = (PeerId(name) for name in ("ada", "bob", "cleo", "dan"))


def signed(by: PeerId, statement: BaseStatement) -> SignedStatement:
    return SignedStatement(by, encode(statement), b"")


def commit(steps: int, samples: int, late: StepsTakenWhilePartitioned | None = None) -> Commitment:
    plain = Commitment(3, 0, Digest(bytes([steps]) * 32), 2, steps, samples, 2.0, 0.1, samples)
    return plain if late is None else replace(plain, claim=late)


def result(part: int, *names: PeerId) -> OwnerResult:
    return OwnerResult(3, 0, part, 0, ZERO_DIGEST, 1, names)


def body(parts: tuple[SignedStatement | None, ...], commits: tuple[SignedStatement, ...]) -> VertexBody:
    return VertexBody(
        run=ZERO_DIGEST,
        round=3,
        attempt=0,
        parent=ZERO_DIGEST,
        time_s=0.0,
        proposer=ADA,
        parts=parts,
        state=ZERO_DIGEST,
        commits=commits,
        members=(),
        tickets=(),
        reports=(),
        metrics=SwarmRoundMetrics(0.0, 0, 0),
    )


def test_every_counted_update_and_combined_part_is_listed_once():
    """Ada counts in both parts, Bob in one; Dan combined both and sent no update."""
    parts = (signed(DAN, result(0, ADA, BOB)), signed(DAN, result(1, ADA)))
    late = StepsTakenWhilePartitioned(1, 4, 16)
    made = body(parts, (signed(ADA, commit(20, 80)), signed(BOB, commit(10, 40, late))))
    found = contributions_of(made)
    assert {peer: contribution_of(made, peer) for peer in found} == found
    assert contribution_of(made, PeerId("stranger")) is None
    assert list(found) == [ADA, BOB, DAN]
    assert (found[ADA].steps, found[ADA].samples, found[ADA].parts) == (20, 80, (True, True))
    assert (found[BOB].steps, found[BOB].late_steps, found[BOB].parts) == (10, 4, (True, False))
    assert found[BOB].root == bytes([10]) * 32 and found[BOB].claim is None
    assert found[DAN] == CountedContribution(None, (False, False), (0, 1))
    assert (found[DAN].steps, found[DAN].samples, found[DAN].root) == (0, 0, None)


def test_a_part_without_a_result_counts_for_no_member():
    """Part 0 has no result, part 1 holds bytes that do not decode: only the commitment remains."""
    made = body((None, SignedStatement(DAN, b"\xc1", b"")), (signed(CLEO, commit(5, 5)),))
    assert results_of(made) == (None, None)
    assert contributions_of(made) == {CLEO: CountedContribution(commit(5, 5), (False, False), ())}


def test_rows_are_counted_per_part():
    """Three results: Ada is in all, Bob in one, Cleo in none."""
    assert parts_counted([result(0, ADA, BOB), None, result(1, ADA), result(2, ADA)]) == {ADA: 3, BOB: 1}


def test_genesis_has_no_contributions():
    """A body without parts and commitments."""
    assert contributions_of(body((), ())) == {}
