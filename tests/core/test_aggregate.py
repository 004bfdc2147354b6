"""DaAgg and averaging against explicit float64 loops."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fednoro.core import aggregate
from fednoro.core.aggregate import (
    average,
    daagg_weights,
    distance_weights,
    mix,
    nearest_clean,
    pairwise_distances,
    size_weights,
)
from fednoro.core.types import FedNoRoWarning, UserError, Weights

SIZES = [30, 10, 25, 5, 40]
NOISY = [False, True, False, True, True]
SEGMENTS = [4, 1, 12, 3]


def matrix(seed: int = 0, k: int = 5, p: int = 20, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(k, p))).to(dtype)


def networks(k: int = 5) -> list[dict[str, Tensor]]:
    """State dicts with BatchNorm: floating-point statistics and an integer counter."""
    torch.manual_seed(3)
    dicts = []
    for i in range(k):
        net = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
        net(torch.randn(8, 1, 3, 3))
        net[1].num_batches_tracked += 1000 * i  # must not count as a distance
        dicts.append(net.state_dict())
    return dicts


def slow_distance(a: Sequence[float], b: Sequence[float]) -> float:
    return math.sqrt(math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)))


def slow_nearest(tensors: list[list[list[float]]], noisy: list[bool]) -> list[float]:
    """d(k) from K models, each a list of tensors: the sum over tensors of their distances."""
    d = []
    for k, own in enumerate(tensors):
        others = [
            sum(slow_distance(a, b) for a, b in zip(own, tensors[j], strict=True))
            for j in range(len(tensors))
            if not noisy[j]
        ]
        d.append(min(others) if noisy[k] else 0.0)
    return d


def slow_weights(d: list[float], sizes: list[int]) -> list[float]:
    raw = [n * math.exp(-x / max(d)) for n, x in zip(sizes, d, strict=True)]
    return [r / sum(raw) for r in raw]


def cut(row: list[float], segments: list[int]) -> list[list[float]]:
    parts, start = [], 0
    for size in segments:
        parts.append(row[start : start + size])
        start += size
    return parts


def close(got: Tensor, expected: Sequence[float], rel: float = 1e-12) -> None:
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx(expected, rel=rel, abs=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairwise_distances_match_the_loops(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(aggregate._BLOCK, "cpu", 7 * 5)  # several blocks and a remainder
    models = matrix(dtype=dtype)
    before = models.clone()
    distances = pairwise_distances(models)
    for i in range(5):
        close(
            distances[i], [slow_distance(models[i].tolist(), models[j].tolist()) for j in range(5)]
        )
    assert torch.equal(distances, distances.T)
    assert torch.equal(models, before)


def test_distances_survive_a_large_common_offset() -> None:
    rng = np.random.default_rng(0)
    common = rng.normal(scale=1000, size=50_000).astype(np.float32)
    ulps = rng.integers(-2, 3, size=(4, 50_000)).astype(np.float32)
    # differ in the last bits only
    models = torch.from_numpy(common + ulps * np.spacing(np.abs(common)))
    distances = pairwise_distances(models)
    for i in range(4):
        close(
            distances[i],
            [slow_distance(models[i].tolist(), models[j].tolist()) for j in range(4)],
            rel=1e-9,
        )
    assert (distances + torch.eye(4) > 0).all()


@given(st.integers(0, 2**32), st.integers(1, 3000), st.sampled_from([1e-20, 1e-3, 1.0, 1e6]))
@settings(deadline=None, max_examples=40)
def test_exact_duplicates_are_at_distance_zero(seed: int, p: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy(
        (rng.normal(size=(3, p)) * scale + rng.normal(size=p)).astype(np.float32)
    )
    models = rows[torch.from_numpy(rng.permutation([0, 0, 0, 1, 1, 2]))]
    distances = pairwise_distances(models)
    same = (models[:, None] == models[None]).all(dim=-1)
    assert (distances[same] == 0).all()
    assert distances.isfinite().all()


def test_what_the_gram_matrix_cannot_resolve_is_at_distance_zero() -> None:
    models = matrix(k=3, p=1000, dtype=torch.float64)
    for share, resolved in ((1e-5, True), (1e-7, False)):
        models[2] = models[1] * (1 + share)
        distance = pairwise_distances(models)[1, 2].item()
        assert distance == pytest.approx(
            models[1].norm().item() * share if resolved else 0.0, rel=1e-3, abs=0
        )


def test_paper_distance_is_one_norm_over_the_vector() -> None:
    models = matrix()
    d = slow_nearest([[row] for row in models.tolist()], NOISY)
    close(nearest_clean(models, NOISY), d)
    close(daagg_weights(models, SIZES, NOISY), slow_weights(d, SIZES))
    close(daagg_weights(models.numpy(), np.array(SIZES), np.array(NOISY)), slow_weights(d, SIZES))


def test_reference_distance_is_one_norm_per_tensor() -> None:
    models = matrix()
    d = slow_nearest([cut(row, SEGMENTS) for row in models.tolist()], NOISY)
    close(nearest_clean(models, NOISY, "reference", SEGMENTS), d)
    close(
        daagg_weights(models, SIZES, NOISY, "reference", segments=SEGMENTS), slow_weights(d, SIZES)
    )


def test_state_dicts_count_every_floating_point_tensor_and_no_counter() -> None:
    models = networks()
    floats = [
        [
            value.flatten().tolist()
            for key, value in model.items()
            if not key.endswith("num_batches_tracked")
        ]
        for model in models
    ]
    per_tensor = slow_nearest(floats, NOISY)
    whole = slow_nearest([[list(chain(*model))] for model in floats], NOISY)
    close(nearest_clean(models, NOISY, "reference"), per_tensor)
    close(nearest_clean(models, NOISY, "paper"), whole)
    close(daagg_weights(models, SIZES, NOISY, "reference"), slow_weights(per_tensor, SIZES))
    close(daagg_weights(models, SIZES, NOISY), slow_weights(whole, SIZES))


def test_state_dicts_may_list_their_keys_in_any_order() -> None:
    models = networks()
    turned = [models[0], *(OrderedDict(reversed(model.items())) for model in models[1:])]
    assert torch.equal(daagg_weights(turned, SIZES, NOISY), daagg_weights(models, SIZES, NOISY))


def test_clean_clients_are_at_distance_exactly_zero() -> None:
    d = nearest_clean(matrix(), NOISY)
    assert d[~torch.tensor(NOISY)].tolist() == [0.0, 0.0]
    assert (d[torch.tensor(NOISY)] > 0).all()


@pytest.mark.parametrize("distance", ["paper", "reference"])
def test_nobody_flagged_weights_by_size(distance: aggregate.Distance) -> None:
    weights = daagg_weights(matrix(), SIZES, [False] * 5, distance, SEGMENTS)
    assert weights.tolist() == [n / sum(SIZES) for n in SIZES]


def test_everybody_flagged_weights_by_size_and_warns() -> None:
    with pytest.warns(FedNoRoWarning, match="every client is flagged"):
        weights = daagg_weights(matrix(), SIZES, [True] * 5)
    assert weights.tolist() == [n / sum(SIZES) for n in SIZES]


def test_equal_models_weigh_by_size() -> None:
    weights = daagg_weights(matrix()[:1].expand(5, -1), SIZES, NOISY)
    assert weights.tolist() == [n / sum(SIZES) for n in SIZES]


@given(st.integers(0, 2**32), st.integers(1, 8), st.data())
@settings(deadline=None, max_examples=60)
def test_weights_are_a_distribution_and_favour_the_closer_of_equal_size(
    seed: int, k: int, data: st.DataObject
) -> None:
    noisy = data.draw(
        st.lists(st.booleans(), min_size=k, max_size=k).filter(lambda flags: not all(flags))
    )
    models = matrix(seed, k, 11)
    weights = daagg_weights(models, [7] * k, noisy)
    assert weights.sum().item() == pytest.approx(1, rel=1e-12)
    assert (weights > 0).all()
    d = nearest_clean(models, noisy)
    order = torch.argsort(d)
    assert (weights[order].diff() <= 1e-15).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_broken_model_is_named(broken: float) -> None:
    models = matrix()
    models[3, 4] = broken
    for flags in (NOISY, [False] * 5):
        with pytest.raises(UserError, match="model of client 3"):
            daagg_weights(models, SIZES, flags)
    with pytest.raises(UserError, match="model of client 3"):
        nearest_clean(models, NOISY)


def test_values_whose_squares_overflow_count_as_broken() -> None:
    models = matrix(dtype=torch.float64)
    models[1, 0] = 1e200
    with pytest.raises(UserError, match="model of client 1"):
        daagg_weights(models, SIZES, NOISY)


def test_mistakes_in_the_arguments_are_named() -> None:
    models = matrix()
    with pytest.raises(UserError, match="needs `segments`"):
        daagg_weights(models, SIZES, NOISY, "reference")
    with pytest.raises(UserError, match="add up to the 20 columns of models, got 19"):
        daagg_weights(models, SIZES, NOISY, "reference", segments=[10, 9])
    with pytest.raises(UserError, match="distance must be one of paper, reference, got 'cosine'"):
        daagg_weights(models, SIZES, [False] * 5, "cosine")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"sizes must have one entry per model \(5\), got 4"):
        daagg_weights(models, SIZES[:4], NOISY)
    with pytest.raises(
        UserError, match=r"noisy must have one entry per model \(5\), got shape \(4,\)"
    ):
        daagg_weights(models, SIZES, NOISY[:4])
    numbers = r"got \[0, 2, 3, 1, 4\]: with client numbers, \[k in numbers for k in range\(5\)\]"
    with pytest.raises(UserError, match=f"noisy must say for each client whether it is, {numbers}"):
        daagg_weights(models, SIZES, [0, 2, 3, 1, 4])
    assert torch.equal(
        daagg_weights(models, SIZES, NOISY), daagg_weights(models, SIZES, [int(f) for f in NOISY])
    )
    with pytest.raises(UserError, match="sizes must be positive, got 0 for client 2"):
        daagg_weights(models, [1, 1, 0, 1, 1], NOISY)
    with pytest.raises(
        UserError, match=r"floating-point K×P matrix, got torch.float32 of shape \(20,\)"
    ):
        daagg_weights(models[0], SIZES, NOISY)
    with pytest.raises(UserError, match=r"floating-point K×P matrix, got torch.int64"):
        daagg_weights(torch.ones(5, 2, dtype=torch.int64), SIZES, NOISY)
    with pytest.raises(UserError, match="sequence of state dicts"):
        daagg_weights([], SIZES, NOISY)
    with pytest.raises(UserError, match="at least one clean client"):
        nearest_clean(models, [True] * 5)


def test_state_dicts_that_do_not_fit_name_the_key() -> None:
    models = networks()
    with pytest.raises(UserError, match=r"'3\.bias' is not in both client 0 and client 2"):
        daagg_weights(
            [*models[:2], {k: v for k, v in models[2].items() if k != "3.bias"}, *models[3:]],
            SIZES,
            NOISY,
        )
    with pytest.raises(
        UserError,
        match=r"'3\.bias' is torch.float32 \(2,\) at client 0 and torch.float32 \(7,\) at",
    ):
        daagg_weights([*models[:4], {**models[4], "3.bias": torch.ones(7)}], SIZES, NOISY)
    with pytest.raises(UserError, match="at least one floating-point tensor"):
        daagg_weights([{"n": torch.tensor(1)}] * 5, SIZES, NOISY)


def test_read_only_arrays_are_accepted() -> None:
    models = matrix().numpy()
    models.flags.writeable = False
    assert torch.equal(daagg_weights(models, SIZES, NOISY), daagg_weights(matrix(), SIZES, NOISY))


def test_distance_weights_are_daagg_with_distances_given() -> None:
    models = matrix()
    d = nearest_clean(models, NOISY)
    close(distance_weights(d, SIZES), slow_weights(d.tolist(), SIZES))
    assert torch.equal(distance_weights(d, SIZES), daagg_weights(models, SIZES, NOISY))
    assert torch.equal(distance_weights(torch.zeros(5), SIZES), size_weights(SIZES))
    with pytest.raises(
        UserError, match=r"distances must have one entry per client \(5\), got \(4,\)"
    ):
        distance_weights(d[:4], SIZES)


def test_size_weights_are_shares() -> None:
    close(size_weights([1, 3]), [0.25, 0.75])
    for bad in ([1, -2], [1, math.nan], [1, math.inf]):
        with pytest.raises(UserError, match="for client 1"):
            size_weights(bad)
    with pytest.raises(UserError, match="one number per client"):
        size_weights([])


def test_mix_is_the_weighted_sum_rounded_once() -> None:
    models, weights = matrix(), size_weights(SIZES)
    columns = list(zip(*models.tolist(), strict=True))
    expected = [
        math.fsum(w * v for w, v in zip(weights.tolist(), column, strict=True))
        for column in columns
    ]
    mixed = mix(models, weights)
    assert mixed.dtype == torch.float32
    assert torch.equal(mixed, torch.tensor(expected, dtype=torch.float64).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_single_model_is_mixed_and_averaged_bit_for_bit(dtype: torch.dtype) -> None:
    model = matrix(k=1, dtype=dtype)
    model[0, :2] = torch.tensor([-0.0, 1e-30])
    for got in (
        mix(model, torch.ones(1)),
        average([(Weights(model[0], torch.tensor([1])), 1.0)]).values,
    ):
        assert got.dtype == dtype
        assert torch.equal(got, model[0])
        assert torch.equal(got.signbit(), model[0].signbit())


def test_mix_rejects_weights_of_another_length() -> None:
    with pytest.raises(UserError, match="K×P matrix and K weights"):
        mix(matrix(), torch.ones(4))


def test_average_is_the_weighted_mean_in_the_input_dtype() -> None:
    models = matrix(1, 4, 9)
    sizes = [3.0, 100.0, 1.0, 20.0]
    result = average(
        (Weights(row, torch.tensor([k])), n)
        for k, (row, n) in enumerate(zip(models, sizes, strict=True))
    )
    columns = list(zip(*models.tolist(), strict=True))
    expected = [
        math.fsum(n * v for n, v in zip(sizes, column, strict=True)) / sum(sizes)
        for column in columns
    ]
    assert torch.equal(result.values, torch.tensor(expected, dtype=torch.float64).float())


def test_average_keeps_the_sizes_of_the_tensors() -> None:
    assert average([(Weights(torch.ones(5), torch.tensor([1]), (2, 3)), 1.0)]).segments == (2, 3)


def test_average_accumulates_in_float64() -> None:
    count = 2000
    rows = [torch.tensor([1e6 + 0.25 * (k % 2)]) for k in range(count)]
    result = average((Weights(row, torch.tensor([0])), 1.0) for row in rows)
    assert result.values.item() == 1e6 + 0.125


def test_counters_come_from_the_largest_weight_and_the_first_on_ties() -> None:
    pairs = [
        (Weights(torch.ones(2), torch.tensor([k])), w) for k, w in enumerate([1.0, 5.0, 5.0, 2.0])
    ]
    result = average(pairs)
    assert result.counters.tolist() == [1]
    assert result.counters.dtype == torch.int64


def test_average_holds_one_model_at_a_time_and_survives_reused_buffers() -> None:
    def stream() -> Iterator[tuple[Weights, float]]:
        values, counters = torch.empty(3), torch.empty(1, dtype=torch.int64)
        for k, weight in enumerate([4.0, 1.0, 3.0]):
            yield Weights(values.fill_(k), counters.fill_(k)), weight

    result = average(stream())
    assert result.values.tolist() == [0.875] * 3
    assert result.counters.tolist() == [0]


def test_average_of_nothing_is_an_error() -> None:
    one = Weights(torch.ones(2), torch.tensor([1]))
    with pytest.raises(UserError, match="at least one model"):
        average([])
    with pytest.raises(UserError, match="total weight above 0"):
        average([(one, 0.0), (one, 0.0)])
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(UserError, match="for model 1"):
            average([(one, 1.0), (one, weight)])
    with pytest.raises(UserError, match="models must all have 2 values, got 3 for model 1"):
        average([(one, 1.0), (Weights(torch.ones(3), one.counters), 1.0)])
