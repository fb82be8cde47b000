"""Runs whose gradients are computed in bf16, or compiled: what members do, what they say, what audits say to it."""

from __future__ import annotations

import io
from functools import partial

import msgspec
import pytest
import torch
from members import PEERS, Inside, Members, story
from msgspec.structs import replace

from atoll.base.errors import PeerFault, UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.config import load_config, missing_protections, recipe_of, settings_of
from atoll.runtime.system import anonymous_file
from atoll.runtime.trainer import TrainerSpec
from atoll.runtime.trainer.process import TrainerCommandLoop
from atoll.runtime.trainer.protocol import TrainSteps
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import load_data
from atoll.training.experiment.api import ExperimentSimulator, FaultSpec
from atoll.training.models import build_model, loss_of
from atoll.training.recipe.gradient import ComputeOptions
from atoll.training.recipe.inner import AdamW
from atoll.training.recipe.recipes import diloco

SHORT = diloco("gpt-nano", rounds=2, inner_steps=4, batch=2, seq_len=16)
BF16 = replace(SHORT, computing=ComputeOptions("bf16"))
COMPILED = replace(SHORT, computing=ComputeOptions(compiled=True))


def test_members_compute_in_bf16_and_keep_fp32_and_agree_bit_for_bit(tmp_path, book):
    """Two rounds of two islands; linear layers answer in bf16 where they train, in fp32 where one looks at them."""
    run = ExperimentSimulator(BF16, build_model("gpt-nano", 0), load_data(book), PEERS, 8, FaultSpec(), loss_of)
    answered: dict[bool, set[torch.dtype]] = {True: set(), False: set()}

    def watch(layer, given, answer) -> None:
        answered[layer.training].add(answer.dtype)

    async def tell(members: Members) -> None:
        for _ in range(2):
            await members.play()
            child = members.trainers[0].child
            child.model.blocks[0].up.register_forward_hook(watch)
            for _ in range(4):
                run.step()
            for island in members.islands:
                assert torch.equal(island.head.anchor_F, run.agreed())
        child.evaluate(8)
        assert answered == {True: {torch.bfloat16}, False: {torch.float32}}
        kept = (child.x_F, child.gradient.gradient_P, child.inner.first_P, child.inner.second_P)
        assert {values.dtype for values in kept} == {torch.float32}

    story(tell, Members(tmp_path, BF16, book))


def after_four_steps(book: str, computing: ComputeOptions, device: str = "cpu") -> tuple[TrainerCommandLoop, str]:
    """A trainer, and what it said with its round."""
    spec = TrainerSpec("gpt-nano", 0, book, batch=2, seq_len=16, inner=AdamW(), device=device, computing=computing)
    child = TrainerCommandLoop(anonymous_file(), msgspec.msgpack.encode(spec), Inside(), io.BytesIO())
    child.set_up()
    return child, child.carry_out(TrainSteps(1, 4, None, 0, 0, 2, 0)).notice


def test_compiled_steps_are_the_same_steps(book, monkeypatch):
    """By the tracing of torch.compile alone, which takes no C++ compiler: four steps to the same parameters."""
    graphs: list[int] = []

    def counted(graph, inputs):
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    compiled, notice = after_four_steps(book, ComputeOptions(compiled=True))
    plain, _ = after_four_steps(book, ComputeOptions())
    assert graphs and notice == ""
    assert torch.allclose(compiled.x_F, plain.x_F, atol=1e-6)


def test_what_cannot_be_compiled_trains_as_it_is_written_and_says_so_once(book, monkeypatch):
    """A computer without a C++ compiler: the very bits of an uncompiled trainer, and one word about it."""

    def broken(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    fallen, notice = after_four_steps(book, ComputeOptions(compiled=True))
    assert "uncompiled" in notice and "C++ compiler" in notice
    assert torch.equal(fallen.x_F, after_four_steps(book, ComputeOptions())[0].x_F)
    assert fallen.carry_out(TrainSteps(2, 1, None, 8, 0, 2, 4)).notice == ""


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # a compiler gives advice about speed
@pytest.mark.parametrize("computing", [ComputeOptions("bf16"), ComputeOptions(compiled=True)], ids=str)
def test_a_gpu_takes_steps_in_bf16_and_compiled_ones(book, computing):
    """Compiled for good, not fallen back; near the plain steps, and its mailbox holds the end of them."""
    child, notice = after_four_steps(book, computing, "cuda")
    assert notice == "" and torch.equal(child.mailbox.x_F, child.x_F.cpu())
    plain, _ = after_four_steps(book, ComputeOptions(), "cuda")
    assert torch.allclose(child.x_F, plain.x_F, atol=2e-2)


@pytest.mark.parametrize(("recipe", "word"), [(BF16, "bf16"), (COMPILED, "compiled")], ids=["bf16", "compiled"])
def test_audits_of_such_steps_are_refused_by_name_and_scores_are_not(book, recipe, word):
    """By whoever founds such a run, and by whoever is to join one that was founded all the same."""
    beginning = start_of_built_in(recipe, book)
    with pytest.raises(UsageError, match=f"E-RUN-16.*{word}") as refused:
        founding_blobs(beginning, RunSettings(audit_rate=0.1))
    assert "train.precision" in refused.value.fix and "train.compile" in refused.value.fix
    scored = founding_blobs(beginning, RunSettings(score_rate=0.1, reputation=True)).settings
    assert parse_training_spec(scored).recipe == recipe
    with pytest.raises(PeerFault, match=word):
        parse_training_spec(replace(scored, audit_rate=0.1))


def test_a_config_says_how_gradients_are_computed_and_the_default_leaves_no_byte():
    """Audits that trust stands for give way with a word; asked for, the config is refused with the key."""
    plain = recipe_of(load_config(None, (), {}))
    assert b"computing" not in msgspec.msgpack.encode(plain)
    sets = ("train.precision=bf16", "train.compile=true")
    recipe = recipe_of(load_config(None, sets, {}))
    assert recipe == replace(plain, computing=ComputeOptions("bf16", True))
    for key in sets:
        with pytest.raises(UsageError, match=r"E-CFG-13.*" + key.partition("=")[0]):
            load_config(None, (key, "run.audit_rate=0.1"), {})
    config = load_config(None, (*sets, "run.trust=community", "run.min_peers=5", "run.start_peers=5"), {})
    assert settings_of(config, recipe).audited_share == 0.0
    assert any("bf16" in text for text in missing_protections(config, recipe, 0))
