"""The digits keep scikit-learn's pixels and get the long tail that was asked for."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fednoro.core.options import summary
from fednoro.core.types import UserError
from fednoro.data.sources import SOURCES
from fednoro.data.sources.digits import Digits

PIXELS, TARGET = load_digits(return_X_y=True)


def test_imbalance_one_keeps_every_image() -> None:
    data = Digits(imbalance=1).load(0)
    assert data.ids == tuple(str(i) for i in range(1797))
    assert np.array_equal(data.labels, TARGET)


def test_images_are_the_originals_stretched_to_bytes() -> None:
    data = Digits().load(3)
    assert data.images.shape == (len(data), 8, 8, 1)
    assert data.ids is not None
    for row in range(0, len(data), 97):
        original = PIXELS[int(data.ids[row])]
        assert TARGET[int(data.ids[row])] == data.labels[row]
        assert data.images[row].ravel().tolist() == [round(float(p) * 255 / 16) for p in original]


@pytest.mark.parametrize("imbalance", [2.0, 10.0, 100.0])
def test_class_c_keeps_its_share_of_the_long_tail(imbalance: float) -> None:
    kept = np.bincount(Digits(imbalance=imbalance).load(0).labels, minlength=10)
    for c in range(10):
        assert abs(kept[c] - np.sum(np.equal(TARGET, c)) / imbalance ** (c / 9)) <= 0.5
    assert kept.min() >= 2


def test_the_seed_alone_decides_which_images_are_kept() -> None:
    np.random.seed(1)  # noqa: NPY002 - the global state must not matter
    first = Digits().load(5)
    np.random.seed(2)  # noqa: NPY002
    assert Digits().load(5).ids == first.ids
    assert Digits().load(6).ids != first.ids


def test_a_steeper_tail_keeps_a_subset() -> None:
    assert set(Digits(imbalance=50).load(0).ids or ()) < set(Digits(imbalance=5).load(0).ids or ())


@pytest.mark.parametrize("imbalance", [0.5, 101, float("nan")])
def test_imbalance_out_of_range_is_named(imbalance: float) -> None:
    with pytest.raises(UserError, match=r"data\.imbalance must be in \[1, 100\], got"):
        Digits(imbalance=imbalance)


def test_every_registered_source_says_in_one_line_what_it_is() -> None:
    assert set(SOURCES) >= {"digits", "synthetic", "folder"}
    for source in SOURCES.values():
        line = summary(source)
        assert 20 < len(line) < 110
        # what dataclasses write where there is no docstring
        assert not line.startswith(f"{source.__name__}(")
        assert source.section == "data"


def test_without_the_file_scikit_learn_itself_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Digits().load(0)
    monkeypatch.setattr("fednoro.data.sources.digits.find_spec", lambda name: None)
    found = Digits().load(0)
    assert np.array_equal(found.images, expected.images) and np.array_equal(
        found.labels, expected.labels
    )
