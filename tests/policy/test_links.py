"""Members' link reports, and the links that all peers derive from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.base.ids import ZERO_DIGEST as RUN
from atoll.base.ids import PeerId
from atoll.base.limits import FULL_MESH_MAX
from atoll.policy.links import (
    LATENCIES_S,
    RATES_BYTES_S,
    REPORT_BYTES_MAX,
    STEP,
    TransferRates,
    agreed_links,
    agreed_weights,
    report,
    report_flaw,
)
from atoll.policy.membership import VerifiedReport
from atoll.policy.membership_change import next_members
from atoll.wire.messages.statements import Commitment, JoinRequest, LeaveReport
from atoll.wire.messages.vertex import Member, SwarmRoundMetrics, VertexBody

PEERS = tuple(PeerId(f"p{i}") for i in range(4))


def member(peer: PeerId, links: bytes) -> Member:
    return Member(peer, b"", (), "trainer", "member", 0, 1.0, "", links=links)


@given(st.floats(50e-6, 6.0), st.floats(1e3, 1.3e8))
def test_what_is_read_is_what_was_measured_rounded_up_to_a_step(latency_s: float, rate: float):
    near = {p: dict.fromkeys(set(PEERS) - {p}, latency_s) for p in PEERS}
    members = [member(p, report(TransferRates(rate), near[p], PEERS)) for p in PEERS]
    links = agreed_links(members, PEERS)
    assert links is not None
    assert latency_s <= links.latency_s[0][1] <= latency_s * STEP * (1 + 1e-9) and links.latency_s[2][2] == 0
    assert rate <= links.up_bytes_s[3] <= rate * STEP * (1 + 1e-9)


def test_one_direction_is_enough_and_of_two_words_the_longer_one_counts():
    a, b = PEERS[:2]
    said = {a: report(TransferRates(), {b: 0.010}, (a, b)), b: report(TransferRates(), {a: 0.100}, (a, b))}
    both = agreed_links([member(p, said[p]) for p in (a, b)], (a, b))
    assert both is not None and both.latency_s[0][1] == both.latency_s[1][0] >= 0.100
    one = agreed_links([member(a, said[a]), member(b, b"")], (a, b))
    assert one is not None and one.latency_s[1][0] < 0.015
    assert agreed_links([member(a, b""), member(b, b"")], (a, b)) is None


def test_places_in_a_report_stay_right_when_others_join_and_when_some_of_the_members_own_nothing():
    """Members are only ever added behind the others; a report that is older than a member says nothing of it."""
    a, b, c, d = PEERS
    said = report(TransferRates(), {a: 0.001, c: 0.2}, (a, b, c))
    members = [
        member(a, b""),
        member(b, said),
        member(c, report(TransferRates(), {a: 0.05, b: 0.3}, (a, b, c))),
        member(d, b""),
    ]
    links = agreed_links(members, (c, b))
    assert links is not None and 0.3 <= links.latency_s[0][1] <= 0.3 * STEP
    assert agreed_links(members, (a, d)) is None


def after(parent: tuple[Member, ...], *reports: VerifiedReport, commits: dict[PeerId, Commitment] | None = None):
    body = VertexBody(RUN, 5, 0, RUN, 0.0, PEERS[0], (), RUN, (), parent, (), (), SwarmRoundMetrics(0.0, 0, 0))
    return next_members(body, commits or {}, set(), reports, "majority", True)[0]


def left(peer: PeerId) -> VerifiedReport:
    return VerifiedReport(peer, LeaveReport(6, ""))


def joined(peer: PeerId) -> VerifiedReport:
    return VerifiedReport(peer, JoinRequest(peer, b"key", b"", (), "trainer", "", RUN, b""))


def test_rows_of_those_who_are_gone_go_with_them_and_the_others_still_mean_the_same():
    """p1 leaves, a stranger joins, p1 comes back: what p0 said of p3 is never read as said of another."""
    told = {q: 0.01 * (k + 1) for k, q in enumerate(PEERS)}
    members = tuple(
        member(p, report(TransferRates(1e6), {q: s for q, s in told.items() if q != p}, PEERS)) for p in PEERS
    )
    a, b, c, d = PEERS
    before = agreed_links(members, (a, c, d))
    gone = after(members, left(b))
    assert [len(m.links) for m in gone] == [7, 0, 7, 7]
    assert agreed_links(gone, (a, c, d)) == before
    grown = after(gone, joined(PeerId("stranger")))
    assert agreed_links(grown, (a, c, d)) == before
    back = after(grown, joined(b))
    assert back[1].is_present and agreed_links(back, (a, c, d)) == before
    assert agreed_links(back, (a, b)) is None  # what a said of b is gone, and what b said too


def test_a_run_that_had_many_members_in_its_life_still_measures_those_it_has():
    """A hundred came and went; the four who are here report in nine bytes, in their own order."""
    ghosts = tuple(replace(member(PeerId(f"ghost {k}"), b""), standing="away") for k in range(100))
    members = (*ghosts[:50], *(member(p, b"") for p in PEERS), *ghosts[50:])
    said = {p: report(TransferRates(), dict.fromkeys(PEERS, 0.02), PEERS) for p in PEERS}
    word = Commitment(6, 0, RUN, 1, 1, 1, 1.0, 1.0, 1)
    closed = after(members, commits={p: replace(word, links=said[p]) for p in PEERS})
    assert agreed_links(closed, PEERS) is not None


def test_a_report_is_never_longer_than_there_is_room_for_however_many_members_come_after_it():
    """Of two members one says as much as a commitment may hold; then the others of a full mesh are let in."""
    longest = bytes([1] * REPORT_BYTES_MAX)
    assert report_flaw(longest) is None
    members = tuple(member(p, longest) for p in PEERS[:2])
    for k in range(2, FULL_MESH_MAX, 2):
        members = after(members, *(joined(PeerId(f"p{n:02}")) for n in (k, k + 1)))
    assert sum(m.is_present for m in members) == FULL_MESH_MAX
    assert all(len(m.links) <= REPORT_BYTES_MAX for m in members) and members[0].links


def test_old_rows_do_not_stay_for_ever_where_nobody_reports_any_more():
    """The sixty-fifth member is admitted: from now on no member measures all others, and old reports expire."""
    peers = tuple(PeerId(f"p{k:02}") for k in range(FULL_MESH_MAX))
    members = tuple(member(p, report(TransferRates(1e6), dict.fromkeys(peers, 0.01), peers)) for p in peers)
    assert agreed_links(after(members), peers) is not None
    crowd = after(members, joined(PeerId("one more")))
    assert not any(m.links for m in crowd) and agreed_links(crowd, peers) is None


@pytest.mark.parametrize(("known", "unseen"), [(0, RATES_BYTES_S[-1]), (1, RATES_BYTES_S[-1]), (2, 1e6), (3, 1e6)])
def test_uplinks_that_nobody_saw_at_their_limit_are_as_fast_as_those_of_most_others(known: int, unseen: float):
    """While few are known, these are known because they are slow."""
    near = dict.fromkeys(PEERS, 0.01)
    said = [TransferRates(1e6 if i < known else None) for i in range(4)]
    links = agreed_links(
        [member(p, report(rates, near, PEERS)) for p, rates in zip(PEERS, said, strict=True)], PEERS
    )
    assert links is not None and unseen <= links.up_bytes_s[3] <= STEP * unseen


MEASURED_ON_EQUAL_LINKS = [  # MB/s that four members once measured on 50 Mbit/s each
    (7.5, 6.0, 4.8, 6.0),
    (7.5, 14.6, 7.5, 9.4),
    (7.5, 14.6, 11.7, 9.4),
    (7.5, 3.8, 7.5, 3.8),
]


@pytest.mark.parametrize("rates", MEASURED_ON_EQUAL_LINKS)
def test_rates_that_differ_by_no_more_than_such_measurements_err_are_equal(rates: tuple[float, ...]):
    """Once the slower ones of these owned a hundredth of the update, or nothing."""
    near = dict.fromkeys(PEERS, 0.01)
    said = [member(p, report(TransferRates(1e6 * rate), near, PEERS)) for p, rate in zip(PEERS, rates, strict=True)]
    assert agreed_weights(said, PEERS) is None


def test_an_eighth_of_the_fastest_uplink_weighs_a_quarter():
    near = dict.fromkeys(PEERS, 0.01)
    said = [member(p, report(TransferRates(8e6 if p != "p0" else 1e6), near, PEERS)) for p in PEERS]
    weights = agreed_weights(said, PEERS)
    assert weights is not None and weights[PEERS[0]] / weights[PEERS[1]] == pytest.approx(0.25, rel=0.26)


def test_all_that_two_places_send_each_other_is_taken_to_share_one_link():
    """p0 and p1 are near each other, p2 and p3 too; only what crosses counts, each way by itself."""
    near = {p: {q: 0.001 if (p < "p2") == (q < "p2") else 0.08 for q in PEERS if q != p} for p in PEERS}
    sent = {
        "p0": {PEERS[1]: 9e6, PEERS[2]: 1e5, PEERS[3]: 2e5},
        "p1": {PEERS[3]: 1e5},
        "p2": {PEERS[0]: 5e4},
        "p3": {},
    }
    links = agreed_links([member(p, report(TransferRates(None, sent[p]), near[p], PEERS)) for p in PEERS], PEERS)
    assert links is not None and list(links.regions) == [0, 0, 1, 1]
    assert 4e5 <= links.wan_bytes_s[0, 1] <= 4e5 * STEP and 5e4 <= links.wan_bytes_s[1, 0] <= 5e4 * STEP
    assert set(links.wan_bytes_s) == {(0, 1), (1, 0)}


def test_rates_of_different_rounds_do_not_add_up():
    """Each of two had the link between two places to itself once: it carries what one of them sent, not both."""
    near = {p: {q: 0.001 if (p < "p2") == (q < "p2") else 0.08 for q in PEERS if q != p} for p in PEERS}

    def carries(first: int, second: int) -> float:
        sent = {
            "p0": TransferRates(None, {PEERS[2]: 1e6}, first),
            "p1": TransferRates(None, {PEERS[3]: 1e6}, second),
        }
        members = tuple(member(p, report(sent.get(p, TransferRates()), near[p], PEERS)) for p in PEERS)
        links = agreed_links(after(members, joined(PeerId("a newcomer"))), PEERS)
        assert links is not None
        return links.wan_bytes_s[0, 1]

    assert carries(5, 5) == 2 * carries(5, 6)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 0.0, -1.0])
def test_what_is_no_measurement_is_not_reported(wrong: float):
    assert report(TransferRates(wrong, {PEERS[2]: wrong}), {PEERS[1]: wrong}, PEERS) == bytes(9)


def test_too_many_members_to_measure_report_nothing():
    assert report(TransferRates(1e6), {}, [PeerId(str(i)) for i in range(FULL_MESH_MAX + 1)]) == b""
    known = TransferRates(1e6, {PeerId("0"): 1e6}, 3)
    assert len(report(known, {}, [PeerId(str(i)) for i in range(FULL_MESH_MAX)])) == REPORT_BYTES_MAX


@given(st.binary(max_size=2 * REPORT_BYTES_MAX))
def test_any_bytes_are_either_refused_or_readable(data: bytes):
    """Fuzz: a report without a flaw gives positive rates and finite latencies, or nothing."""
    if report_flaw(data) is None:
        links = agreed_links([member(p, data) for p in PEERS], PEERS)
        if links is not None:
            assert all(RATES_BYTES_S[0] <= rate for rate in links.up_bytes_s)
            assert all(s <= LATENCIES_S[-1] for row in links.latency_s for s in row)
    else:
        assert len(data) > REPORT_BYTES_MAX or max(data) > len(LATENCIES_S)
