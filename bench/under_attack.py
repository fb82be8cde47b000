"""What a model still learns while some of its workers lie: per setting, rule and attack.

    python bench/under_attack.py [--quick] [--json]      # digits and the byte GPT, the default rule beside the mean
    python bench/under_attack.py --settings digits-dirichlet,digits-iid --rules all --seeds 3
    python bench/under_attack.py --settings mnist-iid,mnist-sorted --data FILE --seeds 1

digits-dirichlet, digits-iid, digits-sorted: scikit-learn's digits (1437 / 360), perceptron 64-64-10, n = 17, f = 4,
    momentum 0.9, rate 0.4, batch 25, 120 steps; each class is dealt to the honest by Dirichlet(1), or all get the
    same, or `sorted`, as below.
mnist-iid, mnist-sorted: the small CNN, n = 25, f = 5, momentum 0.9, rate 0.1, batch 32, 600 steps; `sorted` cuts
    the images, in order of their labels, into a piece per honest worker. Lies are those of the published table.
gpt: byte GPT of 168 k parameters, DiLoCo, 8 peers, 2 of them villains, 8 rounds of 25 steps: validation loss
    beside that of 8 honest peers and a mean (`atoll.experiment`).

Workers send momenta. Liars know what the honest send; the optimised ones search their strength against the very
rule, its memory included. Those behind a backdoor train: four samples of ten in their batches, `quiet` two, bear a
bright square in the corner and the label 0; `scaled` sends n / f times what came of it (Bagdasaryan et al. 2020).
Accuracy in percent is the mean of the last five evaluations, then the median over seeds; `clean` is without liars,
`worst` the worst over all attacks. `success`, likewise, is the share of the test samples of other classes that are
taken for 0 with that square on them; `taken` the largest over all backdoors. Rules: `default` (training/robust),
`mean` (torch's), names of rules, with pre-aggregations before them ("nnm + krum"), a colon for another f
("default:5"), a radius ("centered_clipping 10").
Digits are read out of scikit-learn's wheel, which nothing imports; to have it, apart from the project:

    python -m pip install --no-deps --target bench/.venv/digits scikit-learn
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
from form import asking, report, versions
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy

from atoll.training.data import load_data
from atoll.training.data.images import ImageDataset
from atoll.training.experiment.api import FaultSpec, experiment
from atoll.training.models.cnn import SmallCNN
from atoll.training.recipe.recipes import diloco
from atoll.training.robust import aggregate, default
from atoll.training.robust.attacks import ATTACKS, OPTIMISED, attack_rows, backdoor, label_flip, replacement, stale

HERE = Path(__file__).resolve().parent
CLASSES, TARGET = 10, 0
SQUARE = 2  # pixels to a side of the trigger
FETCH = "python -m pip install --no-deps --target bench/.venv/digits scikit-learn"
DIVERGED = (-math.inf, -math.inf)  # worse than any figure, so that a median over seeds can be taken
Rule = Callable[[Tensor, Tensor], Tensor]  # (rows (n, d), last answer (d,)) -> (d,)


# ---- rules and lies --------------------------------------------------------------------------------------------


def plain(rows_ND: Tensor, _: Tensor) -> Tensor:
    """torch's mean, without a look at what it adds."""
    return rows_ND.mean(dim=0)


def rule_of(words: str, n: int, f: int) -> Rule:
    words, _, given = words.partition(":")
    f = int(given or f)
    if words == "mean":
        return plain
    if words == "default":
        chosen = default(n, f)
        return lambda rows_ND, _: chosen(rows_ND)
    *pre, rule = words.split(" + ")
    rule, _, radius = rule.partition(" ")
    settings: dict = {"f": f, "pre": pre}
    if rule == "centered_clipping":
        settings["radius"] = float(radius) if radius else None
        return lambda rows_ND, before_D: aggregate(rule, rows_ND, start=before_D, **settings)
    return lambda rows_ND, _: aggregate(rule, rows_ND, **settings)


RULES = ("mean", "krum", "multi_krum", "coordinate_median", "trimmed_mean", "geometric_median", "centered_clipping")
RULES += (
    "nnm + krum",
    "nnm + multi_krum",
    "nnm + trimmed_mean",
    "nnm + geometric_median",
    "nnm + centered_clipping",
)
RULES += ("arc + nnm + trimmed_mean", "arc + caf")


class Seen(NamedTuple):
    """What liars know."""

    honest_HD: Tensor
    f: int
    rule: Callable[[Tensor], Tensor]  # as it will be applied, memory included
    before_D: Tensor  # the last answer
    own_FD: Tensor  # momenta of liars that train, on what `taught` says


def rows_of(lie: str, seen: Seen) -> Tensor:
    match lie:
        case "none":
            return seen.honest_HD[:0]
        case "stale":
            return stale(seen.honest_HD, seen.f, seen.before_D)
        case "backdoor, scaled":
            return replacement(seen.own_FD, len(seen.honest_HD))
        case _ if lie in TRAINED:
            return seen.own_FD
        case _:
            return attack_rows(lie, seen.honest_HD, seen.f, seen.rule)


def taught(lie: str, task: Task, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """What a liar that trains makes of honest samples."""
    if lie == "label flip":
        return inputs, label_flip(labels, CLASSES)
    return backdoor(inputs, labels, partial(stamped, task), TARGET, BACKDOORS[lie])


def stamped(task: Task, inputs: Tensor) -> Tensor:
    """With the trigger: a square as bright as can be in the upper left corner."""
    side = math.isqrt(task.train[0][0].numel())
    images = inputs.clone(memory_format=torch.contiguous_format)
    images.view(-1, side, side)[:, :SQUARE, :SQUARE] = task.train[0].max()
    return images


BACKDOORS = {"backdoor": 0.4, "backdoor, quiet": 0.2, "backdoor, scaled": 0.4}  # share of what they train on
TRAINED = ("label flip", *BACKDOORS)
LIES = ("none", *ATTACKS, "stale", *TRAINED, *OPTIMISED)
PUBLISHED = ("none", "alie", "sign flip", "foe 0.1", "label flip", "mimic")
GPT_MEAN = (
    "none",
    "sign flip",
    "scaling",
    "foe 2",
    "gaussian",
    "nan",
    "zeros",
    "foe, optimised",
)  # to save minutes
QUICK = ("none", "sign flip", "foe 2", "alie 1.5", "nan", "alie, optimised", "foe, optimised")


# ---- tasks -----------------------------------------------------------------------------------------------------


class Task(NamedTuple):
    train: tuple[Tensor, Tensor]  # inputs, labels
    test: tuple[Tensor, Tensor]
    model: Callable[[], nn.Module]
    n: int
    f: int
    lr: float
    batch: int
    steps: int
    every: int  # steps between evaluations, of which the last five count
    shares: Callable[[int, np.random.RandomState], list[np.ndarray]]  # honest workers -> sample indices of each
    momentum: float = 0.9


def perceptron() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    for layer in (model[0], model[2]):
        nn.init.normal_(layer.weight, std=0.12)
        nn.init.zeros_(layer.bias)
    return model


def digits(how: str, steps: int = 120) -> Task:
    inputs, labels = digits_data()
    order = np.random.RandomState(0).permutation(len(inputs))
    first, last = torch.from_numpy(order[:1437]), torch.from_numpy(order[1437:])
    train, test = (inputs[first], labels[first]), (inputs[last], labels[last])
    known = train[1].numpy()
    shares = {"dirichlet": partial(dirichlet, known, 1.0), "sorted": partial(by_labels, known)}
    dealt = shares.get(how, partial(alike, len(first)))
    return Task(train, test, perceptron, 17, 4, 0.4, 25, steps, 10, dealt)


def digits_data() -> tuple[Tensor, Tensor]:
    """(1797, 64) values in 0 … 1 and (1797,) labels, as scikit-learn ships them."""
    sys.path.append(str(HERE / ".venv" / "digits"))
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"The digits are not here: they lie in scikit-learn's wheel.\nFix: {FETCH}")
    table = np.loadtxt(Path(spec.submodule_search_locations[0], "datasets/data/digits.csv.gz"), delimiter=",")
    return torch.from_numpy(table[:, :-1] / 16).float(), torch.from_numpy(table[:, -1]).long()


def mnist(data: ImageDataset, by_label: bool, steps: int = 600) -> Task:
    train, test = (_pixels(*data[:2]), _pixels(*data[2:]))
    shares = partial(by_labels, train[1].numpy()) if by_label else partial(alike, len(train[1]))
    return Task(train, test, convolutions, 25, 5, 0.1, 32, steps, 30, shares)


def _pixels(images: np.ndarray, labels: np.ndarray) -> tuple[Tensor, Tensor]:
    """Of mean 0 and deviation 1 over the training images, as everybody has them."""
    return (torch.from_numpy(images).float() / 255 - 0.1307) / 0.3081, torch.from_numpy(labels).long()


def convolutions() -> nn.Module:
    """SmallCNN, to the value, but pooled before it is rectified: a quarter is left to do, 1.5 times as fast."""
    layers = SmallCNN().layers
    order = (0, 2, 1, 3, 5, 4, 6, 7, 8, 9)
    return nn.Sequential(nn.Unflatten(1, (1, 28)), *(layers[at] for at in order)).to(
        memory_format=torch.channels_last
    )


def alike(count: int, workers: int, draw: np.random.RandomState) -> list[np.ndarray]:
    order = draw.permutation(count)
    return [order[worker::workers] for worker in range(workers)]


def by_labels(labels: np.ndarray, workers: int, draw: np.random.RandomState) -> list[np.ndarray]:
    return np.array_split(np.argsort(labels, kind="stable"), workers)


def dirichlet(labels: np.ndarray, alpha: float, workers: int, draw: np.random.RandomState) -> list[np.ndarray]:
    """Each class is divided among workers by shares from Dirichlet(alpha); who got almost nothing draws eight."""
    pieces: list[list[np.ndarray]] = [[] for _ in range(workers)]
    for label in range(CLASSES):
        index = draw.permutation(np.where(labels == label)[0])
        cuts = (np.cumsum(draw.dirichlet([alpha] * workers)) * len(index)).astype(int)[:-1]
        for piece, given in zip(pieces, np.split(index, cuts), strict=True):
            piece.append(given)
    shares = [np.concatenate(piece) for piece in pieces]
    return [share if len(share) >= 4 else draw.randint(0, len(labels), 8) for share in shares]


# ---- one run ---------------------------------------------------------------------------------------------------


def trained(task: Task, rule: Rule, lie: str, seed: int) -> tuple[float, float]:
    """Percent of the test set, and of what bears the trigger the percent taken for the target.

    The honest are the same workers with and without (`none`) liars. DIVERGED where the model leaves finite numbers.
    """
    honest, liars = task.n - task.f, 0 if lie == "none" else task.f
    draw = np.random.RandomState(seed)
    shares, draws = task.shares(honest, draw), np.random.RandomState(seed + 7)
    torch.manual_seed(seed)
    model = task.model()
    names = [name for name, _ in model.named_parameters()]
    shapes = [parameter.shape for parameter in model.parameters()]
    x_D = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    def named(x_D: Tensor) -> dict[str, Tensor]:
        pieces = x_D.split([shape.numel() for shape in shapes])
        return {name: piece.view(shape) for name, piece, shape in zip(names, pieces, shapes, strict=True)}

    def gradients(inputs_WB: Tensor, labels_WB: Tensor) -> Tensor:
        return per_worker(model, named(x_D), inputs_WB, labels_WB)

    others = task.test[1] != TARGET
    marked = stamped(task, task.test[0][others]), torch.full((int(others.sum()),), TARGET)
    momenta_HD, own_FD = torch.zeros(honest, len(x_D)), torch.zeros(liars, len(x_D))
    before_D, found = torch.zeros_like(x_D), []
    for step in range(1, task.steps + 1):
        index_HB = torch.from_numpy(np.stack([share[draws.randint(0, len(share), task.batch)] for share in shares]))
        inputs, labels = task.train[0][index_HB], task.train[1][index_HB]
        _towards(momenta_HD, gradients(inputs, labels), task.momentum)
        if not momenta_HD.isfinite().all():
            return DIVERGED
        if lie in TRAINED:
            theirs = [liar % honest for liar in range(liars)]
            _towards(own_FD, gradients(*taught(lie, task, inputs[theirs], labels[theirs])), task.momentum)
        seen = Seen(momenta_HD, liars, partial(_with, rule, before_D), before_D, own_FD)
        before_D = rule(torch.cat([momenta_HD, rows_of(lie, seen)]), before_D)
        x_D = x_D - task.lr * before_D
        if step > task.steps - 5 * task.every and step % task.every == 0:
            found.append([right(model, named(x_D), *samples) for samples in (task.test, marked)])
    if not x_D.isfinite().all():
        return DIVERGED
    accurate, taken = (100 * sum(one) / len(one) for one in zip(*found, strict=True))
    return accurate, taken


def _with(rule: Rule, before_D: Tensor, rows_ND: Tensor) -> Tensor:
    return rule(rows_ND, before_D)


def _towards(momenta_WD: Tensor, gradients_WD: Tensor, momentum: float) -> None:
    momenta_WD.mul_(momentum).add_(gradients_WD * (1 - momentum))


def per_worker(model: nn.Module, x: dict[str, Tensor], inputs_WB: Tensor, labels_WB: Tensor) -> Tensor:
    """Gradient of every worker's own batch, (W, d): small models all at once, convolutions one by one (twice as
    fast on a CPU as their batched form)."""

    def loss(x: dict[str, Tensor], inputs_B: Tensor, labels_B: Tensor) -> Tensor:
        return cross_entropy(functional_call(model, x, (inputs_B,)), labels_B)

    if inputs_WB.ndim == 3:  # (worker, sample, value)
        found = vmap(grad(loss), in_dims=(None, 0, 0))(x, inputs_WB, labels_WB)
        return torch.cat([found[name].flatten(1) for name in x], dim=1)
    for parameter, value in zip(model.parameters(), x.values(), strict=True):
        parameter.data.copy_(value)
    rows = []
    for inputs_B, labels_B in zip(inputs_WB, labels_WB, strict=True):
        pieces = torch.autograd.grad(cross_entropy(model(inputs_B), labels_B), list(model.parameters()))
        rows.append(torch.cat([piece.flatten() for piece in pieces]))
    return torch.stack(rows)


@torch.no_grad()
def right(model: nn.Module, x: dict[str, Tensor], inputs: Tensor, labels: Tensor) -> float:
    scores = [functional_call(model, x, (part,)) for part in inputs.split(1000)]
    return float((torch.cat(scores).argmax(dim=1) == labels).float().mean())


# ---- the byte GPT ----------------------------------------------------------------------------------------------


def gpt_rows(attacks: Sequence[str], quick: bool) -> Iterator[dict]:
    """Validation losses of one seed; None where training diverged."""
    model, rounds, inner_steps = ("gpt-nano", 6, 16) if quick else ("gpt-tiny", 8, 25)
    data, recipe = load_data("stdlib"), diloco(model, rounds=rounds, inner_steps=inner_steps)
    for rule, statistic in (("mean", "mean"), ("default", "robust")):
        for attack in attacks:
            if rule == "mean" and attack not in GPT_MEAN:
                continue
            trouble = FaultSpec(byzantine={} if attack == "none" else {6: attack, 7: attack})
            try:
                done = experiment(recipe, data=data, peers=8, statistic=statistic, trouble=trouble)
                loss = round(done.val_loss, 4)
            except ValueError as problem:
                if "diverged" not in str(problem):
                    raise
                loss = None
            yield {"setting": "gpt", "rule": rule, "attack": attack, "loss": loss}


# ---- all of them -----------------------------------------------------------------------------------------------


def task_of(setting: str, asked: argparse.Namespace) -> Task:
    kind, _, how = setting.partition("-")
    if kind == "digits":
        task = digits(how)
    else:
        if not asked.data:
            raise SystemExit("mnist needs its images. Fix: --data FILE.npz, or a folder with the four idx files")
        data = load_data(asked.data)
        if not isinstance(data, ImageDataset):
            raise SystemExit(f"{asked.data} holds no images. Fix: --data FILE.npz, or a folder of idx files")
        task = mnist(data, how == "sorted")
    return task._replace(steps=asked.steps or task.steps)


def attacks_of(setting: str, quick: bool) -> Sequence[str]:
    """All that fit; in the text of `gpt` nobody stamps anything."""
    if setting == "gpt":
        return QUICK if quick else ("none", *ATTACKS, *OPTIMISED)
    if quick:
        return (*QUICK, "backdoor, quiet")
    return PUBLISHED if setting.startswith("mnist") else LIES


def accuracy_rows(setting: str, attacks: Sequence[str], asked: argparse.Namespace) -> Iterator[dict]:
    task = task_of(setting, asked)
    seeds = range(asked.seed, asked.seed + asked.seeds)
    for words in asked.rules:
        rule = rule_of(words, task.n, task.f)
        for attack in attacks:
            runs = [trained(task, rule, attack, seed) for seed in seeds]
            accurate, taken = (_figure(median(one)) for one in zip(*runs, strict=True))
            yield {"setting": setting, "rule": words, "attack": attack, "accuracy": accurate, "success": taken}


def _figure(found: float) -> float | None:
    """None where half of the seeds or more diverged."""
    return round(found, 2) if math.isfinite(found) else None


def summed_up(rows: list[dict]) -> list[dict]:
    """`clean` and `worst` per setting and rule."""
    found = []
    for setting, rule in dict.fromkeys((row["setting"], row["rule"]) for row in rows):
        mine = {row["attack"]: row for row in rows if (row["setting"], row["rule"]) == (setting, rule)}
        what = "loss" if setting == "gpt" else "accuracy"
        badness = {attack: _badness(row) for attack, row in mine.items() if attack != "none"}
        worst = max(badness, key=badness.__getitem__, default=None)
        clean = mine["none"][what] if "none" in mine else None
        figures = {"clean": clean, "worst": mine[worst][what] if worst else None, "worst_attack": worst}
        taken = [mine[attack]["success"] for attack in BACKDOORS if attack in mine]
        figures["taken"] = max((one for one in taken if one is not None), default=None)
        found.append({"setting": setting, "rule": rule} | figures)
    return found


def _badness(row: dict) -> float:
    if "accuracy" in row:
        return math.inf if row["accuracy"] is None else -row["accuracy"]
    return math.inf if row["loss"] is None else row["loss"]


def table(rows: list[dict], sums: list[dict]) -> str:
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in rows):
        mine = [one for one in sums if one["setting"] == setting]
        found = {(r["attack"], r["rule"]): r for r in rows if r["setting"] == setting}
        rules = [one["rule"] for one in mine]
        lines += ["", f"| {setting} | " + " | ".join(rules) + " |", "|---" * (len(rules) + 1) + "|"]
        for attack in dict.fromkeys(attack for attack, _ in found):
            cells = [found.get((attack, rule), {}) for rule in rules]
            lines.append(f"| {attack} | " + " | ".join(_shown(c, "accuracy", "loss") for c in cells) + " |")
        worst = [f"{_shown(one, 'worst')} ({one['worst_attack']})" if one["worst_attack"] else "" for one in mine]
        lines.append("| **worst** | " + " | ".join(worst) + " |")
        for attack in ("none", *BACKDOORS):
            cells = [found.get((attack, rule), {}) for rule in rules]
            if any("success" in cell for cell in cells):
                lines.append(
                    f"| taken for {TARGET}: {attack} | " + " | ".join(_shown(c, "success") for c in cells) + " |"
                )
    return "\n".join(lines)


def _shown(figures: dict, *names: str) -> str:
    """The first of these that is there at all; nothing where none is: that rule was not asked about that attack."""
    found = [figures[name] for name in names if name in figures]
    return "" if not found else "diverged" if found[0] is None else str(found[0])


SETTINGS = ("digits-dirichlet", "digits-iid", "digits-sorted", "mnist-iid", "mnist-sorted", "gpt")


def main() -> None:
    torch.set_num_threads(1)
    parser = asking(
        __doc__, "one seed, 60 steps, a smaller GPT, six attacks, with images seven", "one object instead of tables"
    )
    parser.add_argument("--settings", default="digits-dirichlet,digits-iid,gpt", help=", ".join(SETTINGS))
    parser.add_argument("--rules", default="default,mean", help="with commas between them, or all")
    parser.add_argument("--attacks", default="", help="with semicolons between them; else all that fit the setting")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--seeds", type=int, default=5, help="of digits and mnist; gpt has one")
    parser.add_argument("--steps", type=int, default=0, help="instead of the setting's")
    parser.add_argument("--data", default="", metavar="FILE", help="MNIST, as npz or a folder of idx files")
    asked = parser.parse_args()
    asked.rules = ["default", *RULES] if asked.rules == "all" else asked.rules.split(",")
    asked.attacks = asked.attacks.split(";") if asked.attacks else []
    if asked.quick:
        asked.seeds, asked.steps = 1, asked.steps or 60
    settings = asked.settings.split(",")
    if unknown := set(settings) - set(SETTINGS):
        raise SystemExit(f"there is no setting {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    rows = []
    for setting in settings:
        attacks = asked.attacks or attacks_of(setting, asked.quick)
        found = gpt_rows(attacks, asked.quick) if setting == "gpt" else accuracy_rows(setting, attacks, asked)
        for row in found:
            rows.append(row)
            print(*row.values(), file=sys.stderr, flush=True)
    sums = summed_up(rows)
    if not asked.json:
        print(table(rows, sums))
        return
    settings = {
        "settings": asked.settings,
        "rules": asked.rules,
        "seed": asked.seed,
        "seeds": asked.seeds,
        "steps": asked.steps,
        "quick": asked.quick,
    }
    print(report("under_attack", settings, {"rows": rows, "summary": sums}, versions("torch")))


if __name__ == "__main__":
    main()
