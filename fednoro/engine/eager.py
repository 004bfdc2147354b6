"""The plain loop on any device: one client after another, one batch after another.

It is the reference that every faster engine is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fednoro.core.seeds import generator, torch_seed
from fednoro.core.training import Training
from fednoro.core.types import Failure, FloatArray, IntArray, Reply, Step, Task, Weights
from fednoro.data.client import Client
from fednoro.data.dataset import Dataset
from fednoro.engine.images import DRAWS, Images
from fednoro.engine.lane import (
    EVALUATION_BATCH,
    Lane,
    batches,
    blocks,
    normalise_by_running_statistics,
    room,
    schedule,
)
from fednoro.methods import Method
from fednoro.models import Packed


class EagerEngine:
    """Runs local work for simulated clients on one device."""

    name = "eager"
    evaluation_batch: int = EVALUATION_BATCH

    def __init__(
        self,
        network: Callable[[], nn.Module],
        dataset: Dataset,
        inputs: int,
        training: Training,
        seed: int,
        device: torch.device,
        clients: Sequence[Client] = (),
        images: Images | None = None,
        resident: bool = True,
    ) -> None:
        if device.type == "cuda":
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            # A reference that keeps all of float32's digits, whatever engine there was before.
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        self.device, self.seed, self.training = device, seed, training
        self.classes = len(dataset.classes)
        self.images = images or Images(dataset.images, inputs, training.augment, device, resident)
        self.lane = Lane(network(), device)
        self.room = room(inputs * dataset.images.shape[1] * dataset.images.shape[2], training.batch)
        self.serve(clients)

    def serve(self, clients: Iterable[Client]) -> None:
        """From now on, tasks are for these clients."""
        self.clients = {client.id: client for client in clients}

    @property
    def net(self) -> Packed:
        return self.lane.net

    def describe(self) -> str:
        """The engine in a few words, for people."""
        return f"{self.name} on {self.device}"

    def check_halted(self) -> None:
        """Raises where the work is no longer wanted; one client at a time can always finish."""

    def seed_torch(self, task: Task, client: int) -> AbstractContextManager[None]:
        """Seeds torch's own generator for a client's training:
        dropout and the like draw from it.
        """
        return torch_seed(self.seed, f"{task.name}.network", task.round, client)

    def site(self, client: Client) -> EagerSite:
        return EagerSite(self, self.lane, client)

    def exchange(self, method: Method, tasks: Mapping[int, Task]) -> Iterator[Reply | Failure]:
        """Each client's answer, in client order; a client that raises becomes a `Failure`."""
        for k in sorted(tasks):
            yield reply_or_failure(k, lambda k=k: method.work(tasks[k], self.site(self.clients[k])))  # type: ignore[misc]

    def logits(self, weights: Weights, index: IntArray) -> Tensor:
        """Outputs in eval mode for the images at `index`, N×C."""
        parts = self.parts(index)
        return self.lane.logits(self.images, weights, parts, [None] * len(parts))

    def parts(self, array: NDArray[Any]) -> Sequence[Tensor]:
        """Indices, or whatever else there is of each image, cut into batches for evaluation."""
        return torch.split(self.upload(array), self.evaluation_batch)

    def upload(self, array: NDArray[Any]) -> Tensor:
        """An array on the engine's device."""
        return torch.from_numpy(array).to(self.device)

    def counts(self, client: Client) -> Tensor:
        """How many labels of each class a client has."""
        return torch.bincount(client.labels.cpu(), minlength=self.classes).to(self.device)

    def recalibrate(self, weights: Weights, client: Client) -> Weights:
        """`weights` with BatchNorm's running statistics re-estimated on the client's images,
        of which it needs two.
        """
        return self.lane.recalibrate(self.images, weights, client.index)


def reply_or_failure(client: int, work: Callable[[], Reply]) -> Reply | Failure:
    """A client's answer; an exception is one as well."""
    try:
        return work()
    except Exception as error:
        return failure(client, error)


def failure(client: int, error: Exception) -> Failure:
    return Failure(client, f"{type(error).__name__}: {error}", error)


@dataclass
class EagerSite:
    """One client's data on the engine's device."""

    engine: EagerEngine
    lane: Lane
    data: Client

    @property
    def client(self) -> int:
        return self.data.id

    @property
    def classes(self) -> int:
        return self.engine.classes

    @property
    def memory(self) -> dict[str, Tensor]:
        return self.data.memory

    @property
    def size(self) -> int:
        return len(self.data.index)

    @property
    def labels(self) -> Tensor:
        return self.data.labels.to(self.engine.device)

    @property
    def counts(self) -> Tensor:
        return self.engine.counts(self.data)

    def train(
        self,
        task: Task,
        loss: Callable[[Step], Tensor],
        aux: Mapping[str, Tensor],
        draws: int = 0,
        epochs: int | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> tuple[Weights, Tensor]:
        """Local epochs from `task.weights` with a fresh Adam:
        the trained weights and the mean loss.
        """
        engine, lane, options = self.engine, self.lane, self.engine.training
        device = engine.device
        lane.load(task.weights)
        positions, labels = torch.from_numpy(self.data.index).to(device), self.labels
        total, image_count = torch.zeros((), device=device), 0
        lane.net.net.train()
        with engine.seed_torch(task, self.client):
            count = options.epochs if epochs is None else epochs
            for epoch in schedule(
                engine.seed, task, self.client, self.size, draws, count, options.augment
            ):
                order, u = (
                    torch.from_numpy(epoch.order).to(device),
                    torch.from_numpy(epoch.u).to(device),
                )
                for first, last, _ in blocks(batches(self.size, options.batch), engine.room):
                    index, uniforms = order[first:last], u[first:last]
                    x = engine.images.batch(positions[index], uniforms[:, :DRAWS])
                    block = (
                        x,
                        labels[index],
                        index,
                        uniforms[:, DRAWS:],
                        *(v[index] for v in (rows or {}).values()),
                    )
                    for x, y, i, v, *r in zip(
                        *(torch.split(part, options.batch) for part in block), strict=True
                    ):
                        engine.check_halted()
                        row_values = dict(zip(rows or {}, r, strict=True))
                        normalise_by_running_statistics(lane.net.norms, alone=len(i) == 1)
                        value = loss(
                            Step(lane.net.net, lane.anchor.net, x, y, i, aux, v, row_values)
                        )
                        lane.descend(value, options)
                        total.add_(value.detach(), alpha=len(i))
                        image_count += len(i)
        return lane.net.weights(), total / max(image_count, 1)

    def logits(self, task: Task, weights: Weights, augment: bool = False) -> Tensor:
        """Outputs for all of the client's images in eval mode, N×C;
        on augmented images if asked.
        """
        if not augment:
            return self._outputs(weights)
        rng = generator(self.engine.seed, f"{task.name}.augment", task.round, self.client)
        return self._outputs(weights, rng.random((self.size, DRAWS), dtype=np.float32))

    def features(self, weights: Weights) -> Tensor:
        """The penultimate layer for all of the client's images in eval mode, N×d."""
        return self._outputs(weights, features=True)

    def _outputs(
        self, weights: Weights, u: NDArray[np.float32] | None = None, features: bool = False
    ) -> Tensor:
        parts = self._batches(self.data.index)
        uniforms = [None] * len(parts) if u is None else self._batches(u)
        return self.lane.logits(self.engine.images, weights, parts, uniforms, features)[: self.size]

    def _batches(self, array: NDArray[Any]) -> Sequence[Tensor]:
        """Something of each image, in the batches that are evaluated;
        the last one may go on after the last image.
        """
        return self.engine.parts(array)

    def to_array(self, tensor: Tensor) -> FloatArray:
        """A tensor for `Reply.arrays`."""
        return tensor.detach().cpu().double().numpy()
