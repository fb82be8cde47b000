"""Fault schedule of a simulated run: named faults, of which a later run of the same seed may select some.

A name holds kind, peers and a number: the second crash of p0003 is `crash.p0003.2`, whatever happened in between.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from atoll.base.ids import PeerId, Seconds


@dataclass
class FaultSelection:
    only: frozenset[str] | None = None  # names of the faults that may happen; None: all
    happened: dict[str, Seconds] = field(default_factory=dict[str, Seconds])  # name → world time, in order
    events_max: int | None = None  # events after which the run fails: with other faults it may last much longer
    trace: list[str] | None = None  # every event of every peer, if the caller wants them
    _drawn: Counter[str] = field(default_factory=Counter[str])

    def admits(self, kind: str, now: Seconds, *peers: PeerId) -> bool:
        """Whether this fault happens. A suppressed fault counts in the numbers of later ones."""
        place = ".".join((kind, "+".join(sorted(peers)))) if peers else kind
        self._drawn[place] += 1
        name = f"{place}.{self._drawn[place]}"
        if self.only is not None and name not in self.only:
            return False
        self.happened[name] = now
        return True
