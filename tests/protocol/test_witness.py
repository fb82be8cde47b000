"""Cross-check of owners: belief, doubt and blame for one part, with rows of names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atoll.base.ids import Digest, PeerId
from atoll.base.machine import Effect, Emit, Payload, RunTask, Send
from atoll.crypto.digest import digest
from atoll.protocol.allreduce.buffers import GatheredRow
from atoll.protocol.allreduce.cross_check import (
    ROW_REQUESTS_MAX,
    CommitmentsDiffer,
    CrossCheck,
    FalseOwnerResultProven,
    OwnerContradicted,
    OwnerResultsDisagreed,
)
from atoll.protocol.allreduce.plan import ReducePlan
from atoll.protocol.allreduce.tasks import CombineRows, RowsCombined
from atoll.protocol.allreduce.topology import PartReductionTree, ReduceTopology
from atoll.wire.messages.round import RowRequest
from atoll.wire.messages.statements import Commitment, OwnerResult, SignedStatement
from atoll.wire.opening import rows_digest

A, B, C, D, E = (PeerId(p) for p in "abcde")
OWNERS, ALL = (A, B, C), (A, B, C, D, E)
PLAN = ReducePlan(
    3, 0, "", ReduceTopology("star", (PartReductionTree(OWNERS, 1, {}),)), ALL, (6.0, 12.0, 18.0), witnesses=2
)


def truth(names: tuple[PeerId, ...]) -> Digest:
    return digest("".join(names).encode())


def promise(peer: PeerId, other: bool = False) -> Commitment:
    return Commitment(3, 0, truth((peer, peer) if other else (peer,)), 1, 1, 1, 1.0, 1.0, 1)


class Judge:
    """Voter D, which owns no part."""

    def __init__(self, plan: ReducePlan = PLAN) -> None:
        self.plan = plan
        self.gone: set[PeerId] = set()
        self.at = CrossCheck(plan, D, lambda part, peer: None, promise, self.gone.__contains__, True)
        self.asked: list[tuple[PeerId, PeerId]] = []
        self.facts: list[object] = []

    def hears(
        self, owner: PeerId, names=ALL, made: bytes | None = None, shown: bool = False, twice: PeerId | None = None
    ) -> Judge:
        what = truth(names) if made is None else digest(made)
        rows = rows_digest(promise(p, other=p == twice) for p in names)
        said = OwnerResult(3, 0, 0, self.plan.signers(0).index(owner), what, 8, names, rows)
        payload = Payload(what, 8, names) if shown else None
        return self.does(self.at.record(SignedStatement(owner, b"", what), said, payload))

    def looks(self, waiting: bool = False, again: bool = False) -> Judge:
        return self.does(self.at.pursue_doubt(0, waiting, again))

    def opens(self, *peers: PeerId) -> Judge:
        for peer in peers:
            assert self.at.wants_row(0, peer)
            self.does(
                self.at.add_row(0, peer, GatheredRow(frozenset((peer,)), 1, Payload(truth((peer,)), 8, (peer,))))
            )
        return self

    def does(self, effects: list[Effect]) -> Judge:
        for effect in effects:
            match effect:
                case Emit(fact):
                    self.facts.append(fact)
                case Send(to, RowRequest(peer=peer)):
                    self.asked.append((to, peer))
                case RunTask(job, CombineRows() as work):
                    names = tuple(row.peer for row in work.rows)
                    whole = RowsCombined(Payload(truth(names), 8, names), names, ())
                    check, part = (int(x) for x in job.rsplit("/", 2)[1:])
                    self.does(self.at.record_check(part, check, whole))
                case _:
                    raise AssertionError(effect)
        return self

    def told(self, kind: type) -> list[PeerId]:
        return [fact.peer for fact in self.facts if isinstance(fact, kind)]

    def stands(self, patient: bool = False) -> tuple[PeerId, ...] | None:
        held = self.at.settled(0, patient)
        return None if held is None else held.result.contributors


def test_three_owners_who_say_the_same_are_believed_without_a_row():
    judge = Judge().hears(A, shown=True).hears(B)
    assert judge.looks(waiting=True).stands() is None
    assert judge.hears(C).looks().stands() == ALL and judge.asked == []


def test_a_false_sum_is_replaced_by_the_recomputed_one_and_its_owner_named():
    """A shows other bytes than B and C signed. No owner shows the right bytes: the judge recomputes them."""
    judge = Judge().hears(A, made=b"lie", shown=True).hears(B).hears(C).looks()
    assert {peer for _, peer in judge.asked} == set(ALL) and judge.stands() is None
    judge.opens(*ALL)
    assert judge.stands() == ALL and judge.told(FalseOwnerResultProven) == [A]
    assert judge.at.settled(0, True).payload.data == ALL


def test_an_owner_is_not_judged_by_a_row_that_its_author_promised_to_others():
    """E committed to one row before A and B, and to another before D: no honest sum of it is a lie."""
    judge = Judge().hears(A, made=b"of E's other row", twice=E, shown=True).hears(B).hears(C).looks().opens(*ALL)
    assert judge.told(FalseOwnerResultProven) == [] and judge.stands(patient=True) == ALL
    assert [fact.owner for fact in judge.facts if isinstance(fact, CommitmentsDiffer)] == [A]
    assert judge.at.lapses(0, None, late=True) == {A: "unopened"}
    judge.at.two_faced = {E}
    assert judge.at.lapses(0, None, late=True) == {}


def test_all_three_may_lie_and_nothing_is_believed():
    judge = Judge().hears(A, made=b"lie", shown=True).hears(B, made=b"lie2").hears(C, made=b"lie3").looks()
    judge.opens(*ALL)
    assert judge.stands() is None and set(judge.told(FalseOwnerResultProven)) == set(OWNERS)


def test_of_two_true_answers_the_one_with_more_contributors_stands_and_nobody_lied():
    """A lost two rows, or left them out: no proof against it, and no harm done."""
    judge = Judge().hears(A, names=(A, B, C), shown=True).hears(B).hears(C).looks().opens(*ALL)
    assert judge.stands() == ALL and judge.told(FalseOwnerResultProven) == []
    stands = judge.at.settled(0, False).result
    assert judge.at.lapses(0, stands, late=False) == {A: "censored"}


def test_a_larger_result_with_rows_that_no_peer_opens_does_not_block_for_ever():
    """A counts E, and does not open the row that it alone holds."""
    judge = Judge().hears(A, shown=True).hears(B, names=(A, B, C, D)).hears(C, names=(A, B, C, D)).looks()
    judge.opens(A, B, C, D)
    assert judge.stands(patient=True) is None
    assert judge.stands(patient=False) == (A, B, C, D)
    assert judge.at.lapses(0, None, late=True) == {A: "unopened"}


def test_silence_is_doubted_when_no_owner_may_still_sign():
    judge = Judge().hears(A, shown=True).hears(B).looks(waiting=True)
    assert judge.asked == []
    judge.looks(waiting=False).opens(*ALL)
    assert judge.stands() == ALL and judge.at.lapses(0, None, late=True) == {C: "withheld"}
    judge.gone.add(C)
    assert judge.at.lapses(0, None, late=True) == {}


def test_two_answers_of_one_owner_prove_a_lie_at_once_and_a_third_is_no_news():
    judge = Judge().hears(A, shown=True).hears(A, made=b"other").hears(A, made=b"third")
    assert judge.told(OwnerContradicted) == [A] and len(judge.at.disputes[0].results) == 2


def test_rows_are_asked_of_their_author_then_of_who_counted_them_and_not_without_end():
    judge = Judge().hears(A, made=b"lie", shown=True).hears(B).looks()
    for _ in range(20):
        judge.looks(again=True)
    assert [to for to, peer in judge.asked if peer == E] == [E, A, B] * (ROW_REQUESTS_MAX // 3)


def test_a_row_that_is_not_wanted_is_not_kept():
    """Nothing is doubted: strangers cannot fill the memory with rows, however well committed."""
    judge = Judge().hears(A, shown=True)
    assert not judge.at.wants_row(0, E)


def test_who_has_no_vote_takes_what_the_first_owner_shows():
    judge = Judge()
    judge.at.judges = False
    assert judge.hears(A, made=b"whatever", shown=True).looks().told(OwnerResultsDisagreed) == []
    assert judge.stands() == ALL


@pytest.mark.parametrize("names", [(A, B), ALL])
def test_an_answer_that_lists_who_does_not_decode_is_false(names):
    judge = Judge().hears(A, names=names, shown=True).looks()
    case = judge.at.disputes[0]
    case.checks[case.results[0].rows] = case.results[0]
    judge.does(judge.at.record_check(0, 0, RowsCombined(Payload(truth(names), 8, names), names[1:], names[:1])))
    assert judge.told(FalseOwnerResultProven) == [A]


def test_what_two_reserves_say_alike_is_made_again_all_the_same():
    """More reserves could lie than agree on a result: they do not confirm each other."""
    plan = replace(
        PLAN, topology=ReduceTopology("star", (PartReductionTree((A, B), 1, {}),)), witnesses=1, reserves=(C, E)
    )
    judge = Judge(plan).hears(C, made=b"lie", shown=True).hears(E, made=b"lie", shown=True)
    assert judge.stands() is None
    judge.looks().opens(*ALL)
    assert judge.told(FalseOwnerResultProven) == [C, E]


# ---- a jury ------------------------------------------------------------------------------------------------

JURY = tuple(PeerId(f"j{k}") for k in range(6))


def before(jury: tuple[PeerId, ...]) -> Judge:
    """Voter D; five owners and jurors that agree are believed."""
    return Judge(replace(PLAN, recipients=(*ALL, *JURY), juries=(jury,), verdict=5))


def test_who_is_not_on_the_jury_opens_no_row_and_believes_when_enough_say_the_same():
    """A lies and four agree: not enough. A fifth signs, and D accepts the result without blaming A."""
    judge = before(JURY).hears(A, made=b"lie").hears(B, shown=True).hears(C).hears(JURY[0]).hears(JURY[1]).looks()
    assert judge.told(FalseOwnerResultProven) == [] and judge.asked == [] and judge.stands() is None
    assert judge.hears(JURY[2]).looks().stands() == ALL
    assert (
        judge.asked == [] and judge.told(FalseOwnerResultProven) == [] and judge.at.lapses(0, None, late=True) == {}
    )


def test_on_the_jury_a_look_at_the_rows_is_one_word_and_names_the_liar():
    """D recomputes the result and signs it, but follows the other signers."""
    judge = before((D, *JURY)).hears(A, made=b"lie").hears(B).hears(C).looks().opens(*ALL)
    found = judge.at.largest_recomputed(0, patient=True)
    assert judge.told(FalseOwnerResultProven) == [A] and found is not None and found.digest == truth(ALL)
    assert judge.stands() is None
    assert judge.hears(D).hears(JURY[0]).hears(JURY[1]).stands() == ALL


def test_liars_on_the_jury_do_not_make_a_lie_believed_by_who_can_judge_it():
    judge = before((D, *JURY)).hears(A, made=b"lie", shown=True).hears(B).hears(C).looks().opens(*ALL)
    for liar in JURY:
        judge.hears(liar, made=b"lie")
    assert judge.stands() is None and set(judge.told(FalseOwnerResultProven)) == {A, *JURY}


def test_an_answer_of_the_jury_alone_stands_nowhere():
    """A result that no owner signed has no place in a body."""
    judge = before(JURY)
    for juror in JURY:
        judge.hears(juror, shown=True)
    assert judge.stands() is None
