"""An exported folder says what `transformers` needs, and nothing that its members could slip in."""

import json

import pytest
import torch
from safetensors.torch import load

from atoll.crypto.digest import digest
from atoll.training.exchange.layout import base_digest, layout_of
from atoll.training.export import CARD_DOMAIN, CardContributor, ModelCard, hugging_face_files
from atoll.training.models import build_model, exchanged_patterns
from atoll.training.models.frozen_base import base_bytes
from atoll.training.recipe.state import initial_state

LLAMA = "llama:d=32,l=2,h=4,kv=2,t=16"
STORY = ModelCard(
    *("run", 3, "ab" * 32, "cd" * 32, "ef" * 32, LLAMA, "stdlib", 50, ("2bit", "int8"), 4),
    contributors=(CardContributor("ada", 4, 200, 800), CardContributor("bob", 3, 150, 600)),
    loss_first=5.5,
    loss_last=1.25,
    sent_bytes=2_000_000,
    data_parallel_bytes=400_000_000,
)


def exported(name: str, story: ModelCard = STORY) -> tuple[torch.nn.Module, dict[str, bytes]]:
    model = build_model(name, 3)
    pieces = hugging_face_files(initial_state(model), layout_of(model), story._replace(model=name))
    return model, {file: b"".join(content) for file, content in pieces.items()}


def test_a_llama_has_the_names_and_the_config_of_transformers():
    """Names as LlamaForCausalLM lists them; the tied head is left out, as transformers writes it."""
    model, files = exported(LLAMA)
    tensors, config = load(files["model.safetensors"]), json.loads(files["config.json"])
    layer = [
        *(f"self_attn.{which}_proj" for which in "qkvo"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"),
    ]
    expected = {f"model.layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(tensors) == expected | {"model.embed_tokens.weight", "model.norm.weight"}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in tensors.items())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"]
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    )
    assert tensors["model.layers.0.mlp.up_proj.weight"].shape[0] == config["intermediate_size"]


def with_adapters_that_do_something(name: str) -> tuple[torch.nn.Module, dict[str, bytes]]:
    """A model with adapters that are no longer zero, and the export of a run that exchanged only them."""
    model = build_model(name, 3)
    fresh = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for where, value in model.named_parameters():
            if ".lora_" in where:
                value.copy_(torch.randn(value.shape, generator=fresh) * 0.2)
    layout = layout_of(model, exchanged_patterns(name))
    story = STORY._replace(model=name)
    pieces = hugging_face_files(initial_state(model, layout), layout, story, base=base_bytes(model, layout))
    return model, {file: b"".join(content) for file, content in pieces.items()}


def test_a_llama_that_was_trained_by_adapters_is_exported_as_the_plain_llama():
    """Names, shapes and config are those of the one without adapters; what stood beside a weight is in it."""
    model, files = with_adapters_that_do_something(f"{LLAMA},lora=4")
    tensors, (plain, plain_files) = load(files["model.safetensors"]), exported(LLAMA)
    told = load(plain_files["model.safetensors"])
    assert {name: value.shape for name, value in tensors.items()} == {n: v.shape for n, v in told.items()}
    config, expected = (json.loads(one["config.json"]) for one in (files, plain_files))
    assert config == expected and config["atoll_model"] == LLAMA
    assert files.keys() == plain_files.keys()
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    plain.load_state_dict(tensors, strict=False)
    assert torch.allclose(plain(tokens), model(tokens), atol=1e-5)
    assert not torch.allclose(plain(tokens), build_model(LLAMA, 3)(tokens), atol=1e-2)


def test_a_llama_opened_by_transformers_gives_the_same_scores(tmp_path):
    """Only where transformers is installed; it is not among what Atoll needs."""
    transformers = pytest.importorskip("transformers")
    llamas = [exported(name) for name in (LLAMA, "llama:d=32,l=2,h=2,t=16,v=300,theta=5000,tie=0")]
    for model, files in (*llamas, with_adapters_that_do_something(f"{LLAMA},lora=4")):
        for file, data in files.items():
            (tmp_path / file).write_bytes(data)
        theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
        assert torch.allclose(theirs(tokens).logits, model(tokens), atol=1e-5)


def test_the_card_tells_who_gave_what():
    card = exported(LLAMA)[1]["README.md"].decode()
    assert card.startswith("---\nlibrary_name: transformers\ntags:\n- atoll")
    for words in (
        *(
            "| ada | 4 | 200 | 800 |",
            "| bob | 3 | 150 | 600 |",
            "trained together by 2 peers",
            "| samples | 1,400 |",
        ),
        *("5.5000 in the first round, 1.2500 in the last", "2.0 MB; data-parallel", "400.0 MB", "ab" * 32),
    ):
        assert words in card


def test_other_models_say_how_they_are_opened():
    for name in ("gpt-nano", "resnet18:w=4,i=1"):
        model, files = exported(name)
        card, config = files["README.md"].decode(), json.loads(files["config.json"])
        assert config["model_type"] == "atoll" and config["atoll_model"] == name
        assert f'build_model("{name}", seed=0)' in card and "does not know this architecture" in card
        build_model(name, 9).load_state_dict(load(files["model.safetensors"]))
        assert len(load(files["model.safetensors"])) == len(model.state_dict())


def test_first_weights_have_no_contributors():
    story = STORY._replace(contributors=(), loss_first=None, loss_last=None, sent_bytes=None, trained=0)
    card = exported(LLAMA, story)[1]["README.md"].decode()
    assert "None yet" in card and "training loss" not in card and "bytes sent" not in card


def test_a_card_holds_a_digest_of_the_runs_id_and_not_the_id():
    """Nor does the card of the first weights: their vertex is genesis and names the run."""
    for vertex in (STORY.vertex, STORY.genesis):
        card = exported(LLAMA, STORY._replace(vertex=vertex))[1]["README.md"].decode()
        assert STORY.genesis not in card and digest(CARD_DOMAIN + STORY.genesis.encode()).hex() in card


def test_a_name_cannot_break_out_of_its_place():
    mean = CardContributor("eve|1|\n# [click](http://x)<script>", 1, 1, 1)
    card = exported(LLAMA, STORY._replace(contributors=(mean,), run="a\n---\nb"))[1]["README.md"].decode()
    assert "\n# [" not in card and "<script>" not in card and "\n---\nb" not in card
    assert next(line for line in card.splitlines() if "eve" in line).count("|") == 5


def test_adapters_are_no_model():
    """All but one layer frozen: its tensor alone, under another name, and a card that names the required base."""
    model = build_model("gpt-nano", 3).requires_grad_(False)
    model.blocks[0].up.requires_grad_(True)
    layout, story = layout_of(model), STORY._replace(model="attached")
    pieces = hugging_face_files(initial_state(model), layout, story)
    files = {file: b"".join(content) for file, content in pieces.items()}
    card, base = files["README.md"].decode(), json.loads(files["base.json"])
    assert set(files) == {"adapters.safetensors", "base.json", "README.md"}
    adapters = load(files["adapters.safetensors"])
    assert list(adapters) == ["blocks.0.up.weight"]
    assert "not a model" in card and base["base"] in card and "from_pretrained" not in card
    assert [one["name"] for one in base["tensors"]] == [one.name for one in layout.held]
    fresh = build_model("gpt-nano", 3)  # what the card tells to do, where nothing is frozen
    assert base_digest(layout_of(fresh, only=list(adapters))).hex() == base["base"]
