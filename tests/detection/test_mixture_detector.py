"""Which clients the detector flags, and what it does where there is nothing sensible to split."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_limits

from fednoro.core.types import BoolArray, FedNoRoWarning, FloatArray, UserError
from fednoro.detection.mixture_detector import (
    Behaviour,
    Covariance,
    NoisyClientDetector,
    fill_missing,
    min_max,
)

BEHAVIOURS: tuple[Behaviour, ...] = get_args(Behaviour)
COVARIANCES: tuple[Covariance, ...] = get_args(Covariance)
NAN, INF = np.nan, np.inf


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """For the mixtures that the tests fit themselves: threads are slow on tables of this size."""
    with threadpool_limits(1):
        yield


def federation(
    seed: int = 0, k: int = 20, c: int = 5, noisy: int = 8, missing: float = 0.1
) -> tuple[FloatArray, BoolArray]:
    """Clearly separated losses with missing classes, and the truth; every client holds class 0."""
    rng = np.random.default_rng(seed)
    truth = np.zeros(k, dtype=np.bool_)
    truth[rng.choice(k, noisy, replace=False)] = True
    losses = np.where(truth[:, None], 2.0, 0.4) * rng.uniform(0.5, 2, c) + rng.normal(
        scale=0.04, size=(k, c)
    )
    gone = rng.random((k, c)) < missing
    gone[:, 0] = False
    losses[gone] = NAN
    return losses, truth


def fit(losses: object, counts: object = None, **options: object) -> NoisyClientDetector:
    return NoisyClientDetector(**options).fit(losses, counts)  # type: ignore[arg-type]


def fit_silently(losses: object, counts: object = None, **options: object) -> NoisyClientDetector:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fit(losses, counts, **options)


def test_fill_missing_takes_the_smallest_loss_of_the_class_and_zero_if_nobody_holds_it() -> None:
    losses = np.array([[1.0, NAN, NAN], [NAN, 5.0, NAN], [3.0, 4.0, NAN]])
    before = losses.copy()
    assert fill_missing(losses).tolist() == [[1, 4, 0], [1, 5, 0], [3, 4, 0]]
    np.testing.assert_array_equal(losses, before)


def test_min_max_scales_each_class_and_sends_a_constant_one_to_zero() -> None:
    losses = np.array([[1.0, 7.0, -2.0], [2.0, 7.0, 0.0], [5.0, 7.0, 2.0]])
    assert min_max(losses).tolist() == [[0, 0, 0], [0.25, 0, 0.5], [1, 0, 1]]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_separated_federation_is_recovered_exactly(
    behaviour: Behaviour, covariance: Covariance, normalise: bool
) -> None:
    for seed in range(3):
        losses, truth = federation(seed, missing=0.0)
        detector = fit_silently(
            losses, behaviour=behaviour, covariance=covariance, normalise=normalise, seed=seed
        )
        assert detector.noisy_.tolist() == truth.tolist()
        assert detector.scored_.all()
        assert detector.reason_ == "8 of 20 clients flagged by a two-component mixture"


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_few_missing_classes_do_not_hide_the_split(behaviour: Behaviour) -> None:
    losses, truth = federation(missing=0.05)
    assert np.isnan(losses).any()
    assert (
        fit_silently(losses, behaviour=behaviour, covariance="spherical").noisy_.tolist()
        == truth.tolist()
    )


def test_the_steps_are_kept() -> None:
    losses, _ = federation()
    detector = fit(losses)
    np.testing.assert_array_equal(detector.filled_, fill_missing(losses))
    np.testing.assert_array_equal(detector.normalised_, min_max(fill_missing(losses)))
    np.testing.assert_array_equal(fit(losses, normalise=False).normalised_, fill_missing(losses))


@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("seed", [0, 7])
def test_the_paper_flags_the_component_whose_mean_has_the_larger_norm(
    covariance: Covariance, seed: int
) -> None:
    # no clear split: seeds and rules matter
    points = min_max(np.random.default_rng(5).random((20, 4)))
    mixture = GaussianMixture(2, covariance_type=covariance, random_state=seed).fit(points)
    noisy = int(np.argmax([np.sqrt(sum(v**2 for v in mean)) for mean in mixture.means_]))
    detector = fit(points, covariance=covariance, seed=seed)
    np.testing.assert_allclose(
        detector.posterior_, mixture.predict_proba(points)[:, noisy], rtol=1e-9
    )
    np.testing.assert_array_equal(detector.noisy_, mixture.predict(points) == noisy)


def test_the_reference_takes_the_most_frequent_set_of_nine_seeds_and_the_larger_sum() -> None:
    split = 0
    for data_seed in range(6):
        points = min_max(np.random.default_rng(data_seed).random((12, 3)))
        sets, posteriors = [], []
        for seed in range(9):
            mixture = GaussianMixture(2, random_state=seed).fit(points)
            sums = [sum(mean) for mean in mixture.means_]
            noisy = sums.index(max(sums))
            sets.append(frozenset(np.flatnonzero(mixture.predict(points) == noisy).tolist()))
            posteriors.append(mixture.predict_proba(points)[:, noisy])
        often = max(sets.count(s) for s in sets)
        winner = next(i for i, s in enumerate(sets) if sets.count(s) == often)
        split += len(set(sets)) > 1
        detector = fit(points, behaviour="reference", seed=123)
        assert frozenset(np.flatnonzero(detector.noisy_).tolist()) == sets[winner]
        np.testing.assert_allclose(detector.posterior_, posteriors[winner], rtol=1e-9)
    assert split  # the vote had something to decide


def test_paper_and_reference_can_disagree_on_the_noisy_component() -> None:
    rng = np.random.default_rng(0)
    low = np.array([0.9, 0.0, 0.0]) + rng.normal(scale=0.01, size=(6, 3))  # norm .9, sum .9
    flat = np.array([0.4, 0.4, 0.4]) + rng.normal(scale=0.01, size=(6, 3))  # norm .7, sum 1.2
    losses = np.vstack([low, flat])
    assert fit(losses, normalise=False).noisy_.tolist() == [True] * 6 + [False] * 6
    assert (
        fit(losses, normalise=False, behaviour="reference").noisy_.tolist()
        == [False] * 6 + [True] * 6
    )


def test_a_class_with_count_zero_is_missing_whatever_its_loss() -> None:
    losses, _ = federation()
    counts = np.where(np.isnan(losses), 0, 10)
    lying = np.where(
        np.isnan(losses), np.random.default_rng(0).choice([0.0, INF, 99.0], losses.shape), losses
    )
    detector, told = fit_silently(losses), fit_silently(lying, counts)
    np.testing.assert_array_equal(told.filled_, detector.filled_)
    np.testing.assert_array_equal(told.posterior_, detector.posterior_)


def test_the_input_is_left_as_it_was() -> None:
    losses, _ = federation()
    before = losses.copy()
    fit(losses, np.zeros_like(losses) + (np.arange(5) > 0))
    np.testing.assert_array_equal(losses, before)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("covariance", COVARIANCES)
@pytest.mark.parametrize("normalise", [True, False])
def test_predict_repeats_the_fit_and_survives_json(
    behaviour: Behaviour, covariance: Covariance, normalise: bool
) -> None:
    losses, _ = federation(3, missing=0.0)
    losses[2, 3] = NAN
    losses[5, 1] = INF
    detector = fit(losses, behaviour=behaviour, covariance=covariance, normalise=normalise, seed=4)
    restored = NoisyClientDetector.from_dict(
        json.loads(json.dumps(detector.to_dict(), allow_nan=False))
    )
    later = np.vstack([federation(9)[0], losses])
    for one in (detector, restored):
        noisy, posterior = one.predict(losses)
        np.testing.assert_array_equal(noisy, detector.noisy_)
        np.testing.assert_allclose(posterior, detector.posterior_, rtol=1e-12)
        np.testing.assert_array_equal(one.predict(later)[1], detector.predict(later)[1])
    for name in ("noisy_", "posterior_", "scored_", "filled_", "normalised_", "low_", "high_"):
        np.testing.assert_array_equal(getattr(restored, name), getattr(detector, name))
        assert getattr(restored, name).dtype == getattr(detector, name).dtype
    assert restored.reason_ == detector.reason_
    assert restored.to_dict() == detector.to_dict()


def test_later_clients_are_filled_and_scaled_as_in_the_fit_without_clipping() -> None:
    losses, _ = federation(missing=0.0)
    detector = fit(losses, covariance="diag")
    late = losses.max(axis=0) * 2
    late[1] = NAN
    scaled = (late - losses.min(axis=0)) / (losses.max(axis=0) - losses.min(axis=0))
    scaled[1] = 0.0
    noisy, posterior = detector.predict(late[None])
    assert (
        posterior[0] == detector.mixture_.predict_proba(scaled[None])[0, detector.noisy_component_]
    )
    assert noisy.tolist() == [True]
    assert detector.predict(losses.min(axis=0)[None])[0].tolist() == [False]
    assert (scaled > 1).any()


def test_a_later_client_that_cannot_be_scored_is_not_trusted() -> None:
    losses, _ = federation(missing=0.0)
    detector = fit(losses)
    counts = np.ones((3, 5))
    with pytest.warns(FedNoRoWarning, match="not trusted: 0, 2"):
        noisy, posterior = detector.predict([[INF] * 5, losses[0], [NAN, 1, 1, 1, 1]], counts)
    assert noisy[[0, 2]].all()
    assert np.isnan(posterior[[0, 2]]).all()
    assert posterior[1] == pytest.approx(detector.posterior_[0], rel=1e-12)


# its scaled losses overflow, or their squares do
@pytest.mark.parametrize("scale", [1e-200, 1e-100])
def test_a_later_client_beyond_all_scales_is_not_trusted(scale: float) -> None:
    noisy, posterior = fit(federation(missing=0.0)[0] * scale).predict([[1e149] * 5])
    assert noisy.tolist() == [True]
    assert np.isnan(posterior).all()


def test_predict_needs_a_fit_and_the_same_classes() -> None:
    with pytest.raises(UserError, match="call fit first"):
        NoisyClientDetector().predict([[1.0]])
    with pytest.raises(UserError, match="call fit first"):
        NoisyClientDetector().to_dict()
    with pytest.raises(UserError, match="5 classes as in fit, got 4"):
        fit(federation()[0]).predict(np.ones((2, 4)))


# Where there is nothing to split


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_one_client_is_too_few(behaviour: Behaviour) -> None:
    with pytest.warns(FedNoRoWarning, match="too few clients"):
        detector = fit([[1.0, 2.0]], behaviour=behaviour)
    assert detector.noisy_.tolist() == [False]
    assert detector.posterior_.tolist() == [0.0]
    assert detector.reason_ == "too few clients for a mixture: nobody flagged"
    assert detector.predict([[5.0, 9.0]])[0].tolist() == [False]


def test_no_usable_client_at_all_still_gives_a_detector_that_can_be_stored() -> None:
    with pytest.warns(FedNoRoWarning, match="not trusted: 0, 1"):
        detector = fit([[NAN, NAN], [INF, 1.0]])
    assert detector.noisy_.tolist() == [True, True]
    assert np.isnan(detector.posterior_).all()
    restored = NoisyClientDetector.from_dict(
        json.loads(json.dumps(detector.to_dict(), allow_nan=False))
    )
    assert restored.predict([[1.0, NAN]])[0].tolist() == [False]


def test_equal_clients_are_not_split() -> None:
    with pytest.warns(FedNoRoWarning, match="all 6 clients have the same scores"):
        detector = fit(np.tile([1.0, 2.0, NAN], (6, 1)))
    assert not detector.noisy_.any()
    assert detector.posterior_.tolist() == [0.0] * 6


def test_a_constant_class_is_reported_and_does_not_matter() -> None:
    losses, truth = federation(missing=0.0)
    losses[:, 2] = 1.5
    with pytest.warns(FedNoRoWarning, match="same loss at every client, which tell nothing: 2"):
        detector = fit(losses)
    assert detector.noisy_.tolist() == truth.tolist()
    assert (detector.normalised_[:, 2] == 0).all()


def test_a_class_that_nobody_holds_is_reported_and_does_not_matter() -> None:
    losses, truth = federation(missing=0.0)
    losses[:, 4] = NAN
    with pytest.warns(FedNoRoWarning, match="held by nobody, counted as loss 0: 4") as caught:
        detector = fit(losses)
    assert len(caught) == 1
    assert detector.noisy_.tolist() == truth.tolist()
    assert (detector.filled_[:, 4] == 0).all()


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
def test_a_mixture_with_an_empty_component_flags_nobody(behaviour: Behaviour) -> None:
    # the regularisation (1e-6) of unscaled scores swallows differences of this size
    losses = 1 + 1e-6 * np.random.default_rng(0).random((8, 2))
    with pytest.warns(FedNoRoWarning, match="all 8 clients in one component"):
        detector = fit(losses, behaviour=behaviour, normalise=False)
    assert not detector.noisy_.any()
    assert (detector.posterior_ == 0).all()
    assert detector.predict(losses)[0].tolist() == [False] * 8


@pytest.mark.parametrize("broken", [INF, -INF, NAN, 1e300])
def test_a_client_with_broken_scores_is_left_out_and_not_trusted(broken: float) -> None:
    losses, truth = federation(missing=0.0)
    counts = np.full(losses.shape, 12)
    victim = int(np.flatnonzero(~truth)[0])
    rest = np.arange(20) != victim
    losses[victim, 1] = broken
    with pytest.warns(FedNoRoWarning, match=f"not trusted: {victim}$"):
        detector = fit(losses, counts)
    assert detector.scored_.tolist() == rest.tolist()
    assert detector.noisy_[victim]
    assert np.isnan(detector.posterior_[victim])
    assert np.isnan(detector.filled_[victim]).all()
    np.testing.assert_array_equal(detector.posterior_[rest], fit(losses[rest]).posterior_)
    assert detector.noisy_[rest].tolist() == truth[rest].tolist()
    assert detector.reason_.endswith("; 1 without usable scores not trusted")


def test_a_client_without_any_class_is_left_out_and_not_trusted() -> None:
    losses, truth = federation(missing=0.0)
    losses[4] = NAN
    with pytest.warns(FedNoRoWarning, match="not trusted: 4$"):
        detector = fit(losses)
    assert detector.noisy_.tolist() == (truth | (np.arange(20) == 4)).tolist()
    assert not detector.scored_[4]


@pytest.mark.parametrize(
    "losses",
    [[1.0, 2.0], 3.0, np.zeros((2, 2, 2)), np.zeros((0, 4)), np.zeros((4, 0)), [], [[1], [1, 2]]],
)
def test_losses_that_are_no_table_are_an_error(losses: object) -> None:
    with pytest.raises(UserError, match="losses"):
        fit(losses)


def test_counts_of_another_shape_are_an_error() -> None:
    with pytest.raises(
        UserError, match=r"counts must have the shape of losses, \(2, 3\), got \(2, 2\)"
    ):
        fit(np.ones((2, 3)), np.ones((2, 2)))


def test_unknown_options_are_named() -> None:
    with pytest.raises(UserError, match="behaviour must be one of paper, reference, got 'papr'"):
        fit([[1.0]], behaviour="papr")
    with pytest.raises(
        UserError, match="covariance must be one of full, diag, spherical, tied, got 'round'"
    ):
        fit([[1.0]], covariance="round")


# Any input


@st.composite
def tables(draw: st.DrawFn) -> FloatArray:
    """K×C losses of any scale with missing, broken and repeated entries."""
    k, c = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([1e-308, 1e-12, 1.0, 1e12, 1e75, 1e148, 1e300]))
    losses = (
        rng.choice([rng.exponential(size=(k, c)), rng.integers(0, 3, (k, c)).astype(float)]) * scale
    )
    losses[rng.random((k, c)) < draw(st.sampled_from([0, 0.2, 0.7, 1]))] = NAN
    losses[rng.random((k, c)) < draw(st.sampled_from([0, 0, 0.1]))] = draw(
        st.sampled_from([INF, -INF])
    )
    return losses


@given(
    tables(),
    st.sampled_from(BEHAVIOURS),
    st.sampled_from(COVARIANCES),
    st.booleans(),
    st.booleans(),
)
@settings(deadline=None, max_examples=120)
def test_any_input_gives_verdicts(
    losses: FloatArray,
    behaviour: Behaviour,
    covariance: Covariance,
    normalise: bool,
    with_counts: bool,
) -> None:
    counts = (
        np.random.default_rng(losses.size).integers(0, 3, losses.shape) if with_counts else None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # scikit-learn's and numpy's warnings must not leak
        warnings.simplefilter("ignore", FedNoRoWarning)
        detector = fit(
            losses, counts, behaviour=behaviour, covariance=covariance, normalise=normalise
        )
        again = NoisyClientDetector.from_dict(
            json.loads(json.dumps(detector.to_dict(), allow_nan=False))
        )
        noisy, posterior = again.predict(losses, counts)
    scored = detector.scored_
    assert detector.noisy_.shape == detector.posterior_.shape == scored.shape == losses.shape[:1]
    assert ((detector.posterior_[scored] >= 0) & (detector.posterior_[scored] <= 1)).all()
    assert np.isnan(detector.posterior_[~scored]).all()
    assert detector.noisy_[~scored].all()
    assert (detector.noisy_[scored] == (detector.posterior_[scored] > 0.5)).all()
    assert not detector.noisy_[scored].all() or not scored.any()
    assert np.isfinite(detector.normalised_[scored]).all()
    np.testing.assert_array_equal(noisy, detector.noisy_)
    np.testing.assert_allclose(posterior, detector.posterior_, rtol=1e-9, atol=1e-12)


@given(st.integers(0, 2**32), st.sampled_from(BEHAVIOURS), st.data())
@settings(deadline=None, max_examples=40)
def test_a_positive_affine_map_of_a_class_changes_nothing(
    seed: int, behaviour: Behaviour, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    k, c = int(rng.integers(2, 12)), int(rng.integers(1, 5))
    losses = rng.integers(0, 256, (k, c)) / 64  # dyadic numbers, so that the map itself is exact
    losses[rng.random((k, c)) < 0.2] = NAN
    scale = 2.0 ** np.array(data.draw(st.lists(st.integers(-8, 8), min_size=c, max_size=c)))
    shift = np.array(data.draw(st.lists(st.integers(-1000, 1000), min_size=c, max_size=c)))
    plain, mapped = (fit(table, behaviour=behaviour) for table in (losses, losses * scale + shift))
    np.testing.assert_array_equal(mapped.normalised_, plain.normalised_)
    np.testing.assert_array_equal(mapped.posterior_, plain.posterior_)
    np.testing.assert_array_equal(mapped.noisy_, plain.noisy_)


@given(st.integers(0, 2**32), st.sampled_from(BEHAVIOURS), st.sampled_from(COVARIANCES))
@settings(deadline=None, max_examples=25)
def test_the_order_of_classes_and_clients_does_not_matter(
    seed: int, behaviour: Behaviour, covariance: Covariance
) -> None:
    losses, truth = federation(seed, missing=0.0)
    rng = np.random.default_rng(seed)
    classes, clients = rng.permutation(5), rng.permutation(20)
    options = {"behaviour": behaviour, "covariance": covariance}
    plain = fit(losses, **options)
    turned = fit(losses[:, classes], **options)
    np.testing.assert_allclose(turned.posterior_, plain.posterior_, atol=1e-6)
    assert plain.noisy_.tolist() == turned.noisy_.tolist() == truth.tolist()
    assert fit(losses[clients], **options).noisy_.tolist() == truth[clients].tolist()


def test_a_seed_beyond_32_bits_still_finds_the_noisy_clients() -> None:
    losses = np.concatenate([np.full((6, 3), 0.2), np.full((4, 3), 2.0)]) + np.linspace(
        0, 0.1, 30
    ).reshape(10, 3)
    assert NoisyClientDetector(seed=2**40).fit(losses).noisy_.tolist() == [False] * 6 + [True] * 4


def test_losses_of_any_size_are_judged_or_flag_nobody() -> None:
    """Covariances of few clients with huge losses are all but singular."""
    for seed in range(60):
        losses = np.random.default_rng(seed).random((12, 6)) ** 4 * 1e7
        detector = NoisyClientDetector(normalise=False, seed=seed).fit(losses)
        assert detector.noisy_.shape == (12,) and np.isfinite(detector.posterior_).all()


def test_verdicts_of_an_earlier_version_are_refused_in_one_line() -> None:
    state = NoisyClientDetector().fit(np.random.default_rng(0).random((8, 3))).to_dict()
    assert state["mixture"] is not None
    state["mixture"] = {
        "weights_": [0.5, 0.5],
        "means_": [[0.0] * 3] * 2,
        "precisions_cholesky_": [np.eye(3).tolist()] * 2,
    }
    with pytest.raises(UserError, match="an earlier version's"):
        NoisyClientDetector.from_dict(state)
