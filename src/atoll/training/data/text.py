"""Text as tokens: Python's own standard library, plain files as bytes, or files of token numbers.

Files are split into training and validation by the hash of their name, so a file is never in both and all machines
split alike; a single file is split by blocks. The standard library's text differs between Python versions: its
blob, not its version, is the run's data.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor

from atoll.training.data.order import mix, places

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
VALIDATION_SHARE = 13 / 256  # share of files, by the first byte of the hash of their name
BLOCK = 4096  # bytes; a single file is split by blocks of this size
LOOKED_AT_BYTES = 2**16  # of a file, whether it is text
CONTROL_SHARE_MAX = 0.02  # random bytes have 0.09, a picture 0.05, UTF-16 0.5, text in 8-bit encodings none
NUMBERED = (".npy", ".bin")  # files of token numbers
TEXT_SUFFIXES = {".txt", ".md", ".py", ".rst", ".json", ".jsonl", ".csv", ".html", ".xml", ".tex", ".c", ".h"}


class TextDataset(NamedTuple):
    train: np.ndarray  # token numbers, one dimension: uint8, uint16 or int32, possibly mapped from a file
    validation: np.ndarray


def standard_library() -> TextDataset:
    """The sources of Python's standard library without its tests, ~12 MB: a corpus on every machine."""
    return _split_by_name(library_files())


def library_files() -> dict[str, Path]:
    """Name relative to the library's folder -> file, in the order of names."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), dict[str, Path]()
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_LIBRARY]  # packages are often larger than the library
        paths = [Path(folder, file) for file in files if file.endswith(".py")]
        found |= {path.relative_to(root).as_posix(): path for path in paths}
    return dict(sorted(found.items()))


def load_text(path: Path) -> TextDataset:
    """A folder of text files, one text file, or token numbers (`.npy`, or `.bin` of uint16)."""
    if path.is_dir():
        files = text_files(path)
        if enough_to_split(files):
            return _split_by_name(files)
        return split_by_block(_bytes_array(b"\0".join(file.read_bytes() for file in files.values())))
    if path.suffix in NUMBERED:
        return _mapped(path)
    data = _bytes_array(path.read_bytes())
    if _control_share(data[:LOOKED_AT_BYTES]) > CONTROL_SHARE_MAX:
        raise ValueError(f"{path} is no text: it has bytes that no text has. Token numbers are .npy or .bin files")
    return split_by_block(data)


def _control_share(data: np.ndarray) -> float:
    """Share of control characters other than white space, which hardly occur in text of any 8-bit encoding."""
    controls = (data < 32) & ((data < 8) | (data > 13)) & (data != 27)
    return float(controls.mean()) if len(data) else 0.0


def text_files(folder: Path) -> dict[str, Path]:
    """Name relative to the folder -> file, in the order of names. ValueError if there is none."""
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.suffix in TEXT_SUFFIXES}
    if not files:
        raise ValueError(f"no text files in {folder}; looked for {' '.join(sorted(TEXT_SUFFIXES))}")
    return dict(sorted(files.items()))


def enough_to_split(files: Mapping[str, Path]) -> bool:
    """Whether there are enough files to split by file; fewer are split by blocks."""
    return len(files) >= 2 * round(1 / VALIDATION_SHARE)


def held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] < VALIDATION_SHARE * 256


def joined(documents: Iterable[str]) -> np.ndarray:
    """The documents' bytes, separated by zero bytes."""
    return _bytes_array(b"\0".join(text.encode() for text in documents))


def text_samples(tokens: np.ndarray, positions_B: np.ndarray, seq_len: int, seed: int) -> tuple[Tensor, Tensor]:
    """(inputs (B, T), targets (B, T)) of the windows at these positions of the shuffled stream.

    Windows of one epoch do not overlap, except for one token that is the last target of one window and the first
    input of the next. Every epoch cuts them at another offset.
    """
    windows = text_windows(tokens, seq_len)
    epoch_B, index_B = places(positions_B, windows, seed)
    offsets = {epoch: mix(seed + epoch) % seq_len for epoch in set(epoch_B.tolist())}
    start_B = index_B * seq_len + np.array([offsets[epoch] for epoch in epoch_B.tolist()], dtype=np.int64)
    return windows_at(tokens, start_B, seq_len)


def text_windows(tokens: np.ndarray, seq_len: int) -> int:
    """Number of windows per epoch. ValueError if there is none."""
    windows = (len(tokens) - 1) // seq_len - 1  # one window is left over for the offset
    if windows < 1:
        raise ValueError(f"the training text has {len(tokens)} tokens, too few for windows of {seq_len}")
    return windows


def windows_at(tokens: np.ndarray, start_B: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    """(inputs, targets), each (B, T), of the windows beginning at `start_B`."""
    window = torch.from_numpy(tokens[start_B[:, None] + np.arange(seq_len + 1)].astype(np.int64))
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def _split_by_name(files: dict[str, Path]) -> TextDataset:
    """Join the files of each side with a zero byte, in the order of their names."""
    train, validation = [], []
    for name, path in files.items():
        (validation if held_out(name) else train).append(path.read_bytes())
    return TextDataset(_bytes_array(b"\0".join(train)), _bytes_array(b"\0".join(validation)))


def split_by_block(tokens: np.ndarray) -> TextDataset:
    """Hold out every 20th block of one row of tokens. ValueError if there are fewer than two blocks."""
    blocks = -(-len(tokens) // BLOCK)
    if blocks < 2:
        raise ValueError(f"{len(tokens)} bytes or tokens of text are too few; give at least {2 * BLOCK}")
    every = round(1 / VALIDATION_SHARE)
    aside = np.arange(len(tokens)) // BLOCK % every == min(every, blocks) - 1
    return TextDataset(tokens[~aside], tokens[aside])


def _mapped(path: Path) -> TextDataset:
    """Map the token numbers from the file; the last part, at least one in a hundred, is for validation."""
    try:
        tokens = open_memmap(path, mode="r") if path.suffix == ".npy" else np.memmap(path, np.uint16, "r")
    except ValueError as why:
        raise ValueError(f"{path} does not hold token numbers: {why}") from why
    if problem := text_problem(TextDataset(tokens, tokens)):
        raise ValueError(f"{path}: {problem}")
    cut = len(tokens) - max(len(tokens) // 100, min(len(tokens) // 10, 65536))
    return TextDataset(tokens[:cut], tokens[cut:])


def text_problem(data: TextDataset) -> str:
    """Why these arrays are not token numbers; empty if they are."""
    for tokens in data:
        if tokens.ndim != 1 or tokens.dtype.kind not in "ui":
            return f"{tokens.dtype} of shape {tokens.shape} instead of one row of integers"
    return ""


def _bytes_array(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8)
