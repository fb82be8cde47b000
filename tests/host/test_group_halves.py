"""Calls in two rounds (`powersgd`): what comes of them, and members that are in one of the rounds alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from grouped import PATIENCE_S, groups, together

import atoll.reduce
from atoll.base.errors import RunFailedError, UsageError
from atoll.base.ids import PeerId
from atoll.host.group_halves import Halves, Start
from atoll.host.group_island import AMONG_HALVES
from atoll.learn.codec.two_phase import places_of
from atoll.node.facts import Passed, RoundClosed

pytestmark = [pytest.mark.net]

CODEC = "powersgd:2"
CALLS = 12
Tensors = list[torch.Tensor]


def some(seed: int) -> Tensors:
    """A matrix with two strong directions that all share, a vector, and a matrix that factors would not shrink."""
    torch.manual_seed(77)
    shared_RC = torch.randn(60, 2) @ torch.randn(2, 50)
    torch.manual_seed(seed)
    return [0.4 * shared_RC + torch.randn(60, 50), torch.randn(77), torch.randn(3, 5)]


def mean_of(given: Sequence[Tensors]) -> Tensors:
    return [torch.stack(each).mean(0) for each in zip(*given, strict=True)]


def called(members: Sequence[atoll.reduce.Group], given: Sequence[Tensors], kept: Sequence[dict], **wishes):
    """One call with copies; what came back, which is the same bits at all, and what each was told."""
    tensors = [[tensor.clone() for tensor in mine] for mine in given]
    asked = zip(members, tensors, kept, strict=True)
    works = [m.all_reduce_async(t, codec=CODEC, **k, **wishes) for m, t, k in asked]
    told = [work.wait(PATIENCE_S) for work in works]
    for mine in tensors[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine, tensors[0], strict=True))
    return tensors[0], told


def off(x_RC: torch.Tensor, wanted_RC: torch.Tensor) -> float:
    """Its distance, as a multiple of the least that its rank allows."""
    return float((x_RC - wanted_RC).norm() / torch.linalg.svdvals(wanted_RC)[2:].norm())


def after_first_half(member: atoll.reduce.Group, do: Callable[[], None]) -> None:
    """`do` is done in its loop when a first half was agreed, before anybody can begin with the second one."""
    waiting = [do]

    def look(fact: object) -> None:
        if isinstance(fact, RoundClosed) and any(fact.body.parts) and waiting:
            waiting.pop()()

    member._host.listeners.append(look)


def falls_silent(member: atoll.reduce.Group) -> None:
    host = member._host
    host.machine.handle = lambda event, now: []
    host._carry_out_all = lambda effects: None
    member._loop.create_task(host.links.close())


def test_calls_come_to_the_best_that_their_rank_allows_also_when_a_newcomer_begins_anew():
    """Three members with values of their own; vectors are exact. The third joins in the middle and holds no factors
    yet, so for one call all begin where the very first call did."""
    with groups(2) as members:
        given, kept = [some(seed) for seed in range(3)], [{"held": atoll.reduce.Held()} for _ in range(3)]
        mean, distances = mean_of(given[:2]), []
        for _ in range(5):
            got, told = called(members, given[:2], kept[:2])
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got[1:], mean[1:], strict=True))
            assert told[0].parts == (((0, 3092), tuple(sorted(m.me for m in members))),) and told[0].complete
            distances.append(off(got[0], mean[0]))
        assert distances[0] > 1.02 and distances[-1] < 1.003
        members.append(atoll.reduce.join(members[0].ticket))
        mean = mean_of(given)
        first, told = called(members, given, kept)
        assert len(told[2].contributors) == 3 and told[2].complete
        fresh, _ = called(members, given, [{} for _ in members])
        assert torch.equal(first[0], fresh[0])
        for _ in range(4):
            got, _ = called(members, given, kept)
        assert off(got[0], mean[0]) < 1.003 and off(first[0], mean[0]) > 1.02


def test_error_feedback_brings_what_directions_leave_out_and_weights_count():
    """The same values in every call, of twice the rank: what sums of results lack stays what a few leave out."""
    with groups(2, codec=CODEC) as members:
        torch.manual_seed(0)
        given = [[torch.randn(60, 4) @ torch.randn(4, 50), torch.randn(77)] for _ in members]
        kept = [{"error_feedback": atoll.reduce.ErrorFeedback()} for _ in members]
        mean = [(a + 3 * b) / 4 for a, b in zip(*given, strict=True)]
        applied, lacking = torch.zeros(60, 50), []
        for call in range(CALLS):
            tensors = [[tensor.clone() for tensor in mine] for mine in given]
            works = [
                m.all_reduce_async(t, weight=w, **k)
                for m, t, w, k in zip(members, tensors, (1, 3), kept, strict=True)
            ]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            assert torch.equal(tensors[0][0], tensors[1][0]) and torch.allclose(tensors[0][1], mean[1], atol=1e-6)
            applied += tensors[0][0]
            lacking.append(float(((call + 1) * mean[0] - applied).norm()))
        owed = [k["error_feedback"]._owed_N[:3000].view(60, 50) for k in kept]
        left = (owed[0] + 3 * owed[1]) / 4
        assert torch.allclose(
            left, CALLS * mean[0] - applied, atol=1e-3
        )  # nothing is lost, and nothing comes twice
        assert lacking[-1] < 5 * lacking[0]  # without it, as many times as there are calls


def test_one_that_dies_between_the_halves_is_in_no_result():
    """It helped to choose directions, and its values are nowhere."""
    with groups(3, silence_s=0.6) as members:
        together(members, [torch.ones(10) for _ in members])
        given = [some(seed) for seed in range(3)]
        after_first_half(members[0], lambda: falls_silent(members[0]))
        works = [m.all_reduce_async(t, codec=CODEC) for m, t in zip(members, given, strict=True)]
        mean = mean_of([[t.clone() for t in mine] for mine in given[1:]])
        told = [work.wait(PATIENCE_S) for work in works[1:]]
        alive = tuple(sorted(m.me for m in members[1:]))
        assert [one.contributors for one in told] == [alive] * 2
        assert told[0].parts == (((0, 3092), alive),)
        assert all(torch.equal(a, b) for a, b in zip(given[1], given[2], strict=True))
        assert torch.allclose(given[1][1], mean[1], atol=1e-6) and off(given[1][0], mean[0]) < 1.3


@pytest.mark.parametrize("other", [CODEC, "int8", "held"])
def test_whoever_calls_in_the_middle_of_others_call_waits_for_the_next_one(other: str):
    """It was too late for the first half, and calls at the very moment at which the second one begins: nobody is
    told of a mistake, and its call is done with the next one of the others."""
    with groups(3, timeout_s=0.3) as members:
        together(members, [torch.ones(10) for _ in members])
        given, late = [some(seed) for seed in range(3)], list[atoll.reduce.Work]()
        wishes = {"held": atoll.reduce.Held()} if other == "held" else {"codec": other}
        first = [[t.clone() for t in mine] for mine in given]

        def calls() -> None:
            late.append(members[2].all_reduce_async(given[2], **wishes))

        members[2]._host.listeners.append(
            lambda fact: calls() if isinstance(fact, RoundClosed) and any(fact.body.parts) and not late else None
        )
        works = [m.all_reduce_async(t, codec=CODEC) for m, t in zip(members, first[:2], strict=False)]
        told = [work.wait(PATIENCE_S) for work in works]
        alone = tuple(sorted(m.me for m in members[:2]))
        assert [one.contributors for one in told] == [alone] * 2 and told[0].parts == (((0, 3092), alone),)
        kept = [{"held": atoll.reduce.Held()} if other == "held" else {"codec": other} for _ in "ab"]
        works = [m.all_reduce_async(t, **k) for m, t, k in zip(members[:2], given[:2], kept, strict=True)]
        mean = mean_of([[t.clone() for t in mine] for mine in given])
        assert all(work.wait(PATIENCE_S).complete for work in (*works, *late))
        assert len(late[0].wait().contributors) == 3
        assert all(torch.equal(a, b) for a, b in zip(given[0], given[2], strict=True))
        assert torch.allclose(given[0][1], mean[1], atol=0.05)


def test_one_that_cannot_send_its_first_half_passes_at_once_and_is_in_the_next_call():
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        given, passed = [some(seed) for seed in range(3)], list[str]()
        broken = some(2)
        broken[1][3] = float("nan")
        members[2]._host.listeners.append(
            lambda fact: passed.append(fact.why) if isinstance(fact, Passed) else None
        )
        works = [
            m.all_reduce_async([t.clone() for t in mine], codec=CODEC)
            for m, mine in zip(members, (*given[:2], broken), strict=True)
        ]
        with pytest.raises(RunFailedError, match="E-RED-11"):
            works[2].wait(PATIENCE_S)
        for work in works[:2]:
            assert work.wait(PATIENCE_S).contributors == tuple(sorted(m.me for m in members[:2]))
        assert AMONG_HALVES in passed  # it was not waited for
        _, told = called(members, given, [{}] * 3)
        assert all(len(one.contributors) == 3 and one.complete for one in told)


def test_halves_follow_each_other_whatever_else_is_in_flight_and_waiting_may_end_before():
    """Calls in the order in which they were made, of several codecs; a user's patience is no member's."""
    with groups(2) as members:
        given = [[some(seed + 10 * call) for call in range(4)] for seed in range(2)]
        codecs = ("powersgd:2+bf16", "int8", "powersgd:2+int8", "fp32")
        means = [mean_of([[t.clone() for t in mine[call]] for mine in given]) for call in range(4)]
        with pytest.raises(RunFailedError, match="E-RED-03"):
            members[0].all_reduce(given[0][0], codec=codecs[0], timeout_s=0)
        works = [members[0].all_reduce_async(given[0][call], codec=codecs[call]) for call in range(1, 4)]
        works += [members[1].all_reduce_async(given[1][call], codec=codecs[call]) for call in range(4)]
        done = [work.wait(PATIENCE_S) for work in works]
        assert all(one.complete for one in done)
        assert [one.round for one in done[:3]] == [one.round for one in done[4:]]
        for call in range(1, 4):
            assert all(torch.equal(a, b) for a, b in zip(given[0][call], given[1][call], strict=True))
            assert torch.allclose(given[0][call][1], means[call][1], atol=0.2)
        assert off(given[1][0][0], means[0][0]) < 1.3 and off(given[0][2][0], means[2][0]) < 1.3


def test_large_calls_go_in_one_piece_and_vectors_alone_as_they_are(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.host.group.SLICE_BYTES", 4000 * 4)  # of factors; the matrix has ten times as many
    with groups(2, way_back="gathered") as members:
        torch.manual_seed(0)
        left = torch.randn(200, 2)  # of all, so that the mean has no higher rank than they
        given = [[left @ torch.randn(2, 200)] for _ in members]
        got, told = called(members, given, [{}] * 2)
        assert told[0].complete and torch.allclose(got[0], mean_of(given)[0], atol=1e-4)
        vectors, _ = called(members, [[torch.full((5000,), float(i))] for i in range(2)], [{}] * 2)
        assert torch.equal(vectors[0], torch.full((5000,), 0.5))
        with pytest.raises(UsageError, match=r"E-RED-08 more than 0 MiB of factors(.*\n)*.*fewer tensors"):
            members[0].all_reduce([torch.ones(200, 200), torch.ones(5000)], codec=CODEC)


def test_what_nobody_answered_for_keeps_its_values_and_names_nobody():
    """Two matrices and a vector, the second half in three parts: of one, which has some of a matrix's factor, there
    is no answer; in another this member's values are not. What is owed is what the mean lacks of them."""
    places, ada, bob = places_of(((20, 30), (20, 30), (1, 50)), 2), PeerId("a"), PeerId("b")
    torch.manual_seed(0)
    x_N, owed_N = torch.randn(1250), torch.zeros(1250)
    before = x_N.clone()
    halves = Halves("powersgd:2+fp32", x_N, places, owed_N, Start())
    first_F, _ = halves.begin(False)
    halves.first_agreed(first_F, [(0, 80)], [True])
    halves.first_round = 0
    second_S, _ = halves.begin(False)
    parts = [((0, 60), ()), ((60, 150), (bob,)), ((150, 170), (ada, bob))]
    told = halves.second_agreed(second_S, parts, [False, True, True], [False, False, True])
    assert told == (((0, 600), ()), ((600, 1230), (bob,)), ((1230, 1250), (ada, bob)))
    assert torch.equal(x_N[:600], before[:600]) and not owed_N[:600].any()
    assert torch.equal(owed_N[600:1230], before[600:1230]) and not owed_N[1230:].any()


def test_a_matrix_of_whose_first_half_a_part_was_not_answered_keeps_its_values_and_names_nobody():
    """Its directions would have no share in these rows, which would come out as zeros."""
    places, ada = places_of(((20, 30), (20, 30), (1, 50)), 2), PeerId("a")
    torch.manual_seed(0)
    x_N, owed_N = torch.randn(1250), torch.zeros(1250)
    before = x_N.clone()
    halves = Halves("powersgd:2+fp32", x_N, places, owed_N, Start())
    first_F, _ = halves.begin(False)
    halves.first_agreed(first_F, [(0, 30), (30, 80)], [False, True])
    halves.first_round = 0
    second_S, _ = halves.begin(False)
    told = halves.second_agreed(second_S, [((0, 170), (ada,))], [True], [True])
    assert told == (((0, 600), ()), ((600, 1250), (ada,)))
    assert torch.equal(x_N[:600], before[:600]) and not owed_N[:600].any()
    assert not torch.equal(x_N[600:1200], before[600:1200]) and owed_N[600:1200].any()


def test_where_there_are_no_two_phases_it_is_said_why():
    for trust in ("community", "open"):
        with pytest.raises(UsageError, match=r"E-RED-14 codec = \"powersgd:4\+fp32\"(.*\n)*.*sent second follows"):
            atoll.reduce.found(peers=4, trust=trust, codec="powersgd")
    with pytest.raises(UsageError, match=r"E-RED-08 .*way_back = \"topk:0.1\+int8\""):
        atoll.reduce.found(peers=2, codec=CODEC, way_back="topk:0.1+int8")
    with pytest.raises(UsageError, match="E-RED-08"):
        atoll.reduce.found(peers=2, way_back=CODEC)
    with atoll.reduce.found() as alone:
        x = torch.randn(60, 50)
        with pytest.raises(UsageError, match=r"E-RED-08 pairs with the codec powersgd:2\+fp32"):
            alone.average_with_partner(x, codec=CODEC)
        with pytest.raises(UsageError, match="behind powersgd:2 stands one of fp32"):
            alone.all_reduce(x, codec="powersgd:2+topk:0.1")
        assert alone.all_reduce(x, codec=CODEC).contributors == (alone.me,)
    said = pytest.raises(UsageError, match=r"E-RED-14 codec = \"powersgd:2\+fp32\" where members may lie")
    with atoll.reduce.found(peers=4, trust="community") as one, said:
        one.all_reduce(x, codec=CODEC)
