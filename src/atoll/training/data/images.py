"""Labeled images, gray or color, from an npz file (MNIST, CIFAR) or a folder of idx files.

Not responsible for: images in folders (`pictures`).
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import NamedTuple
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor

SIDE_MIN, SIDE_MAX = 8, 512  # pixels; larger images in a blob are a mistake or an attack on memory
CLASSES_MAX = 256  # labels are bytes
IDX_NAMES = {
    "train_images": "train-images*idx3*",
    "train_labels": "train-labels*idx1*",
    "validation_images": "t10k-images*idx3*",
    "validation_labels": "t10k-labels*idx1*",
}
NPZ_NAMES = {
    "train_images": "x_train",
    "train_labels": "y_train",
    "validation_images": "x_test",
    "validation_labels": "y_test",
}


class ImageDataset(NamedTuple):
    train_images: np.ndarray  # uint8 (N, H, W), or (N, H, W, 3) in color
    train_labels: np.ndarray  # uint8 (N,)
    validation_images: np.ndarray
    validation_labels: np.ndarray


def load_images(path: Path) -> ImageDataset:
    """An npz file with x_train, y_train, x_test, y_test, or a folder with the four idx files (.gz too)."""
    if path.suffix == ".npz":
        if not is_zipfile(path):
            raise ValueError(f"{path} is not an npz file")
        with np.load(path, allow_pickle=False) as arrays:
            missing = set(NPZ_NAMES.values()) - set(arrays.files)
            if missing:
                raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
            found = {field: arrays[name] for field, name in NPZ_NAMES.items()}
        for field in ("train_labels", "validation_labels"):
            found[field] = found[field].reshape(-1)  # CIFAR has them in a column
    else:
        folder = path if path.is_dir() else path.parent
        found = {field: _idx(folder, pattern) for field, pattern in IDX_NAMES.items()}
    data = ImageDataset(**{field: np.ascontiguousarray(array, dtype=np.uint8) for field, array in found.items()})
    if problem := images_problem(data):
        raise ValueError(f"{path}: {problem}")
    return data


def images_problem(data: ImageDataset) -> str:
    """Why these arrays are not labeled images; empty if they are."""
    for images, labels in (data[:2], data[2:]):
        sides, colors = images.shape[1:3], images.shape[3:]
        drawn = len(sides) == 2 and all(SIDE_MIN <= side <= SIDE_MAX for side in sides) and colors in ((), (3,))
        if not drawn or labels.shape != images.shape[:1] or len(labels) == 0:
            return f"images of shape {images.shape} with labels of shape {labels.shape}"
        if images.dtype != np.uint8 or labels.dtype != np.uint8:
            return f"images are {images.dtype} and labels {labels.dtype}; both must be bytes"
    if data.train_images.shape[1:] != data.validation_images.shape[1:]:
        return f"training images of shape {data.train_images.shape}, validation {data.validation_images.shape}"
    return ""


def image_samples(images: np.ndarray, labels: np.ndarray, index_B: np.ndarray) -> tuple[Tensor, Tensor]:
    """(images in 0…1 (B, H, W) or (B, H, W, 3), labels (B,))."""
    pixels = torch.from_numpy(images[index_B]).to(torch.float32) / 255
    return pixels, torch.from_numpy(labels[index_B].astype(np.int64))


def _idx(folder: Path, pattern: str) -> np.ndarray:
    """One idx file (LeCun's format): two zero bytes, type 8 for bytes, the number of dimensions, their sizes."""
    paths = sorted(folder.glob(pattern))
    if not paths:
        raise ValueError(f"{folder} has no file like {pattern}")
    data = gzip.decompress(paths[0].read_bytes()) if paths[0].suffix == ".gz" else paths[0].read_bytes()
    if data[:3] != b"\0\0\x08" or len(data) < 4 + 4 * data[3]:
        raise ValueError(f"{paths[0]} is not an idx file of bytes")
    shape = np.frombuffer(data, ">u4", data[3], 4).tolist()
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
