"""Batched mixtures against scikit-learn, from the same seeds and from the same
responsibilities, and slow loops.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fednoro.core.metrics import detection
from fednoro.core.types import BoolArray, FloatArray, UserError
from fednoro.detection import mixture as module
from fednoro.detection.mixture import (
    Covariance,
    Init,
    Mixtures,
    Rule,
    detection_over_seeds,
    fit_mixtures,
    flagged_sets,
    kmeans,
    starting_points,
)
from fednoro.detection.mixture_detector import NoisyClientDetector

COVARIANCES: tuple[Covariance, ...] = get_args(Covariance)
INITS: tuple[Init, ...] = get_args(Init)
RULES: tuple[Rule, ...] = get_args(Rule)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    with threadpool_limits(1):
        yield


def overlapping(k: int = 20, d: int = 5, seed: int = 0) -> FloatArray:
    """Two groups that overlap, so that seeds disagree."""
    rng = np.random.default_rng(seed)
    losses = rng.gamma(4.0, 0.1, (k, d)) * np.where(
        np.arange(k)[:, None] < 0.4 * k, rng.uniform(1, 2.5, d), 1.0
    )
    return losses / losses.max(axis=0)


def learn(points: FloatArray, covariance: Covariance, **options: Any) -> GaussianMixture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return GaussianMixture(
            options.pop("components", 2), covariance_type=covariance, **options
        ).fit(points)


def learn_from(
    points: FloatArray, start: FloatArray, covariance: Covariance, **options: Any
) -> GaussianMixture:
    """Scikit-learn from given responsibilities: it gets them where it would
    put those of its own k-means.
    """

    class Started(GaussianMixture):  # type: ignore[misc]
        def _initialize_parameters(self, x: FloatArray, *_args: Any, **_kwargs: Any) -> None:
            self._initialize(x, start)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return Started(start.shape[1], covariance_type=covariance, **options).fit(points)


def assert_same(
    ours: Mixtures, s: int, theirs: GaussianMixture, points: FloatArray, tol: float = 1e-8
) -> None:
    assert (
        ours.iterations[s] == theirs.n_iter_
        and ours.converged[s] == theirs.converged_
        and not ours.broken[s]
    )
    for mine, other in (
        (ours.weights[s], theirs.weights_),
        (ours.means[s], theirs.means_),
        (ours.covariances[s], theirs.covariances_),
        (ours.lower_bound[s], theirs.lower_bound_),
        (ours.posterior[s], theirs.predict_proba(points)),
    ):
        np.testing.assert_allclose(mine, other, rtol=tol, atol=tol)
    np.testing.assert_array_equal(ours.labels[s], theirs.predict(points))


# The same seeds


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize(
    ("k", "d", "components"), [(20, 8, 2), (20, 5, 2), (15, 1, 2), (30, 2, 3), (25, 3, 4)]
)
def test_a_seed_gives_scikit_learns_fit(
    covariance: Covariance, init: Init, k: int, d: int, components: int
) -> None:
    points, seeds = overlapping(k, d), range(12)
    ours = fit_mixtures(points, starting_points(points, seeds, init, components), covariance)
    for seed in seeds:
        theirs = learn(
            points, covariance, random_state=seed, init_params=init, components=components
        )
        assert_same(ours, seed, theirs, points)


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("rule", RULES)
def test_a_seed_flags_the_clients_that_scikit_learns_fit_flags(
    covariance: Covariance, init: Init, rule: Rule
) -> None:
    points, seeds = overlapping(seed=4), [0, 17, 3, 2**32 - 1, 8, 17]
    flags = flagged_sets(points, seeds, covariance, init, rule)
    for row, seed in zip(flags, seeds, strict=True):
        theirs = learn(points, covariance, random_state=seed, init_params=init)
        sizes = (
            np.linalg.norm(theirs.means_, axis=1) if rule == "paper" else theirs.means_.sum(axis=1)
        )
        np.testing.assert_array_equal(row, theirs.predict(points) == sizes.argmax())


def test_flagged_sets_come_as_often_as_scikit_learns() -> None:
    """Over other seeds than theirs: the draws are from the same distribution, not only
    equal by chance of the seed.
    """
    points = overlapping(seed=11)
    flags = flagged_sets(points, range(1000, 5000))
    theirs = [learn(points, "full", random_state=seed) for seed in range(250)]
    theirs_flags = [
        fit.predict(points) == np.linalg.norm(fit.means_, axis=1).argmax() for fit in theirs
    ]
    sets, which = np.unique(np.concatenate([flags, theirs_flags]), axis=0, return_inverse=True)
    which = which.reshape(-1)
    ours_often, theirs_often = (
        np.bincount(part, minlength=len(sets)) for part in (which[:4000], which[4000:])
    )
    assert len(sets) > 1, "every seed agrees: nothing compared"
    gap = np.abs(ours_often / 4000 - theirs_often / 250)
    assert (gap < 4 * np.sqrt(0.25 / 250)).all()


def test_the_detector_decides_the_same() -> None:
    losses = overlapping(seed=2)
    for rule in RULES:
        flags = flagged_sets(losses, 9, rule=rule)
        if rule == "paper":
            for seed in range(9):
                detector = NoisyClientDetector(seed=seed, normalise=False).fit(losses)
                np.testing.assert_array_equal(flags[seed], detector.noisy_)
        else:
            voted = NoisyClientDetector("reference", normalise=False).fit(losses).noisy_
            sets = flags.tolist()
            assert voted.tolist() == max(sets, key=sets.count)


# k-means


@pytest.mark.parametrize("components", [1, 2, 3])
@pytest.mark.parametrize("d", [1, 4])
def test_a_seed_gives_scikit_learns_clusters(components: int, d: int) -> None:
    points = overlapping(24, d, seed=6)
    for seed, labels in enumerate(kmeans(points, range(40), components)):
        theirs = KMeans(components, n_init=1, random_state=seed).fit(points)
        np.testing.assert_array_equal(labels, theirs.labels_)


@pytest.mark.parametrize("components", [2, 5, 8])
def test_lloyd_leads_where_scikit_learn_goes(components: int) -> None:
    """From given centres. For many clusters two candidates are often
    equally good, and rounding decides.
    """
    rng = np.random.default_rng(components)
    points = rng.normal(size=(30, 3))
    points -= points.mean(axis=0)
    # not among the points: some clusters are empty
    centres = rng.normal(scale=2, size=(40, components, 3))
    empty = [components > len(set(labels)) for labels in module._nearest(points, centres).tolist()]
    assert any(empty)
    for start, labels in zip(centres.copy(), module._lloyd(points, centres), strict=True):
        theirs = KMeans(components, init=start, n_init=1).fit(points).labels_
        # which empty cluster takes which of the farthest points is a matter of names
        np.testing.assert_array_equal(labels[:, None] == labels, theirs[:, None] == theirs)


@pytest.mark.parametrize("components", [2, 3])
def test_clusters_of_identical_points(components: int) -> None:
    labels = kmeans(np.ones((6, 2)), range(3), components)
    assert labels.shape == (3, 6) and (labels == 0).all()


def test_an_empty_cluster_takes_the_farthest_point() -> None:
    points = np.array([[0.0], [1.0], [2.0], [10.0]])
    moved = module._centroids(points, np.array([[0, 0, 0, 0]]), np.array([[[0.0], [50.0]]]))
    assert moved.tolist() == [[[1], [10]]]
    labels = module._lloyd(points, np.array([[[0.0], [50.0]]]))
    assert labels.tolist() == [[0, 0, 0, 1]]


# The same responsibilities


@settings(max_examples=40, deadline=None)
@given(
    st.integers(3, 30),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from(COVARIANCES),
    st.integers(0, 10**6),
    st.sampled_from([1e-2, 1.0, 3.0]),
    st.floats(-2, 2),
)
def test_a_start_leads_where_scikit_learn_goes(
    k: int, d: int, components: int, covariance: Covariance, seed: int, scale: float, offset: float
) -> None:
    rng = np.random.default_rng(seed)
    points = scale * (rng.normal(size=(k, d)) + offset)
    start = rng.dirichlet(np.full(components, 0.5), (2, k))
    ours = fit_mixtures(points, start, covariance)
    for s in range(2):
        theirs = learn_from(points, start[s], covariance)
        # a covariance of a few points is reg·I and rounding: this magnifies
        # rounding by up to x² / reg
        assert_same(ours, s, theirs, points, tol=1e-6)


def slow_fit(
    points: FloatArray, resp: FloatArray, iterations: int, reg: float = 1e-6
) -> tuple[float, FloatArray]:
    """Full covariance in plain loops; the last E-step's mean log-likelihood and
    the responsibilities after it.
    """
    (k, d), m = points.shape, resp.shape[1]
    bound = -math.inf
    for _ in range(iterations + 1):
        density = np.empty((k, m))
        for c in range(m):
            n = sum(resp[i, c] for i in range(k))
            mu = sum(resp[i, c] * points[i] for i in range(k)) / n
            sigma = sum(
                resp[i, c] * np.outer(points[i] - mu, points[i] - mu) for i in range(k)
            ) / n + reg * np.eye(d)
            for i in range(k):
                gap = points[i] - mu
                height = math.exp(-0.5 * gap @ np.linalg.inv(sigma) @ gap)
                density[i, c] = (
                    n / k * height / math.sqrt((2 * math.pi) ** d * np.linalg.det(sigma))
                )
        before, bound = bound, float(np.mean(np.log(density.sum(axis=1))))
        resp = density / density.sum(axis=1, keepdims=True)
    return before, resp


@pytest.mark.parametrize("d", [1, 3])
def test_the_equations_in_plain_loops(d: int) -> None:
    points = overlapping(18, d)
    start = starting_points(points, [5], "random")
    ours = fit_mixtures(points, start)
    bound, posterior = slow_fit(points, start[0], int(ours.iterations[0]))
    assert ours.lower_bound[0] == pytest.approx(bound, rel=1e-9)
    np.testing.assert_allclose(ours.posterior[0], posterior, atol=1e-7)


def test_options_are_scikit_learns() -> None:
    points = overlapping()
    start = starting_points(points, range(4), "random")
    for options in ({"tol": 1e-8}, {"max_iter": 3}, {"max_iter": 1}, {"reg": 1e-2}):
        ours = fit_mixtures(points, start, "full", **options)  # type: ignore[arg-type]
        named = {"reg_covar" if key == "reg" else key: value for key, value in options.items()}
        for s in range(4):
            assert_same(ours, s, learn_from(points, start[s], "full", **named), points)


# Batches


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_fit_does_not_depend_on_its_neighbours(
    covariance: Covariance, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = overlapping()
    start = starting_points(points, range(30), "random")
    together = fit_mixtures(points, start, covariance)
    assert len(set(together.iterations.tolist())) > 1, "all end at once: nothing shown"
    monkeypatch.setattr(module, "_WORKING_SET", 1)
    alone = fit_mixtures(points, start, covariance)
    np.testing.assert_array_equal(alone.iterations, together.iterations)
    for name in ("weights", "means", "covariances", "posterior", "lower_bound"):
        np.testing.assert_allclose(
            getattr(alone, name), getattr(together, name), rtol=1e-10, atol=1e-10
        )
    np.testing.assert_array_equal(
        kmeans(points, range(30)), np.concatenate([kmeans(points, [s]) for s in range(30)])
    )


def test_seeds_are_numbers_or_a_list_in_any_order() -> None:
    points = overlapping()
    flags = flagged_sets(points, 30, "diag", "random")
    assert flags.shape == (30, 20) and flags.dtype == np.bool_
    np.testing.assert_array_equal(flagged_sets(points, [29, 4], "diag", "random"), flags[[29, 4]])
    np.testing.assert_array_equal(flagged_sets(points, np.arange(5), "diag", "random"), flags[:5])  # type: ignore[arg-type]
    assert flagged_sets(points, 0).shape == flagged_sets(points, []).shape == (0, 20)


# Where there is little to fit


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_a_component_that_dies_goes_where_scikit_learns_goes(covariance: Covariance) -> None:
    points = overlapping(10, 2)
    for share in (0.0, 1e-18, 1e-15, 1e-12):
        start = np.repeat([[[1 - share, share]]], 10, axis=1)
        assert_same(
            fit_mixtures(points, start, covariance),
            0,
            learn_from(points, start[0], covariance),
            points,
            1e-6,
        )
    dead = fit_mixtures(points, np.repeat([[[1.0, 0.0]]], 10, axis=1), covariance)
    assert dead.converged.all() and dead.weights[0, 1] < 1e-10 and (dead.labels == 0).all()


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("init", INITS)
def test_identical_points(covariance: Covariance, init: Init) -> None:
    points = np.full((6, 3), 0.25)
    fits = fit_mixtures(points, starting_points(points, range(4), init), covariance)
    assert not fits.broken.any() and fits.converged.all() and np.isfinite(fits.posterior).all()
    np.testing.assert_allclose(fits.means[:, 0], 0.25)
    assert not flagged_sets(points, 4, covariance, init).any()


def test_fewer_points_than_components() -> None:
    with pytest.raises(UserError, match="mixture of 3 needs as many points, got 2"):
        fit_mixtures(np.zeros((2, 1)), np.full((1, 2, 3), 1 / 3))
    with pytest.raises(UserError, match="mixture of 2 needs as many points, got 1"):
        starting_points(np.zeros((1, 1)), [0])
    assert flagged_sets([[3.0]], 3).tolist() == [[False]] * 3


@pytest.mark.parametrize("covariance", COVARIANCES)
def test_two_clients_are_told_apart(covariance: Covariance) -> None:
    assert flagged_sets([[0.0, 0.1], [1.0, 0.9]], 5, covariance).tolist() == [[False, True]] * 5


def test_a_broken_fit_is_named_flags_nobody_and_leaves_the_others_alone() -> None:
    rng = np.random.default_rng(0)
    points = 1e9 * (
        rng.normal(size=20) + np.repeat([[0.0], [3.0]], 20, axis=0) * rng.normal(size=20)
    )
    points[20:] += 1e9 * rng.normal(
        size=(20, 20)
    )  # the first 20 are one point: its variances are rounding, some below 0
    start = np.array([np.eye(2)[np.repeat([0, 1], 20)], np.full((40, 2), 0.5)])
    fits = fit_mixtures(points, start, "diag")
    with pytest.raises(ValueError, match="ill-defined"):
        learn_from(points, start[0], "diag")
    assert fits.broken.tolist() == [True, False] and not fits.converged[0]
    assert all(
        np.isnan(array[0]).all()
        for array in (fits.posterior, fits.means, fits.weights, fits.covariances)
    )
    assert_same(fits, 1, learn_from(points, start[1], "diag"), points)
    assert not flagged_sets(points, 3, "diag").any()


def test_a_covariance_that_is_not_positive_definite_breaks_a_fit() -> None:
    rng = np.random.default_rng(0)
    points = 1e9 * rng.normal(size=(10, 12))  # fewer than dimensions
    start = starting_points(points, range(3), "random")
    with pytest.raises(ValueError, match="ill-defined"):
        learn_from(points, start[0], "full")
    assert fit_mixtures(points, start, "full").broken.all()
    assert not fit_mixtures(points / 1e9, start, "full").broken.any()


def test_clients_that_cannot_be_scored_are_not_trusted() -> None:
    points = overlapping(12, 3)
    spoilt = np.insert(points, 4, [[np.nan, 1.0, np.inf]], axis=0)
    spoilt = np.insert(spoilt, 0, [[0.0, 1e200, 0.0]], axis=0)
    flags = flagged_sets(spoilt, 6)
    assert flags[:, [0, 5]].all()
    np.testing.assert_array_equal(np.delete(flags, [0, 5], axis=1), flagged_sets(points, 6))
    assert flagged_sets([[np.nan], [np.inf]], 2).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: flagged_sets([1.0, 2.0]), "features must be K×D"),
        (lambda: flagged_sets(np.zeros((0, 3))), "features must be K×D"),
        (
            lambda: flagged_sets([[0.0], [1.0]], 2, "round"),
            "covariance must be one of full, diag, spherical",
        ),
        (
            lambda: flagged_sets([[0.0], [1.0]], 2, init="best"),
            "init must be one of kmeans, random",
        ),
        (
            lambda: flagged_sets([[0.0], [1.0]], 2, rule="best"),
            "rule must be one of paper, reference",
        ),
        (lambda: fit_mixtures([[0.0], [1.0]], np.ones((2, 2))), "responsibilities must be S×2×M"),
        (
            lambda: fit_mixtures([[0.0], [1.0]], np.ones((1, 3, 2))),
            "responsibilities must be S×2×M",
        ),
        (lambda: fit_mixtures([[0.0], [np.inf]], np.ones((1, 2, 1))), "points must be finite"),
        (lambda: fit_mixtures([0.0, 1.0], np.ones((1, 2, 1))), "points must be K×D"),
        (
            lambda: fit_mixtures([[0.0], [1.0]], np.ones((1, 2, 1)), max_iter=0),
            "max_iter must be >= 1",
        ),
        (lambda: detection_over_seeds([True, False], [True, False]), "flags must be S×K"),
        (lambda: detection_over_seeds([[True, False]], [True]), "flags must be S×K"),
    ],
)
def test_mistakes_are_named(call: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        call()


# Detection over seeds


def test_detection_over_seeds_by_hand() -> None:
    truth = [True, True, False, False]
    flags = [
        [True, True, False, False],
        [True, False, False, False],
        [True, True, True, True],
        [False] * 4,
    ]
    found = detection_over_seeds(flags, truth)
    assert found == (
        pytest.approx((1 + 0.5 + 1 + 0) / 4),
        pytest.approx((1 + 1 + 0.5 + 1) / 4),
        0.25,
    )


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6))
def test_detection_over_seeds_is_the_mean_of_single_detections(s: int, k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    flags: BoolArray = rng.random((s, k)) < 0.5
    truth: BoolArray = rng.random(k) < 0.4
    singles = [detection(row, truth) for row in flags]
    np.testing.assert_allclose(detection_over_seeds(flags, truth), np.mean(singles, axis=0))


# The benchmark


def test_the_benchmark_finds_agreement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    import_module("benchmarks.mixture").main(["--fits", "40", "--loop", "4", "--repeat", "1"])
    rows = [
        line.strip("|").split("|")
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("| 20×")
    ]
    assert len(rows) == 12
    for row in rows:
        assert float(row[8]) < 1e-8 and row[9].strip() == "100.0 %"
