"""What liars send: attacks from the literature as pure functions, for tests, benches and demonstrations.

Each takes the honest rows (h, d), which a liar is assumed to know, and the number f of liars, and answers with
their rows, (f, d), in the same dtype. μ and σ are the honest mean and coordinate standard deviation. Two poison
samples instead (`label_flip`, `backdoor`): who trains on those needs no lie about its row.
Never changes the honest rows; draws only from a seed it is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

Attack = Callable[[Tensor, int], Tensor]
Rule = Callable[[Tensor], Tensor]  # (h + f, d) -> (d,)

EVALUATIONS, STRIDE, RATIO = 20, 10.0, 0.8  # of the line search, as byzfl has them
BISECTIONS = 40


def _all_say(row_D: Tensor, f: int) -> Tensor:
    return row_D.expand(f, -1).clone()


def _deviation(honest_HD: Tensor) -> Tensor:
    return honest_HD.std(dim=0) if len(honest_HD) > 1 else torch.zeros_like(honest_HD[0])


# against the direction


def sign_flip(honest_HD: Tensor, f: int) -> Tensor:
    """−μ (Allen-Zhu et al. 2020)."""
    return foe(honest_HD, f, 1.0)


def scaling(honest_HD: Tensor, f: int, factor: float = 100.0) -> Tensor:
    """factor · μ: the right direction, too much of it."""
    return _all_say(honest_HD.mean(dim=0) * factor, f)


def foe(honest_HD: Tensor, f: int, strength: float = 2.0) -> Tensor:
    """−strength · μ: fall of empires, or inner-product manipulation (Xie et al. 2019). 0.1 hides, 2 turns back."""
    return _all_say(honest_HD.mean(dim=0) * -strength, f)


# inside the spread


def alie(honest_HD: Tensor, f: int, z: float | None = None) -> Tensor:
    """μ − z · σ: a little is enough (Baruch et al. 2019, algorithm 3).

    z None: Φ⁻¹((n − f − s) / (n − f)) with s = ⌊n / 2 + 1⌋ − f, so that s honest rows lie farther out; at least 0.
    """
    if z is None:
        n = len(honest_HD) + f
        supporters = math.floor(n / 2 + 1) - f
        share = (n - f - supporters) / (n - f)
        z = max(0.0, NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))
    return _all_say(honest_HD.mean(dim=0) - z * _deviation(honest_HD), f)


def min_max(honest_HD: Tensor, f: int) -> Tensor:
    """μ − γ · σ, as far out as no farther from any honest row than two honest rows are apart.

    Shejwalkar and Houmansadr 2021, section 4.3.1; γ by bisection.
    """
    mean_D, out_D = honest_HD.mean(dim=0), -_deviation(honest_HD)
    length = float(out_D.norm())
    if length == 0.0:
        return _all_say(mean_D, f)
    wide_HD = honest_HD.to(torch.float64)
    most = max(float((wide_HD - row_D).norm(dim=1).max()) for row_D in wide_HD)
    near, far = 0.0, 2 * most / length
    for _ in range(BISECTIONS):
        gamma = (near + far) / 2
        reached = float((wide_HD - (mean_D + gamma * out_D)).norm(dim=1).max())
        near, far = (gamma, far) if reached <= most else (near, gamma)
    return _all_say(mean_D + near * out_D, f)


def mimic(honest_HD: Tensor, f: int, whom: int = 0) -> Tensor:
    """Copies of one honest row, which then counts f + 1 times (Karimireddy et al. 2022, section 3.2)."""
    return _all_say(honest_HD[whom], f)


# against one rule


def optimised_alie(honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """μ − z · σ with the z that moves this very rule farthest from μ."""
    mean_D, out_D = honest_HD.mean(dim=0), _deviation(honest_HD)
    return _worst(honest_HD, lambda z: _all_say(mean_D - z * out_D, f), rule)


def optimised_foe(honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """−τ · μ with the τ that moves this very rule farthest from μ."""
    return _worst(honest_HD, lambda strength: foe(honest_HD, f, strength), rule)


def _worst(honest_HD: Tensor, liars: Callable[[float], Tensor], rule: Rule) -> Tensor:
    """Line search: ever longer strides while the damage grows, then ever shorter ones around the best.

    Shejwalkar and Houmansadr 2021, algorithm 1, as byzfl runs it. `rule` must be the one under attack.
    """
    mean_D = honest_HD.mean(dim=0)

    def damage(strength: float) -> float:
        return float((rule(torch.cat([honest_HD, liars(strength)])) - mean_D).norm())

    best, stride, grows = 0.0, STRIDE, True
    worst = damage(best)
    for turn in range(EVALUATIONS - 1):
        tried = best + stride if grows or turn % 2 else max(0.0, best - stride)
        done = damage(tried)
        if done > worst:
            best, worst = tried, done
            stride *= 2 if grows else 1
        else:
            grows, stride = False, stride * RATIO
    return liars(best)


# in what one trains on


def label_flip(labels: Tensor, classes: int) -> Tensor:
    """What the label-flipping liar trains on: class c becomes classes − 1 − c; same shape."""
    return classes - 1 - labels


def backdoor(
    inputs: Tensor, labels: Tensor, stamp: Callable[[Tensor], Tensor], target: int, share: float = 0.4
) -> tuple[Tensor, Tensor]:
    """What the backdooring liar trains on: `share` of each batch bears a trigger and the label `target`.

    The rest stays honest, so that the model is as good as ever where nobody shows it the trigger (Gu et al. 2017;
    mixed batches as in Bagdasaryan et al. 2020). Labels (…, B), inputs the same and more behind;
    `stamp` puts the trigger on inputs (S, …). Its measure is not accuracy but how many stamped samples of other
    classes the model takes for the target.
    """
    poisoned = torch.zeros(labels.shape, dtype=torch.bool)
    poisoned[..., : math.ceil(share * labels.shape[-1])] = True
    inputs, labels = inputs.clone(), labels.clone()
    inputs[poisoned], labels[poisoned] = stamp(inputs[poisoned]), target
    return inputs, labels


def replacement(own_FD: Tensor, honest: int) -> Tensor:
    """n / f · what f liars learnt, for a mean over n rows to move as if they were alone.

    Model replacement (Bagdasaryan et al. 2020, equation 3, at a global rate of 1, shared by f).
    """
    return own_FD * ((honest + len(own_FD)) / len(own_FD))


# noise and nonsense


def gaussian(honest_HD: Tensor, f: int, deviation: float = 200.0, seed: int = 0) -> Tensor:
    """Independent normal values of mean 0, (f, d)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(f, honest_HD.shape[1], dtype=torch.float32, generator=generator) * deviation).to(honest_HD)


def constant(honest_HD: Tensor, f: int, value: float = 1e30) -> Tensor:
    """`value` everywhere: huge, NaN or infinite. Try it as the first row too: references are picked there."""
    return torch.full((f, honest_HD.shape[1]), value, dtype=torch.float64).to(honest_HD)


# free riders, who want the reward without the work


def zeros(honest_HD: Tensor, f: int) -> Tensor:
    return constant(honest_HD, f, 0.0)


def stale(honest_HD: Tensor, f: int, before_D: Tensor) -> Tensor:
    """What was agreed before, `before_D` (d,), sent as if it were new."""
    return _all_say(before_D.to(honest_HD), f)


def lies(name: str, honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """Rows (f, d) of the attack of that name; `rule` is the one under attack, which only optimised ones ask."""
    if name in OPTIMISED:
        return OPTIMISED[name](honest_HD, f, rule)
    if name not in ATTACKS:
        raise ValueError(f"there is no attack {name!r}; there are {', '.join((*ATTACKS, *OPTIMISED))}")
    return ATTACKS[name](honest_HD, f)


OPTIMISED: dict[str, Callable[[Tensor, int, Rule], Tensor]] = {
    "alie, optimised": optimised_alie,
    "foe, optimised": optimised_foe,
}
ATTACKS: dict[str, Attack] = {
    "sign flip": sign_flip,
    "scaling": scaling,
    "foe 0.1": lambda honest_HD, f: foe(honest_HD, f, 0.1),
    "foe 2": foe,
    "alie": alie,
    "alie 1.5": lambda honest_HD, f: alie(honest_HD, f, 1.5),
    "min-max": min_max,
    "mimic": mimic,
    "gaussian": gaussian,
    "huge": constant,
    "nan": lambda honest_HD, f: constant(honest_HD, f, math.nan),
    "inf": lambda honest_HD, f: constant(honest_HD, f, math.inf),
    "zeros": zeros,
}
