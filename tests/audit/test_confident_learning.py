"""Federated confident learning: the same counts as on pooled data, and what
the coordinator makes of them.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from cleanlab.count import compute_confident_joint, get_confident_thresholds
from cleanlab.rank import get_normalized_margin_for_each_label
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fednoro.audit.confident_learning import (
    NEVER,
    UNSURE,
    calibrated_joint,
    confident_joint,
    looks_like,
    site_counts,
    site_joint,
    thresholds,
)
from fednoro.audit.estimates import noise, wilson
from fednoro.audit.ranking import margins, rank
from fednoro.core.types import UserError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def federated(p: Floats, y: Ints, sites: Ints) -> tuple[Floats, Ints, Ints]:
    """Thresholds, joint and class counts as the coordinator gets them from sites."""
    parts = [np.flatnonzero(sites == k) for k in np.unique(sites)]
    sent = [site_counts(p[i], y[i]) for i in parts]
    level = thresholds([sums for sums, _ in sent], [counts for _, counts in sent])
    joint = confident_joint([site_joint(p[i], y[i], level) for i in parts])
    return level, joint, np.sum([counts for _, counts in sent], axis=0)


@st.composite
def federations(draw: st.DrawFn) -> tuple[Floats, Ints, Ints]:
    """Coarse probabilities, so that ties within a row, between rows
    and with thresholds are common.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    classes, images, count = (
        draw(st.integers(2, 7)),
        draw(st.integers(1, 60)),
        draw(st.integers(1, 6)),
    )
    steps = draw(st.sampled_from([2, 4, 10, 1000]))
    weights = rng.multinomial(
        steps, rng.dirichlet(np.full(classes, draw(st.sampled_from([0.2, 1.0])))), images
    )
    # some classes are held by nobody
    held = rng.choice(classes, draw(st.integers(1, classes)), replace=False)
    return weights / steps, rng.choice(held, images), rng.integers(0, count, images)


@settings(deadline=None, max_examples=150)
@given(federations())
def test_federated_counts_are_those_of_cleanlab_on_the_pooled_data(
    data: tuple[Floats, Ints, Ints],
) -> None:
    p, y, sites = data
    level, joint, counts = federated(p, y, sites)
    np.testing.assert_allclose(level, get_confident_thresholds(y, p), rtol=0, atol=1e-12)
    np.testing.assert_array_equal(joint, compute_confident_joint(y, p, calibrate=False))
    np.testing.assert_array_equal(counts, np.bincount(y, minlength=p.shape[1]))
    # cleanlab rounds its calibrated joint to whole images, equal fractions by
    # chance; ours keeps the fractions.
    assert np.abs(calibrated_joint(joint, counts) - compute_confident_joint(y, p)).max() < 1
    np.testing.assert_allclose(calibrated_joint(joint, counts).sum(axis=1), counts)


@pytest.mark.parametrize(
    ("images", "classes", "sites"), [(5000, 3, 20), (3000, 40, 7), (2000, 10, 1)]
)
def test_federated_counts_are_those_of_cleanlab_at_size(
    images: int, classes: int, sites: int
) -> None:
    rng = np.random.default_rng(images)
    y = rng.integers(0, classes, images)
    p = rng.dirichlet(np.full(classes, 0.3), images)
    p[np.arange(images), y] += 1
    p /= p.sum(axis=1, keepdims=True)
    _, joint, _ = federated(p, y, rng.integers(0, sites, images))
    np.testing.assert_array_equal(joint, compute_confident_joint(y, p, calibrate=False))


@settings(deadline=None, max_examples=100)
@given(federations())
def test_ranking_is_by_cleanlab_margin(data: tuple[Floats, Ints, Ints]) -> None:
    p, y, _ = data
    np.testing.assert_allclose(
        (1 + margins(p, y)) / 2, get_normalized_margin_for_each_label(y, p), atol=1e-12
    )


def test_an_image_looks_like_the_class_whose_threshold_it_reaches() -> None:
    p = np.array([[0.6, 0.4, 0.0], [0.5, 0.3, 0.2], [0.2, 0.1, 0.7], [0.45, 0.55, 0.0]])
    level = np.array([0.55, 0.4, NEVER])
    # Both reached: the most probable. None reached: not sure. A class that
    # nobody holds is never reached.
    assert looks_like(p, level).tolist() == [0, UNSURE, UNSURE, 1]
    assert site_joint(p, np.array([1, 0, 2, 1]), level).tolist() == [
        [0, 0, 0],
        [1, 1, 0],
        [0, 0, 0],
    ]


def test_a_site_with_one_confidence_for_all_reaches_its_own_mean() -> None:
    p = np.tile([0.1, 0.9], (7, 1))
    y = np.ones(7, dtype=np.int64)
    sums, counts = site_counts(p, y)
    assert site_joint(p, y, thresholds([sums], [counts])).tolist() == [[0, 0], [0, 7]]


def test_ranking_puts_the_most_doubtful_first_and_calls_only_confident_ones_different() -> None:
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.45, 0.55], [0.45, 0.55]])
    found = rank(p, np.array([0, 0, 0, 1]), np.array([0.6, 0.6]))
    assert found.order.tolist() == [1, 2, 3, 0]
    assert found.differs.tolist() == [True, False, False, False]
    assert found.suggested.tolist() == [1, 1, 1, 0]
    np.testing.assert_allclose(found.suspicion, [0.8, 0.55, 0.45, 0.1])


@pytest.mark.parametrize(
    ("p", "y"),
    [
        ([[0.5, np.nan]], [0]),  # an image that no model has scored
        ([[0.5, 0.5]], [2]),
        ([[0.5, 0.5]], [0, 1]),
        ([[0.5, 0.5]], [0.5]),
        ([[1.5, -0.5]], [0]),
    ],
)
def test_what_is_no_probability_or_no_label_is_refused(
    p: list[list[float]], y: list[float]
) -> None:
    with pytest.raises(UserError):
        site_counts(np.array(p), np.array(y))


@settings(max_examples=200)
@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_interval_ends_where_the_score_test_rejects(drawn: tuple[int, int]) -> None:
    found, of = drawn
    low, high = wilson(found, of)
    assert 0 <= low <= found / of <= high <= 1
    for end in (low, high):
        if 0 < end < 1:
            score = abs(found / of - end) / math.sqrt(end * (1 - end) / of)
            assert score == pytest.approx(1.959964, rel=1e-6)


def test_a_site_without_a_judged_image_has_no_estimate() -> None:
    assert noise(np.zeros((3, 3), dtype=np.int64)).share is None
    assert wilson(0, 0) == (0.0, 1.0)
