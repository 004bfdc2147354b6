"""Every engine against the eager one: the same task from the same state gives the same weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from exchanges import TRAINING, Lab, again, check_close, given, identical, on_eager, pairs
from federations import CLASSES, every_method, every_variant, three_channels
from torch import Tensor

from fednoro.core.types import Precision, Reply, Step, Task, Weights
from fednoro.detection.calibrated import WIDTHS
from fednoro.engine.cpu import CpuEngine
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.eager import EagerEngine
from fednoro.methods import FedCorr, FedNoRo, FedNoRoPlus, Method
from fednoro.models import Resnet18, initialise

pytestmark = pytest.mark.usefixtures("one_thread")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this machine has no CUDA device"
)

# Of the methods that ask for more than training. FedCorr's second iteration has noise levels.
HEADS = {("moments", "width"), ("score", "counted")}
KINDS: dict[type[Method], set[tuple[str, ...]]] = {
    FedNoRo: {("train",), ("score",), ("train", "lam")},
    FedNoRoPlus: {("train", "watch"), *HEADS, ("train",), ("correct",), ("train", "soft")},
    FedCorr: {
        ("train",),
        ("visit-1",),
        ("correct-1",),
        ("visit-2",),
        ("visit-2", "mu"),
        ("correct-2",),
        ("relabel",),
    },
}


@every_variant
def test_a_run_has_every_kind_of_task(method: Method) -> None:
    """Else the tests below would not say what they claim to say."""
    kinds = set().union(*(exchange.kinds for exchange in on_eager(method)))
    expected = next(
        (kinds for cls, kinds in KINDS.items() if isinstance(method, cls)), {("train",)}
    )
    detector = getattr(method, "detector", None)
    if isinstance(method, FedNoRo) and detector in WIDTHS:
        expected = expected - {("score",)} | {("train", "watch"), *HEADS}
    if detector == "shares":
        expected = expected - HEADS | {("score",)}
    if isinstance(method, FedNoRoPlus) and method.targets == "distil":
        expected = expected - {("correct",), ("train", "soft")} | {("train", "distil")}
    distils = getattr(method, "noisy_clients", "distil") == "distil"
    assert kinds == (expected if distils else expected - {("train", "lam")})


@pytest.mark.parametrize("lanes", [1, 2, 3])
@every_variant
def test_the_cpu_engine_gives_the_eager_bits(method: Method, lanes: int) -> None:
    lab = CpuEngine(*given(), lanes=lanes)
    assert len(lab.lanes) == lanes
    for _, expected, found in pairs(lab, method):
        assert identical(expected, found)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@every_variant
def test_the_steps_behind_the_graphs_are_the_eager_ones(
    method: Method, precision: Precision
) -> None:
    lab = CudaEngine(*given(), precision=precision, lanes=2)
    # On the CPU tf32 is full precision, in the memory format that it has on a GPU.
    tolerance: Precision = "fp32" if precision == "tf32" else precision
    for task, expected, found in pairs(lab, method):
        check_close(task, expected, found, tolerance)


@every_method
def test_the_tolerances_would_notice_a_wrong_batch_or_a_wrong_loss(method: Method) -> None:
    """Another order of the images, or another λ, must be further away than bf16 may be."""
    training = [
        e
        for e in on_eager(method)
        if ("train", "lam") in e.kinds or not isinstance(method, FedNoRo)
    ][-1]
    other = EagerEngine(*given())
    other.seed += 1
    for replies in (
        again(other, method, training),
        again(EagerEngine(*given()), method, training, _changed),
    ):
        with pytest.raises(AssertionError):
            for expected, found in zip(training.replies, replies, strict=True):
                check_close(training.tasks[expected.client], expected, found, "bf16")


def _changed(task: Task) -> Task:
    if "lam" in task.settings:
        return replace(task, settings={"lam": 1 - float(task.settings["lam"])})
    return replace(task, round=task.round + 1)


# On a GPU, with graphs


@functools.cache
def on_graphs(
    method: Method, precision: Precision, lanes: int = 3
) -> list[tuple[Task, Reply, Reply]]:
    """One engine for a whole run: its later rounds replay what its first round captured."""
    cuda = torch.device("cuda")
    on_eager(method, cuda)  # before there is an engine that allows TF32
    lab = CudaEngine(*given(cuda), precision=precision, lanes=lanes)
    found = pairs(lab, method, cuda)
    torch.cuda.synchronize()
    assert any(program.graphs for lane in lab.lanes for program in lane.programs.values()), (
        "nothing was captured"
    )
    return found


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@every_variant
def test_graphs_give_the_eager_weights_in_every_round(method: Method, precision: Precision) -> None:
    for task, expected, found in on_graphs(method, precision):
        check_close(task, expected, found, precision)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@every_method
def test_graphs_give_the_same_bits_again_whatever_ran_before(
    method: Method, precision: Precision
) -> None:
    """In a new engine that begins with the last exchange, and with another number of lanes."""
    cuda = torch.device("cuda")
    once = {id(task): found for task, _, found in on_graphs(method, precision)}
    lab = CudaEngine(*given(cuda), precision=precision, lanes=2)
    for _ in range(2):
        for exchange in reversed(on_eager(method, cuda)):
            for reply in again(lab, method, exchange):
                assert identical(once[id(exchange.tasks[reply.client])], reply)


@pytest.mark.cuda
@needs_cuda
def test_nothing_is_captured_again_from_round_to_round() -> None:
    cuda = torch.device("cuda")
    lab, method = CudaEngine(*given(cuda), lanes=1), Method()
    first, *rest = on_eager(method, cuda)
    again(lab, method, first)

    def captured() -> list[int]:
        return [
            id(graph) for program in lab.lane.programs.values() for graph in program.graphs.values()
        ]

    before = captured()
    assert len(before) == 3  # batches of 4, 2 and 1
    for exchange in rest:
        again(lab, method, exchange)
    assert captured() == before


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_outputs_on_a_gpu_are_the_eager_ones(precision: Precision) -> None:
    cuda, index = torch.device("cuda"), np.arange(33)
    reference = EagerEngine(*given(cuda))
    trained = on_eager(Method(), cuda)[-1].replies[0].weights
    assert isinstance(trained, Weights)
    expected = reference.logits(trained, index)
    lab = CudaEngine(*given(cuda), precision=precision, lanes=2)
    lab.evaluation_batch = 16
    allowed = {"fp32": 1e-5, "tf32": 5e-3, "bf16": 3e-2}[precision]
    torch.testing.assert_close(lab.logits(trained, index), expected, rtol=allowed, atol=allowed)


@dataclass(frozen=True)
class Waits(Method):
    """A loss that waits for the GPU in the first capture of a smaller batch,
    which breaks that capture off.
    """

    waited: list[int] = field(default_factory=list, compare=False)

    def loss(self, step: Step) -> Tensor:
        smaller = 1 < len(step.y) < TRAINING.batch  # one image is rehearsed in any case
        if smaller and torch.cuda.is_current_stream_capturing() and not self.waited:
            self.waited.append(len(step.y))
            torch.cuda.synchronize()
        return super().loss(step)


@pytest.mark.cuda
@needs_cuda
def test_a_size_that_cannot_be_captured_at_once_is_rehearsed() -> None:
    cuda, method = torch.device("cuda"), Waits()
    lab = CudaEngine(*given(cuda), lanes=1)
    for task, expected, found in pairs(lab, method, cuda):
        check_close(task, expected, found, "fp32")
    assert method.waited and lab._eager is None


@pytest.mark.parametrize(("side", "streams"), [(128, 12), (132, 6)])
def test_large_images_have_fewer_streams(side: int, streams: int) -> None:
    lab = CudaEngine(*Lab(three_channels, side).given(), precision="tf32")
    assert lab.describe() == f"cuda graphs on {streams} streams of cpu, tf32"


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize(("side", "expected"), [(320, "24 clients stacked"), (336, "6 streams")])
def test_very_large_images_are_not_stacked(side: int, expected: str) -> None:
    lab = Lab(lambda: initialise(Resnet18(), 3, CLASSES, seed=0), side)
    assert expected in CudaEngine(*lab.given(torch.device("cuda")), precision="bf16").describe()
