"""Text as a tokenizer's tokens, and texts out of records; the tokenizer is trained here, nothing is downloaded."""

import json
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from msgspec import UNSET
from PIL import Image

from atoll.base.errors import UsageError
from atoll.peer.settings import RunSettings
from atoll.runtime.training_spec import founding_blobs, parse_training_spec, start_of_built_in
from atoll.training.data import data_blob, data_from_blob, load_data
from atoll.training.data.images import ImageDataset
from atoll.training.data.records import load_records
from atoll.training.data.text import TextDataset
from atoll.training.data.tokens import end_of, pieces, read_tokenizer, vocabulary_of
from atoll.training.exchange.layout import layout_of
from atoll.training.export import ModelCard, hugging_face_files
from atoll.training.models import build_model, tokens_misfit
from atoll.training.recipe.methods import diloco
from atoll.training.recipe.state import initial_state, state_hash

TEXTS = [f"Island {i} lies {i * i} miles off the reef;\nits lagoon is {i % 7} fathoms deep." for i in range(300)]
END = "<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs learned from TEXTS, and a token that ends a text."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS, trainer)
    made.enable_truncation(8)  # for sentences; a stream has none
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"id": i, "text": text}) for i, text in enumerate(TEXTS)) + "\n")
    return path


def words_of(tokens: np.ndarray, tokenizer: Path) -> list[str]:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tokenizer)).decode(tokens.tolist(), skip_special_tokens=False).split(END)


def test_records_become_tokens_and_come_back_as_they_were(tokenizer: Path, lines: Path):
    """Every text ends with the token for it, whole, on one side; about one in twenty is held out."""
    data = load_data(str(lines), read_tokenizer(tokenizer))
    assert isinstance(data, TextDataset) and data.train.dtype == np.uint16
    train, validation = (words_of(side, tokenizer) for side in data)
    assert train.pop() == validation.pop() == "" and sorted(train + validation) == sorted(TEXTS)
    assert 5 <= len(validation) <= 30
    again = data_from_blob(data_blob(data))
    assert all(np.array_equal(a, b) for a, b in zip(data, again, strict=True))


def test_records_without_a_tokenizer_are_bytes_of_their_texts(lines: Path):
    data = load_data(str(lines))
    assert isinstance(data, TextDataset)
    assert sorted(b"\0".join(side.tobytes() for side in data).decode().split("\0")) == sorted(TEXTS)


def test_one_long_text_is_cut_at_line_ends_and_split_by_blocks(tokenizer: Path, tmp_path: Path):
    """The tokens are those of the pieces, and only the last one ends the text."""
    text = "\n".join(TEXTS * 20)
    assert "".join(pieces(text)) == text and all(p.endswith("\n") for p in pieces(text)[:-1])
    assert [len(p) for p in pieces("x" * 200_000)] == [65536, 65536, 65536, 3392]
    (path := tmp_path / "book.txt").write_text(text)
    data = load_data(str(path), read_tokenizer(tokenizer))
    assert isinstance(data, TextDataset)
    end = end_of(tokenizer.read_bytes())
    assert end is not None and sum(int((side == end.number).sum()) for side in data) == 1


def test_files_say_which_side_they_are_for(tmp_path: Path):
    """Two for training, one of each other side; what only looks like a side's name is for none, so left out."""
    files = {"train-0": TEXTS[:5], "train-1": TEXTS[5:9], "validation-0": TEXTS[9:11], "test": "x", "tests": "y"}
    for name, texts in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert load_records(tmp_path) == (TEXTS[:9], TEXTS[9:11])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"body": "a"}', r"line 2 has no text 'text'; it has body: write data.column"),
        ('{"text": 3}', "line 2 has no text 'text'"),
        ("[1]", "line 2 has no text 'text'"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_a_record_that_is_none_is_named(tmp_path: Path, line: str, words: str):
    (path := tmp_path / "bad.jsonl").write_text('{"text": "good"}\n' + line)
    with pytest.raises(ValueError, match=words):
        load_data(str(path))


def test_pictures_with_a_list_beside_them_are_pictures(tmp_path: Path):
    """A folder per class and `metadata.jsonl`, as picture sets come: no records, and nothing for a tokenizer."""
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(30):
            Image.new("L", (8, 8), number).save(tmp_path / name / f"{number}.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "cat/1.png"}')
    assert isinstance(load_data(str(tmp_path)), ImageDataset)
    with pytest.raises(ValueError, match="is not text, so a tokenizer"):
        load_data(str(tmp_path), b"{}")


def test_records_too_few_for_the_model_are_refused_before_there_is_a_run(lines: Path):
    """300 lines leave a dozen for validation, less than one window of a model that reads 2,048."""
    with pytest.raises(ValueError, match="the validation text is shorter than one window of 2049"):
        start_of_built_in(diloco("gpt:d=32,l=1,h=2,t=2048", seq_len=2048), str(lines))


def test_another_column_and_gaps(tmp_path: Path):
    """Texts of another name; null and empty ones are left out."""
    values = [*TEXTS, None, ""]
    (path := tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"body": v}) for v in values))
    assert sorted(chain(*load_records(path, "body"))) == sorted(TEXTS)


def test_parquet_and_saved_data_sets_hold_the_same_texts(lines: Path, tmp_path: Path):
    """Only where pyarrow is installed: Parquet, an Arrow stream (`datasets` saves those), an Arrow file."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"id": list(range(len(TEXTS))), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for name, new in (("saved", pa.ipc.new_stream), ("whole", pa.ipc.new_file)):
        (tmp_path / name).mkdir()
        with new(str(tmp_path / name / "data-00000-of-00001.arrow"), table.schema) as out:
            out.write_table(table, 100)
        (tmp_path / name / "dataset_info.json").write_text("{}")
    expected = load_records(lines)
    for path in ("a.parquet", "saved", "whole"):
        assert load_records(tmp_path / path) == expected
    with pytest.raises(ValueError, match="has no text 'body'; it has id, text"):
        load_records(tmp_path / "a.parquet", "body")
    with pytest.raises(ValueError, match="holds int, not text"):
        load_records(tmp_path / "a.parquet", "id")
    (tmp_path / "b.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read"):
        load_records(tmp_path / "b.parquet")


def test_what_is_missing_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for name in ("a.parquet", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"pip install pyarrow"):
        load_data(str(tmp_path / "a.parquet"))
    with pytest.raises(ValueError, match=r"pip install tokenizers"):
        read_tokenizer(tmp_path / "tokenizer.json")


def test_what_is_no_tokenizer_or_no_text_is_refused(tokenizer: Path, tmp_path: Path):
    """Also what the library panics over, which is no Exception, and one that knows no token."""
    bad, pairs = tmp_path / "tokenizer.json", {"vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}
    panics = {"model": {"type": "BPE", "continuing_subword_prefix": "longer than b", **pairs}}
    for told in ({"model": 3}, panics):
        bad.write_text(json.dumps(told))
        with pytest.raises(ValueError, match=r"is not a tokenizer\.json"):
            read_tokenizer(tmp_path)
    bad.write_text(json.dumps({"model": {"type": "BPE", "vocab": {}, "merges": []}}))
    with pytest.raises(ValueError, match="has no tokens"):
        read_tokenizer(tmp_path)
    bad.unlink()
    with pytest.raises(ValueError, match="no tokenizer at"):
        read_tokenizer(tmp_path)
    np.save(tmp_path / "numbers.npy", np.arange(9, dtype=np.uint16))
    with pytest.raises(ValueError, match="is not text, so a tokenizer cannot read it"):
        load_data(str(tmp_path / "numbers.npy"), read_tokenizer(tokenizer))


def test_a_model_that_knows_too_few_tokens_is_told_its_right_name():
    assert tokens_misfit("gpt-nano", 256) is None
    what, fix = tokens_misfit("gpt-nano", 300) or ("", "")
    assert what == "gpt-nano has 256 tokens, the tokenizer has 300"
    assert fix == 'write model.name = "gpt:d=32,l=1,h=2,t=32,v=300"'
    assert tokens_misfit("gpt:d=32,l=1,h=2,t=32,v=300", 300) is None
    tied = tokens_misfit("llama-tiny", 300) or ("", "")
    assert "tie=1" in tied[1] and tokens_misfit(tied[1].split('"')[1], 300) is None
    assert "images" in (tokens_misfit("cnn-mnist", 10) or ("", ""))[0]


def test_genesis_names_the_tokenizer_and_an_export_holds_it(tokenizer: Path, lines: Path):
    """By the digest of its bytes; without one nothing of it is in what genesis fixes."""
    model, data = "llama:d=32,l=1,h=2,t=16,v=300", read_tokenizer(tokenizer)
    assert vocabulary_of(data) == 300
    with pytest.raises(UsageError, match="E-RUN-13"):
        start_of_built_in(diloco("gpt-nano"), str(lines), tokenizer=data)
    founded = founding_blobs(start_of_built_in(diloco(model), str(lines), tokenizer=data), RunSettings())
    learning = parse_training_spec(founded.settings)
    assert learning.tokenizer == state_hash(data) and learning.beside == [state_hash(data)]
    assert founded.tokenizer == data
    plain = founding_blobs(start_of_built_in(diloco("gpt-nano"), str(lines)), RunSettings())
    assert parse_training_spec(plain.settings).tokenizer is UNSET and b"tokenizer" not in plain.settings.learning

    story = ModelCard(
        "run", 1, "aa", "bb", "cc", model, "x", 5, ("int8", "int8"), 1, tokenizer=state_hash(data).hex()
    )
    built = build_model(model, 0)
    pieces = hugging_face_files(initial_state(built), layout_of(built), story, data)
    files = {file: b"".join(content) for file, content in pieces.items()}
    assert files["tokenizer.json"] == data
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == END
    assert json.loads(files["config.json"])["eos_token_id"] == 0
    card = files["README.md"].decode()
    assert "AutoTokenizer" in card and "Tokens are bytes" not in card
    absent = hugging_face_files(initial_state(built), layout_of(built), story)
    assert "was not in the folder" in b"".join(absent["README.md"]).decode() and "tokenizer.json" not in absent


def test_a_tokenizer_of_256_tokens_is_not_taken_for_bytes(lines: Path):
    """The card of a model with v=256 says `bytes` only where tokens are."""
    built = build_model("gpt-nano", 0)
    story = ModelCard("run", 1, "aa", "bb", "cc", "gpt-nano", "x", 5, ("int8", "int8"), 1, tokenizer="dd")
    card = hugging_face_files(initial_state(built), layout_of(built), story, b'{"added_tokens": 1}')["README.md"]
    assert (
        b"Tokens are bytes" not in b"".join(card) and end_of(b'{"added_tokens": 1}') is None and end_of(b"") is None
    )
