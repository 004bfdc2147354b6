"""Clients that are trained together against clients that are trained one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from exchanges import CPU, SMALL, Lab, check_close, identical, pairs
from federations import CLASSES, distance, every_method, every_variant
from stacks import THIN, Thin, engine, thin
from torch import Tensor, nn

from fednoro.core.types import FedNoRoWarning, Reply, Step, Task
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.cuda.stacked.stacked_net import OneOfMany, StackedNet, stackable
from fednoro.engine.eager import EagerEngine
from fednoro.engine.streams import SideStream
from fednoro.methods import METHODS, Method
from fednoro.models import Packed, Resnet18, initialise
from fednoro.models.networks import BasicBlock

pytestmark = pytest.mark.usefixtures("one_thread", "small_stacks")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA device"
)


def resnet() -> nn.Module:
    return initialise(Resnet18(), 3, CLASSES, seed=0)


@every_variant
def test_clients_that_are_trained_together_have_the_eager_weights(method: Method) -> None:
    lab = engine()
    for task, expected, found in pairs(lab, method, CPU, THIN):
        check_close(task, expected, found, "fp32")
    assert lab.stacks and not lab._unstackable, "nobody was trained together"


@pytest.mark.parametrize("name", ["fedavg", "rofl", "fedlsr"])
def test_a_second_epoch_begins_where_the_smaller_batch_of_the_first_ended(name: str) -> None:
    method = METHODS[name]()
    network, data, inputs, training, seed, device, clients = THIN.given()
    given = network, data, inputs, replace(training, epochs=2), seed, device, clients
    one_by_one, together = EagerEngine(*given), CudaEngine(*given, precision="tf32", stacked=True)
    weights = Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(len(clients))}
    for expected, found in zip(
        one_by_one.exchange(method, tasks), together.exchange(method, tasks), strict=True
    ):
        check_close(tasks[expected.client], expected, found, "fp32")  # type: ignore[arg-type]
    assert together.stacks


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "rofl"])
def test_in_bfloat16_a_stack_is_as_close_to_eager_as_lanes_are(name: str) -> None:
    """With two epochs; FedProx's pull back to the received model is in float32."""
    method = METHODS[name]()
    network, data, inputs, training, seed, device, clients = THIN.given()
    given = network, data, inputs, replace(training, epochs=2), seed, device, clients
    weights = Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(len(clients))}
    engines = [
        EagerEngine(*given),
        CudaEngine(*given, precision="bf16", stacked=False),
        CudaEngine(*given, precision="bf16", stacked=True),
    ]
    for expected, lanes, stacked in zip(
        *(lab.exchange(method, tasks) for lab in engines), strict=True
    ):
        usual, off = (distance(other.weights, expected.weights) for other in (lanes, stacked))
        assert off <= 2 * usual + 1e-6
    assert engines[2].stacks  # type: ignore[attr-defined]


def test_a_gradient_that_the_weights_themselves_have_keeps_its_digits() -> None:
    """A pull of a thousandth, beside gradients of bfloat16 which would swallow it."""
    packed = Packed(thin(), CPU, channels_last=True)
    nets = StackedNet(packed, 2)
    nets.load(packed.values)
    nets.active.fill_(1)

    def loss(x: Tensor, parameters: list[Tensor]) -> Tensor:
        one = OneOfMany(nets, parameters)
        return one(x).float().square().sum() + 1e-3 * sum(p.sum() for p in one.parameters())

    direct = nets.collect(
        torch.vmap(loss)(torch.randn(2, 4, 3, 16, 16), list(nets.leaves.values())).sum()
    )
    assert direct is not None and direct.dtype == torch.float32
    torch.testing.assert_close(
        direct[:, : packed.trainable], torch.full((2, packed.trainable), 1e-3)
    )
    plain = torch.vmap(lambda x, p: OneOfMany(nets, p)(x).float().sum())
    assert (
        nets.collect(plain(torch.randn(2, 4, 3, 16, 16), list(nets.leaves.values())).sum()) is None
    )


def test_no_epochs_are_no_training() -> None:
    lab, weights = engine(), Packed(thin()).weights()

    @dataclass(frozen=True)
    class Idle(Method):
        def work(self, task: Task, site: Any) -> Reply:
            return Reply(site.client, site.size, site.train(task, self.loss, {}, epochs=0)[0])

    for reply in lab.exchange(Idle(), {k: Task("train", 0, weights) for k in range(5)}):
        assert isinstance(reply, Reply) and reply.weights is not None
        assert torch.equal(reply.weights.values, weights.values)
        assert torch.equal(reply.weights.counters, weights.counters)


def test_other_clients_in_every_round_have_their_own_weights() -> None:
    """Whoever trained before, and whoever trains along."""
    lab, weights = engine(), Packed(thin()).weights()

    def trained(*clients: int) -> dict[int, Tensor]:
        replies = lab.exchange(Method(), {k: Task("train", 0, weights) for k in clients})
        return {reply.client: reply.weights.values for reply in replies}  # type: ignore[union-attr]

    everybody = trained(0, 1, 2, 3, 4)
    for some in ((4, 1), (0, 1, 2), (0, 2, 3, 4)):
        for k, values in trained(*some).items():
            assert torch.equal(values, everybody[k])


@pytest.mark.parametrize("slots", [2, 3])
def test_more_clients_than_a_stack_holds_are_trained_in_turn(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.SLOTS", slots)
    lab = engine()
    for task, expected, found in pairs(lab, Method(), CPU, THIN):
        check_close(task, expected, found, "fp32")
    assert [stack.slots for stack in lab.stacks] == [slots] * 2


def test_images_that_do_not_fit_at_once_are_prepared_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = {id(task): found for task, _, found in pairs(engine(), Method(), CPU, THIN)}
    # one step at a time
    monkeypatch.setattr("fednoro.engine.cuda.stacked.client_stack.PREPARED_BYTES", 1)
    for task, _, found in pairs(engine(), Method(), CPU, THIN):
        assert identical(whole[id(task)], found)


@dataclass(frozen=True)
class Peeking(Method):
    """A loss that looks at a value, which nobody can do for several clients at once."""

    def loss(self, step: Step) -> Tensor:
        value = F.cross_entropy(step.net(step.x), step.y)
        return value * (2 if float(value.detach()) > 1e9 else 1)


def test_a_loss_that_looks_at_values_is_trained_one_by_one_and_the_run_says_so() -> None:
    lab = engine()
    with pytest.warns(
        FedNoRoWarning, match="one client per stream: a step of several clients at once has failed"
    ):
        found = pairs(lab, Peeking(), CPU, THIN)
    for task, expected, answer in found:
        check_close(task, expected, answer, "fp32")


def test_without_memory_for_a_stack_everybody_is_trained_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.Stack", full)
    lab = engine()
    with pytest.warns(
        FedNoRoWarning, match="one client per stream: the GPU's memory does not hold a stack"
    ):
        found = pairs(lab, Method(), CPU, THIN)
    for task, expected, answer in found:
        check_close(task, expected, answer, "fp32")
    assert "stacked" not in lab.describe()


@dataclass(frozen=True)
class Broken(Method):
    """Client 1 has an accident."""

    def aux(self, task: Task, site: Any) -> dict[str, Tensor]:
        if site.client == 1:
            raise RuntimeError("the disk of client 1 is full")
        return super().aux(task, site)  # type: ignore[return-value]


@dataclass(frozen=True)
class Picky(Method):
    """Does not like batches of two images: client 4 ends with one."""

    def loss(self, step: Step) -> Tensor:
        if len(step.y) == 2:
            raise ValueError("two are too few")
        return super().loss(step)


def test_a_client_that_fails_in_its_last_batch_does_not_take_the_others_along() -> None:
    weights = Packed(thin()).weights()
    replies = list(engine().exchange(Picky(), {k: Task("train", 0, weights) for k in range(5)}))
    assert [type(reply).__name__ for reply in replies] == ["Reply"] * 4 + ["Failure"]
    assert replies[4].reason == "ValueError: two are too few"  # type: ignore[union-attr]


def test_memory_that_runs_out_midway_leaves_everything_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RoFL's centroids move with every batch: who is trained again begins where it began."""
    method, weights = METHODS["rofl"](), Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(5)}
    expected, lab = list(EagerEngine(*THIN.given()).exchange(method, tasks)), engine()

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("fednoro.engine.cuda.stacked.client_stack.Stack._answer", full)
    with pytest.warns(FedNoRoWarning, match="does not hold a stack"):
        found = list(lab.exchange(method, tasks))
    for a, b in zip(expected, found, strict=True):
        check_close(tasks[a.client], a, b, "fp32")  # type: ignore[arg-type]


def test_where_graphs_have_been_given_up_nobody_is_stacked() -> None:
    lab, weights = engine(), Packed(thin()).weights()
    with pytest.warns(FedNoRoWarning, match="going on with the eager engine"):
        lab._fall_back("for a test")
    replies = list(lab.exchange(Method(), {k: Task("train", 0, weights) for k in range(5)}))
    assert all(isinstance(reply, Reply) for reply in replies) and not lab.stacks
    assert lab.describe() == "eager on cpu"


def test_one_client_that_fails_does_not_take_the_others_along() -> None:
    weights = Packed(thin()).weights()
    tasks = {k: Task("train", 0, weights) for k in range(5)}
    replies = list(engine().exchange(Broken(), tasks))
    assert [type(reply).__name__ for reply in replies] == [
        "Reply",
        "Failure",
        "Reply",
        "Reply",
        "Reply",
    ]
    assert replies[1].reason == "RuntimeError: the disk of client 1 is full"  # type: ignore[union-attr]


def test_a_stacked_resnet_18_has_the_gradients_of_single_ones() -> None:
    """ResNet-18 itself: losses, gradients and running statistics of three
    networks, each with its own images.
    """
    # no ReLU of these images is so close to 0 that float32 takes it for the other side
    torch.manual_seed(2)
    packed = Packed(resnet().train(), CPU, channels_last=True)
    nets = StackedNet(packed, 3, torch.float32)
    nets.load(packed.values)
    nets.active.fill_(1)
    x, y = torch.randn(3, 4, 3, 64, 64), torch.randint(0, CLASSES, (3, 4))

    def loss(x: Tensor, y: Tensor, parameters: list[Tensor]) -> Tensor:
        one = OneOfMany(nets, parameters)
        return F.cross_entropy(one(x), y) + 0.01 * sum(p.square().sum() for p in one.parameters())

    values = torch.vmap(loss)(x, y, list(nets.leaves.values()))
    direct = nets.collect(values.sum())
    assert direct is not None
    gradients, now = (
        dict(zip(packed.names, nets.views_of(m), strict=True))
        for m in (nets.gradient + direct, nets.values)
    )
    for s in range(3):
        single = resnet().double().train()
        value = F.cross_entropy(single(x[s].double()), y[s]) + 0.01 * sum(
            p.square().sum() for p in single.parameters()
        )
        assert float(values[s].detach()) == pytest.approx(float(value.detach()), rel=1e-5)
        names, parameters = zip(*single.named_parameters(), strict=True)
        for name, gradient in zip(names, torch.autograd.grad(value, parameters), strict=True):
            assert (gradients[name][s] - gradient).norm() < 1e-4 * gradient.norm(), name
        for name, buffer in single.named_buffers():
            if "running" in name:
                torch.testing.assert_close(now[name][s], buffer.float(), rtol=1e-4, atol=1e-5)


class Other(Thin):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * 2


class OtherBlock(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def changed(name: str) -> nn.Module:
    """A ResNet that somebody has changed."""
    net: Any = thin()
    if name == "frozen":
        net.conv1.weight.requires_grad_(False)
    elif name == "no pool":
        net.maxpool = nn.Identity()
    elif name == "other pool":
        net.maxpool = nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)
    elif name == "block":
        net.layer1 = nn.Sequential(OtherBlock(8, 8, 1))
    elif name == "bias":
        net.layer1[0].conv1 = nn.Conv2d(8, 8, 3, padding=1)
    elif name == "groups":
        net.layer1[0].conv1 = nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False)
    elif name == "dropout":
        net.fc = nn.Sequential(nn.Dropout(), nn.Linear(32, CLASSES))
    elif name == "statistics":
        net.bn1 = nn.BatchNorm2d(8, track_running_stats=False)
    return net


CHANGES = ["frozen", "no pool", "other pool", "block", "bias", "groups", "dropout", "statistics"]


@pytest.mark.parametrize("name", CHANGES)
def test_a_resnet_that_somebody_has_changed_is_left_to_the_lanes(name: str) -> None:
    assert not stackable(changed(name), CPU)


def test_what_is_not_a_plain_resnet_is_left_to_the_lanes() -> None:
    assert stackable(thin(), CPU) and stackable(changed("not at all"), CPU)
    assert not stackable(Other(), CPU) and not stackable(SMALL.network(), CPU)
    assert not stackable(thin(), torch.device("cuda")), "the kernels work on 64 channels at a time"
    assert stackable(initialise(Resnet18(), 3, CLASSES, seed=0), torch.device("cuda"))


KERNELS = Path(__file__).parent / "stacked_kernels_in_triton.py"


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernels_compute_what_pytorch_does() -> None:
    """In Triton's interpreter, which needs no GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, str(KERNELS)], env=environment, check=True, timeout=600)


@pytest.mark.cuda
@needs_cuda
def test_the_kernels_compute_what_pytorch_does_on_a_gpu() -> None:
    subprocess.run([sys.executable, str(KERNELS)], check=True, timeout=600)


@pytest.mark.cuda
@needs_cuda
@every_method
def test_stacks_on_a_gpu_are_as_close_to_eager_as_lanes_are_and_give_the_same_bits_again(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In stacks of three, of which two are side by side."""
    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.SLOTS", 3)
    _compare_on_a_gpu(method, Lab(resnet, 64))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("size", [224, 320])
def test_stacks_of_large_images_are_as_close_to_eager_as_lanes_are(size: int) -> None:
    _compare_on_a_gpu(METHODS["fednoro"](), Lab(resnet, size))


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("name", ["fednoro", "fedlsr"])
def test_a_stream_of_their_own_leaves_the_weights_gradients_as_they_are(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedLSR shows the network two views, whose gradients are added up."""
    method, cuda, lab = METHODS[name](), torch.device("cuda"), Lab(resnet, 64)
    aside = pairs(CudaEngine(*lab.given(cuda), precision="bf16", stacked=True), method, cuda, lab)
    monkeypatch.setattr(SideStream, "work", lambda self, *read: nullcontext())
    inline = pairs(CudaEngine(*lab.given(cuda), precision="bf16", stacked=True), method, cuda, lab)
    for (_, _, found), (_, _, other) in zip(aside, inline, strict=True):
        assert identical(found, other)


def _compare_on_a_gpu(method: Method, lab: Lab) -> None:
    cuda = torch.device("cuda")
    stacked = CudaEngine(*lab.given(cuda), precision="bf16", stacked=True)
    lanes = CudaEngine(*lab.given(cuda), precision="bf16", stacked=False)
    once, alone = pairs(stacked, method, cuda, lab), pairs(lanes, method, cuda, lab)
    assert stacked.stacks and not stacked._unstackable
    for (_, expected, found), (_, _, other) in zip(once, alone, strict=True):
        if expected.weights is None or found.weights is None or other.weights is None:
            continue
        assert torch.equal(found.weights.counters, other.weights.counters)
        off, usual = (
            float((w.values - expected.weights.values).norm())
            for w in (found.weights, other.weights)
        )
        assert off <= 2 * usual + 1e-3 * float(expected.weights.values.norm())
    again = pairs(CudaEngine(*lab.given(cuda), precision="bf16", stacked=True), method, cuda, lab)
    assert all(identical(a, b) for (_, _, a), (_, _, b) in zip(once, again, strict=True))


def test_windows_are_equal_parts_and_nobody_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fednoro.engine.cuda.cuda_engine.SLOTS", 2)
    lab = engine()
    assert list(lab._windows([])) == []
    assert list(lab._windows([0, 1, 2, 3])) == [[0, 1, 2, 3]]
    assert list(lab._windows([0, 1, 2, 3, 4])) == [[0, 1, 2], [3, 4]]
