"""All-reduce as a library, members in threads of one process with real sockets between them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from grouped import PATIENCE_S, groups
from msgspec.structs import replace

import atoll.reduce
from atoll.base.errors import NetworkError, RefusedError, RunFailedError, UsageError
from atoll.base.ids import PeerId
from atoll.base.machine import Done, Effect, Event, Received, Send
from atoll.host import group_island
from atoll.host.fusing import Fused, Lanes
from atoll.host.group_host import GIVES_WAY, GroupHost
from atoll.host.group_island import PART_VALUES, Call, cuts, part_values
from atoll.learn.aggregate import trimmed_mean
from atoll.learn.codec import codec_named
from atoll.learn.codec.squeeze import METHODS, PLAIN
from atoll.node import patience
from atoll.node.facts import AuditEnded, MembershipChanged, Passed, RoundBegan
from atoll.node.jobs import Encoded
from atoll.protocol.reduce.work import Combined
from atoll.wire.codec import decode_statement
from atoll.wire.messages.round import Answer, Committed, Contribution, PartBytes, RowBytes, Voted

pytestmark = [pytest.mark.net]


def together(
    members: list[atoll.reduce.Group], tensors: list[torch.Tensor], **wishes
) -> list[atoll.reduce.Reduced]:
    works = [m.all_reduce_async(t, **wishes) for m, t in zip(members, tensors, strict=True)]
    return [work.wait(PATIENCE_S) for work in works]


def dies(member: atoll.reduce.Group) -> None:
    """Without a word, as if its process had been killed."""

    async def silenced() -> None:
        member._host.machine.handle = lambda event, now: []  # it hears nothing more
        member._host._carry_out_all = lambda effects: None
        await member._host.links.close()

    member._run(silenced())


def test_everybody_holds_the_same_mean_and_is_told_whose_it_is():
    with groups(3) as members:
        tensors = [torch.full((1000,), float(i)) for i in range(3)]
        for done in together(members, tensors):
            assert set(done.contributors) == {m.me for m in members} and done.complete and not done.missing
        assert all(torch.equal(t, torch.ones(1000)) for t in tensors)
        weighted = [members[i].all_reduce_async(tensors[i].fill_(i), weight=1 + i) for i in range(3)]
        assert all(work.wait(PATIENCE_S).complete for work in weighted)
        assert torch.allclose(tensors[0], torch.full((1000,), (0 * 1 + 1 * 2 + 2 * 3) / 6))


@pytest.mark.parametrize("topology", ["butterfly", "hierarchical", "ring", "tree", "star"])
def test_every_topology_gives_the_mean(topology: str):
    with groups(4, ["eu/a", "eu/b", "us/c", "us/d"], topology=topology) as members:
        torch.manual_seed(0)
        tensors = [torch.randn(300_000) for _ in members]
        mean = torch.stack(tensors).double().mean(0)
        for done in together(members, tensors):
            assert len(done.contributors) == 4 and done.complete
        assert all(torch.equal(t, tensors[0]) for t in tensors[1:])
        assert torch.allclose(tensors[0].double(), mean, atol=1e-6)


def test_the_pieces_of_one_owner_pass_to_all_others_when_it_dies():
    """As plans of three members have it, in a group that `found` made: none of them takes over alone."""

    async def parts(host: GroupHost) -> list[Sequence[PeerId]]:
        assert host.machine.round is not None and host.machine.round.way.topology is not None
        return [part.owners for part in host.machine.round.way.topology.parts]

    with groups(3) as members:
        members[1].wait_for_peers(3, PATIENCE_S)
        owned = members[1]._ask(parts)
        for member in members:
            takers = {next_one for owner, next_one, *_ in owned if owner == member.me}
            assert takers == {m.me for m in members} - {member.me}


def test_a_call_chooses_its_topology_and_the_next_one_another():
    """Of one group, also one that makes sums on the way, and one whose owners are others; nobody agreed before."""
    with groups(4, ["eu/a", "eu/b", "us/c", "us/d"], topology="star") as members:
        torch.manual_seed(0)
        for topology in ("ring", "tree", "butterfly", None, "hierarchical"):
            tensors = [torch.randn(300_000) for _ in members]
            mean = torch.stack(tensors).double().mean(0)
            for done in together(members, tensors, topology=topology, codec="fp32"):
                assert len(done.contributors) == 4 and done.complete
                assert done.topology == (topology or "star")
            assert all(torch.equal(t, tensors[0]) for t in tensors[1:])
            assert torch.allclose(tensors[0].double(), mean, atol=1e-6)


def test_whoever_does_not_call_works_for_the_topology_that_the_others_chose():
    """It hears of the choice with the first commitment, and owns its part of what it has no row in."""
    with groups(3, timeout_s=0.5) as members:
        tensors = [torch.zeros(300_000), torch.ones(300_000)]
        works = [
            m.all_reduce_async(t, topology="ring", codec="int8") for m, t in zip(members[1:], tensors, strict=True)
        ]
        for done in (work.wait(PATIENCE_S) for work in works):
            assert done.missing == (members[0].me,) and done.topology == "ring"
        assert torch.allclose(tensors[0], torch.full((300_000,), 0.5), atol=0.01)
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        assert all(done.complete for done in together(members, tensors, topology="tree"))
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


@pytest.mark.parametrize("asked", [("ring", "star"), (None, "tree")])
def test_calls_with_other_topologies_do_not_mix_and_everybody_is_told(asked):
    """Among three, of whom one has not called: nobody waits for rows that never come."""
    with groups(3, timeout_s=0.5, silence_s=30.0) as members:
        together(members, [torch.zeros(1) for _ in members])  # nobody is new any more
        tensors = [torch.zeros(100_000), torch.ones(100_000)]
        named = [f"topology={name or 'auto'}" for name in asked]
        begun = zip(members, tensors, asked, strict=False)
        works = [m.all_reduce_async(t, topology=topology) for m, t, topology in begun]
        for i, work in enumerate(works):
            said = [f"m{1 - i} called with .*{named[1 - i]}.*", f"this member with .*{named[i]}.*"]
            with pytest.raises(RunFailedError, match=f"E-RED-10 {', '.join(said)}\n(.*\n)*.*same topology= and"):
                work.wait(PATIENCE_S)
        assert not tensors[0].any() and tensors[1].all()
        for done in together(members[:2], tensors, topology="tree"):
            assert done.complete and done.missing == (members[2].me,)
        assert torch.equal(tensors[0], torch.full((100_000,), 0.5)) and torch.equal(*tensors)


def test_members_average_in_pairs_and_are_told_with_whom():
    """Of five one stays alone. After a call that all share the next one is drawn anew."""
    with groups(5, codec="int8") as members:
        names, partners = [m.me for m in members], set[tuple[str, ...]]()
        for _ in range(8):  # the same draw again has a chance of 1 / 15
            if len(partners) > 3:
                break
            tensors = [torch.full((200_000,), float(i)) for i in range(5)]
            works = [m.average_with_partner_async(t, codec="fp32") for m, t in zip(members, tensors, strict=True)]
            for i, work in enumerate(works):
                done = work.wait(PATIENCE_S)
                rows = [names.index(peer) for peer in done.contributors]
                assert i in rows and len(rows) <= 2 and done.complete and done.topology == "pairs"
                assert torch.equal(tensors[i], torch.full((200_000,), sum(rows) / len(rows)))
                partners.add(done.contributors)
            assert sum(len(pair) == 2 for pair in partners) >= 2
            together(members, tensors)
        assert len(partners) > 3


def test_whose_partner_does_not_call_keeps_its_own_values():
    with groups(2, timeout_s=0.3) as members:
        tensor = torch.arange(10.0)
        done = members[0].average_with_partner(tensor, timeout_s=PATIENCE_S)
        assert done.contributors == (members[0].me,) and torch.equal(tensor, torch.arange(10.0))
        tensors = [torch.zeros(10), torch.full((10,), 3.0)]
        works = [
            m.average_with_partner_async(t, weight=1 + i)
            for i, (m, t) in enumerate(zip(members, tensors, strict=True))
        ]
        assert all(len(work.wait(PATIENCE_S).contributors) == 2 for work in works)
        assert torch.allclose(tensors[0], torch.full((10,), 2.0)) and torch.equal(*tensors)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_who_gets_the_mean_in_place_can_still_show_the_row_that_it_committed_to(
    codec: str, monkeypatch: pytest.MonkeyPatch
):
    """Blocks are opened after the call, when the tensor holds the mean and whatever its user wrote over it. They
    are of the parts that a codec makes: one of fewer bytes makes fewer."""
    monkeypatch.setattr(group_island, "TURN_VALUES_LEAST", 2**13)
    with groups(4, trust="community", codec=codec) as members:
        findings: SimpleQueue[str] = SimpleQueue()
        for member in members:
            member._host.listeners.append(
                lambda fact: findings.put(fact.finding) if isinstance(fact, AuditEnded) else None
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


def test_tensors_of_all_sorts_are_fused_and_come_back_in_their_own_dtype():
    with groups(2) as members:
        mine = [torch.ones(3, 5), torch.ones((), dtype=torch.float64), torch.ones(70, dtype=torch.bfloat16)[::2]]
        if torch.cuda.is_available():
            mine += [torch.ones(9, device="cuda"), torch.ones(2, 9, dtype=torch.bfloat16, device="cuda").t()]
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
    """Rounds of a call that cannot be encoded followed each other for ever, and nobody was told."""

    def breaks(*_: object) -> None:
        raise RuntimeError("no room")

    with groups(1) as (member,):
        with monkeypatch.context() as defect:
            defect.setattr(group_island.GroupIsland, broken, breaks)
            with pytest.raises(RunFailedError, match=r"E-INT-01 .*RuntimeError: no room"):
                member.all_reduce(torch.ones(3), timeout_s=PATIENCE_S)
        assert member.all_reduce(torch.ones(3), timeout_s=PATIENCE_S).complete


def test_codecs_are_the_groups_or_the_calls():
    with groups(2, codec="int8") as members:
        torch.manual_seed(0)
        tensors = [torch.randn(100_000) for _ in members]
        mean = (tensors[0] + tensors[1]) / 2
        together(members, tensors)
        assert torch.equal(*tensors)
        assert 0 < (tensors[0] - mean).abs().max() < 0.05
        together(members, tensors, codec="fp32")
        with pytest.raises(UsageError, match="E-RED-08"):
            members[0].all_reduce(tensors[0], codec="int3")
        drawn: list[torch.Tensor] = []  # the same places at both, parts of two owners, other places in every call
        for _ in range(2):
            tensors = [torch.full((150_000,), 1.0), torch.full((150_000,), 4.0)]
            together(members, tensors, codec="randk:0.25+fp32")
            assert torch.equal(*tensors) and set(tensors[0].tolist()) == {0.0, 2.5}
            drawn.append(tensors[0] != 0)
            assert int(drawn[-1].sum()) == pytest.approx(37_500, abs=1)
        assert int((drawn[0] & drawn[1]).sum()) < 0.1 * 150_000  # a sixteenth, by chance


def test_matrices_of_low_rank_travel_as_factors_and_shapes_are_part_of_the_call():
    """In parts of two owners, of a rank that four directions have room for. Other shapes of as many values would
    be read as something else."""
    with groups(2, codec="lowrank:4+fp32", way_back="fp32") as members:
        torch.manual_seed(0)
        tensors = [[torch.randn(400, 2) @ torch.randn(2, 500), torch.randn(77)] for _ in members]
        mean = [(a + b) / 2 for a, b in zip(*tensors, strict=True)]
        assert all(done.complete for done in together(members, tensors))
        for mine, yours, wanted in zip(*tensors, mean, strict=True):
            assert torch.equal(mine, yours) and torch.allclose(mine, wanted, atol=1e-4)
        works = [
            m.all_reduce_async(torch.ones(shape)) for m, shape in zip(members, [(40, 50), (50, 40)], strict=True)
        ]
        for work in works:
            with pytest.raises(
                RunFailedError, match=r"E-RED-10 .*shapes=(\w+), this .*shapes=(?!\1)(.*\n)*.*lowrank"
            ):
                work.wait(PATIENCE_S)


@pytest.mark.parametrize("trust", ["private", "open"])
def test_of_a_call_only_tensors_travel_that_changed(trust: str):
    """Four tensors in a call, all within a page or across many: one moved, one did not, one moved by 1.2e-6 in all
    its values together, though by less in what a part holds of it, and one by too little. A call may say otherwise
    what is too little."""
    still, little, too_little = torch.zeros(300), torch.full((200_000,), 2.7e-9), torch.full((100,), 0.99e-7)
    with groups(2 if trust == "private" else 4, codec="changed+fp32", trust=trust) as members:
        sent = [[torch.full((500,), 2.0), still.clone(), little.clone(), too_little.clone()] for _ in members]
        assert all(done.complete for done in together(members, sent))
        for moved, *others in sent:
            assert torch.equal(moved, torch.full((500,), 2.0)) and torch.equal(others[0], still)
            assert torch.allclose(others[1], little, rtol=1e-6, atol=0) and not others[2].any()
        if trust == "private":
            together(members, sent, codec="changed:1e-5+fp32")
            assert bool(sent[0][0].all()) and not sent[0][2].any()


def test_whoever_cuts_its_tensors_otherwise_is_told_where_only_what_changed_travels():
    """As many values, and nothing but the border between two tensors is elsewhere."""
    with groups(2, codec="changed+fp32") as members:
        sizes = [(1000, 3000), (3000, 1000)]
        works = [
            m.all_reduce_async([torch.ones(size) for size in mine]) for m, mine in zip(members, sizes, strict=True)
        ]
        for work in works:
            with pytest.raises(RunFailedError, match=r"E-RED-10 .*shapes=(\w+), this .*shapes=(?!\1)"):
                work.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("codec", "way_back", "made"), [("int8+zstd", "int8", Encoded), ("int8", "int8+zstd", Combined)]
)
def test_wires_are_packed_for_a_slow_link_and_not_for_a_fast_one(codec: str, way_back: str, made: type):
    """Two members, by what they say that their uplinks carry at most: 1 MB/s and 1 GB/s. Each reads what the other
    sends, rows or answers, and the mean is to the bit that of wires that nobody packs."""
    with ExitStack() as stack:
        slow = stack.enter_context(atoll.reduce.found(peers=2, way_back=way_back, upload_bytes_s=1_000_000))
        fast = stack.enter_context(atoll.reduce.join(slow.ticket, upload_bytes_s=1_000_000_000))
        slow_wires, fast_wires = wires_begin_with(slow, made), wires_begin_with(fast, made)
        torch.manual_seed(0)
        tensors = [torch.randn(150_000) * (torch.rand(150_000) < 0.05) for _ in range(2)]
        sent = [coded(x) for x in tensors]
        assert all(done.complete for done in together([slow, fast], tensors, codec=codec))
        assert (set(slow_wires), set(fast_wires)) == ({METHODS["zstd:3"].code}, {PLAIN})
        assert torch.equal(*tensors) and torch.equal(tensors[0], coded((sent[0] + sent[1]) / 2))


def coded(x: torch.Tensor) -> torch.Tensor:
    codec = codec_named("int8")
    return codec.decode(codec.encode(x), len(x))


def wires_begin_with(member: atoll.reduce.Group, made: type) -> list[int]:
    """The first byte of every row (Encoded) or answer (Combined) that it makes from now on."""
    found, do = list[int](), member._host.island.do

    async def told(work: object) -> object:
        done = await do(work)
        if isinstance(done, made):
            wires = done.parts if isinstance(done, Encoded) else [done.payload]
            found.extend(wire.data[0] for wire in wires if wire.size_bytes)
        return done

    member._host.island.do = told
    return found


@pytest.mark.parametrize("remembered", [False, True])
def test_what_answers_leave_out_comes_with_later_ones_where_owners_remember(remembered: bool, monkeypatch):
    """The same tensors in every call, in slices, exact on the way up: the sum of all answers misses what two bits
    of one answer leave out, once and not every time. A call of other tensors between them changes nothing."""
    monkeypatch.setattr("atoll.host.group.SLICE_BYTES", 200_000 * 4)
    with groups(3, codec="fp32", way_back="2bit", remembered=remembered) as members:
        torch.manual_seed(0)
        mine = [torch.randn(300_000) for _ in members]
        mean, got = sum(mine) / 3, torch.zeros(300_000)
        owed = [atoll.reduce.ErrorFeedback() for _ in members]
        for _ in range(6):
            tensors = [x.clone() for x in mine]
            calls = zip(members, tensors, owed, strict=True)
            works = [m.all_reduce_async(t, error_feedback=o) for m, t, o in calls]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            assert torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2])
            got += tensors[0]
            together(members, [torch.randn(1000) for _ in members])
        error = float((got - 6 * mean).norm() / mean.norm())
        assert error < 1 if remembered else error > 1.5  # six times what one answer leaves out, or once


def test_rows_that_come_back_are_not_coded_twice():
    """The mean of what was sent, in parts of two owners. Of fp32 no rows come, since their mean is shorter."""
    with groups(3, codec="2bit", way_back="gathered") as members:
        torch.manual_seed(0)
        with pytest.raises(UsageError, match=r"E-RED-08 .*ring"):
            members[0].all_reduce(torch.ones(3), topology="ring")
        with pytest.raises(UsageError, match="E-RED-08 no topology moebius"):
            members[0].all_reduce(torch.ones(3), topology="moebius")
        for codec in ("2bit", "fp32"):
            tensors = [torch.randn(150_000) for _ in members]
            sent = [codec_named(codec).decode(codec_named(codec).encode(t), len(t)) for t in tensors]
            mean = (sent[0] * 1 + sent[1] * 2 + sent[2] * 3) / 6
            works = [m.all_reduce_async(tensors[i], weight=i + 1, codec=codec) for i, m in enumerate(members)]
            assert all(work.wait(PATIENCE_S).complete for work in works)
            assert all(torch.equal(t, tensors[0]) for t in tensors)
            assert torch.allclose(tensors[0], mean, rtol=0, atol=1e-6)


def test_error_feedback_brings_later_what_the_codec_left_out():
    """Of four values a call sends the largest. What sums of means lack without feedback grows with every call; with
    it, it stays what the codec leaves out of a few."""
    with groups(2, codec="topk:0.25+fp32", way_back="fp32") as members:
        torch.manual_seed(0)
        gradients = [torch.randn(8192) for _ in members]
        owed = [atoll.reduce.ErrorFeedback() for _ in members]

        def lacking(calls: int, feedbacks: Sequence[atoll.reduce.ErrorFeedback | None]) -> float:
            off_N = torch.zeros(8192)
            for _ in range(calls):
                tensors = [tensor.clone() for tensor in gradients]
                asked = zip(members, tensors, feedbacks, strict=True)
                works = [m.all_reduce_async(t, error_feedback=f) for m, t, f in asked]
                assert all(work.wait(PATIENCE_S).complete for work in works)
                assert torch.equal(*tensors)
                off_N += (gradients[0] + gradients[1]) / 2 - tensors[0]
            return float(off_N.norm())

        once = lacking(1, [None, None])
        assert lacking(3, [None, None]) == pytest.approx(3 * once, rel=1e-3)
        assert lacking(12, owed) < 4 * once


def test_differences_from_what_all_hold_lose_less_and_who_holds_nothing_gets_whole_values():
    """Values of 100 that move by a hundredth; in the third call one member is as new, in the fifth one forgets."""
    with groups(3, codec="int8") as members:
        torch.manual_seed(0)
        held = [atoll.reduce.Held() for _ in members]
        around_N, errors = 100 * torch.randn(1000), []
        for call in range(6):
            if call == 2:
                held[2] = atoll.reduce.Held()
            tensors = [around_N + 0.01 * torch.randn(1000) for _ in members]
            mean_N = torch.stack(tensors).mean(0)
            kept = [None if call == 4 and i == 0 else one for i, one in enumerate(held)]
            works = [m.all_reduce_async(t, held=h) for m, t, h in zip(members, tensors, kept, strict=True)]
            done = [work.wait(PATIENCE_S) for work in works]
            assert all(one.complete and len(one.contributors) == 3 for one in done)
            assert torch.equal(tensors[0], tensors[1]) and torch.equal(tensors[0], tensors[2])
            errors.append(float((tensors[0] - mean_N).square().mean().sqrt()))
        differ = [error < 0.01 for error in errors]
        assert differ == [False, True, False, True, False, False]  # who forgot holds an older mean than the others


def test_a_long_call_goes_in_slices_that_are_told_as_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.host.group.SLICE_BYTES", 400_000)
    with groups(2) as members:
        tensors = [torch.arange(250_000, dtype=torch.float32) + i for i in (0, 2)]
        for done in together(members, tensors):
            assert done.complete and done.parts[-1][0][1] == 250_000
        assert torch.equal(tensors[0], torch.arange(250_000, dtype=torch.float32) + 1)


def test_survivors_of_a_death_agree_and_name_who_is_in_the_result():
    """One of four is gone in the middle of calls that nobody else waits for any longer than it takes to notice."""
    with groups(4) as members:
        tensors = [torch.full((500_000,), float(i)) for i in range(4)]
        together(members, [t.clone() for t in tensors])
        works = [m.all_reduce_async(t) for m, t in zip(members[1:], tensors[1:], strict=True)]
        dies(members[0])
        for work, member in zip(works, members[1:], strict=True):
            done = work.wait(PATIENCE_S)
            assert member.me in done.contributors and members[0].me not in done.contributors
        assert torch.equal(tensors[1], torch.full((500_000,), 2.0))
        assert torch.equal(tensors[1], tensors[2]) and torch.equal(tensors[1], tensors[3])


def test_whoever_comes_late_is_let_in_while_nobody_calls_and_counts_from_its_first_call():
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket))
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        for done in together(members, tensors):
            assert len(done.contributors) == 3 and done.complete
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


def test_a_newcomer_finds_the_group_by_any_member_when_the_founder_is_gone():
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        dies(members[0])
        survivors = members[1:]
        together(survivors, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket, via=members[1].addresses))
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        for done in together(members[1:], tensors):
            assert len(done.contributors) == 3
        assert torch.equal(tensors[2], torch.ones(10))


def test_a_call_that_waits_while_a_newcomer_is_let_in_counts_everybody():
    """Ada has called, Bob has not; Cleo joins meanwhile. Nobody's call is answered without Bob."""
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        first = members[0].all_reduce_async(tensors[0])
        members.append(atoll.reduce.join(members[0].ticket))
        works = [first, *(m.all_reduce_async(t) for m, t in zip(members[1:], tensors[1:], strict=True))]
        assert all(len(work.wait(PATIENCE_S).contributors) == 3 for work in works)
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


@pytest.mark.parametrize("calls", [False, True], ids=["idle", "with a call that waits"])
def test_of_two_members_one_may_leave_and_the_other_goes_on(calls: bool):
    """Two voters agree on nothing without each other: whoever leaves stays until it is agreed that it is gone."""
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        mine, yours = torch.ones(10), torch.zeros(10)
        work = members[0].all_reduce_async(mine) if calls else None
        members[0].close()
        done = members[1].all_reduce(yours, timeout_s=PATIENCE_S)
        assert done.contributors == members[1].peers == (members[1].me,) and not done.missing
        assert mine.all() and not yours.any()
        if work is not None:
            with pytest.raises(RunFailedError, match="E-RED-04"):
                work.wait(PATIENCE_S)


def test_who_leaves_stays_until_the_other_holds_the_vertex_that_lets_it_go():
    """The votes that make it final get lost, so only the leaver has it; alone the other would have no quorum."""
    with groups(2, silence_s=0.6) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        leaver = members[0]._host
        send = leaver._send

        def loses_final_votes(effect: Send) -> None:
            vote = effect.message.statement if isinstance(effect.message, Voted) else None
            if vote is None or decode_statement(vote.body, vote.signer).stage == "prepare":
                send(effect)

        leaver._send = loses_final_votes
        members[0].close()
        done = members[1].all_reduce(torch.ones(10), timeout_s=PATIENCE_S)
        assert done.contributors == (members[1].me,)


def test_whoever_is_left_alone_by_a_death_is_told_though_it_would_wait_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.host.group_host.FAREWELL_S", 0.0)  # the dead one cannot know that it is alone
    with groups(2, timeout_s=0.3, silence_s=0.6) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        dies(members[0])
        mine = torch.zeros(10)
        for _ in range(2):
            with pytest.raises(
                RunFailedError, match="E-RED-18 too few members are left to agree: m0 cannot be heard"
            ):
                members[1].all_reduce(mine, timeout_s=PATIENCE_S)
        assert not mine.any()


def test_a_group_that_shrinks_below_what_its_rule_needs_waits_for_others_and_says_so():
    """Four withstand one liar, three nobody. A fourth comes, and the call that it finds waiting is done."""
    with groups(4, trust="community", statistic="trimmed_mean", timeout_s=0.5) as members:
        together(members, [torch.ones(10) for _ in members])
        members.pop().close()
        mine = torch.zeros(10)
        with pytest.raises(RunFailedError, match="E-RED-21 3 members are left, and it takes 4"):
            members[0].all_reduce(mine, timeout_s=PATIENCE_S)
        assert not mine.any()
        members.append(atoll.reduce.join(members[0].ticket))
        assert all(len(done.contributors) == 4 for done in together(members, [torch.ones(10) for _ in members]))


def test_nobody_is_left_out_where_one_alone_has_heard_of_a_newcomer():
    """It passes, and the round closes before its proposer hears of anybody. The surprise: the others' call was done
    without that member, whose user then called for the first time where theirs did so for the second."""
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        round = members[0]._host.machine.round
        first = round.agreement.proposer(0)
        knows, *others = sorted(members, key=lambda m: m.me == first)
        passed: SimpleQueue[Passed] = SimpleQueue()
        knows._host.listeners.append(lambda fact: passed.put(fact) if isinstance(fact, Passed) else None)
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        works = [m.all_reduce_async(t, topology="ring") for m, t in zip(others, tensors[1:], strict=True)]
        knows._loop.call_soon_threadsafe(knows._host.island.passes, GIVES_WAY)
        passed.get(timeout=PATIENCE_S)
        works.append(knows.all_reduce_async(tensors[0], topology="ring"))
        assert all(len(work.wait(PATIENCE_S).contributors) == 3 for work in works)
        assert all(torch.equal(t, torch.ones(10)) for t in tensors)


def test_a_word_that_somebody_comes_or_goes_holds_up_nobody_for_ever():
    """One member says so in every round, and nobody ever comes: the others' call is done without it."""
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        liar, *others = members
        says = partial(liar._host.island.passes, GIVES_WAY)
        liar._host.listeners.append(lambda fact: says() if isinstance(fact, RoundBegan) else None)
        liar._loop.call_soon_threadsafe(says)
        works = [m.all_reduce_async(torch.ones(10)) for m in others]
        assert all(len(work.wait(10.0).contributors) == 2 for work in works)


def test_a_call_that_waits_while_somebody_leaves_still_waits_for_everybody_else():
    """Ada has called, Bob has not; Cleo leaves. Ada's call is answered with Bob's."""
    with groups(3) as members:
        together(members, [torch.ones(10) for _ in members])
        tensors = [torch.full((10,), float(i)) for i in range(2)]
        first = members[0].all_reduce_async(tensors[0])
        members[2].close()
        second = members[1].all_reduce_async(tensors[1])
        assert all(len(work.wait(PATIENCE_S).contributors) == 2 for work in (first, second))
        assert all(torch.equal(t, torch.full((10,), 0.5)) for t in tensors)


def test_whoever_is_left_alone_by_one_that_could_not_stay_is_told_who_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.host.group_host.FAREWELL_S", 0.0)
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        passed: SimpleQueue[Passed] = SimpleQueue()
        members[1]._host.listeners.append(lambda fact: passed.put(fact) if isinstance(fact, Passed) else None)
        members[0].close()
        passed.get(timeout=PATIENCE_S)
        with pytest.raises(RunFailedError, match=r"E-RED-03 .*\n.*too few members are left to agree: m0 left\n"):
            members[1].all_reduce(torch.ones(10), timeout_s=0.1)


def test_a_member_that_only_dials_out_counts_and_gets_the_mean():
    """It listens nowhere, owns no part and has no vote; the others need not wait for it to leave."""
    with groups(2) as members:
        together(members, [torch.ones(10), torch.ones(10)])
        members.append(atoll.reduce.join(members[0].ticket, client=True))
        members[0].wait_for_peers(3)
        assert members[2].addresses == () and members[2].me in members[0].peers
        for size in (10, 300_000):
            tensors = [torch.full((size,), float(i)) for i in range(3)]
            assert all(len(done.contributors) == 3 and done.complete for done in together(members, tensors))
            assert all(torch.equal(t, torch.ones(size)) for t in tensors)
        members.pop().close()
        assert all(len(done.contributors) == 2 for done in together(members, tensors[:2]))


def test_a_member_with_a_cap_sends_no_faster():
    """A row of half a megabyte and an answer of as much, at 4 MB/s with a tenth of a second saved."""
    with groups(2, upload_bytes_s=4_000_000) as members:
        tensors = [torch.ones(250_000) for _ in members]
        began = time.monotonic()
        assert all(done.complete for done in together(members, tensors))
        assert time.monotonic() - began >= (1_000_000 - 400_000) / 4_000_000


def test_a_member_that_does_not_call_passes_and_is_named():
    with groups(3, timeout_s=0.5) as members:
        tensors = [torch.full((10,), float(i)) for i in range(3)]
        together(members, [t.clone() for t in tensors])
        for done in together(members[:2], tensors[:2]):
            assert done.missing == (members[2].me,) and len(done.contributors) == 2
        assert torch.equal(tensors[0], torch.full((10,), 0.5))


def test_a_member_that_the_mean_does_not_reach_is_told_and_its_next_call_is_with_the_others(monkeypatch):
    """Once its call went into the next round instead, and waited there for calls that nobody was going to make."""
    monkeypatch.setattr(patience, "REPAIR_S", 0.5)
    monkeypatch.setattr(group_island, "PART_VALUES_LEAST", 1000)  # so that everybody owns a part
    with groups(3) as members:
        behind = members[2]._host
        hear = behind.machine.handle

        def deaf(event, now):
            lost = isinstance(event, Received) and isinstance(event.message, Answer | PartBytes) and event.payload
            return [] if lost else hear(event, now)

        behind.machine.handle = deaf
        tensors = [torch.full((3000,), float(i)) for i in range(3)]
        works = [m.all_reduce_async(t) for m, t in zip(members, tensors, strict=True)]
        assert all(work.wait(PATIENCE_S).complete for work in works[:2])
        with pytest.raises(RunFailedError, match="did not reach this member") as told:
            works[2].wait(PATIENCE_S)
        assert told.value.code == "E-RED-13" and torch.equal(tensors[2], torch.full((3000,), 2.0))
        behind.machine.handle = hear
        assert all(len(done.contributors) == 3 for done in together(members, tensors))
        assert all(torch.equal(t, tensors[0]) for t in tensors)


def test_a_mean_of_other_calls_is_not_taken_for_ones_own():
    """The third calls otherwise while it is cut off: the others give it up, and what reaches it is their mean, in
    a codec whose wires are as long and mean something else, or in another number of parts."""
    with groups(3, codec="bf16", topology="butterfly") as members:
        together(members, [torch.ones(1) for _ in members])
        third, cut_off = members[2].me, threading.Event()
        for member in members:
            loses_calls(member._host, third, cut_off)
        for asked in ({"codec": "fp16"}, {"topology": "star"}):
            together(members, [torch.ones(1) for _ in members])  # whoever was missed is here again
            cut_off.set()
            tensors = [torch.full((100_000,), 1.0 + i) for i in range(3)]
            otherwise = members[2].all_reduce_async(tensors[2], **asked)
            for done in together(members[:2], tensors[:2]):
                assert done.missing == (third,)
            with pytest.raises(RunFailedError, match=r"E-RED-10 m[01] called with .*, this member with"):
                otherwise.wait(PATIENCE_S)
            assert torch.equal(tensors[2], torch.full((100_000,), 3.0))
            cut_off.clear()


def loses_calls(host: GroupHost, third: PeerId, cut_off: threading.Event) -> None:
    """While it is cut off the third hears of no call, and nobody hears of its own, or that it is there."""
    hear, gone = host.machine.handle, host.machine.heartbeat.gone

    def handle(event: Event, now: float) -> list[Effect]:
        of_calls = isinstance(event, Received) and isinstance(event.message, Committed | Contribution | RowBytes)
        lost = of_calls and cut_off.is_set() and third in (host.me, event.sender)
        return [] if lost else hear(event, now)

    host.machine.handle = handle
    host.machine.heartbeat.gone = lambda peer: (peer == third and cut_off.is_set()) or gone(peer)
    host.machine.known.gone = host.machine.heartbeat.gone


@pytest.mark.parametrize(("standing", "code"), [("away", "E-RED-15"), ("expelled", "E-RED-16")])
def test_a_member_that_lost_its_place_is_told_at_once_and_not_when_its_patience_ends(
    standing: str, code: str, monkeypatch
):
    """Its call waits for another member's; then it hears what the others agreed on meanwhile."""
    monkeypatch.setattr("atoll.host.group_host.FAREWELL_S", 0.0)  # the two do not agree on who is there any more
    with groups(2) as members:
        tensors = [torch.full((10,), float(i)) for i in range(2)]
        together(members, [t.clone() for t in tensors])
        work = members[1].all_reduce_async(tensors[1])
        host = members[1]._host

        async def hears() -> None:
            bodies = host.machine.history.bodies
            head, mine = host.machine.history.head, members[1].me
            others = [replace(m, standing=standing) if m.peer == mine else m for m in bodies[head].members]
            bodies[head] = replace(bodies[head], members=tuple(others))
            host._react_to_fact(MembershipChanged(joined=(), left=(mine,), members=tuple(others)))

        members[1]._run(hears())
        with pytest.raises((RunFailedError, RefusedError)) as told:
            work.wait(PATIENCE_S / 2)  # its patience is twice that
        assert told.value.code == code and torch.equal(tensors[1], torch.ones(10))


def test_calls_with_other_sizes_do_not_mix_and_do_not_hang():
    """Everybody is told who called with what, nobody's tensors change, and the next call is as good as ever."""
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


def test_the_groups_codec_by_whatever_name_is_no_other_codec():
    with groups(2, codec="topk:0.1+int8") as members:
        works = [
            m.all_reduce_async(torch.ones(10), codec=c)
            for m, c in zip(members, (None, "topk:0.1+int8"), strict=True)
        ]
        assert all(work.wait(PATIENCE_S).complete for work in works)


@pytest.mark.parametrize("asked", [("fp16", "bf16"), (None, "2bit")])
def test_calls_with_other_codecs_do_not_mix_and_everybody_is_told_who_asked_for_what(asked):
    """Also where their bytes are as many, and one would pass for the other."""
    with groups(2) as members:
        tensors = [torch.zeros(1000), torch.ones(1000)]
        pairs = zip(members, tensors, asked, strict=True)
        for i, work in enumerate([m.all_reduce_async(t, codec=codec) for m, t, codec in pairs]):
            said = [f"m{1 - i} called with .*codec={asked[1 - i] or 'fp32'}", f"this .*codec={asked[i] or 'fp32'}"]
            with pytest.raises(RunFailedError, match=f"E-RED-10 {', '.join(said)}\n(.*\n)*.*same codec= at all"):
                work.wait(PATIENCE_S)
        assert not tensors[0].any() and tensors[1].all()
        assert all(done.complete for done in together(members, tensors, codec="fp16"))
        assert torch.equal(tensors[0], torch.full((1000,), 0.5))


def test_as_many_as_may_lie_cannot_spoil_a_call_with_another_size():
    """One of four, where one may lie. It learns its mistake; for the others it has no row, as they are told."""
    with groups(4, trust="open", statistic="median") as members:
        with pytest.raises(UsageError, match=r"E-RED-14 another topology"):
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
    """Five members, one far away: what the library makes of the same rows, the same bits at everybody."""
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
    for nothing in ([], torch.zeros(0), [torch.zeros(0, 3), torch.zeros(0)]):
        with pytest.raises(UsageError, match="E-RED-02 no value"):
            group.all_reduce(nothing, timeout_s=0.2)
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
    ):
        with pytest.raises(UsageError, match=r"E-RED-08 (.|\n)*held=" if "delta" in str(wrong) else "E-RED-08"):
            atoll.reduce.found(**wrong)
    owed = atoll.reduce.ErrorFeedback()
    group.all_reduce_async([torch.ones(3), torch.ones(4)], error_feedback=owed)
    with pytest.raises(UsageError, match=r"E-RED-19 .* of 2 tensors with 7 values .* 1 tensor"):
        group.all_reduce(torch.ones(7), error_feedback=owed)
    held = atoll.reduce.Held()
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
            atoll.reduce.found(**wrong)
    with pytest.raises((RefusedError, UsageError), match="E-TKT"):
        atoll.reduce.join("ATOLL1:nonsense")


def test_a_defect_of_ours_ends_the_calls_that_wait(monkeypatch: pytest.MonkeyPatch):
    """The machine breaks over the answer to some work: the user hears it at once, and can close the group."""
    group = atoll.reduce.found(peers=1)
    group.all_reduce(torch.ones(3))
    machine = group._host.machine
    handle = machine.handle

    def breaks(event: Event, now: float) -> list[Effect]:
        assert not isinstance(event, Done), "a promise to ourselves"
        return handle(event, now)

    monkeypatch.setattr(machine, "handle", breaks)
    with pytest.raises(RunFailedError, match=r"E-INT-01 .* a promise to ourselves"):
        group.all_reduce(torch.ones(3), timeout_s=PATIENCE_S)
    group.close()


def test_a_closed_group_leaves_nothing_behind():
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    group = atoll.reduce.found(peers=1)
    folder = group._host.folder
    group.all_reduce(torch.ones(3))
    assert folder.exists()
    thread = group._thread
    group.close()
    assert not folder.exists() and not thread.is_alive()


def test_a_call_that_another_thread_closes_the_group_under_is_told(monkeypatch: pytest.MonkeyPatch):
    """Before its loop ends, and after: nobody waits for ever for a call that nobody will look at."""
    group, stop, late = atoll.reduce.found(), GroupHost.stop, Call(torch.ones(3), 1, "fp32")
    fused = Lanes.fused

    async def and_then_it_comes(host: GroupHost) -> None:
        await stop(host)
        host.call([late])

    def closed_meanwhile(*given: object) -> Fused:
        group.close()
        return fused(*given)

    monkeypatch.setattr(GroupHost, "stop", and_then_it_comes)
    monkeypatch.setattr(Lanes, "fused", closed_meanwhile)
    with pytest.raises(UsageError, match="E-RED-01"):
        group.all_reduce(torch.ones(3))
    with pytest.raises(RunFailedError, match="E-RED-04"):
        late.future.result(0)


def test_a_member_that_cannot_come_in_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No open door, no folder, no thread: whether the address is no good, the ticket, or nobody is there."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    threads = threading.active_count()
    with pytest.raises((UsageError, NetworkError)):
        atoll.reduce.found(listen=("/ip4/192.0.2.1/tcp/1",))
    with pytest.raises((RefusedError, UsageError), match="E-TKT"):
        atoll.reduce.join("ATOLL1:nonsense")
    with atoll.reduce.found() as over:
        pass
    monkeypatch.setattr("atoll.host.group.MEET_S", 0.5)
    with pytest.raises(NetworkError, match=r"E-RED-07 (.*\n)+.*nobody is reached: nobody listens at"):
        atoll.reduce.join(over.ticket)
    assert list(tmp_path.glob("atoll-group-*")) == [] and threading.active_count() <= threads


def test_what_a_killed_member_left_behind_is_cleared_away_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with atoll.reduce.found() as alive:
        left, fresh, other = (tmp_path / name for name in ("atoll-group-left", "atoll-group-fresh", "other"))
        for folder in (left, fresh, other):
            folder.mkdir()
            (folder / "lock").touch()
        for folder in (left, other, alive._host.folder):
            os.utime(folder, (0, 0))
        with atoll.reduce.found():
            assert not left.exists()
            assert fresh.exists() and other.exists() and alive._host.folder.exists()
        alive.all_reduce(torch.ones(3))


@pytest.mark.parametrize(("values", "pieces"), [(0, 1), (1, 4), (10**6, 4), (10**7, 4), (2**26, 4), (255, 2)])
def test_parts_cover_everything_once_and_small_calls_use_few(values: int, pieces: int):
    found = cuts(values, (1,) * 4 * pieces, pieces, PART_VALUES)
    assert found[0][0] == 0 and found[-1][1] == values and len(found) == 4 * pieces
    assert all(a[1] == b[0] for a, b in pairwise(found))
    used = sum(hi > lo for lo, hi in found)
    assert used <= max(1, -(-values // 2**20) + 4)


@pytest.mark.parametrize(("codec", "parts"), [("fp32", 12), ("bf16", 4), ("int8", 4), ("2bit", 4)])
def test_a_large_call_in_fewer_bytes_has_fewer_messages(codec: str, parts: int):
    found = cuts(25_000_000, (1,) * 16, 4, part_values(codec_named(codec)))
    assert sum(hi > lo for lo, hi in found) == parts


@pytest.mark.parametrize("owners", [2, 4, 8, 16])
def test_a_call_of_ten_megabytes_is_everybodys_work(owners: int):
    """One owner of all would take in and hold everybody's rows: with 8 members seven times its tensors."""
    sizes = [hi - lo for lo, hi in cuts(2_500_000, (1,) * owners * 4, 4, PART_VALUES)]
    assert min(sum(sizes[owner::owners]) for owner in range(owners)) > 0.9 * 2_500_000 / owners


@pytest.mark.parametrize("owners", [2, 4, 8, 12])
def test_no_owner_of_a_large_call_holds_all_rows_of_its_share_at_once(owners: int):
    """Its own tensors a second time they would be; a part of each turn is a third of that."""
    values = 25_000_000
    sizes = [hi - lo for lo, hi in cuts(values, (1,) * owners * 4, 4, PART_VALUES)]
    assert max(sizes) * (owners - 1) < 0.34 * values


def test_a_group_learns_its_links_while_it_works_and_says_why_it_reduces_as_it_does():
    with groups(3) as members:
        for _ in range(20_000):  # until every pair has exchanged a heartbeat, and commitments have told all of it
            together(members, [torch.ones(8)] * 3)
            name, why = members[0].topology
            if "predicted" in why:
                break
        assert why.startswith(f"{name}: ") and "predicted" in why


UNCLOSED = """
import atoll, os, sys, torch
one = atoll.reduce.found(peers=2)
two = atoll.reduce.join(one.ticket)
work = one.all_reduce_async(torch.ones(3))
print(len(two.all_reduce(torch.ones(3)).contributors), flush=True)
if fork := os.fork():
    sys.exit(os.waitpid(fork, 0)[1])
for asks in (work.wait, work.done, one.trouble, lambda: one.all_reduce(torch.ones(3))):
    try:
        asks()
    except atoll.UsageError as why:
        print(why.code)
one.close()
"""


def test_a_script_that_ends_without_a_farewell_says_it_at_its_end():
    """It went on while Python ended the threads it works in, with a traceback for each of thousands of rounds.

    Whoever is forked from it has no part in the group and ends, too: workers of data loaders waited for ever.
    """
    ended = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2\n" + 4 * "E-RED-20\n", "")
