"""MNIST among four: a plain PyTorch loop with two lines added, and every recipe where nobody sees all digits.

    python bench/mnist.py --data mnist.npz [--only attach,split,curve] [--recipes auto,diloco] [--quick] [--json]

`attach`: `examples/mnist.py --local 4`, four real processes over encrypted sockets; accuracy on the test images.
`split`: one process per recipe's run (`atoll.experiment`), the built-in small CNN, 4 members, batch 32, twelve
rounds of 50 steps where a recipe has rounds of steps. `alike`: samples are shared out at random. `sorted`: images
are sorted by label and cut into eight pieces, two to each member, so that each sees two to four digits of ten
(McMahan et al. 2017, 1602.05629, section 3), and what it holds stays with it. Accuracy of the agreed model on all
test images.
`curve`, only if named: `diloco` and `data_parallel`; 1, 2 and 4 members learn from 12,800 images in all, in
steps of 32, ten to a round; accuracy of the agreed model on 2,500 test images. Median and range of the seeds.
"""

from __future__ import annotations

import re
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
from atoll.training.experiment.faults import FaultSpec
from atoll.training.experiment.simulator import ExperimentSimulator
from atoll.training.models import build_model
from atoll.training.recipe.methods import METHODS
from atoll.training.recipe.recipes import with_length

PEERS, PIECES, MODEL = 4, 8, "cnn-mnist"
ROUNDS, INNER_STEPS = 12, 50
EXAMPLE = Path(__file__).parents[1] / "examples" / "mnist.py"
STEP_BY_STEP = (*EVERY_STEP, "sparta")  # a round is a step
IMAGES, STEPS, POINTS = 12_800, 10, (5, 2, 1)  # of a curve: images in all, steps of a round, divisors of the images
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


def curve(name: str, images: ImageDataset, members: int, seeds: list[int]) -> dict[str, Any]:
    steps, found = IMAGES // (members * 32), list[list[float]]()
    images = images._replace(
        validation_images=images.validation_images[:2500], validation_labels=images.validation_labels[:2500]
    )
    lengths = {"rounds": steps} if name in STEP_BY_STEP else {"rounds": steps // STEPS, "inner_steps": STEPS}
    for seed in seeds:
        recipe = with_length(METHODS[name](MODEL, batch=32, seed=seed, **lengths, **RATE), steps)
        run = ExperimentSimulator(recipe, build_model(MODEL, seed), images, members, steps, FaultSpec())
        found.append([])
        while run.now < steps:
            run.step()
            if run.now in [steps // part for part in POINTS]:
                found[-1].append(accuracy(run.agreed(), images))
    told = (f"{statistics.median(f):.4f} ({min(f):.4f} to {max(f):.4f})" for f in zip(*found, strict=True))
    points = {f"after {IMAGES // part:,}": text for part, text in zip(POINTS, told, strict=True)}
    return {"part": "curve", "recipe": name, "members": members, **points}


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
    parser.add_argument("--seeds", default="0,1,2", help="of the curves; with --quick the first one")
    parser.add_argument("--members", default="1,2,4", help="of the curves")
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
    seeds = [int(seed) for seed in options.seeds.split(",")][: 1 if options.quick else None]
    for members in options.members.split(",") if "curve" in parts else []:
        for name in options.recipes.split(",") if options.recipes else ("diloco", "data_parallel"):
            rows.append(curve(name, images, int(members), seeds))
            tell(rows[-1], options.json)
    if options.json:
        print(report("mnist", {"peers": PEERS, "rounds": ROUNDS, "model": MODEL}, rows, versions("torch")))


def tell(row: dict[str, Any], quiet: bool) -> None:
    if not quiet:
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
