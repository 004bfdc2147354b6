"""Noisy clients by what the others would say about their images: a rule that no method has yet.

A model that a client has trained knows some of that client's wrong labels. A linear head on the common features that is
learnt from all the others does not, and costs two sums in place of training. With features X_k (N_k×d, and a column of
ones) of the global model and labels Y_k (N_k×C, one-hot),

    A = Σ_k X_kᵀX_k,   B = Σ_k X_kᵀY_k,   W_k = (A − X_kᵀX_k + λD)⁻¹ (B − X_kᵀY_k)

D being 1 for each feature and 0 for the ones, λ = 0.003 of the features' mean variance. The server adds up A and B;
a client that knows both takes its own part away. For each pair of classes it says how well X_k W_k parts those labels,
a_kij, the area under the ROC curve of column i minus column j. Unlike losses, that depends neither on how many images
of each class there are nor on what else there is.

Some pairs are hard for everybody, so a_kij = μ_ij + δ_k, by weighted least squares. Wrong labels part nothing: the
error 2 (1 − mean μ − δ_k) grows with them. The server cuts its logarithms where two groups of one variance are
likeliest, and believes in two if the lower group's mean error is twice the upper one's, and if the upper group explains
something of its labels (`fednoro.explained`). Otherwise all are alike, and the explained shares say whether that is
nobody or everybody.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from fednoro.explained import ALIKE
from fednoro.types import FloatArray, IntArray

RIDGE = 0.003
SCATTER, PAIR = 0.25, 0.03  # variance of an area: of one image, and of a pair in one client
FLOOR = 0.02  # error that nobody is below
TWICE = 2.0  # the error of noisy clients, at least, in that of clean ones
VARIANCE = 1e-3  # that no group is below
SOMETHING = 0.28  # what trusted clients explain at least on average


def moments(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """A client's XᵀX and XᵀY, (d + 1)×(d + 1) and (d + 1)×C, in float64."""
    x = _with_ones(features)
    return x.t() @ x, x.t() @ torch.nn.functional.one_hot(labels, classes).to(x)


def head(a: Tensor, b: Tensor) -> Tensor:
    """The linear head of least squares from such sums, (d + 1)×C."""
    d, mean = len(a) - 1, a[-1, :-1] / a[-1, -1]
    variance = (a.diagonal()[:-1].sum() - a[-1, -1] * (mean @ mean)) / d
    penalty = torch.full_like(a[0], float(RIDGE * variance))
    penalty[-1] = 0
    return torch.linalg.solve(a + torch.diag(penalty), b)  # type: ignore[no-any-return]


def scores(features: Tensor, labels: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the others' head says about a client's images, N×C, where the client has a part in both sums."""
    own = moments(features, labels, b.shape[1])
    return _with_ones(features) @ head(a - own[0], b - own[1])


def areas(outputs: FloatArray, labels: IntArray) -> FloatArray:
    """For each pair of classes i < j: the area under the ROC curve of column i − column j; NaN where one is missing."""
    found = []
    for i, j in itertools.combinations(range(outputs.shape[1]), 2):
        margin = outputs[:, i] - outputs[:, j]
        first, second = margin[labels == i], np.sort(margin[labels == j])
        if not len(first) or not len(second):
            found.append(math.nan)
            continue
        below, reached = (np.searchsorted(second, first, side) for side in ("left", "right"))
        found.append(float((below + reached).mean() / 2 / len(second)))
    return np.array(found)


def errors(parted: FloatArray, counts: FloatArray) -> FloatArray:
    """2 (1 − mean μ − δ_k) of each client: 0 where labels follow the images, 1 where they do not.

    Args:
        parted: K×C(C−1)/2, each client's areas.
        counts: K×C, its labels per class.
    """
    i, j = np.array(list(itertools.combinations(range(counts.shape[1]), 2))).T
    known = ~np.isnan(parted)
    with np.errstate(divide="ignore"):
        size = 1 / (1 / counts[:, i] + 1 / counts[:, j])  # K×pairs
        w = np.where(known, 1 / (SCATTER / size + PAIR), 0.0)
    a, delta, mu = np.where(known, parted, 0.0), np.zeros(len(parted)), np.zeros(parted.shape[1])
    across, along = np.maximum(w.sum(axis=0), 1e-12), np.maximum(w.sum(axis=1), 1e-12)
    for _ in range(50):
        mu = (w * (a - delta[:, None])).sum(axis=0) / across
        delta = (w * (a - mu)).sum(axis=1) / along
    return np.asarray(2 * (1 - np.average(mu, weights=across) - delta))


def judge(error: FloatArray, explained: FloatArray) -> list[bool]:
    """Who is noisy, by the clients' errors and the shares of their labels that they explain."""
    flags = noisy(error)
    if flags is not None and explained[~np.array(flags)].mean() >= SOMETHING:
        return flags
    return [bool(np.median(explained) < ALIKE)] * len(error)


def noisy(error: FloatArray) -> list[bool] | None:
    """The clients with the larger errors; None where there are no two groups. The other has two members at least."""
    u = np.log(np.maximum(error, 0) + FLOOR)
    x, best = np.sort(u), (math.inf, 0)
    for below in range(1, len(x)):
        parts = x[:below], x[below:]
        within = sum(part.var() * len(part) for part in parts) / len(x) + VARIANCE
        mixing = sum(len(part) * math.log(len(part) / len(x)) for part in parts)
        best = min(best, (len(x) * math.log(within) - 2 * mixing, below))
    trusted = best[1]
    if trusted < 2 or np.exp(x[trusted:]).mean() < TWICE * np.exp(x[:trusted]).mean():
        return None
    return [bool(flag) for flag in u > x[trusted - 1 : trusted + 1].mean()]


def _with_ones(features: Tensor) -> Tensor:
    x = features.double()
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
