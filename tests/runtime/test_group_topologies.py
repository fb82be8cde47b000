"""Over which links a group's calls go, and in how many pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from grouped import PATIENCE_S, groups, together

from atoll.base.errors import RunFailedError
from atoll.base.ids import PeerId
from atoll.runtime.allreduce.driver import GroupDriver
from atoll.runtime.allreduce.parts import PART_VALUES, cuts, part_values
from atoll.training.codec import codec_named

pytestmark = [pytest.mark.net]


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

    async def parts(host: GroupDriver) -> list[Sequence[PeerId]]:
        await host._until(lambda: host.machine.round and host.machine.round.way.topology, PATIENCE_S, "it is known")
        return [part.owners for part in host.machine.round.way.topology.parts]

    with groups(3) as members:
        members[1].wait_for_peers(3, PATIENCE_S)
        owned = members[1]._query(parts)
        for member in members:
            takers = {next_one for owner, next_one, *_ in owned if owner == member.me}
            assert takers == {m.me for m in members} - {member.me}


def test_a_call_chooses_its_topology_and_the_next_one_another():
    """Of one group, also one that makes sums on the way, and one whose owners are others; no member
    agreed before.
    """
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
    """Among three, of whom one has not called: no member waits for rows that never come."""
    with groups(3, timeout_s=0.5, silence_s=30.0) as members:
        together(members, [torch.zeros(1) for _ in members])  # no member is new any more
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
    """One owner of all would take in and hold every member's rows: with 8 members seven times its tensors."""
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
            if "measured speeds" in why:
                break
        assert bool(name) and why.startswith("about ")
