"""Memory that runs out, networks that resist, replies that are none:
who is served, and with what.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from federations import BATCH, CLASSES, federation, network, same
from torch import Tensor, nn

from fednoro.core.training import Augment, Training
from fednoro.core.types import FedNoRoWarning, Reply, Site, State, Task, Weights
from fednoro.engine.cuda.cuda_engine import CudaEngine
from fednoro.engine.cuda.cuda_lane import CudaLane
from fednoro.engine.cuda.training_request import Request
from fednoro.engine.eager import EagerEngine
from fednoro.engine.lane import batches, schedule
from fednoro.experiment.rounds import Evaluation, play
from fednoro.methods import Method
from fednoro.models import Packed

pytestmark = pytest.mark.usefixtures("one_thread")

START = Packed(network()).weights()
GIVEN = (Training(batch=BATCH, epochs=3, lr=1e-3), 5, torch.device("cpu"))


def engine(kind: Any = CudaEngine, build: Any = network, **options: Any) -> Any:
    data, clients = federation()
    return kind(build, data, 1, *GIVEN, clients, **options)


def tasks(lab: EagerEngine) -> dict[int, Task]:
    return {k: Task("train", 0, START) for k in lab.clients}


class Keeping(nn.Module):
    """A network that keeps what it computed, which cannot be copied then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.inner(x)
        return self.seen


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_network_that_keeps_its_outputs_can_be_had_once_more_after_training(
    precision: str,
) -> None:
    lab = engine(build=Keeping, lanes=3, precision=precision)
    everybody = tasks(lab)
    for asked in ({0: everybody[0]}, everybody):
        replies = list(lab.exchange(Method(), asked))
        assert all(isinstance(reply, Reply) for reply in replies), replies
    assert len(lab.lanes) == 3


def test_where_memory_holds_one_lane_everybody_is_served_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = engine(lanes=3)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(lab, "_make_lane", full)
    replies = list(lab.exchange(Method(), tasks(lab)))
    assert len(lab.lanes) == 1 and all(isinstance(reply, Reply) for reply in replies)


@pytest.mark.parametrize("at", [1, 2, 4])
def test_where_memory_runs_out_among_several_lanes_everybody_is_served_in_fewer(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    lab = engine(lanes=3)
    expected = list(engine(lanes=3).exchange(Method(), tasks(lab)))
    run, calls = CudaLane.run, list[int]()

    def scarce(*args: Any) -> Tensor:
        calls.append(1)
        if len(calls) == at:
            raise torch.OutOfMemoryError
        return run(*args)

    monkeypatch.setattr(CudaLane, "run", scarce)
    with pytest.warns(FedNoRoWarning, match="memory ran out: going on with 2 streams"):
        found = list(lab.exchange(Method(), tasks(lab)))
    assert [reply.client for reply in found] == list(lab.clients)
    assert all(same(a.weights, b.weights) for a, b in zip(found, expected, strict=True))


@dataclass(frozen=True)
class Emptied(Method):
    """The first client sends no model worth the name."""

    def work(self, task: Task, site: Site) -> Reply:
        empty = Weights(torch.empty(0), torch.empty(0, dtype=torch.int64))
        reply = super().work(task, site)
        return replace(reply, weights=empty) if site.client == 0 else reply


@pytest.mark.parametrize("kind", [EagerEngine, CudaEngine])
def test_a_reply_with_an_empty_model_fails_alone(kind: Any) -> None:
    lab = engine(kind)
    unmeasured = Evaluation(np.zeros((CLASSES, CLASSES), dtype=np.int64), 0.0)
    state = State(START, 0, 1, CLASSES, 0)
    (turn,) = play(Emptied(), state, lab.exchange, sorted(lab.clients), lambda _: unmeasured)
    assert [answer.status for answer in turn.answers] == [
        "failed",
        *["ok"] * (len(lab.clients) - 1),
    ]
    assert turn.answers[0].reason.startswith("sent a model of 0 values")


@pytest.mark.parametrize("room", [1, 3, 1000], ids=lambda count: f"{count} batches in a block")
def test_others_have_their_turn_after_so_many_steps_however_many_fit_into_a_block(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("fednoro.engine.cuda.cuda_lane.PAUSE", 2)
    lab = engine()
    client, task = lab.clients[0], Task("train", 0, START)
    monkeypatch.setattr(lab.lane, "block", min(lab.lane.block, room * BATCH))
    size = len(client.index)
    epochs = list(schedule(0, task, 0, size, 0, 2, Augment()))
    turns: list[int] = []
    request = Request(task, client, Method().loss, {}, 0, {}, epochs, lab.lane)
    request.train_alone(lab.images, lambda: turns.append(1))
    assert len(turns) == 2 * len(batches(size, BATCH)) // 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_clients_whose_steps_are_queued_in_turn_have_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    lab = engine(lanes=3, precision=precision)
    expected = list(lab.exchange(Method(), tasks(lab)))
    monkeypatch.setattr("fednoro.engine.cuda.cuda_lane.PAUSE", 1)
    found = list(lab.exchange(Method(), tasks(lab)))
    assert all(same(a.weights, b.weights) for a, b in zip(found, expected, strict=True))
