"""Prints digests of everything honest peers must compute alike, as one JSON line. Run by test_golden.py.

The inputs come from integer hashing, so they too are the same on every machine. With `native`, compiled kernels
do the work: once, and only for the codecs that have some.
"""

import json
import sys
from functools import cache

import numpy as np
import torch
from advancing import advance

from atoll.crypto.digest import digest
from atoll.training.codec import CODECS, Codec, SharedKnowledge, codec_named
from atoll.training.codec.compiled import native
from atoll.training.data.order import mixed
from atoll.training.exchange.combine import combine
from atoll.training.exchange.distance_weights import SOLVES, compare_rows, weigh_rows
from atoll.training.exchange.layout import ModelLayout, TensorSlot
from atoll.training.recipe.inner import AdamW
from atoll.training.recipe.outer import AgreementNesterov, Nesterov, outer_step
from atoll.training.recipe.reply_formats import ReplyFormat
from atoll.training.recipe.state import SharedState, apply_update, state_bytes, state_hash
from atoll.training.recipe.update import part_bounds

N = 300_003  # two spans, and a last block that is not full


@cache
def numbers(seed: int, n: int = N) -> torch.Tensor:
    """Heavy-tailed values around 1e-3, no two alike."""
    bits = mixed(np.arange(n, dtype=np.uint64) + np.uint64(seed * 10**9))
    uniform = ((bits >> np.uint64(40)).astype(np.float32) - np.float32(2**23)) * np.float32(2.0**-23)
    return torch.from_numpy(uniform * uniform * uniform * np.float32(1e-3))


def tensor_digest(x: torch.Tensor) -> str:
    return digest(x.numpy().tobytes()).hex()[:16]


CHAINS = (
    "topk:0.1+int8",
    "topk-rice:0.1+int8",
    "sparseloco",
    "randk:0.1+int8",
    "sparse+int4",
    "dct+int8",
    "demo",
    "delta+int8",
    "changed+2bit",
    "2bit+zstd:3",
)
KERNELS = ("fp32", "int8", "int4", "e3m0", "2bit", "sign", "topk:0.1+int8", "2bit+zstd:3")
REPLIES = ("fp32", "int8", "2bit")
COMPARED = ("fp32", "int8")


def golden() -> dict[str, str]:
    known = SharedKnowledge(seed=b"golden", reference_N=numbers(77))
    family = CODECS | {name: codec_named(name, known) for name in CHAINS}
    if native.kernels is not None:
        family = {name: family[name] for name in KERNELS}
    found = {}
    for name, codec in family.items():
        inputs = [mostly_zero(numbers(seed)) if name.startswith("sparse+") else numbers(seed) for seed in range(5)]
        wires = [codec.encode(x) for x in inputs]
        rows = [(3 * seed + 1, wire) for seed, wire in enumerate(wires)]
        if codec.same_everywhere:
            found[f"{name} encode"] = digest(wires[0]).hex()[:16]
        found[f"{name} decode"] = tensor_digest(codec.decode(wires[0], N))
        for reply in replies(name, codec):
            answer = combine(rows, N, codec, family[reply]).wire
            found[f"{name} combine {reply}"] = digest(answer).hex()[:16]
        if name in COMPARED:
            found[f"{name} compare"] = digest(compare_rows(rows, N, codec).products).hex()[:16]
    if native.kernels is None:
        found |= factors() | gathered() | weights()
    found["adamw state"] = two_gradients()
    found["state"] = two_rounds()
    return found


def gathered() -> dict[str, str]:
    """Gathered rows, in a reply without a sum by the owner; the outer step with agreement momentum."""
    how = ReplyFormat(codec_named("sparseloco"), None, "mean", False, (N - 1000, 1000))
    answer = how.encode([(seed + 1, how.up.encode(numbers(seed))) for seed in range(3)]).wire
    assert answer is not None
    value_N, agree_N = how.decode(answer).value_N, numbers(5).abs() * 900
    moved = outer_step(AgreementNesterov(), numbers(1), numbers(2), value_N, 3, agree_N)
    return {
        "gathered answer": digest(answer).hex()[:16],
        "gathered read": tensor_digest(value_N),
        "agreeing step": tensor_digest(torch.cat(moved)),
    }


def replies(name: str, codec: Codec) -> list[str]:
    """The three oldest codecs answer each other; all others answer themselves, and in int8."""
    if name in REPLIES:
        return list(REPLIES)
    return [name, "int8"] if codec.same_everywhere else ["int8"]


def mostly_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() > 7e-4, x, 0.0)


def factors() -> dict[str, str]:
    """What receivers do with low-rank wires. Only senders multiply matrices, so these factors are made up."""
    known = SharedKnowledge(shapes=((1, 300), (500, 400), (99_703 // 251, 251), (1, 99_703 % 251)))
    codec, inner = codec_named("lowrank:4+int8", known), CODECS["int8"]
    sent = 300 + 4 * (500 + 400) + 4 * (99_703 // 251 + 251) + 99_703 % 251
    wires = [inner.encode(numbers(seed, sent)) for seed in range(3)]
    answer = combine([(seed + 1, wire) for seed, wire in enumerate(wires)], N, codec, inner).wire
    return {
        "lowrank:4+int8 decode": tensor_digest(codec.decode(wires[0], N)),
        "lowrank:4+int8 combine int8": digest(answer).hex()[:16],
    }


def weights() -> dict[str, str]:
    """What rules by distance make of two parts of seven rows, two of them far off."""
    names, parts = [f"p{k}" for k in range(7)], []
    for part in range(2):
        inputs = [numbers(seed + 10 * part, 9_000) * (30 if seed > 4 else 1) for seed in range(7)]
        parts.append(
            (names, compare_rows([(1, CODECS["fp32"].encode(x)) for x in inputs], 9_000, CODECS["fp32"]).products)
        )
    found = {rule: np.array(weigh_rows(rule, 2, names, parts)).tobytes() for rule in sorted(SOLVES)}
    return {f"{rule} weights": digest(made).hex()[:16] for rule, made in found.items()}


def two_gradients() -> str:
    """Two clipped steps of the agreed AdamW, in the middle of its cosine."""
    slots = (
        TensorSlot("w", "parameter", (N - 100,), "float32", 0),
        TensorSlot("b", "buffer", (100,), "float32", N - 100),
    )
    layout = ModelLayout(slots, N - 100, N, 0)
    state = SharedState(numbers(9) * 100, torch.zeros(N - 100), torch.zeros(0, dtype=torch.int64), 6, 333)
    outer = AdamW(clip_norm=0.01, warmup_steps=10, total_steps=1000)
    for seed in range(2):
        state = apply_update(numbers(seed), state, outer, steps=1, samples=8, tokens=8)
    return state_hash(state_bytes(state, layout)).hex()[:16]


def two_rounds() -> str:
    """Up in 2 bits, down in int8, three owners of which one is silent in the second round."""
    slots = (
        TensorSlot("w", "parameter", (N - 100,), "float32", 0),
        TensorSlot("b", "buffer", (100,), "float32", N - 100),
    )
    layout = ModelLayout(slots, N - 100, N, 0)
    state = SharedState(numbers(9) * 100, torch.zeros(N - 100), torch.zeros(0, dtype=torch.int64))
    up, down, bounds = CODECS["2bit"], CODECS["int8"], part_bounds(N, (1,) * 3)
    for round_index in range(2):
        parts = []
        for lo, hi in bounds:
            rows = [(seed + 1, up.encode(numbers(seed + round_index)[lo:hi])) for seed in range(4)]
            parts.append(combine(rows, hi - lo, up, down).wire)
        if round_index:
            parts[1] = None
        state = advance(state, parts, bounds, down, Nesterov(0.9, 0.6), steps=50, samples=800, tokens=51_200)
    return state_hash(state_bytes(state, layout)).hex()[:16]


if __name__ == "__main__":
    results, has_kernels = [], "native" in sys.argv and native.load()
    for threads in (1,) if has_kernels else (1, 2):
        torch.set_num_threads(threads)
        results.append(golden())
    assert results[0] == results[-1], "one thread and two threads disagree"
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), **results[0]}))
