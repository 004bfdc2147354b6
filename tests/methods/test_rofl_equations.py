"""RoFL's loss, centroids and aggregation against slow, obvious loops in float64;
its features on every engine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, federation, start, three_channels
from torch import Tensor, nn

from fednoro.core.training import Training
from fednoro.core.types import Precision, Replies, Reply, Step, Weights
from fednoro.engine.cpu import CpuEngine
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.methods.rofl import RoFL, class_means, one_hot, shared_centroids
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, CPU = 6, torch.device("cpu")


class Net(nn.Module):
    """In float64, with features that are not all positive, so that cosines have both signs."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.trunk, self.fc = nn.Linear(5, WIDTH).double(), nn.Linear(WIDTH, CLASSES).double()
        for p in self.parameters():
            p.data.copy_(torch.from_numpy(rng.normal(size=p.shape)))

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x).tanh()


def random_step(seed: int, size: int, keep: float, lam_cen: float) -> Step:
    rng = np.random.default_rng(seed)
    net = Net(rng)
    y = torch.from_numpy(rng.integers(CLASSES - 1, size=size))  # the last class is absent
    f_k = rng.normal(size=(CLASSES, WIDTH))
    f_k[:3] += net.features(torch.from_numpy(rng.normal(size=(3, 5)))).detach().numpy()
    if seed % 3 == 0:
        f_k[0] = 0.0  # not known yet
    aux = {
        "f_k": torch.from_numpy(f_k),
        "keep": torch.tensor(keep, dtype=torch.float64),
        "lam_cen": torch.tensor(lam_cen, dtype=torch.float64),
    }
    rows = {"pseudo": torch.from_numpy(rng.integers(CLASSES, size=size))}
    x = torch.from_numpy(rng.normal(size=(size, 5)))
    return Step(net, net, x, y, torch.arange(size), aux, torch.empty(size, 0), rows)


def cosine(a: Any, b: Any) -> float:
    a, b = (np.asarray(v.detach() if isinstance(v, Tensor) else v) for v in (a, b))
    dot, aa, bb = (
        sum(float(u) * float(v) for u, v in zip(p, q, strict=True))
        for p, q in ((a, b), (a, a), (b, b))
    )
    return dot / math.sqrt(aa * bb) if aa * bb > 0 else 0.0


def by_hand(method: RoFL, step: Step, count: int) -> tuple[Tensor, list[list[float]]]:
    """The loss, and the centroids after it, sample by sample."""
    net: Any = step.net
    f_k, y, pseudo = step.aux["f_k"], step.y.tolist(), step.rows["pseudo"].tolist()
    z = [net.features(x[None])[0] for x in step.x]
    p = [net.fc(one).exp() / net.fc(one).exp().sum() for one in z]
    kept = sorted(range(len(y)), key=lambda i: -p[i][y[i]].log().item())[:count]
    ce = cen = entropy = torch.zeros((), dtype=torch.float64)
    for i in kept:
        similar = [cosine(f_k[c], z[i]) for c in range(CLASSES)]
        m = similar.index(max(similar)) == y[i]
        ce = ce - p[i][y[i] if m else pseudo[i]].log()
        entropy = entropy - sum(q * q.log() for q in p[i])
        if m:
            given = z[i].detach() if method.features == "detached" else z[i]
            cen = cen + sum((u - v) ** 2 for u, v in zip(given, f_k[y[i]], strict=True))
    loss = ce / count + step.aux["lam_cen"] * cen + method.lam_e * entropy / count
    after = []
    for c in range(CLASSES):
        mine = [z[i].tolist() for i in kept if y[i] == c]
        old = f_k[c].tolist()
        if not mine:
            after.append(old)
            continue
        mean = [sum(column) / len(mine) for column in zip(*mine, strict=True)]
        s = cosine(old, mean) if any(old) else 1.0
        after.append([(1 - s**2) * u + s**2 * v for u, v in zip(old, mean, strict=True)])
    return loss, after


@pytest.mark.parametrize("features", ["detached", "attached"])
@pytest.mark.parametrize(
    ("size", "keep", "count"), [(12, 1.0, 12), (12, 0.8, 9), (5, 0.8, 4), (7, 0.9, 6), (1, 0.8, 1)]
)
@pytest.mark.parametrize("seed", range(4))
def test_loss_gradient_and_centroids_are_those_of_the_equations(
    seed: int, size: int, keep: float, count: int, features: Any
) -> None:
    method, step = RoFL(features=features), random_step(seed, size, keep, lam_cen=0.3)
    parameters = list(step.net.parameters())
    expected, centroids = by_hand(method, step, count)
    gradients = torch.autograd.grad(expected, parameters)
    value = method.loss(step)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    for found, gradient in zip(torch.autograd.grad(value, parameters), gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        step.aux["f_k"], torch.tensor(centroids, dtype=torch.float64), rtol=1e-10, atol=1e-12
    )


def test_the_random_steps_have_labels_that_agree_and_labels_that_do_not() -> None:
    """Else the test above would not say what it claims to say."""
    agreeing = total = 0
    for seed in range(4):
        step = random_step(seed, 12, 1.0, 0.3)
        net: Any = step.net
        for x, y in zip(step.x, step.y, strict=True):
            z = net.features(x[None])[0]
            agreeing += int(np.argmax([cosine(f, z) for f in step.aux["f_k"]])) == int(y)
            total += 1
    assert 0.1 * total < agreeing < 0.9 * total


@pytest.mark.parametrize("seed", range(5))
def test_first_centroids_are_the_means_of_each_label(seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, labels = rng.normal(size=(9, WIDTH)), rng.integers(CLASSES - 1, size=9)
    found = class_means(torch.from_numpy(z), one_hot(torch.from_numpy(labels), CLASSES)).numpy()
    for c in range(CLASSES):
        mine = [z[i] for i in range(9) if labels[i] == c]
        np.testing.assert_allclose(
            found[c], sum(mine) / len(mine) if mine else np.zeros(WIDTH), rtol=1e-12, atol=1e-14
        )


@pytest.mark.parametrize("seed", range(5))
def test_the_server_weighs_centroids_by_similarity_and_models_alike(seed: int) -> None:
    rng = np.random.default_rng(seed)
    f_g = rng.normal(size=(CLASSES, WIDTH))
    f_k = f_g + rng.normal(size=(3, CLASSES, WIDTH))  # similar enough that every sum is above 0
    f_k[1, 2] = 0.0  # a class that this client never saw
    models = rng.normal(size=(3, 8)).astype(np.float32)
    expected = np.empty_like(f_g)
    for c in range(CLASSES):
        s = [cosine(f_g[c], one[c]) for one in f_k]
        assert sum(s) > 0.5 * sum(map(abs, s))
        expected[c] = sum(weight * one[c] for weight, one in zip(s, f_k, strict=True)) / sum(s)
    np.testing.assert_allclose(shared_centroids(f_g, f_k), expected, rtol=1e-10, atol=1e-12)

    state = start()
    state = type(state)(state.model, 1, 5, CLASSES, 0, memo={"centroids": f_g.tolist()})
    counters = torch.zeros(0, dtype=torch.int64)
    replies = [
        Reply(
            k,
            1 + 10 * k,
            Weights(torch.from_numpy(models[k]), counters),
            arrays={"centroids": f_k[k]},
        )
        for k in range(3)
    ]
    after = RoFL().fold(state, Replies("train", (0, 1, 2), iter(replies)))
    np.testing.assert_allclose(
        after.model.values, models.astype(np.float64).mean(0), rtol=1e-6, atol=1e-7
    )
    np.testing.assert_allclose(after.memo["centroids"], expected, rtol=1e-10, atol=1e-12)
    assert {k: note["weight"] for k, note in after.notes.items()} == pytest.approx(
        dict.fromkeys(range(3), 1 / 3)
    )


def engines() -> list[Any]:
    def cuda(precision: Precision) -> Any:
        return lambda *given: CudaEngine(*given, precision=precision, lanes=1)

    return [
        pytest.param(EagerEngine, 1e-6, id="eager"),
        pytest.param(CpuEngine, 1e-6, id="cpu"),
        *(
            pytest.param(cuda(p), 2e-2 if p == "bf16" else 1e-5, id=p)
            for p in ("fp32", "tf32", "bf16")
        ),  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(("build", "tolerance"), engines())
def test_a_site_has_the_features_of_its_own_images(build: Any, tolerance: float) -> None:
    data, clients = federation(MIXED, side=8)
    lab = build(three_channels, data, 3, Training(batch=4), 0, CPU, clients)
    lab.evaluation_batch = 4  # several parts
    net: Any = three_channels()
    weights = Packed(net).weights()
    index = torch.from_numpy(clients[0].index)
    with torch.no_grad():
        expected = net.eval().features(lab.images.batch(index))
    found = lab.site(clients[0]).features(weights)
    assert found.dtype == torch.float32 and found.shape == (len(index), net.fc.in_features)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    # Ordinary tensors, that a loss may change in place and take as targets.
    assert not found.is_inference()
