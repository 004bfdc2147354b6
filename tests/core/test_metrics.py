"""Balanced accuracy, detection quality and the summary of a series."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix

from fednoro.core.metrics import (
    balanced_accuracy,
    best_last,
    confusion,
    detection,
    per_class_recall,
)
from fednoro.core.types import UserError

PAIRS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60)


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_balanced_accuracy_and_confusion_agree_with_scikit_learn(
    pairs: list[tuple[int, int]],
) -> None:
    true, pred = np.array(pairs).T
    with warnings.catch_warnings():
        # scikit-learn warns about predicted classes that are not in y_true
        warnings.simplefilter("ignore")
        expected = balanced_accuracy_score(true, pred)
        table = confusion_matrix(true, pred, labels=range(6))
    assert balanced_accuracy(true, pred, 6) == pytest.approx(expected, rel=1e-12)
    counts = confusion(true, pred, 6)
    assert counts.dtype == np.int64
    np.testing.assert_array_equal(counts, table)


def test_rows_of_the_confusion_are_the_true_classes() -> None:
    assert confusion([0, 0, 1], [1, 1, 2], 3).tolist() == [[0, 2, 0], [0, 0, 1], [0, 0, 0]]


def test_recall_is_nan_for_a_class_without_samples_and_left_out_of_the_mean() -> None:
    recall = per_class_recall(confusion([0, 0, 0, 0, 2], [0, 0, 0, 1, 2], 3))
    assert recall[[0, 2]].tolist() == [0.75, 1.0]
    assert math.isnan(recall[1])
    assert balanced_accuracy([0, 0, 0, 0, 2], [0, 0, 0, 1, 2], 3) == 0.875


def test_small_integer_labels_do_not_overflow() -> None:
    labels = np.arange(200, dtype=np.uint8)
    assert balanced_accuracy(labels, labels, 200) == 1.0


def test_labels_that_cannot_be_compared_are_an_error() -> None:
    with pytest.raises(UserError, match="at least one sample"):
        balanced_accuracy([], [], 3)
    with pytest.raises(UserError, match="same length, got 2 and 1"):
        balanced_accuracy([0, 1], [0], 3)
    with pytest.raises(UserError, match=r"y_true must be in 0\.\.2, got 0\.\.3"):
        balanced_accuracy([0, 3], [0, 1], 3)
    with pytest.raises(UserError, match=r"y_pred must be in 0\.\.2, got -1\.\.0"):
        balanced_accuracy([0, 1], [0, -1], 3)
    with pytest.raises(UserError, match="y_pred must be one integer per sample, got float64"):
        balanced_accuracy([0, 1], [0.2, 0.8], 3)
    with pytest.raises(
        UserError, match=r"y_pred must be one integer per sample, got int64 of shape \(2, 3\)"
    ):
        balanced_accuracy([0, 1], np.zeros((2, 3), dtype=np.int64), 3)


@pytest.mark.parametrize(
    ("flagged", "truth", "expected"),
    [
        ([1, 1, 0, 0], [1, 0, 1, 0], (0.5, 0.5, False)),
        ([1, 1, 1, 1], [1, 0, 0, 0], (1.0, 0.25, False)),
        ([1, 0, 0, 0], [1, 1, 1, 1], (0.25, 1.0, False)),
        ([0, 1, 1, 0], [0, 1, 1, 0], (1.0, 1.0, True)),
        ([0, 0], [0, 0], (1.0, 1.0, True)),  # nothing to find, nothing flagged
        ([1, 0], [0, 0], (1.0, 0.0, False)),
        ([0, 0], [1, 0], (0.0, 1.0, False)),
    ],
)
def test_detection_recall_precision_and_exact_match(
    flagged: list[int], truth: list[int], expected: tuple[float, float, bool]
) -> None:
    assert detection(flagged, truth) == expected


def test_detection_needs_one_verdict_per_client() -> None:
    with pytest.raises(UserError, match="one boolean per client"):
        detection([True], [True, False])


def test_best_last_and_final() -> None:
    values = [0.9, *(k / 100 for k in range(20))]
    result = best_last(values)
    assert result.best == 0.9
    assert result.last == pytest.approx(sum(range(10, 20)) / 1000)
    assert result.final == 0.19


def test_last_is_the_mean_of_all_where_there_are_fewer() -> None:
    assert best_last([0.25, 0.75]) == (0.75, 0.5, 0.75)
    assert best_last([0.25, 0.75, 0.5], last=2) == (0.75, 0.625, 0.5)


@pytest.mark.parametrize(("values", "last"), [([], 10), ([0.5], 0)])
def test_an_empty_series_is_an_error(values: list[float], last: int) -> None:
    with pytest.raises(UserError, match="at least one value"):
        best_last(values, last)
