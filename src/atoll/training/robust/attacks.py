"""Byzantine attacks from the literature as pure functions, for tests, benches and demonstrations.

Each takes the honest rows (h, d), which a Byzantine member is assumed to know, and the number f of Byzantine
members. It returns their rows, (f, d), in the same dtype. μ and σ are the honest mean and coordinate standard
deviation. Two attacks poison samples instead (`label_flip`, `backdoor`): a member that trains on those sends its
row unchanged.
Invariants:
- Honest rows are never changed; randomness comes from a given seed only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

Attack = Callable[[Tensor, int], Tensor]
Rule = Callable[[Tensor], Tensor]  # (h + f, d) -> (d,)

EVALUATIONS, STRIDE, RATIO = 20, 10.0, 0.8  # line search, as in byzfl
BISECTIONS = 40


def _repeated_row(row_D: Tensor, f: int) -> Tensor:
    return row_D.expand(f, -1).clone()


def _deviation(honest_HD: Tensor) -> Tensor:
    return honest_HD.std(dim=0) if len(honest_HD) > 1 else torch.zeros_like(honest_HD[0])


# against the direction


def sign_flip(honest_HD: Tensor, f: int) -> Tensor:
    """−μ (Allen-Zhu et al. 2020)."""
    return foe(honest_HD, f, 1.0)


def scaling(honest_HD: Tensor, f: int, factor: float = 100.0) -> Tensor:
    """factor · μ: the right direction, scaled up."""
    return _repeated_row(honest_HD.mean(dim=0) * factor, f)


def foe(honest_HD: Tensor, f: int, strength: float = 2.0) -> Tensor:
    """−strength · μ: fall of empires, or inner-product manipulation (Xie et al. 2019). 0.1 hides, 2 reverses."""
    return _repeated_row(honest_HD.mean(dim=0) * -strength, f)


# inside the spread


def alie(honest_HD: Tensor, f: int, z: float | None = None) -> Tensor:
    """μ − z · σ: a small deviation suffices (Baruch et al. 2019, algorithm 3).

    z None: Φ⁻¹((n − f − s) / (n − f)) with s = ⌊n / 2 + 1⌋ − f, so that s honest rows lie farther out; at least 0.
    """
    if z is None:
        n = len(honest_HD) + f
        supporters = math.floor(n / 2 + 1) - f
        share = (n - f - supporters) / (n - f)
        z = max(0.0, NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))
    return _repeated_row(honest_HD.mean(dim=0) - z * _deviation(honest_HD), f)


def min_max(honest_HD: Tensor, f: int) -> Tensor:
    """μ − γ · σ, at most as far from any honest row as the largest distance between two honest rows.

    Shejwalkar and Houmansadr 2021, section 4.3.1; γ by bisection.
    """
    mean_D, out_D = honest_HD.mean(dim=0), -_deviation(honest_HD)
    length = float(out_D.norm())
    if length == 0.0:
        return _repeated_row(mean_D, f)
    wide_HD = honest_HD.to(torch.float64)
    most = max(float((wide_HD - row_D).norm(dim=1).max()) for row_D in wide_HD)
    near, far = 0.0, 2 * most / length
    for _ in range(BISECTIONS):
        gamma = (near + far) / 2
        reached = float((wide_HD - (mean_D + gamma * out_D)).norm(dim=1).max())
        near, far = (gamma, far) if reached <= most else (near, gamma)
    return _repeated_row(mean_D + near * out_D, f)


def mimic(honest_HD: Tensor, f: int, whom: int = 0) -> Tensor:
    """Copies of one honest row, which then counts f + 1 times (Karimireddy et al. 2022, section 3.2)."""
    return _repeated_row(honest_HD[whom], f)


# against one rule


def optimized_alie(honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """μ − z · σ with the z that moves this rule farthest from μ."""
    mean_D, out_D = honest_HD.mean(dim=0), _deviation(honest_HD)
    return _worst(honest_HD, lambda z: _repeated_row(mean_D - z * out_D, f), rule)


def optimized_foe(honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """−τ · μ with the τ that moves this rule farthest from μ."""
    return _worst(honest_HD, lambda strength: foe(honest_HD, f, strength), rule)


def _worst(honest_HD: Tensor, liars: Callable[[float], Tensor], rule: Rule) -> Tensor:
    """Line search: growing strides while the damage grows, then shrinking ones around the best.

    Shejwalkar and Houmansadr 2021, algorithm 1, as in byzfl. `rule` must be the rule under attack.
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


# data poisoning


def label_flip(labels: Tensor, classes: int) -> Tensor:
    """Labels for a label-flipping member: class c becomes classes − 1 − c; same shape."""
    return classes - 1 - labels


def backdoor(
    inputs: Tensor, labels: Tensor, stamp: Callable[[Tensor], Tensor], target: int, share: float = 0.4
) -> tuple[Tensor, Tensor]:
    """Training data for a backdoor: `share` of each batch has a trigger and the label `target`.

    The other samples stay honest, so the model keeps its accuracy on inputs without the trigger (Gu et al. 2017;
    mixed batches as in Bagdasaryan et al. 2020). Labels (…, B), inputs the same and more dimensions behind; `stamp`
    puts the trigger on inputs (S, …). Its measure is not accuracy, but the share of stamped samples of other
    classes that the model assigns to the target.
    """
    poisoned = torch.zeros(labels.shape, dtype=torch.bool)
    poisoned[..., : math.ceil(share * labels.shape[-1])] = True
    inputs, labels = inputs.clone(), labels.clone()
    inputs[poisoned], labels[poisoned] = stamp(inputs[poisoned]), target
    return inputs, labels


def replacement(own_FD: Tensor, honest: int) -> Tensor:
    """n / f · the updates of f members, so that a mean over n rows moves as if they were alone.

    Model replacement (Bagdasaryan et al. 2020, equation 3, at a global rate of 1, shared by f).
    """
    return own_FD * ((honest + len(own_FD)) / len(own_FD))


# noise and invalid values


def gaussian(honest_HD: Tensor, f: int, deviation: float = 200.0, seed: int = 0) -> Tensor:
    """Independent normal values of mean 0, (f, d)."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(f, honest_HD.shape[1], dtype=torch.float32, generator=generator) * deviation).to(honest_HD)


def constant(honest_HD: Tensor, f: int, value: float = 1e30) -> Tensor:
    """`value` everywhere: huge, NaN or infinite. Test it as the first row too, a common reference."""
    return torch.full((f, honest_HD.shape[1]), value, dtype=torch.float64).to(honest_HD)


# free riders: members that want the reward without the work


def zeros(honest_HD: Tensor, f: int) -> Tensor:
    return constant(honest_HD, f, 0.0)


def stale(honest_HD: Tensor, f: int, before_D: Tensor) -> Tensor:
    """The previous agreed update `before_D` (d,), sent as a new one."""
    return _repeated_row(before_D.to(honest_HD), f)


def attack_rows(name: str, honest_HD: Tensor, f: int, rule: Rule) -> Tensor:
    """Rows (f, d) of the attack `name`; `rule` is the rule under attack, used by optimized attacks only."""
    if name in OPTIMISED:
        return OPTIMISED[name](honest_HD, f, rule)
    if name not in ATTACKS:
        raise ValueError(f"unknown attack {name!r}; known are {', '.join((*ATTACKS, *OPTIMISED))}")
    return ATTACKS[name](honest_HD, f)


OPTIMISED: dict[str, Callable[[Tensor, int, Rule], Tensor]] = {
    "alie, optimised": optimized_alie,
    "foe, optimised": optimized_foe,
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
