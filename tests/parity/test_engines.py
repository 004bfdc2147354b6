"""Every engine against the eager one: the same task from the same state gives the same weights."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, ROUNDS, distance, every_method, every_variant, federation, same, three_channels
from torch import Tensor

from fednoro.engine import CpuEngine, CudaEngine, EagerEngine, Precision
from fednoro.methods import FedCorr, FedNoRo, FedNoRoPlus, Method
from fednoro.models import Packed
from fednoro.rounds import Evaluation, play
from fednoro.runs import to_device
from fednoro.training import Augment, Training
from fednoro.types import Failure, Reply, State, Task, Weights

pytestmark = pytest.mark.usefixtures("one_thread")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

CPU = torch.device("cpu")
TRAINING = Training(rounds=ROUNDS, batch=4, lr=1e-3, augment=Augment(rotate=15, translate=0.1, flip=True))
SEED = 3


def given(device: torch.device = CPU) -> tuple[Any, ...]:
    """What every engine is made of; the clients are new, so that none remembers what it did on another engine."""
    data, clients = federation(MIXED, side=8)
    return three_channels, data, 3, TRAINING, SEED, device, clients


@dataclass(frozen=True)
class Exchange:
    """What was asked of whom, and what the eager engine answered."""

    tasks: Mapping[int, Task]
    replies: Sequence[Reply]
    memories: Mapping[int, Mapping[str, Tensor]]  # what each client remembered before

    @property
    def kinds(self) -> set[tuple[str, ...]]:
        return {(task.name, *task.settings) for task in self.tasks.values()}


@functools.cache
def on_eager(method: Method, device: torch.device = CPU) -> list[Exchange]:
    """The first and the last exchange of every kind that a whole run has, in order.

    A run of FedNoRo+ that finds nobody noisy here is followed by one that is told.
    """
    seen = _played(method, device)
    if isinstance(method, FedNoRoPlus):
        seen += _played(replace(method, noisy=(0, 2)), device)
    by_kind: dict[frozenset[tuple[str, ...]], list[int]] = {}
    for number, one in enumerate(seen):
        by_kind.setdefault(frozenset(one.kinds), []).append(number)
    return [seen[i] for i in sorted({i for numbers in by_kind.values() for i in (numbers[0], numbers[-1])})]


def _played(method: Method, device: torch.device) -> list[Exchange]:
    lab, seen = EagerEngine(*given(device)), list[Exchange]()

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Any:
        memories = {k: dict(lab.clients[k].memory) for k in tasks}
        replies = list(answers(lab, method, tasks))
        seen.append(Exchange(tasks, replies, memories))
        return iter(replies)

    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    start = to_device(State(Packed(three_channels()).weights(), 0, ROUNDS, CLASSES, SEED), device)
    *_, last = play(method, start, exchange, sorted(lab.clients), lambda _: nothing)
    assert last.state.round == ROUNDS
    return seen


def again(lab: EagerEngine, method: Method, exchange: Exchange, changed: Any = None) -> Sequence[Reply]:
    """What this engine answers to the same tasks, or to changed ones, from what the clients remembered then."""
    for k, memory in exchange.memories.items():
        lab.clients[k].memory.clear()
        lab.clients[k].memory.update(memory)
    return answers(lab, method, {k: changed(task) if changed else task for k, task in exchange.tasks.items()})


def answers(lab: EagerEngine, method: Method, tasks: Mapping[int, Task]) -> Sequence[Reply]:
    replies = list(lab.exchange(method, tasks))
    for reply in replies:
        if isinstance(reply, Failure) and reply.error is not None:
            raise reply.error
    return replies  # type: ignore[return-value]


def pairs(lab: EagerEngine, method: Method, device: torch.device = CPU) -> list[tuple[Task, Reply, Reply]]:
    """For every task of those exchanges: what the eager engine answered, and what this one does from the same state."""
    found = []
    for exchange in on_eager(method, device):
        replies = again(lab, method, exchange)
        assert [reply.client for reply in replies] == [reply.client for reply in exchange.replies]
        found += [(exchange.tasks[r.client], r, other) for r, other in zip(exchange.replies, replies, strict=True)]
    return found


def identical(a: Reply, b: Reply) -> bool:
    assert (a.weights is None) == (b.weights is None)
    assert a.metrics.keys() == b.metrics.keys() and a.arrays.keys() == b.arrays.keys()
    return (
        (a.client, a.size) == (b.client, b.size)
        and (a.weights is None or b.weights is None or same(a.weights, b.weights))
        and all(torch.equal(torch.as_tensor(a.metrics[key]), torch.as_tensor(b.metrics[key])) for key in a.metrics)
        and all(np.array_equal(a.arrays[key], b.arrays[key], equal_nan=True) for key in a.arrays)
    )


@dataclass(frozen=True)
class Tolerance:
    """How far weights, losses and scores of a precision may be from eager's in float32."""

    weights: float  # of the norm of the weights
    moved: float  # of what training changed
    each: float  # learning rates, for any single weight: Adam turns the sign of a tiny gradient into a whole step
    loss: float  # relative
    lid: float  # relative: ratios of distances between outputs that are almost equal


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(1e-5, 1e-3, 1, 1e-5, 1e-5),
    "tf32": Tolerance(4e-3, 0.2, 10, 5e-3, 0.1),
    "bf16": Tolerance(8e-3, 0.3, 10, 1e-2, 0.1),  # the worst of any client here: 5e-3, 0.22, 5, 3e-3, 0.065
}


def check_close(task: Task, expected: Reply, found: Reply, precision: Precision) -> None:
    allowed = TOLERANCES[precision]
    assert (found.client, found.size) == (expected.client, expected.size)
    assert found.arrays.keys() == expected.arrays.keys() and found.metrics.keys() == expected.metrics.keys()
    for key, array in expected.arrays.items():
        if key == "centroids":  # means of features, which carry the errors of every layer before them
            off = np.linalg.norm(found.arrays[key] - array)
            assert off <= 3 * allowed.weights * np.linalg.norm(array)
            continue
        np.testing.assert_allclose(found.arrays[key], array, rtol=allowed.loss, atol=allowed.loss)
    for key, value in expected.metrics.items():
        off = allowed.lid if key == "lid" else allowed.loss
        assert float(found.metrics[key]) == pytest.approx(float(value), rel=off, abs=off)
    if expected.weights is None or found.weights is None:
        assert found.weights is expected.weights
        return
    assert torch.equal(found.weights.counters.cpu(), expected.weights.counters.cpu())
    assert found.weights.segments == expected.weights.segments
    off, moved = distance(found.weights, expected.weights), distance(expected.weights, task.weights)
    assert moved > 0
    assert off <= allowed.weights * float(expected.weights.values.norm())
    # One image is one step of Adam, which is the sign of the gradient alone: small ones flip it.
    assert off <= allowed.moved * moved * (2 if expected.size == 1 else 1)
    worst = (found.weights.values.cpu() - expected.weights.values.cpu()).abs().max()
    assert worst <= allowed.each * TRAINING.lr


# Of the methods that ask for more than training. FedCorr's second iteration has noise levels.
KINDS: dict[type[Method], set[tuple[str, ...]]] = {
    FedNoRo: {("train",), ("score",), ("train", "lam")},
    FedNoRoPlus: {("train", "watch"), ("score",), ("train",), ("correct",), ("train", "soft")},
    FedCorr: {
        ("train",), ("visit-1",), ("correct-1",), ("visit-2",), ("visit-2", "mu"), ("correct-2",), ("relabel",)
    },
}  # fmt: skip


@every_variant
def test_a_run_has_every_kind_of_task(method: Method) -> None:
    """Else the tests below would not say what they claim to say."""
    kinds = set().union(*(exchange.kinds for exchange in on_eager(method)))
    if isinstance(method, FedNoRo) and method.detector == "calibrated":
        assert kinds == {("train", "watch"), ("score",), ("train",), ("train", "lam")}
        return
    if isinstance(method, FedNoRoPlus) and method.targets == "distil":
        assert kinds == {("train", "watch"), ("score",), ("train",), ("train", "distil")}
        return
    expected = next((kinds for cls, kinds in KINDS.items() if isinstance(method, cls)), {("train",)})
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
def test_the_steps_behind_the_graphs_are_the_eager_ones(method: Method, precision: Precision) -> None:
    lab = CudaEngine(*given(), precision=precision, lanes=2)
    # On the CPU tf32 is full precision, in the memory format that it has on a GPU.
    tolerance: Precision = "fp32" if precision == "tf32" else precision
    for task, expected, found in pairs(lab, method):
        check_close(task, expected, found, tolerance)


@every_method
def test_the_tolerances_would_notice_a_wrong_batch_or_a_wrong_loss(method: Method) -> None:
    """Another order of the images, or another λ, must be further away than bf16 may be."""
    training = [e for e in on_eager(method) if ("train", "lam") in e.kinds or not isinstance(method, FedNoRo)][-1]
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
def on_graphs(method: Method, precision: Precision, lanes: int = 3) -> list[tuple[Task, Reply, Reply]]:
    """One engine for a whole run: its later rounds replay what its first round captured."""
    cuda = torch.device("cuda")
    on_eager(method, cuda)  # before there is an engine that allows TF32
    lab = CudaEngine(*given(cuda), precision=precision, lanes=lanes)
    found = pairs(lab, method, cuda)
    torch.cuda.synchronize()
    assert any(program.graphs for lane in lab.lanes for program in lane.programs.values()), "nothing was captured"
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
def test_graphs_give_the_same_bits_again_whatever_ran_before(method: Method, precision: Precision) -> None:
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
        return [id(graph) for program in lab.lane.programs.values() for graph in program.graphs.values()]

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
