"""How good a classifier and a detection are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fednoro.core.types import FloatArray, IntArray, UserError


class Detection(NamedTuple):
    """Flagged clients against the truly noisy ones."""

    recall: float  # 1 when there is nothing to find
    precision: float  # 1 when nothing is flagged
    exact: bool


class BestLast(NamedTuple):
    """A series over rounds in three numbers."""

    best: float  # the maximum
    last: float  # the mean of the last rounds
    final: float  # the last round


def confusion(y_true: ArrayLike, y_pred: ArrayLike, classes: int) -> IntArray:
    """Counts with the true class in rows and the predicted class in columns, C×C."""
    true, pred = _labels("y_true", y_true, classes), _labels("y_pred", y_pred, classes)
    if len(true) != len(pred):
        raise UserError(
            f"y_true and y_pred must have the same length, got {len(true)} and {len(pred)}"
        )
    return (
        np.bincount(true * classes + pred, minlength=classes**2)
        .reshape(classes, classes)
        .astype(np.int64)
    )


def per_class_recall(confusion: IntArray) -> FloatArray:
    """The share of each class that was recognised; NaN for classes without a sample."""
    counts = confusion.sum(axis=1).astype(np.float64)
    recall: FloatArray = np.divide(
        confusion.diagonal(), counts, out=np.full(len(counts), np.nan), where=counts > 0
    )
    return recall


def balanced_accuracy(y_true: ArrayLike, y_pred: ArrayLike, classes: int) -> float:
    """Mean recall over the classes present in `y_true`, from 0 to 1."""
    counts = confusion(y_true, y_pred, classes)
    if not counts.any():
        raise UserError("balanced accuracy needs at least one sample, got none")
    return float(np.nanmean(per_class_recall(counts)))


def detection(flagged: ArrayLike, truth: ArrayLike) -> Detection:
    """Recall, precision and exact match of flagged clients,
    both given as one boolean per client.
    """
    flags, noisy = np.asarray(flagged, dtype=np.bool_), np.asarray(truth, dtype=np.bool_)
    if flags.ndim != 1 or flags.shape != noisy.shape:
        raise UserError(
            "flagged and truth need one boolean per client, "
            f"got shapes {flags.shape} and {noisy.shape}"
        )
    hits = int((flags & noisy).sum())
    return Detection(
        recall=hits / int(noisy.sum()) if noisy.any() else 1.0,
        precision=hits / int(flags.sum()) if flags.any() else 1.0,
        exact=bool((flags == noisy).all()),
    )


def best_last(values: ArrayLike, last: int = 10) -> BestLast:
    """Best, the mean of the last `last` values (of all where there are fewer),
    and the final one.
    """
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1 or not series.size or last < 1:
        raise UserError(
            "best_last needs at least one value and last >= 1, "
            f"got shape {series.shape} and last = {last}"
        )
    return BestLast(float(series.max()), float(series[-last:].mean()), float(series[-1]))


def _labels(name: str, values: ArrayLike, classes: int) -> IntArray:
    labels = np.asarray(values)
    if labels.ndim != 1 or (labels.size and labels.dtype.kind not in "iub"):
        raise UserError(
            f"{name} must be one integer per sample, got {labels.dtype} of shape {labels.shape}"
        )
    if labels.size and not 0 <= labels.min() <= labels.max() < classes:
        raise UserError(f"{name} must be in 0..{classes - 1}, got {labels.min()}..{labels.max()}")
    return labels.astype(np.int64)
