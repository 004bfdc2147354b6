"""The rule that judges clients by heads learnt from others: its parts against slow
derivations, and planted groups.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.detection import leave_one_out_heads as rule

SIGNS = [[1, 1, 0, 0, 1, 0, 1, 0], [1, 0, 0, 1, 1, 1, 0, 1], [0, 0, 1, 0, 1, 0, 0, 1]]


def sites(
    count: int = 4, features: int = 5, classes: int = 3
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(count)
    return [
        (
            torch.randn(30 + k, features, generator=rng),
            torch.randint(0, classes, (30 + k,), generator=rng),
        )
        for k in range(count)
    ]


def test_the_head_is_ridge_regression_on_the_others() -> None:
    data, classes = sites(), 3
    sums = [sum(part) for part in zip(*(rule.moments(x, y, classes) for x, y in data), strict=True)]
    for k, (x, y) in enumerate(data):
        others = torch.cat([x for j, (x, _) in enumerate(data) if j != k]).double()
        labels = torch.cat(
            [torch.eye(classes).double()[y] for j, (_, y) in enumerate(data) if j != k]
        )
        centred, level = others - others.mean(0), labels.mean(0)
        penalty = rule.RIDGE * (centred**2).sum() / others.shape[1]
        # Least squares with rows that pull towards zero: the intercept is free.
        rows = torch.cat([centred, penalty.sqrt() * torch.eye(others.shape[1]).double()])
        wanted = torch.cat([labels - level, torch.zeros(others.shape[1], classes).double()])
        weights = torch.linalg.lstsq(rows, wanted).solution
        expected = (x.double() - others.mean(0)) @ weights + level
        torch.testing.assert_close(rule.outputs(x, y, *sums), expected)
        own = rule.moments(x, y, classes)
        late = rule.outputs(x, y, sums[0] - own[0], sums[1] - own[1], in_totals=False)
        torch.testing.assert_close(late, expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 25), steps=st.integers(1, 6))
def test_areas_count_pairs_of_images(seed: int, size: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    # with ties
    outputs, labels = rng.integers(0, steps + 1, (size, 3)).astype(float), rng.integers(0, 3, size)
    found = rule.areas(outputs, labels)
    np.testing.assert_array_equal(found, found.T)
    assert np.isnan(np.diag(found)).all()
    for area, (i, j) in zip(rule.pairs_of(found), itertools.combinations(range(3), 2), strict=True):
        margin = outputs[:, i] - outputs[:, j]
        won = [(a > b) + (a == b) / 2 for a in margin[labels == i] for b in margin[labels == j]]
        assert np.isnan(area) if not won else abs(area - np.mean(won)) < 1e-12


@pytest.mark.parametrize("same", [True, False], ids=["one image again and again", "no image"])
def test_sums_that_tell_nothing_make_a_head_of_zeros(same: bool) -> None:
    x, y = torch.ones(9, 4), torch.arange(9) % 3
    a, b = rule.moments(x if same else x[:0], y if same else y[:0], 3)
    assert not rule.head(a, b).any()


def test_sketches_are_sums_with_the_same_signs_everywhere() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 512)
    found, eye = rule.sketch(x, 64), rule.sketch(torch.eye(512), 64)
    assert found.shape == (50, 64) and found.dtype == torch.float64
    assert (eye.abs() == 1 / 8).all() and abs(float(eye.sum())) < 4 * 512**0.5
    torch.testing.assert_close(found, x.double() @ eye)
    # sites and servers of other versions and machines draw the same
    assert (eye[:3, :8] > 0).int().tolist() == SIGNS
    assert len({tuple(column) for column in eye.t().tolist()}) == 64


@pytest.mark.parametrize("wide", [65, 2048])
def test_sketches_keep_distances_about_as_they_are(wide: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(40, wide).double()
    before, after = (
        torch.cdist(part, part)[*torch.triu_indices(40, 40, 1)] for part in (x, rule.sketch(x, 64))
    )
    ratio = after / before
    assert ratio.mean() == pytest.approx(1, abs=0.05) and ratio.std() < 0.15


def test_errors_leave_out_what_is_hard_for_everybody() -> None:
    mu, delta = np.array([0.7, 0.9, 0.8]), np.array([0.1, 0.0, -0.1, 0.05])
    counts = np.array([[9.0, 5, 3], [4, 4, 4], [20, 1, 7], [3, 3, 0]])
    parted = mu + delta[:, None]
    parted[3, [1, 2]] = np.nan  # the last client lacks a class
    scale = rule.difficulty(parted, counts)
    found = rule.errors(parted, counts, scale)
    np.testing.assert_allclose(found - found[1], -2 * (delta - delta[1]), atol=1e-6)
    # Who comes later is seen on the same scale.
    np.testing.assert_allclose(rule.errors(parted[2:], counts[2:], scale), found[2:])
    full = rule.difficulty(mu + delta[:3, None], counts[:3])
    assert 0 < rule.errors(mu + delta[:3, None], counts[:3], full).min() < 1


def test_mu_and_delta_are_the_weighted_least_squares() -> None:
    """Against one system of equations for all of them."""
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 9, (6, 4)).astype(float)
    i, j = np.triu_indices(4, 1)
    parted = np.where((counts[:, i] > 0) & (counts[:, j] > 0), rng.random((6, 6)), np.nan)
    rows, wanted = [], []
    for k, p in itertools.product(range(6), range(6)):
        if not math.isnan(parted[k, p]):
            weight = 1 / (0.25 * (1 / counts[k, i[p]] + 1 / counts[k, j[p]]) + 0.03)
            rows.append(math.sqrt(weight) * np.concatenate([np.eye(6)[p], np.eye(6)[k]]))
            wanted.append(math.sqrt(weight) * parted[k, p])
    solution = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    found = rule.errors(parted, counts, rule.difficulty(parted, counts))
    told = ~np.isnan(parted).all(axis=1)
    np.testing.assert_allclose(np.diff(found[told]), np.diff(-2 * solution[6:][told]), atol=1e-4)


def test_a_pair_that_nobody_else_has_says_nothing_about_who_comes_later() -> None:
    counts = np.array([[5.0, 5, 0], [5, 5, 0], [5, 5, 5]])
    parted = np.array([[0.9, np.nan, np.nan], [0.8, np.nan, np.nan], [0.85, 0.1, 0.1]])
    scale = rule.difficulty(parted[:2], counts[:2])
    alone = rule.errors(np.where(np.arange(3) == 0, parted[2:], np.nan), counts[2:], scale)
    assert rule.errors(parted[2:], counts[2:], scale) == pytest.approx(alone)
    assert np.isnan(rule.errors(np.full((1, 3), np.nan), counts[2:], scale)).all()


def cut_of(error: np.ndarray, explained: np.ndarray) -> list[bool] | None:
    doubt = rule.doubts(error, explained)
    found = rule.find_cut(doubt, error, explained)
    return None if found is None else [bool(flag) for flag in doubt > found[0]]


@pytest.mark.parametrize("noisy", [2, 8, 15])
def test_two_groups_are_told_apart(noisy: int) -> None:
    rng = np.random.default_rng(noisy)
    error = np.concatenate([rng.normal(0.5, 0.06, noisy), rng.normal(0.15, 0.03, 20 - noisy)])
    flags = [True] * noisy + [False] * (20 - noisy)
    assert cut_of(error, np.where(flags, 0.2, 0.45)) == flags


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=12, unique=True))
def test_the_cut_is_the_likeliest_of_all(error: list[float]) -> None:
    """By hand, over all cuts; twice the error and something explained, or none."""
    explained = np.linspace(0.6, 0.3, len(error))
    doubt = rule.doubts(np.array(error), explained)
    order = sorted(range(len(error)), key=lambda k: doubt[k])
    x = [math.log(doubt[k]) for k in order]
    costs = {}
    for below in range(2, len(x)):
        within = mixing = 0.0
        for part, wider in ((x[:below], 1.0), (x[below:], 1.2)):
            mean = sum(part) / len(part)
            within += sum(((v - mean) / wider) ** 2 for v in part)
            mixing += len(part) * math.log(len(part) / len(x) / wider)
        costs[below] = len(x) * math.log(within / len(x) + rule.VARIANCE) - 2 * mixing
    below = min(costs, key=costs.__getitem__)
    clean, noisy = ([error[k] + 0.02 for k in part] for part in (order[:below], order[below:]))
    shares = [float(np.mean(explained[part])) for part in (order[:below], order[below:])]
    twice = sum(noisy) / len(noisy) >= 2 * sum(clean) / len(clean) and shares[1] <= 0.8 * shares[0]
    mean = sum(x) / len(x)
    alone = len(x) * math.log(sum((v - mean) ** 2 for v in x) / len(x) + rule.VARIANCE)
    needed = 1 if shares[1] <= 0.65 * shares[0] else 3
    twice = twice and alone - costs[below] >= needed and sum(noisy) / len(noisy) >= 0.12
    found = rule.find_cut(doubt, np.array(error), explained)
    assert (found is not None) == twice
    if found is not None:
        assert math.log(found[0]) == pytest.approx((x[below - 1] + x[below]) / 2)
        means, spread = [np.mean(x[:below]), np.mean(x[below:])], np.var(x[:below]) * below
        spread = (spread + np.var(x[below:]) * (len(x) - below) / 1.2**2) / len(x) + rule.VARIANCE
        assert found[1] == pytest.approx(0.35 * (means[1] - means[0]) / spread)


def test_a_long_tail_is_not_a_group() -> None:
    """As in a federation of noisy clients alone: the best of them err half as
    much as the others, one by one.
    """
    error = np.geomspace(0.1, 0.7, 20)
    assert cut_of(error, np.linspace(0.4, 0.2, 20)) is None


@pytest.mark.parametrize(("less", "parted"), [(0.64, True), (0.66, False)])
def test_groups_that_are_hardly_likelier_are_believed_in_where_one_explains_much_less(
    less: float, parted: bool
) -> None:
    clean = [0.12, 0.2, 0.22, 0.22, 0.24, 0.28]
    noisy = [0.32, 0.32, 0.33, 0.34, 0.35, 0.37, 0.38, 0.44, 0.54, 0.57, 0.59, 0.61, 0.7, 0.76]
    error, explained = np.array(clean + noisy), np.where(np.arange(20) < 6, 0.45, 0.45 * less)
    found = rule.likeliest(
        np.log(rule.doubts(error, explained)), range(2, 20), rule.VARIANCE, rule.WIDER
    )
    assert found is not None and found[0] == 6 and rule.STILL_LIKELIER < found[1] < rule.LIKELIER
    assert cut_of(error, explained) == ([k >= 6 for k in range(20)] if parted else None)


BETTER, WORSE = 0.5, 0.35  # shares that are far enough apart
HALF = np.where(np.arange(20) < 10, BETTER, WORSE)


@pytest.mark.parametrize(("worse", "parted"), [(0.28, False), (0.32, True)])
def test_noisy_clients_err_twice_as_much(worse: float, parted: bool) -> None:
    rng = np.random.default_rng(0)
    error = np.where(HALF == BETTER, 0.14, worse) + rng.normal(0, 0.004, 20)
    assert cut_of(error, HALF) == ((HALF == WORSE).tolist() if parted else None)


@pytest.mark.parametrize(("level", "parted"), [(0.39, True), (0.41, False)])
def test_noisy_clients_explain_less(level: float, parted: bool) -> None:
    error = np.where(HALF == BETTER, 0.1, 0.5)
    assert (cut_of(error, np.where(HALF == BETTER, 0.5, level)) is not None) == parted


@pytest.mark.parametrize(
    ("level", "less", "error", "parted"),
    [
        (0.29, 0.15, 0.3, True),
        (0.27, 0.15, 0.3, False),
        (0.27, 0.15, 0.5, True),
        (0.27, 0.13, 0.3, True),
    ],
    ids=["something", "next to nothing", "four times the error", "twice what the others explain"],
)
def test_trusted_clients_explain_something_unless_the_groups_are_far_apart(
    level: float, less: float, error: float, parted: bool
) -> None:
    errors = np.where(HALF == BETTER, 0.1, error)
    assert (cut_of(errors, np.where(HALF == BETTER, level, less)) is not None) == parted


@pytest.mark.parametrize(("spread", "parted"), [(1.75, False), (1.6, True)])
def test_half_of_what_others_explain_is_enough_only_for_groups_that_are_far_apart(
    spread: float, parted: bool
) -> None:
    scatter = np.geomspace(1 / spread, spread, 10)
    error, explained = (
        np.concatenate([0.15 * scatter, 0.5 * scatter]),
        np.where(HALF == BETTER, 0.27, 0.1),
    )
    found = rule.likeliest(
        np.log(rule.doubts(error, explained)), range(2, 20), rule.VARIANCE, rule.WIDER
    )
    assert found is not None and found[0] == 10 and (found[1] >= rule.HALF_LIKELIER) == parted
    assert (cut_of(error, explained) is not None) == parted


@pytest.mark.parametrize(("error", "parted"), [(0.09, False), (0.11, True)])
def test_noisy_clients_err_at_all(error: float, parted: bool) -> None:
    assert (cut_of(np.where(HALF == BETTER, 0.0, error), HALF) is not None) == parted


def test_one_client_alone_is_not_a_group_to_trust() -> None:
    shares, error = np.array([0.6, *[0.3] * 9]), np.array([0.02, *[0.5] * 9])
    assert cut_of(error, shares) is None
    shares[1], error[1] = 0.6, 0.02
    assert cut_of(error, shares) == [False] * 2 + [True] * 8
    assert cut_of(np.zeros(5), shares[:5]) is None
    assert cut_of(error[:1], shares[:1]) is None and cut_of(error[[0, 2]], shares[[0, 2]]) is None
