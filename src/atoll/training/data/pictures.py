"""Image folders, one subfolder per class, as arrays of one size.

    pets/cat/1.png, pets/dog/7.jpg …        or        pets/train/cat/…, pets/val/cat/… (also validation, test)

Classes are numbered in the order of their names. Without a validation folder about one image in twenty is held out,
by the hash of its name, so all machines split alike. Images of one size stay unchanged; of several sizes, each is
cut to its middle square and scaled to 32 x 32. All gray images stay gray, otherwise all become RGB. Needs Pillow.
JPEG decoders and scaling differ between versions: the run's data is the blob, never the folder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atoll.training.data.images import CLASSES_MAX, ImageDataset, images_problem
from atoll.training.data.text import TEXT_SUFFIXES, VALIDATION_SHARE

SUFFIXES = {".png", ".jpg", ".jpeg"}
SCALED = 32  # pixels a side
GRAY = {"1", "L", "LA"}  # Pillow's modes
HELD_OUT = ("val", "validation", "test")

Files = Mapping[str, Sequence[Path]]  # class -> its images


def has_images(folder: Path) -> bool:
    """Whether the subfolders hold more images than texts."""
    suffixes = [path.suffix.lower() for pattern in ("*/*", "*/*/*") for path in folder.glob(pattern)]
    return sum(s in SUFFIXES for s in suffixes) > sum(s in TEXT_SUFFIXES for s in suffixes)


def load_pictures(folder: Path) -> ImageDataset:
    """ValueError if there are fewer than two classes, or Pillow is missing or cannot read one of the files."""
    opened = _pillow()
    held_out = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    if held_out is not None and (folder / "train").is_dir():
        train, validation = _files(folder / "train"), _files(held_out)
        if unknown := set(validation) - set(train):
            raise ValueError(f"{held_out} has classes that {folder / 'train'} lacks: {', '.join(sorted(unknown))}")
    else:
        train, validation = _split(_files(folder))
    classes = sorted(train)
    if not 2 <= len(classes) <= CLASSES_MAX:
        raise ValueError(f"{folder} has {len(classes)} classes; put images into 2 to {CLASSES_MAX} subfolders")
    arrays, looked = (
        [],
        [_look(opened, path) for files in (train, validation) for p in files.values() for path in p],
    )
    gray = all(mode in GRAY for mode, _ in looked)
    scaled = len({size for _, size in looked}) > 1
    for files, purpose in ((train, "training"), (validation, "validation")):
        labeled = [(path, number) for number, name in enumerate(classes) for path in files.get(name, ())]
        if not labeled:
            raise ValueError(f"{folder}: no image is left for {purpose}; add images")
        arrays.append(np.stack([_array(opened, path, gray, scaled) for path, _ in labeled]))
        arrays.append(np.array([number for _, number in labeled], np.uint8))
    data = ImageDataset(*arrays)
    if problem := images_problem(data):
        raise ValueError(f"{folder}: {problem}")
    return data


def _files(folder: Path) -> Files:
    found = {
        inside.name: sorted(path for path in inside.iterdir() if path.suffix.lower() in SUFFIXES)
        for inside in folder.iterdir()
        if inside.is_dir()
    }
    return {name: paths for name, paths in found.items() if paths}


def _split(files: Files) -> tuple[Files, Files]:
    """Split by the hash of class and name, with at least one image per class on either side if there are two."""
    train, validation = {}, {}
    for name, paths in files.items():
        drawn = sorted((hashlib.sha256(f"{name}/{path.name}".encode()).digest(), path) for path in paths)
        count = sum(number[0] < VALIDATION_SHARE * 256 for number, _ in drawn)
        count = min(max(count, 1), len(drawn) - 1)
        validation[name], train[name] = (sorted(p for _, p in part) for part in (drawn[:count], drawn[count:]))
    return train, validation


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images need Pillow, which is not installed: pip install pillow") from None
    return Image


@contextmanager
def _open(opened: Any, path: Path) -> Iterator[Any]:
    """One image, decoded when its pixels are used. ValueError if that fails."""
    try:
        with opened.open(path, formats=("PNG", "JPEG")) as picture:
            yield picture
    except (OSError, SyntaxError, ValueError, opened.DecompressionBombError) as why:
        raise ValueError(f"{path} cannot be read as an image: {why}") from None


def _look(opened: Any, path: Path) -> tuple[str, tuple[int, int]]:
    """(mode, size), from the header of the file: photographs are large, and only one at a time is decoded."""
    with _open(opened, path) as picture:
        return picture.mode, picture.size


def _array(opened: Any, path: Path, gray: bool, scaled: bool) -> np.ndarray:
    with _open(opened, path) as picture:
        pixels = picture.convert("L" if gray else "RGB")
        if scaled:
            width, height = pixels.size
            side = min(width, height)
            left, top = (width - side) // 2, (height - side) // 2
            pixels = pixels.resize((SCALED, SCALED), box=(left, top, left + side, top + side), reducing_gap=3.0)
        return np.asarray(pixels, np.uint8)
