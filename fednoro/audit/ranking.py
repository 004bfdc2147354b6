"""A site's own images in the order in which they deserve a second look.

The margin is p(given label) − max p(any other class), from 1 (the model is certain of the label)
to −1 (it is certain of another class). Suspicion is (1 − margin) / 2, from 0 to 1. The
thresholds tell which images look like another class with confidence; those alone are findings,
the others are merely ranked.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from fednoro.audit.confident_learning import UNSURE, check_probabilities, looks_like
from fednoro.core.types import BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Ranking:
    """One site's images, most suspicious first; every array is in that order."""

    order: IntArray  # positions within the site's images
    labels: IntArray
    suggested: IntArray  # the label itself where nothing else is suggested
    suspicion: FloatArray
    p_given: FloatArray
    p_suggested: FloatArray
    sure: BoolArray  # some threshold was reached

    @property
    def differs(self) -> BoolArray:
        """Images that look like another class than their label, with confidence."""
        different: BoolArray = self.sure & (self.suggested != self.labels)
        return different


def rank(probabilities: ArrayLike, labels: ArrayLike, thresholds: ArrayLike) -> Ranking:
    """Ranks one site's images; of equal ones the first comes first."""
    p, y = check_probabilities(probabilities, labels)
    rows = np.arange(len(y))
    suspicion = (1 - margins(p, y)) / 2
    guess = looks_like(p, thresholds)
    # Where no threshold is reached the most probable class is worth showing,
    # but it counts as no finding.
    suggested = np.where(guess == UNSURE, p.argmax(axis=1) if p.size else y, guess)
    order = np.argsort(-suspicion, kind="stable")
    return Ranking(
        order=order,
        labels=y[order],
        suggested=suggested[order],
        suspicion=suspicion[order],
        p_given=p[rows, y][order],
        p_suggested=p[rows, suggested][order],
        sure=(guess != UNSURE)[order],
    )


def margins(probabilities: FloatArray, labels: IntArray) -> FloatArray:
    """p(label) − max p(another class), N."""
    if probabilities.shape[1] < 2:
        return np.ones(len(labels))
    rows = np.arange(len(labels))
    others = probabilities.copy()
    others[rows, labels] = -np.inf
    margin: FloatArray = probabilities[rows, labels] - others.max(axis=1)
    return margin
