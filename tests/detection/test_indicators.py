"""What clients measure for the first-stage ablation, and the matrices that the mixture gets."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednoro.core.types import FloatArray, UserError
from fednoro.detection import indicators
from fednoro.detection.indicators import (
    INDICATORS,
    class_losses,
    confidence,
    lid,
    mean_lid,
    mean_loss,
)
from fednoro.detection.mixture import flagged_sets

NAN, INF = math.nan, math.inf


def softmax_points(samples: int, classes: int = 5, seed: int = 0) -> Tensor:
    rng = np.random.default_rng(seed)
    return torch.softmax(torch.from_numpy(rng.normal(scale=2, size=(samples, classes))), dim=1)


def slow_lid(rows: list[list[float]], k: int, eps: float = 1e-6) -> list[float]:
    values = []
    for i, row in enumerate(rows):
        nearest = sorted(math.dist(row, other) for j, other in enumerate(rows) if j != i)[:k]
        logs = [math.log(d / (nearest[-1] + eps)) if d else -INF for d in nearest]
        values.append(-len(nearest) / sum(logs) if nearest else NAN)
    return values


# LID


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 25), st.integers(0, 10**6))
def test_lid_is_the_formula(samples: int, classes: int, k: int, seed: int) -> None:
    points = softmax_points(samples, classes, seed)
    points[samples // 2 :: 3] = points[0].clone()  # duplicates
    found = lid(points, k)
    np.testing.assert_allclose(found.numpy(), slow_lid(points.tolist(), k), rtol=1e-9)
    assert found.dtype == torch.float64


def test_lid_does_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    points = softmax_points(57)
    whole = lid(points)
    for entries in (1, 57, 57 * 10, 57 * 56):
        monkeypatch.setattr(indicators, "_ENTRIES", entries)
        torch.testing.assert_close(lid(points), whole, rtol=0, atol=0)


def test_lid_holds_a_chunk_of_the_distances_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    cdist = torch.cdist

    def watched(*args: Tensor, **kwargs: str) -> Tensor:
        distances = cdist(*args, **kwargs)  # type: ignore[arg-type]
        held.append(distances.numel())
        return distances

    monkeypatch.setattr(torch, "cdist", watched)
    monkeypatch.setattr(indicators, "_ENTRIES", 5000)
    lid(softmax_points(700))
    assert max(held) <= 5000 and sum(held) == 700**2


def test_lid_of_a_uniform_cloud_is_about_its_dimension() -> None:
    rng = np.random.default_rng(0)
    line = torch.from_numpy(np.c_[rng.uniform(size=2000), np.zeros((2000, 3))])
    plane = torch.from_numpy(np.c_[rng.uniform(size=(2000, 2)), np.zeros((2000, 2))])
    assert lid(line).median() == pytest.approx(1, abs=0.15)
    assert lid(plane).median() == pytest.approx(2, abs=0.3)


def test_with_few_samples_all_the_others_are_neighbours() -> None:
    points = softmax_points(6)
    torch.testing.assert_close(lid(points, 20), lid(points, 5))
    assert torch.isfinite(lid(points[:2])).all()
    assert lid(points[:1]).isnan().all() and lid(points[:0]).shape == (0,)


def test_an_exact_duplicate_has_lid_zero_and_equal_distances_stay_finite() -> None:
    points = softmax_points(30)
    points[7] = points[3].clone()
    assert lid(points)[[3, 7]].tolist() == [0, 0] and (lid(points) == 0).sum() == 2
    assert (lid(points[:1].expand(5, -1)) == 0).all()
    corners = lid(torch.eye(4))  # every distance is √2
    assert (corners > 1e5).all() and (corners <= math.sqrt(2) / 1e-6 + 1).all()


def test_lid_takes_float32_and_carries_no_gradient() -> None:
    points = softmax_points(30).float().requires_grad_()
    found = lid(points)
    assert found.dtype == torch.float64 and not found.requires_grad
    torch.testing.assert_close(found, lid(points.detach().double()), rtol=0, atol=0)


# The other measures


def slow_row(logits: Tensor, labels: Tensor) -> tuple[float, float, dict[int, float]]:
    """Confidence, loss, class losses."""
    chances = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        parts = [math.exp(v - max(row)) for v in row]
        chances.append(parts[label] / sum(parts))
    by_class = {
        c: [-math.log(p) for p, y in zip(chances, labels.tolist(), strict=True) if y == c]
        for c in range(4)
    }
    return (
        sum(chances) / len(chances),
        -sum(map(math.log, chances)) / len(chances),
        {c: sum(values) / len(values) for c, values in by_class.items() if values},
    )


def test_measures_are_their_formulas() -> None:
    rng = np.random.default_rng(1)
    logits, labels = (
        torch.from_numpy(rng.normal(size=(40, 4))),
        torch.from_numpy(rng.choice([0, 1, 3], 40)),
    )
    chance, loss, by_class = slow_row(logits, labels)
    assert confidence(logits, labels, 4).item() == pytest.approx(chance, rel=1e-12)
    assert mean_loss(logits, labels, 4).item() == pytest.approx(loss, rel=1e-12)
    expected = [by_class.get(c, NAN) for c in range(4)]
    np.testing.assert_allclose(class_losses(logits, labels, 4).numpy(), expected, rtol=1e-12)
    mean = np.mean(slow_lid(torch.softmax(logits, 1).tolist(), 20))
    assert mean_lid(logits, labels, 4).item() == pytest.approx(mean, rel=1e-9)


@pytest.mark.parametrize("name", INDICATORS)
@pytest.mark.parametrize("samples", [0, 1, 2, 30])
def test_every_indicator_reports_a_row_of_the_same_length(name: str, samples: int) -> None:
    rng = np.random.default_rng(0)
    logits, labels = (
        torch.from_numpy(rng.normal(size=(samples, 4))).float(),
        torch.zeros(samples, dtype=torch.int64),
    )
    row = INDICATORS[name].row(logits, labels, 4)
    per_class = name.startswith("per_class")
    assert row.shape == (4 if per_class else 1,) and row.dtype == np.float64
    nothing = samples < (2 if name == "lid" else 1)
    assert np.isnan(row[0]) == nothing and np.isfinite(row[0]) != nothing
    assert np.isnan(row[1:]).all()


@pytest.mark.parametrize("name", INDICATORS)
@pytest.mark.parametrize("broken", [NAN, INF])
def test_broken_outputs_do_not_pass_for_missing_classes(name: str, broken: float) -> None:
    logits, labels = torch.zeros(5, 3), torch.tensor([0, 0, 1, 1, 1])
    logits[4, 0] = broken
    assert np.isinf(INDICATORS[name].row(logits, labels, 3)).all()


# Features


def test_per_class_features_are_filled_and_scaled_as_in_detection() -> None:
    rows = [[1.0, NAN, 2.0], [3.0, 4.0, NAN], [2.0, 6.0, 2.0]]
    assert INDICATORS["per_class"].features(rows).tolist() == [[1, 4, 2], [3, 4, 2], [2, 6, 2]]
    assert INDICATORS["per_class_norm"].features(rows).tolist() == [
        [0, 0, 0],
        [1, 0, 0],
        [0.5, 1, 0],
    ]


def test_features_are_larger_for_noisier_clients() -> None:
    assert INDICATORS["confidence"].features([[0.75], [0.25]]).tolist() == [[0.25], [0.75]]
    for name in ("lid", "loss"):
        assert INDICATORS[name].features([[3.0], [0.5]]).tolist() == [[3], [0.5]]


@pytest.mark.parametrize("name", ["per_class", "per_class_norm"])
def test_a_client_without_a_usable_row_takes_no_part_and_is_not_trusted(name: str) -> None:
    rng = np.random.default_rng(3)
    rows = rng.uniform(size=(12, 3)) + np.where(np.arange(12) < 4, 5.0, 0.0)[:, None]
    extended = np.insert(rows, [2, 7], [[INF, NAN, 1.0], [NAN, NAN, NAN]], axis=0)
    features, without = INDICATORS[name].features(extended), INDICATORS[name].features(rows)
    spoilt = [2, 8]
    assert np.isnan(features[spoilt]).all()
    np.testing.assert_array_equal(np.delete(features, spoilt, axis=0), without)
    flags = flagged_sets(features, 5)
    assert flags[:, spoilt].all()
    np.testing.assert_array_equal(np.delete(flags, spoilt, axis=1), flagged_sets(without, 5))


def test_features_where_nobody_is_usable() -> None:
    features = INDICATORS["per_class_norm"].features([[INF, 1.0], [NAN, NAN]])
    assert np.isnan(features).all() and flagged_sets(features, 3).all()


@pytest.mark.parametrize("rows", [[], [[]], [1.0, 2.0], np.zeros((2, 0))])
def test_rows_of_another_shape_are_refused(rows: FloatArray) -> None:
    with pytest.raises(UserError, match="rows must be K×D"):
        INDICATORS["loss"].features(rows)


@pytest.mark.parametrize("name", INDICATORS)
def test_every_indicator_finds_clients_whose_labels_are_all_wrong(name: str) -> None:
    rng = np.random.default_rng(5)
    rows = []
    for client in range(10):
        true = rng.integers(0, 4, 60)
        noise = rng.normal(scale=0.3, size=(60, 4))
        if client < 3:
            labels = (true + rng.integers(1, 4, 60)) % 4
            # unsure, so that softmax space is filled as well
            logits = 1.5 * np.eye(4)[true] + 4 * noise
        else:
            labels, logits = true, 5 * np.eye(4)[true] + noise
        rows.append(INDICATORS[name].row(torch.from_numpy(logits), torch.from_numpy(labels), 4))
    flags = flagged_sets(INDICATORS[name].features(rows), 20)
    if name == "lid":  # its scale has little to do with labels here: only that it splits
        assert flags.any()
    else:
        assert (flags == (np.arange(10) < 3)).all()
