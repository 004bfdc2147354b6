"""FedNoRo+'s equations against slow, obvious re-derivations in float64."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
import torch
from federations import CLASSES, GAPPED, ORDINARY, TRAINING, federation, network, start
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from fednoro.core.types import Replies, Reply, State, Step, Task, Weights
from fednoro.detection.explained import SCATTER, WATCH, find_cut, judge, left_over, measure
from fednoro.engine.eager import EagerEngine, EagerSite
from fednoro.methods import FedLA, FedNoRoPlus
from fednoro.methods.fednoro_plus import SOFT, TEACHER
from fednoro.methods.relabel import soft_labels

pytestmark = pytest.mark.usefixtures("one_thread")


def drawn(images: int, seed: int, present: int = CLASSES) -> tuple[Tensor, Tensor]:
    """Random outputs and labels; the last classes may be absent."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(3 * rng.normal(size=(images, CLASSES))), torch.from_numpy(
        rng.integers(0, present, images)
    )


def frequencies(labels: Tensor) -> list[float]:
    return [labels.tolist().count(c) / len(labels) for c in range(CLASSES)]


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    total = sum(math.exp(v - top) for v in values)
    return [math.exp(v - top) / total for v in values]


def log_of(pi: list[float]) -> Tensor:
    return torch.tensor([math.log(v) if v else -math.inf for v in pi], dtype=torch.float64)


# b and e


@pytest.mark.parametrize(("images", "present"), [(40, 4), (40, 3), (7, 2), (2, 2)])
def test_b_is_the_adjusted_cross_entropy_over_the_entropy_of_the_labels(
    images: int, present: int
) -> None:
    logits, labels = drawn(images, images, present)
    labels[:2] = torch.tensor([0, 1])
    pi = frequencies(labels)
    entropy = -sum(v * math.log(v) for v in pi if v)
    losses = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        weighed = [v * math.exp(f) for v, f in zip(pi, row, strict=True)]
        losses.append(-math.log(weighed[label] / sum(weighed)))
    b = left_over(logits, labels, log_of(pi))
    assert b.item() == pytest.approx(sum(losses) / images / entropy, rel=1e-10)


def test_e_is_one_minus_the_mean_of_what_both_models_leave() -> None:
    evidence = [[0.3, 0.2], [0.85, 0.3], [1.4, 0.1], [1.9, 0.4]]
    assert judge(evidence).explained.tolist() == pytest.approx([0.75, 0.425, 0.25, 0], rel=1e-12)


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_the_cut_is_the_likeliest_of_all(shares: list[float]) -> None:
    """Two Gaussians of one variance with their shares of the clients, against
    one; by hand, over all cuts.
    """
    x = sorted(shares)
    n, mean = len(x), statistics.fmean(x)
    whole = statistics.fmean((v - mean) ** 2 for v in x) + SCATTER
    found = []
    for below in range(1, n if n <= 4 else n - 1):
        low, high = statistics.fmean(x[:below]), statistics.fmean(x[below:])
        within = sum((v - low) ** 2 for v in x[:below]) + sum((v - high) ** 2 for v in x[below:])
        entropy = sum(m * math.log(m / n) for m in (below, n - below))
        found.append(
            (n * math.log(whole / (within / n + SCATTER)) + 2 * entropy, -below, low, high)
        )
    likelier, below, low, high = max(found)
    share = low / high if high else 1.0
    if high < 0.33:
        parted = share <= 0.5 and likelier >= 6
    elif n <= 4:
        parted = share <= 0.6 and likelier >= 1
    else:
        parted = (share <= 0.5 and likelier >= 1) or (
            share <= 0.72 and low <= 0.42 and likelier >= 3
        )
    parted = parted and high - low >= 0.05
    edges = [
        likelier - 1,
        likelier - 3,
        likelier - 6,
        share - 0.5,
        share - 0.6,
        share - 0.72,
        high - 0.33,
        low - 0.42,
        high - low - 0.05,
    ]
    assume(
        min(map(abs, edges)) > 1e-9
        and all(likelier - other[0] > 1e-9 for other in found if other[1] != below)
    )
    cut, _, said = find_cut(np.array(shares))
    assert said == parted
    if parted:
        assert cut == pytest.approx((x[-below - 1] + x[-below]) / 2)
    else:
        assert cut > x[-1] if statistics.median(x) < 0.42 else cut < x[0]


def site(labels: list[int] = ORDINARY) -> EagerSite:
    data, clients = federation([labels])
    return EagerEngine(network, data, 1, TRAINING, 0, torch.device("cpu"), clients).site(clients[0])


@pytest.mark.parametrize("labels", [ORDINARY, GAPPED])
def test_a_client_measures_the_received_model_and_its_own(labels: list[int]) -> None:
    """Its own is trained as FedLA does, which knows nothing of it."""
    task = Task("train", 4, start().model, {WATCH: True})
    here = site(labels)
    trained = FedLA().work(task, here).weights
    assert trained is not None
    log_pi = log_of(frequencies(torch.tensor(labels))).float()
    expected = [
        left_over(here.logits(task, w), torch.tensor(labels), log_pi).item()
        for w in (task.weights, trained)
    ]
    assert measure(task, here, trained).tolist() == pytest.approx(expected, rel=1e-12)
    assert measure(task, here).tolist() == measure(task, here, trained).tolist(), (
        "who comes late trains the same"
    )


# Correction


def em_by_hand(logits: Tensor, labels: Tensor, steps: int, opinion: float) -> list[list[float]]:
    p, given, n = [softmax(row) for row in logits.tolist()], labels.tolist(), len(labels)
    prior = [[2.0 * (y == z) + 2 / CLASSES for z in range(CLASSES)] for y in range(CLASSES)]
    pi = [math.sqrt(given.count(y) + 0.5) for y in range(CLASSES)]
    transition = [[v / sum(row) for v in row] for row in prior]
    alone = [
        [
            p[i][y] * pi[y] / sum(a * b for a, b in zip(p[i], pi, strict=True))
            for y in range(CLASSES)
        ]
        for i in range(n)
    ]
    q = list[list[float]]()
    for _ in range(steps):
        q = []
        for i in range(n):
            raw = [p[i][y] * pi[y] * transition[y][given[i]] for y in range(CLASSES)]
            q.append([v / sum(raw) for v in raw])
        for y in range(CLASSES):
            row = [
                sum(q[i][y] for i in range(n) if given[i] == z) + prior[y][z]
                for z in range(CLASSES)
            ]
            transition[y] = [v / sum(row) for v in row]
    return [
        [opinion * alone[i][y] + (1 - opinion) * q[i][y] for y in range(CLASSES)] for i in range(n)
    ]


@pytest.mark.parametrize(("steps", "opinion"), [(1, 0.0), (2, 0.3), (15, 0.5), (15, 1.0)])
@pytest.mark.parametrize(("images", "present"), [(30, 4), (30, 2), (1, 1), (3, 1)])
def test_labels_are_corrected_by_the_teacher_and_em_over_transitions(
    images: int, present: int, steps: int, opinion: float
) -> None:
    logits, labels = drawn(images, 7 * images + present, present)
    q = soft_labels(torch.softmax(logits, dim=1), labels, CLASSES, steps, opinion)
    assert q.dtype == torch.float64
    np.testing.assert_allclose(
        q.numpy(), em_by_hand(logits, labels, steps, opinion), rtol=1e-9, atol=1e-14
    )


def test_correction_finds_a_systematic_swap() -> None:
    """Two classes are mistaken for each other at this client: transitions are
    learnt, and most labels come back.
    """
    rng = np.random.default_rng(0)
    truth = rng.integers(0, CLASSES, 300)
    given = np.where(rng.random(300) < 0.7, np.array([1, 0, 2, 3])[truth], truth)
    outputs = torch.from_numpy(rng.normal(size=(300, CLASSES)) + 2.5 * np.eye(CLASSES)[truth])
    q = soft_labels(torch.softmax(outputs, dim=1), torch.from_numpy(given), CLASSES, 15, 0.5)
    before, teacher, after = (
        (found == truth).mean() for found in (given, outputs.argmax(1).numpy(), q.argmax(1).numpy())
    )
    assert after > teacher > before


def test_an_image_without_usable_outputs_leaves_the_others_as_they_are_sound() -> None:
    logits, labels = drawn(20, 3)
    logits[4] = math.nan
    q = soft_labels(torch.softmax(logits, dim=1), labels, CLASSES, 15, 0.5)
    assert q.isfinite().all() and torch.allclose(q.sum(dim=1), torch.ones(20, dtype=torch.float64))


# What noisy clients learn


def test_soft_labels_are_learnt_with_their_own_mean_as_prior() -> None:
    rng = np.random.default_rng(5)
    q = torch.from_numpy(rng.dirichlet([0.3] * CLASSES, len(ORDINARY)))
    here = site()
    here.memory[SOFT] = q
    method, task = FedNoRoPlus(), Task("train", 9, start().model, {SOFT: True})
    aux, rows = method.aux(task, here), method.rows(task, here)
    pi = [sum(row[y] for row in q.tolist()) / len(q) for y in range(CLASSES)]
    assert aux["log_pi"].tolist() == pytest.approx([math.log(v) for v in pi], rel=1e-10)
    net = network().double().eval()
    x = torch.from_numpy(rng.normal(size=(len(q), 1, 4, 4)))
    step = Step(net, net, x, here.labels, torch.arange(len(q)), aux, torch.zeros(len(q), 0), rows)
    total = 0.0
    for i in range(len(q)):
        outputs = net(x[i : i + 1])[0].tolist()
        y_p = softmax([f + math.log(v) for f, v in zip(outputs, pi, strict=True)])
        total -= sum(q[i, y].item() * math.log(y_p[y]) for y in range(CLASSES))
    assert method.loss(step).item() == pytest.approx(total / len(q), rel=1e-10)


def test_a_class_that_no_image_may_be_is_no_infinite_loss() -> None:
    here = site()
    here.memory[SOFT] = torch.nn.functional.one_hot(
        torch.zeros(here.size, dtype=torch.int64), CLASSES
    ).float()
    reply = FedNoRoPlus().work(Task("train", 9, start().model, {SOFT: True}), here)
    assert reply.weights is not None and reply.weights.values.isfinite().all()
    assert math.isfinite(float(reply.metrics["loss"]))


# The teacher


def test_the_teacher_is_the_mean_of_the_purge_and_later_its_moving_average() -> None:
    method = FedNoRoPlus(warmup=2, purge=30, ema=0.75)
    rows = {"0": {"noisy": False, "explained": 0.9}, "1": {"noisy": True, "explained": 0.0}}
    memo = {
        "detector": {"trust": 0.4},
        "detection": {"reason": "told", "cut": 0.4, "clients": rows},
    }
    state = State(
        Weights(torch.full((3,), 99.0), torch.zeros(1, dtype=torch.int64)),
        2,
        40,
        CLASSES,
        0,
        memo=memo,
    )
    sent = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    expected: list[float] = []
    for t, values in enumerate(sent):
        reply = Reply(0, 5, Weights(torch.from_numpy(values), torch.zeros(1, dtype=torch.int64)))
        state = method.fold(state, Replies("train", (0,), iter([reply])))
        if t < 4:  # 3/4 is reached at the fourth
            expected = [sum(float(v) for v in sent[: t + 1, i]) / (t + 1) for i in range(3)]
        else:
            expected = [
                0.75 * old + 0.25 * float(v) for old, v in zip(expected, values, strict=True)
            ]
        assert state.models[TEACHER].values.tolist() == pytest.approx(expected, rel=1e-5)
        assert state.stage == "purge"
