"""Splits: every image on one side, every class on both where possible, no group torn apart."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.data.split import train_test
from fednoro.types import FedNoRoWarning, UserError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def quietly(labels: np.ndarray, test: float, groups: list[str] | None = None, seed: int = 0):  # type: ignore[no-untyped-def]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedNoRoWarning)
        return train_test(labels, test, rng(seed), groups)


def is_partition(train: np.ndarray, test: np.ndarray, n: int) -> bool:
    ordered = (np.diff(train) > 0).all() and (np.diff(test) > 0).all()
    return bool(ordered) and sorted([*train.tolist(), *test.tolist()]) == list(range(n))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0.05, 0.95), st.integers(0, 99))
def test_each_class_is_split_in_the_ratio_asked_for(counts: list[int], test: float, seed: int) -> None:
    labels = rng(seed).permutation(np.repeat(np.arange(len(counts)) * 2, counts))  # gaps between labels are fine
    if max(counts) == 1:
        with pytest.raises(UserError, match="each image is the only one of some class"):
            quietly(labels, test)
        return
    train, held = quietly(labels, test, seed=seed)
    assert train.dtype == held.dtype == np.int64
    assert is_partition(train, held, len(labels))
    for c, n in enumerate(counts):
        in_test = int((labels[held] == 2 * c).sum())
        if n == 1:
            assert in_test == 0
        else:
            assert 1 <= in_test <= n - 1
            assert abs(in_test - n * test) <= max(0.5, 1 - n * test, 1 - n * (1 - test)) + 1e-9


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.lists(st.integers(1, 6), min_size=2, max_size=40), min_size=1, max_size=6),
    st.floats(0.1, 0.9),
    st.integers(0, 99),
)
def test_groups_of_one_class_are_split_in_the_ratio_asked_for(sizes: list[list[int]], test: float, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), [sum(s) for s in sizes])
    groups = [f"g{c}-{g}" for c, s in enumerate(sizes) for g, n in enumerate(s) for _ in range(n)]
    train, held = train_test(labels, test, rng(seed), groups)
    assert is_partition(train, held, len(labels))
    assert not {groups[i] for i in train} & {groups[i] for i in held}
    for c, s in enumerate(sizes):
        in_test, n = int((labels[held] == c).sum()), sum(s)
        assert 0 < in_test < n
        assert abs(in_test - n * test) <= max(s)  # no more than one group off


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=2, max_size=120), st.floats(0.1, 0.9))
def test_mixed_groups_never_lie_on_both_sides(samples: list[tuple[int, int]], test: float) -> None:
    labels = np.array([c for c, _ in samples])
    groups = [f"patient {g}" for _, g in samples]
    try:
        train, held = quietly(labels, test, groups)
    except UserError as error:
        holders = [{g for c, g in samples if c == wanted} for wanted in set(labels.tolist())]
        assert "each group is the only one of some class" in str(error)
        assert {g for _, g in samples} == set().union(*(h for h in holders if len(h) == 1))
        return
    assert is_partition(train, held, len(labels))
    assert len(train)
    assert not {groups[i] for i in train} & {groups[i] for i in held}


@pytest.mark.parametrize("test", [0.1, 0.3, 0.5])
def test_mixed_groups_of_many_sizes_come_close_in_total_and_per_class(test: float) -> None:
    draw = rng(7)
    patients = [f"p{p}" for p in range(400) for _ in range(draw.integers(1, 12))]
    labels = draw.choice(5, size=len(patients), p=[0.5, 0.25, 0.15, 0.07, 0.03])
    train, held = train_test(labels, test, rng(), patients)
    assert len(held) / len(labels) == pytest.approx(test, abs=0.02)
    for c in range(5):
        assert (labels[held] == c).mean() == pytest.approx((labels[train] == c).mean(), abs=0.02)


def test_a_rare_class_gets_its_test_group_before_common_classes_take_it() -> None:
    labels = np.array([0] * 50 + [1, 0, 1, 0])
    groups = [str(i) for i in range(50)] + ["a", "a", "b", "b"]
    for seed in range(10):
        train, held = train_test(labels, 0.3, rng(seed), groups)
        assert 1 in labels[train]
        assert 1 in labels[held]


def test_the_generator_decides() -> None:
    labels = np.arange(200) % 3
    assert np.array_equal(train_test(labels, 0.3, rng(1))[1], train_test(labels, 0.3, rng(1))[1])
    assert not np.array_equal(train_test(labels, 0.3, rng(1))[1], train_test(labels, 0.3, rng(2))[1])


def test_a_class_of_one_image_is_trained_on_with_a_warning() -> None:
    labels = np.array([0] * 10 + [1] + [2] * 4 + [3])
    with pytest.warns(FedNoRoWarning, match="too few images to have label 1, 3 on both sides: none in the test set"):
        train, held = train_test(labels, 0.4, rng())
    assert {10, 15} <= set(train.tolist())
    assert set(labels[held].tolist()) == {0, 2}


def test_a_class_of_one_group_is_trained_on_with_a_warning() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1])
    with pytest.warns(FedNoRoWarning, match="too few groups to have label 1 on both sides: none in the test set"):
        train, _ = train_test(labels, 0.5, rng(), ["a", "b", "c", "d", "e", "e", "e"])
    assert {4, 5, 6} <= set(train.tolist())


@pytest.mark.parametrize("test", [0.0, 1.0, -0.1, 1.5, float("nan")])
def test_a_share_that_leaves_a_side_empty_is_an_error(test: float) -> None:
    with pytest.raises(UserError, match=r"test share must be in \(0, 1\), got"):
        train_test(np.array([0, 0, 1, 1]), test, rng())


def test_nothing_to_split_is_an_error() -> None:
    with pytest.raises(UserError, match="no images to split"):
        train_test(np.array([], np.int64), 0.3, rng())


def test_one_group_for_all_is_an_error() -> None:
    with pytest.raises(UserError, match="each group is the only one of some class"):
        train_test(np.array([0, 0, 1, 1]), 0.3, rng(), ["x"] * 4)


def test_groups_of_another_length_are_an_error() -> None:
    with pytest.raises(UserError, match=r"one entry per image \(4\), got 3"):
        train_test(np.array([0, 0, 1, 1]), 0.3, rng(), ["x"] * 3)
