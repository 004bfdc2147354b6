"""FedProx's objective against slow float64 loops, and its proximal term on an
engine that computes in bfloat16.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, federation, three_channels
from torch import Tensor, nn

from fednoro.core.losses import squared_distance
from fednoro.core.training import Training
from fednoro.core.types import Precision, Reply, Step, Task
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.methods import FedProx
from fednoro.models import Cnn, Packed, initialise

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINING = Training(rounds=2, batch=4, lr=1e-3)
CPU = torch.device("cpu")


def some_step() -> Step:
    net, anchor = (initialise(Cnn(width=2), 1, 3, seed).double().eval() for seed in (1, 2))
    anchor.requires_grad_(False)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(6, 1, 5, 5)))
    return Step(
        net, anchor, x, torch.tensor([0, 1, 2, 1, 1, 0]), torch.arange(6), {}, torch.empty(6, 0)
    )


def slow_proximal(net: nn.Module, anchor: nn.Module) -> float:
    total = 0.0
    for (_, w), (_, w_g) in zip(net.named_parameters(), anchor.named_parameters(), strict=True):
        for a, b in zip(w.flatten().tolist(), w_g.flatten().tolist(), strict=True):
            total += (a - b) ** 2 if w.requires_grad else 0.0
    return total


def slow_ce(logits: Tensor, labels: Tensor) -> float:
    rows = zip(logits.tolist(), labels.tolist(), strict=True)
    return sum(math.log(sum(math.exp(v) for v in row)) - row[y] for row, y in rows) / len(logits)


def test_the_objective_matches_the_loops() -> None:
    step = some_step()
    expected = slow_ce(step.net(step.x), step.y) + 0.3 / 2 * slow_proximal(step.net, step.anchor)
    assert FedProx(mu=0.3).loss(step).item() == pytest.approx(expected, rel=1e-12)


def test_the_gradient_is_that_of_ce_plus_mu_times_the_difference() -> None:
    step = some_step()
    parameters = list(step.net.parameters())
    tied = torch.autograd.grad(FedProx(mu=0.3).loss(step), parameters)
    plain = torch.autograd.grad(FedProx(mu=0).loss(step), parameters)
    for p, w_g, a, b in zip(parameters, step.anchor.parameters(), tied, plain, strict=True):
        torch.testing.assert_close(a, b + 0.3 * (p.detach() - w_g), rtol=1e-10, atol=1e-14)


def test_only_trainable_parameters_count() -> None:
    step = some_step()
    for buffer in step.net.buffers():
        buffer.add_(1)
    first = next(step.net.parameters())
    whole = squared_distance(step.net.parameters(), step.anchor.parameters())
    first.requires_grad_(False)
    part = squared_distance(step.net.parameters(), step.anchor.parameters())
    assert part.item() == pytest.approx(slow_proximal(step.net, step.anchor), rel=1e-12)
    assert part < whole


def test_networks_that_do_not_match_are_noticed() -> None:
    step = some_step()
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        squared_distance(step.net.parameters(), list(step.anchor.parameters())[:-1])


def trained(engine: EagerEngine, method: FedProx, task: Task) -> list[Reply]:
    replies = list(engine.exchange(method, dict.fromkeys(engine.clients, task)))
    assert all(isinstance(reply, Reply) for reply in replies), replies
    return replies  # type: ignore[return-value]


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_the_proximal_term_has_all_digits_of_float32(precision: Precision) -> None:
    """Steps of 1e-3 are lost in a bfloat16 copy of the weights: measured there,
    the distance would be far off.
    """
    data, clients = federation(MIXED, side=8)
    engine = CudaEngine(
        three_channels, data, 3, TRAINING, 0, CPU, clients[:1], precision=precision, lanes=1
    )
    task = Task("train", 0, Packed(three_channels()).weights())
    net, seen = engine.lane.net, list[tuple[float, float]]()

    class Watched(FedProx):
        def loss(self, step: Step) -> Tensor:
            found = squared_distance(step.net.parameters(), step.anchor.parameters())
            moved = (net.ordinary() - task.weights.values)[: net.trainable].double()
            seen.append((found.item(), float(moved.square().sum())))
            return super().loss(step)

    trained(engine, Watched(mu=0.5), task)
    assert len(seen) >= 3
    assert max(expected for _, expected in seen) > 0
    for found, expected in seen:
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(("precision", "share"), [("fp32", 1e-3), ("tf32", 1e-3), ("bf16", 0.3)])
def test_a_strong_tie_gives_the_eager_weights_on_the_cuda_engine(
    precision: Precision, share: float
) -> None:
    """Where the proximal term outweighs the labels, on every kind of client."""
    method, task = FedProx(mu=30.0), Task("train", 0, Packed(three_channels()).weights())
    data, clients = federation(MIXED, side=8)
    reference = EagerEngine(three_channels, data, 3, TRAINING, 0, CPU, clients)
    engine = CudaEngine(
        three_channels, data, 3, TRAINING, 0, CPU, clients, precision=precision, lanes=2
    )
    for expected, found in zip(
        trained(reference, method, task), trained(engine, method, task), strict=True
    ):
        assert expected.weights is not None and found.weights is not None
        moved = (expected.weights.values - task.weights.values).norm()
        assert moved > 0
        assert (found.weights.values - expected.weights.values).norm() <= share * moved
    free = trained(
        EagerEngine(three_channels, data, 3, TRAINING, 0, CPU, clients), FedProx(mu=0), task
    )[0]
    tied = trained(reference, method, task)[0]
    assert free.weights is not None and tied.weights is not None
    assert not torch.equal(free.weights.values, tied.weights.values)
    assert len(free.weights.values) > CLASSES
