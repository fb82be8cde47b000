"""Authority over a run: the founder's identity and a rule with other owners implement one interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
from amendable import BOB, CARL, CREATOR, as_creator, history_of, reach, swarm_of
from msgspec import UNSET

from atoll.base.errors import PeerFault
from atoll.base.ids import PeerId
from atoll.capabilities import CAPABILITIES
from atoll.peer import operator_commands
from atoll.peer.verify.chain import StoredHistory, verify_history
from atoll.simulation.signatures import VirtualSignatureVerifier, sign_as_identity
from atoll.simulation.swarm import VirtualSwarm
from atoll.wire.authority import Authority, FounderAuthority, SignedOrder
from atoll.wire.messages.vertex import Member

VERIFIER = VirtualSignatureVerifier()


@dataclass(frozen=True)
class PresentOwners:
    """Each command has an owner of its own, who must be a present member."""

    owners: Mapping[str, PeerId]

    @property
    def identities(self) -> tuple[bytes, ...]:
        return tuple(owner.encode() for owner in self.owners.values())

    def allows(self, order: SignedOrder, roster: Sequence[Member]) -> bool:
        owner = self.owners.get(order.command)
        is_here = any(m.peer == owner and m.is_present for m in roster)
        return is_here and VERIFIER.identity_holds(owner.encode(), order.content, order.signature)


MAKERS: dict[str, Callable[[], Authority]] = {
    "founder": lambda: FounderAuthority(CREATOR.encode(), VERIFIER),
    "owners": lambda: PresentOwners(dict.fromkeys(("recover", "attest", "rollback", "pause", "amend"), CREATOR)),
}
ROSTER = tuple(Member(p, b"", (), "trainer", "member", 0, 0.0, "") for p in (CREATOR, BOB))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("command", ["recover", "attest", "rollback", "pause", "amend"])
def test_an_order_holds_by_a_signature_of_the_authority_over_its_bytes(make: Callable[[], Authority], command: str):
    authority, by_bob = make(), sign_as_identity(BOB.encode(), b"order")
    assert CREATOR.encode() in authority.identities
    assert authority.allows(SignedOrder(command, b"order", as_creator(b"order")), ROSTER)
    for forged in (by_bob, b"", as_creator(b"another order")):
        assert not authority.allows(SignedOrder(command, b"order", forged), ROSTER)


def test_without_an_identity_in_genesis_nothing_can_be_ordered():
    nothing = FounderAuthority(b"", VERIFIER)
    assert nothing.identities == ()
    assert not nothing.allows(SignedOrder("pause", b"order", sign_as_identity(b"", b"order")), ROSTER)


def pause(swarm: VirtualSwarm, paused: bool, by: PeerId) -> None:
    node = swarm.world.nodes[by]
    local = node.clock.local(swarm.world.now)
    order = operator_commands.pause(node.machine, paused, lambda data: sign_as_identity(by.encode(), data), local)
    swarm.world.carry_out(node, order)


def test_a_run_follows_another_authority_than_its_founder(monkeypatch: pytest.MonkeyPatch):
    """Bob owns pauses: his order holds at all members and for a reader of the history; the founder's does not."""
    owners = PresentOwners({"pause": BOB})
    for place in ("atoll.peer.run_view", "atoll.peer.verify.chain"):
        monkeypatch.setattr(f"{place}.authority_of", lambda settings, verifier: owners)
    swarm = swarm_of()
    reach(swarm, 4)
    with pytest.raises(PeerFault, match="in a name that is not its own"):
        pause(swarm, True, CREATOR)
    pause(swarm, True, BOB)
    swarm.world.run(swarm.world.now + 60.0)
    assert all(history_of(swarm, name).head_body.paused is not UNSET for name in (CREATOR, BOB, CARL))
    kept = swarm.world.nodes[CARL].kept
    rows = {int(k[7:]): v for k, v in kept.items() if k.startswith("vertex/")}
    history = StoredHistory(swarm.run_id, kept["genesis"], sorted(rows), rows.get)
    audit = verify_history(history, VERIFIER, CAPABILITIES.verifiers)
    assert audit.intact and [p.paused for p in audit.pauses] == [True]
