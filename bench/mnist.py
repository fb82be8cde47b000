"""MNIST among four: a plain PyTorch loop with two lines added, and every recipe where nobody sees all digits.

    python bench/mnist.py --data mnist.npz [--only attach,split,curve] [--recipes auto,diloco] [--quick] [--json]

`attach`: `examples/mnist.py --local 4`, four real processes over encrypted sockets; accuracy on the test images.
`split`: one process per recipe's run (`atoll.experiment`), the built-in small CNN, 4 members, batch 32, twelve
rounds of 50 steps where a recipe has rounds of steps. `alike`: samples are shared out at random. `sorted`: images
are sorted by label and cut into eight pieces, two to each member, so that each sees two to four digits of ten
(McMahan et al. 2017, 1602.05629, section 3), and what it holds stays with it. Accuracy of the agreed model on all
test images.
`curve`, only if named: the example with 1, 2 and 4 members that learn from 51,200 images in all, in rounds of 50
steps of 32; accuracy on the test images after a quarter, half and all of them. Beside each, one process that takes
the steps of data parallelism: batches as large as those of all members together, at the same rate.
Median and spread of three seeds.
"""

from __future__ import annotations

import re
import runpy
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from form import asking, report, versions

import atoll
from atoll.runtime.config import EVERY_STEP
from atoll.training.data import Data, load_data, validation
from atoll.training.data.images import ImageDataset
from atoll.training.exchange.layout import bind, layout_of
from atoll.training.models import build_model
from atoll.training.recipe.methods import METHODS

PEERS, PIECES, MODEL = 4, 8, "cnn-mnist"
ROUNDS, INNER_STEPS = 12, 50
EXAMPLE = Path(__file__).parents[1] / "examples" / "mnist.py"
STEP_BY_STEP = (*EVERY_STEP, "sparta")  # a round is a step
IMAGES, BATCH, POINTS = 51_200, 32, (4, 2, 1)  # of a curve: images learned in all, and what parts of them
RATE = {"lr": 2e-3}  # of AdamW here; recipes whose rate is not AdamW's keep their own
OWN_RATE = ("fedavg", "demo_")


def attached(data: Path, rounds: int, inner_steps: int) -> dict[str, Any]:
    """The example as a person would run it."""
    told = [sys.executable, str(EXAMPLE), str(data.resolve()), "--local", str(PEERS)]
    told += ["--rounds", str(rounds), "--inner-steps", str(inner_steps)]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(told, cwd=folder, text=True, capture_output=True, timeout=1800, check=False)
    found = [float(value) for value in re.findall(r"test accuracy ([0-9.]+)", done.stdout)]
    if len(found) != PEERS:
        raise SystemExit(
            f"{len(found)} of {PEERS} peers told their accuracy:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return {"part": "attach", "peers": PEERS, "steps": rounds * inner_steps, "accuracy": min(found)}


def curve(data: Path, members: int, seed: int) -> list[float]:
    """Accuracies at the points of the example's curve."""
    rounds = IMAGES // (members * INNER_STEPS * BATCH)
    told = [sys.executable, str(EXAMPLE), str(data.resolve()), "--local", str(members), "--batch", str(BATCH)]
    told += ["--rounds", str(rounds), "--inner-steps", str(INNER_STEPS), "--seed", str(seed), "--every", "2"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(told, cwd=folder, text=True, capture_output=True, timeout=1800, check=True)
    found = {int(at): float(value) for at, value in re.findall(r"round (\d+): accuracy ([0-9.]+)", done.stdout)}
    found[rounds] = min(float(value) for value in re.findall(r"test accuracy ([0-9.]+)", done.stdout))
    return [found[rounds // part] for part in POINTS]


def data_parallel(data: Path, members: int, seed: int) -> list[float]:
    """The same for one process that takes the steps of data parallelism."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(seed)
    model, arrays, batch = example["network"](), np.load(data), members * BATCH
    x, y = example["images"](arrays["x_train"]), torch.from_numpy(arrays["y_train"]).long()
    x_test, y_test = example["images"](arrays["x_test"]), torch.from_numpy(arrays["y_test"]).long()
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=2e-3), IMAGES // batch
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).split(batch)
    found = list[float]()
    for step, index in enumerate(order[:steps], 1):
        torch.nn.functional.cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step in [steps // part for part in POINTS]:
            found.append(example["accuracy"](model, x_test, y_test))
    return found


def curves(data: Path, members: int, seeds: int) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    for way in (curve, data_parallel):
        found = zip(*(way(data, members, seed) for seed in range(seeds)), strict=True)
        points = {
            f"after {IMAGES // part:,}": f"{statistics.median(values):.4f} ({min(values):.4f} to {max(values):.4f})"
            for part, values in zip(POINTS, found, strict=True)
        }
        rows.append({"part": "curve", "members": members, "how": way.__name__.replace("_", " "), **points})
    return rows


def shared_out(images: ImageDataset) -> list[Data]:
    """By label, two of eight pieces to each member; everybody is judged by the same test images."""
    order = np.argsort(images.train_labels, kind="stable")
    pieces = np.array_split(order, PIECES)
    own = [np.concatenate([pieces[w], pieces[w + PEERS]]) for w in range(PEERS)]
    return [images._replace(train_images=images.train_images[i], train_labels=images.train_labels[i]) for i in own]


def split(name: str, images: ImageDataset, by_label: bool, rounds: int) -> dict[str, Any]:
    lengths = (
        {"rounds": rounds * INNER_STEPS} if name in STEP_BY_STEP else {"rounds": rounds, "inner_steps": INNER_STEPS}
    )
    recipe = METHODS[name](MODEL, batch=32, **lengths, **({} if name in OWN_RATE else RATE))
    data = shared_out(images) if by_label else images
    done = atoll.experiment(recipe, MODEL, data, peers=PEERS, steps=rounds * INNER_STEPS)
    how = "sorted" if by_label else "alike"
    figures = {"accuracy": round(accuracy(done.model_F, images), 4), "val_loss": round(done.val_loss, 4)}
    return {
        "part": "split",
        "recipe": name,
        "data": how,
        "steps": done.steps,
        **figures,
        "upload_ratio": done.upload_ratio,
    }


@torch.no_grad()
def accuracy(model_F: torch.Tensor, images: ImageDataset) -> float:
    model = build_model(MODEL, 0)
    x_F, _ = bind(model, layout_of(model))
    x_F.copy_(model_F)
    model.eval()
    right = 0
    for inputs, labels in validation(images, len(images.validation_labels), 500, 0):
        right += int((model(inputs).argmax(1) == labels).sum())
    return right / len(images.validation_labels)


def main() -> None:
    parser = asking(__doc__, "two recipes, fewer steps")
    parser.add_argument("--data", type=Path, required=True, help="npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--only", default="attach,split", help="comma between several")
    parser.add_argument("--recipes", default="", help="comma between several; all")
    parser.add_argument("--members", default="1,2,4", help="of the curves; comma between several")
    parser.add_argument("--rounds", type=int, help="of the attached loop, of 50 steps each; 20, with --quick 4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    images = load_data(str(options.data))
    if not isinstance(images, ImageDataset):
        raise SystemExit(f"{options.data} holds no images. Fix: --data mnist.npz")
    names = (
        options.recipes.split(",") if options.recipes else ["diloco", "auto"] if options.quick else list(METHODS)
    )
    parts = options.only.split(",")
    rows = list[dict[str, Any]]()
    if "attach" in parts:
        rows.append(attached(options.data, options.rounds or (4 if options.quick else 20), INNER_STEPS))
        tell(rows[-1], options.json)
    for name in names if "split" in parts else []:
        for by_label in (False, True):
            rows.append(split(name, images, by_label, 3 if options.quick else ROUNDS))
            tell(rows[-1], options.json)
    for members in options.members.split(",") if "curve" in parts else []:
        for row in curves(options.data, int(members), 1 if options.quick else 3):
            rows.append(row)
            tell(row, options.json)
    if options.json:
        print(report("mnist", {"peers": PEERS, "rounds": ROUNDS, "model": MODEL}, rows, versions("torch")))


def tell(row: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
