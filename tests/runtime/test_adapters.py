"""A run founded by name that exchanges a part of its model: adapters, or what patterns name, beside a base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from members import Members, story
from msgspec import UNSET
from safetensors.torch import load

from atoll.base.errors import PeerFault, UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.config import load_config, recipe_of, settings_of
from atoll.runtime.training_spec import RunStart, founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.exchange.layout import layout_of
from atoll.training.export import ModelCard, hugging_face_files
from atoll.training.models import build_model, with_adapters
from atoll.training.models.frozen_base import base_bytes, build_with_base
from atoll.training.models.weights import load_weights, name_in
from atoll.training.recipe.methods import diloco
from atoll.training.recipe.recipes import Recipe
from atoll.training.recipe.state import initial_state

ADAPTED = "gpt:d=32,l=2,h=2,t=16,lora=8"
PLAIN = "gpt:d=32,l=2,h=2,t=16"


def begun(name: str, data: str, **more):
    return start_of_built_in(diloco(name, rounds=3, inner_steps=4, batch=2, seq_len=16), data, **more)


class WithBase(Members):
    """Members that hold the run's base as well, as those do who fetched it."""

    def __init__(self, base: Path, name: str, book: str, only: tuple[str, ...] = ()) -> None:
        self.begun = begun(name, book, only=only)
        super().__init__(base, self.begun.recipe, book)
        for store in self.stores:
            store.put_blob(self.begun.base)

    def beginning(self, recipe: Recipe, book: str) -> RunStart:
        return self.begun


@pytest.mark.parametrize(("name", "only"), [(ADAPTED, ()), (PLAIN, ("blocks.1.up.*", "blocks.1.down.*"))])
def test_members_exchange_what_is_named_and_the_rest_stays_as_it_was(tmp_path, book, name, only):
    """Two rounds: the same bits at both, another loss, the base bit for bit; and what is exported is the plain
    model that computes what members computed."""

    async def tell(members: WithBase) -> None:
        layout = members.learning.layout
        assert layout.floats < layout.base_values and members.learning.base is not UNSET
        for _ in range(2):
            await members.play()
        first, second = members.islands
        assert torch.equal(first.head.anchor_F, second.head.anchor_F)
        model = members.trainers[0].child.model
        fresh = dict(build_model(name, members.recipe.seed).named_parameters())
        held = {one.name for one in layout.held}
        for where, value in model.named_parameters():
            assert torch.equal(value, fresh[where]) == (where in held), where
        told = ModelCard("run", 2, "aa", "bb", "cc", name, "book", 4, ("int8", "int8"), 2)
        pieces = hugging_face_files(first.head, layout, told, base=members.begun.base)
        files = {file: b"".join(content) for file, content in pieces.items()}
        assert "base.json" not in files and "stayed as it was" in files["README.md"].decode()
        folder = tmp_path / "export"
        folder.mkdir()
        for file, data in files.items():
            (folder / file).write_bytes(data)
        assert name_in(folder) == PLAIN and not any("lora" in tensor for tensor in load(files["model.safetensors"]))
        plain = build_model(PLAIN, 1)
        load_weights(plain, PLAIN, folder)
        tokens = torch.arange(16)[None]
        assert torch.allclose(plain(tokens), model(tokens), atol=1e-5)
        assert "lora" not in json.loads(files["config.json"]).get("atoll_numbers", {})

    torch.manual_seed(0)
    story(tell, WithBase(tmp_path, name, book, only))


def test_adapters_change_nothing_at_first_and_are_begun_beside_given_weights(tmp_path, book):
    """Whatever is exported without adapters may be gone on with by them: the same scores, all of it in the base."""
    model, tokens = build_model(PLAIN, 5), torch.arange(16)[None]
    assert torch.equal(build_model(ADAPTED, 5)(tokens), model(tokens))
    told = ModelCard("run", 1, "aa", "bb", "cc", PLAIN, "x", 4, ("int8", "int8"), 1)
    for file, content in hugging_face_files(initial_state(model), layout_of(model), told).items():
        (tmp_path / file).write_bytes(b"".join(content))
    beginning = begun(ADAPTED, book, weights=str(tmp_path))
    ours, layout = build_with_base(ADAPTED, 0, beginning.base)
    assert layout == beginning.layout and all("lora" in slot.name for slot in layout.slots)
    assert torch.equal(ours(tokens), model(tokens))


def test_another_base_is_refused(book):
    """Another seed's is another run's; another model's does not even fit."""
    mine, other = begun(ADAPTED, book), begun(with_adapters("gpt-nano", 8), book)
    with pytest.raises(PeerFault, match="does not have"):
        build_with_base(ADAPTED, 0, other.base)
    changed = bytearray(mine.base)
    changed[-1] ^= 1
    assert (
        build_with_base(ADAPTED, 0, mine.base)[1] == mine.layout != build_with_base(ADAPTED, 0, bytes(changed))[1]
    )
    learning = parse_training_spec(founding_blobs(mine, RunSettings()).settings)
    assert learning.beside == [learning.base]
    told = ModelCard("run", 1, "aa", "bb", "cc", ADAPTED, "x", 4, ("int8", "int8"), 1)
    state = initial_state(build_with_base(ADAPTED, 0, mine.base)[0])
    with pytest.raises(PeerFault, match="another model's"):
        hugging_face_files(state, mine.layout, told, base=bytes(changed))


def test_founding_says_what_can_be_named(book):
    with pytest.raises(UsageError) as told:
        begun(PLAIN, book, only=("blocks.7.*",))
    assert told.value.code == "E-RUN-24" and "its parameters are called token.weight" in told.value.what
    resnet = build_model("resnet18:w=4,i=1", 0)
    with pytest.raises(ValueError, match="updates running statistics"):
        base_bytes(resnet, layout_of(resnet, ("fc.*",)))
    few = founding_blobs(begun(PLAIN, book, only=("blocks.0.out.*",)), RunSettings())
    assert parse_training_spec(few.settings).layout.floats == 1024  # four blocks of values


def test_settings_give_any_size_adapters(tmp_path):
    """By rank or in the name; where there is no place for them it is said, and so is what becomes of audits."""
    config = load_config(None, ["model.name=llama-tiny", "model.lora_rank=4"], {})
    recipe = recipe_of(config)
    assert recipe.model == "llama:d=64,l=3,h=4,kv=2,t=64,lora=4" == with_adapters(recipe.model, 4)
    assert with_adapters(recipe.model, 0) == "llama:d=64,l=3,h=4,kv=2,t=64"
    assert load_config(None, ['model.only=["model.norm.*"]'], {}).model.only == ("model.norm.*",)
    with pytest.raises(UsageError, match="takes no adapters"):
        recipe_of(load_config(None, ["model.name=resnet18-mnist", "model.lora_rank=4"], {}))
    distrusting = load_config(
        None, ["model.lora_rank=4", 'run.trust="community"', "run.start_peers=4", "sync.overlap=0"], {}
    )
    assert settings_of(distrusting, recipe_of(distrusting)).audit_rate is UNSET
    asked = load_config(
        None, ["model.lora_rank=8", 'run.trust="community"', "run.start_peers=4", "run.audit_rate=0.1"], {}
    )
    with pytest.raises(UsageError, match="never measured"):
        recipe = recipe_of(asked)
        founding_blobs(start_of_built_in(recipe, "stdlib"), settings_of(asked, recipe))
