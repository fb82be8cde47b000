"""What the codecs cost and lose, on one core, for normally distributed values.

GB/s are bytes of fp32 values per second of one core's time, the best of several runs, because boxes are busy.
`accumulate` is the part owner's inner loop: open, decode span by span, weigh, add, for four members' wires.
`mostly zero` is the same data with 99 of 100 values zero; `near` is 1 % away from what the receiver holds; `rank 4`
is a square matrix of that rank with a tenth of noise. Errors are in units of the data's root mean square: `rms` of
all values, `max` of the worst. fp32 only looks at what it encodes and copies what it decodes.
`auto` is told of no link, so it counts on a home's 20 Mbit/s, and of one of 10 Gbit/s.
`engine`: torch alone, or compiled kernels too (the extra `fast`), which some parts of most codecs use.

    encode_gb_s, decode_gb_s, decode_accumulate_gb_s, bytes_per_value, rms_error, max_error

    python bench/codec.py [--codec int8,2bit] [--quick] [--json]
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from form import asking, report, versions
from torch import Tensor

from atoll.crypto.digest import Buffer
from atoll.training.codec import CODECS, Codec, SharedKnowledge, codec_named
from atoll.training.codec.blocks import SPAN, spans_of
from atoll.training.codec.compiled import native

VALUES, QUICK_VALUES = 4 * 2**20, 2**20  # 16 MB and 4 MB of fp32: a part of a small and of a tiny model
ROUNDS, QUICK_ROUNDS = 9, 3  # at least; and more of what is fast
SECONDS, QUICK_SECONDS = 0.5, 0.0
MEMBERS = 4
FAST_LINK = "int8+auto, 10 Gbit/s"
CHAINS = (
    *("topk:0.1+bf16", "topk:0.1+int8", "topk-rice:0.1+int8", "topk:64/4096+bf16", "sparseloco"),
    *("topk-rice:64/4096+2means", "randk:0.1+int8", "dct+int8", "demo", "lowrank:4+int8", "lowrank:32+int8"),
    *("sparse+int8", "delta+int8", "changed+int8"),
    *("int8+zstd:3", "int8+zstd:5", "int8+zstd:9", "int8+lz4", "int8+snappy", "2bit+zstd:3", "sparseloco+zstd:3"),
    *("int8+auto", "2bit+auto", FAST_LINK),
)
BARS = {  # GB/s of fp32 on one core
    "int8": {"encode_gb_s": 3.0, "decode_accumulate_gb_s": 8.0},
    "2bit": {"encode_gb_s": 1.5, "decode_gb_s": 1.5, "decode_accumulate_gb_s": 1.5},
}


class Patience(NamedTuple):
    rounds: int
    seconds: float


def gb_s(work: Callable[[], object], values: int, patience: Patience) -> float:
    """The best of several runs."""
    seconds: list[float] = []
    while len(seconds) < patience.rounds or sum(seconds) < patience.seconds:
        began = time.thread_time()
        work()
        seconds.append(time.thread_time() - began)
    return 4 * values / min(seconds) / 1e9


def measured(name: str, values: int, patience: Patience) -> dict:
    generator = torch.Generator().manual_seed(4012)
    x = torch.randn(values, generator=generator)
    side = math.isqrt(values)
    near_N, link_bytes_s = x + torch.randn(values, generator=generator) * 0.01, None
    data = "normal"
    if name.startswith("delta"):
        data = "near"
    if name.startswith("lowrank"):
        data, near_N = "rank 4", None
        x = x * 0.1 + (torch.randn(side, 4, generator=generator) @ torch.randn(4, side, generator=generator)).view(
            -1
        )
    if name == FAST_LINK:
        link_bytes_s = 10e9 / 8
    if name.startswith("sparse+"):
        data, x = "mostly zero", x * (torch.rand(values, generator=generator) < 0.01)
    known = SharedKnowledge(seed=b"bench", reference_N=near_N, shapes=((side, side),), link_bytes_s=link_bytes_s)
    codec, out_N = codec_named(name.partition(",")[0], known), torch.empty(values)
    wire = codec.encode(x)
    codec.decode_into(wire, out_N)
    error_N, size = out_N - x, float(x.square().mean().sqrt())
    return {
        "codec": name,
        "engine": "torch" if native.kernels is None else "native",
        "data": data,
        "encode_gb_s": round(gb_s(lambda: codec.encode(x), values, patience), 2),
        "decode_gb_s": round(gb_s(lambda: codec.decode_into(wire, out_N), values, patience), 2),
        "decode_accumulate_gb_s": round(
            gb_s(lambda: accumulate(codec, wire, out_N), MEMBERS * values, patience), 2
        ),
        "bytes_per_value": round(len(wire) / values, 4),
        "rms_error": round(float(error_N.square().mean().sqrt()) / size, 6),
        "max_error": round(float(error_N.abs().max()) / size, 5),
    }


def by_engine(name: str, values: int, patience: Patience) -> list[dict]:
    rows = [measured(name, values, patience)]
    if native.load():
        rows.append(measured(name, values, patience))
        native.kernels = None
    return rows


def accumulate(codec: Codec, wire: Buffer, sum_N: Tensor) -> None:
    """What combine does: four members, weights of a quarter, span by span."""
    rows = [codec.open_wire(wire, len(sum_N)) for _ in range(MEMBERS)]
    value_S = torch.empty(min(len(sum_N), SPAN))
    for lo, hi in spans_of(len(sum_N)):
        sum_S, into_S = sum_N[lo:hi].zero_(), value_S[: hi - lo]
        for opened in rows:
            codec.add(opened, lo, 1 / MEMBERS, sum_S, into_S)


def main() -> None:
    parser = asking(__doc__, "less data, fewer rounds")
    parser.add_argument("--codec", help="only these, comma between several")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    values = QUICK_VALUES if asked.quick else VALUES
    patience = Patience(QUICK_ROUNDS, QUICK_SECONDS) if asked.quick else Patience(ROUNDS, SECONDS)
    names = asked.codec.split(",") if asked.codec else (*CODECS, *CHAINS)
    figures = [row for name in names for row in by_engine(name, values, patience)]
    if asked.json:
        settings = {
            "values": values,
            "rounds": patience.rounds,
            "threads": 1,
            "members": MEMBERS,
            "quick": asked.quick,
        }
        settings |= {"capability": torch.backends.cpu.get_cpu_capability(), "bars": BARS}
        compiler = ("numba",) if native.load() else ()
        print(report("codec", settings, figures, versions("torch", "numpy", "cramjam", *compiler)))
        return
    columns = ("codec", "engine", "data", "encode GB/s", "decode GB/s", "accumulate GB/s")
    columns += ("bytes per value", "rms error", "max error")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in figures:
        print("| " + " | ".join(str(cell) for cell in row.values()) + " |")
    for name, bars in BARS.items():
        for row in [row for row in figures if row["codec"] == name]:
            for figure, bar in bars.items():
                verdict = "reaches" if row[figure] >= bar else "MISSES"
                print(f"{name}, {row['engine']}: {figure} {row[figure]} ({verdict} {bar})")


if __name__ == "__main__":
    main()
