"""What goes wrong on purpose in an experiment: lost and late updates, slow and vanishing peers, villains."""

from __future__ import annotations

import msgspec

from atoll.base.draw import draw_below
from atoll.training.robust.attacks import ATTACKS, OPTIMISED

CHANCE = 2**32


class MemberAbsence(msgspec.Struct, frozen=True):
    peer: int
    since: int  # step
    until: int | None = None  # None: for good


class FaultSpec(msgspec.Struct, frozen=True):
    """Lists are by peer; empty means none."""

    lost: float = 0.0  # share of all updates that never arrive; they stay in error feedback
    late: tuple[int, ...] = ()  # steps that each peer's updates are under way
    speeds: tuple[float, ...] = ()  # steps that each peer takes per step of the run, at most 1
    absent: tuple[MemberAbsence, ...] = ()
    villains: dict[int, str] = {}  # peer -> the attack it sends instead of its update (training/robust/attacks)

    def is_away(self, peer: int, step: int) -> bool:
        spans = (one for one in self.absent if one.peer == peer)
        return any(one.since < step and (one.until is None or step <= one.until) for one in spans)

    def speed(self, peer: int) -> float:
        return self.speeds[peer] if self.speeds else 1.0

    def takes_step(self, peer: int, step: int) -> bool:
        return int(step * self.speed(peer)) > int((step - 1) * self.speed(peer))

    def lateness(self, peer: int) -> int:
        return self.late[peer] if self.late else 0

    def loses(self, seed: bytes, peer: int) -> bool:
        return draw_below(seed, f"lost {peer}", CHANCE) < self.lost * CHANCE


def check_trouble(trouble: FaultSpec, peers: int) -> None:
    """ValueError unless every list is empty or has one entry per peer, and shares are shares."""
    for name in ("late", "speeds"):
        if len(getattr(trouble, name)) not in (0, peers):
            raise ValueError(f"{name} needs one entry for each of {peers} peers, or none")
    if (
        not 0 <= trouble.lost <= 1
        or any(not 0 < speed <= 1 for speed in trouble.speeds)
        or min((0, *trouble.late)) < 0
    ):
        raise ValueError("lost is a share, speeds are above 0 and at most 1, lateness is at least 0")
    strangers = [peer for peer in trouble.villains if not 0 <= peer < peers]
    unknown = set(trouble.villains.values()) - {*ATTACKS, *OPTIMISED}
    if strangers or unknown or len(trouble.villains) >= peers > 0:
        raise ValueError(
            f"villains are some of the peers 0 … {peers - 1}, not all, each with an attack out of "
            f"{', '.join((*ATTACKS, *OPTIMISED))}; given was {trouble.villains}"
        )
