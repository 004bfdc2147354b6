"""What a run asks of its clients, answered by the eager engine, to compare other engines with."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import CLASSES, MIXED, ROUNDS, distance, federation, same, three_channels
from torch import Tensor, nn

from fednoro.core.training import Augment, Training
from fednoro.core.types import Failure, Precision, Reply, State, Task
from fednoro.engine.eager import EagerEngine
from fednoro.experiment.checkpoint import to_device
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import FedNoRoPlus, Method
from fednoro.models import Packed

CPU = torch.device("cpu")
TRAINING = Training(
    rounds=ROUNDS, batch=4, lr=1e-3, augment=Augment(rotate=15, translate=0.1, flip=True)
)
SEED = 3


@dataclass(frozen=True)
class Lab:
    """A network and images for it."""

    network: Callable[[], nn.Module]
    side: int

    def given(self, device: torch.device = CPU) -> tuple[Any, ...]:
        """What every engine is made of; the clients are new: none remembers
        what it did on another engine.
        """
        data, clients = federation(MIXED, self.side)
        return self.network, data, 3, TRAINING, SEED, device, clients


SMALL = Lab(three_channels, 8)
given = SMALL.given


@dataclass(frozen=True)
class Exchange:
    """What was asked of whom, and what the eager engine answered."""

    tasks: Mapping[int, Task]
    replies: Sequence[Reply]
    memories: Mapping[int, Mapping[str, Tensor]]  # what each client remembered before

    @property
    def kinds(self) -> set[tuple[str, ...]]:
        return {(task.name, *task.settings) for task in self.tasks.values()}


def on_eager(method: Method, device: torch.device = CPU, lab: Lab = SMALL) -> list[Exchange]:
    """The first and the last exchange of every kind that a whole run has, in order; the
    same ones for the same asker.

    A run of FedNoRo+ that finds nobody noisy here is followed by one that is told.
    """
    return _on_eager(method, device, lab)  # a cache tells apart what is given from what is left out


@functools.cache
def _on_eager(method: Method, device: torch.device, lab: Lab) -> list[Exchange]:
    seen = _played(method, device, lab)
    if isinstance(method, FedNoRoPlus):
        seen += _played(replace(method, noisy=(0, 2)), device, lab)
    by_kind: dict[frozenset[tuple[str, ...]], list[int]] = {}
    for number, one in enumerate(seen):
        by_kind.setdefault(frozenset(one.kinds), []).append(number)
    return [
        seen[i]
        for i in sorted({i for numbers in by_kind.values() for i in (numbers[0], numbers[-1])})
    ]


def _played(method: Method, device: torch.device, lab: Lab) -> list[Exchange]:
    engine, seen = EagerEngine(*lab.given(device)), list[Exchange]()

    def exchange(method: Method, tasks: Mapping[int, Task]) -> Any:
        memories = {k: dict(engine.clients[k].memory) for k in tasks}
        replies = list(answers(engine, method, tasks))
        seen.append(Exchange(tasks, replies, memories))
        return iter(replies)

    nothing = Evaluation(np.eye(CLASSES, dtype=np.int64), 0.0)
    start = to_device(State(Packed(lab.network()).weights(), 0, ROUNDS, CLASSES, SEED), device)
    *_, last = play(method, start, exchange, sorted(engine.clients), lambda _: nothing)
    assert last.state.round == ROUNDS
    return seen


def again(
    engine: EagerEngine, method: Method, exchange: Exchange, changed: Any = None
) -> Sequence[Reply]:
    """What this engine answers to the same tasks, or to changed ones, from what
    the clients remembered then.
    """
    for k, memory in exchange.memories.items():
        engine.clients[k].memory.clear()
        engine.clients[k].memory.update(memory)
    return answers(
        engine,
        method,
        {k: changed(task) if changed else task for k, task in exchange.tasks.items()},
    )


def answers(engine: EagerEngine, method: Method, tasks: Mapping[int, Task]) -> Sequence[Reply]:
    replies = list(engine.exchange(method, tasks))
    for reply in replies:
        if isinstance(reply, Failure) and reply.error is not None:
            raise reply.error
    return replies  # type: ignore[return-value]


def pairs(
    engine: EagerEngine, method: Method, device: torch.device = CPU, lab: Lab = SMALL
) -> list[tuple[Task, Reply, Reply]]:
    """For every task of those exchanges: what the eager engine answered, and what this
    one does from the same state.
    """
    found = []
    for exchange in on_eager(method, device, lab):
        replies = again(engine, method, exchange)
        assert [reply.client for reply in replies] == [reply.client for reply in exchange.replies]
        found += [
            (exchange.tasks[r.client], r, other)
            for r, other in zip(exchange.replies, replies, strict=True)
        ]
    return found


def identical(a: Reply, b: Reply) -> bool:
    assert (a.weights is None) == (b.weights is None)
    assert a.metrics.keys() == b.metrics.keys() and a.arrays.keys() == b.arrays.keys()
    return (
        (a.client, a.size) == (b.client, b.size)
        and (a.weights is None or b.weights is None or same(a.weights, b.weights))
        and all(
            torch.equal(torch.as_tensor(a.metrics[key]), torch.as_tensor(b.metrics[key]))
            for key in a.metrics
        )
        and all(np.array_equal(a.arrays[key], b.arrays[key], equal_nan=True) for key in a.arrays)
    )


@dataclass(frozen=True)
class Tolerance:
    """How far weights, losses and scores of a precision may be from eager's in float32."""

    weights: float  # of the norm of the weights
    moved: float  # of what training changed
    # learning rates, for any single weight: Adam turns the sign of a tiny
    # gradient into a whole step
    each: float
    loss: float  # relative
    lid: float  # relative: ratios of distances between outputs that are almost equal


TOLERANCES: dict[Precision, Tolerance] = {
    "fp32": Tolerance(1e-5, 1e-3, 1, 1e-5, 1e-5),
    "tf32": Tolerance(4e-3, 0.2, 10, 5e-3, 0.1),
    # the worst of any client here: 5e-3, 0.22, 5, 3e-3, 0.065
    "bf16": Tolerance(8e-3, 0.3, 10, 1e-2, 0.1),
}


def check_close(task: Task, expected: Reply, found: Reply, precision: Precision) -> None:
    allowed = TOLERANCES[precision]
    assert (found.client, found.size) == (expected.client, expected.size)
    assert (
        found.arrays.keys() == expected.arrays.keys()
        and found.metrics.keys() == expected.metrics.keys()
    )
    for key, array in expected.arrays.items():
        if key == "areas":  # ranks of a few images, which move by steps
            np.testing.assert_array_equal(np.isnan(found.arrays[key]), np.isnan(array))
            if np.isfinite(array).any():
                assert np.nanmean(np.abs(found.arrays[key] - array)) <= 20 * allowed.loss
            continue
        if key in ("centroids", "products", "sums"):
            # of features, which carry the errors of every layer before them
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
