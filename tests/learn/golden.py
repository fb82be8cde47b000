"""Prints digests of everything honest peers must compute alike, as one JSON line. Run by test_golden.py.

The inputs come from integer hashing, so they too are the same on every machine.
"""

import json

import numpy as np
import torch

from atoll.keys.digest import digest
from atoll.learn.codec import CODECS
from atoll.learn.combine import combine
from atoll.learn.data.order import mixed
from atoll.learn.layout import Layout, Slot
from atoll.learn.outer import Nesterov
from atoll.learn.state import SharedState, advance, state_bytes, state_hash
from atoll.learn.update import part_bounds

N = 600_003  # several spans, and a last block that is not full


def numbers(seed: int, n: int = N) -> torch.Tensor:
    """Heavy-tailed values around 1e-3, no two alike."""
    bits = mixed(np.arange(n, dtype=np.uint64) + np.uint64(seed * 10**9))
    uniform = ((bits >> np.uint64(40)).astype(np.float32) - np.float32(2**23)) * np.float32(2.0**-23)
    return torch.from_numpy(uniform * uniform * uniform * np.float32(1e-3))


def tensor_digest(x: torch.Tensor) -> str:
    return digest(x.numpy().tobytes()).hex()[:16]


def golden() -> dict[str, str]:
    found = {}
    for name, codec in CODECS.items():
        wires = [codec.encode(numbers(seed)) for seed in range(5)]
        rows = [(3 * seed + 1, wire) for seed, wire in enumerate(wires)]
        found[f"{name} encode"] = digest(wires[0]).hex()[:16]
        found[f"{name} decode"] = tensor_digest(codec.decode(wires[0], N))
        for reply in CODECS.values():
            answer = combine(rows, N, codec, reply).wire
            found[f"{name} combine {reply.name}"] = digest(answer).hex()[:16]
    found["state"] = two_rounds()
    return found


def two_rounds() -> str:
    """Up in 2 bits, down in int8, three owners of which one is silent in the second round."""
    slots = (Slot("w", "parameter", (N - 100,), "float32", 0), Slot("b", "buffer", (100,), "float32", N - 100))
    layout = Layout(slots, N - 100, N, 0)
    state = SharedState(numbers(9) * 100, torch.zeros(N - 100), torch.zeros(0, dtype=torch.int64))
    up, down, bounds = CODECS["2bit"], CODECS["int8"], part_bounds(N, 3)
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
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(golden())
    assert results[0] == results[1], "one thread and two threads disagree"
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), **results[0]}))
