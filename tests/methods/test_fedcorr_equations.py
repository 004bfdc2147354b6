"""FedCorr's equations against slow, obvious re-derivations in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, ORDINARY, federation, network, start
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.core.types import FloatArray, Step, Task
from fednoro.engine.eager import EagerEngine
from fednoro.methods import FedCorr, FedCorrLA
from fednoro.methods.relabel import upper_component

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTS = (4, 0, 3, 1)
LOG_PI = torch.tensor([math.log(n / 8) if n else -math.inf for n in COUNTS], dtype=torch.float64)


def nets() -> tuple[nn.Module, nn.Module]:
    """A network that has moved away from its anchor, in eval mode, so that an
    image can be looked at alone.
    """
    anchor = network().double().eval().requires_grad_(False)
    net = copy.deepcopy(anchor).requires_grad_(True)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return net, anchor


def step(batch: int, aux: Mapping[str, Tensor]) -> Step:
    rng = np.random.default_rng(batch)
    x = torch.from_numpy(rng.normal(size=(batch, 1, 4, 4)))
    y = torch.from_numpy(rng.choice([k for k, n in enumerate(COUNTS) if n], batch))
    return Step(*nets(), x, y, torch.arange(batch), aux, torch.from_numpy(rng.random((batch, 2))))


def by_hand(step: Step, beta: float) -> float:
    """λ CE(f(x̃), y_i) + (1 − λ) CE(f(x̃), y_j) + β μ ‖w − w_g‖₂, image
    by image and weight by weight.
    """
    lam = float(step.u[0, 0])
    partner = sorted(range(len(step.x)), key=lambda i: float(step.u[i, 1]))
    total = 0.0
    for i, j in enumerate(partner):
        mixed = lam * step.x[i] + (1 - lam) * step.x[j]
        logits = step.net(mixed[None])[0].tolist()
        if "log_pi" in step.aux:
            logits = [v + float(prior) for v, prior in zip(logits, step.aux["log_pi"], strict=True)]
        normaliser = math.log(sum(math.exp(v) for v in logits))
        total += lam * (normaliser - logits[int(step.y[i])]) + (1 - lam) * (
            normaliser - logits[int(step.y[j])]
        )
    value = total / len(step.x)
    if "mu" in step.aux:
        squares = 0.0
        for w, g in zip(step.net.parameters(), step.anchor.parameters(), strict=True):
            squares += sum(
                (a - b) ** 2
                for a, b in zip(w.flatten().tolist(), g.flatten().tolist(), strict=True)
            )
        value += beta * float(step.aux["mu"]) * math.sqrt(squares)
    return value


AUX: dict[str, dict[str, Tensor]] = {
    "plain": {},
    "with a noise level": {"mu": torch.tensor(0.3, dtype=torch.float64)},
    "adjusted": {"log_pi": LOG_PI},
    "adjusted, with a noise level": {
        "log_pi": LOG_PI,
        "mu": torch.tensor(0.7, dtype=torch.float64),
    },
}


@pytest.mark.parametrize("beta", [5.0, 0.5])
@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("aux", AUX)
def test_loss_is_mixup_with_a_proximal_term(aux: str, batch: int, beta: float) -> None:
    method = FedCorrLA(beta=beta) if "log_pi" in AUX[aux] else FedCorr(beta=beta)
    given = step(batch, AUX[aux])
    assert method.loss(given).item() == pytest.approx(by_hand(given, beta), rel=1e-12)


def test_the_proximal_term_pulls_towards_the_received_model_with_constant_force() -> None:
    given = step(4, AUX["with a noise level"])
    plain = step(4, {})
    with_term, without = (
        torch.autograd.grad(FedCorr().loss(s), list(s.net.parameters())) for s in (given, plain)
    )
    pull = torch.cat([(a - b).flatten() for a, b in zip(with_term, without, strict=True)])
    away = torch.cat(
        [
            (w - g).flatten()
            for w, g in zip(given.net.parameters(), given.anchor.parameters(), strict=True)
        ]
    )
    assert torch.allclose(pull, 5 * 0.3 * away / away.norm())


def test_the_proximal_term_has_no_gradient_where_training_begins() -> None:
    gradients = []
    for aux in (AUX["with a noise level"], {}):
        given = step(4, aux)
        given.net.load_state_dict(given.anchor.state_dict())
        gradients.append(torch.autograd.grad(FedCorr().loss(given), list(given.net.parameters())))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(*gradients, strict=True))


def test_every_image_is_mixed_in_once_and_the_share_is_uniform() -> None:
    """λ and the partners, read off from what the network receives."""
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return torch.zeros(len(x), CLASSES, requires_grad=True)

    rng, shares = np.random.default_rng(0), []
    for _ in range(400):
        u = torch.from_numpy(rng.random((5, 2)))
        x = torch.eye(5)[:, None, None, :]
        FedCorr().loss(
            Step(Watched(), Watched(), x, torch.zeros(5, dtype=torch.int64), torch.arange(5), {}, u)
        )
        mixed = seen[-1][:, 0, 0]
        assert torch.allclose(mixed.sum(0), torch.ones(5)) and torch.allclose(
            mixed.sum(1), torch.ones(5)
        )
        shares.append(float(u[0, 0]))
    assert np.histogram(shares, 4, (0, 1))[0].min() > 70


# The mixture in one dimension


def best_split(values: FloatArray) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """k-means' optimum for two groups, by trying every threshold."""

    def spread(upper: Any) -> float:
        return sum(
            float(((group - group.mean()) ** 2).sum()) for group in (values[upper], values[~upper])
        )

    cuts = [values > (a + b) / 2 for a, b in pairwise(sorted(set(values.tolist())))]
    return min(cuts, key=spread)


def mixtures() -> dict[str, FloatArray]:
    rng = np.random.default_rng(3)
    return {
        "apart": np.concatenate([rng.normal(0, 0.2, 40), rng.normal(3, 0.5, 20)]),
        "overlapping": np.concatenate([rng.normal(0, 1, 60), rng.normal(1.5, 1, 60)]),
        "losses": np.concatenate([rng.exponential(0.1, 200), rng.exponential(2.0, 80)]),
        "one group": rng.normal(5, 1, 30),
        "twenty clients": np.concatenate([rng.normal(2, 0.3, 12), rng.normal(3, 0.4, 8)]),
        "two values": np.array([1.0, 1.0, 4.0, 1.0, 4.0]),
        "two points": np.array([0.3, 0.9]),
    }


@pytest.mark.parametrize("name", mixtures())
def test_upper_component_is_scikit_learn_s_mixture_from_the_best_split(name: str) -> None:
    values = mixtures()[name]
    upper = best_split(values)
    groups = [values[~upper], values[upper]]
    reference = GaussianMixture(
        2,
        weights_init=[len(group) / len(values) for group in groups],
        means_init=[[group.mean()] for group in groups],
        precisions_init=[[[1 / (group.var() + 1e-6)]] for group in groups],
    ).fit(values[:, None])
    expected = reference.predict_proba(values[:, None])[:, reference.means_[:, 0].argmax()]
    np.testing.assert_allclose(upper_component(values), expected, rtol=1e-6, atol=1e-8)


# A client's LID, losses and correction


def test_a_visit_sends_the_mean_lid_of_the_client_s_own_model() -> None:
    data, clients = federation([ORDINARY])
    lab = EagerEngine(network, data, 1, Training(batch=4, lr=0.01), 0, torch.device("cpu"), clients)
    reply = FedCorr(neighbours=4).work(Task("visit-1", 0, start().model), lab.site(clients[0]))
    assert reply.weights is not None
    p = lab.logits(reply.weights, clients[0].index).double().softmax(1).tolist()
    lids = []
    for i, own in enumerate(p):
        d = sorted(math.dist(own, other) for j, other in enumerate(p) if j != i)[:4]
        lids.append(
            -4 / sum(math.log(distance / (d[-1] + 1e-6)) for distance in d) if d[0] > 0 else 0.0
        )
    assert float(reply.metrics["lid"]) == pytest.approx(sum(lids) / len(lids), rel=1e-9)
    losses = [-math.log(row[y]) for row, y in zip(p, ORDINARY, strict=True)]
    assert clients[0].memory["losses"].tolist() == pytest.approx(losses, rel=1e-9)

    method = FedCorr(neighbours=4, confidence=0.2)
    reply = method.work(Task("correct-1", 0, start().model), lab.site(clients[0]))
    wrong = int((upper_component(np.array(losses)) > 0.5).sum())
    said = lab.logits(start().model, clients[0].index).double().softmax(1).tolist()
    expected = list(ORDINARY)
    for i in sorted(range(9), key=lambda i: -losses[i])[: int(wrong * 0.5)]:
        if max(said[i]) > 0.2:
            expected[i] = said[i].index(max(said[i]))
    assert wrong >= 2 and float(reply.metrics["mu"]) == wrong / 9
    assert clients[0].labels.tolist() == expected != ORDINARY
