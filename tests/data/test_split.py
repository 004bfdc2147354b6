"""Splits: every image in one part, every class in each where possible, no group torn
apart; what leaks is reported.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednoro.core.types import FedNoRoWarning, UserError
from fednoro.data.dataset import Dataset
from fednoro.data.leakage import count_identical, leakage
from fednoro.data.split import Parts, Split, read_split, train_test, write_split


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
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8), st.floats(0.05, 0.95), st.integers(0, 99)
)
def test_each_class_is_split_in_the_ratio_asked_for(
    counts: list[int], test: float, seed: int
) -> None:
    # gaps between labels are fine
    labels = rng(seed).permutation(np.repeat(np.arange(len(counts)) * 2, counts))
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
def test_groups_of_one_class_are_split_in_the_ratio_asked_for(
    sizes: list[list[int]], test: float, seed: int
) -> None:
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
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), min_size=2, max_size=120),
    st.floats(0.1, 0.9),
)
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
    assert not np.array_equal(
        train_test(labels, 0.3, rng(1))[1], train_test(labels, 0.3, rng(2))[1]
    )


def test_a_class_of_one_image_is_trained_on_with_a_warning() -> None:
    labels = np.array([0] * 10 + [1] + [2] * 4 + [3])
    with pytest.warns(
        FedNoRoWarning,
        match="too few images to have label 1, 3 on both sides: none in the test set",
    ):
        train, held = train_test(labels, 0.4, rng())
    assert {10, 15} <= set(train.tolist())
    assert set(labels[held].tolist()) == {0, 2}


def test_a_class_of_one_group_is_trained_on_with_a_warning() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1, 1])
    with pytest.warns(
        FedNoRoWarning, match="too few groups to have label 1 on both sides: none in the test set"
    ):
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


# Three parts.


def pictures(
    labels: list[int], groups: list[str] | None = None, ids: list[str] | None = None
) -> Dataset:
    """A data set of different images; the first pixel is the position."""
    n = len(labels)
    images = rng(1).integers(0, 256, (n, 4, 4, 1), dtype=np.uint8)
    images[:, 0, 0, 0] = np.arange(n) % 256
    return Dataset(
        images,
        np.array(labels),
        tuple(f"class {c}" for c in range(max(labels) + 1)),
        None if ids is None else tuple(ids),
        None if groups is None else tuple(groups),
    )


def same(a: Parts, b: Parts) -> bool:
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("train", "validation", "test")
    )


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(6, 60), min_size=1, max_size=5),
    st.floats(0.1, 0.4),
    st.floats(0.1, 0.4),
    st.booleans(),
)
def test_a_validation_part_is_taken_from_what_was_trained_on_and_leaves_the_test_part_alone(
    counts: list[int], test: float, validation: float, grouped: bool
) -> None:
    labels = [c for c, n in enumerate(counts) for _ in range(n)]
    data = pictures(labels, [f"{c}-{i % 6}" for i, c in enumerate(labels)] if grouped else None)
    plain, parts = (
        Split(test=test).parts(data, rng()),
        Split(test=test, validation=validation).parts(data, rng()),
    )
    assert np.array_equal(parts.test, plain.test)
    assert not len(plain.validation)
    assert len(parts.validation)
    assert is_partition(
        np.sort(np.concatenate([parts.train, parts.validation])), parts.test, len(labels)
    )
    assert all((np.diff(part) > 0).all() for part in (parts.train, parts.validation))
    if grouped:
        holders = [
            {data.groups[i] for i in part} for part in (parts.train, parts.validation, parts.test)
        ]  # type: ignore[index]
        assert (
            not holders[0] & holders[1]
            and not holders[1] & holders[2]
            and not holders[0] & holders[2]
        )
    else:
        for c, n in enumerate(counts):
            assert abs((np.array(labels)[parts.validation] == c).sum() - n * validation) <= 1.5


def test_a_class_too_small_for_three_parts_is_named() -> None:
    data = pictures([0] * 20 + [1] * 2)
    with pytest.warns(
        FedNoRoWarning,
        match="too few images to have label 1 on both sides: none in the validation set",
    ):
        parts = Split(validation=0.2).parts(data, rng())
    assert 1 in data.labels[parts.train] and 1 in data.labels[parts.test]


def test_groups_are_torn_only_where_that_was_asked_for() -> None:
    data = pictures([0] * 40, [str(i % 4) for i in range(40)])
    together, torn = Split().parts(data, rng()), Split(grouped=False).parts(data, rng())
    assert leakage(data, together)["test"]["groups"] == 0
    assert np.array_equal(torn.test, train_test(data.labels, 0.3, rng())[1])
    with pytest.warns(
        FedNoRoWarning,
        match=r"12 images of the test part belong to 4 groups .* training images as well",
    ):
        assert leakage(data, torn)["test"]["groups"] == 4


@pytest.mark.parametrize(("test", "validation"), [(0.5, 0.5), (0.3, 0.7), (0.9, 0.2)])
def test_shares_that_leave_nothing_to_train_on_are_refused(test: float, validation: float) -> None:
    with pytest.raises(UserError, match=rf"leave images to train on, got {test} and {validation}"):
        Split(test=test, validation=validation)


# Splits as files.


@pytest.mark.parametrize(
    "ids", [None, [f"a,{i}\u00e9" for i in range(30)], [f' "{i}" ' for i in range(30)]]
)
def test_a_written_split_is_read_back_as_it_was(ids: list[str] | None, tmp_path: Path) -> None:
    data = pictures([0, 1, 2] * 10, ids=ids)
    parts = Split(validation=0.2).parts(data, rng())
    write_split(tmp_path / "split.csv", data, parts)
    assert same(read_split(tmp_path / "split.csv", data), parts)
    again = Split(test=0.9, file=str(tmp_path / "split.csv")).parts(data, rng(5))
    assert same(again, parts), "the file decides, not the shares"


def test_a_split_file_is_a_table_with_one_row_per_image(tmp_path: Path) -> None:
    data = pictures([0, 0, 0, 0], ids=["d", "c", "b", "a"])
    write_split(tmp_path / "s.csv", data, Parts(np.array([0, 3]), np.array([1]), np.array([2])))
    assert (tmp_path / "s.csv").read_text() == "id,part\nd,train\nc,validation\nb,test\na,train\n"


def test_rows_may_come_in_any_order_with_other_columns_between(tmp_path: Path) -> None:
    data = pictures([0, 1, 0, 1], ids=["a", "b", "c", "d"])
    (tmp_path / "s.csv").write_text("part,who,id\ntest,x,d\ntest,x,c\n train ,x, a\ntrain,x,b\n")
    parts = read_split(tmp_path / "s.csv", data)
    assert (parts.train.tolist(), parts.validation.tolist(), parts.test.tolist()) == (
        [0, 1],
        [],
        [2, 3],
    )


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        ("a,train\nb,test\nx,test", "line 4: no image has the id 'x' (the first is 'a')"),
        ("a,train\nb,test\na,test", "line 4: id 'a' is on line 2 already; keep one"),
        ("a,train\nb,tset", "line 3: part must be train, validation or test, got 'tset'"),
        ("a,train\nb,", "line 3: part must be train, validation or test, got ''"),
        ("a,train\nb,test", "does not list 2 of the 4 images, 'c' first: it must give each a part"),
        ("", "does not list 4 of the 4 images, 'a' first: it must give each a part"),
        ("a,test\nb,test\nc,test\nd,validation", "has no image in the train part"),
        ("a,train\nb,train\nc,train\nd,validation", "has no image in the test part"),
    ],
)
def test_mistakes_in_a_split_file_are_one_line_that_names_them(
    rows: str, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "split.csv"
    path.write_text(f"id,part\n{rows}\n")
    with pytest.raises(UserError) as caught:
        Split(file=str(path)).parts(pictures([0, 1, 0, 1], ids=["a", "b", "c", "d"]), rng())
    message = str(caught.value)
    assert message.startswith(f"split.file {path}") and message.endswith(line)


def test_a_split_file_that_is_not_there_or_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    with pytest.raises(UserError, match=r"split\.csv: No such file"):
        Split(file=str(path)).parts(pictures([0, 1]), rng())
    path.write_text("image,side\n0,train\n")
    with pytest.raises(UserError, match=r"split\.csv must have the columns id, part"):
        Split(file=str(path)).parts(pictures([0, 1]), rng())


def test_ids_that_are_not_unique_cannot_be_looked_up(tmp_path: Path) -> None:
    data = pictures([0, 0, 0], ids=["a", "b", "a"])
    write_split(tmp_path / "s.csv", data, Split().parts(data, rng()))
    with pytest.raises(UserError, match="ids are not unique"):
        read_split(tmp_path / "s.csv", data)


def test_a_class_that_a_file_leaves_out_of_a_part_is_named(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_text("id,part\n0,train\n1,train\n2,test\n")
    with pytest.warns(FedNoRoWarning, match=r"s\.csv has no image of class 1 in the test part"):
        read_split(tmp_path / "s.csv", pictures([0, 1, 0]))


# Leakage.


def parts(train: list[int], test: list[int], validation: list[int] | None = None) -> Parts:
    return Parts(*(np.array(part or [], np.int64) for part in (train, validation, test)))


def found(data: Dataset, split: Parts) -> tuple[dict[str, dict[str, int]], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = leakage(data, split)
    return report, [str(w.message) for w in caught]


def test_a_sound_split_has_nothing_to_report() -> None:
    data = pictures([0] * 6, [str(i) for i in range(6)])
    clean = {"samples": 0, "groups": 0, "grouped_images": 0, "identical_images": 0}
    assert found(data, parts([0, 1], [2, 3])) == ({"test": clean}, [])
    assert found(data, parts([0, 1], [2, 3], [4, 5])) == ({"validation": clean, "test": clean}, [])
    assert found(pictures([0] * 4), parts([0, 1], [2, 3]))[0] == {
        "test": {"samples": 0, "identical_images": 0}
    }


def test_each_part_is_compared_with_those_before_it() -> None:
    data = pictures([0] * 8, ["a", "b", "c", "b", "d", "a", "c", "c"])
    data.images[5], data.images[7] = data.images[0], data.images[2]
    report, messages = found(data, parts([0, 1], [5, 6, 7], [2, 3, 4]))
    assert report == {
        "validation": {"samples": 0, "groups": 1, "grouped_images": 1, "identical_images": 0},
        "test": {"samples": 0, "groups": 2, "grouped_images": 3, "identical_images": 2},
    }
    assert messages == [
        "1 images of the validation part belong to 1 groups (patients, lesions) "
        "that have training images as well",
        "3 images of the test part belong to 2 groups (patients, lesions) that have "
        "training or validation images as well",
        "2 images of the test part are pixel-identical to training or validation images",
    ]


def test_a_sample_in_two_parts_is_reported() -> None:
    report, messages = found(pictures([0] * 4), parts([0, 1, 2], [2, 3]))
    assert report["test"]["samples"] == report["test"]["identical_images"] == 1
    assert messages[0] == "1 images of the test part are training images as well"


def test_images_that_share_only_their_middle_row_are_different() -> None:
    data = pictures([0] * 4)
    data.images[:, 2] = 7
    assert count_identical(data.images, np.array([2, 3]), np.array([0, 1])) == 0
    data.images[3] = data.images[1]
    assert count_identical(data.images, np.array([2, 3]), np.array([0, 1])) == 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 29))
def test_identical_images_are_those_that_a_full_comparison_finds(
    values: list[int], cut: int
) -> None:
    images = np.array(values, np.uint8).repeat(4).reshape(-1, 2, 2, 1)
    here, there = np.arange(len(values))[:cut], np.arange(len(values))[cut:]
    slow = sum(any((images[i] == images[j]).all() for j in there) for i in here)
    assert count_identical(images, here, there) == slow


def test_a_memory_map_is_searched_too(tmp_path: Path) -> None:
    images = pictures([0] * 6).images
    images[4] = images[1]
    np.save(tmp_path / "images.npy", images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert count_identical(mapped, np.array([3, 4, 5]), np.array([0, 1, 2])) == 1
