"""RHFL's loss and aggregation against slow float64 loops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fednoro.core.losses import symmetric_ce
from fednoro.core.types import Replies, Reply, State, Weights
from fednoro.methods import RHFL


def batch(scale: float = 3.0, classes: int = 5, size: int = 7) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(4)
    return torch.from_numpy(rng.normal(scale=scale, size=(size, classes))), torch.from_numpy(
        rng.integers(0, classes, size)
    )


def slow_sce(logits: Tensor, labels: Tensor, alpha: float, beta: float) -> float:
    total = 0.0
    for row, y in zip(logits.tolist(), labels.tolist(), strict=True):
        largest = max(row)
        mass = sum(math.exp(v - largest) for v in row)
        p = [math.exp(v - largest) / mass for v in row]
        ce = math.log(mass) + largest - row[y]
        rce = 0.0
        for c, v in enumerate(p):
            target = 1.0 if c == y else 0.0
            rce -= max(v, 1e-7) * math.log(max(target, 1e-4))
        total += alpha * ce + beta * rce
    return total / len(logits)


@pytest.mark.parametrize("scale", [1.0, 30.0])  # with 30 most probabilities are below their floor
@pytest.mark.parametrize(("alpha", "beta"), [(0.1, 1.0), (1.0, 0.0), (0.0, 1.0), (0.3, 2.0)])
def test_symmetric_ce_matches_the_loops_in_value_and_gradient(
    alpha: float, beta: float, scale: float
) -> None:
    logits, labels = batch(scale)
    value = symmetric_ce(logits, labels, alpha, beta).item()
    assert value == pytest.approx(slow_sce(logits, labels, alpha, beta), rel=1e-12)
    z = logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(symmetric_ce(z, labels, alpha, beta), z)
    slow, h = torch.zeros_like(logits), 1e-6
    for i in range(logits.numel()):
        d = torch.zeros(logits.numel(), dtype=torch.float64)
        d[i] = h
        up, down = (slow_sce(logits + s * d.view_as(logits), labels, alpha, beta) for s in (1, -1))
        slow.view(-1)[i] = (up - down) / (2 * h)
    torch.testing.assert_close(gradient, slow, rtol=1e-6, atol=1e-8)


def test_the_default_weights_are_the_papers() -> None:
    logits, labels = batch()
    assert symmetric_ce(logits, labels).item() == pytest.approx(
        slow_sce(logits, labels, 0.1, 1.0), rel=1e-12
    )
    assert (RHFL().alpha, RHFL().beta, RHFL().eta) == (0.1, 1.0, 0.5)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
def test_symmetric_ce_is_finite_in_every_precision(scale: float) -> None:
    logits, labels = batch(scale)
    for dtype in (torch.float32, torch.bfloat16):
        z = logits.to(dtype).requires_grad_()
        value = symmetric_ce(z, labels)
        (gradient,) = torch.autograd.grad(value, z)
        assert value.dtype == torch.float32 and value.isfinite() and gradient.isfinite().all()
        assert value.item() == pytest.approx(
            slow_sce(z.detach().double(), labels, 0.1, 1.0), rel=1e-5
        )


def test_one_class_has_no_loss() -> None:
    assert symmetric_ce(torch.randn(3, 1), torch.zeros(3, dtype=torch.int64)).item() == 0


@pytest.mark.parametrize("behaviour", ["guarded", "paper"])
@pytest.mark.parametrize("weighting", ["size_and_confidence", "confidence"])
def test_aggregation_matches_the_loops(behaviour: Any, weighting: Any) -> None:
    rng = np.random.default_rng(11)
    values = rng.normal(size=(4, 9))
    sizes, before, now = [12, 5, 40, 9], [4.0, 3.0, 5.0, 2.0], [3.0, 3.5, 2.0, 1.9]
    memo = {"sce": {str(k): loss for k, loss in enumerate(before)}}
    state = State(
        Weights(torch.zeros(9, dtype=torch.float64), torch.tensor([0])), 2, 9, 3, 0, memo=memo
    )
    replies = [
        Reply(k, sizes[k], Weights(torch.from_numpy(values[k]), torch.tensor([k])), {"sce": now[k]})
        for k in range(4)
    ]
    method = RHFL(behaviour=behaviour, weighting=weighting, eta=0.8)
    after = method.fold(state, Replies("train", (0, 1, 2, 3), iter(replies)))

    falls = [(before[k] - now[k]) / now[k] for k in range(4)]
    total = sum(abs(f) if behaviour == "guarded" else f for f in falls)
    v = [1 / 3 + 0.8 * f / total for f in falls]
    w = [math.exp(x) / sum(math.exp(y) for y in v) for x in v]
    raw = (
        [n * c for n, c in zip(sizes, w, strict=True)] if weighting == "size_and_confidence" else w
    )
    shares = [r / sum(raw) for r in raw]
    for k in range(4):
        assert after.notes[k]["confidence"] == pytest.approx(w[k], rel=1e-12)
        assert after.notes[k]["weight"] == pytest.approx(shares[k], rel=1e-12)
    expected = [sum(shares[k] * values[k][j] for k in range(4)) for j in range(9)]
    np.testing.assert_allclose(after.model.values.numpy(), expected, rtol=1e-12)
    assert after.memo["sce"] == {str(k): loss for k, loss in enumerate(now)}
