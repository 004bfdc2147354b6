"""RoFL: what a client begins with, which samples it keeps, and what
becomes of classes that nobody has.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federations import (
    CLASSES,
    GAPPED,
    MIXED,
    ONE_IMAGE,
    ORDINARY,
    TRAINING,
    federation,
    network,
    start,
)
from torch import Tensor, nn

import fednoro
from fednoro.core.types import (
    Clients,
    FedNoRoWarning,
    Replies,
    Reply,
    State,
    Step,
    Task,
    UserError,
    Weights,
)
from fednoro.engine.cpu import CpuEngine
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.config.configuration import resolve
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import METHODS
from fednoro.methods.rofl import RoFL, move_centroids, shared_centroids, small_loss
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
D = 4  # the width of the features of the test network


def engine(parts: Any = MIXED, net: Any = network) -> EagerEngine:
    data, clients = federation(parts)
    return EagerEngine(net, data, 1, TRAINING, 0, CPU, clients)


def task(method: RoFL, round: int = 0, centroids: Any = None) -> Task:
    memo = {} if centroids is None else {"centroids": centroids.tolist()}
    return method.plan(replace(start(), round=round, memo=memo), Clients((0,), (0,)))[0]


# What a client begins with


def test_in_the_first_round_a_client_begins_with_the_mean_feature_of_each_of_its_labels() -> None:
    lab = engine([GAPPED])
    site = lab.site(lab.clients[0])
    f_k = RoFL().aux(task(RoFL()), site)["f_k"]
    features = site.features(start().model)
    assert f_k.shape == (CLASSES, D)
    for c in range(3):
        torch.testing.assert_close(f_k[c], features[site.labels == c].mean(0))
    assert not f_k[3].any()  # it has no image of this class


def test_later_a_client_begins_with_the_centroids_it_received() -> None:
    lab, given = engine(), np.random.default_rng(0).normal(size=(CLASSES, D))
    f_k = RoFL().aux(task(RoFL(), 1, given), lab.site(lab.clients[0]))["f_k"]
    np.testing.assert_array_equal(f_k.numpy(), given.astype(np.float32))


def test_pseudo_labels_are_the_received_models_and_wait_for_the_warm_up() -> None:
    lab, method = engine([ORDINARY]), RoFL(warmup=2)
    site = lab.site(lab.clients[0])
    expected = site.logits(task(method), start().model).argmax(1)
    assert not torch.equal(expected, site.labels)
    for round in (0, 1):
        assert torch.equal(method.rows(task(method, round), site)["pseudo"], site.labels)
    assert torch.equal(method.rows(task(method, 2), site)["pseudo"], expected)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {0: 1.0, 3: 1 - 0.2 / 3, 9: 0.8, 10: 0.8, 50: 0.8}),
        ({"forget": 0.5, "gradual": 3}, {0: 1.0, 1: 0.75, 2: 0.5, 3: 0.5}),
        ({"gradual": 1}, {0: 0.8, 1: 0.8}),
        ({"forget": 0.0}, {0: 1.0, 20: 1.0}),
    ],
)
def test_the_share_that_is_kept_falls_with_the_rounds(
    options: dict[str, Any], kept: dict[int, float]
) -> None:
    lab = engine()
    for round, share in kept.items():
        aux = RoFL(**options).aux(task(RoFL(), round), lab.site(lab.clients[0]))
        assert float(aux["keep"]) == pytest.approx(share, rel=1e-6) and aux["keep"].shape == ()


@pytest.mark.parametrize(
    ("warmup", "expected"), [(10, {0: 0, 5: 1.0, 10: 2, 30: 2}), (0, {0: 2, 1: 2})]
)
def test_the_weight_of_the_centroids_rises_until_pseudo_labels_are_used(
    warmup: int, expected: dict[int, float]
) -> None:
    lab = engine()
    for round, weight in expected.items():
        aux = RoFL(warmup=warmup, lam_cen=2.0).aux(task(RoFL(), round), lab.site(lab.clients[0]))
        assert float(aux["lam_cen"]) == pytest.approx(weight)


# Which samples it keeps


def test_the_samples_of_lowest_loss_are_kept_and_at_least_one() -> None:
    rng = np.random.default_rng(0)
    for tenths in range(10):
        for size in range(1, 65):
            losses = torch.from_numpy(rng.permutation(size).astype(np.float32))
            kept = small_loss(losses, torch.tensor(1 - tenths / 10))
            count = max(1, math.floor((1 - Fraction(tenths, 10)) * size))
            assert torch.equal(kept.bool(), losses < count)


def test_of_equal_losses_the_first_are_kept() -> None:
    assert small_loss(torch.zeros(5), torch.tensor(0.8)).tolist() == [1, 1, 1, 1, 0]


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.fc = nn.Linear(3, D), nn.Linear(D, CLASSES)

    def features(self, x: Tensor) -> Tensor:
        return self.trunk(x)  # type: ignore[no-any-return]


def step(
    f_k: Tensor, lam_cen: float = 1.0, keep: float = 1.0, net: nn.Module | None = None
) -> Step:
    net = net or Plain()
    x = torch.linspace(-1, 1, 18).view(6, 3) ** 3
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    aux = {"f_k": f_k, "keep": torch.tensor(keep), "lam_cen": torch.tensor(lam_cen)}
    return Step(
        net, net, x, y, torch.arange(6), aux, torch.empty(6, 0), {"pseudo": (y + 1) % CLASSES}
    )


@pytest.mark.parametrize("features", ["detached", "attached"])
def test_detached_features_count_in_the_centroid_term_and_learn_nothing_from_it(
    features: Any,
) -> None:
    method, net = RoFL(features=features), Plain()
    f_k = net.features(step(torch.zeros(CLASSES, D)).x[:CLASSES]).detach() + 0.1
    with_it, without = (method.loss(step(f_k.clone(), weight, net=net)) for weight in (1.0, 0.0))
    assert with_it > without
    parameters = list(net.parameters())
    pairs = zip(
        *(torch.autograd.grad(value, parameters) for value in (with_it, without)), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs) == (features == "detached")


def test_a_sample_left_out_changes_neither_loss_nor_centroids() -> None:
    def outcome(nudge: float) -> tuple[Tensor, Tensor]:
        net, f_k = Plain(), torch.ones(CLASSES, D)
        one = step(f_k, keep=5 / 6, net=net)
        logits = net.fc(net.features(one.x))
        worst = int(nn.functional.cross_entropy(logits, one.y, reduction="none").argmax())
        one.x[worst] *= 1 + nudge
        return RoFL().loss(one), f_k

    (value, f_k), (again, other) = outcome(0.0), outcome(0.01)
    assert torch.equal(value, again) and torch.equal(f_k, other)


# Classes that are not there


def test_the_centroid_of_a_class_that_a_batch_lacks_stays_as_it_is() -> None:
    f_k = torch.randn(CLASSES, D, generator=torch.Generator().manual_seed(1))
    before = f_k.clone()
    RoFL().loss(step(f_k))
    assert torch.equal(f_k[3], before[3])
    assert all(not torch.equal(f_k[c], before[c]) for c in range(3))


def test_a_centroid_that_is_not_known_yet_takes_the_first_features_that_come() -> None:
    f_hat = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])
    # unknown, at a right angle, unknown and absent
    f_k = torch.tensor([[0.0, 0.0], [4.0, -3.0], [0.0, 0.0]])
    torch.testing.assert_close(
        move_centroids(f_k, f_hat), torch.tensor([[1.0, 2.0], [4.0, -3.0], [0.0, 0.0]])
    )


def test_a_class_that_comes_late_gets_a_centroid() -> None:
    """In the first rounds only a client without class 3 takes part; then one with it."""
    lab, method, state = engine([GAPPED, ORDINARY]), RoFL(), start()
    for k in (0, 0, 1):
        tasks = method.plan(state, Clients((0, 1), (k,)))
        state = method.fold(state, Replies("train", (k,), lab.exchange(method, tasks)))  # type: ignore[arg-type]
        assert any(state.memo["centroids"][3]) == (k == 1)
        assert all(any(state.memo["centroids"][c]) for c in range(3))


def test_a_client_sends_centroids_that_its_batches_moved_and_keeps_those_of_absent_classes() -> (
    None
):
    lab, method, given = (
        engine([GAPPED]),
        RoFL(forget=0),
        np.abs(np.random.default_rng(0).normal(size=(CLASSES, D))),
    )
    one = task(method, 1, given)
    sent = method.work(one, lab.site(lab.clients[0])).arrays["centroids"]
    assert sent.dtype == np.float64 and np.isfinite(sent).all()
    np.testing.assert_array_equal(one.arrays["centroids"], given)
    np.testing.assert_array_equal(sent[3], given[3].astype(np.float32))
    assert all((sent[c] != given[c].astype(np.float32)).any() for c in range(3))


# The server


def test_similarities_that_cancel_or_are_below_zero_give_the_plain_mean() -> None:
    f_g = np.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    f_k = np.array([[[2.0, 1.0], [-1.0, 2.0], [1.0, 0.0]], [[-2.0, 1.1], [-3.0, 0.0], [0.0, 3.0]]])
    # cancel, below zero, and an ordinary one: s = 1 and 0
    expected = [[0.0, 1.05], [-2.0, 1.0], [1.0, 0.0]]
    np.testing.assert_allclose(shared_centroids(f_g, f_k), expected, atol=1e-12)


def test_the_result_never_leaves_the_clients_far_behind() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        f_g, f_k = rng.normal(size=(CLASSES, D)), rng.normal(size=(5, CLASSES, D))
        found = np.linalg.norm(shared_centroids(f_g, f_k), axis=1)
        assert (found <= 10.001 * np.linalg.norm(f_k, axis=2).max(axis=0)).all()


def test_what_a_client_does_not_know_does_not_count() -> None:
    f_g = np.array([[-1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 0.0]])
    f_k = np.array(
        [
            [[2.0, 0.0], [math.nan, 1.0], [0.0, 0.0], [0.0, 0.0]],
            [[0.0, 0.0], [3.0, 3.0], [4.0, 1.0], [0.0, 0.0]],
            [[4.0, 0.0], [5.0, math.inf], [2.0, 1.0], [0.0, 0.0]],
        ]
    )
    # A plain mean of those who hold it; the finite one; a class new to the server;
    # a class that nobody holds.
    expected = [[3.0, 0.0], [3.0, 3.0], [3.0, 1.0], [0.0, 0.0]]
    np.testing.assert_allclose(shared_centroids(f_g, f_k), expected, atol=1e-12)


def test_the_first_centroids_are_drawn_by_the_seed() -> None:
    """Clients of different directions: the draw shows in the weights of the first mean."""
    rng = np.random.default_rng(0)
    weights = Weights(torch.zeros(3), torch.zeros(0, dtype=torch.int64))
    replies = [
        Reply(k, 1, weights, arrays={"centroids": rng.normal(size=(CLASSES, D))}) for k in range(3)
    ]

    def first(seed: int) -> State:
        return RoFL().fold(replace(start(), seed=seed), Replies("train", (0, 1, 2), iter(replies)))

    assert first(0).memo == first(0).memo != first(1).memo
    assert np.isfinite(first(0).memo["centroids"]).all() and np.shape(
        first(0).memo["centroids"]
    ) == (CLASSES, D)


def test_where_nobody_answers_the_next_round_begins_anew() -> None:
    method, state = RoFL(), start()
    with pytest.warns(FedNoRoWarning, match="no client answered"):
        state = method.fold(state, Replies("train", (0,), iter(())))
    assert state.round == 1 and "centroids" not in state.memo
    assert not method.plan(state, Clients((0,), (0,)))[0].arrays
    lab = engine([ORDINARY])
    tasks = method.plan(state, Clients((0,), (0,)))
    state = method.fold(state, Replies("train", (0,), lab.exchange(method, tasks)))  # type: ignore[arg-type]
    assert state.round == 2 and np.isfinite(state.memo["centroids"]).all()
    with pytest.warns(FedNoRoWarning, match="no client answered"):
        after = method.fold(state, Replies("train", (0,), iter(())))
    assert after.memo == state.memo


def test_a_federation_of_single_images_keeps_finite_centroids() -> None:
    lab, nothing = engine([ONE_IMAGE, [0], [2]]), Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    *_, last = play(RoFL(warmup=2, gradual=2), start(), lab.exchange, (0, 1, 2), lambda _: nothing)
    found = np.array(last.state.memo["centroids"])
    assert np.isfinite(found).all() and not found[3].any() and found[:3].any(axis=1).all()


# Networks


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)  # type: ignore[no-any-return]


class Maps(Headless):
    """`features` as torchvision's VGG has it: maps, before pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.fc = nn.Conv2d(1, 2, 3), nn.Linear(2, CLASSES)


@pytest.mark.parametrize("build", [EagerEngine, CpuEngine, CudaEngine])
@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Headless, "needs a network with features.*no features and no fc"),
        (Maps, r"features\(x\) must be B×d"),
    ],
)
def test_a_network_without_features_is_refused_with_what_it_needs(
    build: Any, net: Any, message: str
) -> None:
    data, clients = federation([ORDINARY, GAPPED])
    lab = build(net, data, 1, TRAINING, 0, CPU, clients)
    state = State(Packed(net()).weights(), 0, 3, CLASSES, 0)
    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    with pytest.raises(UserError, match=message):
        list(play(RoFL(), state, lab.exchange, (0, 1), lambda _: nothing))


# Whole runs


@pytest.mark.parametrize("preset", ["ich", "isic2019", "ham10000"])
def test_presets_have_the_papers_settings(preset: str) -> None:
    method = resolve(preset, ["data.path=images", "method=rofl"]).method
    assert method == RoFL(
        warmup=10, forget=0.2, gradual=10, lam_cen=1.0, lam_e=0.8, features="detached"
    )


@pytest.mark.parametrize("options", ["", ", features: attached, lam_cen: 0.01"])
def test_a_short_run_on_digits_learns(options: str, tmp_path: Path) -> None:
    assert METHODS["rofl"] is RoFL
    run = fednoro.run(
        "digits",
        "noise={name: symmetric, rate: 0.4}",
        "partition.clients=5",
        "model.width=8",
        "train.rounds=4",
        "train.epochs=4",
        f"method={{name: rofl, warmup: 3{options}}}",
        f"out={tmp_path}",
    )
    assert len(run.bacc) == 4 and max(run.bacc) > 2 * 0.1
