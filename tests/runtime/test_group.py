"""All-reduce as a library, members in threads of one process with real sockets between them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from grouped import PATIENCE_S, found, groups, together

import atoll.reduce
from atoll.base.errors import NetworkError, RefusedError, RunFailedError, UsageError
from atoll.peer.events import LocalAuditCompleted
from atoll.runtime.allreduce import parts, worker
from atoll.training.robust import trimmed_mean

pytestmark = [pytest.mark.net]


def test_everybody_holds_the_same_mean_and_is_told_whose_it_is():
    with groups(3) as members:
        tensors = [torch.full((1000,), float(i)) for i in range(3)]
        for done in together(members, tensors):
            assert set(done.contributors) == {m.me for m in members} and done.complete and not done.missing
        assert all(torch.equal(t, torch.ones(1000)) for t in tensors)
        weighted = [members[i].all_reduce_async(tensors[i].fill_(i), weight=1 + i) for i in range(3)]
        assert all(work.wait(PATIENCE_S).complete for work in weighted)
        assert torch.allclose(tensors[0], torch.full((1000,), (0 * 1 + 1 * 2 + 2 * 3) / 6))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_who_gets_the_mean_in_place_can_still_show_the_row_that_it_committed_to(
    codec: str, monkeypatch: pytest.MonkeyPatch
):
    """Blocks are opened after the call, when the tensor holds the mean and whatever its user wrote over it. They
    are of the parts that a codec makes: one of fewer bytes makes fewer."""
    monkeypatch.setattr(parts, "TURN_VALUES_LEAST", 2**13)
    with groups(4, trust="community", codec=codec) as members:
        findings: SimpleQueue[str] = SimpleQueue()
        for member in members:
            member._host.listeners.append(
                lambda fact: findings.put(fact.finding) if isinstance(fact, LocalAuditCompleted) else None
            )
        tensors = [torch.randn(200_000) for _ in members]
        for _ in range(4):
            assert all(len(done.contributors) == 4 for done in together(members, tensors))
            for tensor in tensors:
                tensor.normal_()
        found = {findings.get(timeout=PATIENCE_S)}
        while not findings.empty():
            found.add(findings.get())
        assert found == {"accepted"}


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_all_sorts_are_fused_and_come_back_in_their_own_dtype(where: str):
    with groups(2) as members:
        mine = [torch.ones(3, 5), torch.ones((), dtype=torch.float64), torch.ones(70, dtype=torch.bfloat16)[::2]]
        mine += [torch.ones(9, device=where), torch.ones(2, 9, dtype=torch.bfloat16, device=where).t()]
        yours = [3 * t.clone() for t in mine]
        works = [members[0].all_reduce_async(mine), members[1].all_reduce_async(yours)]
        assert all(work.wait(PATIENCE_S).complete for work in works)
        for tensor in (*mine, *yours):
            assert torch.equal(tensor, torch.full_like(tensor, 2.0))


def test_tensors_are_reduced_whatever_torch_is_told_about_new_ones():
    """Tensors of inference, lazily negated ones, loops whose new tensors are bfloat16, or elsewhere: all work."""
    with groups(2) as members, torch.inference_mode(), torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            yours = torch.full((9,), 5.0, device="cpu", dtype=torch.float32)
            mine = 1 - 3 * yours
            listed = [mine, mine.clone()], [yours, yours.clone()]
            for calls in (mine, yours), (torch._neg_view(mine), yours.clone()), listed:
                owed = [atoll.reduce.ErrorFeedback() for _ in members]
                works = [
                    m.all_reduce_async(call, codec="2bit", error_feedback=o)
                    for m, call, o in zip(members, calls, owed, strict=True)
                ]
                assert all(work.wait(PATIENCE_S).complete for work in works)
            assert torch.equal(mine, yours)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("broken", ["_encoded", "_decode"])
def test_a_defect_in_one_call_is_told_to_who_called_and_the_next_call_works(broken: str, monkeypatch):
    """Rounds of a call that cannot be encoded followed each other for ever, and no member was told."""

    def breaks(*_: object) -> None:
        raise RuntimeError("no room")

    with groups(1) as (member,):
        with monkeypatch.context() as defect:
            defect.setattr(worker.GroupWorker, broken, breaks)
            with pytest.raises(RunFailedError, match=r"E-INT-01 .*RuntimeError: no room"):
                member.all_reduce(torch.ones(3), timeout_s=PATIENCE_S)
        assert member.all_reduce(torch.ones(3), timeout_s=PATIENCE_S).complete


def test_a_long_call_goes_in_slices_that_are_told_as_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.runtime.allreduce.group.SLICE_BYTES", 400_000)
    with groups(2) as members:
        tensors = [torch.arange(250_000, dtype=torch.float32) + i for i in (0, 2)]
        for done in together(members, tensors):
            assert done.complete and done.parts[-1][0][1] == 250_000
        assert torch.equal(tensors[0], torch.arange(250_000, dtype=torch.float32) + 1)


def test_a_member_with_a_cap_sends_no_faster():
    """A row of half a megabyte and an answer of as much, at 4 MB/s with a tenth of a second saved."""
    with groups(2, upload_bytes_s=4_000_000) as members:
        tensors = [torch.ones(250_000) for _ in members]
        began = time.monotonic()
        assert all(done.complete for done in together(members, tensors))
        assert time.monotonic() - began >= (1_000_000 - 400_000) / 4_000_000


def test_calls_with_other_sizes_do_not_mix_and_do_not_hang():
    """Every member is told who called with what, no member's tensors change, and the next call is as
    good as ever.
    """
    with groups(2) as members:
        tensors = [torch.zeros(1000), torch.ones(5_000_000)]
        works = [m.all_reduce_async(t) for m, t in zip(members, tensors, strict=True)]
        for work in works:
            with pytest.raises(RunFailedError, match=r"E-RED-09 .* called with"):
                work.wait(PATIENCE_S)
        assert not tensors[0].any() and tensors[1].all()
        again = [torch.zeros(7), torch.ones(7)]
        assert all(done.complete for done in together(members, again))
        assert torch.equal(again[0], torch.full((7,), 0.5))


def test_as_many_as_may_lie_cannot_spoil_a_call_with_another_size():
    """One of four, where one may lie. It learns its mistake; for the others it has no row, as they are told."""
    with groups(4, trust="open", statistic="median") as members:
        with pytest.raises(UsageError, match=r"E-RED-14 a call cannot choose its topology"):
            members[0].all_reduce(torch.ones(3), topology="tree")
        with pytest.raises(UsageError, match=r"E-RED-14 averages in pairs"):
            members[0].average_with_partner(torch.ones(3))
        tensors = [torch.full((3000,), float(i)) for i in range(3)] + [torch.zeros(7)]
        works = [m.all_reduce_async(t) for m, t in zip(members, tensors, strict=True)]
        with pytest.raises(RunFailedError, match=r"E-RED-09 .* called with 3,000 values, this member with 7"):
            works[3].wait(PATIENCE_S)
        assert all(work.wait(PATIENCE_S).missing == (members[3].me,) for work in works[:3])
        assert all(torch.equal(t, torch.ones(3000)) for t in tensors[:3])
        assert len(members[0].peers) == 4
        members[3]._host.island._asked = lambda call: "held=something"  # and says so of a row like any other
        works = [m.all_reduce_async(torch.ones(3000)) for m in members]
        assert all(work.wait(PATIENCE_S).complete for work in works[:3])


def test_a_group_mixes_each_row_with_its_nearest_and_its_answers_are_opened():
    """Five members, one far away: what the library makes of the same rows, the same bits at every member."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randn(30_000, generator=draw) + 50.0 * (i == 3) for i in range(5)]
    with groups(5, trust="community", statistic="nnm + trimmed_mean") as members:
        tensors = [row.clone() for row in rows]
        assert all(done.complete for done in together(members, tensors))
        assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
        torch.testing.assert_close(tensors[0], trimmed_mean(rows, f=1, pre=["nnm"]), rtol=2e-6, atol=2e-6)
        assert float(tensors[0].abs().mean()) < 1.0


def test_a_part_that_is_not_finite_is_not_sent():
    with groups(2) as members:
        tensors = [torch.ones(10), torch.full((10,), float("nan"))]
        works = [m.all_reduce_async(t) for m, t in zip(members, tensors, strict=True)]
        with pytest.raises(RunFailedError, match=r"E-RED-11 .* nan"):
            works[1].wait(PATIENCE_S)
        done = works[0].wait(PATIENCE_S)
        assert done.contributors == (members[0].me,) and done.missing == (members[1].me,)
        assert torch.equal(tensors[0], torch.ones(10))


def test_mistakes_are_told_with_what_to_do():
    group = atoll.reduce.found(peers=2)
    with pytest.raises(UsageError, match="E-RED-02"):
        group.all_reduce(torch.ones(3, dtype=torch.int64))
    for weight in (0, 1.5, "3", 2**31):
        with pytest.raises(UsageError, match=r"E-RED-02 .*weight="):
            group.all_reduce(torch.ones(3), weight=weight)
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    for no_row in (
        [1.0],
        "ones",
        torch.ones(1).expand(3),
        torch.ones(3, device="meta"),
        torch.eye(3).to_sparse(),
        nested,
    ):
        with pytest.raises(UsageError, match="E-RED-02"):
            group.all_reduce(no_row)
    with pytest.raises(UsageError, match=r"E-RED-02 None (.|\n)*without a gradient"):
        group.all_reduce([torch.nn.Linear(2, 2).weight.grad])
    with pytest.raises(UsageError, match=r"E-RED-02 float64 (.|\n)*from_numpy"):
        group.all_reduce(np.ones(3))
    for nothing in ([], torch.zeros(0), [torch.zeros(0, 3), torch.zeros(0)]):
        with pytest.raises(UsageError, match="E-RED-02 the tensors are empty"):
            group.all_reduce(nothing, timeout_s=0.2)
    with pytest.raises(NetworkError, match=r"E-RED-07 (.|\n)*1 of 2 members are here"):
        group.wait_for_peers(2, timeout_s=0.1)
    with pytest.raises(RunFailedError, match="1 of 2 members are here"):
        group.all_reduce(torch.ones(3), timeout_s=0.2)
    with pytest.raises(UsageError, match=r"E-RED-02 .*upload_bytes_s=-1"):
        atoll.reduce.join("ATOLL1:any", upload_bytes_s=-1)
    for wrong in (
        {"way_back": "gathered", "topology": "ring"},
        {"way_back": "gathered", "remembered": True},
        {"remembered": True, "topology": "tree"},
        {"topology": "moebius"},
        {"codec": "int3"},
        {"codec": "topk:0.1+lowrank:4"},
        {"way_back": "delta+int8"},
        {"codec": "powersgd:4"},
    ):
        with pytest.raises(UsageError, match=r"E-RED-08 (.|\n)*held=" if "delta" in str(wrong) else "E-RED-08"):
            found(**wrong)
    with pytest.raises(UsageError, match=r'E-RED-08 .*powersgd:4(.|\n)*"lowrank:4\+int8"(.|\n)*ErrorFeedback'):
        group.all_reduce(torch.ones(60, 50), codec="powersgd:4")
    owed = atoll.reduce.ErrorFeedback()
    group.all_reduce_async([torch.ones(3), torch.ones(4)], error_feedback=owed)
    with pytest.raises(UsageError, match=r"E-RED-19 .* of 2 tensors with 7 values .* 1 tensor"):
        group.all_reduce(torch.ones(7), error_feedback=owed)
    held = atoll.reduce.DeltaReference()
    with pytest.raises(UsageError, match="E-RED-08 error_feedback with held"):
        group.all_reduce(torch.ones(7), error_feedback=owed, held=held)
    group.all_reduce_async([torch.ones(3), torch.ones(4)], held=held)
    with pytest.raises(UsageError, match=r"E-RED-19 what is held of 2 tensors with 7 values"):
        group.all_reduce(torch.ones(7), held=held)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(group.wait_for_peers, 2)
        group.close()
        with pytest.raises(UsageError, match="E-RED-01"):
            waits.result(PATIENCE_S)
    group.close()
    with pytest.raises(UsageError, match="E-RED-01"):
        group.all_reduce(torch.ones(3))
    for question in (lambda: group.peers, lambda: group.topology, group.trouble, lambda: group.wait_for_peers(1)):
        with pytest.raises(UsageError, match="E-RED-01"):
            question()
    for wrong in (
        {"peers": 0},
        {"silence_s": 0},
        {"silence_s": -6.0},
        {"timeout_s": float("nan")},
        {"timeout_s": "1"},
        {"codec": 8},
    ):
        with pytest.raises(UsageError, match=f"E-RED-02 .*{next(iter(wrong))}="):
            found(**wrong)
    with pytest.raises((RefusedError, UsageError), match="E-TKT"):
        atoll.reduce.join("ATOLL1:nonsense")
