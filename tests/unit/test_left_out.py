"""The rule that judges clients by heads learnt from others: its parts against slow derivations, and planted groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def rule() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        yield import_module("benchmarks.left_out")


def sites(count: int = 4, features: int = 5, classes: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(count)
    return [
        (torch.randn(30 + k, features, generator=rng), torch.randint(0, classes, (30 + k,), generator=rng))
        for k in range(count)
    ]


def test_the_head_is_ridge_regression_on_the_others(rule: Any) -> None:
    data, classes = sites(), 3
    sums = [sum(part) for part in zip(*(rule.moments(x, y, classes) for x, y in data), strict=True)]
    for k, (x, y) in enumerate(data):
        others = torch.cat([x for j, (x, _) in enumerate(data) if j != k]).double()
        labels = torch.cat([torch.eye(classes).double()[y] for j, (_, y) in enumerate(data) if j != k])
        centred, level = others - others.mean(0), labels.mean(0)
        penalty = rule.RIDGE * (centred**2).sum() / others.shape[1]
        # Least squares with rows that pull towards zero: the intercept is free.
        rows = torch.cat([centred, penalty.sqrt() * torch.eye(others.shape[1]).double()])
        wanted = torch.cat([labels - level, torch.zeros(others.shape[1], classes).double()])
        weights = torch.linalg.lstsq(rows, wanted).solution
        expected = (x.double() - others.mean(0)) @ weights + level
        torch.testing.assert_close(rule.scores(x, y, *sums), expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.integers(1, 25), steps=st.integers(1, 6))
def test_areas_count_pairs_of_images(rule: Any, seed: int, size: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    outputs, labels = rng.integers(0, steps + 1, (size, 3)).astype(float), rng.integers(0, 3, size)  # with ties
    found = rule.areas(outputs, labels)
    for area, (i, j) in zip(found, itertools.combinations(range(3), 2), strict=True):
        margin = outputs[:, i] - outputs[:, j]
        won = [(a > b) + (a == b) / 2 for a in margin[labels == i] for b in margin[labels == j]]
        assert np.isnan(area) if not won else abs(area - np.mean(won)) < 1e-12


def test_errors_leave_out_what_is_hard_for_everybody(rule: Any) -> None:
    mu, delta = np.array([0.7, 0.9, 0.8]), np.array([0.1, 0.0, -0.1, 0.05])
    counts = np.array([[9.0, 5, 3], [4, 4, 4], [20, 1, 7], [3, 3, 0]])
    parted = mu + delta[:, None]
    parted[3, [1, 2]] = np.nan  # the last client lacks a class
    found = rule.errors(parted, counts)
    np.testing.assert_allclose(found - found[1], -2 * (delta - delta[1]), atol=1e-6)
    full = rule.errors(mu + delta[:3, None], counts[:3])
    assert 0 < full.min() < full.max() < 1


@pytest.mark.parametrize("noisy", [2, 8, 15])
def test_two_groups_are_told_apart(rule: Any, noisy: int) -> None:
    rng = np.random.default_rng(noisy)
    error = np.concatenate([rng.normal(0.5, 0.06, noisy), rng.normal(0.15, 0.03, 20 - noisy)])
    flags = [True] * noisy + [False] * (20 - noisy)
    assert rule.noisy(error) == flags
    assert rule.judge(error, np.where(flags, 0.2, 0.45)) == flags
    # Nobody is trusted who explains nothing.
    assert rule.judge(error, np.full(20, 0.1)) == [True] * 20


@pytest.mark.parametrize(("explained", "noisy"), [(0.5, False), (0.2, True)])
def test_who_are_alike_are_all_noisy_or_all_clean(rule: Any, explained: float, noisy: bool) -> None:
    error = np.random.default_rng(0).normal(0.3, 0.03, 20)
    assert rule.noisy(error) is None
    assert rule.judge(error, np.full(20, explained)) == [noisy] * 20


def test_one_client_alone_is_not_a_group_to_trust(rule: Any) -> None:
    assert rule.noisy(np.array([0.05, *[0.5] * 9])) is None
    assert rule.noisy(np.zeros(5)) is None
    assert rule.noisy(np.array([0.3])) is None
