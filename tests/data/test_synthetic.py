"""Synthetic images: the asked-for numbers, and a difficulty that runs from solved to hopeless."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeClassifier

from fednoro.core.types import UserError
from fednoro.data.sources import synthetic
from fednoro.data.sources.synthetic import Synthetic, long_tail


def linear_accuracy(difficulty: float, seed: int) -> float:
    data = Synthetic(images=1200, imbalance=1, difficulty=difficulty, size=16, channels=1).load(
        seed
    )
    pixels = data.images.reshape(len(data), -1) / 255.0
    model = RidgeClassifier(alpha=30).fit(pixels[:800], data.labels[:800])
    return float(np.mean(model.predict(pixels[800:]) == data.labels[800:]))


def test_a_linear_model_goes_from_nearly_perfect_to_chance() -> None:
    accuracy = [linear_accuracy(d, seed=1) for d in (0.0, 0.5, 0.75, 1.0)]
    assert accuracy[0] > 0.98
    assert 0.45 < accuracy[1] < 0.9  # five balanced classes: chance is 0.2
    assert accuracy[1] > accuracy[2] + 0.05 > accuracy[3]
    assert accuracy[3] < 0.28


def test_no_texture_matches_its_class_better_at_full_difficulty() -> None:
    """Even someone who knows the textures and undoes every shift is at chance."""
    data = Synthetic(images=600, imbalance=1, difficulty=1.0, size=16, classes=3).load(0)
    reference = Synthetic(images=600, imbalance=1, difficulty=0.0, size=16, classes=3).load(0)
    texture = np.stack([reference.images[reference.labels == c].mean(axis=0) for c in range(3)])

    def spectrum(images: np.ndarray) -> np.ndarray:  # blind to shifts
        return np.abs(
            np.fft.fft2(images - images.mean(axis=(1, 2), keepdims=True), axes=(1, 2))
        ).reshape(len(images), -1)

    known = spectrum(texture) / np.linalg.norm(spectrum(texture), axis=1, keepdims=True)
    guess = (spectrum(data.images.astype(float)) @ known.T).argmax(axis=1)
    assert abs(np.mean(guess == data.labels) - 1 / 3) < 4 * np.sqrt(2 / 9 / 600)
    easy = (spectrum(reference.images.astype(float)) @ known.T).argmax(axis=1)
    assert np.mean(easy == reference.labels) > 0.98  # so the guess above was a real attempt


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 40), st.integers(0, 3000), st.floats(1, 1e4))
def test_long_tail_fills_every_class_and_falls(classes: int, spare: int, imbalance: float) -> None:
    counts = long_tail(classes + spare, classes, imbalance)
    assert counts.sum() == classes + spare
    assert counts.min() >= 1
    assert (np.diff(counts) <= 0).all()
    quota = np.array([imbalance ** (-c / (classes - 1)) for c in range(classes)])
    assert np.abs(counts - 1 - spare * quota / quota.sum()).max() <= 1 + 1e-6


def test_default_has_the_imbalance_asked_for() -> None:
    counts = np.bincount(Synthetic().load(0).labels)
    assert counts.sum() == 2000
    assert counts[0] / counts[-1] == pytest.approx(10, rel=0.05)


@pytest.mark.parametrize(("size", "channels", "classes"), [(4, 1, 2), (9, 3, 7), (33, 4, 3)])
def test_any_shape(size: int, channels: int, classes: int) -> None:
    data = Synthetic(images=50, size=size, channels=channels, classes=classes).load(0)
    assert data.images.shape == (50, size, size, channels)
    assert len(data.classes) == classes
    assert set(data.labels.tolist()) == set(range(classes))
    assert data.images.std() > 10


def test_same_seed_same_bits_and_another_seed_other_images() -> None:
    first, again, other = (Synthetic(images=60).load(seed) for seed in (1, 1, 2))
    assert np.array_equal(first.images, again.images)
    assert np.array_equal(first.labels, again.labels)
    assert not np.array_equal(first.images, other.images)


def test_chunks_cover_every_image_and_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "_CHUNK_VALUES", 7 * 8 * 8 * 3)
    seen: list[tuple[str, int, int]] = []
    data = Synthetic(images=20, size=8).load(0, lambda *step: seen.append(step))
    assert seen == [
        ("drawing images", 7, 20),
        ("drawing images", 14, 20),
        ("drawing images", 20, 20),
    ]
    assert (data.images.reshape(20, -1).std(axis=1) > 5).all()
    assert len({image.tobytes() for image in data.images}) == 20


def test_sites_are_a_column_on_request() -> None:
    assert Synthetic(images=20).load(0).sites is None
    sites = Synthetic(images=300, sites=4).load(0).sites
    assert sites is not None
    assert set(sites) == {"site 0", "site 1", "site 2", "site 3"}


def test_fewer_images_than_classes_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"data\.images must be at least data\.classes \(5\).*got 4"
    ):
        Synthetic(images=4).load(0)


@pytest.mark.parametrize(
    "wrong", [{"difficulty": 1.5}, {"classes": 1}, {"imbalance": 0.9}, {"size": 2}, {"sites": -1}]
)
def test_values_out_of_range_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=f"data.{next(iter(wrong))} must be"):
        Synthetic(**wrong)  # type: ignore[arg-type]
