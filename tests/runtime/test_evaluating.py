"""What an evaluation finds in a founded run: predictions of images, text of a tokenizer; what it needs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from atoll.base.errors import UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.bootstrap import ListenOptions, TicketTerms, found_run, training_peer_factory
from atoll.runtime.evaluation.evaluator import CheckpointEvaluator
from atoll.runtime.evaluation.facts import StateEvaluated
from atoll.runtime.publishing.checkpoints import newest_checkpoint
from atoll.runtime.training_spec import founding_blobs, start_of_built_in
from atoll.training.recipe.methods import diloco


def founded(folder: Path, model: str, data: Path, tokenizer: bytes = b"") -> Path:
    """A folder with a run that has not trained yet."""
    recipe = diloco(model, rounds=2, seq_len=16)
    beginning = founding_blobs(start_of_built_in(recipe, str(data), tokenizer=tokenizer), RunSettings())

    async def begin() -> None:
        make = training_peer_factory(1, lambda _: None)
        host, _ = await found_run(folder, beginning, "ada", ListenOptions(), TicketTerms(), make)
        await host.stop(farewell=False)

    asyncio.run(begin())
    return folder


def evaluated(folder: Path, data: str = "", prompt: str = "") -> StateEvaluated:
    checkpoint = newest_checkpoint(folder)
    assert checkpoint is not None
    return CheckpointEvaluator(folder, data).evaluate(checkpoint, 20, prompt, 6)


def test_images_are_predicted_and_a_run_without_its_data_takes_those_of_the_user(tmp_path: Path):
    """A fresh model: about a tenth right. An observer has no data set."""
    rng = np.random.default_rng(1)
    shape = {"x_train": (60, 28, 28), "x_test": (30, 28, 28)}
    arrays = {name: rng.integers(0, 256, size, np.uint8) for name, size in shape.items()}
    labels = {"y_train": np.arange(60) % 10, "y_test": np.arange(30) % 10}
    np.savez(tmp_path / "digits.npz", **arrays, **labels)
    folder = founded(tmp_path / "run", "cnn-mnist", tmp_path / "digits.npz")
    found = evaluated(folder)
    assert found.loss is not None and 2.0 < found.loss < 3.0 and found.samples == 20 and found.text == ""
    right = sum(wanted == predicted for wanted, predicted in found.predictions)
    assert len(found.predictions) == 16 and found.accuracy is not None and right <= found.accuracy * 20 <= right + 4
    for blob in (folder / "blobs").iterdir():
        if blob.name not in (found.state.hex(), f"{found.state.hex()}.manifest"):
            blob.unlink()
    with pytest.raises(UsageError, match="E-EVA-03 the run's data is not in"):
        evaluated(folder)
    assert evaluated(folder, str(tmp_path / "digits.npz")) == found
    (tmp_path / "a.txt").write_text("text " * 4000)
    with pytest.raises(UsageError, match="E-EVA-02 cnn-mnist learns from images"):
        evaluated(folder, str(tmp_path / "a.txt"))


def test_a_text_model_answers_in_the_words_of_its_tokenizer(tmp_path: Path):
    """The same seed every time, so two evaluations of one state are equal."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(34)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    texts = (" ".join(f"w{(i * j) % 34}" for j in range(40)) for i in range(300))
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    model, tokenizer = "gpt:d=32,l=1,h=2,t=16,v=34", made.to_str().encode()
    folder = founded(tmp_path / "run", model, tmp_path / "a.jsonl", tokenizer)
    found = evaluated(folder, prompt="w3 w5")
    words = found.text.split()
    assert words[:2] == ["w3", "w5"] and len(words) == 8 and {*words} <= {f"w{i}" for i in range(34)}
    assert evaluated(folder, prompt="w3 w5") == found and len(evaluated(folder).text.split()) == 7
