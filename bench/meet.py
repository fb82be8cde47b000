"""How long it takes until a group for all-reduces stands, and how long one that is closed takes to end.

Members are threads of this process, each with sockets of its own on loopback, so importing torch is not in it.
`joined_s` is from the first `join` to the last one's return: all are members by an agreed vertex. `closed_s` is
from the first `close` to the last one's return. Medians of `--repeat`.

    python bench/meet.py [--quick] [--repeat 9] [--json]
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

from form import asking, lines, report, versions

import atoll.reduce
from atoll.runtime.allreduce.group import Group

PEERS, QUICK_PEERS = (2, 3, 8), (2, 3)
REPEATS, QUICK_REPEATS = 9, 3


def meet(peers: int) -> tuple[float, float]:
    """(seconds until all are in, seconds until all are out)"""
    founder = atoll.reduce.found(peers=peers)
    with ThreadPoolExecutor(peers) as each:
        began = time.monotonic()
        groups: list[Group] = [founder, *each.map(atoll.reduce.join, [founder.ticket] * (peers - 1))]
        joined = time.monotonic()
        list(each.map(Group.close, groups))
        return joined - began, time.monotonic() - joined


def main() -> None:
    parser = asking(__doc__, f"{QUICK_PEERS} members, {QUICK_REPEATS} repeats")
    parser.add_argument("--repeat", type=int)
    arguments = parser.parse_args()
    repeats = arguments.repeat or (QUICK_REPEATS if arguments.quick else REPEATS)
    figures: dict[str, Any] = {}
    for peers in QUICK_PEERS if arguments.quick else PEERS:
        joined, closed = zip(*(meet(peers) for _ in range(repeats)), strict=True)
        figures[f"joined_s_{peers}"] = round(median(joined), 3)
        figures[f"closed_s_{peers}"] = round(median(closed), 3)
    if arguments.json:
        print(report("meet", {"repeats": repeats}, figures, versions()))
    else:
        print(lines(figures))


if __name__ == "__main__":
    main()
