"""The CIFAR-10 example on made-up images in that format: it learns though a member is killed; damage is refused."""

from __future__ import annotations

import gzip
import re
import runpy
import sys
import tarfile
from collections.abc import Iterator
from contextlib import closing
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import PATIENCE_S
from warm import WarmPeer, code_of_script

from atoll.cli.stored_vertices import read_vertex
from atoll.cli.verify import kept_in
from atoll.wire.codec import statement_in
from atoll.wire.messages.statements import Commitment

pytestmark = [pytest.mark.net, pytest.mark.timeout(150)]
EXAMPLE, FORKED = (
    Path(__file__).parents[up] / name for up, name in ((2, "examples/cifar.py"), (1, "integrations"))
)
BATCHES = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]
PATTERNS = np.random.default_rng(0).integers(48, 208, (10, 3, 2, 2))  # colored fields, one set for each class
SMALL = [*("--width", "4", "--batch", "16", "--inner-steps", "20", "--lr", "4e-3", "--held-out", "100")]


def images(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels, and pixels as the archives have them: (N, 3072), first all red ones. Alike when they are flipped."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 10, count).astype(np.uint8)
    fields = np.concatenate((PATTERNS, PATTERNS[..., ::-1]), 3).repeat(16, 2).repeat(8, 3)
    pixels = fields[labels] + draw.normal(0, 20, (count, 3, 32, 32))
    return labels, np.clip(pixels, 0, 255).astype(np.uint8).reshape(count, -1)


def binary(labels: np.ndarray, pixels: np.ndarray) -> bytes:
    return np.column_stack((labels, pixels)).tobytes()


def python(labels: np.ndarray, pixels: np.ndarray) -> bytes:
    """A pickle of Python 2, opcode by opcode, as the published files are."""

    def text(word: bytes) -> bytes:
        return b"U" + bytes([len(word)]) + word

    u1 = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xff"
    u1 += b"J\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    shape = b"M" + len(labels).to_bytes(2, "little") + b"M\x00\x0c\x86"
    data = empty + b"(K\x01" + shape + u1 + b"\x89T" + pixels.size.to_bytes(4, "little") + pixels.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    parts = (text(b"batch_label"), text(b"batch 1 of 5"), text(b"data"), data, text(b"labels"), numbers)
    return b"\x80\x02}(" + b"".join(parts) + b"u."


def archive(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as into:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches/{name}")
            entry.size = len(data)
            into.addfile(entry, BytesIO(data))
    return path


def files(count: int, ending: str = ".bin") -> dict[str, bytes]:
    write = binary if ending else python
    return {f"{name}{ending}": write(*images(count, seed)) for seed, name in enumerate(BATCHES)}


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


def accuracies(lines: list[str]) -> list[float]:
    return [float(found[1]) for line in lines if (found := re.search(r"accuracy (\d\.\d+)", line))]


def member(tmp_path: Path, archive: Path, **env: str) -> WarmPeer:
    """The example with its peer, forked from an interpreter that has imported torch."""
    words = [str(EXAMPLE), str(archive), *SMALL, "--rounds", "6"]
    prepared = (
        f"import sys; sys.path[:0] = [{str(FORKED)!r}]; import forked_peer; forked_peer.prepare({env!r}, 0)\n"
    )
    return WarmPeer([], lies=prepared + code_of_script(tmp_path, *words))


def counted_samples(folder: Path) -> Iterator[tuple[int, int]]:
    """(shard, number) of each sample in a counted update."""
    with kept_in(folder) as kept:
        bodies = [read_vertex(kept, folder, round)[1] for round in kept.rounds if round >= 0]
    for commit in (statement_in(signed) for body in bodies for signed in body.commits):
        assert isinstance(commit, Commitment) and commit.data is not None
        for read in commit.data.ranges if commit.weight else ():
            yield from ((read.shard, at) for at in range(read.first, read.until))


def test_members_learn_though_one_is_killed_and_every_image_counts_once_per_pass(tmp_path: Path):
    """One member reads the binary archive, the other the pickled one, whose images are the same."""
    one = archive(tmp_path / "one.tar.gz", files(100))
    two = archive(tmp_path / "two.tar.gz", files(100, ""))
    with closing(member(tmp_path, one, ATOLL_DIR="one", ATOLL_START_PEERS="2")) as founder:
        ticket = next(found[0] for line in founder.stdout if (found := re.search(r"ATOLL1:[^')]+", line)))
        with closing(member(tmp_path, two, ATOLL_DIR="two", ATOLL_TICKET=ticket)) as killed:
            lines = list[str]()
            for line in founder.stdout:
                lines.append(line)
                if re.match("round 1: .* 2 members", line):
                    killed.kill()
            assert founder.wait(PATIENCE_S) == 0, founder.stderr.read()
    assert accuracies(lines)[-1] > 0.3 and "6 rounds with 1 members" in lines[-1], lines
    samples = [*counted_samples(tmp_path / "one")]
    assert len(samples) == len(set(samples)) >= 6 * 16  # one step of a round at least


def test_both_archives_are_read_alike(tmp_path: Path, example: dict[str, Any]):
    found = [
        example["read_archive"](archive(tmp_path / "one.tar.gz", files(3, ending)))[part].tensors
        for part in (0, 1)
        for ending in (".bin", "")
    ]
    for binary_ones, pickled in (found[:2], found[2:]):
        assert all(torch.equal(*pair) for pair in zip(binary_ones, pickled, strict=True))
    labels, pixels = images(3, 5)
    held_out, right = found[2]
    assert held_out.shape == (3, 3, 32, 32) and right.tolist() == labels.tolist()
    assert held_out[2, 1, 4].tolist() == pixels[2, 1024 + 4 * 32 : 1024 + 5 * 32].tolist()


def test_an_image_is_moved_and_flipped_and_nothing_else(example: dict[str, Any]):
    """Each of many copies of one image is a crop of it or of its mirror image, with a black border of 4 pixels."""
    torch.manual_seed(0)
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8)
    bordered = [torch.nn.functional.pad(one, (4, 4, 4, 4)) for one in (image, image.flip(2))]
    crops = {
        one[:, y : y + 32, x : x + 32].numpy().tobytes() for one in bordered for y in range(9) for x in range(9)
    }
    found = {one.numpy().tobytes() for one in example["augmented"](image.repeat(400, 1, 1, 1))}
    assert found <= crops and len(found) > 100


def broken(name: str, tmp_path: Path) -> Path:
    """An archive with this damage."""
    whole, path = files(2), tmp_path / "broken.tar.gz"
    match name:
        case "no batch":
            del whole["data_batch_3.bin"]
        case "cut row":
            whole["test_batch.bin"] = whole["test_batch.bin"][:-1]
        case "other class":
            whole["test_batch.bin"] = b"\x0a" + whole["test_batch.bin"][1:]
        case "large":
            whole["test_batch.bin"] = bytes(40_000_000)
        case "hostile pickle":
            whole["test_batch"] = b"cos\nsystem\n(S'touch run-by-a-pickle'\ntR."
        case "broken pickle":
            whole["test_batch"] = files(2, "")["test_batch"][:-9]
    archive(path, whole)
    match name:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-5000])
        case "checksum":
            data = gzip.decompress(path.read_bytes())
            packed = bytearray(gzip.compress(data, 0))
            packed[len(packed) // 2] ^= 1
            path.write_bytes(packed)
        case "no archive":
            path.write_bytes(b"<html>404</html>")
        case "another archive":
            archive(path, {"README": b"hello"})
    return path


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ("no batch", "no images of data_batch_3"),
        ("cut row", "test_batch.bin is not a batch of images"),
        ("other class", "an image of class 10"),
        ("large", "40,000,000 bytes, more than 10,000 images"),
        ("hostile pickle", "it asks for os.system"),
        ("broken pickle", "test_batch is not a batch of images"),
        ("truncated", "cannot be read as an archive"),
        ("checksum", "CRC check failed"),
        ("no archive", "Not a gzipped file"),
        ("another archive", "no images of data_batch_1, data_batch_2"),
        ("", "download https://"),
    ],
)
def test_a_damaged_archive_is_refused_in_words(
    damage: str,
    told: str,
    tmp_path: Path,
    example: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Before anything starts, with exit status 2, and with the address of the archive; nothing in it is run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["cifar.py", *([str(broken(damage, tmp_path))] if damage else [])])
    with pytest.raises(SystemExit) as ended:
        example["main"]()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and told in said and "cs.toronto.edu" in said
    assert not (tmp_path / "run-by-a-pickle").exists()
