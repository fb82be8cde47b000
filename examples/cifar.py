"""ResNet-18 on CIFAR-10 in a plain PyTorch loop, together with others: crops, flips, every image once per pass.

    python examples/cifar.py cifar-10-binary.tar.gz --local 4        four peers on this computer
    python examples/cifar.py cifar-10-binary.tar.gz                  founds a run and prints the ticket for others
    ATOLL_TICKET=ATOLL1:… ATOLL_DIR=two python examples/cifar.py cifar-10-binary.tar.gz      in another terminal

Without a path it says where the archive is; cifar-10-python.tar.gz is read, too. All members pass the same options;
between machines set ATOLL_LISTEN=/ip4/0.0.0.0/tcp/7071 on each. A processor trains `--width 8`; 64 wants a GPU.

Members share the images through `run.data`: if one is killed, another reads on where its counted work ends. The
rate follows the agreed rounds, so a member that comes back has the rate of the others.

BatchNorm's running statistics are buffers: the agreed ones are the mean of all members', without outer momentum.
They describe the activations of the members' models, not those of the agreed model, which is evaluated with them.
Hence GroupNorm is the default; `--norm batch` shows the difference.
"""

import argparse
import gzip
import math
import pickle
import tarfile
import zlib
from io import BytesIO
from itertools import pairwise
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import atoll

DOWNLOAD = "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (162 MB), which is not part of Atoll"
TRAINING, HELD_OUT = [f"data_batch_{n}" for n in range(1, 6)], "test_batch"
ROW, CLASSES = 1 + 3 * 32 * 32, 10  # bytes of one image, its label first
FILE_MOST = 10_000 * ROW + 2**20  # bytes of one file: more would be another data set, or a bomb
SHARD_IMAGES = 1024  # of a shard: a member reads at most eight of them in a round
MEAN, DEVIATION = torch.tensor([[0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]]).view(2, 3, 1, 1)


class InertObject:
    """Stands for each numpy object of a pickle, keeps its state and runs nothing."""

    def __init__(self, *_: object) -> None:
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


class PlainUnpickler(pickle.Unpickler):
    """Admits plain containers and inert numpy arrays: another pickle could run any code."""

    def find_class(self, module: str, name: str) -> type:
        if module.partition(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"):
            return InertObject
        raise ValueError(f"it asks for {module}.{name}, which no image needs")


def rows_of(file: str, data: bytes) -> np.ndarray:
    """Label and pixels of each image, (N, ROW), in one file of either archive."""
    try:
        if file.endswith(".bin"):
            return np.frombuffer(data, np.uint8).reshape(-1, ROW)
        told = PlainUnpickler(BytesIO(data), encoding="bytes").load()
        pixels = np.frombuffer(told[b"data"].state[-1], np.uint8).reshape(-1, ROW - 1)
        return np.column_stack((np.array(told[b"labels"], np.uint8), pixels))
    except Exception as why:  # what a damaged pickle raises depends on where it is damaged
        raise ValueError(f"{file} is not a batch of images: {why}") from None


def read_archive(path: Path) -> tuple[TensorDataset, TensorDataset]:
    """Images (N, 3, 32, 32) as bytes, with labels: to train with, and held out. ValueError if damaged."""
    found = dict[str, np.ndarray]()
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=unpacked, mode="r|") as archive:
            for file in archive:
                name = PurePosixPath(file.name).name
                if file.isfile() and name.removesuffix(".bin") in (*TRAINING, HELD_OUT):
                    if file.size > FILE_MOST:
                        raise ValueError(f"{name} has {file.size:,} bytes, more than 10,000 images")
                    found[name.removesuffix(".bin")] = rows_of(name, archive.extractfile(file).read())
            while unpacked.read(2**20):
                pass  # its checksum stands at the end
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as why:
        raise ValueError(f"{path} cannot be read as an archive of CIFAR-10: {why}") from None
    if missing := [name for name in (*TRAINING, HELD_OUT) if not len(found.get(name, ()))]:
        raise ValueError(f"{path} has no images of {', '.join(missing)}")
    if (wrong := max(int(rows[:, 0].max()) for rows in found.values())) >= CLASSES:
        raise ValueError(f"{path} has an image of class {wrong}, the last one is {CLASSES - 1}")
    return tensors([found[name] for name in TRAINING]), tensors([found[HELD_OUT]])


def tensors(parts: list[np.ndarray]) -> TensorDataset:
    rows = torch.from_numpy(np.concatenate(parts))
    return TensorDataset(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].long())


def normalized(images_BCHW: Tensor) -> Tensor:
    return (images_BCHW.float() / 255 - MEAN) / DEVIATION


def augmented(images_BCHW: Tensor) -> Tensor:
    """Half of the images flipped, and each moved by at most 4 pixels; what comes in from outside is black."""
    batch = len(images_BCHW)
    flips_B111 = torch.rand(batch, 1, 1, 1) < 0.5
    padded = functional.pad(torch.where(flips_B111, images_BCHW.flip(3), images_BCHW), (4, 4, 4, 4))
    rows, columns = (torch.randint(9, (batch, 1)) + torch.arange(32) for _ in range(2))
    return padded[torch.arange(batch)[:, None, None], :, rows[:, :, None], columns[:, None, :]].movedim(3, 1)


def norm(kind: str, channels: int) -> nn.Module:
    groups = math.gcd(channels, max(8, channels) // 8)  # of eight channels, as far as they divide
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(groups, channels)


class Block(nn.Module):
    def __init__(self, kind: str, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        first = [nn.Conv2d(before, width, 3, stride, 1, bias=False), norm(kind, width), nn.ReLU()]
        self.convolved = nn.Sequential(*first, nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(kind, width))
        around = [nn.Conv2d(before, width, 1, stride, bias=False), norm(kind, width)]
        self.shortcut = nn.Sequential(*around) if stride == 2 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolved(x) + self.shortcut(x))


def resnet18(width: int, kind: str) -> nn.Module:
    """He et al. 2016, with a first layer for small images: 3 x 3, no pooling."""
    widths = [width * 2**stage for stage in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
    begin = [nn.Conv2d(3, width, 3, 1, 1, bias=False), norm(kind, width), nn.ReLU()]
    blocks = [Block(kind, before, after) for before, after in pairwise(widths)]
    return nn.Sequential(*begin, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], CLASSES))


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, count: int, device: str) -> float:
    model.eval()
    images, labels = (tensor[:count] for tensor in data.tensors)
    parts = zip(images.split(250), labels.split(250), strict=True)
    right = sum(int((model(normalized(x).to(device)).argmax(1).cpu() == y).sum()) for x, y in parts)
    model.train()
    return right / len(labels)


def train(options: argparse.Namespace, images: TensorDataset, held_out: TensorDataset) -> None:
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = resnet18(options.width, options.norm).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    run = atoll.join(or_found={"rounds": options.rounds, "inner_steps": options.inner_steps})
    data = run.data(images, shards=max(1, len(images) // SHARD_IMAGES), seed=options.seed)
    run.attach(model, optimizer, batch=options.batch)
    trained = -1
    for x, y in DataLoader(data, options.batch, drop_last=True):  # ends with the run
        if run.trained != trained:
            trained = run.trained
            optimizer.param_groups[0]["lr"] = options.lr * (1 + math.cos(math.pi * trained / options.rounds)) / 2
            if run.shard_index == 0 and trained:  # the model holds the agreed parameters, the same at all
                right = accuracy(model, held_out, options.held_out, device)
                print(f"round {trained}: held-out accuracy {right:.4f}, {run.members} members", flush=True)
        loss = functional.cross_entropy(model(normalized(augmented(x)).to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss)
    right = accuracy(model, held_out, len(held_out), device)
    print(f"peer {run.peer[-8:]}: {run.trained} rounds with {run.members} members, test accuracy {right:.4f}")
    run.close()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("archive", type=Path, nargs="?")
    asked.add_argument("--local", type=int, default=0, help="run so many peers on this computer")
    asked.add_argument("--norm", choices=("group", "batch"), default="group")
    asked.add_argument("--lr", type=float, default=2e-3)
    numbers = {"rounds": 100, "inner-steps": 50, "batch": 32, "width": 64, "held-out": 1000, "seed": 0}
    for name, value in numbers.items():
        asked.add_argument(f"--{name}", type=int, default=value)
    options = asked.parse_args()
    if options.archive is None or not options.archive.is_file():
        asked.error(DOWNLOAD if options.archive is None else f"there is no {options.archive}; {DOWNLOAD}")
    try:
        images, held_out = read_archive(options.archive)
    except ValueError as why:
        asked.error(f"{why}; {DOWNLOAD}")
    if not options.local:
        return train(options, images, held_out)
    given = [(f"--{name}", str(getattr(options, name.replace("-", "_")))) for name in (*numbers, "norm", "lr")]
    atoll.local(__file__, str(options.archive.resolve()), *sum(given, ()), peers=options.local)


if __name__ == "__main__":
    main()
