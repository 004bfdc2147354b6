"""Clients with different losses who are trained together, against
clients who are trained one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exchanges import Lab, check_close
from federations import CLASSES, distance
from stacks import THIN, engine, thin
from torch import Tensor

from fednoro.core.types import Failure, Reply, Step, Task
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.methods import FedNoRo, Method
from fednoro.models import Packed, Resnet18, initialise

pytestmark = pytest.mark.usefixtures("one_thread", "small_stacks")


@dataclass(frozen=True)
class Each(Method):
    """Clients 0, 2 and 4 have an ordinary loss, 1 and 3 the one with this name."""

    other: str = "everything"

    def work(self, task: Task, site: Any) -> Reply:
        if site.client % 2 == 0:
            return Reply(site.client, site.size, site.train(task, self.loss, {})[0])
        device = site.labels.device
        seen, pull = (
            torch.zeros(CLASSES, device=device),
            torch.tensor(0.01 * site.client, device=device),
        )
        rows = {"weight": torch.linspace(0.5, 1.5, site.size, device=device)}
        weights, _ = site.train(
            task, getattr(self, self.other), {"pull": pull, "seen": seen}, 2, rows=rows
        )
        return Reply(site.client, site.size, weights, arrays={"seen": site.to_array(seen)})

    def everything(self, step: Step) -> Tensor:
        """Reads all that a step has, changes its aux, pulls at the weights; NaN where
        a network says nothing but 0.
        """
        logits = step.net(step.x)
        step.aux["seen"].add_(F.one_hot(step.y, CLASSES).sum(0))
        taught = F.cross_entropy(logits, step.anchor(step.x).softmax(1), reduction="none")
        pull = sum(
            (p - q).square().sum()
            for p, q in zip(step.net.parameters(), step.anchor.parameters(), strict=True)
        )
        scale = logits.float().norm() / logits.float().norm().detach()
        return scale * (taught * step.rows["weight"] * (1 + step.u.mean(1))).mean() + step.aux[
            "pull"
        ] * (pull + 0.0)

    def mirrored(self, step: Step) -> Tensor:
        return F.cross_entropy(step.net(step.x), step.y) + F.cross_entropy(
            step.net(step.x.flip(-1)), step.y
        )

    def twice(self, step: Step) -> Tensor:
        return F.cross_entropy(step.net(step.x) + step.net(step.x).detach(), step.y)

    def inner(self, step: Step) -> Tensor:
        return F.cross_entropy(step.net.fc(step.net.features(step.x)), step.y)

    def divided(self, step: Step) -> Tensor:
        """Infinite where the rows are nobody's, also in the weights themselves."""
        each = F.cross_entropy(step.net(step.x), step.y, reduction="none")
        pull = sum(p.square().sum() for p in step.net.parameters())
        return ((each * step.rows["weight"]).sum() + 0.01 * pull) / step.rows["weight"].sum()

    def silent(self, step: Step) -> Tensor:
        """Learns nothing from its outputs."""
        with torch.no_grad():
            logits = step.net(step.x)
        return (
            F.cross_entropy(logits, step.y)
            * sum(p.square().sum() for p in step.net.parameters())
            * 0.01
        )

    def elsewhere(self, step: Step) -> Tensor:
        return F.cross_entropy(step.net(step.x.flip(-1)), step.y)

    def never(self, step: Step) -> Tensor:
        return sum(p.square().sum() for p in step.net.parameters()) * 1e-3  # type: ignore[return-value]


def check_as_eager(lab: CudaEngine, method: Method, tasks: Mapping[int, Task]) -> None:
    for expected, found in zip(
        EagerEngine(*THIN.given()).exchange(method, tasks), lab.exchange(method, tasks), strict=True
    ):
        check_close(tasks[expected.client], expected, found, "fp32")  # type: ignore[arg-type]


MIXED = ("everything", "divided", "silent")


@pytest.mark.parametrize("other", [*MIXED, "mirrored", "twice", "inner", "elsewhere"])
def test_clients_with_different_losses_have_the_eager_weights(other: str) -> None:
    lab, method = engine(), Each(other)
    weights = Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(5)}
    for _ in range(2):  # the second time from graphs that are there
        check_as_eager(lab, method, tasks)
    assert not lab._unstackable
    if other in MIXED:
        assert len(lab.stacks) == 1 and not lab._unmixable, "they are one stack"
    else:
        assert len(lab.stacks) == 2 and len(lab._unmixable) == 2, (
            "a loss that wants more has a stack of its own"
        )


def test_noisy_and_clean_clients_of_fednoro_are_one_stack() -> None:
    lab, method, weights = engine(), FedNoRo(), Packed(thin()).weights()
    tasks = {
        k: Task("train", method.warmup, weights, {"lam": 0.4} if k % 2 else {}) for k in range(5)
    }
    check_as_eager(lab, method, tasks)
    assert len(lab.stacks) == 1 and not lab._unmixable and not lab._unstackable
    assert [len(programs) for programs in lab.stacks[0]._graphs] == [2]
    some = {k: tasks[k] for k in (1, 2, 4)}  # now a noisy one is the first
    check_as_eager(lab, method, some)
    assert len(lab.stacks[0]._graphs) == 1, "the same graph serves them"


@dataclass(frozen=True)
class Table(Method):
    """Each client has a number for each of its images, and so a kind of its own."""

    def work(self, task: Task, site: Any) -> Reply:
        table = torch.linspace(0.5, 1.5, site.size, device=site.labels.device)
        return Reply(site.client, site.size, site.train(task, self.weighted, {"table": table})[0])

    def weighted(self, step: Step) -> Tensor:
        each = F.cross_entropy(step.net(step.x), step.y, reduction="none")
        return (each * step.aux["table"][step.index]).mean()


@pytest.mark.parametrize("who", [(0, 1), (0, 2, 4), (0, 1, 2, 3, 4)])
def test_positions_are_those_of_a_clients_own_images(who: tuple[int, ...]) -> None:
    lab, weights = engine(), Packed(thin()).weights()
    check_as_eager(lab, Table(), {k: Task("train", 0, weights) for k in who})
    assert not lab._unstackable and bool(lab._unmixable) == (len(who) > 4), (
        "up to four kinds are mixed"
    )


@pytest.mark.parametrize("noisy", [{1, 3}, {0}, {0, 1, 2, 3, 4}, {4}, set[int](), {2, 3}])
def test_verdicts_may_change_from_round_to_round(noisy: set[int]) -> None:
    """Also to a kind of which nobody has a full batch."""
    lab, method, weights = engine(), FedNoRo(), Packed(thin()).weights()
    for flagged in ({1, 3}, noisy, {0, 2}, noisy):
        check_as_eager(
            lab,
            method,
            {k: Task("train", 20, weights, {"lam": 0.4} if k in flagged else {}) for k in range(5)},
        )
    assert not lab._unmixable and not lab._unstackable


def test_a_kind_without_a_full_batch_is_trained_with_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    *_, training, _, _, clients = THIN.given()
    small = min(clients, key=lambda client: len(client.index))
    assert len(small.index) < training.batch, "or this test shows nothing"
    monkeypatch.setattr(
        CudaEngine, "_train_alone", lambda *_: pytest.fail("somebody was trained alone")
    )
    lab, weights = engine(), Packed(thin()).weights()
    check_as_eager(
        lab,
        FedNoRo(),
        {k: Task("train", 20, weights, {"lam": 0.4} if k == small.id else {}) for k in range(5)},
    )


def test_a_loss_that_never_asks_the_network_is_not_mixed() -> None:
    lab, weights = engine(), Packed(thin()).weights()
    replies = list(lab.exchange(Each("never"), {k: Task("train", 0, weights) for k in range(5)}))
    assert all(isinstance(reply, Reply) for reply in replies) and len(lab._unmixable) == 2
    alone = next(
        iter(EagerEngine(*THIN.given()).exchange(Each("never"), {1: Task("train", 0, weights)}))
    )
    assert distance(replies[1].weights, alone.weights) < 1e-3  # type: ignore[union-attr]


def test_more_kinds_of_loss_than_a_stack_mixes_are_trained_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fednoro.engine.cuda.stacked.client_stack.KINDS", 1)
    lab, weights = engine(), Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(5)}
    check_as_eager(lab, Each(), tasks)
    assert len(lab._unmixable) == 2 and not lab._unstackable


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
@pytest.mark.parametrize("other", ["everything", "mirrored"])
def test_on_a_gpu_different_losses_are_as_close_to_eager_as_lanes_are(other: str) -> None:
    cuda, method = torch.device("cuda"), Each(other)
    lab = Lab(lambda: initialise(Resnet18(), 3, CLASSES, seed=0), 64)
    engines = [
        CudaEngine(*lab.given(cuda), precision="bf16", stacked=stacked)
        for stacked in (False, True, True)
    ]
    weights = Packed(lab.network(), cuda).weights()
    tasks = {k: Task("train", 0, weights) for k in range(5)}
    replies = [
        list(made.exchange(method, tasks)) for made in [EagerEngine(*lab.given(cuda)), *engines]
    ]
    assert not [reply for made in replies for reply in made if isinstance(reply, Failure)]
    for expected, lanes, stacked, again in zip(*replies, strict=True):
        usual, off = (distance(found.weights, expected.weights) for found in (lanes, stacked))
        assert off <= 2 * usual + 1e-3 * float(expected.weights.values.norm())
        assert torch.equal(lanes.weights.counters, stacked.weights.counters)
        assert torch.equal(stacked.weights.values, again.weights.values)
    assert len(engines[1].stacks) == (1 if other == "everything" else 2)
