"""Sixteen workers fit one small classifier together, four of them lie: which rule still learns?

    python examples/robust.py

Prints the accuracy on unseen points after 40 rounds, per rule and attack. Every worker sends the momentum of its
own gradients; liars know what all others send. Takes some ten seconds.
"""

import torch
from torch.nn import functional

from atoll.training.robust import aggregate
from atoll.training.robust.attacks import ATTACKS, foe

WORKERS, LIARS, ROUNDS, BATCH = 16, 4, 40, 32
CLASSES, INPUTS = 5, 20
RULES = {
    "mean": {"rule": "mean"},
    "krum": {"rule": "krum", "f": LIARS},
    "trimmed mean": {"rule": "trimmed_mean", "f": LIARS},
    "nnm + trimmed mean": {"rule": "trimmed_mean", "f": LIARS, "pre": ["nnm"]},
    "geometric median": {"rule": "geometric_median", "f": LIARS},
    "centred clipping": {"rule": "centered_clipping", "f": LIARS},
}
LIES = ATTACKS | {"foe 4": lambda honest_HD, f: foe(honest_HD, f, 4.0)}
NAMES = ("none", "sign flip", "foe 4", "alie 1.5", "gaussian", "huge", "nan")


def points(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Five overlapping clouds; the labels are which one a point was drawn from."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + torch.randn(count, INPUTS, generator=generator) * 1.5, labels


def learnt(settings: dict, attack: str) -> float:
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(CLASSES * INPUTS)
    liars = 0 if attack == "none" else LIARS
    momenta = torch.zeros(WORKERS - liars, CLASSES * INPUTS)
    for _ in range(ROUNDS):
        for momentum in momenta:
            inputs, labels = points(BATCH, generator)
            layer = weights.view(CLASSES, INPUTS).clone().requires_grad_()
            functional.cross_entropy(inputs @ layer.T, labels).backward()
            momentum.mul_(0.9).add_(layer.grad.flatten() * 0.1)
        rows = torch.cat([LIES[attack](momenta, liars), momenta]) if liars else momenta
        weights = weights - 0.5 * aggregate(
            settings["rule"], rows, **{k: v for k, v in settings.items() if k != "rule"}
        )
    inputs, labels = points(2000, torch.Generator().manual_seed(2))
    return float(((inputs @ weights.view(CLASSES, INPUTS).T).argmax(dim=1) == labels).float().mean())


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'':20}" + "".join(f"{attack:>11}" for attack in NAMES))
    for name, settings in RULES.items():
        print(f"{name:20}" + "".join(f"{learnt(settings, attack):11.1%}" for attack in NAMES), flush=True)


if __name__ == "__main__":
    main()
