"""Tokenization with a `tokenizer.json` of Hugging Face's library `tokenizers`.

Only the founder of a run tokenizes: token numbers travel, so members agree independently of installed versions. The
tokenizer's own bytes are named in genesis and travel as well, for exports. If the tokenizer has an end-of-text
token, it follows every document. Padding, truncation and sentence-framing tokens are left out: windows of the
stream are cut anywhere.
Invariants:
- Nothing is downloaded, and no code is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from atoll.training.data.text import TextDataset, split_by_block

ENDS = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>", "[SEP]")
TOKENIZER_BYTES_MAX = 64 * 2**20  # the largest published ones have 30 MB
DOCUMENTS = 256  # tokenized at a time
PIECE = 2**16  # characters; a long text is cut at line ends, so that it need not be tokenized in one piece


class EndToken(NamedTuple):
    """The token that ends a text."""

    text: str
    number: int


def read_tokenizer(path: Path) -> bytes:
    """The bytes of a `tokenizer.json`, or of the one in a folder. ValueError if they are none."""
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        raise ValueError(f"no tokenizer at {path}")
    data = path.read_bytes()
    if len(data) > TOKENIZER_BYTES_MAX:
        raise ValueError(f"{path} has {len(data)} bytes; a tokenizer has at most {TOKENIZER_BYTES_MAX}")
    library = _library()
    try:
        known = library.Tokenizer.from_buffer(data).get_vocab_size()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as why:  # the library raises these bare, and a Rust panic is no Exception
        raise ValueError(f"{path} is not a tokenizer.json: {why}") from None
    if not known:
        raise ValueError(f"{path} has no tokens")
    return data


def vocabulary_of(tokenizer: bytes) -> int:
    """One more than the largest token number."""
    return 1 + max(_opened(tokenizer).get_vocab(with_added_tokens=True).values())


def end_of(tokenizer: bytes) -> EndToken | None:
    """The end-of-text token, read without the library, which exports do not need. None if the bytes name none."""
    try:
        added = msgspec.json.decode(tokenizer)["added_tokens"]
        found = {str(one["content"]): int(one["id"]) for one in added if one["special"]}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None
    return next((EndToken(text, found[text]) for text in ENDS if text in found), None)


def tokenize(train: Iterable[str], validation: Iterable[str] | None, tokenizer: bytes) -> TextDataset:
    """Both sides as one row of numbers each; without a validation side it is split off the training side, by
    blocks.
    """
    opened, end = _opened(tokenizer), end_of(tokenizer)
    opened.no_truncation()
    opened.no_padding()
    size = vocabulary_of(tokenizer)
    dtype = np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.int32

    def row(texts: Iterable[str]) -> np.ndarray:
        return np.concatenate([np.zeros(0, dtype), *_numbers(texts, opened, end, dtype)])

    if validation is None:
        return split_by_block(row(train))
    return TextDataset(row(train), row(validation))


def text_to_numbers(tokenizer: bytes, text: str) -> list[int]:
    return list(_opened(tokenizer).encode(text, add_special_tokens=False).ids)


def numbers_to_text(tokenizer: bytes, numbers: Sequence[int]) -> str:
    return str(_opened(tokenizer).decode(list(numbers), skip_special_tokens=False))


def pieces(text: str) -> list[str]:
    """A long text in pieces of at most PIECE characters, cut at line ends if lines are shorter."""
    at, found = 0, list[str]()
    while at < len(text):
        line = text.rfind("\n", at, at + PIECE) + 1
        until = line if line > at and at + PIECE < len(text) else at + PIECE
        found.append(text[at:until])
        at = until
    return found


def _numbers(texts: Iterable[str], opened: Any, end: EndToken | None, dtype: Any) -> Iterator[np.ndarray]:
    """One array per piece; the end-of-text token follows a text's last piece."""
    last = [] if end is None else [end.number]
    cut = ((piece, n + 1 == len(all_of)) for all_of in map(pieces, texts) for n, piece in enumerate(all_of))
    while batch := list(islice(cut, DOCUMENTS)):
        found = opened.encode_batch([piece for piece, _ in batch], add_special_tokens=False)
        for one, (_, ends) in zip(found, batch, strict=True):
            yield np.array(one.ids + (last if ends else []), dtype=dtype)


def _opened(tokenizer: bytes) -> Any:
    return _library().Tokenizer.from_buffer(tokenizer)


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "data.tokenizer needs the library tokenizers, which is not installed: pip install tokenizers"
        ) from None
    return tokenizers
