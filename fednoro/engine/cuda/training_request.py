"""A client's wish to be trained, which a lane or a stack fulfils."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednoro.core.types import Step, Task, Weights
from fednoro.data.client import Client
from fednoro.engine.cuda.cuda_lane import CudaLane
from fednoro.engine.cuda.graph_capture import Inputs, kind_of_step
from fednoro.engine.images import DRAWS, Images
from fednoro.engine.lane import Epoch, batches


@dataclass
class Request:
    """One client's wish to be trained."""

    task: Task
    client: Client
    loss: Callable[[Step], Tensor]
    aux: Mapping[str, Tensor]
    draws: int
    rows: Mapping[str, Tensor]
    epochs: Sequence[Epoch]
    lane: CudaLane  # for what it does alone
    # trained weights and mean loss: queued, not yet there
    answer: tuple[Weights, Tensor] | None = None

    @property
    def kind(self) -> Any:
        """Equal for those who can be trained together."""
        step = kind_of_step(self.loss, self.aux, self.rows, self.draws)
        return step, id(self.task.weights.values), len(self.epochs)

    @property
    def size(self) -> int:
        return len(self.client.index)

    def inputs(self) -> Inputs:
        """What a lane reads, on its way to the GPU."""
        lane, draws = self.lane, DRAWS + self.draws
        order = (
            np.concatenate([e.order for e in self.epochs]) if self.epochs else np.empty(0, np.int64)
        )
        u = (
            np.concatenate([e.u for e in self.epochs])
            if self.epochs
            else np.empty((0, draws), np.float32)
        )
        sizes = batches(self.size, lane.training.batch) * len(self.epochs)
        with torch.cuda.stream(lane.stream):
            labels = self.client.labels.cpu().numpy()
            positions, y, order_tensor, u_tensor = map(
                lane.upload, (self.client.index, labels, order, u)
            )
        return Inputs(positions, y, order_tensor, u_tensor, self.rows, self.aux, sizes)

    def train_alone(
        self, images: Images, pause: Callable[[], Any] = lambda: None
    ) -> tuple[Weights, Tensor]:
        """In its lane; `pause` is called between steps."""
        lane, data = self.lane, self.inputs()
        with torch.cuda.stream(lane.stream):
            program = lane.program(self.loss, data, self.draws)
            total = lane.run(program, images, self.task.weights, data, pause)
            weights = lane.weights_after(program, self.task.weights, data.sizes)
            return weights, total / max(self.size * len(self.epochs), 1)
