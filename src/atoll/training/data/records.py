"""Text records: JSON lines, Parquet, and data sets saved by Hugging Face's `datasets`.

    corpus.jsonl        corpus/train.jsonl, corpus/validation.jsonl        data/train-00000-of-00002.parquet …
    saved/data-00000-of-00001.arrow        saved/train/…arrow, saved/test/…arrow

One column of every record is a text; other columns are ignored. A file or folder with a name that begins with
`train`, `val`, `validation` or `test` belongs to that side. Without such names about one text in twenty is held
out, by the hash of its text, so all machines split alike and a text is never on both sides. JSON lines need no
library; Parquet and Arrow need pyarrow.
Invariants:
- Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from atoll.training.data.text import TEXT_SUFFIXES, VALIDATION_SHARE

COLUMN = "text"
BINARY = (".parquet", ".arrow")
BESIDE = {".md", ".json"}  # files that a folder of JSON lines may also hold: a card, a description
SIDE = re.compile(r"(train|val|validation|test)(?![a-z0-9])")
HELD_OUT = ("val", "validation", "test")  # the first of these is used


class DocumentDataset(NamedTuple):
    """Whole documents, in the same order on every machine with the same files."""

    train: list[str]
    validation: list[str]


def has_records(path: Path) -> bool:
    """Whether `path` is a file of records, or a folder with no other training data."""
    if not path.is_dir():
        return path.suffix in (".jsonl", *BINARY)
    suffixes = {found.suffix for found in path.rglob("*")}
    return not suffixes.isdisjoint(BINARY) or (
        ".jsonl" in suffixes and not (suffixes & (TEXT_SUFFIXES - BESIDE - {".jsonl"}))
    )


def load_records(path: Path, column: str = COLUMN) -> DocumentDataset:
    """ValueError if a record lacks the column, nothing is left for one side, or pyarrow is missing."""
    files = sorted(f for f in path.rglob("*") if f.suffix in (".jsonl", *BINARY)) if path.is_dir() else [path]
    sides = {file: _side(file.relative_to(path) if path.is_dir() else file) for file in files}
    held_out = next((side for side in HELD_OUT if side in sides.values()), "")
    if held_out and "train" in sides.values():
        chosen = {side: [f for f in files if sides[f] == side] for side in ("train", held_out)}
        texts = DocumentDataset(*(_all(chosen[side], column) for side in ("train", held_out)))
    else:
        texts = split(_all(files, column))
    for side, found in texts._asdict().items():
        if not found:
            raise ValueError(f"{path} has no text left for {side}; give more records, or files for both sides")
    return texts


def split(texts: Iterable[str]) -> DocumentDataset:
    sides = DocumentDataset([], [])
    for text in texts:
        first = hashlib.sha256(text.encode()).digest()[0]
        (sides.validation if first < VALIDATION_SHARE * 256 else sides.train).append(text)
    return sides


def _side(file: Path) -> str:
    """The side named by the beginning of its own name or of one of its folders; empty if there is none."""
    return next((found[1] for found in map(SIDE.match, file.parts) if found), "")


def _all(files: list[Path], column: str) -> list[str]:
    return [text for file in files for text in _texts(file, column) if text]


def _texts(file: Path, column: str) -> Iterator[str]:
    if file.suffix == ".jsonl":
        yield from _lines(file, column)
        return
    for names, values in _batches(file, column):
        if values is None:
            raise _lacks(file, column, names)
        for value in values:
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{file}: column {column!r} holds {type(value).__name__}, not text")
            yield value or ""


def _lines(file: Path, column: str) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = msgspec.json.decode(line)
            except (msgspec.DecodeError, RecursionError) as why:
                raise ValueError(f"{file}, line {number} is not JSON: {why}") from None
            value = record.get(column, 0) if isinstance(record, dict) else 0
            if value is not None and not isinstance(value, str):
                raise _lacks(f"{file}, line {number}", column, list(record) if isinstance(record, dict) else [])
            yield value or ""


def _batches(file: Path, column: str) -> Iterator[tuple[list[str], list[Any] | None]]:
    """(column names, values of `column`, or None if it is missing), a few thousand records at a time."""
    arrow = _pyarrow(file)
    try:
        if file.suffix == ".parquet":
            source = arrow.parquet.ParquetFile(file)
            names = source.schema_arrow.names
            parts = source.iter_batches(columns=[column]) if column in names else []
        else:
            mapped = arrow.memory_map(str(file))
            whole = mapped.read(6) == b"ARROW1"  # ARROW1: a file; `datasets` saves streams
            mapped.seek(0)
            source = arrow.ipc.open_file(mapped) if whole else arrow.ipc.open_stream(mapped)
            names = source.schema.names
            parts = (source.get_batch(i) for i in range(source.num_record_batches)) if whole else source
            parts = parts if column in names else []
        for part in parts:
            yield names, part.column(names.index(column) if file.suffix == ".arrow" else 0).to_pylist()
        if column not in names:
            yield names, None
    except arrow.ArrowException as why:
        raise ValueError(f"{file} cannot be read: {why}") from None


def _pyarrow(file: Path) -> Any:
    try:
        import pyarrow.ipc  # pyright: ignore[reportMissingImports]  # optional, like the next one
        import pyarrow.parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            f"{file.name} needs pyarrow, which is not installed: pip install pyarrow; or save it as JSON lines"
        ) from None
    return pyarrow


def _lacks(where: object, column: str, names: list[str]) -> ValueError:
    text = f"{where} has no text {column!r}"
    return ValueError(f"{text}; it has {', '.join(names[:8])}: write data.column = one of them" if names else text)
