"""Runs of a causal language model of `transformers`: its configuration travels, its weights are the first state."""

from __future__ import annotations

import json
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from members import Members, story
from processes import Peer, answer_of, atoll, peers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    GPT2Config,
    GPTNeoXConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from atoll.runtime.training_spec import RunStart, start_of_built_in
from atoll.training.data import batch, load_data
from atoll.training.export import ModelCard, hugging_face_files
from atoll.training.models import loss_of
from atoll.training.models.hugging_face import NAME_MAX
from atoll.training.models.names import label_of, spec_of
from atoll.training.models.weights import hugging_face_name_in, load_weights
from atoll.training.recipe.methods import diloco
from atoll.training.recipe.recipes import Recipe

TINY: dict[str, Any] = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **TINY)  # its dropout is 0.1
NEOX = GPTNeoXConfig(max_position_embeddings=32, **WIDE, **TINY)
QWEN2 = Qwen2Config(num_key_value_heads=1, max_position_embeddings=32, **WIDE, **TINY)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (path := tmp_path / "book.txt").write_text(" ".join(f"{i} squared is {i * i}." for i in range(4000)))
    return str(path)


def saved(config: PretrainedConfig, folder: Path) -> Path:
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


class FromFolder(Members):
    def __init__(self, base: Path, weights: Path, text: str, only: tuple[str, ...]) -> None:
        recipe = diloco(hugging_face_name_in(weights), rounds=3, inner_steps=4, batch=2, seq_len=16)
        self.begun = start_of_built_in(recipe, text, weights=str(weights), only=only)
        super().__init__(base, recipe, text)
        for store in self.stores:
            store.put_blob(self.begun.base)

    def beginning(self, recipe: Recipe, book: str) -> RunStart:
        return self.begun


@pytest.mark.parametrize(("config", "only"), [(GPT2, ("transformer.h.1.*",)), (NEOX, ())])
def test_two_members_train_what_the_folder_holds_and_export_what_loads(config, only, tmp_path: Path, text: str):
    """The same bits at both. What `transformers` loads from the export computes what members compute."""
    members = FromFolder(tmp_path, saved(config, tmp_path / "model"), text, only)
    tokens = torch.arange(16)[None]

    async def tell(members: FromFolder) -> None:
        layout, name = members.learning.layout, members.recipe.model
        before, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval(), spec_of(name).build()
        load_weights(ours, name, tmp_path / "model")
        assert ours.training and torch.equal(ours(tokens).logits, before(tokens).logits)  # dropout is off
        inputs, targets = batch(load_data(text), 0, 1, 0, 1, 16, 0)
        window = torch.cat([inputs, targets[:, -1:]], 1)
        assert torch.allclose(loss_of(ours, (inputs, targets)), before(window, labels=window).loss, atol=1e-6)
        for _ in range(2):
            await members.play()
        model = members.trainers[0].child.model
        first, second = members.islands
        assert torch.equal(first.head.anchor_F, second.head.anchor_F)
        card = ModelCard("run", 2, "aa", "bb", "cc", name, "book", 4, ("int8", "int8"), 2)
        pieces = hugging_face_files(first.head, layout, card, base=members.begun.base)
        files = {file: b"".join(content) for file, content in pieces.items()}
        assert "{" not in files["README.md"].decode() and type(before).__name__ in files["README.md"].decode()
        (folder := tmp_path / "export").mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        after = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.equal(model(tokens).logits, after(tokens).logits)
        assert not torch.allclose(before(tokens).logits, after(tokens).logits)
        assert hugging_face_name_in(folder) == name

    story(tell, members)


BAD = [
    ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, "code of its own"),
    ({"sub": {"attn_implementation": "evil/kernel"}}, "a kernel by name"),
    ({"_attn_implementation": "evil/kernel"}, "internals"),
    ({"quantization_config": {"bits": 4}}, "quantized"),
    ({"n_embd": 10**9}, "is the most"),
    ({"n_layer": 10**6}, "is the most"),
    ({"resid_pdrop": float("inf")}, "is the most"),
    ({"n_inner": 10**400}, "is the most"),
    ({"_\x1b[2J": 1}, r"\('_.x1b"),
    ({"vocab_size": None}, "no vocab_size"),
    ({"model_type": "../gpt2"}, "no model_type"),
    ({"sub": [[[[[[[[1]]]]]]]]}, "nested"),
    ({"note": "x" * NAME_MAX}, "has room"),
]


@pytest.mark.parametrize(("change", "problem"), BAD)
def test_a_configuration_that_asks_for_more_than_a_built_model_is_refused(change, problem, tmp_path: Path):
    """By the founder, of a folder; and by every member, of a genesis."""
    config = {"vocab_size": 256, "model_type": "gpt2", "n_embd": 32} | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=problem):
        hugging_face_name_in(tmp_path)
    with pytest.raises(ValueError, match=problem):
        spec_of(f"hf:{json.dumps(config)}")


def test_folders_without_the_weights_of_a_causal_model_are_refused(tmp_path: Path, text: str):
    """An encoder-decoder, an encoder, weights of which one is lost, and those of another configuration."""
    T5Config(**TINY).save_pretrained(tmp_path / "t5")
    with pytest.raises(ValueError, match="no causal language model of the type 't5'"):
        hugging_face_name_in(tmp_path / "t5")
    folder = saved(NEOX, tmp_path / "neox")
    name = hugging_face_name_in(folder)
    assert label_of(name) == "hf:gpt_neox" and spec_of(name).seq_len == 32
    model = spec_of(name).build()
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {key: value for key, value in tensors.items() if key != "embed_out.weight"}, folder / "model.safetensors"
    )
    with pytest.raises(ValueError, match=r"missing lm_head.weight"):
        load_weights(model, name, folder)
    with pytest.raises(ValueError, match="another configuration"):
        load_weights(model, name, saved(GPT2, tmp_path / "gpt2"))
    encoder = BertConfig(max_position_embeddings=32, **WIDE, **TINY)
    with pytest.raises(ValueError, match="not causal"):
        start_of_built_in(
            diloco(hugging_face_name_in(saved(encoder, tmp_path / "bert")), rounds=1, inner_steps=1, seq_len=16),
            text,
            weights=str(tmp_path / "bert"),
        )
    with pytest.raises(ValueError, match=r"cannot build|refuses"):
        spec_of(name.replace('"num_attention_heads":2', '"num_attention_heads":0')).build()
    with pytest.raises(ValueError, match="reads at most 32 tokens"):
        diloco(name, rounds=1, inner_steps=1, seq_len=64)
    with pytest.raises(ValueError, match="no model_type"):
        diloco("hf:{}", rounds=1, inner_steps=1)


@pytest.mark.net
@pytest.mark.timeout(150)
def test_a_folder_is_trained_by_two_computers_of_which_one_has_it(
    tmp_path: Path, text: str, libraries: forkserver.ForkServer, monkeypatch: pytest.MonkeyPatch
):
    """A third one lacks the library and is refused in three lines."""
    monkeypatch.setattr(forkserver, "connect_to_new_process", libraries.connect_to_new_process)
    a, b, model = tmp_path / "a", tmp_path / "b", saved(QWEN2, tmp_path / "model")
    words = [f"data.source={text}", 'model.architecture="hf"', "run.rounds=4", "train.inner_steps=3"]
    sets = [word for one in (*words, "run.start_peers=2", "train.seq_len=16") for word in ("--set", one)]
    alone = atoll("up", "--dir", a, *sets)
    assert alone.returncode == 2 and "E-CFG-15" in alone.stderr and not a.exists()
    with peers(Peer("up", "--dir", a, *sets, "--set", f"model.weights={model}")) as running:
        ticket = running[0].until_fact("Opened")["ticket"]
        lacking = Peer(
            "join", ticket, "--dir", tmp_path / "c", lies="import sys; sys.modules['transformers'] = None\n"
        )
        running.append(lacking)
        assert lacking.ends() == 4
        said = lacking.words()
        assert "E-RUN-31" in said and "(qwen2)" in said and "pip install transformers" in said
        running.append(Peer("join", ticket, "--dir", b))
        assert running[2].until_fact("LearningKnown")["model"] == "hf:qwen2"
        assert running[0].ends() == running[2].ends() == 0
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    last = answer_of("checkpoint", "list", "--dir", b)[-1]["round"]
    exported = atoll("checkpoint", "export", last, tmp_path / "out", "--hf", "--dir", b)
    assert exported.returncode == 0, exported.stderr
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(value, trained.state_dict()[key]) for key, value in load_file(b / "model.safetensors").items()
    )
