"""The loss equations against slow float64 loops, in value and in gradient."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednoro.core.losses import (
    Adjust,
    distill,
    gaussian_ramp,
    log_prior,
    logit_adjusted_ce,
    per_class_losses,
)
from fednoro.core.types import UserError

ADJUST: tuple[Adjust, ...] = ("student", "none", "both")
COUNTS = torch.tensor([7, 0, 2, 0, 1])  # two absent classes


def batch(seed: int = 0, counts: Tensor = COUNTS, size: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels among the held classes, and teacher logits."""
    rng = np.random.default_rng(seed)
    held = np.flatnonzero(counts.numpy())
    logits, teacher = (
        torch.from_numpy(rng.normal(scale=3, size=(size, len(counts)))) for _ in range(2)
    )
    return logits, torch.from_numpy(rng.choice(held, size)), teacher


def softmax(row: list[float]) -> list[float]:
    largest = max(row)
    parts = [math.exp(v - largest) for v in row]
    return [p / sum(parts) for p in parts]


def plus(row: list[float], counts: list[int]) -> list[float]:
    """`row + log π` in plain Python."""
    return [
        v + (math.log(n / sum(counts)) if n else -math.inf)
        for v, n in zip(row, counts, strict=True)
    ]


def slow_ce(logits: Tensor, labels: Tensor, counts: Tensor) -> float:
    rows = [softmax(plus(row, counts.tolist())) for row in logits.tolist()]
    return -sum(math.log(row[y]) for row, y in zip(rows, labels.tolist(), strict=True)) / len(rows)


def slow_kl(
    logits: Tensor, teacher: Tensor, temperature: float, counts: Tensor, adjust: Adjust
) -> float:
    total, n = 0.0, counts.tolist()
    for student_row, teacher_row in zip(logits.tolist(), teacher.tolist(), strict=True):
        y_p = softmax(student_row if adjust == "none" else plus(student_row, n))
        warm = [v / temperature for v in teacher_row]
        y_g = softmax(plus(warm, n) if adjust == "both" else warm)
        for p, g in zip(y_p, y_g, strict=True):
            if g > 0:
                total += g * (math.log(g) - (math.log(p) if p > 0 else 0.0))
    return total / len(logits)


def slow_distill(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor,
    lam: float,
    t: float,
    counts: Tensor,
    adjust: Adjust,
) -> float:
    return lam * slow_kl(logits, teacher, t, counts, adjust) + (1 - lam) * slow_ce(
        logits, labels, counts
    )


def slow_gradient(f: Callable[[Tensor], float], x: Tensor, h: float = 1e-6) -> Tensor:
    """Central differences, entry by entry."""
    gradient = torch.zeros_like(x)
    for i in range(x.numel()):
        step = torch.zeros(x.numel(), dtype=x.dtype)
        step[i] = h
        step = step.view_as(x)
        gradient.view(-1)[i] = (f(x + step) - f(x - step)) / (2 * h)
    return gradient


def fast_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(f(x), x)
    return gradient


def test_log_prior_is_the_log_of_class_frequencies_and_minus_inf_for_absent_classes() -> None:
    expected = [math.log(0.7), -math.inf, math.log(0.2), -math.inf, math.log(0.1)]
    torch.testing.assert_close(
        log_prior(COUNTS.double()), torch.tensor(expected, dtype=torch.float64)
    )
    assert log_prior(COUNTS).dtype == torch.float32


def test_logit_adjusted_ce_matches_the_loops_in_value_and_gradient() -> None:
    logits, labels, _ = batch()
    prior = log_prior(COUNTS.double())
    assert logit_adjusted_ce(logits, labels, prior).item() == pytest.approx(
        slow_ce(logits, labels, COUNTS), rel=1e-12
    )
    torch.testing.assert_close(
        fast_gradient(lambda z: logit_adjusted_ce(z, labels, prior), logits),
        slow_gradient(lambda z: slow_ce(z, labels, COUNTS), logits),
        rtol=1e-7,
        atol=1e-9,
    )


@pytest.mark.parametrize("adjust", ADJUST)
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_distill_matches_the_loops_in_value_and_gradient(adjust: Adjust, lam: float) -> None:
    logits, labels, teacher = batch()
    prior = log_prior(COUNTS.double())
    value = distill(logits, labels, teacher, lam, 0.8, prior, adjust=adjust)
    assert value.item() == pytest.approx(
        slow_distill(logits, labels, teacher, lam, 0.8, COUNTS, adjust), rel=1e-12
    )
    torch.testing.assert_close(
        fast_gradient(
            lambda z: distill(z, labels, teacher, lam, 0.8, prior, adjust=adjust), logits
        ),
        slow_gradient(lambda z: slow_distill(z, labels, teacher, lam, 0.8, COUNTS, adjust), logits),
        rtol=1e-7,
        atol=1e-8,
    )


@pytest.mark.parametrize("adjust", ADJUST)
def test_gradcheck_of_distill_with_absent_classes(adjust: Adjust) -> None:
    logits, labels, teacher = batch(seed=1)
    prior = log_prior(COUNTS.double())
    assert torch.autograd.gradcheck(
        lambda z, lam: distill(z, labels, teacher, lam, 0.8, prior, adjust=adjust),
        (logits.requires_grad_(), torch.tensor(0.4, dtype=torch.float64, requires_grad=True)),
    )


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any),
    st.sampled_from(ADJUST),
)
@settings(deadline=None, max_examples=60)
def test_distill_is_finite_with_any_absent_classes_and_extreme_logits(
    seed: int, counts: list[int], adjust: Adjust
) -> None:
    logits, labels, teacher = (
        v.float() if v.is_floating_point() else v for v in batch(seed, torch.tensor(counts))
    )
    for scale in (1.0, 1e3, 1e6):
        z = (logits * scale).requires_grad_()
        f_g = (teacher * scale).requires_grad_()
        value = distill(
            z, labels, f_g, torch.tensor(0.5), 0.8, log_prior(torch.tensor(counts)), adjust=adjust
        )
        (gradient,) = torch.autograd.grad(value, z, retain_graph=True)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert torch.autograd.grad(value, f_g, allow_unused=True) == (None,)


@pytest.mark.parametrize("adjust", ADJUST)
@pytest.mark.parametrize("zero", [0.0, torch.tensor(0.0)])
def test_distill_without_lambda_is_the_adjusted_ce(adjust: Adjust, zero: float | Tensor) -> None:
    logits, labels, teacher = batch()
    prior = log_prior(COUNTS.double())
    assert torch.equal(
        distill(logits, labels, teacher, zero, 0.8, prior, adjust=adjust),
        logit_adjusted_ce(logits, labels, prior),
    )
    torch.testing.assert_close(
        fast_gradient(
            lambda z: distill(z, labels, teacher, zero, 0.8, prior, adjust=adjust), logits
        ),
        fast_gradient(lambda z: logit_adjusted_ce(z, labels, prior), logits),
        rtol=1e-14,
        atol=1e-16,
    )


def test_lambda_may_be_a_tensor() -> None:
    logits, labels, teacher = batch()
    prior = log_prior(COUNTS.double())
    by_float = distill(logits, labels, teacher, 0.3, 0.8, prior)
    assert torch.equal(
        distill(logits, labels, teacher, torch.tensor(0.3, dtype=torch.float64), 0.8, prior),
        by_float,
    )


def test_the_three_places_of_the_prior_differ_and_the_default_is_the_student() -> None:
    logits, labels, teacher = batch()
    prior = log_prior(COUNTS.double())
    values = {a: distill(logits, labels, teacher, 0.5, 0.8, prior, adjust=a).item() for a in ADJUST}
    assert len(set(values.values())) == 3
    assert distill(logits, labels, teacher, 0.5, 0.8, prior).item() == values["student"]


def test_an_unknown_place_of_the_prior_is_named() -> None:
    logits, labels, teacher = batch()
    with pytest.raises(UserError, match="adjust must be one of student, none, both, got 'teacher'"):
        distill(logits, labels, teacher, 0.5, 0.8, log_prior(COUNTS.double()), adjust="teacher")  # type: ignore[arg-type]


def test_half_precision_logits_are_distilled_in_the_precision_of_the_prior() -> None:
    logits, labels, teacher = (v.bfloat16() if v.is_floating_point() else v for v in batch())
    prior = log_prior(COUNTS)
    for adjust in ADJUST:
        half = distill(logits, labels, teacher, 0.5, 0.8, prior, adjust=adjust)
        full = distill(logits.float(), labels, teacher.float(), 0.5, 0.8, prior, adjust=adjust)
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, full)


def test_per_class_losses_are_means_of_the_plain_ce_with_nan_for_missing() -> None:
    logits, labels, _ = batch(size=40)
    means, counts = per_class_losses(logits.float(), labels, 5)
    assert means.dtype == counts.dtype == torch.float64
    for c in range(5):
        own = [
            -math.log(softmax(z)[c])
            for z, y in zip(logits.float().tolist(), labels.tolist(), strict=True)
            if y == c
        ]
        assert counts[c] == len(own)
        assert (
            means[c].item() == pytest.approx(sum(own) / len(own), rel=1e-12)
            if own
            else means[c].isnan()
        )


def test_an_infinite_loss_stays_within_its_class() -> None:
    means, _ = per_class_losses(
        torch.tensor([[0.0, -math.inf], [0.0, 0.0]]), torch.tensor([1, 0]), 2
    )
    assert means[1] == math.inf
    assert means[0].item() == pytest.approx(math.log(2))


@pytest.mark.parametrize("adjust", ADJUST)
def test_no_tensor_value_is_read_on_the_host(adjust: Adjust) -> None:
    # meta tensors have no values: `.item()`, `bool()` and numpy fail on them
    # as they do in a CUDA graph
    logits = torch.empty(6, 5, device="meta", requires_grad=True)
    labels, counts, lam = (torch.empty(n, device="meta", dtype=torch.int64) for n in (6, 5, ()))
    prior = log_prior(counts)
    loss = distill(logits, labels, logits, lam.float(), 0.8, prior, adjust=adjust)
    (loss + logit_adjusted_ce(logits, labels, prior)).backward()
    assert logits.grad is not None
    assert [v.shape for v in per_class_losses(logits, labels, 5)] == [(5,), (5,)]


def test_the_ramp_of_the_ich_setting() -> None:
    assert gaussian_ramp(10, 10, 49, 0.8) == 0.0
    assert gaussian_ramp(10, 10, 49, 0.8, start_at_zero=False) == pytest.approx(0.0054, abs=5e-5)
    assert gaussian_ramp(10, 10, 49, 0.8, start_at_zero=False) == 0.8 * math.exp(-5)
    for t in range(11, 50):
        expected = 0.8 * math.exp(-5 * (1 - (t - 10) / 39) ** 2)
        assert (
            gaussian_ramp(t, 10, 49, 0.8)
            == gaussian_ramp(t, 10, 49, 0.8, start_at_zero=False)
            == expected
        )
    assert gaussian_ramp(49, 10, 49, 0.8) == gaussian_ramp(99, 10, 49, 0.8) == 0.8


def test_the_ramp_before_its_beginning() -> None:
    assert gaussian_ramp(3, 10, 49, 0.8) == 0.0
    assert gaussian_ramp(3, 10, 49, 0.8, start_at_zero=False) == 0.8 * math.exp(-5)


@pytest.mark.parametrize("end", [10, 5])
def test_an_empty_ramp_is_a_step_at_its_beginning(end: int) -> None:
    assert [gaussian_ramp(t, 10, end, 0.8) for t in (4, 7, 9, 10, 11)] == [0, 0, 0, 0.8, 0.8]


@given(st.integers(0, 50), st.integers(1, 50), st.floats(0, 1))
@settings(deadline=None, max_examples=50)
def test_the_ramp_never_falls_and_ends_at_its_peak(begin: int, length: int, peak: float) -> None:
    values = [gaussian_ramp(t, begin, begin + length, peak) for t in range(begin + length + 2)]
    assert values == sorted(values)
    assert values[begin] == 0
    assert values[-1] == values[-2] == peak
