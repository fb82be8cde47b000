"""Data of a member's own have the form of the run's, and its trainer takes every sample of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from members import Inside

from atoll.base.errors import UsageError
from atoll.base.ids import Digest
from atoll.peer.settings import RunSettings
from atoll.policy.capability_terms import StateValidationTerms
from atoll.runtime.own_data import COPY, OwnData, check_rules, copy_own_data
from atoll.runtime.trainer import TrainerSpec
from atoll.training.data import load_data
from atoll.training.models import shape_of
from atoll.training.recipe.inner import SGD
from atoll.training.recipe.methods import fedavg
from atoll.training.spec import TrainingSpec

BLOB = Digest(bytes(32))
WORDS = "gpt:d=32,l=1,h=2,t=16,v=40"


def run_of(model: str, **more: Digest) -> TrainingSpec:
    recipe = fedavg(model, rounds=2, inner_steps=2, batch=2, seq_len=16)
    return TrainingSpec(recipe, "theirs", BLOB, shape_of(model), **more)


def refused(own: Path, learning: TrainingSpec, tokenizer: Path | None = None, column: str = "text") -> str:
    with pytest.raises(UsageError) as why:
        copy_own_data(OwnData(str(own), column), learning, tokenizer, own.parent)
    assert why.value.code == "E-DATA-09" and why.value.cause and why.value.fix
    assert not (own.parent / COPY).exists()
    return why.value.what


def test_text_becomes_tokens_of_the_runs_tokenizer_and_nothing_else_does(tmp_path: Path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(34)}, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tokenizer := tmp_path / "tokenizer.json"))
    (text := tmp_path / "own.txt").write_text("w3 w5 w33 " * 4000)
    (numbers := tmp_path / "own.bin").write_bytes(b"\x05\x00" * 9000)
    (records := tmp_path / "own.jsonl").write_text('{"body": "w1 w2"}\n' * 9000)
    with_tokenizer, numbered, window = run_of(WORDS, tokenizer=BLOB), run_of(WORDS), run_of("gpt-nano")
    assert "the run's tokenizer reads text" in refused(numbers, with_tokenizer, tokenizer)
    assert "token numbers without a tokenizer" in refused(text, numbered)
    assert "it has body" in refused(records, window)
    tokenizer.write_text("{}")
    assert "is not a tokenizer.json" in refused(text, with_tokenizer, tokenizer)
    (short := tmp_path / "short.txt").write_text("too short")
    refused(short, window)
    made.save(str(tokenizer))
    copied = load_data(str(copy_own_data(OwnData(str(text)), with_tokenizer, tokenizer, tmp_path)))
    assert set(copied.train.tolist()) == {3, 5, 33}
    assert copy_own_data(OwnData(str(numbers)), numbered, None, tmp_path) == tmp_path / COPY


def test_images_have_the_size_channels_and_classes_of_the_model(tmp_path: Path):
    image = pytest.importorskip("PIL.Image")

    def pictures(name: str, classes: int, side: int = 28) -> Path:
        for kind in range(classes):
            (folder := tmp_path / name / f"kind-{kind}").mkdir(parents=True)
            for number in range(2):
                image.fromarray(np.full((side, side), 9 * kind, np.uint8)).save(folder / f"{number}.png")
        return tmp_path / name

    (text := tmp_path / "own.txt").write_text("text " * 4000)
    gray = run_of("resnet18:c=3,i=1,w=1")
    assert "learns from images, the data is text" in refused(text, gray)
    assert "has 3 classes, and " in refused(pictures("two", 2), gray), "folders would have other numbers"
    assert "has 3 classes, the data has 4" in refused(pictures("four", 4), gray)
    assert "reads images of 3 channels, the data has 1" in refused(
        pictures("gray", 3), run_of("resnet18:c=3,i=3,w=1")
    )
    assert "28 x 28" in refused(pictures("large", 10, side=32), run_of("cnn-mnist"))
    assert copy_own_data(OwnData(str(pictures("three", 3))), gray, None, tmp_path) == tmp_path / COPY
    labels, images = np.array([0, 2, 0, 2], np.uint8), np.zeros((4, 28, 28), np.uint8)
    np.savez(tmp_path / "few.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    copy_own_data(OwnData(str(tmp_path / "few.npz")), gray, None, tmp_path)  # numbered: a site may lack a class
    assert load_data(str(tmp_path / COPY)).train_labels.tolist() == [0, 2, 0, 2]


def test_rules_that_need_common_data_are_named_with_what_to_write():
    check_rules(RunSettings())
    with pytest.raises(UsageError, match=r"loss scores \(run.score_rate = 0\)") as why:
        check_rules(
            RunSettings(audit_rate=0.1, score_rate=0.1, twin_rate=0.1, validation=StateValidationTerms(5, 10))
        )
    assert all(key in why.value.what for key in ("run.audit_rate", "run.twin_rate", "run.validate_every"))


def test_all_own_samples_are_for_one_member(book: str):
    """It reads on as if it were alone, whatever its turn among the shards of the others."""

    async def trained(own: bool, shard: int, shards: int, apart: bool = False) -> torch.Tensor:
        trainer = Inside()
        await trainer.start(TrainerSpec("gpt-nano", 0, book, 2, 16, SGD(lr=0.1), own_data=own))
        await trainer.train(3, cursor=5, shard=shard, shards=shards, global_step=0, apart=apart)
        return trainer.read_x().clone()

    async def all_of() -> None:
        alone = await trained(False, 0, 1)
        assert torch.equal(await trained(True, 1, 3), alone)
        assert not torch.equal(await trained(False, 1, 3), alone)
        assert torch.equal(await trained(True, 1, 3, apart=True), await trained(False, 0, 1, apart=True))

    asyncio.run(all_of())
