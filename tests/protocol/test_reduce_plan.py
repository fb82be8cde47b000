"""Who owns which part: the same at every peer, and never more than a frame can carry."""

from atoll.base.ids import PeerId
from atoll.base.limits import MIB, OWNERS_PER_PART, PART_BYTES_MAX, PARTS_MAX
from atoll.protocol.reduce.plan import butterfly_owners


def names(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"p{i}") for i in range(count))


def test_a_small_update_has_one_part_per_peer_and_a_chain_of_owners_each():
    owners = butterfly_owners(names(4), b"head")
    assert sorted(chain[0] for chain in owners) == list(names(4))
    assert all(len(set(chain)) == OWNERS_PER_PART for chain in owners)
    assert owners == butterfly_owners(names(4), b"head") != butterfly_owners(names(4), b"another head")


def test_a_large_swarm_has_no_more_parts_than_a_member_should_send():
    assert len(butterfly_owners(names(200), b"head")) == PARTS_MAX


def test_an_update_that_frames_could_not_carry_is_cut_finer_and_owners_take_turns():
    """Two peers, 400 MiB: nine parts instead of two of 200 MiB, and nobody owns more than one part too many."""
    owners = butterfly_owners(names(2), b"head", 400 * MIB)
    assert len(owners) == -(-400 * MIB // PART_BYTES_MAX) == 9
    firsts = [chain[0] for chain in owners]
    assert abs(firsts.count(PeerId("p0")) - firsts.count(PeerId("p1"))) <= 1


def test_one_peer_alone_owns_everything():
    assert butterfly_owners(names(1), b"head") == ((PeerId("p0"),),)
