"""What a step along an update says of it: honest ones stand out from every cheat, junk is refused."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import DATA

from atoll.base.errors import PeerFault
from atoll.base.ids import Digest
from atoll.crypto.digest import digest, merkle_root
from atoll.training.codec import codec_named
from atoll.training.data import batch, epoch_samples, samples_at
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.inner import AdamW, GradientSumOptimizer, fresh_inner, inner_step
from atoll.training.recipe.recipes import custom_loop_recipe, diloco
from atoll.training.recipe.update import moved
from atoll.verification.loss_scoring.policy import FALL_MOST, NAT, opinion_of
from atoll.verification.loss_scoring.tensors import (
    SAMPLES,
    LossDrops,
    dealt,
    falls_of,
    fixed_point,
    losses_of,
    scoring_problem,
    undealt,
)
from atoll.verification.shown_update import ShownUpdate, update_bytes, wires_from_bytes

MEMBERS, STEPS, BATCH, SEQ = 2, 32, 8, 16
INT8 = codec_named("int8")
DRAWN = digest(b"drawn")


class Scene:
    """A tiny GPT that two members trained for some rounds, and what they send in the next one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = build_model("gpt-nano", 0)
        self.layout = layout_of(self.model)
        self.x_F, self.gradient_P = bind(self.model, self.layout)
        self.cursor = 0
        self.anchor_F = self.x_F.clone()
        self.inner = [fresh_inner(self.layout.parameters) for _ in range(MEMBERS)]
        self.sent: list[list[torch.Tensor]] = []
        for _ in range(4):
            self.before_F = self.anchor_F.clone()
            self.sent.append([self._trained(member) for member in range(MEMBERS)])
            self.anchor_F = self.before_F - torch.stack(self.sent[-1]).mean(0)
            self.cursor += STEPS * BATCH

    def _trained(self, member: int) -> torch.Tensor:
        self.x_F.copy_(self.before_F)
        recipe = AdamW(warmup_steps=0, total_steps=1000)
        for step in range(STEPS):
            self.gradient_P.zero_()
            loss_of(self.model, batch(DATA, member, MEMBERS, self.cursor + step * BATCH, BATCH, SEQ, 0)).backward()
            x_P = self.x_F[: self.layout.parameters]
            inner_step(recipe, self.inner[member], x_P, self.gradient_P, step)
        return self.before_F - self.x_F

    def falls(self, update_F: torch.Tensor, member: int, drawn: Digest = DRAWN) -> LossDrops:
        cursor = self.cursor - STEPS * BATCH  # the last round's
        own = dealt(drawn, member, MEMBERS, cursor, STEPS * BATCH)
        others = undealt(drawn, self.cursor * MEMBERS, epoch_samples(DATA, SEQ), len(own))
        found = samples_at(DATA, np.array(own + others), SEQ, 0)
        losses = []
        for x_F in (self.before_F, self.before_F - update_F):
            self.x_F.copy_(x_F)
            losses.append(losses_of(self.model, found))
        return falls_of(*losses, own=len(own))


@cache
def scene() -> Scene:
    return Scene()


def gap(falls: LossDrops) -> float:
    return falls.own - falls.others


@pytest.mark.parametrize("member", range(MEMBERS))
@pytest.mark.parametrize("draw", range(4))
def test_an_honest_update_scores_above_every_cheat(draw: int, member: int):
    """Whatever samples are drawn; the same member sends another's update, an old one, noise, nothing …"""
    made, drawn = scene(), digest(b"%d" % draw)
    noise_F = torch.randn(made.layout.floats, generator=torch.Generator().manual_seed(draw))
    mine_F = made.sent[-1][member]
    honest = made.falls(mine_F, member, drawn)
    assert opinion_of(fixed_point(honest, NAT, FALL_MOST)) == "taught"
    cheats = {
        "another's": made.sent[-1][1 - member],
        "an old one": made.sent[-2][member],
        "noise": noise_F * (mine_F.norm() / noise_F.norm()),
        "nothing": torch.zeros_like(mine_F),
        "the opposite": -mine_F,
        "ten times as much": 10 * mine_F,
    }
    for name, update_F in cheats.items():
        falls = made.falls(update_F, member, drawn)
        assert falls.own <= 0 or gap(falls) < gap(honest), name


def test_cheats_are_found_hollow_or_at_least_not_taught():
    """Over many draws: a step that leads nowhere always, another's work all but a few times in a hundred."""
    made, taught = scene(), 0
    for seed in range(20):
        drawn = digest(b"%d" % seed)
        falls = made.falls(made.sent[-1][1], 0, drawn)
        taught += opinion_of(fixed_point(falls, NAT, FALL_MOST)) == "taught"
        for update_F in (-made.sent[-1][0], torch.zeros_like(made.before_F)):
            assert opinion_of(fixed_point(made.falls(update_F, 0, drawn), NAT, FALL_MOST)) == "hollow"
    assert taught <= 2


# ---- what is shown ----


BOUNDS = ((0, 64), (64, 100))
ROW_N = torch.arange(100.0)
WIRES = tuple(INT8.encode(ROW_N[lo:hi]) for lo, hi in BOUNDS)
ROOT = merkle_root(tuple(digest(wire) for wire in WIRES))


def test_what_was_committed_to_is_read_and_taken_a_step_along():
    wires = wires_from_bytes(update_bytes(WIRES), ROOT, BOUNDS, digest)
    x_F = torch.full((110,), 1000.0)
    ShownUpdate(wires, moved(BOUNDS, 10), (INT8, INT8)).subtract_from(x_F)
    assert torch.equal(x_F[:10], torch.full((10,), 1000.0))
    assert torch.allclose(x_F[10:], 1000.0 - ROW_N, atol=1.0)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 5000,
        msgspec.msgpack.encode(5),
        update_bytes(WIRES[:1]),
        update_bytes((*WIRES, b"")),
        update_bytes(tuple(reversed(WIRES))),
        msgspec.msgpack.encode([b""] * 100_000),
    ],
)
def test_anything_else_is_a_fault_of_its_author(data: bytes):
    with pytest.raises(PeerFault):
        wires_from_bytes(data, ROOT, BOUNDS, digest)


def test_a_wire_that_its_author_did_commit_to_but_that_is_none_is_a_fault_too():
    junk = (b"junk", b"junk")
    wires = wires_from_bytes(update_bytes(junk), merkle_root((digest(b"junk"),) * 2), BOUNDS, digest)
    with pytest.raises(PeerFault):
        ShownUpdate(wires, BOUNDS, (INT8, INT8)).decode()


# ---- which samples ----


@given(
    shards=st.integers(1, 9),
    cursor=st.integers(0, 10**6),
    samples=st.integers(0, 1000),
    epoch=st.integers(2, 10**5),
    seed=st.integers(0, 2**32),
)
def test_own_samples_are_the_peers_and_others_are_nobodys(shards, cursor, samples, epoch, seed):
    drawn, shard = digest(b"%d" % seed), seed % shards
    own = dealt(drawn, shard, shards, cursor, samples)
    taken = {(cursor + index) * shards + shard for index in range(samples)}
    assert len(own) == len(set(own)) == min(SAMPLES, samples) and taken.issuperset(own)
    first = (cursor + samples) * shards
    others = undealt(drawn, first, epoch, len(own))
    assert len(others) == len(own) and all(first <= at < first + epoch for at in others)
    assert own == dealt(drawn, shard, shards, cursor, samples) and others == undealt(drawn, first, epoch, len(own))


# ---- numbers ----


def test_falls_are_two_means_and_what_chance_would_make_of_their_difference():
    falls = falls_of([3.0, 3.0, 2.0, 2.0], [1.0, 2.0, 2.0, 1.0], own=2)
    assert falls == pytest.approx((1.5, 0.5, (0.5 / 2 + 0.5 / 2) ** 0.5))
    assert fixed_point(falls, NAT, FALL_MOST) == (1_500_000, 500_000, 707_107)


@pytest.mark.parametrize("after", [float("nan"), float("inf")])
def test_an_update_that_ruins_the_model_is_hollow(after: float):
    falls = fixed_point(falls_of([1.0] * 4, [after] * 4, own=2), NAT, FALL_MOST)
    assert falls[0] == -FALL_MOST and opinion_of(falls) == "hollow"


def test_what_cannot_be_scored_is_named():
    assert scoring_problem(diloco(rounds=1)) == ""
    assert "own" in scoring_problem(custom_loop_recipe(rounds=1, inner_steps=5))
    assert "sparseloco" in scoring_problem(diloco(rounds=1, up="sparseloco"))
    assert scoring_problem(diloco(rounds=1, up="2bit+zstd")) == ""
    assert "gradients" in scoring_problem(msgspec.structs.replace(diloco(rounds=1), inner=GradientSumOptimizer()))
