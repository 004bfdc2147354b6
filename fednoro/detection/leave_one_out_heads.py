"""What the other clients would say about a client's images:
a scale for label noise that its own labels do not bend.

A model that a client has trained knows some of that client's wrong labels. A linear head on the
common features that is learnt from all the others does not, and costs two sums in place of
training. With features X_k of the global model (N_k×d, and a column of ones) or fewer sums of them
with random signs, and labels Y_k (N_k×C, one-hot),

    A = Σ_k X_kᵀX_k,   B = Σ_k X_kᵀY_k,   W_k = (A − X_kᵀX_k + λD)⁻¹ (B − X_kᵀY_k)

D being 1 for each feature and 0 for the ones, λ = 0.003 of the features' variance, summed over
images, mean over features. The server adds up A and B; a client that knows both takes its own part
away. For each pair of classes it says how well X_k W_k parts those labels, a_kij, the area under
the ROC curve of column i minus column j. Unlike losses, that depends neither on how many images of
each class there are nor on what else there is.

Some pairs are hard for everybody, so a_kij = μ_ij + δ_k, by least squares with the weights 1 /
(0.25/m + 0.03), m = 1 / (1/n_i + 1/n_j) from the client's n images of either class, over pairs that
two clients have at least. Wrong labels part nothing:

    error_k = 2 (1 − mean μ − δ_k), at least 0        0: labels follow the images, 1: they do not

and with the share of its labels that a client explains, e_k
(`fednoro.detection.explained`), as a geometric mean

    doubt_k = √((error_k + 0.02) (1 − e_k + 0.02))

Doubts are cut where two groups of their logarithms are likeliest (Gaussians, the upper one wider by
a fifth, because noisy clients differ in how much is wrong; not once clean clients have trained
alone). The upper group is noisy if two are likelier than one (clearly, or a little where it
explains 65% of what the lower one does or less), if its mean error is 0.1 and twice the lower one's
(0.02 added to both), if it explains 80% of what the lower group does or less, and if that is
something, 28% on average; on hard images and after a short warm-up it need not be if the two are
far apart, with four times the error or half of what is explained. Otherwise all clients are alike,
and their explained shares say whether that is nobody or everybody.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fednoro.core.seeds import generator
from fednoro.core.types import FloatArray, IntArray

# Chosen on HAM10000 and digits, and not sensitive: benchmarks/detection.py.
RIDGE = 0.003
SCATTER, PAIR = 0.25, 0.03  # variance of an area: of one image, and of a pair in one client
FLOOR = 0.02  # so that nothing is sure
LEAST, TWICE = 0.1, 2.0  # the error of noisy clients, at least, and in that of clean ones
VARIANCE = 2.5e-4  # of logarithms, that no group is below
SOMETHING = 0.28  # what trusted clients explain at least on average
LESS = 0.8  # what noisy ones explain at most, in that
WIDER = 1.2  # the deviation of noisy clients' logarithms, in that of clean ones'
# WIDER once the model has seen some clean clients alone, whose errors are near 0.
PURGED_WIDER = 1.0
LIKELIER = 3.0  # two groups than one, at least: twice the logarithm of the likelihoods' ratio
# Where noisy ones explain at most the first, in what clean ones do, LIKELIER is the second.
MUCH_LESS, STILL_LIKELIER = 0.65, 1.0
# Share of the posterior's steepness: a client is far from its group more often than Gaussians are.
SURE = 0.35
# LIKELIER and TWICE where clean clients explain less than SOMETHING.
FAR_LIKELIER, FAR = 12.0, 4.0
HALF_LIKELIER, HALF = 8.0, 0.5  # or this, where noisy ones explain half of that or less


# Client


def sketch(features: Tensor, width: int) -> Tensor:
    """N×width in place of N×d:
    sums of all features with signs that are the same everywhere; distances stay about.
    """
    return features.double() @ _signs(features.shape[1], width)


@lru_cache(maxsize=4)
def _signs(features: int, width: int) -> Tensor:
    negative = generator(0, "signs", features).random((features, width)) < 0.5
    return torch.from_numpy(np.where(negative, -1.0, 1.0) / math.sqrt(width))


def moments(features: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """A client's XᵀX and XᵀY, (d + 1)×(d + 1) and (d + 1)×C, in float64."""
    x = _with_ones(features)
    return x.t() @ x, x.t() @ torch.nn.functional.one_hot(labels, classes).to(x)


def head(a: Tensor, b: Tensor) -> Tensor:
    """The linear head of least squares from such sums, (d + 1)×C; zeros where they tell nothing."""
    images = a[-1, -1].clamp(min=1)
    mean = a[-1, :-1] / images
    variance = (a.diagonal()[:-1].sum() - images * (mean @ mean)) / len(mean)
    if not variance > 1e-9 * a.diagonal().max():
        return torch.zeros_like(b)
    penalty = torch.full_like(a[0], float(RIDGE * variance))
    penalty[-1] = 0
    return torch.linalg.solve(a + torch.diag(penalty), b)  # type: ignore[no-any-return]


def outputs(
    features: Tensor, labels: Tensor, a: Tensor, b: Tensor, in_totals: bool = True
) -> Tensor:
    """What the others' head says about a client's images, N×C,
    where the client has a part in both sums or has not.
    """
    if in_totals:
        own = moments(features, labels, b.shape[1])
        a, b = a - own[0], b - own[1]
    return _with_ones(features) @ head(a, b)


def areas(scores: FloatArray, labels: IntArray) -> FloatArray:
    """For each pair of classes i, j: the area under the ROC curve of column i − column j,
    C×C; NaN where there is none.

    It is the same for j and i, and there is none where the client lacks either class.
    """
    classes = scores.shape[1]
    matrix = np.full((classes, classes), math.nan)
    for i, j in itertools.combinations(range(classes), 2):
        margin = scores[:, i] - scores[:, j]
        first, second = margin[labels == i], np.sort(margin[labels == j])
        if len(first) and len(second):
            below, reached = (np.searchsorted(second, first, side) for side in ("left", "right"))
            matrix[i, j] = matrix[j, i] = float((below + reached).mean() / 2 / len(second))
    return matrix


def _with_ones(features: Tensor) -> Tensor:
    x = features.double()
    return torch.cat([x, torch.ones_like(x[:, :1])], dim=1)


# Server


@dataclass(frozen=True)
class Scale:
    """What is hard for everybody."""

    pairs: FloatArray  # μ, one for each pair; NaN where fewer than two clients have both classes
    mean: float  # of μ, by how much is known of each


def pairs_of(pair_areas: FloatArray) -> FloatArray:
    """K×C×C areas as one row of C(C−1)/2 for each client."""
    i, j = np.triu_indices(pair_areas.shape[-1], 1)
    return pair_areas[..., i, j]


def difficulty(pair_areas: FloatArray, counts: FloatArray) -> Scale:
    """μ from K×pairs areas and K×C labels per class."""
    weights, delta = _weights(pair_areas, counts), np.zeros(len(pair_areas))
    # One client alone is nothing to compare with.
    weights = np.where((weights > 0).sum(axis=0) > 1, weights, 0.0)
    across, along = np.maximum(weights.sum(axis=0), 1e-12), np.maximum(weights.sum(axis=1), 1e-12)
    areas_known, mu = np.where(weights > 0, pair_areas, 0.0), np.zeros(pair_areas.shape[1])
    for _ in range(50):
        mu = (weights * (areas_known - delta[:, None])).sum(axis=0) / across
        delta = (weights * (areas_known - mu)).sum(axis=1) / along
    return Scale(np.where(across > 1e-12, mu, math.nan), float(np.average(mu, weights=across)))


def errors(pair_areas: FloatArray, counts: FloatArray, scale: Scale) -> FloatArray:
    """2 (1 − mean μ − δ_k) of each client;
    δ_k = 0 if others have none of its pairs, NaN if it has none.
    """
    everything = _weights(pair_areas, counts)
    weights = np.where(np.isnan(scale.pairs), 0.0, everything)
    apart = np.where(weights > 0, pair_areas - scale.pairs, 0.0)
    along, unknown = weights.sum(axis=1), np.where(everything.any(axis=1), 0.0, math.nan)
    delta = np.divide((weights * apart).sum(axis=1), along, out=unknown, where=along > 0)
    return np.asarray(np.maximum(2 * (1 - scale.mean - delta), 0.0))


def doubts(error: FloatArray, explained: FloatArray) -> FloatArray:
    """The geometric mean of a client's error and of what it leaves unexplained."""
    return np.asarray(np.sqrt((error + FLOOR) * (1 - explained + FLOOR)))


def find_cut(
    doubt: FloatArray, error: FloatArray, explained: FloatArray, wider: float = WIDER
) -> tuple[float, float] | None:
    """Where noisy clients begin and how steep the posterior is there;
    None where there are no two groups.

    The trusted group has two members at least. The noisy clients' logarithms
    scatter `wider` times as much.
    """
    order = np.argsort(doubt, kind="stable")
    x = np.log(doubt[order])
    best = likeliest(x, range(2, len(x)), VARIANCE, wider)
    if best is None:
        return None
    trusted, likelier, within = best
    clean, noisy = order[:trusted], order[trusted:]
    worse = (error[noisy].mean() + FLOOR) / (error[clean].mean() + FLOOR)
    trust, less = explained[clean].mean(), explained[noisy].mean()
    far = (likelier >= FAR_LIKELIER and worse >= FAR) or (
        likelier >= HALF_LIKELIER and less <= HALF * trust
    )
    clear = trust >= SOMETHING or far
    needed = STILL_LIKELIER if less <= MUCH_LESS * trust else LIKELIER
    if (
        likelier < needed
        or worse < TWICE
        or error[noisy].mean() < LEAST
        or less > LESS * trust
        or not clear
    ):
        return None
    cut = math.exp(float(x[trusted - 1 : trusted + 1].mean()))
    return cut, SURE * float(x[trusted:].mean() - x[:trusted].mean()) / within


def likeliest(
    x: FloatArray, cuts: Iterable[int], floor: float, wider: float = 1.0
) -> tuple[int, float, float] | None:
    """The likeliest cut of sorted values:
    how many are below, how much likelier it is than none, the variance left.

    Likelier by twice the logarithm of the likelihoods' ratio, with each group's share of the
    clients in it. The upper group's deviation is `wider` times the lower one's, whose
    variance is not below `floor`.
    """
    n, best = len(x), None
    for below in cuts:
        low, high = x[:below], x[below:]
        variance = float(low.var() * len(low) + high.var() * len(high) / wider**2) / n + floor
        mixing = sum(len(part) * math.log(len(part) / n) for part in (low, high)) - len(
            high
        ) * math.log(wider)
        likelier = n * math.log((float(x.var()) + floor) / variance) + 2 * mixing
        if best is None or likelier > best[1]:
            best = (below, likelier, variance)
    return best


def chance(power: FloatArray) -> FloatArray:
    """1 / (1 + e^power), of any size."""
    return np.asarray(1 / (1 + np.exp(np.clip(power, -700, 700))))


def _weights(pair_areas: FloatArray, counts: FloatArray) -> FloatArray:
    i, j = np.triu_indices(counts.shape[1], 1)
    comparable = ~np.isnan(pair_areas) & (counts[:, i] > 0) & (counts[:, j] > 0)
    size = 1 / (1 / np.maximum(counts[:, i], 1) + 1 / np.maximum(counts[:, j], 1))
    return np.where(comparable, 1 / (SCATTER / size + PAIR), 0.0)
