"""Fault injection for experiments: lost and late updates, slow and absent peers, Byzantine peers."""

from __future__ import annotations

import msgspec

from atoll.base.draw import draw_below
from atoll.training.robust.attacks import ATTACKS, OPTIMISED

CHANCE = 2**32


class MemberAbsence(msgspec.Struct, frozen=True):
    peer: int
    since: int  # first step of the absence is since + 1
    until: int | None = None  # last step of the absence; None: never returns


class FaultSpec(msgspec.Struct, frozen=True):
    """Faults of one experiment. Lists have one entry per peer; an empty list means no fault."""

    lost: float = 0.0  # share of all updates that are lost; error feedback keeps them
    late: tuple[int, ...] = ()  # steps that each peer's updates are in flight
    speeds: tuple[float, ...] = ()  # steps of each peer per step of the run, at most 1
    absent: tuple[MemberAbsence, ...] = ()
    byzantine: dict[int, str] = {}  # peer -> the attack that it sends in place of its update (robust/attacks)

    def is_away(self, peer: int, step: int) -> bool:
        spans = (one for one in self.absent if one.peer == peer)
        return any(one.since < step and (one.until is None or step <= one.until) for one in spans)

    def speed(self, peer: int) -> float:
        return self.speeds[peer] if self.speeds else 1.0

    def takes_step(self, peer: int, step: int) -> bool:
        return int(step * self.speed(peer)) > int((step - 1) * self.speed(peer))

    def lateness(self, peer: int) -> int:
        return self.late[peer] if self.late else 0

    def is_lost(self, seed: bytes, peer: int) -> bool:
        return draw_below(seed, f"lost {peer}", CHANCE) < self.lost * CHANCE


def check_faults(trouble: FaultSpec, peers: int) -> None:
    """ValueError unless every list is empty or has one entry per peer, and all shares are in range."""
    for name in ("late", "speeds"):
        if len(getattr(trouble, name)) not in (0, peers):
            raise ValueError(f"{name} needs one entry for each of {peers} peers, or none")
    if (
        not 0 <= trouble.lost <= 1
        or any(not 0 < speed <= 1 for speed in trouble.speeds)
        or min((0, *trouble.late)) < 0
    ):
        raise ValueError("lost is a share 0 … 1, speeds are above 0 and at most 1, late is at least 0 steps")
    strangers = [peer for peer in trouble.byzantine if not 0 <= peer < peers]
    unknown = set(trouble.byzantine.values()) - {*ATTACKS, *OPTIMISED}
    if strangers or unknown or len(trouble.byzantine) >= peers > 0:
        raise ValueError(
            f"villains maps some of the peers 0 … {peers - 1}, not all, to attacks: "
            f"{', '.join((*ATTACKS, *OPTIMISED))}; not {trouble.byzantine}"
        )
