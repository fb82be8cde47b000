"""Invariant: whatever a file holds, reading it gives a value or the documented error, never anything else.

`ATOLL_FUZZ` sets how many inputs are tried per kind. Inputs are real files with bytes flipped, cut, repeated or
inserted, and plain noise: most get past the first check.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from atoll.base.errors import PeerFault, UsageError
from atoll.crypto.digest import digest
from atoll.runtime.config import load_config
from atoll.training.codec import CODECS, codec_named
from atoll.training.exchange.layout import layout_of
from atoll.training.models import build_model
from atoll.training.recipe.state import initial_state, state_bytes, state_from_bytes

FUZZ = int(os.environ.get("ATOLL_FUZZ", "400"))
TOML = b"""[run]
name = "x"
rounds = 3
trust = "private"
[train]
lr = 1e-3
inner_steps = 10
[sync]
up = "topk:0.1+int8"
[network]
listen_addresses = ["/ip4/127.0.0.1/tcp/0"]
"""


def broken(data: bytes, draw: random.Random) -> bytes:
    """One to four injuries."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out) + 1)
        match draw.randrange(5):
            case 0 if out:
                out[at % len(out)] ^= 1 << draw.randrange(8)
            case 1:
                del out[at : at + draw.randint(1, 40)]
            case 2:
                out[at:at] = draw.randbytes(draw.randint(1, 20))
            case 3:
                out[at:at] = out[draw.randrange(len(out) + 1) :][: draw.randint(1, 60)]
            case _ if out:
                out[at % len(out)] = draw.randrange(256)
    return bytes(out)


def fuzz(count: int) -> list[pytest.param]:
    return [
        pytest.param(count, id="some"),
        pytest.param(max(count, 100_000), id="many", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
    ]


@pytest.mark.parametrize("count", fuzz(FUZZ))
def test_a_config_file_is_a_config_or_a_usage_error(count: int, tmp_path: Path):
    draw, file = random.Random(1), tmp_path / "run.toml"
    for _ in range(count):
        file.write_bytes(broken(TOML, draw) if draw.random() < 0.9 else draw.randbytes(60))
        try:
            load_config(file, environment={})
        except UsageError as error:
            assert error.code.startswith("E-CFG")


@pytest.mark.parametrize("count", fuzz(FUZZ))
def test_a_checkpoint_is_a_state_in_canonical_form_or_a_fault(count: int):
    """Accepted only if it is, byte for byte, what `state_bytes` would write for what was read."""
    model = build_model("gpt-nano", 0)
    layout = layout_of(model)
    good = state_bytes(initial_state(model), layout)
    draw = random.Random(2)
    head = int.from_bytes(good[:8], "little") + 8
    for _ in range(count):
        # the header is where the decisions are; the tensors behind it are cheap to keep
        data = broken(good[:head], draw) + good[head:] if draw.random() < 0.7 else broken(good, draw)
        try:
            state = state_from_bytes(data, layout)
        except PeerFault:
            continue
        assert state_bytes(state, layout) == data


@pytest.mark.parametrize("count", fuzz(FUZZ // 4))
@pytest.mark.parametrize("name", [*CODECS, "topk:0.1+int8", "sparse+int8", "int8+zstd:3"])
def test_encoded_bytes_decode_to_finite_values_or_are_a_fault(name: str, count: int):
    codec, n = codec_named(name), 5000
    torch.manual_seed(3)
    good = bytes(codec.encode(torch.randn(n)))
    draw = random.Random(int.from_bytes(digest(name.encode())[:4], "big"))
    for _ in range(count):
        try:
            values = codec.decode(broken(good, draw), n)
        except PeerFault:
            continue
        assert values.shape == (n,) and bool(values.isfinite().all())
