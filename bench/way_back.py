"""What the way back loses and costs: an owner's answer, an owner that remembers, and everybody decoding everybody.

Four members, twenty rounds. Every update is the same drift plus noise of the same size, new for every member and
round, so that the sum over rounds has something to converge to, as in training. Members always use error feedback
(beta 1). `rms error` is that of everything applied so far against the sum of the members' true means, relative to
it: after the first round it shows what one round loses, after the twentieth what is never made good.
Bytes are those of one member, one round, all parts together: `up` is what it says about its own update, `down`
what it must hear to know the mean of all; the table has them per value.

    python bench/way_back.py [--groups] [--quick] [--json]

`--groups` plays the same in all-reduce groups (`atoll.reduce`), members in threads of one process with sockets
between them: error feedback is the callers', owners are the groups', and bytes are those that a member's sockets
carried per call, both halves of the reduce, encryption and agreement included.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from form import asking, report, versions
from torch import Tensor

import atoll.reduce
from atoll.crypto.digest import Buffer
from atoll.training.codec import Codec, SharedKnowledge, codec_named, pack
from atoll.training.exchange.combine import combine, combine_remembering, gather

PATIENCE_S = 60.0
SIDE, QUICK_SIDE = 512, 128  # a square matrix: low-rank codecs want one
MEMBERS, ROUNDS = 4, 20
ANSWER, REMEMBERING, GATHER = "answer", "answer, owner remembers", "gather"
WAYS = (  # (way up, way down): the first is exact on the way up, so that only the way back shows
    *(("fp32", "int8"), ("fp32", "2bit"), ("int8", "int8"), ("2bit", "int8"), ("2bit", "2bit")),
    *(("topk:0.1+int8", "int8"), ("topk:0.1+int8", "topk:0.1+int8"), ("sparseloco", "int8")),
    *(("sparseloco", "sparseloco"), ("randk:0.1+int8", "int8"), ("lowrank:4+int8", "int8")),
)
GROUP_WAYS = (("fp32", "2bit"), ("2bit", "2bit"), ("int8", "int8"), ("lowrank:4+int8", "int8"))


@lru_cache(maxsize=ROUNDS)  # every way of a round sees the same
def updates(round_index: int, side: int) -> tuple[Tensor, ...]:
    """(side * side,) of every member. The drift is of low rank and heavy-tailed, like a layer's gradient."""
    generator = torch.Generator().manual_seed(77)
    left, right = torch.randn(side, 8, generator=generator), torch.randn(8, side, generator=generator)
    drift = ((left**3) @ right).view(-1)
    drift *= 1e-3 / drift.square().mean().sqrt()
    generator.manual_seed(4012 + round_index)
    return tuple(drift + torch.randn(side * side, generator=generator) * 1e-3 for _ in range(MEMBERS))


def known(round_index: int, side: int) -> SharedKnowledge:
    return SharedKnowledge(seed=b"round %d" % round_index, shapes=((side, side),))


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


def measured_group(mode: str, up: str, down: str, side: int) -> dict:
    ways = {ANSWER: {"way_back": down}, REMEMBERING: {"way_back": down, "remembered": True}}
    way, n = ways.get(mode, {"way_back": "gathered"}), side * side
    members = [
        atoll.reduce.found(peers=MEMBERS, codec=up, topology="butterfly", options=atoll.reduce.ReduceOptions(**way))
    ]
    try:
        with ThreadPoolExecutor() as pool:
            members += pool.map(atoll.reduce.join, [members[0].ticket] * (MEMBERS - 1))
        owed = [atoll.reduce.ErrorFeedback() for _ in members]
        for work in [member.all_reduce_async(torch.zeros(1)) for member in members]:  # who is new counts nothing
            work.wait(PATIENCE_S)
        applied, true, errors = torch.zeros(n), torch.zeros(n), []
        before = [(m._host.bytes_out, m._host.bytes_in) for m in members]
        for round_index in range(ROUNDS):
            xs = updates(round_index, side)
            tensors = [x.clone().view(side, side) for x in xs]
            calls = zip(members, tensors, owed, strict=True)
            works = [member.all_reduce_async(tensor, error_feedback=memory) for member, tensor, memory in calls]
            if not all(work.wait(PATIENCE_S).complete for work in works):
                raise RuntimeError(f"somebody is missing in call {round_index}")
            applied += tensors[0].view(-1)
            true += sum(xs) / MEMBERS
            errors.append(float((applied - true).norm() / true.norm()))
        after = [(m._host.bytes_out, m._host.bytes_in) for m in members]
    finally:
        for member in members:
            member.close()
    moved = [[b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)]
    return {
        "mode": mode,
        "codec": up if mode == GATHER else f"{up} / {down}",
        "bytes_up": sum(out for out, _ in moved) // MEMBERS // ROUNDS,
        "bytes_down": sum(into for _, into in moved) // MEMBERS // ROUNDS,
        "rms_error_1": round(errors[0], 5),
        "rms_error_20": round(errors[-1], 5),
    }


def main() -> None:
    asked = asking(__doc__, "a smaller vector")
    asked.add_argument("--groups", action="store_true", help="in groups of atoll.reduce")
    asked = asked.parse_args()
    torch.set_num_threads(1)
    side = QUICK_SIDE if asked.quick else SIDE
    ways = GROUP_WAYS if asked.groups else WAYS
    modes = [(mode, up, down) for up, down in ways for mode in (ANSWER, REMEMBERING)]
    modes += [(GATHER, up, "") for up in dict.fromkeys(up for up, _ in ways)]
    one = measured_group if asked.groups else measured
    figures = [one(mode, up, down or up, side) for mode, up, down in modes]
    if asked.json:
        settings = {
            "by": "groups" if asked.groups else "functions",
            "values": side * side,
            "members": MEMBERS,
            "rounds": ROUNDS,
            "beta": 1.0,
            "quick": asked.quick,
        }
        print(report("way_back", settings, figures, versions("torch")))
        return
    directions = "bytes out | bytes in" if asked.groups else "bytes up | bytes down"
    print(f"| mode | codec up / down | {directions} | rms error, round 1 | round 20 |")
    print("|---|---|---|---|---|---|")
    for row in figures:
        per_value = {name: f"{row[name] / (side * side):.4f}" for name in ("bytes_up", "bytes_down")}
        print("| " + " | ".join(str(cell) for cell in (row | per_value).values()) + " |")


if __name__ == "__main__":
    main()
