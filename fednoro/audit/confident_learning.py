"""Confident learning over sites that keep their images, labels and probabilities.

Northcutt, Jiang and Chuang, Confident Learning: Estimating Uncertainty in Dataset Labels, JAIR
2021, with the sums split over sites k. p(x) are probabilities of a model that has not memorised x's
label, ỹ is the label as given.

    site         s_kj = Σ_{x: ỹ=j} p_j(x),   n_kj = |{x: ỹ=j}|            site_counts
    coordinator  t_j = Σ_k s_kj / Σ_k n_kj                                thresholds
    site         J_k[i, j] = |{x: ỹ=i, x looks like j}|                   site_joint
    coordinator  J = Σ_k J_k, with at least 1 on its diagonal             confident_joint
                 Q[i, j] = n_i J[i, j] / Σ_j' J[i, j']                    calibrated

An image looks like j where p_j ≥ t_j; of several such classes the most probable one counts, and
where there is none the image is not counted. Sums over sites are sums over all images, so J is the
confident joint of the pooled data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from fednoro.core.types import FloatArray, IntArray, UserError

# By how much p_j may fall short of t_j:
# a site whose images all have the same p must not miss its own mean.
SLACK = 1e-6
NEVER = 2.0  # the threshold of a class that nobody holds: no probability reaches it
UNSURE = -1  # what an image looks like that reaches no threshold


def site_counts(probabilities: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Site: for each class the sum of p_j over the images labelled j, and how many they are."""
    p, y = check_probabilities(probabilities, labels)
    own = p[np.arange(len(y)), y]
    # Correctly rounded sums do not depend on the images' order.
    sums = np.array([math.fsum(own[y == j]) for j in range(p.shape[1])], dtype=np.float64)
    return sums, np.bincount(y, minlength=p.shape[1]).astype(np.int64)


def thresholds(sums: Sequence[ArrayLike], counts: Sequence[ArrayLike]) -> FloatArray:
    """Coordinator: t_j, the mean self-confidence of each class over all sites."""
    s, n = np.array(sums, dtype=np.float64), np.array(counts, dtype=np.float64)
    if s.ndim != 2 or s.shape != n.shape:
        raise UserError(
            f"sums and counts must both be sites × classes, got shapes {s.shape} and {n.shape}"
        )
    total = n.sum(axis=0)
    means = np.array([math.fsum(column) for column in s.T]) / np.maximum(total, 1)
    # Twice the slack at least, so that p_j = 0 never counts as looking like j.
    level: FloatArray = np.where(total > 0, np.maximum(means, 2 * SLACK), NEVER)
    return level


def looks_like(probabilities: ArrayLike, thresholds: ArrayLike) -> IntArray:
    """Site: the class that each image confidently looks like,
    `UNSURE` where it reaches no threshold.
    """
    p, t = np.asarray(probabilities, dtype=np.float64), np.asarray(thresholds, dtype=np.float64)
    if p.ndim != 2 or t.shape != p.shape[1:]:
        raise UserError(
            f"thresholds must have one entry per class ({p.shape[-1]}), got shape {t.shape}"
        )
    above_threshold = p >= t - SLACK
    several = above_threshold.sum(axis=1) > 1
    # As published: where several classes reach theirs, the most probable of all classes counts.
    guess = np.where(several, p.argmax(axis=1), above_threshold.argmax(axis=1))
    return np.where(above_threshold.any(axis=1), guess, UNSURE).astype(np.int64)


def site_joint(probabilities: ArrayLike, labels: ArrayLike, thresholds: ArrayLike) -> IntArray:
    """Site: how many of its images are labelled i and look like j, C×C."""
    p, y = check_probabilities(probabilities, labels)
    guess, classes = looks_like(p, thresholds), p.shape[1]
    sure = guess != UNSURE
    cells = np.bincount(y[sure] * classes + guess[sure], minlength=classes * classes)
    return cells.reshape(classes, classes).astype(np.int64)


def confident_joint(joints: Sequence[ArrayLike]) -> IntArray:
    """Coordinator: the confident joint of all sites' images together."""
    joint: IntArray = np.sum([np.asarray(j, dtype=np.int64) for j in joints], axis=0)
    np.fill_diagonal(joint, joint.diagonal().clip(min=1))  # so that every row can be calibrated
    return joint


def calibrated_joint(joint: ArrayLike, counts: ArrayLike) -> FloatArray:
    """Coordinator: the joint scaled so that row i sums to the number of images labelled i."""
    j, n = np.asarray(joint, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    rows = j.sum(axis=1)
    scaled_joint: FloatArray = j * np.divide(n, rows, out=np.zeros_like(n), where=rows > 0)[:, None]
    return scaled_joint


def check_probabilities(probabilities: ArrayLike, labels: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Probabilities as float64 and labels as int64, if they are what they should be."""
    p, y = np.asarray(probabilities, dtype=np.float64), np.asarray(labels)
    if p.ndim != 2 or y.shape != p.shape[:1]:
        raise UserError(
            "probabilities must be images × classes with one label each, "
            f"got {p.shape} and {y.shape}"
        )
    if not (np.isfinite(p) & (p >= 0) & (p <= 1 + 1e-6)).all():
        raise UserError(
            "probabilities must be in [0, 1], got some that are not: were all images scored?"
        )
    if len(y) and (y.dtype.kind not in "iu" or not 0 <= y.min() <= y.max() < p.shape[1]):
        raise UserError(
            f"labels must be whole numbers in 0..{p.shape[1] - 1}, got {y.min()}..{y.max()}"
        )
    return p, y.astype(np.int64)
