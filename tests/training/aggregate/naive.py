"""The rules as their papers write them down: fp64, loops, whole vectors; nothing of the product in them."""

from __future__ import annotations

import itertools

import numpy as np


def mean(x, f):
    return x.mean(axis=0)


def apart2(x):
    return np.array([[float(((a - b) ** 2).sum()) for b in x] for a in x])


def krum_scores(x, f, neighbours=None):
    n, d2 = len(x), apart2(x)
    k = n - f - 2 if neighbours is None else neighbours
    return [sum(sorted(np.delete(d2[i], i))[:k]) for i in range(n)]


def krum(x, f, neighbours=None):
    return x[int(np.argmin(krum_scores(x, f, neighbours)))]


def multi_krum(x, f):
    return x[np.argsort(krum_scores(x, f), kind="stable")[: len(x) - f]].mean(axis=0)


def coordinate_median(x, f):
    return np.median(x, axis=0)


def trimmed_mean(x, f):
    return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)


def around_median(x, keep):
    result = []
    for column in x.T:
        middle = np.median(column)
        result.append(np.mean(sorted(column, key=lambda value: (abs(value - middle), value))[:keep]))
    return np.array(result)


def meamed(x, f):
    return around_median(x, len(x) - f)


def weiszfeld(x, steps, floor):
    z = np.zeros(x.shape[1])
    for _ in range(steps):
        beta = [1 / max(floor, float(np.linalg.norm(row - z))) for row in x]
        z = sum(b * row for b, row in zip(beta, x, strict=True)) / sum(beta)
    return z


def centered_clipping(x, f, steps=3, radius=None, start=None):
    v = np.zeros(x.shape[1]) if start is None else start
    for _ in range(steps):
        away = np.array([np.linalg.norm(row - v) for row in x])
        limit = np.median(away) if radius is None else radius
        v = v + sum((row - v) * min(1.0, limit / a) for row, a in zip(x, away, strict=True) if a > 0) / len(x)
    return v


def mda(x, f):
    d2 = apart2(x)

    def diameter(kept):
        return max((d2[i, j] for i, j in itertools.combinations(kept, 2)), default=0.0)

    return x[list(min(itertools.combinations(range(len(x)), len(x) - f), key=diameter))].mean(axis=0)


def monna(x, f, own):
    return x[np.argsort([float(((row - x[own]) ** 2).sum()) for row in x], kind="stable")[: len(x) - f]].mean(
        axis=0
    )


def bulyan(x, f):
    left, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        remote = np.sqrt(apart2(x[left])).sum(axis=0)  # two rows nearest to each other tie in the last choice
        best = left[
            min(zip(krum_scores(x[left], f, max(1, len(left) - f - 2)), remote, range(len(left)), strict=True))[2]
        ]
        chosen.append(best)
        left.remove(best)
    return around_median(x[chosen], len(chosen) - 2 * f)


def caf(x, f):
    means, variances, _ = filtered(x, f)
    return means[int(np.argmin(variances))]


def blended_caf(x, f):
    means, variances, _ = filtered(x, f)
    says = (min(variances) / np.array(variances)) ** 2
    return (says[:, None] * np.array(means)).sum(axis=0) / says.sum()


def clipped_caf(x, f):
    v = centered_clipping(x, f)
    away = np.array([np.linalg.norm(row - v) for row in x])
    x = np.stack([v + (row - v) * min(1.0, np.median(away) / a) for row, a in zip(x, away, strict=True)])
    means, variances, whole = filtered(x, f)
    calm = [mean for mean, one, of in zip(means, variances, whole, strict=True) if one <= 0.3 * of]
    return (calm or [means[int(np.argmin(variances))]])[0]


def filtered(x, f):
    n, c, means, variances, whole = len(x), np.ones(len(x)), [], [], []
    while c.sum() > n - 2 * f or not means:
        mu = (c[:, None] * x).sum(axis=0) / c.sum()
        away = x - mu
        values, vectors = np.linalg.eigh((c[:, None] * away).T @ away / c.sum())
        means.append(mu)
        variances.append(values[-1])
        whole.append(values.sum())
        tau = (away @ vectors[:, -1]) ** 2
        farthest = tau[c > 0].max()
        if farthest == 0:
            break
        c = c * np.maximum(1 - tau / farthest, 0)
    return means, variances, whole


def nnm(x, f):
    d2 = apart2(x)
    return np.stack([x[np.argsort(d2[i], kind="stable")[: len(x) - f]].mean(axis=0) for i in range(len(x))])


def clip(x, norm):
    return np.stack([row * min(1.0, norm / float(np.linalg.norm(row))) for row in x])


def arc(x, f):
    n = len(x)
    shortened = int(2 * f / n * (n - f))
    return clip(x, sorted(float(np.linalg.norm(row)) for row in x)[n - shortened - 1])
