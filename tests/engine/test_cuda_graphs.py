"""The engine for CUDA where it can be tried without a GPU: bfloat16, blocks
of batches, and falling back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federations import CLASSES, MIXED, federation, network, same, three_channels
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fednoro.engine.cuda.cuda_lane as graphs
import fednoro.engine.lane as lane
from fednoro.core.training import Training
from fednoro.core.types import FedNoRoWarning, Reply, Step, Task, Weights
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.cuda.half_precision import Half
from fednoro.engine.eager import EagerEngine
from fednoro.methods import Method
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, SEED, SIDE = torch.device("cpu"), 5, 8
TRAINING = Training(batch=4, epochs=2, lr=1e-3)


def cross_entropy(step: Step) -> Tensor:
    return F.cross_entropy(step.net(step.x), step.y)


# Blocks of batches


@given(st.integers(0, 500), st.integers(1, 64))
def test_batches_are_whole_but_for_the_last(size: int, batch: int) -> None:
    sizes = lane.batches(size, batch)
    assert sum(sizes) == size and len(sizes) == -(-size // batch)
    assert all(n == batch for n in sizes[:-1])
    assert all(1 <= n <= batch for n in sizes)


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 4), st.integers(1, 5))
def test_blocks_cover_all_batches_once_and_in_order_and_fit(
    size: int, batch: int, epochs: int, room: int
) -> None:
    sizes = lane.batches(size, batch) * epochs
    blocks = list(lane.blocks(sizes, room * batch))
    assert [n for _, _, inside in blocks for n in inside] == sizes
    end = 0
    for first, last, inside in blocks:
        assert first == end and last - first == sum(inside)
        assert inside and sum(inside) <= room * batch
        end = last
    assert end == sum(sizes)
    for (_, _, inside), (_, _, following) in pairwise(blocks):
        assert sum(inside) + following[0] > room * batch  # as full as whole batches make it


# bfloat16


class Tied(nn.Module):
    """Convolution, normalisation, two layers with one weight, one weight that is
    also used as it is, one frozen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.other.weight = self.one.weight
        self.scale = nn.Parameter(torch.ones(6))
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        y = self.other(self.one(self.frozen(y)).relu()) + F.linear(y, self.one.weight)
        return self.fc(y * self.scale)  # type: ignore[no-any-return]


def tied() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Tied()


def proximal(step: Step) -> Tensor:
    """FedProx with a pull so strong that its gradient decides."""
    pairs = zip(step.net.parameters(), step.anchor.parameters(), strict=True)
    return cross_entropy(step) + 500 * sum(((w - w_g) ** 2).sum() for w, w_g in pairs)


def norms(step: Step) -> Tensor:
    """Looks at one parameter by its name."""
    return cross_entropy(step) + 5 * dict(step.net.named_parameters())["fc.weight"].square().sum()


def trained(
    kind: type[EagerEngine], build: Callable[[], nn.Module], loss: Any, **options: Any
) -> tuple[Any, Weights]:
    data, clients = federation(MIXED, SIDE)
    lab = kind(build, data, 1, TRAINING, SEED, CPU, clients, **options)
    task = Task("train", 0, Packed(build()).weights())
    return lab, lab.site(lab.clients[4]).train(task, loss, {})[0]


def mean_gradient(lab: EagerEngine) -> Tensor:
    """Adam's running mean of the gradients, as one vector in the ordinary layout."""
    means = lab.lane.adam.means
    if len(means) > 1:
        return torch.cat([mean.flatten() for mean in means])
    whole = torch.cat([means[0], torch.zeros(len(lab.net.values) - len(means[0]))])
    return torch.cat([view.flatten() for view in lab.net.views_of(whole)])[: len(means[0])]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("loss", [cross_entropy, proximal, norms])
@pytest.mark.parametrize("build", [network, tied])
def test_gradients_in_bf16_are_the_eager_ones(build: Callable[[], nn.Module], loss: Any) -> None:
    reference, expected = trained(EagerEngine, build, loss)
    lab, found = trained(CudaEngine, build, loss, precision="bf16", lanes=1)
    plain, _ = trained(EagerEngine, build, cross_entropy)
    # Adam gives tiny gradients whole steps: rounding turns some of them, and the
    # pull follows where they went.
    assert relative(mean_gradient(lab), mean_gradient(reference)) < 0.25
    if loss is not cross_entropy:  # the term counts: without it, the gradients would be others
        assert relative(mean_gradient(plain), mean_gradient(reference)) > 0.8
    assert relative(found.values, expected.values) < 3e-3
    frozen = [i for i, name in enumerate(reference.net.names) if "frozen" in name]
    for i in frozen:
        part = slice(sum(expected.segments[:i]), sum(expected.segments[: i + 1]))
        assert torch.equal(found.values[part], Packed(build()).values[part])
    assert bool(frozen) == (build is tied)


@pytest.mark.parametrize("build", [network, tied])
def test_a_loss_of_the_parameters_alone_loses_no_digits_in_bf16(
    build: Callable[[], nn.Module],
) -> None:
    def pull(step: Step) -> Tensor:
        pairs = zip(step.net.parameters(), step.anchor.parameters(), strict=True)
        return torch.stack([((w - 0.99 * w_g) ** 2).sum() for w, w_g in pairs]).sum()

    reference, expected = trained(EagerEngine, build, pull)
    lab, found = trained(CudaEngine, build, pull, precision="bf16", lanes=1)
    assert relative(mean_gradient(lab), mean_gradient(reference)) < 1e-4
    torch.testing.assert_close(found.values, expected.values, rtol=0, atol=1e-6)


def test_a_weight_that_a_loss_leaves_out_has_no_gradient_whatever_came_before() -> None:
    def features_only(step: Step) -> Tensor:
        return step.net.features(step.x).square().mean()

    data, clients = federation(MIXED, SIDE)
    for precision in ("fp32", "bf16"):
        lab, fresh = (
            CudaEngine(network, data, 1, TRAINING, SEED, CPU, clients, precision=precision, lanes=1)
            for _ in range(2)
        )
        task = Task("train", 0, Packed(network()).weights())
        lab.site(lab.clients[4]).train(task, cross_entropy, {})
        after, alone = (
            one.site(one.clients[4]).train(task, features_only, {})[0] for one in (lab, fresh)
        )
        assert same(after, alone), precision


@pytest.mark.parametrize("build", [network, three_channels, tied])
def test_a_network_in_bf16_shows_its_float32_weights_and_computes_as_autocast_does(
    build: Callable[[], nn.Module],
) -> None:
    packed = Packed(build(), channels_last=True)
    half = Half(packed)
    assert dict(half.named_parameters()).keys() == dict(packed.net.named_parameters()).keys()
    for own, original in zip(half.parameters(), packed.net.parameters(), strict=True):
        assert own is original and own.dtype == torch.float32
    x = torch.randn(
        6,
        3 if build is three_channels else 1,
        SIDE,
        SIDE,
        generator=torch.Generator().manual_seed(0),
    )
    for _ in range(2):
        for train in (False, True):
            half.train(train)
            packed.net.train(train)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                before = packed.weights()
                found = half(x).float()
                moved = packed.weights()
                packed.load(before)
                expected = packed.net(x).float()
            torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
            assert same(moved, packed.weights()), (
                "running statistics and counters are the network's own"
            )
            assert torch.equal(moved.values, before.values) != train
        packed.values[: packed.trainable].add_(0.5)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            assert not torch.allclose(
                half.train(False)(x).float(), packed.net.eval()(x).float(), atol=2e-2
            )
        half.refresh()


def test_the_anchor_of_a_step_is_in_eval_mode_and_takes_no_gradients() -> None:
    seen = []

    def loss(step: Step) -> Tensor:
        seen.append((step.net.training, step.anchor.training, step.anchor(step.x).requires_grad))
        return cross_entropy(step)

    for precision in ("fp32", "bf16"):
        seen.clear()
        trained(CudaEngine, network, loss, precision=precision, lanes=1)
        assert set(seen) == {(True, False, False)}, precision


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_network_and_anchor_of_a_step_have_the_same_parts(precision: Any) -> None:
    """A loss may go through both together, as a proximal term does."""
    seen = []

    def loss(step: Step) -> Tensor:
        for what in ("parameters", "buffers"):
            ours, theirs = (
                dict(getattr(net, f"named_{what}")()) for net in (step.net, step.anchor)
            )
            seen.append(what)
            assert ours.keys() == theirs.keys()
            assert all(ours[name].shape == theirs[name].shape for name in ours)
        return cross_entropy(step)

    trained(CudaEngine, network, loss, precision=precision, lanes=1)
    assert seen


def test_a_client_that_diverged_leaves_nothing_behind() -> None:
    data, clients = federation(MIXED, SIDE)
    for precision in ("fp32", "bf16"):
        lab = CudaEngine(
            network, data, 1, TRAINING, SEED, CPU, clients, precision=precision, lanes=1
        )
        task, site = Task("train", 0, Packed(network()).weights()), lab.site(lab.clients[0])
        expected = site.train(task, cross_entropy, {})[0]
        assert (
            site.train(task, lambda step: step.net(step.x).sum() * torch.nan, {})[0]
            .values.isnan()
            .any()
        )
        assert same(site.train(task, cross_entropy, {})[0], expected)


# Where graphs cannot


@dataclass(frozen=True)
class Troubled(Method):
    """Not registered: raises on the engine for CUDA as often as `times` has entries left."""

    times: list[Exception] = field(default_factory=list)

    def work(self, task: Task, site: Any) -> Reply:
        if isinstance(site.engine, CudaEngine) and site.client == 3 and self.times:
            raise self.times.pop()
        return super().work(task, site)


def out_of_memory(times: int) -> list[Exception]:
    return [torch.OutOfMemoryError("CUDA out of memory") for _ in range(times)]


@pytest.mark.parametrize(
    ("errors", "lanes", "says"),
    [
        (out_of_memory(1), 2, ["ran out: going on with 2 streams"]),
        (
            out_of_memory(2),
            1,
            ["ran out: going on with 2 streams", "ran out: going on with 1 streams"],
        ),
        (
            out_of_memory(3),
            1,
            ["2 streams", "1 streams", "eager engine in fp32: the GPU has too little memory"],
        ),
        (
            [graphs.UnsuitableError("it draws random numbers")],
            1,
            ["eager engine in fp32: it draws random numbers"],
        ),
    ],
    ids=["out of memory once", "twice", "always", "unsuitable"],
)
def test_trouble_with_the_gpu_means_fewer_streams_then_eager_and_the_same_answers(
    errors: list[Exception], lanes: int, says: list[str]
) -> None:
    data, clients = federation(MIXED, SIDE)
    lab = CudaEngine(network, data, 1, TRAINING, SEED, CPU, clients, lanes=4)
    reference = EagerEngine(network, data, 1, TRAINING, SEED, CPU, clients)
    asked = {k: Task("train", 2, Packed(network()).weights()) for k in lab.clients}
    with pytest.warns(FedNoRoWarning) as warned:
        found = list(lab.exchange(Troubled(list(errors)), asked))
    messages = [str(one.message) for one in warned]
    assert len(messages) == len(says) and all(a in b for a, b in zip(says, messages, strict=True))
    assert len(lab.lanes) == lanes
    assert lab.describe() == (
        "eager on cpu" if "eager" in says[-1] else f"cuda graphs on {lanes} streams of cpu, fp32"
    )
    index = np.arange(20)
    for _ in range(2):  # and in the round after
        for one, other in zip(found, reference.exchange(Method(), asked), strict=True):
            assert isinstance(one, Reply) and isinstance(other, Reply)
            assert one.weights is not None and other.weights is not None
            torch.testing.assert_close(one.weights.values, other.weights.values, rtol=0, atol=1e-6)
            assert torch.equal(one.weights.counters, other.weights.counters)
        found = list(lab.exchange(Method(), asked))
    start = asked[0].weights
    torch.testing.assert_close(
        lab.logits(start, index), reference.logits(start, index), rtol=0, atol=1e-6
    )
