"""The way back: answers of owners with and without memory, and no owner at all."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.training.codec import CODECS, Codec, SharedKnowledge, codec_named, pack
from atoll.training.codec.blocks import SPAN
from atoll.training.exchange.combine import combine, combine_remembering, gather

FP32, INT8, TWO_BIT = CODECS["fp32"], CODECS["int8"], CODECS["2bit"]
MEMBERS = 3


def updates(n: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, generator=generator) * 1e-3 for _ in range(MEMBERS)]


def rows_of(xs: list[torch.Tensor], codec: Codec) -> list[tuple[int, bytes]]:
    return [(index + 1, bytes(codec.encode(x))) for index, x in enumerate(xs)]


def mean_of(xs: list[torch.Tensor]) -> torch.Tensor:
    return sum(x * (index + 1) for index, x in enumerate(xs)) / sum(range(1, MEMBERS + 1))


@pytest.mark.parametrize("reply", ["fp32", "int8", "2bit", "topk:0.1+int8", "dct+int8"])
@given(n=st.sampled_from([1, 300, 5000, SPAN + 77]), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_without_memory_an_owner_that_remembers_answers_like_one_that_does_not(reply, n, seed):
    """The first answer is the same, byte for byte; what it left out is exactly what is remembered."""
    rows, codec = rows_of(updates(n, seed), INT8), codec_named(reply)
    plain = combine(rows, n, INT8, codec)
    done, memory = combine_remembering(rows, n, INT8, codec, None, 1.0)
    assert done == plain
    mean = gather(rows, n, INT8).mean_N
    assert torch.equal(memory, mean - codec.decode(plain.wire, n))


def test_what_one_answer_leaves_out_comes_with_the_next_ones():
    """Twenty rounds in 2 bits: the sum of answers misses the sum of means by one round's loss, not by twenty."""
    n, rounds, memory = 5000, 20, None
    true, plain, remembered = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    for round_index in range(rounds):
        xs = updates(n, seed=0) if round_index else updates(n, seed=1)
        true += mean_of(xs)
        rows = rows_of(xs, FP32)
        plain += TWO_BIT.decode(combine(rows, n, FP32, TWO_BIT).wire, n)
        done, memory = combine_remembering(rows, n, FP32, TWO_BIT, memory, 1.0)
        remembered += TWO_BIT.decode(done.wire, n)
    assert torch.allclose(remembered + memory, true, atol=1e-6)
    assert float((remembered - true).norm()) < 0.2 * float((plain - true).norm())


def test_the_owners_memory_is_that_of_a_sender():
    """The same formula as on the way up: `pack` of the mean gives the same wire and the same memory."""
    n, memory = 2000, None
    packed_memory = None
    for seed in range(3):
        rows = rows_of(updates(n, seed), FP32)
        done, memory = combine_remembering(rows, n, FP32, INT8, memory, 0.9)
        wire, packed_memory = pack(INT8, gather(rows, n, FP32).mean_N, packed_memory, 0.9)
        assert done.wire == wire and torch.equal(memory, packed_memory)


def test_a_round_without_an_answer_leaves_the_memory_alone():
    """No row had any weight: the error feedback stays. The caller's memory is never written to."""
    rows, before = rows_of(updates(100), INT8), torch.ones(100)
    done, memory = combine_remembering([(0, wire) for _, wire in rows], 100, INT8, INT8, before, 1.0)
    assert done.wire is None and memory is before and done.counted == (0, 1, 2)
    combine_remembering(rows, 100, INT8, INT8, before, 1.0)
    assert torch.equal(before, torch.ones(100))


@pytest.mark.parametrize("name", [*CODECS, "topk:0.1+int8", "lowrank:2+int8", "demo"])
def test_everybody_who_gathers_the_same_rows_holds_the_same_bits(name):
    """From other buffers; and an owner that answers in fp32 would have told them the same."""
    n = 3000
    codec = codec_named(name, SharedKnowledge(shapes=((50, 60),)))
    rows = rows_of(updates(n), codec)
    here = gather(rows, n, codec)
    there = gather([(weight, memoryview(b"_" + wire)[1:]) for weight, wire in rows], n, codec)
    assert torch.equal(here.mean_N, there.mean_N)
    assert torch.equal(here.mean_N, FP32.decode(combine(rows, n, codec, FP32).wire, n))


def test_gathering_names_what_does_not_decode_and_loses_nothing_else():
    n = 1000
    xs = updates(n)
    rows = rows_of(xs, FP32)
    rows[1] = (2, b"rubbish")
    found = gather(rows, n, FP32)
    assert found.counted == (0, 2) and [index for index, _ in found.faults] == [1]
    assert torch.allclose(found.mean_N, (xs[0] + 3 * xs[2]) / 4, atol=1e-9)
    assert gather([], n, FP32).mean_N is None


ROOM = """
import resource, torch
from atoll.training.codec import CODECS
from atoll.training.exchange.combine import combine
torch.set_num_threads(1)
codec, n = CODECS["2bit"], 2**25
wire = bytes.fromhex("803f") * (n // 256) + bytes(n // 4)  # 2bit: every scale 1, every code 0
combine([(1, codec.encode(torch.ones(2**20)))], 2**20, codec, codec)  # what first use costs is not counted
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answer = combine([(1, wire), (1, wire)], n, codec, codec).wire
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(answer) == len(wire)
print((after - before) * 1024 - len(answer))
"""


def test_an_owner_of_a_large_part_holds_a_few_spans_beside_its_rows_and_its_answer():
    """A part of 128 MiB as fp32, in a process of its own: the peak grows by the answer and less than 24 MiB."""
    grown = subprocess.run([sys.executable, "-c", ROOM], capture_output=True, check=True, timeout=120)
    assert int(grown.stdout) < 24 * 2**20
