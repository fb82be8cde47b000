"""A run begins from a model folder: what atoll exported, or a Llama as transformers saves it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atoll.runtime.training_spec import start_of_built_in
from atoll.training.exchange.layout import flatten, layout_of
from atoll.training.export import ModelCard, hugging_face_files
from atoll.training.models import build_model
from atoll.training.models.weights import load_weights, name_in
from atoll.training.recipe.methods import diloco
from atoll.training.recipe.state import initial_state, state_from_bytes

LLAMA = "llama:d=32,l=2,h=4,kv=2,f=96,t=16,v=256,theta=500000,tie=1"
UNTIED = LLAMA.replace("tie=1", "tie=0")


def exported(name: str, folder: Path, **change: Any) -> torch.nn.Module:
    """A model with weights of another seed than `build_model(name, 0)`, in a folder; `change` edits its config."""
    model = build_model(name, 5)
    story = ModelCard("run", 1, "aa", "bb", "cc", name, "x", 5, ("int8", "int8"), 1)
    for file, content in hugging_face_files(initial_state(model), layout_of(model), story).items():
        (folder / file).write_bytes(b"".join(content))
    if change:
        told = json.loads((folder / "config.json").read_text())
        told = {k: v for k, v in (told | change).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(told))
    return model


@pytest.mark.parametrize("name", [LLAMA, UNTIED, "gpt-nano", "resnet18:w=4,i=1"])
def test_an_export_is_gone_on_with(tmp_path: Path, name: str):
    """Bit for bit, buffers included, under its own name."""
    theirs, ours = exported(name, tmp_path), build_model(name, 0)
    assert name_in(tmp_path) == name
    load_weights(ours, name, tmp_path)
    assert all(torch.equal(value, ours.state_dict()[key]) for key, value in theirs.state_dict().items())


def test_a_llama_of_others_is_named_by_its_config(tmp_path: Path):
    """Without our mark, in bfloat16, in two files, with the tied head written out and an old buffer: taken."""
    theirs = exported(LLAMA, tmp_path, atoll_model=None, rope_parameters=None)
    assert name_in(tmp_path) == LLAMA
    tensors = {k: v.to(torch.bfloat16) for k, v in load_file(tmp_path / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (tmp_path / "model.safetensors").unlink()
    for number, names in enumerate((sorted(tensors)[:5], sorted(tensors)[5:])):
        save_file({k: tensors[k] for k in names}, tmp_path / f"model-{number}-of-2.safetensors")
    ours = build_model(LLAMA.replace("t=16", "t=8"), 0)  # rotary positions: a shorter window is the same model
    load_weights(ours, LLAMA.replace("t=16", "t=8"), tmp_path)
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight.to(torch.bfloat16).float())
    assert ours.lm_head.weight is ours.model.embed_tokens.weight


def test_the_first_state_of_a_run_holds_them(tmp_path: Path):
    theirs = exported("gpt-nano", tmp_path)
    beginning = start_of_built_in(diloco("gpt-nano"), "stdlib", weights=str(tmp_path))
    anchor = state_from_bytes(b"".join(beginning.state), beginning.layout).anchor_F
    assert torch.equal(anchor, flatten(theirs, beginning.layout)[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "llama3"}}, "positions are scaled"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06, here it is 1e-05"),
        ({"attention_bias": True, "hidden_act": "gelu"}, "its layers have biases; it uses gelu"),
        ({"head_dim": 16}, "its heads are not"),
        ({"model_type": "mistral"}, "holds a mistral: only Llamas"),
        ({"hidden_size": "32"}, "does not describe a Llama completely"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "does not describe a Llama completely"),
    ],
)
def test_a_model_that_computes_otherwise_is_refused(tmp_path: Path, change: dict[str, Any], words: str):
    exported(LLAMA, tmp_path, atoll_model=None, **change)
    with pytest.raises(ValueError, match=words):
        name_in(tmp_path)


def test_weights_of_another_model_are_refused_by_name(tmp_path: Path):
    exported(LLAMA, tmp_path)
    other = LLAMA.replace("l=2", "l=3")
    with pytest.raises(ValueError, match=r"write model\.name = \"llama:d=32,l=2"):
        load_weights(build_model(other, 0), other, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacking model\.norm\.weight; wrong extra"):
        load_weights(build_model(LLAMA, 0), LLAMA, tmp_path)
    tensors.pop("extra")
    save_file(tensors | {"model.norm.weight": torch.full((32,), float("nan"))}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not finite: model\.norm\.weight"):
        load_weights(build_model(LLAMA, 0), LLAMA, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"PK pickled")
    with pytest.raises(ValueError, match="is not a safetensors file"):
        load_weights(build_model(LLAMA, 0), LLAMA, tmp_path)
    (tmp_path / "adapters.safetensors").touch()
    with pytest.raises(ValueError, match="holds adapters, not a model"):
        name_in(tmp_path)


def test_a_llama_that_transformers_saved(tmp_path: Path):
    """Only where transformers is installed: the same scores."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path)
    ours = build_model(name := name_in(tmp_path), 0)
    load_weights(ours, name, tmp_path)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(theirs(tokens).logits, ours(tokens), atol=1e-5)
