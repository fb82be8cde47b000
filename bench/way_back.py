"""What the way back loses and costs: an owner's answer, an owner that remembers, and everybody decoding everybody.

Four members, twenty rounds. Every update is the same drift plus noise of the same size, new for every member and
round, so that the sum over rounds has something to converge to, as in training. Members always use error feedback
(beta 1). `rms error` is that of everything applied so far against the sum of the members' true means, relative to
it: after the first round it shows what one round loses, after the twentieth what is never made good.
Bytes are those of one member, one round, all parts together: `up` is what it says about its own update, `down`
what it must hear to know the mean of all; the table has them per value.

    python bench/way_back.py [--quick] [--json]
"""

from __future__ import annotations

from functools import lru_cache

import torch
from form import asking, report, versions
from torch import Tensor

from atoll.keys.digest import Buffer
from atoll.learn.codec import Codec, Known, codec_named, pack
from atoll.learn.combine import combine, combine_remembering, gather

SIDE, QUICK_SIDE = 512, 128  # a square matrix: low-rank codecs want one
MEMBERS, ROUNDS = 4, 20
ANSWER, REMEMBERING, GATHER = "answer", "answer, owner remembers", "gather"
WAYS = (  # (way up, way down): the first is exact on the way up, so that only the way back shows
    *(("fp32", "int8"), ("fp32", "2bit"), ("int8", "int8"), ("2bit", "int8"), ("2bit", "2bit")),
    *(("topk:0.1+int8", "int8"), ("topk:0.1+int8", "topk:0.1+int8"), ("sparseloco", "int8")),
    *(("sparseloco", "sparseloco"), ("randk:0.1+int8", "int8"), ("lowrank:4+int8", "int8")),
)


@lru_cache(maxsize=ROUNDS)  # every way of a round sees the same
def updates(round_index: int, side: int) -> tuple[Tensor, ...]:
    """(side * side,) of every member. The drift is of low rank and heavy-tailed, like a layer's gradient."""
    generator = torch.Generator().manual_seed(77)
    left, right = torch.randn(side, 8, generator=generator), torch.randn(8, side, generator=generator)
    drift = ((left**3) @ right).view(-1)
    drift *= 1e-3 / drift.square().mean().sqrt()
    generator.manual_seed(4012 + round_index)
    return tuple(drift + torch.randn(side * side, generator=generator) * 1e-3 for _ in range(MEMBERS))


def known(round_index: int, side: int) -> Known:
    return Known(seed=b"round %d" % round_index, shapes=((side, side),))


class Way:
    """One mode of one pair of codecs, over all rounds."""

    def __init__(self, mode: str, up: str, down: str, side: int) -> None:
        self.mode, self.up, self.down, self.side = mode, up, down, side
        self.memories: list[Tensor | None] = [None] * MEMBERS
        self.owners: Tensor | None = None
        self.applied, self.true = torch.zeros(side * side), torch.zeros(side * side)
        self.bytes_up, self.bytes_down, self.errors = 0, 0, []

    def round(self, round_index: int) -> None:
        xs, n = updates(round_index, self.side), self.side * self.side
        up, down = (codec_named(name, known(round_index, self.side)) for name in (self.up, self.down))
        wires = []
        for member, x in enumerate(xs):
            wire, self.memories[member] = pack(up, x, self.memories[member], 1.0)
            wires.append(wire)
        self.bytes_up = len(wires[0])
        self.applied += self._mean([(1, wire) for wire in wires], n, up, down)
        self.true += sum(xs) / MEMBERS
        self.errors.append(float((self.applied - self.true).norm() / self.true.norm()))

    def _mean(self, rows: list[tuple[int, Buffer]], n: int, up: Codec, down: Codec) -> Tensor:
        if self.mode == GATHER:
            self.bytes_down = sum(len(wire) for _, wire in rows[1:])  # its own it has
            return gather(rows, n, up).mean_N
        if self.mode == REMEMBERING:
            done, self.owners = combine_remembering(rows, n, up, down, self.owners, 1.0)
        else:
            done = combine(rows, n, up, down)
        self.bytes_down = len(done.wire)
        return down.decode(done.wire, n)


def measured(mode: str, up: str, down: str, side: int) -> dict:
    way = Way(mode, up, down, side)
    for round_index in range(ROUNDS):
        way.round(round_index)
    return {
        "mode": mode,
        "codec": up if mode == GATHER else f"{up} / {down}",
        "bytes_up": way.bytes_up,
        "bytes_down": way.bytes_down,
        "rms_error_1": round(way.errors[0], 5),
        "rms_error_20": round(way.errors[-1], 5),
    }


def main() -> None:
    asked = asking(__doc__, "a smaller vector").parse_args()
    torch.set_num_threads(1)
    side = QUICK_SIDE if asked.quick else SIDE
    modes = [(mode, up, down) for up, down in WAYS for mode in (ANSWER, REMEMBERING)]
    modes += [(GATHER, up, "") for up in dict.fromkeys(up for up, _ in WAYS)]
    figures = [measured(mode, up, down or up, side) for mode, up, down in modes]
    if asked.json:
        settings = {"values": side * side, "members": MEMBERS, "rounds": ROUNDS, "beta": 1.0, "quick": asked.quick}
        print(report("way_back", settings, figures, versions("torch")))
        return
    print("| mode | codec up / down | bytes up | bytes down | rms error, round 1 | round 20 |")
    print("|---|---|---|---|---|---|")
    for row in figures:
        per_value = {name: f"{row[name] / (side * side):.4f}" for name in ("bytes_up", "bytes_down")}
        print("| " + " | ".join(str(cell) for cell in (row | per_value).values()) + " |")


if __name__ == "__main__":
    main()
